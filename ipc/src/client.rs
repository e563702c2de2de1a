//! The calling end.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use shm::dir::Dir;
use shm::lane::{LaneRx, LaneTx};
use shm::membership::{CallFailed, Membership, SessionEnd};
use shm::pending::{Pending, Tag};
use shm::plain::Plain;
use shm::ready::ReadyWords;
use shm::region::Region;
use shm::sleep::{SLICE, Watch};

use crate::error::{CallError, ConnectError};
use crate::layout::{ANSWERED, Header, KIND, Layout, Request, Response};
use crate::views;

/// One client of a [`Server`](crate::Server). `U` is what the caller wants back with each reply.
///
/// `Send`, not shared between threads: a client per thread. Dropping it leaves the server; calls that are unanswered then are forgotten.
pub struct Client<Req, Resp, U> {
    requests: LaneTx<Request<Req>>,
    responses: LaneRx<Response<Resp>>,
    pending: Pending<U>,
    ready: ReadyWords,
    /// Last: everything above points into its region.
    member: Membership,
    _types: PhantomData<(Req, Resp)>,
}

impl<Req, Resp, U> fmt::Debug for Client<Req, Resp, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("member", &self.member).field("in_flight", &self.pending.len()).finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain, U> Client<Req, Resp, U> {
    /// Connects to the server `name` in `dir`. `type_tag` must be the server's.
    ///
    /// # Errors
    /// [`ConnectError`]. A server that is not there yet (`NotFound`, `OwnerGone`) and a full one may be tried again.
    pub fn connect(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, ConnectError> {
        let region = Region::open(dir, name, KIND, size_of::<Header>())?;
        let layout = views::described_layout::<Req, Resp>(&region, type_tag)?;
        // SAFETY: `described_layout` made sure of it.
        unsafe { Self::join(region, &layout) }
    }

    /// Takes a seat at the server of `region`.
    ///
    /// # Safety
    /// The layout fits the region and these types.
    pub(crate) unsafe fn join(region: Region, layout: &Layout) -> Result<Self, ConnectError> {
        // SAFETY: contract of this function; the region outlives all views (see the order of the fields).
        let (seats, ready) = unsafe { (views::seats(region.view(), layout), views::ready(region.view(), layout)) };
        // SAFETY: as above.
        let member = unsafe { Membership::join(region, seats) }?;
        let (seat, view, depth) = (member.seat(), member.region().view(), layout.depth as u64);
        // SAFETY: as above. The seat is ours alone, and its lanes are zeroed: by the creation or by the server when it freed the seat.
        // The requests have one producer, this one; `call` publishes only while fewer than `depth` calls are unanswered, and the server
        // takes requests in order before it answers them. Any bytes are a valid `Response`, by `Plain`.
        let (requests, responses) = unsafe {
            (
                LaneTx::new(views::request_lane(view, layout, seat), depth, 0),
                LaneRx::new(views::response_lane(view, layout, seat), depth, 0),
            )
        };
        Ok(Self { requests, responses, pending: Pending::new(layout.depth), ready, member, _types: PhantomData })
    }

    /// This client's number at the server, below its `max_clients`.
    #[must_use]
    pub fn id(&self) -> usize {
        self.member.seat()
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Calls that can be unanswered at a time: the server's `depth`.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.pending.capacity()
    }

    /// Sends one request. The server sees it at once and in the order of the calls; [`poll`](Self::poll) gives `user_data` back with the
    /// reply, exactly once, in whatever order the server answers.
    ///
    /// # Errors
    /// [`CallError`], with the request and the user data; nothing was sent.
    #[inline]
    pub fn call(&mut self, request: Req, user_data: U) -> Result<(), CallError<Req, U>> {
        self.call_with(user_data, |_| request).map_err(|refused| match refused {
            Refused::Full(user_data) => CallError::QueueFull { request, user_data, depth: self.depth() },
            Refused::Ended(user_data, end) => CallError::Ended { request, user_data, end },
        })
    }

    /// Sends the request that `make` gives for the call's slot, a number below [`depth`](Self::depth) that is the call's until it ends.
    #[inline(always)]
    pub(crate) fn call_with(&mut self, user_data: U, make: impl FnOnce(usize) -> Req) -> Result<(), Refused<U>> {
        if let Some(end) = self.member.end() {
            return Err(Refused::Ended(user_data, end));
        }
        let tag = self.pending.insert(user_data).map_err(Refused::Full)?;
        // There is room: fewer than `depth` earlier calls are unanswered, and requests are taken in order.
        self.requests.publish(Request { tag: tag.pack(0), payload: make(tag.slot()) });
        let seat = self.member.seat();
        let seats = self.member.seats();
        if seats.armed(seat).is_some_and(|armed| self.ready.notify_if_armed(seat, armed)) {
            seats.server_sleep().wake();
        }
        Ok(())
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for: a reply, or the end of the session; at most for `timeout` (`None`:
    /// without end). Returns whether there is. Nothing spins here, and a server that dies is noticed within [`SLICE`] of the kernel's
    /// noticing it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let Self { responses, member, .. } = self;
        let seats = *member.seats();
        seats.client_sleep(member.seat()).is_none_or(|sleep| sleep.wait(timeout, SLICE, &mut Idle { responses, member }))
    }

    /// Hands the replies that have arrived to `f`, at most [`depth`](Self::depth) of them, and returns how many.
    ///
    /// # Errors
    /// [`SessionEnd`] when the session is over: then every unanswered call has been ended through `f`, and so it stays. A dead server
    /// is noticed within 64 empty polls of the kernel's noticing it (about a millisecond).
    #[inline]
    pub fn poll(&mut self, mut f: impl FnMut(U, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        self.poll_slots(|user_data, outcome| f(user_data, outcome.map(|(_, response)| response)))
    }

    /// As [`poll`](Self::poll), with the slot of each answered call before its response.
    #[inline(always)]
    pub(crate) fn poll_slots(&mut self, mut f: impl FnMut(U, Result<(usize, Resp), CallFailed>)) -> Result<usize, SessionEnd> {
        let ended = self.take_replies(&mut f);
        if ended == 0 { self.poll_empty(f) } else { Ok(ended) }
    }

    #[inline(always)]
    fn take_replies(&mut self, f: &mut impl FnMut(U, Result<(usize, Resp), CallFailed>)) -> usize {
        let mut ended = 0;
        for _ in 0..self.depth() {
            let Some(response) = self.responses.pop() else { break };
            let (tag, note) = Tag::unpack(response.tag);
            // A tag that is not outstanding is a confused server's; it ends nobody's call.
            let Some(user_data) = self.pending.take(tag) else { continue };
            ended += 1;
            f(user_data, if note == ANSWERED { Ok((tag.slot(), response.payload)) } else { Err(CallFailed::Dropped) });
        }
        ended
    }

    fn poll_empty(&mut self, mut f: impl FnMut(U, Result<(usize, Resp), CallFailed>)) -> Result<usize, SessionEnd> {
        let Some(end) = self.member.end() else { return Ok(0) };
        // What the server answered before its end is visible now, and counts.
        let ended = self.take_replies(&mut f);
        if ended > 0 {
            return Ok(ended);
        }
        self.pending.take_where(|_| true, |user_data| f(user_data, Err(CallFailed::Ended(end))));
        Err(end)
    }
}

/// Why a call was not made, with its user data.
pub(crate) enum Refused<U> {
    Full(U),
    Ended(U, SessionEnd),
}

/// A client that waits.
struct Idle<'a, Resp> {
    responses: &'a LaneRx<Response<Resp>>,
    member: &'a mut Membership,
}

impl<Resp: Plain> Watch for Idle<'_, Resp> {
    fn look(&mut self, _: bool) -> bool {
        self.responses.is_ready() || self.member.end().is_some()
    }

    fn check(&mut self) -> bool {
        self.member.check().is_some()
    }
}
