//! The server's side of its clients' sessions: a pair of lanes for each, of which it polls those with something in them.
//!
//! What tells it of a client that begins to call, a set of bits or a ring of names, is its owner's: a [`Wakes`].

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::time::Instant;

use calls::{Tag, Tagged};

use crate::clients::{LOOKS_PER_ROUND, Patrol, Seats};
use crate::lane::{LaneRx, LaneTx, Slot};
use crate::lock::LockFile;
use crate::plain::Plain;
use crate::ready::{ARMED, HotSet, Lanes, Wakes};
use crate::sleep::{Watch, Word};
use crate::sync::{AtomicU32, Ordering};

/// Where the lanes of all clients lie: client `c` has its requests at `requests + c x request_stride` and its responses at `responses +
/// c x response_stride`, in bytes, `depth` slots each.
pub struct LanePairs<Req, Resp> {
    requests: NonNull<u8>,
    responses: NonNull<u8>,
    request_stride: usize,
    response_stride: usize,
    depth: usize,
    _types: PhantomData<(Req, Resp)>,
}

impl<Req, Resp> Clone for LanePairs<Req, Resp> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Req, Resp> Copy for LanePairs<Req, Resp> {}

impl<Req, Resp> fmt::Debug for LanePairs<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LanePairs").field("depth", &self.depth).finish_non_exhaustive()
    }
}

// SAFETY: addresses in shared memory; what is done there is the contract of the ends that are made from them.
unsafe impl<Req: Send, Resp: Send> Send for LanePairs<Req, Resp> {}

impl<Req, Resp> LanePairs<Req, Resp> {
    /// The lanes at these addresses; the strides are in bytes.
    ///
    /// # Safety
    /// For every client that is asked for below, both lanes lie in zeroed shared memory, aligned to 64 B, that stays mapped as long as
    /// anything made from this value; they overlap with nothing. `depth` is a power of two.
    #[must_use]
    pub unsafe fn new(requests: (NonNull<u8>, usize), responses: (NonNull<u8>, usize), depth: usize) -> Self {
        let ((requests, request_stride), (responses, response_stride)) = (requests, responses);
        Self { requests, responses, request_stride, response_stride, depth, _types: PhantomData }
    }

    /// Slots of each lane.
    #[must_use]
    #[inline(always)]
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// # Safety
    /// There is a client of this number.
    pub(crate) unsafe fn requests_of(&self, client: usize) -> NonNull<Slot<Tagged<Req>>> {
        // SAFETY: contract of this function and of `new`.
        unsafe { self.requests.add(client * self.request_stride).cast() }
    }

    /// # Safety
    /// There is a client of this number.
    pub(crate) unsafe fn responses_to(&self, client: usize) -> NonNull<Slot<Tagged<Resp>>> {
        // SAFETY: contract of this function and of `new`.
        unsafe { self.responses.add(client * self.response_stride).cast() }
    }

    /// Whether the client has made no call yet. The first request lies in the first slot.
    ///
    /// # Safety
    /// There is a client of this number.
    pub(crate) unsafe fn are_unused(&self, client: usize) -> bool {
        // SAFETY: contract of this function and of `new`.
        unsafe { self.requests_of(client).as_ref().is_empty() }
    }

    /// Empties both lanes of a client.
    ///
    /// # Safety
    /// There is a client of this number, and nobody uses its lanes: it is gone, and no end of this process refers to them.
    unsafe fn reset(&self, client: usize) {
        for slot in 0..self.depth {
            // SAFETY: contract of this function.
            unsafe {
                self.requests_of(client).add(slot).as_ref().clear();
                self.responses_to(client).add(slot).as_ref().clear();
            }
        }
    }
}

/// A request and whom to answer.
#[derive(Debug, Clone, Copy)]
pub struct Arrived<Req> {
    /// Who asks.
    pub from: Asker,
    /// The request: a copy that the client cannot change any more.
    pub payload: Req,
}

/// One call of one client. Any number may stand for the tag's slot, if the client is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Asker {
    client: u32,
    generation: u32,
    tag: Tag,
}

impl Asker {
    /// The client's number, below the number of seats.
    #[must_use]
    #[inline(always)]
    pub fn client(&self) -> usize {
        self.client as usize
    }

    /// The tag that the client gave the call.
    #[must_use]
    #[inline(always)]
    pub fn tag(&self) -> Tag {
        self.tag
    }
}

/// The server's end of one client's session.
struct Session<Req, Resp> {
    generation: u32,
    requests: LaneRx<Tagged<Req>>,
    responses: LaneTx<Tagged<Resp>>,
    /// Requests taken and not answered. Never above the depth.
    held: usize,
}

/// All sessions of a server. Allocates while it meets clients, and for the most requests that ever waited; otherwise never.
pub struct Sessions<Req, Resp> {
    hot: HotSet,
    patrol: Patrol,
    table: Table<Req, Resp>,
    /// Requests taken from the lanes and not yet received, at most seats x depth.
    inbox: VecDeque<Arrived<Req>>,
    started: Instant,
}

