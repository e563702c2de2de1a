//! The errors of creating a server, connecting, calling and answering.

use std::io;

use copyrpc_calls::{ConnectFailure, OptionError, SessionEnd};
use copyrpc_shm::dir::DirError;
use copyrpc_shm::lock::LockError;
use copyrpc_shm::plain::TypeShape;
use copyrpc_shm::region;

use crate::token::Token;

/// The reason why a server could not be created, or a client could not connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// An option is outside its range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The directory cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The region could not be created.
    #[error(transparent)]
    Create(#[from] region::CreateError),
    /// The region could not be opened: there is no server, it is dead, or the file is not a region.
    #[error(transparent)]
    Region(#[from] region::OpenError),
    /// The region has another layout or version.
    #[error(
        "the server's region has magic {magic:#x}, version {version}: use programs of one build"
    )]
    Version {
        /// Magic number found.
        magic: u64,
        /// Layout version found.
        version: u32,
    },
    /// Server and client were built for different payload types.
    #[error(
        "the server has {server}; this client has {client}: build both from the same types and tag"
    )]
    Types {
        /// The server's types.
        server: TypeShape,
        /// The client's types.
        client: TypeShape,
    },
    /// The region's header is invalid.
    #[error("the server's region is damaged: {0}")]
    Damaged(OptionError),
    /// The region is shorter than its header asks for.
    #[error("the server's region is damaged: it has {have} bytes and its header describes {need}")]
    Truncated {
        /// Bytes that the header describes.
        need: usize,
        /// User bytes of the region.
        have: usize,
    },
    /// All entries are taken, maybe by clients that have ended: the server frees their entries when
    /// it polls.
    #[error(
        "all {max_clients} client entries are taken: end a client, or create the server with more; or try again if one just ended"
    )]
    Full {
        /// Number of entries.
        max_clients: usize,
    },
    /// The lock that proves the client alive cannot be taken.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The client has calls that have not ended: poll until the end of the session first.
    #[error("{0} calls have not ended: poll until the end of the session, then connect again")]
    CallsInFlight(usize),
    /// The thread of an [`AsyncClient`](crate::AsyncClient) or an
    /// [`AsyncServer`](crate::bytes::AsyncServer) could not be started, or has panicked.
    #[error("a thread of this end: {0}")]
    Thread(#[source] io::Error),
}

/// The reason why a client of an earlier server of the name has no connection: there is no server
/// of the name now, or it does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// No server has the name now, or it is full, and the client waited for one as long as it was
    /// told: [`ClientOptions::connect_timeout`](crate::ClientOptions::connect_timeout), or the time
    /// of `connect_within`. Retryable.
    #[error(
        "no server has the name now, or it is full: try again, or wait for it (connect_timeout, connect_within)"
    )]
    Absent,
    /// The types or the tag of the server differ from the types or the tag of the client: build
    /// both from the same source.
    #[error(
        "the server that has the name now has other types or another tag: build both from the same"
    )]
    Types,
    /// The server's region has another layout or version: use programs of one build.
    #[error("the server that has the name now has another version: use programs of one build")]
    Version,
    /// The server's directory or its region cannot be used; `connect` returns the reason.
    #[error(
        "the directory or region of the server that has the name now cannot be used: connect returns the reason"
    )]
    Unusable,
}

impl ConnectFailure for Misfit {
    fn may_pass(&self) -> bool {
        *self == Self::Absent
    }

    fn again(&self) -> Self {
        *self
    }
}

/// The reason why a call has no reply.
pub type ClientError = copyrpc_calls::ClientError<Misfit, SessionEnd>;

impl SetupError {
    /// Returns the error of a call that needed the connection.
    pub(crate) fn of_call(&self) -> ClientError {
        match self {
            error if error.may_pass() => ClientError::Connect(Misfit::Absent),
            Self::Types { .. } => ClientError::Connect(Misfit::Types),
            Self::Version { .. } => ClientError::Connect(Misfit::Version),
            _ => ClientError::Connect(Misfit::Unusable),
        }
    }

    /// Returns whether another attempt may succeed soon: the server is not up yet, or it is full.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Region(error) => error.may_pass(),
            error => matches!(error, Self::Full { .. }),
        }
    }
}

/// The reason why an answer was not delivered.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The client closed or died; the answer was discarded.
    #[error("client {client} is gone; its answer was dropped")]
    ClientGone {
        /// The client's number.
        client: usize,
    },
    /// Another server received the request of this token; that server ends its call.
    #[error("this request of client {client} was received by another server, which ends the call")]
    ForeignToken {
        /// The client's number, at that server.
        client: usize,
    },
    /// The answer is longer than the server's maximum ([`bytes`](crate::bytes) only). The request
    /// still waits for an answer.
    #[error("an answer of {bytes} bytes: this server was created for at most {max}")]
    TooLarge {
        /// The token of the request.
        token: Token,
        /// Length of the answer.
        bytes: usize,
        /// Maximum length.
        max: usize,
    },
}
