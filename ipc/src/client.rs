//! The client: the calling end, with a lane of requests and a lane of responses.

use std::fmt;
use std::time::Duration;

use copyrpc_calls::{
    ANSWERED, CallError, CallFailure, Calls, Patience, SessionEnd, Tag as CallToken, Tagged,
};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::lane::{Ahead, LaneRx, LaneTx};
use copyrpc_shm::plain::{Plain, TypeShape};
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::region::Region;
use copyrpc_shm::sleep::{self, SLICE, Sleeper, Watch, Word};

use crate::announce::Announce;
use crate::blocking;
use crate::error::{ClientError, SetupError};
use crate::given_up::GivenUp;
use crate::layout::{AreaBytes, Header};
use crate::membership::Membership;
use crate::views::{self, Views};

/// A client of a [`Server`](crate::Server). `U` is the type of the user data of a call; the client
/// returns them with the reply. `W` is the way in which clients announce themselves to the server.
///
/// A client belongs to one thread at a time (`Send`). The drop ends the session with the server and
/// discards unanswered calls.
pub struct Client<Req, Resp, U, W = ReadyWords> {
    announced: W,
    requests: LaneTx<Tagged<Req>>,
    responses: LaneRx<Tagged<Resp>>,
    calls: Calls<U>,
    given_up: GivenUp,
    type_tag: u64,
    polling: Patience,
    /// Maximum time to wait for the next server.
    pub(crate) patience: Duration,
    /// The last field: the other fields point into its region, and are dropped before it.
    member: Membership,
}

