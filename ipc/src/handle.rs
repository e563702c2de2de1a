//! A received request.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use calls::{ANSWERED, REJECTED};
use shm::plain::Plain;
use shm::sessions::Asker;

use crate::error::ClientGone;
use crate::server::Inner;

/// A request that waits for its answer. Handles can be kept and answered in any order, also after others that came later.
///
/// Dropping one without an answer ends the client's call with [`CallFailed::Rejected`](crate::CallFailed::Rejected).
pub struct RecvHandle<Req: Plain, Resp: Plain> {
    from: Asker,
    data: Req,
    /// `None` once answered.
    server: Option<Rc<RefCell<Inner<Req, Resp>>>>,
}

impl<Req: Plain + fmt::Debug, Resp: Plain> fmt::Debug for RecvHandle<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHandle").field("client", &self.client()).field("data", &self.data).finish()
    }
}

impl<Req: Plain, Resp: Plain> RecvHandle<Req, Resp> {
    #[inline(always)]
    pub(crate) fn new(from: Asker, data: Req, server: Rc<RefCell<Inner<Req, Resp>>>) -> Self {
        Self { from, data, server: Some(server) }
    }

    /// The number of the client that asks, below `max_clients`.
    #[must_use]
    pub fn client(&self) -> usize {
        self.from.client()
    }

    /// The request: a copy that the client cannot change any more.
    #[must_use]
    pub fn data(&self) -> &Req {
        &self.data
    }

    /// Answers the request. The client can see the answer when this returns; nothing has to be flushed, and nothing can be full.
    ///
    /// # Errors
    /// [`ClientGone`] if the client left or died meanwhile and the server knows.
    #[inline(always)]
    pub fn reply(self, response: Resp) -> Result<(), ClientGone> {
        self.reply_with(|| response)
    }

    /// Answers with what `make` gives, which is called if the client is there and while the place of the answer is the server's.
    #[inline(always)]
    pub(crate) fn reply_with(mut self, make: impl FnOnce() -> Resp) -> Result<(), ClientGone> {
        self.answer(ANSWERED, make)
    }

    /// The slot of the client's call; any number below 2^24, if the client is broken.
    pub(crate) fn slot(&self) -> usize {
        self.from.tag().slot()
    }

    /// Ends the session of the client, which has broken the protocol.
    pub(crate) fn evict(mut self) {
        if let Some(server) = self.server.take() {
            server.borrow().sessions.evict(&self.from);
        }
    }

    #[cold]
    fn reject(&mut self) {
        // In a forked child the memory is not there, and the request is the parent's.
        if self.server.as_ref().is_some_and(|server| server.borrow().is_here()) {
            // A client that is gone needs no answer.
            let _ = self.answer(REJECTED, Resp::new_zeroed);
        }
    }

    #[inline(always)]
    fn answer(&mut self, note: u8, make: impl FnOnce() -> Resp) -> Result<(), ClientGone> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let is_there = server.borrow_mut().sessions.answer(&self.from, note, make);
        if is_there { Ok(()) } else { Err(ClientGone { client: self.client() }) }
    }
}

impl<Req: Plain, Resp: Plain> Drop for RecvHandle<Req, Resp> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.server.is_some() {
            self.reject();
        }
    }
}
