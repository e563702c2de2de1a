//! The entry of the send ring: calls and replies.

use super::{CallKey, Held, Hold, Link, Request};
use crate::error::{CallError, ReplyError};
use crate::wire::{ALIGNMENT, CallId, METADATA_SPAN, Status, internal_allowance, padded};

/// Ring bytes that calls leave free. Twice the bytes that grants leave (64), so that under load
/// grants to the peer win over own calls and neither side starves (invariant L3).
pub(super) const CALL_SLACK: u64 = 128;

impl<U> Link<U> {
    /// Sends a request with room for a response of `response_allowance` payload bytes. Nothing is
    /// posted before [`Link::flush_all`]. A refused call changes nothing but the wish to READ.
    ///
    /// # Errors
    /// [`CallError`], which returns `user_data`. `RingFull` and `InsufficientCredit` are temporary.
    pub(crate) fn call(
        &mut self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
    ) -> Result<CallKey, CallError<U>> {
        let user_data = self.make_call_room(payload.len(), user_data, response_allowance)?;
        self.try_call(payload, user_data, response_allowance)
            .map_err(CallError::InsufficientCredit)
    }

    /// Makes a call, if room for it is known (S4), and there is a slot for it. Otherwise returns
    /// its user data and changes nothing: [`Link::call`] decides.
    #[inline(always)]
    pub(crate) fn try_call(
        &mut self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
    ) -> Result<CallKey, U> {
        let message = padded(payload.len() as u64);
        let allowance = internal_allowance(response_allowance as u64);
        let is_admitted = self.tx.admits_call(message)
            && self.limits.allow(message, allowance)
            && allowance <= self.credit.balance();
        if !is_admitted {
            return Err(user_data);
        }
        let key = self
            .calls
            .insert(user_data, allowance, self.tx.batches_sent())?;
        self.credit.spend(allowance);
        let blocks = (allowance / ALIGNMENT) as u32;
        // SAFETY: an admitted call fits the lap.
        unsafe { self.tx.append(key.id().to_request(), blocks, payload) };
        if self.calls.unanswered() == 1 {
            self.watch.news();
        }
        self.stats.calls += 1;
        Ok(key)
    }

    /// Decides whether a call is taken. Wraps if its message has to, and makes a slot. Returns the
    /// user data.
    fn make_call_room(
        &mut self,
        len: usize,
        user_data: U,
        response_allowance: usize,
    ) -> Result<U, CallError<U>> {
        if let Some(reason) = self.ending {
            return Err(CallError::Closed { user_data, reason });
        }
        let ring = self.tx.size();
        let message = padded(len as u64);
        if message > ring.max_message() {
            return Err(CallError::PayloadTooLarge {
                user_data,
                len,
                max: ring.max_payload() as usize,
            });
        }
        let allowance = internal_allowance(response_allowance as u64);
        if allowance > ring.max_internal_allowance() {
            return Err(CallError::AllowanceTooLarge {
                user_data,
                len: response_allowance,
                max: ring.max_response_allowance() as usize,
            });
        }
        if allowance > self.credit.balance() || !self.calls.make_room() {
            self.starved = true;
            self.stats.insufficient_credit += 1;
            return Err(CallError::InsufficientCredit(user_data));
        }
        // S4: decided for the whole span, wrap included, before any byte is written.
        let reserved = 2 * self.reservation.outstanding() + CALL_SLACK;
        if self.tx.in_flight() + self.tx.span_of(message) + reserved > ring.bytes() {
            self.starved = true;
            self.stats.ring_full += 1;
            return Err(CallError::RingFull(user_data));
        }
        self.tx.make_place(message);
        self.tx.open_to_calls(reserved);
        Ok(user_data)
    }

    /// Ends a call at once: returns its user data, which [`Link::next_event`] does not return.
    /// `None` if the call has ended already. The peer is not told; its response will be dropped
    /// (C3).
    pub(crate) fn cancel(&mut self, call: CallKey) -> Option<U> {
        let user_data = self.calls.abandon(call)?;
        self.stats.cancelled += 1;
        Some(user_data)
    }

    /// Ends a call that has not ended once `deadline_ns` has passed, in the clock of
    /// [`Link::expire`].
    pub(crate) fn end_at(&mut self, call: CallKey, deadline_ns: u64) {
        self.calls.end_at(call, deadline_ns);
    }

