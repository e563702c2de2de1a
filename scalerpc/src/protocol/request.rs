//! A request that was accepted, and where its response goes.

use crate::protocol::mapping::ClientId;
use crate::protocol::wire::ReqId;

/// Where a client's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientRegions {
    /// Address of its staging slots.
    pub requests_addr: u64,
    /// Key of them.
    pub requests_rkey: u32,
    /// Address of its response slots.
    pub responses_addr: u64,
    /// Key of them.
    pub responses_rkey: u32,
}

/// A request that a worker has; to be answered by [`Server::reply`](crate::protocol::Server::reply).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    pub(crate) client: ClientId,
    pub(crate) generation: u32,
    pub(crate) id: ReqId,
    pub(crate) rpc_type: u16,
    pub(crate) len: u32,
    /// Where its response will be; `None` if clients READ, or as long as it is held.
    pub(crate) buffer: Option<u32>,
}

impl Request {
    /// Which handler.
    #[must_use]
    pub const fn rpc_type(&self) -> u16 {
        self.rpc_type
    }

    /// Who asks.
    #[must_use]
    pub const fn client(&self) -> ClientId {
        self.client
    }

    /// Payload bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the payload has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}
