//! The calling end.

use std::fmt;
use std::time::Duration;

use calls::{AskError, CallError, CallFailed, SessionEnd, Tag as CallToken};
use shm::blocking;
use shm::caller::Caller;
use shm::dir::Dir;
use shm::plain::Plain;
use shm::ready::ReadyWords;
use shm::region::Region;
use shm::sleep::{Sleeper, Watch};

use crate::error::ConnectError;
use crate::layout::{Header, KIND, Layout};
use crate::views;

/// One client of a [`Server`](crate::Server). `U` is what the caller wants back with each reply.
///
/// `Send`, not shared between threads: a client per thread. Dropping it leaves the server; calls that are unanswered then are forgotten.
pub struct Client<Req, Resp, U> {
    ready: ReadyWords,
    /// Last: `ready` points into its region.
    caller: Caller<Req, Resp, U>,
}

impl<Req: Plain, Resp: Plain, U> fmt::Debug for Client<Req, Resp, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("caller", &self.caller).finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain, U> Client<Req, Resp, U> {
    /// Connects to the server `name` of this user on this host.
    ///
    /// # Errors
    /// [`ConnectError`]. Those that [may pass](ConnectError::may_pass) can be tried again.
    pub fn connect(name: &str) -> Result<Self, ConnectError> {
        Self::connect_in(&Dir::open(None)?, name, 0)
    }

    /// As [`connect`](Self::connect), to a server that may not be up yet, or have no place free yet: tries for as long as `patience`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_within(name: &str, patience: Duration) -> Result<Self, ConnectError> {
        blocking::retry(patience, ConnectError::may_pass, || Self::connect(name))
    }

    /// Connects to the server `name` in `dir`. `type_tag` must be the server's.
    ///
    /// # Errors
    /// [`ConnectError`]. A server that is not there yet (`NotFound`, `OwnerGone`) and a full one may be tried again.
    pub fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, ConnectError> {
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
        let view = region.view();
        // SAFETY: contract of this function; the region outlives all views (see the order of the fields).
        let (seats, lanes, ready) = unsafe { (views::seats(view, layout), views::lanes(view, layout), views::ready(view, layout)) };
        // SAFETY: as above.
        Ok(Self { ready, caller: unsafe { Caller::join(region, seats, lanes) }? })
    }

    /// This client's number at the server, below its `max_clients`.
    #[must_use]
    pub fn id(&self) -> usize {
        self.caller.id()
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.caller.in_flight()
    }

    /// Calls that can be unanswered at a time: the server's `depth`.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.caller.depth()
    }

    /// Sends one request. The server sees it at once and in the order of the calls; [`poll`](Self::poll) gives `user_data` back with the
    /// reply, exactly once, in whatever order the server answers.
    ///
    /// # Errors
    /// [`CallError`], with the request and the user data; nothing was sent.
    #[inline(always)]
    pub fn call(&mut self, request: Req, user_data: U) -> Result<CallToken, CallError<Req, U>> {
        match self.caller.begin(user_data) {
            Ok(call) => {
                self.send(call, request);
                Ok(call)
            }
            Err(refused) => Err(refused.map(|(), user_data| (request, user_data))),
        }
    }

    /// As [`call`](Self::call), but without a reply the call ends with [`CallFailed::TimedOut`] in the first poll after `timeout`. It is then as one
    /// that was [cancelled](Self::cancel).
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn call_within(&mut self, request: Req, user_data: U, timeout: Duration) -> Result<CallToken, CallError<Req, U>> {
        let call = self.call(request, user_data)?;
        self.end_within(call, timeout);
        Ok(call)
    }

    pub(crate) fn end_within(&mut self, call: CallToken, timeout: Duration) {
        self.caller.end_within(call, timeout);
    }

    /// Ends a call at once: its user data comes back here, and no poll gives it. `None` if the call has ended. The server is not told; its reply
    /// reaches no call, and until that is here the call keeps its place among those that can be unanswered.
    pub fn cancel(&mut self, call: CallToken) -> Option<U> {
        self.caller.cancel(call)
    }

    /// Sends the request that `make` gives for the call's slot, a number below [`depth`](Self::depth) that is the call's until it ends.
    #[inline(always)]
    pub(crate) fn call_with(&mut self, user_data: U, make: impl FnOnce(usize) -> Req) -> Result<CallToken, CallError<(), U>> {
        let call = self.caller.begin(user_data)?;
        self.send(call, make(call.slot()));
        Ok(call)
    }

    #[inline(always)]
    fn send(&mut self, call: CallToken, request: Req) {
        self.caller.send(call, request);
        if self.ready.notify_if_armed(self.caller.id(), self.caller.armed()) {
            self.caller.seats().server_sleep().wake();
        }
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for: a reply, a deadline, or the end of the session; at most for `timeout` (`None`:
    /// without end). Returns whether there is. Nothing spins here, and a server that dies is noticed within
    /// [`SLICE`](shm::sleep::SLICE) of the kernel's noticing it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.caller.wait(timeout)
    }

    /// Hands the replies that have arrived to `f`, at most [`depth`](Self::depth) of them, and returns how many.
    ///
    /// # Errors
    /// [`SessionEnd`] when the session is over: then every unanswered call has been ended through `f`, and so it stays. A dead server
    /// is noticed within 64 empty polls of the kernel's noticing it (about a millisecond).
    #[inline(always)]
    pub fn poll(&mut self, mut f: impl FnMut(U, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        self.poll_slots(|user_data, _, outcome| f(user_data, outcome))
    }

    /// As [`poll`](Self::poll), with the slot of each answered call.
    #[inline(always)]
    pub(crate) fn poll_slots(&mut self, f: impl FnMut(U, usize, Result<Resp, CallFailed>)) -> Result<usize, SessionEnd> {
        self.caller.poll(f)
    }
}

impl<Req: Plain, Resp: Plain> Client<Req, Resp, ()> {
    /// Calls and waits for the reply, at most for `timeout`. For a client that has no other call unanswered.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn ask(&mut self, request: Req, timeout: Duration) -> Result<Resp, AskError> {
        if self.in_flight() > 0 {
            return Err(AskError::Full);
        }
        self.call_within(request, (), timeout)?;
        Ok(self.caller.answer()?.1)
    }

    /// Waits for the reply to the only call, whose slot comes before it.
    pub(crate) fn answer(&mut self) -> Result<(usize, Resp), CallFailed> {
        self.caller.answer()
    }
}

/// What [`Client::wait`] waits for, so that a thread can sleep on several things: see [`shm::sleep::wait`].
impl<Req: Plain, Resp: Plain, U> Sleeper for Client<Req, Resp, U> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut self.caller);
    }
}
