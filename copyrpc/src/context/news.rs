//! The events that futures wait for.

use super::Inner;

impl<U> Inner<U> {
    /// Returns whether there is a request that was not received.
    pub(crate) fn has_requests(&self) -> bool {
        self.worklist.has_requests()
    }

    /// Returns whether there are connections that have not ended.
    pub(crate) fn has_connections(&self) -> bool {
        !self.connections.borrow().is_empty()
    }

    /// Returns the number of connections that have ended: it changes with each end.
    pub(crate) fn endings(&self) -> u64 {
        self.endings.get()
    }
}
