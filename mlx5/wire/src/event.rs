//! What a device reports beside completions.

use core::fmt;

/// What a device reports of itself, of its port, and of objects that cannot say it by a completion (`enum ibv_event_type`,
/// `ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue had no room for a completion. It gets no more, and every queue pair that has one for it breaks down.
    CqError {
        /// The queue's number.
        cqn: u32,
    },
    /// A queue pair broke down: it went to the error state for a reason that none of its completions tells.
    QpFatal {
        /// The queue pair's number.
        qpn: u32,
    },
    /// The device broke down: nothing of it completes any more.
    DeviceFatal,
    /// The port carries traffic, again or for the first time.
    PortActive {
        /// From 1.
        port: u8,
    },
    /// The port carries no traffic any more. Connections go on when it does in time, and fail by their retries when it does not.
    PortError {
        /// From 1.
        port: u8,
    },
    /// One that concerns nothing here: of a subnet manager, of paths, of kinds of objects that are not made.
    Other {
        /// Its number in `enum ibv_event_type`.
        event_type: u32,
    },
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CqError { cqn } => write!(f, "completion queue {cqn:#x} had no room for a completion"),
            Self::QpFatal { qpn } => write!(f, "queue pair {qpn:#x} broke down"),
            Self::DeviceFatal => f.write_str("the device broke down"),
            Self::PortActive { port } => write!(f, "port {port} is up"),
            Self::PortError { port } => write!(f, "port {port} is down"),
            Self::Other { event_type } => write!(f, "asynchronous event {event_type}"),
        }
    }
}
