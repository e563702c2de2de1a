//! An accepted request, and the place of its response.

use crate::protocol::buffers::Buffer;
use crate::protocol::wire::ReqId;

/// The name of a client of a server: the number of its endpoint entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u16);

impl ClientId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The addresses and keys of a client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientRegions {
    /// Address of the client's staging slots.
    pub requests_addr: u64,
    /// Key of the staging slots.
    pub requests_rkey: u32,
    /// Address of the client's response slots.
    pub responses_addr: u64,
    /// Key of the response slots.
    pub responses_rkey: u32,
}

/// A request that a worker has, and answers by [`Server::reply`](crate::protocol::Server::reply).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The client.
    pub client: ClientId,
    pub(crate) generation: u32,
    pub(crate) id: ReqId,
    /// The number of the handler.
    pub rpc_type: u16,
    /// Payload bytes.
    pub len: u32,
    /// Buffer of the response; `None` while the request is held.
    pub(crate) buffer: Option<Buffer>,
}
