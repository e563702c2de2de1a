//! Errors of a device of libibverbs, with advice.

use std::io;

/// A refused call of libibverbs or of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}{}{advice}", io::Error::from_raw_os_error(*errno), if advice.is_empty() { "" } else { "; " })]
pub struct CallError {
    /// Name of the function.
    pub call: &'static str,
    /// Error number of the function, as in `errno.h`.
    pub errno: i32,
    /// Advice; empty if the remedy depends on the case.
    pub advice: String,
}

impl CallError {
    pub(crate) fn new(call: &'static str, errno: i32) -> Self {
        Self {
            call,
            errno,
            advice: String::new(),
        }
    }

    /// Makes the error of a call that returned a null pointer and set `errno`.
    pub(crate) fn last(call: &'static str) -> Self {
        Self::new(call, io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    pub(crate) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }

    /// Checks the result of a call that returns 0 or an error number of either sign. A result of -1
    /// means that the call has set `errno`.
    pub(crate) fn check(call: &'static str, result: i32) -> Result<(), Self> {
        match result {
            0 => Ok(()),
            -1 => Err(Self::last(call)),
            n => Err(Self::new(call, n.saturating_abs())),
        }
    }
}

/// The reason why a device of libibverbs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// A library is not installed.
    #[error(
        "{library} cannot be loaded ({reason}); install it (Debian: apt-get install libibverbs1 ibverbs-providers)"
    )]
    NotInstalled {
        /// The library's file.
        library: &'static str,
        /// The loader's message.
        reason: String,
    },
    /// A library is too old.
    #[error(
        "{library} has no {symbol}@{version}; install rdma-core 33 or later (Debian 11: apt-get install libibverbs1 ibverbs-providers)"
    )]
    TooOld {
        /// The library's file.
        library: &'static str,
        /// The missing function.
        symbol: &'static str,
        /// The function's version.
        version: &'static str,
    },
    /// The system shows no device.
    #[error("this machine has no RDMA device that libibverbs can use: {hint}")]
    NoDevice {
        /// Likely cause.
        hint: String,
    },
    /// No device has that name.
    #[error("there is no RDMA device {name:?}; there are: {}", .there.join(", "))]
    NoSuchDevice {
        /// The requested name, or position in the list.
        name: String,
        /// Names of the devices that exist.
        there: Vec<String>,
    },
    /// An iWARP device.
    #[error(
        "{name} is an iWARP device, whose connections need rdma_cm: use an InfiniBand or RoCE device"
    )]
    Iwarp {
        /// The device.
        name: String,
    },
    /// This process may not open the device's file.
    #[error(
        "no permission to open {path} of {name}: run as a member of the group that owns it (often rdma: usermod -aG rdma USER), or make \
         it readable and writable for you"
    )]
    Permission {
        /// The device.
        name: String,
        /// The device's file.
        path: String,
    },
    /// The device has no such port.
    #[error("{name} has {ports} port(s), numbered from 1; port {port} was asked for")]
    NoSuchPort {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// Number of ports.
        ports: u8,
    },
    /// The port carries no traffic.
    #[error("port {port} of {name} is {state}, not active: {hint}")]
    PortDown {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The port's state.
        state: PortState,
        /// Likely cause.
        hint: &'static str,
    },
    /// The port's table has no GID at that index.
    #[error("port {port} of {name} has no GID at index {index}; it has: {}", if .there.is_empty() { "none".to_owned() } else { .there.join(", ") })]
    NoGid {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The index.
        index: u8,
        /// Index, type and value of the GIDs that exist.
        there: Vec<String>,
    },
    /// The port's table of partition keys ends before that index.
    #[error("port {port} of {name} has {entries} P_Keys; index {index} was asked for")]
    NoPkey {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The index.
        index: u16,
        /// Number of entries of the table.
        entries: u16,
    },
    /// An option is outside its range.
    #[error("{option} is {value}; legal is {legal}")]
    Option {
        /// The option.
        option: &'static str,
        /// The requested value.
        value: u32,
        /// The legal range.
        legal: &'static str,
    },
    /// The device's firmware or the kernel writes completions in a format from before 2015.
    #[error("{name} has CQEs of version 0; update its firmware and the kernel")]
    OldCqes {
        /// The device.
        name: String,
    },
    /// A call was refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum PortState {
    /// No cable, or the other end is off.
    Down,
    /// The link is up; on InfiniBand the subnet manager has not configured it.
    #[strum(to_string = "initializing")]
    Initialize,
    /// Configured, and not yet in use.
    Armed,
    /// Carries traffic.
    Active,
    /// Any other state.
    #[strum(to_string = "in state {0}")]
    Other(u8),
}

impl PortState {
    pub(crate) fn of(state: i32) -> Self {
        match state {
            1 => Self::Down,
            2 => Self::Initialize,
            3 => Self::Armed,
            4 => Self::Active,
            n => Self::Other(n as u8),
        }
    }

    pub(crate) fn hint(self) -> &'static str {
        match self {
            Self::Initialize | Self::Armed => {
                "a subnet manager must configure it; start one (opensm) or ask who runs it"
            }
            _ => "look at the cable and at the other end; ibstat or rdma link say more",
        }
    }
}
