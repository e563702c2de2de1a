//! The calling end.

use std::fmt;
use std::time::Duration;

use shm::dir::Dir;
use shm::membership::{CallFailed, Membership, SessionEnd};
use shm::pending::{Pending, Tag};
use shm::plain::Plain;
use shm::region::Region;
use shm::sleep::{SLICE, Watch};

use crate::error::{CallError, ConnectError};
use crate::layout::{ANSWERED, Header, KIND};
use crate::ring::Name;
use crate::views::{self, Shared};

/// One client of a [`Server`](crate::Server). `U` is what the caller wants back with each reply.
///
/// `Send`, not shared between threads: a client per thread. Dropping it leaves the server; calls that are unanswered then are forgotten.
pub struct Client<Req, Resp, U> {
    shared: Shared<Req, Resp>,
    /// A tag's slot is the number of the call's request and response slot.
    pending: Pending<U>,
    /// Calls that wait for their response, oldest first: the slots worth looking at.
    in_flight: Vec<Tag>,
    /// Last: `shared` points into its region.
    member: Membership,
}

impl<Req, Resp, U> fmt::Debug for Client<Req, Resp, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("member", &self.member).field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
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
        let depth = layout.resp_depth;
        Ok(Self { shared, pending: Pending::new(depth), in_flight: Vec::with_capacity(depth), member })
    }

    /// This client's number at the server, below its `max_clients`.
    #[must_use]
    pub fn id(&self) -> usize {
        self.member.seat()
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
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
            self.in_flight.push(tag);
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
        let Self { shared, in_flight, member, .. } = self;
        let seats = *member.seats();
        seats.client_sleep(member.seat()).is_none_or(|sleep| sleep.wait(timeout, SLICE, &mut Idle { shared, in_flight, member }))
    }

    /// Writes the request into the slot of `tag`, which is free, and announces it if the ring has room.
    #[inline]
    fn announce(&self, tag: Tag, request: Req) -> bool {
        let (client, slot) = (self.member.seat(), tag.slot());
        let Some(index) = self.shared.index(client, slot) else { return false };
        self.shared.write_request(index, tag, request);
        self.shared.ring().announce(Name { client, generation: self.member.generation(), slot }).is_ok()
    }

    #[cold]
    fn full(&self, request: Req, user_data: U) -> CallError<Req, U> {
        CallError::QueueFull { request, user_data, in_flight: self.in_flight.len(), resp_depth: self.resp_depth() }
    }

    /// Hands the replies that have arrived to `f`, oldest call first, and returns how many. Looks at the slots in flight only.
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
        let Self { shared, pending, in_flight, member } = self;
        let client = member.seat();
        let before = in_flight.len();
        in_flight.retain(|&tag| {
            let response = shared.index(client, tag.slot()).and_then(|index| shared.read_response(index, tag));
            let Some((note, response)) = response else { return true };
            if let Some(user_data) = pending.take(tag) {
                f(user_data, if note == ANSWERED { Ok(response) } else { Err(CallFailed::Dropped) });
            }
            false
        });
        before - in_flight.len()
    }

    fn poll_empty(&mut self, mut f: impl FnMut(U, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        let Some(end) = self.member.end() else { return Ok(0) };
        // What the server answered before its end is visible now, and counts.
        let ended = self.take_replies(&mut f);
        if ended > 0 {
            return Ok(ended);
        }
        self.in_flight.clear();
        self.pending.take_where(|_| true, |user_data| f(user_data, Err(CallFailed::Ended(end))));
        Err(end)
    }
}

/// A client that waits.
struct Idle<'a, Req, Resp> {
    shared: &'a Shared<Req, Resp>,
    in_flight: &'a [Tag],
    member: &'a mut Membership,
}

impl<Req: Plain, Resp: Plain> Watch for Idle<'_, Req, Resp> {
    fn look(&mut self, _: bool) -> bool {
        let client = self.member.seat();
        let is_answered = |tag: &Tag| self.shared.index(client, tag.slot()).is_some_and(|index| self.shared.is_answered(index, *tag));
        self.in_flight.iter().any(is_answered) || self.member.end().is_some()
    }

    fn check(&mut self) -> bool {
        self.member.check().is_some()
    }
}
