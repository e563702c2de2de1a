//! What futures wait for.

use super::Inner;

impl<U> Inner<U> {
    /// A request that nobody received.
    pub(crate) fn has_requests(&self) -> bool {
        self.worklist.has_requests()
    }

    /// Connections that have not ended.
    pub(crate) fn has_connections(&self) -> bool {
        !self.connections.borrow().is_empty()
    }

    /// Connections that have ended: different whenever another one has.
    pub(crate) fn endings(&self) -> u64 {
        self.endings.get()
    }
}
