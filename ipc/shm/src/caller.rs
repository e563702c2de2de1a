//! The client's side of its session: calls go out through one lane, answers come back through another.

use std::fmt;
use std::time::Duration;

use calls::{ANSWERED, CallError, CallFailed, Calls, SessionEnd, Tag, Tagged};

use crate::blocking::SPINS;
use crate::clients::{JoinError, Seats};
use crate::clock;
use crate::lane::{LaneRx, LaneTx};
use crate::membership::Membership;
use crate::plain::Plain;
use crate::region::Region;
use crate::sessions::LanePairs;
use crate::sleep::{self, SLICE, Sleeper, Watch, Word};
use crate::sync::{AtomicU32, spin_loop};

/// A client of the server of a region. `U` is what the caller wants back with each answer.
pub struct Caller<Req, Resp, U> {
    requests: LaneTx<Tagged<Req>>,
    responses: LaneRx<Tagged<Resp>>,
    calls: Calls<U>,
    /// Last: everything above points into its region.
    member: Membership,
}

impl<Req, Resp, U> fmt::Debug for Caller<Req, Resp, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("member", &self.member).field("in_flight", &self.calls.waiting()).finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain, U> Caller<Req, Resp, U> {
    /// Takes a seat at the server of `region`.
    ///
    /// # Safety
    /// The seats and, for each of them, the lanes lie in the region.
    ///
    /// # Errors
    /// [`JoinError`].
    pub unsafe fn join(region: Region, seats: Seats, lanes: LanePairs<Req, Resp>) -> Result<Self, JoinError> {
        // SAFETY: contract of this function; the region outlives all views (see the order of the fields).
        let member = unsafe { Membership::join(region, seats, |seat| lanes.are_unused(seat)) }?;
        let (seat, depth) = (member.seat(), lanes.depth());
        // SAFETY: as above. The seat is ours alone, and its lanes are empty (C2).
        // The requests have one producer, this one; `call` publishes only while fewer than `depth` calls are unanswered, and the server
        // takes requests in order before it answers them. Any bytes are a valid response, by `Plain`.
        let (requests, responses) =
            unsafe { (LaneTx::new(lanes.requests_of(seat), depth as u64, 0), LaneRx::new(lanes.responses_to(seat), depth as u64, 0)) };
        Ok(Self { requests, responses, calls: Calls::new(depth), member })
    }

    /// This client's number at the server.
    #[must_use]
    #[inline(always)]
    pub fn id(&self) -> usize {
        self.member.seat()
    }

    /// The server's region.
    #[must_use]
    pub fn region(&self) -> &Region {
        self.member.region()
    }

    /// The seats of all clients.
    #[must_use]
    #[inline(always)]
    pub fn seats(&self) -> &Seats {
        self.member.seats()
    }

    /// The word by which the server says whether it must be told of a call: see [`ready`](crate::ready), R1.
    #[must_use]
    #[inline(always)]
    pub fn armed(&self) -> &AtomicU32 {
        self.member.holding().armed()
    }

    /// Calls that have not ended.
    #[must_use]
    #[inline(always)]
    pub fn in_flight(&self) -> usize {
        self.calls.waiting()
    }

    /// Calls that can be unanswered at a time.
    #[must_use]
    #[inline(always)]
    pub fn depth(&self) -> usize {
        self.calls.capacity()
    }

    /// Begins a call, whose request must be [sent](Self::send) next. The tag's slot is a number below [`depth`](Self::depth) that is the call's
    /// until it ends.
    ///
    /// # Errors
    /// [`CallError::Full`] and [`CallError::Disconnected`].
    #[inline(always)]
    pub fn begin(&mut self, user_data: U) -> Result<Tag, CallError<(), U>> {
        if let Some(end) = self.member.end() {
            return Err(CallError::Disconnected { request: (), user_data, end });
        }
        let depth = self.depth();
        self.calls.insert(user_data).map_err(|user_data| CallError::Full { request: (), user_data, depth })
    }

    /// Sends the request of a call that has just begun. A server that does not poll this client's lane must be told: see
    /// [`ready`](crate::ready), R1.
    #[inline(always)]
    pub fn send(&mut self, call: Tag, request: Req) {
        // L3: there is room, as fewer than `depth` earlier calls are unanswered, and requests are taken in order.
        self.requests.publish(Tagged { tag: call.pack(0), payload: request });
        if self.calls.len() > 1 {
            self.requests.fetch_ahead();
        }
    }

    /// Ends a call at the first [`poll`](Self::poll) after `timeout`, unless it has ended: see [`cancel`](Self::cancel).
    pub fn end_within(&mut self, call: Tag, timeout: Duration) {
        self.calls.end_within(call, clock::monotonic_ns(), timeout);
    }