struct Table<Req, Resp> {
    sessions: Vec<Option<Session<Req, Resp>>>,
    seats: Seats,
    lanes: LanePairs<Req, Resp>,
}

impl<Req, Resp> fmt::Debug for Sessions<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("hot", &self.hot).field("waiting", &self.inbox.len()).finish_non_exhaustive()
    }
}

fn ns_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl<Req: Plain, Resp: Plain> Sessions<Req, Resp> {
    /// Makes the seats of a new region fit: who calls first is to say so.
    pub fn prepare(seats: &Seats) {
        seats.prepare();
    }

    /// No sessions yet.
    ///
    /// # Safety
    /// There are lanes for every seat, and they, like the seats, outlive this value, which is their only server.
    #[must_use]
    pub unsafe fn new(seats: Seats, lanes: LanePairs<Req, Resp>) -> Self {
        Self {
            hot: HotSet::new(seats.count()),
            patrol: Patrol::default(),
            table: Table { sessions: (0..seats.count()).map(|_| None).collect(), seats, lanes },
            inbox: VecDeque::new(),
            started: Instant::now(),
        }
    }

    /// The clients' seats.
    #[must_use]
    #[inline(always)]
    pub fn seats(&self) -> &Seats {
        &self.table.seats
    }

    /// Requests that [`recv`](Self::recv) can take.
    #[must_use]
    #[inline(always)]
    pub fn waiting(&self) -> usize {
        self.inbox.len()
    }

    /// One bounded pass over the clients that have something to say: takes at most 16 requests from each of at most 8 of them, in rotation,
    /// leaving out those whose bit is set in `mask` (client `c` is bit `c % 64` of word `c / 64`; missing words are zero). Then looks for clients
    /// that are gone, which hold locks in `file`; `bury` hears of each.
    #[inline]
    pub fn pass(&mut self, wakes: &mut impl Wakes, mask: &[u64], file: &LockFile, mut bury: impl FnMut(usize)) {
        let Self { hot, patrol, table, inbox, started } = self;
        let now_ns = || ns_since(*started);
        hot.pass(wakes, &mut Round { table, inbox, mask }, now_ns);
        let seats = table.seats;
        let was_round = patrol.pass(&seats, file, now_ns, |client, _| {
            forget(client, hot, inbox, table);
            bury(client);
        });
        if was_round {
            hot.mend(&Round { table, inbox, mask: &[] }, LOOKS_PER_ROUND);
        }
    }

    /// The oldest request that [`pass`](Self::pass) has taken.
    #[inline]
    pub fn recv(&mut self) -> Option<Arrived<Req>> {
        self.inbox.pop_front()
    }

    /// Answers a request with what `make` gives, which is called while the place of the answer is the server's; `note` says how the call went.
    /// The client can see the answer when this returns. Call it once for each request. Whether the client was still there.
    #[inline]
    pub fn answer(&mut self, to: &Asker, note: u8, make: impl FnOnce() -> Resp) -> bool {
        let session = self.table.sessions.get_mut(to.client()).and_then(Option::as_mut);
        // C5: a late answer to a former holder of the seat reaches nobody.
        let Some(session) = session.filter(|session| session.generation == to.generation) else { return false };
        session.held = session.held.saturating_sub(1);
        // L3: there is room, as the client has at most `depth` unanswered calls, counting the answers it has not taken yet.
        session.responses.publish(Tagged { tag: to.tag.pack(note), payload: make() });
        if session.held > 0 {
            session.responses.fetch_ahead();
        }
        if let Some(sleep) = self.table.seats.client_sleep(to.client()) {
            sleep.wake();
        }
        true
    }

    /// Ends the session of a client that asked for something that breaks the protocol.
    pub fn evict(&self, from: &Asker) {
        self.table.seats.evict(from.client(), from.generation);
    }

    /// What a server that sleeps waits for: something to pass for or to receive. Looks for dead clients in every slice; `bury` hears of those
    /// that are gone.
    pub fn watch<'a>(&'a mut self, wakes: &'a mut impl Wakes, file: &'a LockFile, bury: impl FnMut(usize) + 'a) -> impl Watch + 'a {
        Idle { sessions: self, wakes, file, bury }
    }
}

/// Forgets a client that is gone, and makes its seat fit for the next.
fn forget<Req: Plain, Resp: Plain>(client: usize, hot: &mut HotSet, inbox: &mut VecDeque<Arrived<Req>>, table: &mut Table<Req, Resp>) {
    hot.remove(client);
    inbox.retain(|arrived| arrived.from.client() != client);
    if let Some(session) = table.sessions.get_mut(client) {
        *session = None;
        // SAFETY: there are lanes for every seat; the client is gone, and our ends went with the session.
        unsafe { table.lanes.reset(client) };
    }
    if let Some(armed) = table.seats.armed(client) {
        armed.store(ARMED, Ordering::Relaxed);
    }
}

