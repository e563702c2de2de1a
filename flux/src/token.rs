//! The identity of a call, for its caller, and the token of a received call.

use copyrpc_calls::Tag;

use crate::mesh::{self, Received};

/// The identity of one call of a node, until the call has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallToken {
    pub(crate) to: u32,
    pub(crate) tag: Tag,
}

/// The duty to answer a received call, 24 bytes. A token can be kept anywhere, also as the user
/// data of another call.
///
/// Dropping the token, on any thread, ends the call with
/// [`CallFailure::Dropped`](crate::CallFailure::Dropped): the node that received the call sends the
/// rejection in its next [`poll`](crate::Node::poll), and a [`wait`](crate::Node::wait) of the node
/// ends for it.
#[derive(Debug)]
#[must_use = "a token that is dropped rejects its call"]
pub struct Token {
    pub(crate) received: Received,
    pub(crate) network: u64,
}

impl Drop for Token {
    #[cold]
    fn drop(&mut self) {
        mesh::reject(self.network, self.received);
    }
}
