//! The duty to answer.

use std::fmt;
use std::sync::Arc;

use crate::mesh::{Asked, Mesh};

/// The duty to answer a received call, 24 bytes. It can be kept anywhere, also as the user data of another call.
///
/// Dropping it, on whatever thread, ends the call with [`CallFailed::Rejected`](crate::CallFailed::Rejected): the node that received the call tells the caller in its next
/// [`poll`](crate::Node::poll), for which [`wait`](crate::Node::wait) wakes it.
#[must_use = "a token that is dropped rejects its call"]
pub struct Token<T> {
    pub(crate) asked: Asked,
    /// The network; `None` once the call is answered.
    pub(crate) mesh: Option<Arc<Mesh<T>>>,
}

impl<T> fmt::Debug for Token<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("from", &self.asked.from).field("to", &self.asked.to).finish_non_exhaustive()
    }
}

impl<T> Drop for Token<T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(mesh) = self.mesh.take() {
            mesh.reject(self.asked);
        }
    }
}