impl<Req: Plain, Resp: Plain> Table<Req, Resp> {
    /// The server's end of the session of `client`, begun at the first sight of it.
    #[inline(always)]
    fn current(&mut self, client: usize) -> Option<&mut Session<Req, Resp>> {
        let generation = self.seats.taken_by(client)?;
        let session = self.sessions.get_mut(client)?;
        if session.is_none() {
            let depth = self.lanes.depth as u64;
            // SAFETY: there are lanes for every seat, and they outlive the sessions (contract of `Sessions::new`). This is the only consumer of
            // the requests and the only producer of the responses, both begin at 0 with empty slots, and `answer` publishes no more than the
            // client has room for. Any bytes are a valid request, by `Plain`.
            let (requests, responses) =
                unsafe { (LaneRx::new(self.lanes.requests_of(client), depth, 0), LaneTx::new(self.lanes.responses_to(client), depth, 0)) };
            *session = Some(Session { generation, requests, responses, held: 0 });
        }
        let session = session.as_mut()?;
        if session.generation != generation {
            // C5: somebody has overwritten the seat. What the new holder sends would be taken for its predecessor's.
            self.seats.evict(client, generation);
            return None;
        }
        Some(session)
    }

    /// Whether the first request of a session not begun is there.
    fn first_is_ready(&self, client: usize) -> bool {
        // SAFETY: as in `current`; the seat is taken, so there is such a client, and nothing is consumed here.
        let requests = unsafe { LaneRx::new(self.lanes.requests_of(client), self.lanes.depth as u64, 0) };
        requests.is_ready()
    }
}

/// One pass over the hot lanes.
struct Round<'a, Req, Resp> {
    table: &'a mut Table<Req, Resp>,
    inbox: &'a mut VecDeque<Arrived<Req>>,
    mask: &'a [u64],
}

impl<Req: Plain, Resp: Plain> Lanes for Round<'_, Req, Resp> {
    #[inline(always)]
    fn visit(&mut self, client: usize, budget: usize) -> usize {
        if self.mask.get(client / 64).is_some_and(|word| word >> (client % 64) & 1 != 0) {
            return 0;
        }
        let (seats, depth) = (self.table.seats, self.table.lanes.depth);
        let Some(session) = self.table.current(client) else { return 0 };
        let mut taken = 0;
        while taken < budget {
            if session.held >= depth {
                if session.requests.is_ready() {
                    seats.evict(client, session.generation);
                }
                break;
            }
            let Some(request) = session.requests.pop() else { break };
            let (tag, _) = Tag::unpack(request.tag);
            let from = Asker { client: client as u32, generation: session.generation, tag };
            self.inbox.push_back(Arrived { from, payload: request.payload });
            session.held += 1;
            taken += 1;
        }
        taken
    }

    fn is_ready(&self, client: usize) -> bool {
        if self.table.seats.taken_by(client).is_none() {
            return false;
        }
        let begun = self.table.sessions.get(client).and_then(Option::as_ref);
        begun.map_or_else(|| self.table.first_is_ready(client), |session| session.requests.is_ready())
    }

    fn armed(&self, client: usize) -> Option<&AtomicU32> {
        self.table.seats.armed(client)
    }
}

/// A server that waits.
struct Idle<'a, Req, Resp, W, B> {
    sessions: &'a mut Sessions<Req, Resp>,
    wakes: &'a mut W,
    file: &'a LockFile,
    bury: B,
}

impl<Req: Plain, Resp: Plain, W: Wakes, B: FnMut(usize)> Watch for Idle<'_, Req, Resp, W, B> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.sessions.table.seats.server_sleep().word());
    }

    fn arm(&mut self) {
        let Sessions { hot, patrol, table, inbox, .. } = &mut *self.sessions;
        patrol.slept();
        hot.arm(&Round { table, inbox, mask: &[] });
    }

    fn look(&mut self, is_told: bool) -> bool {
        let Sessions { hot, table, inbox, .. } = &mut *self.sessions;
        let is_quiet = inbox.is_empty() && !self.wakes.any();
        !(hot.cool(&Round { table, inbox, mask: &[] }, is_told) && is_quiet)
    }

    fn check(&mut self) -> bool {
        let Self { sessions, file, bury, .. } = self;
        let Sessions { hot, patrol, table, inbox, started } = &mut **sessions;
        let seats = table.seats;
        patrol.check(&seats, file, ns_since(*started), |client, _| {
            forget(client, hot, inbox, table);
            bury(client);
        });
        // What it takes up is looked at again, and may be empty.
        hot.mend(&Round { table, inbox, mask: &[] }, usize::MAX);
        false
    }
}

#[cfg(all(test, loom))]
mod model;
