//! What can go wrong, one type per verb.

use shm::clients::JoinError;
use shm::dir::DirError;
use shm::plain::TypeShape;
use shm::region;

pub use crate::layout::ParameterError;

/// Why a server could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A parameter is out of range.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// There is no directory for it.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The region could not be created.
    #[error(transparent)]
    Region(#[from] region::CreateError),
}

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no directory for it.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The region could not be opened: no server, a dead one, or something else of that name.
    #[error(transparent)]
    Region(#[from] region::OpenError),
    /// Server and client were built for different payload types.
    #[error("the server has {server}; this client has {client}: build both from the same types and tag")]
    Types {
        /// The server's types.
        server: TypeShape,
        /// The client's types.
        client: TypeShape,
    },
    /// The region's header makes no sense.
    #[error("the server's region is damaged: {0}")]
    Damaged(ParameterError),
    /// The region is shorter than its header asks for.
    #[error("the server's region is damaged: it has {have} bytes and its header describes {need}")]
    Truncated {
        /// Bytes described.
        need: usize,
        /// Bytes present.
        have: usize,
    },
    /// No seat for another client.
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl ConnectError {
    /// Whether it may be otherwise soon: the server is not up yet, or its places are taken.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Region(error) => error.may_pass(),
            Self::Join(error) => error.may_pass(),
            _ => false,
        }
    }
}

/// The client that asked is not there any more; the answer was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("client {client} is gone; its answer was dropped")]
pub struct ClientGone {
    /// The client's number.
    pub client: usize,
}