impl<Req, Resp, U, W> fmt::Debug for Client<Req, Resp, U, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.member.region.name())
            .field("id", &self.member.entry)
            .field("in_flight", &self.calls.waiting())
            .finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain, U, W: Announce> Client<Req, Resp, U, W> {
    /// Connects to the server `name` of this user on this host. The application's tag is 0, as for
    /// servers made by `bind`. [`connect_in`](Self::connect_in) takes another tag.
    ///
    /// # Errors
    /// [`SetupError`]. After an error that [may pass](SetupError::may_pass), try again.
    pub fn connect(name: &str) -> Result<Self, SetupError> {
        Self::connect_in(&Dir::open(None)?, name, 0)
    }

    /// Like [`connect`](Self::connect), and tries again for `timeout` if the server is not up yet
    /// or is full. [`ask`](Self::ask) does the same after the end of the session; a client that was
    /// made without a timeout tries once.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub fn connect_within(name: &str, timeout: Duration) -> Result<Self, SetupError> {
        let client = blocking::retry(timeout, SetupError::may_pass, || Self::connect(name))?;
        Ok(Self {
            patience: timeout,
            ..client
        })
    }

    /// Connects to the server `name` in `dir`. `type_tag` must be the server's.
    ///
    /// # Errors
    /// [`SetupError`]. Try again if the server is not there yet (`NotFound`, `OwnerGone`) or is
    /// full.
    pub fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, SetupError> {
        let region = Region::open(dir, name, W::KIND, size_of::<Header>())?;
        let header = views::header::<W>(&region)?;
        let shape = TypeShape::of::<Req, Resp>(type_tag);
        let layout = views::layout::<Req, Resp, W>(&region, &header, shape, AreaBytes::default())?;
        let base = region.view().base();
        // SAFETY: `views::layout` has checked that the layout, made for these types, fits the
        // region. The server zeroed the region when it created it. The client keeps the region, and
        // drops it after the views (see the order of the fields).
        unsafe { Self::join(region, Views::new(base, &layout), type_tag) }
    }

    /// Takes an entry at the server of `region`.
    ///
    /// # Safety
    /// `views` are the views of `region`.
    pub(crate) unsafe fn join(
        region: Region,
        views: Views<Req, Resp, W>,
        type_tag: u64,
    ) -> Result<Self, SetupError> {
        let Views {
            entries,
            lanes,
            announced,
        } = views;
        // SAFETY: the entries lie in the region (contract of this function), which outlives all
        // views (see the order of the fields). There are lanes for the number of every entry.
        let member = unsafe { Membership::join(region, entries, |entry| lanes.are_unused(entry)) }?;
        let (entry, depth) = (member.entry, lanes.depth());
        // SAFETY: as above. Only this client has the entry, and its lanes are empty (C2 of
        // `docs/shm-protocols.md`). The requests have one producer, this client; `call` publishes
        // only while fewer than `depth` calls are unanswered, and the server receives requests in
        // order before it answers them. Any bytes are a valid response, by `Plain`.
        let (requests, responses, given_up) = unsafe {
            (
                LaneTx::new(lanes.requests_of(entry), depth as u64, 0),
                LaneRx::new(lanes.responses_to(entry), depth as u64, 0),
                lanes.given_up_by(entry),
            )
        };
        Ok(Self {
            announced,
            requests,
            responses,
            calls: Calls::new(depth),
            given_up,
            type_tag,
            polling: Patience::new(),
            patience: Duration::ZERO,
            member,
        })
    }

    /// Connects to the server that has the name now: the next server if the session is over. Tries
    /// again for `timeout` if the server has not started yet or is full. Every call must have
    /// ended: poll until the end of the session first.
    ///
    /// # Errors
    /// [`SetupError`]; the client is as before.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), SetupError> {
        let next = self.next(timeout, Self::connect_in)?;
        *self = Self {
            patience: self.patience,
            ..next
        };
        Ok(())
    }

    pub(crate) fn next<C>(
        &self,
        timeout: Duration,
        connect_in: impl Fn(&Dir, &str, u64) -> Result<C, SetupError>,
    ) -> Result<C, SetupError> {
        if self.in_flight() > 0 {
            return Err(SetupError::CallsInFlight(self.in_flight()));
        }
        let region = &self.member.region;
        blocking::retry(timeout, SetupError::may_pass, || {
            connect_in(region.dir(), region.name(), self.type_tag)
        })
    }

    /// Returns this client's number at the server, below the server's `max_clients`.
    #[must_use]
    pub fn id(&self) -> usize {
        self.member.entry
    }

    /// Returns the number of calls that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.calls.waiting()
    }

    /// Returns the number of calls that can be unanswered at a time: the server's `depth`.
    #[must_use]
    #[inline(always)]
    pub fn depth(&self) -> usize {
        self.calls.capacity()
    }

    /// Sends one request. The server can see the request when this function returns, and sees the
    /// calls of one client in their order. [`poll`](Self::poll) returns `user_data` with the reply,
    /// exactly once. Replies arrive in any order.
    ///
    /// # Errors
    /// [`CallError`], with the request and the user data; nothing was sent.
    #[inline(always)]
    pub fn call(&mut self, request: Req, user_data: U) -> Result<CallToken, CallError<Req, U>> {
        let (call, request) = self.begin(request, user_data)?;
        self.send(call, request);
        Ok(call)
    }

    /// Like [`call`](Self::call), with a deadline: without a reply the call ends with
    /// [`CallFailure::TimedOut`] in the first poll after `timeout`. The call keeps its slot like a
    /// [cancelled](Self::cancel) call.
    ///
    /// # Errors
    /// Like [`call`](Self::call).
    pub fn call_within(
        &mut self,
        request: Req,
        user_data: U,
        timeout: Duration,
    ) -> Result<CallToken, CallError<Req, U>> {
        let call = self.call(request, user_data)?;
        self.end_within(call, timeout);
        Ok(call)
    }

    pub(crate) fn end_within(&mut self, call: CallToken, timeout: Duration) {
        self.calls
            .end_within(call, self.member.region.clock().now_ns(), timeout);
    }

    /// Ends a call at once and returns its user data; `None` if the call has ended. A server that
    /// asks sees that the call has ended ([`Server::is_wanted`](crate::Server::is_wanted)). The
    /// reply is discarded; the call keeps its slot until the reply arrives.
    pub fn cancel(&mut self, call: CallToken) -> Option<U> {
        let user_data = self.calls.abandon(call)?;
        // After the end of the session the words may belong to the next client of the entry.
        if self.member.holding.lasts() {
            self.given_up.tell(call);
        }
        Some(user_data)
    }

    /// Begins a call. Returns the request, which must be [sent](Self::send) next. The tag's slot is
    /// below [`depth`](Self::depth) and belongs to the call until it ends.
    #[inline(always)]
    pub(crate) fn begin<R>(
        &mut self,
        request: R,
        user_data: U,
    ) -> Result<(CallToken, R), CallError<R, U>> {
        if let Some(end) = self.member.end() {
            return Err(CallError::Closed {
                request,
                user_data,
                reason: end,
            });
        }
        let depth = self.depth();
        match self.calls.insert(user_data) {
            Ok(call) => Ok((call, request)),
            Err(user_data) => Err(CallError::Full {
                request,
                user_data,
                depth,
            }),
        }
    }

    #[inline(always)]
    pub(crate) fn send(&mut self, call: CallToken, request: Req) {
        self.publish(call, request);
        if self.member.holding.must_announce() {
            self.announce();
        }
    }

    #[inline(always)]
    fn publish(&mut self, call: CallToken, request: Req) {
        // L3 (`docs/shm-protocols.md`): there is room, as fewer than `depth` earlier calls are
        // unanswered, and requests are taken in order.
        let ahead = if self.calls.len() > 1 {
            Ahead::Slot
        } else {
            Ahead::Nothing
        };
        self.requests.publish_tagged(call.pack(0), request, ahead);
    }

    #[cold]
    fn announce(&self) {
        self.announced
            .announce(self.member.entry, self.member.holding.armed());
        self.member.entries.server_sleep().wake();
    }

    /// Sleeps until [`poll`](Self::poll) has something to do: a reply, a deadline, or the end of
    /// the session; at most for `timeout` (`None`: without a limit). Returns whether there is
    /// something. Does not spin. The death of a server is detected within
    /// [`SLICE`](copyrpc_shm::sleep::SLICE) after the kernel detects it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// Passes the replies that have arrived to `f`, at most [`depth`](Self::depth) of them. Returns
    /// their number.
    ///
    /// # Errors
    /// [`SessionEnd`] in every poll after the end of the session; the first poll that returns it
    /// has passed every unanswered call to `f`, as failed. The death of a server is detected within
    /// 64 empty polls after the kernel detects it (about a millisecond).
    #[inline(always)]
    pub fn poll(
        &mut self,
        mut f: impl FnMut(U, Result<Resp, CallFailure>),
    ) -> Result<usize, SessionEnd> {
        self.poll_slots(|user_data, _, outcome| f(user_data, outcome))
    }

    /// Like [`poll`](Self::poll), with the slot of each call (0 if there is no reply).
    #[inline(always)]
    pub(crate) fn poll_slots(
        &mut self,
        mut f: impl FnMut(U, usize, Result<Resp, CallFailure>),
    ) -> Result<usize, SessionEnd> {
        let ended = self.take_replies(&mut f);
        if self.calls.has_deadlines() {
            return self.poll_timed(ended, f);
        }
        if ended == 0 {
            self.poll_empty(f)
        } else {
            Ok(ended)
        }
    }

    /// Ends the calls whose deadline has passed, after the replies of this poll.
    #[cold]
    fn poll_timed(
        &mut self,
        mut ended: usize,
        mut f: impl FnMut(U, usize, Result<Resp, CallFailure>),
    ) -> Result<usize, SessionEnd> {
        let given_up = self.member.holding.lasts().then_some(self.given_up);
        if self.calls.is_timed() {
            ended += self
                .calls
                .expire(self.member.region.clock().now_ns(), |call, user_data| {
                    given_up.inspect(|given_up| given_up.tell(call));
                    f(user_data, 0, Err(CallFailure::TimedOut))
                });
        }
        if ended == 0 {
            self.poll_empty(f)
        } else {
            Ok(ended)
        }
    }

    /// Returns the time until the earliest deadline or the next check for the server's death.
    fn left(&self) -> Duration {
        self.calls
            .until_deadline(|| self.member.region.clock().now_ns())
            .unwrap_or(SLICE)
            .min(SLICE)
    }

    #[inline(always)]
    fn take_replies(&mut self, f: &mut impl FnMut(U, usize, Result<Resp, CallFailure>)) -> usize {
        let Self {
            responses, calls, ..
        } = self;
        let (mut ended, mut expected) = (0, calls.len());
        while ended < expected {
            let Some((word, response)) = responses.pop_tagged() else {
                break;
            };
            let tag = CallToken::without_note(word);
            if let Some(user_data) = calls.take(tag) {
                ended += 1;
                f(user_data, tag.slot(), Ok(response.read()));
            } else if Self::take_unanswered(calls, word, f) {
                ended += 1;
            } else {
                expected -= 1;
            }
        }
        ended
    }

    /// Takes an answer whose note, the outcome of the call, is not [`ANSWERED`], or whose call has
    /// ended. `word` contains the answer's tag and note. Returns whether the answer ends a call.
    #[cold]
    fn take_unanswered(
        calls: &mut Calls<U>,
        word: u64,
        f: &mut impl FnMut(U, usize, Result<Resp, CallFailure>),
    ) -> bool {
        let (tag, note) = CallToken::unpack(word);
        // C5: an answer whose call has ended before, or whose tag no call has, ends no call.
        let taken = if note == ANSWERED {
            None
        } else {
            calls.take(tag)
        };
        taken
            .map(|user_data| f(user_data, 0, Err(CallFailure::of_note(note))))
            .is_some()
    }

    #[cold]
    fn poll_empty(
        &mut self,
        mut f: impl FnMut(U, usize, Result<Resp, CallFailure>),
    ) -> Result<usize, SessionEnd> {
        let Some(end) = self.member.end() else {
            return Ok(0);
        };
        // Answers that the server published before its end are visible now, and end their calls.
        let ended = self.take_replies(&mut f);
        if ended > 0 {
            return Ok(ended);
        }
        let failed = if self.member.is_stopped {
            CallFailure::NotSent
        } else {
            CallFailure::Closed(end)
        };
        self.calls
            .take_all(|user_data| f(user_data, 0, Err(failed)));
        Err(end)
    }

    /// Writes a request without publishing it, like a `SIGKILL` in the middle of a call, for
    /// models.
    #[cfg(all(test, loom))]
    pub(crate) fn call_half(&self, request: Req) {
        self.requests.publish_half(Tagged {
            tag: 0,
            payload: request,
        });
    }

    /// Publishes a request without announcing it, like a `SIGKILL` between the two, for models.
    #[cfg(all(test, loom))]
    pub(crate) fn call_unannounced(&mut self, request: Req, user_data: U) {
        let (call, request) = self.begin(request, user_data).unwrap();
        self.publish(call, request);
    }

    /// Leaves the state after a `SIGKILL`, for models.
    #[cfg(all(test, loom))]
    pub(crate) fn die(self) {
        self.member.die();
    }
}

