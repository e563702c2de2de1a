//! A received request in the hands of the application.

use std::rc::Rc;

use crate::connection::Connection;
use crate::endpoint::Endpoint;
use crate::error::ReplyError;
use crate::link::Request;
use crate::ring::RecvBytes;
use crate::wire::Status;

/// A request to be answered, at any time and in any order. Its bytes stay in the receive ring, unharmed, until then; the ring behind
/// the oldest unanswered request is not reused, so do not hold one for ever.
///
/// Dropped without a reply, it answers the caller with [`CallFailure::Dropped`](crate::error::CallFailure::Dropped).
#[derive(Debug)]
#[must_use = "dropping a request answers it with an error"]
pub struct RecvHandle<U> {
    connection: Rc<Connection<U>>,
    request: Request,
    is_answered: bool,
}

impl<U> RecvHandle<U> {
    #[inline]
    pub(crate) const fn new(connection: Rc<Connection<U>>, request: Request) -> Self {
        Self { connection, request, is_answered: false }
    }

    /// The request's bytes, in place.
    #[must_use]
    #[inline]
    pub fn data(&self) -> RecvBytes<'_> {
        self.connection.recv_view().bytes(self.request.payload())
    }

    /// Most bytes a reply may have: what the caller allowed, rounded up.
    #[must_use]
    pub const fn max_reply(&self) -> usize {
        self.request.max_reply()
    }

    /// The endpoint it came from.
    pub fn endpoint(&self) -> Endpoint<U> {
        Endpoint::new(Rc::clone(&self.connection))
    }

    /// Answers. Never fails for want of ring space or credit; as a call, it leaves with the next poll or flush.
    ///
    /// # Errors
    /// [`ReplyError::TooLarge`] with this handle, or the connection has ended.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), ReplyError<Self>> {
        let outcome = self.connection.link().respond(&self.request, Status::Ok, payload);
        if let Err(error) = outcome {
            return Err(error.map_request(|()| self));
        }
        self.note_answer();
        Ok(())
    }

    /// Answers with [`CallFailure::Refused`](crate::error::CallFailure::Refused).
    ///
    /// # Errors
    /// The connection has ended.
    pub fn refuse(mut self) -> Result<(), ReplyError<Self>> {
        match self.answer_without_payload(Status::Refused) {
            Ok(()) => Ok(()),
            Err(error) => Err(error.map_request(|()| self)),
        }
    }

    #[inline(never)]
    fn answer_without_payload(&mut self, status: Status) -> Result<(), ReplyError<()>> {
        self.connection.link().respond(&self.request, status, &[])?;
        self.note_answer();
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        if self.answer_without_payload(Status::Dropped).is_err() {
            // The connection has ended: nobody waits for the answer.
            self.connection.let_go(&self.request);
        }
    }

    #[inline]
    fn note_answer(&mut self) {
        self.is_answered = true;
        self.connection.mark_dirty();
    }
}

impl<U> Drop for RecvHandle<U> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_answered {
            self.abandon();
        }
    }
}
