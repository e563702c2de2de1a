//! Asynchronous events of a device.

use core::fmt;

/// An event of a device, of its port, or of an object that cannot report it by a completion
/// (`enum ibv_event_type`, `ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue had no room for a completion. The queue gets no more completions, and
    /// every queue pair that would write a completion to it fails.
    CqError {
        /// The queue's number.
        cqn: u32,
    },
    /// A queue pair went to the error state for a reason that none of its completions reports.
    QpFatal {
        /// The queue pair's number.
        qpn: u32,
    },
    /// The queue pair refused a request of its peer, because the message is too long or the queue
    /// pair does not allow the operation, and went to the error state.
    QpRequestError {
        /// The queue pair's number.
        qpn: u32,
    },
    /// The queue pair refused an access of its peer to memory, and went to the error state.
    QpAccessError {
        /// The queue pair's number.
        qpn: u32,
    },
    /// A queue pair with a shared receive queue went to the error state, and the completions of all
    /// receives that it had taken are written.
    QpLastReceive {
        /// The queue pair's number.
        qpn: u32,
    },
    /// The device failed. None of its operations completes any more.
    DeviceFatal,
    /// The port carries traffic, for the first time or again.
    PortActive {
        /// Number of the port, from 1.
        port: u8,
    },
    /// The port does not carry traffic any more. Connections continue if the port recovers in time;
    /// otherwise they fail after their retries.
    PortError {
        /// Number of the port, from 1.
        port: u8,
    },
    /// Any other event: of a subnet manager, of a path, or of a kind of object that this crate does
    /// not create.
    Other {
        /// Number of the event in `enum ibv_event_type`.
        event_type: u32,
    },
}

impl AsyncEvent {
    /// Returns the number of the queue pair that went to the error state, which no completion may
    /// report. `None` for other events.
    #[must_use]
    pub const fn failed_qp(&self) -> Option<u32> {
        match self {
            Self::QpFatal { qpn } | Self::QpRequestError { qpn } | Self::QpAccessError { qpn } => {
                Some(*qpn)
            }
            _ => None,
        }
    }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CqError { cqn } => {
                write!(f, "completion queue {cqn:#x} had no room for a completion")
            }
            Self::QpFatal { qpn } => write!(f, "queue pair {qpn:#x} has failed"),
            Self::QpRequestError { qpn } => {
                write!(f, "queue pair {qpn:#x} has refused a request of its peer")
            }
            Self::QpAccessError { qpn } => {
                write!(f, "queue pair {qpn:#x} has refused an access of its peer")
            }
            Self::QpLastReceive { qpn } => {
                write!(
                    f,
                    "queue pair {qpn:#x} has failed and takes no more shared receives"
                )
            }
            Self::DeviceFatal => f.write_str("the device has failed"),
            Self::PortActive { port } => write!(f, "port {port} is up"),
            Self::PortError { port } => write!(f, "port {port} is down"),
            Self::Other { event_type } => write!(f, "asynchronous event {event_type}"),
        }
    }
}