    /// Ends a call: its user data, unless it has ended. The server is not told. What the call has of [`depth`](Self::depth), and of shared
    /// memory, is free again when the server has answered it; that answer reaches no call.
    pub fn cancel(&mut self, call: Tag) -> Option<U> {
        self.calls.abandon(call)
    }

    /// What a `SIGKILL` leaves in the middle of a call, for models: a request that is not published.
    #[cfg(all(test, loom))]
    pub(crate) fn call_half(&self, request: Req) {
        self.requests.publish_half(Tagged { tag: 0, payload: request });
    }

    /// What a `SIGKILL` leaves, for models.
    #[cfg(all(test, loom))]
    pub(crate) fn die(self) {
        self.member.die();
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for: an answer, a deadline, or the end of the session; at most for `timeout` (`None`:
    /// without end). Returns whether there is. A server that dies is noticed within [`SLICE`] of the kernel's noticing it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// Hands the answers that have arrived to `f`, each with the slot of its call (0 if there is no answer), at most [`depth`](Self::depth) of them, and returns how many.
    ///
    /// # Errors
    /// [`SessionEnd`] when the session is over: then every unanswered call has been ended through `f`, and so it stays.
    #[inline(always)]
    pub fn poll(&mut self, mut f: impl FnMut(U, usize, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        let ended = self.take_answers(&mut f);
        if self.calls.has_deadlines() {
            return self.poll_timed(ended, f);
        }
        if ended == 0 { self.poll_empty(f) } else { Ok(ended) }
    }

    /// Behind the answers that came with it, ends the calls whose time is over.
    #[cold]
    fn poll_timed(&mut self, mut ended: usize, mut f: impl FnMut(U, usize, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        if self.calls.is_timed() {
            ended += self.calls.expire(clock::monotonic_ns(), |user_data| f(user_data, 0, Err(CallFailed::TimedOut)));
        }
        if ended == 0 { self.poll_empty(f) } else { Ok(ended) }
    }

    fn is_due(&self) -> bool {
        self.until_deadline().is_some_and(|left| left.is_zero())
    }

    /// How long until the earliest deadline.
    fn until_deadline(&self) -> Option<Duration> {
        self.calls.until_deadline(clock::monotonic_ns)
    }

    #[inline(always)]
    fn take_answers(&mut self, f: &mut impl FnMut(U, usize, Result<Resp, CallFailed>)) -> usize {
        let mut ended = 0;
        for _ in 0..self.depth() {
            let Some((tag, response)) = self.responses.pop_tagged() else { break };
            let (tag, note) = Tag::unpack(tag);
            // C5: a tag that is not outstanding is a confused server's; it ends nobody's call.
            let Some(user_data) = self.calls.take(tag) else { continue };
            ended += 1;
            if note == ANSWERED {
                f(user_data, tag.slot(), Ok(response.read()));
            } else {
                Self::reject(user_data, f);
            }
        }
        ended
    }

    #[cold]
    fn reject(user_data: U, f: &mut impl FnMut(U, usize, Result<Resp, CallFailed>)) {
        f(user_data, 0, Err(CallFailed::Rejected));
    }

    #[cold]
    fn poll_empty(&mut self, mut f: impl FnMut(U, usize, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        let Some(end) = self.member.end() else { return Ok(0) };
        // What the server answered before its end is visible now, and counts.
        let ended = self.take_answers(&mut f);
        if ended > 0 {
            return Ok(ended);
        }
        self.calls.take_where(|_| true, |user_data| f(user_data, 0, Err(CallFailed::Disconnected(end))));
        Err(end)
    }
}

impl<Req: Plain, Resp: Plain> Caller<Req, Resp, ()> {
    /// Waits for the answer to the only call that is unanswered: with its slot, and at most as long as the call may take.
    ///
    /// # Errors
    /// [`CallFailed`].
    pub fn answer(&mut self) -> Result<(usize, Resp), CallFailed> {
        let (mut ended, mut in_vain) = (None, 0);
        loop {
            let polled = self.poll(|(), slot, outcome| ended = Some(outcome.map(|response| (slot, response))));
            match (ended, polled) {
                (Some(outcome), _) => return outcome,
                (None, Err(end)) => return Err(CallFailed::Disconnected(end)),
                (None, Ok(_)) if in_vain < SPINS => {
                    in_vain += 1;
                    spin_loop();
                }
                (None, Ok(_)) => {
                    self.wait(None);
                }
            }
        }
    }
}

impl<Req: Plain, Resp: Plain, U> Watch for Caller<Req, Resp, U> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.member.holding().sleep().word());
    }

    fn look(&mut self, _: bool) -> bool {
        self.is_due() || self.responses.is_ready() || self.member.end().is_some()
    }

    fn slice(&mut self) -> Duration {
        self.until_deadline().unwrap_or(SLICE).min(SLICE)
    }

    fn check(&mut self) -> bool {
        self.is_due() || self.member.check().is_some()
    }
}
