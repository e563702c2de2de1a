//! The reason why an end of a connection could not be made.

use std::io;

use copyrpc_calls::{ConnectFailure, OptionError};
use mlx5::{AsyncEvent, ConnectError, CreateError, OpenError, PostReceiveError, RegisterError};
use thiserror::Error;

use crate::reach::stream_has_ended;
use crate::record::{RecordError, Refusal};

/// The reason why a client, a server, a connection or one end of it could not be made, or why a
/// server cannot continue.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// No server was reached: the address is invalid, or no server listens there.
    #[error("connecting to the server at {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// The server cannot listen at the address.
    #[error("listening at {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// The thread of an asynchronous client or server could not be started, or has panicked.
    #[error("a thread of this end: {0}")]
    Thread(#[source] io::Error),
    /// An option is outside its range, or does not fit the peer's.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// No room is left for another peer. There is room again when a peer disconnects, or with a
    /// different value of the option that the error states.
    #[error("no room for one more peer: {0}")]
    Full(OptionError),
    /// The function must not be called now, and did nothing.
    #[error("{0}")]
    Misuse(&'static str),
    /// The device could not be opened.
    #[error("opening the device: {0}")]
    Open(#[from] OpenError),
    /// A queue could not be created.
    #[error("creating a queue: {0}")]
    Queue(#[from] CreateError),
    /// Memory could not be allocated, or registered with the device.
    #[error("memory for the device: {0}")]
    Memory(#[from] RegisterError),
    /// A receive could not be posted.
    #[error("posting a receive: {0}")]
    Receive(#[from] PostReceiveError),
    /// The device, or one of its queues, broke down: all peers are lost. A new server or context
    /// opens the device again, and may work.
    #[error("the device broke down ({0}): make a new server or context")]
    Broken(AsyncEvent),
    /// The stream over which the two ends exchange records failed.
    #[error("exchanging records: {0}")]
    Channel(#[from] io::Error),
    /// The peer could not connect its end. The reason is in the peer's own error.
    #[error(
        "the peer could not connect its end, and has the reason: its own error, or ServerOptions::events of a server"
    )]
    NotConnectedThere,
    /// The peer's bytes are not a record, the peer refuses, or a number of its record is outside
    /// its range.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The address of the peer's queue pair is malformed: a kind, MTU, QPN or PSN that does not
    /// exist, or reserved bytes that are not 0.
    #[error("the peer's record has no valid address of a queue pair")]
    Address,
    /// The queue pair could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

impl SetupError {
    /// Returns whether the client's next attempt may succeed soon: the server closed the stream
    /// while this client waited or exchanged records; the server has no room until another client
    /// has disconnected, such as the predecessor of this client; or the error of the software HCA
    /// may pass.
    pub(crate) fn may_come(&self) -> bool {
        match self {
            Self::Channel(error) => stream_has_ended(error),
            Self::Connect(error @ ConnectError::Soft(_)) => error.may_pass(),
            error => matches!(error, Self::Record(RecordError::Refused(Refusal::Full))),
        }
    }
}

impl ConnectFailure for SetupError {
    fn may_pass(&self) -> bool {
        match self {
            Self::Record(error) => error.may_pass(),
            Self::Connect(error) => error.may_pass(),
            Self::Thread(_) | Self::Option(_) | Self::Misuse(_) | Self::Address => false,
            _ => true,
        }
    }

    /// Returns a copy of the error. An error that cannot be copied becomes [`SetupError::Channel`]
    /// with its text.
    fn again(&self) -> Self {
        let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
        match self {
            Self::Unreachable { address, source } => Self::Unreachable {
                address: address.clone(),
                source: copy(source),
            },
            Self::Thread(error) => Self::Thread(copy(error)),
            Self::Option(error) => Self::Option(error.clone()),
            Self::Full(error) => Self::Full(error.clone()),
            Self::Misuse(what) => Self::Misuse(what),
            Self::Channel(error) => Self::Channel(copy(error)),
            Self::NotConnectedThere => Self::NotConnectedThere,
            Self::Record(error) => Self::Record(*error),
            Self::Address => Self::Address,
            Self::Connect(error) => Self::Connect(error.clone()),
            error => Self::Channel(io::Error::other(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused access is refused in later attempts too; a device that does not exist yet may be
    /// created.
    #[test]
    fn a_refused_access_is_not_tried_again() {
        use mlx5::hca::ConnectError::{NoAccess, NoSuchDevice};
        let refused = |error| SetupError::Connect(ConnectError::Soft(error)).may_come();
        assert!(!refused(NoAccess {
            lid: 1,
            reason: String::new()
        }));
        assert!(refused(NoSuchDevice {
            lid: 1,
            reason: String::new()
        }));
    }

    #[test]
    fn a_copy_of_a_permanent_error_is_permanent() {
        let permanent = [
            SetupError::Thread(io::ErrorKind::OutOfMemory.into()),
            SetupError::Option(OptionError::new("ring_size", 1, "a power of two")),
            SetupError::Misuse("not now"),
            SetupError::Record(RecordError::Refused(Refusal::WrongSecret)),
            SetupError::Record(RecordError::Version {
                name: "",
                version: 2,
                known: 1,
            }),
            SetupError::Connect(ConnectError::NoGid),
            SetupError::Address,
        ];
        for error in permanent {
            assert!(!error.may_pass() && !error.again().may_pass(), "{error}");
            assert_eq!(error.again().to_string(), error.to_string());
        }
    }

    #[test]
    fn an_error_that_may_pass_has_its_text_in_a_copy() {
        let io = || io::Error::other("test");
        let passing = [
            SetupError::Unreachable {
                address: "here".to_owned(),
                source: io(),
            },
            SetupError::Full(OptionError::new("clients", 1, "more than 1")),
            SetupError::Channel(io()),
            SetupError::NotConnectedThere,
            SetupError::Record(RecordError::Refused(Refusal::Full)),
            SetupError::Broken(AsyncEvent::DeviceFatal),
        ];
        for error in passing {
            let copy = error.again();
            assert!(error.may_pass() && copy.may_pass(), "{error}");
            assert!(copy.to_string().contains(&error.to_string()), "{copy}");
        }
    }
}
