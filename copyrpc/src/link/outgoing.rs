//! The way of calls and replies into the send ring.

use super::credit::Reservation;
use super::tx::Place;
use super::{CallKey, Held, Hold, Link, Request};
use crate::error::{CallError, CloseReason, ReplyError};
use crate::stats::Stats;
use crate::wire::{ALIGNMENT, CallId, METADATA_SPAN, Status, internal_allowance, padded};

/// Ring bytes that calls keep free: twice the bytes that grants keep free (64), so that under load
/// grants to the peer win over this end's calls and neither side starves (invariant L3 of
/// docs/copyrpc-protocol.md).
pub(super) const CALL_SLACK: u64 = 128;

impl<U> Link<U> {
    /// Sends a request with room for a response of `response_allowance` payload bytes. Nothing is
    /// posted before [`Link::flush_all`]. A refused call changes nothing, except that a READ of the
    /// peer's record may be wanted (L5).
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

    /// Makes a call, if room for it is known (S4), the credit suffices, and there is a slot for the
    /// call. Otherwise returns the user data and changes nothing: [`Link::call`] decides.
    #[inline(always)]
    pub(crate) fn try_call(
        &mut self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
    ) -> Result<CallKey, U> {
        let allowance = internal_allowance(response_allowance as u64);
        let Self {
            tx,
            limits,
            credit,
            calls,
            ..
        } = self;
        let batches_before = tx.batches_sent();
        let Some(place) = tx.place_of_call(payload) else {
            return Err(user_data);
        };
        if !limits.allow(place.message(), allowance) {
            return Err(user_data);
        }
        if allowance > credit.balance() {
            return Err(user_data);
        }
        let key = calls.insert(user_data, allowance, batches_before)?;
        credit.spend(allowance);
        place.fill(key.id().to_request(), (allowance / ALIGNMENT) as u32);
        if calls.unanswered() == 1 {
            self.watch.news();
        }
        self.stats.calls += 1;
        Ok(key)
    }

    /// Checks whether a call is admitted. If so, wraps the ring if the call's message needs a wrap,
    /// makes a slot for the call, and returns the user data.
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
        // S4: the check covers the whole span, wrap included, before any byte is written.
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
    /// Returns `None` if the call has ended. The next flush sends a notice to the peer (C5); the
    /// peer's response will be dropped (C3).
    pub(crate) fn cancel(&mut self, call: CallKey) -> Option<U> {
        let user_data = self.calls.give_up(call)?;
        self.tx.await_notices(true);
        self.stats.cancelled += 1;
        Some(user_data)
    }

    /// Writes the notices of calls that were given up, as long as the ring has the room that a call
    /// would need (S4). If some notices are left, the peer's record is READ, as after a refused
    /// call (L5).
    #[cold]
    #[inline(never)]
    pub(super) fn write_notices(&mut self) {
        while let Some(call) = self.calls.untold() {
            let reserved = 2 * self.reservation.outstanding() + CALL_SLACK;
            let span = self.tx.span_of(padded(0));
            if self.tx.in_flight() + span + reserved > self.tx.size().bytes() {
                self.starved = true;
                return;
            }
            self.tx.append_notice(call.to_request());
            self.calls.note_told();
            self.stats.notices += 1;
        }
        self.tx.await_notices(false);
    }

    /// Sets the deadline of a call, in the clock of [`Link::expire`].
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
        self.tx.await_notices(true);
        self.stats.deadlines_exceeded += 1;
        Some(user_data)
    }

    pub(crate) fn next_deadline(&mut self) -> Option<u64> {
        if self.closed.is_some() {
            None
        } else {
            self.calls.next_deadline()
        }
    }

    /// Answers a request that is [in place](Hold::InPlace), if nothing prevents it. Otherwise
    /// changes nothing, and [`Link::respond`] decides.
    #[inline(always)]
    pub(crate) fn reply_in_place(&mut self, request: &Request, payload: &[u8]) -> bool {
        let Self {
            tx,
            reservation,
            stats,
            ..
        } = self;
        // The send ring of a closed link has no place for a message.
        let Some(place) = tx.place(payload) else {
            return false;
        };
        let is_easy = request.hold == Hold::InPlace
            && place.message() + METADATA_SPAN <= u64::from(request.internal_allowance);
        if is_easy {
            fill_response(place, reservation, stats, request, Status::Ok);
        }
        is_easy
    }

    #[inline(always)]
    pub(crate) fn respond(
        &mut self,
        request: &Request,
        status: Status,
        payload: &[u8],
    ) -> Result<(), ReplyError<()>> {
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
        let Self {
            tx,
            reservation,
            stats,
            ..
        } = self;
        tx.make_place(message);
        // Every lap has room for the maximum reply (L2), so there is a place.
        let Some(place) = tx.place(payload) else {
            return Err(ReplyError::Closed(CloseReason::Disconnected));
        };
        fill_response(place, reservation, stats, request, status);
        self.rx.requests.answer(request.hold);
        Ok(())
    }

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

#[inline(always)]
fn fill_response(
    place: Place<'_>,
    reservation: &mut Reservation,
    stats: &mut Stats,
    request: &Request,
    status: Status,
) {
    place.fill(
        CallId::from_wire(request.call_id).to_response(),
        status.to_wire(),
    );
    reservation.release(u64::from(request.internal_allowance));
    stats.replies += 1;
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

    /// Answers a request. Requests may be answered in any order and at any time. Never fails for
    /// lack of ring space (S2).
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

    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let name = self.take_request()?;
        Some(self.held(name))
    }

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