    /// Ends one call whose deadline is before `now_ns`, with
    /// [`TimedOut`](crate::CallFailure::TimedOut) (C4). Repeat it until `None`.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Option<U> {
        if self.closed.is_some() {
            return None;
        }
        let user_data = self.calls.expire(now_ns)?;
        self.stats.deadlines_exceeded += 1;
        Some(user_data)
    }

    /// Returns the earliest deadline of the calls that have not ended.
    pub(crate) fn next_deadline(&mut self) -> Option<u64> {
        if self.closed.is_some() {
            None
        } else {
            self.calls.next_deadline()
        }
    }

    /// Answers a request; in any order, at any time. Never fails for lack of ring space (S2).
    ///
    /// # Errors
    /// [`ReplyError`].
    #[inline(always)]
    pub(crate) fn respond(
        &mut self,
        request: &Request,
        status: Status,
        payload: &[u8],
    ) -> Result<(), ReplyError<()>> {
        let message = padded(payload.len() as u64);
        let has_place = message + METADATA_SPAN <= u64::from(request.internal_allowance)
            && self.tx.fits_lap(message);
        if !has_place {
            // By value, so that the common case needs none in memory.
            return self.wrap_and_respond(*request, status, payload);
        }
        let call_id = CallId::from_wire(request.call_id).to_response();
        // SAFETY: the message fits the lap.
        unsafe { self.tx.append(call_id, status.to_wire(), payload) };
        self.reservation
            .release(u64::from(request.internal_allowance));
        self.stats.replies += 1;
        self.rx.requests.answer(request.hold);
        Ok(())
    }

    /// Answers a request whose reply does not fit the lap, or may not be sent.
    #[cold]
    #[inline(never)]
    fn wrap_and_respond(
        &mut self,
        request: Request,
        status: Status,
        payload: &[u8],
    ) -> Result<(), ReplyError<()>> {
        // A link that is closed has no lap.
        if let Some(reason) = self.closed {
            return Err(ReplyError::Closed(reason));
        }
        let message = padded(payload.len() as u64);
        if message + METADATA_SPAN > u64::from(request.internal_allowance) {
            return Err(ReplyError::TooLarge {
                len: payload.len(),
                max: request.max_reply(),
                request: (),
            });
        }
        // Every lap has room for the longest reply (L2).
        self.tx.make_place(message);
        self.respond(&request, status, payload)
    }

    /// Holds a request that is answered later. Returns its name.
    #[inline(always)]
    pub(crate) fn hold(&mut self, request: &Request) -> Held {
        let Request {
            hold,
            payload,
            internal_allowance,
            call_id,
        } = *request;
        if hold == Hold::InPlace {
            Held::WithBytes(self.rx.requests.hold(payload, internal_allowance, call_id))
        } else {
            request.name()
        }
    }
}

/// The calls and answers of tests.
#[cfg(test)]
impl<U> Link<U> {
    /// Calls with a deadline; `u64::MAX` is none.
    pub(crate) fn call_until(
        &mut self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
        deadline_ns: u64,
    ) -> Result<CallKey, CallError<U>> {
        let call = self.call(payload, user_data, response_allowance)?;
        if deadline_ns != u64::MAX {
            self.end_at(call, deadline_ns);
        }
        Ok(call)
    }

    /// Answers a request; in any order, at any time. Never fails for lack of ring space (S2).
    ///
    /// # Errors
    /// [`ReplyError`]; for a payload above [`Request::max_reply`] it returns the request.
    pub(crate) fn reply(
        &mut self,
        request: Request,
        payload: &[u8],
    ) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Ok, payload)
            .map_err(|error| error.map_request(|()| request))
    }

    /// Takes the next request that arrived.
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let name = self.take_request()?;
        Some(self.held(name))
    }

    /// Returns the same request, whose bytes are released.
    pub(crate) fn without_bytes(&mut self, mut request: Request) -> Request {
        self.release_bytes(&mut request);
        request
    }

    /// Answers a request with [`CallFailure::Refused`].
    ///
    /// # Errors
    /// [`ReplyError`] if the connection has ended.
    pub(crate) fn refuse(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Refused, &[])
            .map_err(|error| error.map_request(|()| request))
    }

    /// Answers a request that its handler dropped with [`CallFailure::Dropped`].
    ///
    /// # Errors
    /// [`ReplyError`] if the connection has ended.
    pub(crate) fn abandon(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Dropped, &[])
            .map_err(|error| error.map_request(|()| request))
    }
}
