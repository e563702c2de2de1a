//! A received request.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use shm::plain::Plain;

use crate::error::ClientGone;
use crate::layout::{ANSWERED, DROPPED};
use crate::server::{Arrived, Inner};

/// A request that waits for its answer. Handles can be kept and answered in any order, also after others that came later.
///
/// Dropping one without an answer ends the client's call with [`CallFailed::Dropped`](crate::CallFailed::Dropped).
pub struct RecvHandle<Req: Plain, Resp: Plain> {
    arrived: Arrived<Req>,
    /// `None` once answered.
    server: Option<Rc<RefCell<Inner<Req, Resp>>>>,
}

impl<Req: Plain + fmt::Debug, Resp: Plain> fmt::Debug for RecvHandle<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHandle").field("client", &self.arrived.client).field("data", &self.arrived.payload).finish()
    }
}

impl<Req: Plain, Resp: Plain> RecvHandle<Req, Resp> {
    pub(crate) fn new(arrived: Arrived<Req>, server: Rc<RefCell<Inner<Req, Resp>>>) -> Self {
        Self { arrived, server: Some(server) }
    }

    /// The number of the client that asks, below `max_clients`.
    #[must_use]
    pub fn client(&self) -> usize {
        self.arrived.client
    }

    /// The request: a copy that the client cannot change any more.
    #[must_use]
    pub fn data(&self) -> &Req {
        &self.arrived.payload
    }

    /// Answers the request. The client can see the answer when this returns; nothing has to be flushed, and nothing can be full.
    ///
    /// # Errors
    /// [`ClientGone`] if the client left or died meanwhile and the server knows.
    #[inline]
    pub fn reply(self, response: Resp) -> Result<(), ClientGone> {
        self.reply_with(|| response)
    }

    /// Answers with what `make` gives, which is called if the client is there and while the place of the answer is the server's.
    #[inline]
    pub(crate) fn reply_with(mut self, make: impl FnOnce() -> Resp) -> Result<(), ClientGone> {
        self.answer(ANSWERED, make)
    }

    /// The slot of the client's call; any number below 2^24, if the client is broken.
    pub(crate) fn slot(&self) -> usize {
        self.arrived.tag.slot()
    }

    /// Ends the session of the client, which has broken the protocol.
    pub(crate) fn evict(mut self) {
        if let Some(server) = self.server.take() {
            server.borrow_mut().evict(&self.arrived);
        }
    }

    #[inline]
    fn answer(&mut self, note: u8, make: impl FnOnce() -> Resp) -> Result<(), ClientGone> {
        match self.server.take() {
            Some(server) => server.borrow_mut().answer(&self.arrived, note, make),
            None => Ok(()),
        }
    }
}

impl<Req: Plain, Resp: Plain> Drop for RecvHandle<Req, Resp> {
    fn drop(&mut self) {
        // In a forked child the memory is not there, and the request is the parent's.
        if self.server.as_ref().is_none_or(|server| !server.borrow().is_here()) {
            return;
        }
        // A client that is gone needs no answer.
        let _ = self.answer(DROPPED, Resp::new_zeroed);
    }
}
