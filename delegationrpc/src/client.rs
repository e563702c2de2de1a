//! The calling end.

use std::fmt;
use std::time::Duration;

use shm::clients::JoinError;
use shm::dir::Dir;
use shm::lane::LaneRx;
use shm::membership::{CallFailed, Membership, SessionEnd};
use shm::pending::{Pending, Tag};
use shm::plain::Plain;
use shm::region::Region;
use shm::sleep::{SLICE, Watch};

use crate::error::{CallError, ConnectError};
use crate::layout::{ANSWERED, Header, KIND, Response};
use crate::ring::Name;
use crate::views::{self, Shared};

/// How many calls ahead the line of a request is fetched.
const SLOTS_AHEAD: usize = 4;

/// One client of a [`Server`](crate::Server). `U` is what the caller wants back with each reply.
///
/// `Send`, not shared between threads: a client per thread. Dropping it leaves the server; calls that are unanswered then are forgotten.
pub struct Client<Req, Resp, U> {
    shared: Shared<Req, Resp>,
    responses: LaneRx<Response<Resp>>,
    pending: Pending<U>,
    /// Calls announced so far.
    calls: usize,
    /// Last: `shared` points into its region.
    member: Membership,
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
        // SAFETY: `described_layout` made sure that the layout fits the region, which outlives the views (see the order of the fields).
        let (shared, seats) = unsafe { (Shared::new(region.view(), layout), views::seats(region.view(), &layout)) };
        // SAFETY: the seats lie in the region.
        let member = unsafe { Membership::join(region, seats) }?;
        // SAFETY: the seat is ours alone, and its slots are zeroed: by the creation or by the server when it freed the seat.
        let responses = unsafe { shared.responses_of(member.seat()) };
        let responses = responses.ok_or(ConnectError::Join(JoinError::Full { max_clients: layout.max_clients }))?;
        Ok(Self { shared, responses, pending: Pending::new(layout.resp_depth), calls: 0, member })
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

    /// Calls that can be unanswered at a time: the server's `resp_depth`.
    #[must_use]
    pub fn resp_depth(&self) -> usize {
        self.pending.capacity()
    }

    /// Sends one request. The server can see it when this returns, and sees the calls of one client in their order;
    /// [`poll`](Self::poll) gives `user_data` back with the reply, exactly once, in whatever order the server answers.
    ///
    /// # Errors
    /// [`CallError`], with the request and the user data; nothing was sent.
    #[inline]
    pub fn call(&mut self, request: Req, user_data: U) -> Result<(), CallError<Req, U>> {
        if let Some(end) = self.member.end() {
            return Err(CallError::Ended { request, user_data, end });
        }
        let tag = match self.pending.insert(user_data) {
            Ok(tag) => tag,
            Err(user_data) => return Err(self.full(request, user_data)),
        };
        if self.announce(tag, request) {
            self.calls = self.calls.wrapping_add(1);
            self.member.seats().server_sleep().wake();
            return Ok(());
        }
        match self.pending.take(tag) {
            Some(user_data) => Err(self.full(request, user_data)),
            // Not reached: the tag was given out above.
            None => Ok(()),
        }
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for: a reply, or the end of the session; at most for `timeout` (`None`:
    /// without end). Returns whether there is. Nothing spins here, and a server that dies is noticed within [`SLICE`] of the kernel's
    /// noticing it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let Self { responses, member, .. } = self;
        let seats = *member.seats();
        seats.client_sleep(member.seat()).is_none_or(|sleep| sleep.wait(timeout, SLICE, &mut Idle { responses, member }))
    }

    /// Writes the request into the next slot and announces it if the ring has room. The slot is free: the call that had it before was taken
    /// in before any later one, and one of those has been answered, as fewer than `resp_depth` are unanswered.
    #[inline]
    fn announce(&self, tag: Tag, request: Req) -> bool {
        let (client, mask) = (self.member.seat(), self.resp_depth() - 1);
        let slot = self.calls & mask;
        let Some(index) = self.shared.index(client, slot) else { return false };
        self.shared.write_request(index, tag, request);
        if let Some(soon) = self.shared.index(client, (slot + SLOTS_AHEAD) & mask) {
            self.shared.prefetch_to_write(soon);
        }
        self.shared.ring().announce(Name { client, generation: self.member.generation(), slot }).is_ok()
    }

    #[cold]
    fn full(&self, request: Req, user_data: U) -> CallError<Req, U> {
        CallError::QueueFull { request, user_data, in_flight: self.pending.len(), resp_depth: self.resp_depth() }
    }

    /// Hands the replies that have arrived to `f`, at most [`resp_depth`](Self::resp_depth) of them, and returns how many.
    ///
    /// # Errors
    /// [`SessionEnd`] when the session is over: then every unanswered call has been ended through `f`, and so it stays. A dead server is
    /// noticed within 64 empty polls of the kernel's noticing it (about a millisecond).
    #[inline]
    pub fn poll(&mut self, mut f: impl FnMut(U, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        let ended = self.take_replies(&mut f);
        if ended == 0 { self.poll_empty(f) } else { Ok(ended) }
    }

    #[inline]
    fn take_replies(&mut self, f: &mut impl FnMut(U, Result<Resp, CallFailed>)) -> usize {
        let mut ended = 0;
        for _ in 0..self.resp_depth() {
            let Some(response) = self.responses.pop() else { break };
            let (tag, note) = Tag::unpack(response.tag);
            // A tag that is not outstanding is a confused server's; it ends nobody's call.
            let Some(user_data) = self.pending.take(tag) else { continue };
            ended += 1;
            f(user_data, if note == ANSWERED { Ok(response.payload) } else { Err(CallFailed::Dropped) });
        }
        ended
    }

    fn poll_empty(&mut self, mut f: impl FnMut(U, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
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