impl<Req: Plain, Resp: Plain, W: Announce> Client<Req, Resp, (), W> {
    /// Makes a call and waits for the reply, at most for `timeout`, counted from the 64th poll: a
    /// call that is answered earlier does not read the clock. If the session is over, connects to
    /// the next server first, as [`connect_within`](Self::connect_within) does. The client must
    /// have no other unanswered call.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn ask(&mut self, request: Req, timeout: Duration) -> Result<Resp, ClientError> {
        let patience = self.prepare_to_ask()?;
        let timeout =
            blocking::connect_first(timeout, patience, |patience| self.reconnect(patience))?;
        let call = self.call(request, ())?;
        Ok(self.answer(call, timeout)?.1)
    }

    /// Returns [`ClientError::Full`] if another call is unanswered. If cancelled calls hold all
    /// slots, takes their late replies, since [`ask`](Self::ask) alone would never poll. Returns
    /// the maximum time to wait for the next server, if the session is over.
    pub(crate) fn prepare_to_ask(&mut self) -> Result<Option<Duration>, ClientError> {
        if self.in_flight() > 0 {
            return Err(ClientError::Full);
        }
        if self.calls.len() == self.depth() {
            let _ended = self.poll(|(), _| ());
        }
        Ok(self.member.check().map(|_| self.patience))
    }

    /// Waits for the reply to the only unanswered call, at most for `timeout`. Returns the call's
    /// slot and the reply.
    pub(crate) fn answer(
        &mut self,
        call: CallToken,
        timeout: Duration,
    ) -> Result<(usize, Resp), ClientError> {
        let mut ended = None;
        self.polling.reset();
        loop {
            let polled = self.poll_slots(|(), slot, outcome| {
                ended = Some(outcome.map(|response| (slot, response)))
            });
            match (ended, polled) {
                (Some(outcome), _) => return outcome.map_err(CallFailure::of_client),
                (None, Err(end)) => return Err(ClientError::Closed(end)),
                (None, Ok(_)) => {
                    if let Some(start) = self.polling.idle() {
                        self.wait(None);
                        self.polling.slept(start);
                    } else if self.polling.is_clock_due() {
                        self.end_within(call, timeout);
                    }
                }
            }
        }
    }
}

/// The condition of [`Client::wait`], for a [`copyrpc_shm::sleep::wait`] on several things.
impl<Req: Plain, Resp: Plain, U, W: Announce> Watch for Client<Req, Resp, U, W> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.member.holding.sleep().word());
    }

    fn look(&mut self, _: bool) -> bool {
        self.left().is_zero()
            || (self.responses.is_ready() && !self.calls.is_empty())
            || self.member.end().is_some()
    }

    fn slice(&mut self) -> Duration {
        self.left()
    }

    fn check(&mut self) -> bool {
        self.left().is_zero() || self.member.check().is_some()
    }
}
