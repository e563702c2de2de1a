//! The server's side of its clients' sessions: a pair of lanes for each client. The server polls
//! the lanes of active clients only.
//!
//! The owner of [`Sessions`] has the [`Wakes`] through which a client announces that it begins to
//! call: a set of bits, or a ring of client numbers.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ptr::NonNull;

use copyrpc_calls::{ANSWERED, DROPPED, Event, Events, Tag, Tagged};
use copyrpc_shm::clock::Clock;
use copyrpc_shm::lane::{Ahead, LaneRx, LaneTx, Slot};
use copyrpc_shm::lock::LockFile;
use copyrpc_shm::plain::Plain;
use copyrpc_shm::ready::{ARMED, HotSet, Lanes, Wakes};
use copyrpc_shm::sleep::{Watch, Word};
use copyrpc_shm::sync::{AtomicU32, AtomicU64, Ordering};

use crate::entries::{ENTRIES_PER_ROUND, Entries, Holding, LOOKS_PER_ROUND, Reaper};
use crate::given_up::GivenUp;

/// The lanes of all clients, with `depth` slots each. The requests of client `c` begin `c x
/// request_stride` bytes after `requests`, its responses `c x response_stride` bytes after
/// `responses`, and the words of the calls that it gave up `c x depth` words after `given_up`.
#[derive(Clone, Copy)]
pub(crate) struct LanePairs<Req, Resp> {
    requests: NonNull<u8>,
    responses: NonNull<u8>,
    given_up: NonNull<AtomicU64>,
    request_stride: usize,
    response_stride: usize,
    depth: usize,
    _types: PhantomData<(Req, Resp)>,
}

// SAFETY: `LanePairs` holds only addresses; the ends that are made from it uphold the aliasing
// rules.
unsafe impl<Req: Send, Resp: Send> Send for LanePairs<Req, Resp> {}

impl<Req, Resp> LanePairs<Req, Resp> {
    /// Makes the lanes at these addresses; the strides are in bytes.
    ///
    /// # Safety
    /// Both lanes of every client lie in zeroed shared memory, aligned to 64 B. The memory stays
    /// mapped as long as any end that is made from this value exists. No two lanes overlap. `depth`
    /// is a power of two. The same holds for `depth` words of every client at `given_up`.
    pub(crate) unsafe fn new(
        requests: (NonNull<u8>, usize),
        responses: (NonNull<u8>, usize),
        given_up: NonNull<AtomicU64>,
        depth: usize,
    ) -> Self {
        let ((requests, request_stride), (responses, response_stride)) = (requests, responses);
        Self {
            requests,
            responses,
            given_up,
            request_stride,
            response_stride,
            depth,
            _types: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the request lane of a client.
    ///
    /// # Safety
    /// The client's number is valid.
    pub(crate) unsafe fn requests_of(&self, client: usize) -> NonNull<Slot<Tagged<Req>>> {
        // SAFETY: the client's number is valid (contract of this function), so its lane lies in the
        // memory that `new` was given.
        unsafe { self.requests.add(client * self.request_stride).cast() }
    }

    /// Returns the response lane of a client.
    ///
    /// # Safety
    /// The client's number is valid.
    pub(crate) unsafe fn responses_to(&self, client: usize) -> NonNull<Slot<Tagged<Resp>>> {
        // SAFETY: the client's number is valid (contract of this function), so its lane lies in the
        // memory that `new` was given.
        unsafe { self.responses.add(client * self.response_stride).cast() }
    }

    /// Returns the words of the calls that a client gave up.
    ///
    /// # Safety
    /// The client's number is valid.
    pub(crate) unsafe fn given_up_by(&self, client: usize) -> GivenUp {
        // SAFETY: the client's number is valid (contract of this function), so its words lie in the
        // memory that `new` was given.
        unsafe { GivenUp::new(self.given_up.add(client * self.depth), self.depth) }
    }

    /// Returns whether no request was published in the client's lane since the lane was last reset:
    /// the first request would lie in the first slot.
    ///
    /// # Safety
    /// The client's number is valid.
    pub(crate) unsafe fn are_unused(&self, client: usize) -> bool {
        // SAFETY: the client's number is valid (contract of this function), so its first slot lies
        // in the memory that `new` was given. The slot is only read, through an atomic.
        unsafe { self.requests_of(client).as_ref().is_empty() }
    }

    /// Empties both lanes of a client, and forgets the calls that it gave up.
    ///
    /// # Safety
    /// The client's number is valid. The client is gone, and this process has no end of its lanes.
    unsafe fn reset(&self, client: usize) {
        // SAFETY: the client's number is valid (contract of this function).
        unsafe { self.given_up_by(client) }.reset();
        for slot in 0..self.depth {
            // SAFETY: the client's number is valid, so both lanes lie in the memory that `new` was
            // given. No thread uses them: the client is gone, and this process has no end of them.
            unsafe {
                self.requests_of(client).add(slot).as_ref().clear();
                self.responses_to(client).add(slot).as_ref().clear();
            }
        }
    }
}

/// The identity of a client's call. The tag's slot may be any number if the client is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CallId {
    client: u32,
    generation: u32,
    pub(crate) tag: Tag,
}

impl CallId {
    #[inline(always)]
    pub(crate) fn client(&self) -> usize {
        self.client as usize
    }
}

struct Session<Req, Resp> {
    generation: u32,
    /// Requests received and not answered.
    held: u32,
    holding: Holding,
    requests: LaneRx<Tagged<Req>>,
    responses: LaneTx<Tagged<Resp>>,
    /// Number of the first request that [`Table::find`] has not found. The lane's position counts
    /// instead if it is higher.
    next: u64,
    /// A bit for each slot of the client's calls. It is set while a request of that slot is held,
    /// and for slots that do not exist. So at most `depth` requests are held.
    in_use: Box<[u64]>,
}

impl<Req, Resp> Session<Req, Resp> {
    /// Returns the word of `in_use` with the bit of a slot, and the bit; `None` if there is no such
    /// bit.
    #[inline(always)]
    fn bit(&mut self, tag: Tag) -> Option<(&mut u64, u64)> {
        Some((
            self.in_use.get_mut(tag.slot() / 64)?,
            1 << (tag.slot() % 64),
        ))
    }
}

impl<Req: Plain, Resp> Session<Req, Resp> {
    /// Returns the number of the first waiting request that was not found.
    #[inline(always)]
    fn next(&self) -> u64 {
        self.next.max(self.requests.position())
    }
}

/// All sessions of a server. Allocates when a session begins, and when more batches of found
/// requests wait to be received than ever before.
pub(crate) struct Sessions<Req, Resp> {
    hot: HotSet,
    reaper: Reaper,
    table: Table<Req, Resp>,
    clock: Clock,
}

struct Table<Req, Resp> {
    sessions: Box<[Option<Session<Req, Resp>>]>,
    inbox: Inbox,
    entries: Entries,
    lanes: LanePairs<Req, Resp>,
    events: Events<usize>,
}

/// Requests found by a pass and not received. They stay in their lanes, so each is copied once.
#[derive(Debug, Default)]
struct Inbox {
    /// The batch that requests are received from.
    current: Batch,
    later: VecDeque<Batch>,
    /// Number of requests in the later batches. Together with the current batch, there are at most
    /// entries x depth requests.
    later_waiting: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Batch {
    client: u32,
    count: u32,
}

impl Inbox {
    #[inline(always)]
    fn waiting(&self) -> usize {
        self.current.count as usize + self.later_waiting
    }

    #[inline(always)]
    fn push(&mut self, client: usize, count: usize) {
        let batch = Batch {
            client: client as u32,
            count: count as u32,
        };
        if self.waiting() == 0 {
            self.current = batch;
        } else {
            self.later.push_back(batch);
            self.later_waiting += count;
        }
    }

    /// Removes the next request from the inbox. Returns its client.
    #[inline(always)]
    fn pop(&mut self) -> Option<usize> {
        if self.current.count == 0 {
            self.current = self.later.pop_front()?;
            self.later_waiting -= self.current.count as usize;
        }
        self.current.count -= 1;
        Some(self.current.client as usize)
    }

    #[cold]
    fn forget(&mut self, client: usize) {
        if self.current.client as usize == client {
            self.current.count = 0;
        }
        self.later.retain(|batch| batch.client as usize != client);
        self.later_waiting = self.later.iter().map(|batch| batch.count as usize).sum();
    }
}

impl<Req: Plain, Resp: Plain> Sessions<Req, Resp> {
    /// Makes a set without sessions.
    ///
    /// # Safety
    /// There are lanes for every entry. Lanes and entries outlive this value, which is their only
    /// server.
    pub(crate) unsafe fn new(entries: Entries, lanes: LanePairs<Req, Resp>, clock: Clock) -> Self {
        Self {
            hot: HotSet::new(entries.count()),
            reaper: Reaper::of(entries),
            table: Table {
                sessions: (0..entries.count()).map(|_| None).collect(),
                inbox: Inbox::default(),
                entries,
                lanes,
                events: Events::default(),
            },
            clock,
        }
    }

    /// Passes the beginnings and the ends of sessions to `events` from now on.
    pub(crate) fn hear(&mut self, events: Events<usize>) {
        self.table.events = events;
    }

    /// Returns the number of requests that [`recv`](Self::recv) can take.
    #[inline(always)]
    pub(crate) fn waiting(&self) -> usize {
        self.table.inbox.waiting()
    }

    /// Does one bounded pass over the active clients: finds at most 16 requests of each of at most
    /// 8 clients, in rotation. Skips the clients whose bit is set in `mask` (client `c` is bit `c %
    /// 64` of word `c / 64`; missing words are zero). Before that, reaps clients that have ended,
    /// if a search for them is due; living clients hold locks in `file`.
    #[inline(always)]
    pub(crate) fn pass(&mut self, wakes: &mut impl Wakes, mask: &[u64], file: &LockFile) {
        self.pass_over(wakes, file, |table, client, budget| {
            let is_masked = mask
                .get(client / 64)
                .is_some_and(|word| word >> (client % 64) & 1 != 0);
            if is_masked {
                0
            } else {
                table.find(client, budget)
            }
        });
    }

    /// Like [`pass`](Self::pass), and answers each request with the result of `handler`. Returns
    /// the number of answered requests. No request may be [waiting](Self::waiting).
    #[inline(always)]
    pub(crate) fn pass_answering(
        &mut self,
        wakes: &mut impl Wakes,
        file: &LockFile,
        mut handler: impl FnMut(&Req) -> Resp,
    ) -> usize {
        self.pass_over(wakes, file, |table, client, budget| {
            table.answer(client, budget, &mut handler)
        })
    }

    #[inline(always)]
    fn pass_over(
        &mut self,
        wakes: &mut impl Wakes,
        file: &LockFile,
        visit: impl FnMut(&mut Table<Req, Resp>, usize, usize) -> usize,
    ) -> usize {
        let Self {
            hot,
            reaper,
            table,
            clock,
        } = self;
        if reaper.is_due() {
            reap_clients(hot, reaper, table, file);
        }
        hot.pass(wakes, table, visit, || reaper.tick(clock.now_ns()))
    }

    /// Returns the oldest request that [`pass`](Self::pass) has found, and its call.
    #[inline(always)]
    pub(crate) fn recv(&mut self) -> Option<(CallId, Req)> {
        loop {
            let client = self.table.inbox.pop()?;
            if let Some(Some(session)) = self.table.sessions.get_mut(client) {
                if let Some((tag, payload)) = session.requests.pop_tagged() {
                    let (tag, payload) = (Tag::without_note(tag), payload.read());
                    if let Some((word, bit)) =
                        session.bit(tag).filter(|(word, bit)| **word & bit == 0)
                    {
                        *word |= bit;
                        session.held += 1;
                        return Some((
                            CallId {
                                client: client as u32,
                                generation: session.generation,
                                tag,
                            },
                            payload,
                        ));
                    }
                }
            }
            // C5 (`docs/shm-protocols.md`): a broken client took the request back, gave it a slot
            // that does not exist, or repeated a call that is held.
            evict_client(&self.table.entries, client);
            self.table.inbox.forget(client);
        }
    }

    /// Answers a request with the result of `make`. Calls `make` only if the client is still there,
    /// and before the client can see the answer, so `make` may write the memory that belongs to the
    /// answer. `note` is the outcome of the call. Call this function once for each request. Returns
    /// whether the client was still there.
    #[inline(always)]
    pub(crate) fn answer(&mut self, to: &CallId, note: u8, make: impl FnOnce() -> Resp) -> bool {
        let Some(Some(session)) = self.table.sessions.get_mut(to.client()) else {
            return false;
        };
        // C5: a late answer to a former holder of the entry is discarded.
        if session.generation != to.generation {
            return false;
        }
        session.held -= 1;
        if let Some((word, bit)) = session.bit(to.tag) {
            *word &= !bit;
        }
        // L3: there is room, as the client has at most `depth` unanswered calls, counting the
        // answers it has not taken yet.
        session
            .responses
            .publish_tagged(to.tag.pack(note), make(), Ahead::Nothing);
        if session.held > 0 {
            session.responses.fetch_ahead();
        }
        session.holding.wake();
        true
    }

    /// Ends the session of a client whose request breaks the protocol.
    pub(crate) fn evict(&self, from: &CallId) {
        self.table.entries.evict(from.client(), from.generation);
    }

    /// Returns the condition for which a sleeping server waits: a request to find or to receive.
    /// Reaps dead clients in every [`SLICE`](copyrpc_shm::sleep::SLICE) of the sleep.
    pub(crate) fn watch<'a>(
        &'a mut self,
        wakes: &'a mut impl Wakes,
        file: &'a LockFile,
    ) -> impl Watch + 'a {
        Idle {
            sessions: self,
            wakes,
            file,
        }
    }
}

impl<Req, Resp> Sessions<Req, Resp> {
    /// C6: takes free entries out of use, and reports the end of the server to each client that has
    /// no received, unanswered request. The server receives and answers nothing afterwards.
    pub(crate) fn stop(&mut self) {
        let Table {
            sessions,
            entries,
            events,
            ..
        } = &self.table;
        let has_answered = |session: &Option<Session<_, _>>| {
            session.as_ref().is_none_or(|session| session.held == 0)
        };
        sessions
            .iter()
            .enumerate()
            .filter(|(_, session)| has_answered(session))
            .for_each(|(client, _)| entries.stop(client));
        for (client, _) in sessions
            .iter()
            .enumerate()
            .filter(|(_, session)| session.is_some())
        {
            events.tell(Event::Disconnected(client, "the server has ended"));
        }
    }

    pub(crate) fn clients(&self) -> usize {
        let entries = &self.table.entries;
        (0..entries.count())
            .filter(|client| entries.taken_by(*client).is_some())
            .count()
    }

    /// Returns whether a client of this number is connected, as far as this server has found out.
    pub(crate) fn has(&self, client: usize) -> bool {
        let session = self.table.sessions.get(client).and_then(Option::as_ref);
        session.is_some_and(|session| session.holding.lasts())
    }

    /// Returns whether the client of a call is still connected, as far as this server has found
    /// out, and did not give the call up.
    pub(crate) fn is_wanted(&self, call: &CallId) -> bool {
        let Table {
            sessions, lanes, ..
        } = &self.table;
        let session = sessions.get(call.client()).and_then(Option::as_ref);
        session.is_some_and(|session| {
            session.generation == call.generation
                && session.holding.lasts()
                // SAFETY: the client has a session, so its number is valid.
                && !unsafe { lanes.given_up_by(call.client()) }.has(call.tag)
        })
    }
}

// The instruction benchmark counts this function by its name.
#[cold]
#[inline(never)]
fn reap_clients<Req: Plain, Resp: Plain>(
    hot: &mut HotSet,
    reaper: &mut Reaper,
    table: &mut Table<Req, Resp>,
    file: &LockFile,
) {
    if reaper.pass(file, |client, _| forget(client, hot, table)) {
        hot.mend(table, usize::MAX, ENTRIES_PER_ROUND, LOOKS_PER_ROUND);
    }
}

/// Removes the session of a client that has ended, and resets its entry for the next client.
fn forget<Req: Plain, Resp: Plain>(client: usize, hot: &mut HotSet, table: &mut Table<Req, Resp>) {
    hot.remove(client);
    table.inbox.forget(client);
    if let Some(session) = table.sessions.get_mut(client) {
        if let Some(ended) = session.take() {
            let reason = ended.holding.reason_of_end();
            table.events.tell(Event::Disconnected(client, reason));
        }
        // SAFETY: there are lanes for every entry; the client has ended, and this process's ends of
        // the lanes were dropped with the session.
        unsafe { table.lanes.reset(client) };
    }
    if let Some(armed) = table.entries.armed(client) {
        armed.store(ARMED, Ordering::Relaxed);
    }
}

impl<Req: Plain, Resp: Plain> Table<Req, Resp> {
    /// Begins the session of `client`, whose first request was announced. Returns whether there is
    /// such a client.
    #[cold]
    fn begin(&mut self, client: usize) -> bool {
        self.begun(client).is_some()
    }

    fn begun(&mut self, client: usize) -> Option<()> {
        let generation = self.entries.taken_by(client)?;
        let holding = self.entries.held_by(client, generation)?;
        let depth = self.lanes.depth as u64;
        // SAFETY: there are lanes for every entry, and they outlive the sessions (contract of
        // `Sessions::new`). This process is the only consumer of the requests and the only producer
        // of the responses, both begin at 0 with empty slots, and `answer` publishes no more than
        // the client has room for. Any bytes are a valid request, by `Plain`.
        let (requests, responses) = unsafe {
            (
                LaneRx::new(self.lanes.requests_of(client), depth, 0),
                LaneTx::new(self.lanes.responses_to(client), depth, 0),
            )
        };
        let depth = self.lanes.depth;
        let unused = |word: usize| {
            if depth >= 64 * (word + 1) {
                0
            } else {
                !0 << (depth % 64)
            }
        };
        *self.sessions.get_mut(client)? = Some(Session {
            generation,
            held: 0,
            holding,
            requests,
            responses,
            next: 0,
            in_use: (0..depth.div_ceil(64)).map(unused).collect(),
        });
        self.events.tell(Event::Connected(client));
        Some(())
    }

    /// Returns whether the first request of a client without a session has arrived.
    fn first_is_ready(&self, client: usize) -> bool {
        // SAFETY: as in `begun`. The entry is taken, so its number is valid. This end consumes
        // nothing, and is dropped before the session's end is made.
        let requests =
            unsafe { LaneRx::new(self.lanes.requests_of(client), self.lanes.depth as u64, 0) };
        requests.is_ready_at(0)
    }
}

/// C5: evicts a client that broke the protocol or whose entry was overwritten; its pending messages
/// are discarded. Otherwise the messages of the entry's next holder would be taken for messages of
/// this client.
#[cold]
fn evict_client(entries: &Entries, client: usize) {
    if let Some(generation) = entries.taken_by(client) {
        entries.evict(client, generation);
    }
}

impl<Req: Plain, Resp: Plain> Table<Req, Resp> {
    /// Finds requests of a client. They stay in their lane.
    #[inline(always)]
    fn find(&mut self, client: usize, budget: usize) -> usize {
        let depth = self.lanes.depth;
        let Some(Some(session)) = self.sessions.get_mut(client) else {
            return if self.begin(client) {
                self.find(client, budget)
            } else {
                0
            };
        };
        let next = session.next();
        // An empty lane costs this load only.
        if !session.requests.is_ready_at(next) {
            return 0;
        }
        // The lane has `depth` slots, so no more requests can lie in it.
        let most = budget.min(depth - (next - session.requests.position()) as usize);
        // C5: the client has more calls than `depth`, or its entry was overwritten.
        if most == 0 || !session.holding.lasts() {
            evict_client(&self.entries, client);
            return 0;
        }
        let mut found = 1;
        while found < most && session.requests.is_ready_at(next + found as u64) {
            found += 1;
        }
        session.next = next + found as u64;
        self.inbox.push(client, found);
        found
    }

    #[inline(always)]
    fn answer(
        &mut self,
        client: usize,
        budget: usize,
        handler: &mut impl FnMut(&Req) -> Resp,
    ) -> usize {
        let Some(Some(session)) = self.sessions.get_mut(client) else {
            return if self.begin(client) {
                self.answer(client, budget, handler)
            } else {
                0
            };
        };
        let Session {
            held,
            holding,
            requests,
            responses,
            in_use,
            ..
        } = session;
        let (depth, holds_none) = (self.lanes.depth, *held == 0);
        let mut answered = 0;
        while answered < budget {
            let Some((word, request)) = requests.pop_tagged() else {
                break;
            };
            let tag = Tag::without_note(word);
            // C5: a client is evicted if the slot does not exist or is held, or if the client's
            // entry was overwritten.
            let is_held = |slot: usize| {
                in_use
                    .get(slot / 64)
                    .is_none_or(|word| word >> (slot % 64) & 1 != 0)
            };
            if tag.slot() >= depth
                || !holds_none && is_held(tag.slot())
                || answered == 0 && !holding.lasts()
            {
                evict_client(&self.entries, client);
                break;
            }
            let request = request.read();
            let unanswered = Unanswered {
                responses,
                holding,
                tag,
            };
            let response = handler(&request);
            std::mem::forget(unanswered);
            // L3: as in `Sessions::answer`.
            responses.publish_tagged(
                tag.pack(ANSWERED),
                response,
                if answered > 0 {
                    Ahead::Slot
                } else {
                    Ahead::Nothing
                },
            );
            answered += 1;
            holding.wake();
        }
        answered
    }
}

/// A request whose handler runs. If the handler panics, the drop ends its call.
struct Unanswered<'a, Resp: Plain> {
    responses: &'a mut LaneTx<Tagged<Resp>>,
    holding: &'a Holding,
    tag: Tag,
}

impl<Resp: Plain> Drop for Unanswered<'_, Resp> {
    #[cold]
    fn drop(&mut self) {
        self.responses
            .publish_tagged(self.tag.pack(DROPPED), Resp::new_zeroed(), Ahead::Nothing);
        self.holding.wake();
    }
}

impl<Req: Plain, Resp: Plain> Lanes for Table<Req, Resp> {
    fn is_ready(&self, client: usize) -> bool {
        if self.entries.taken_by(client).is_none() {
            return false;
        }
        match self.sessions.get(client) {
            Some(Some(session)) => session.requests.is_ready_at(session.next()),
            _ => self.first_is_ready(client),
        }
    }

    fn armed(&self, client: usize) -> Option<&AtomicU32> {
        self.entries.armed(client)
    }
}

struct Idle<'a, Req, Resp, W> {
    sessions: &'a mut Sessions<Req, Resp>,
    wakes: &'a mut W,
    file: &'a LockFile,
}

impl<Req: Plain, Resp: Plain, W: Wakes> Watch for Idle<'_, Req, Resp, W> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.sessions.table.entries.server_sleep().word());
    }

    fn arm(&mut self) {
        let Sessions {
            hot,
            reaper,
            table,
            clock,
        } = &mut *self.sessions;
        // Makes the first pass after the sleep reap dead clients.
        reaper.tick(clock.now_ns());
        hot.arm(table);
    }

    fn look(&mut self, is_told: bool) -> bool {
        let Sessions { hot, table, .. } = &mut *self.sessions;
        let is_quiet = table.inbox.waiting() == 0 && !self.wakes.any();
        !(hot.deactivate(table, is_told) && is_quiet)
    }

    fn check(&mut self) -> bool {
        let Self { sessions, file, .. } = self;
        let Sessions {
            hot,
            reaper,
            table,
            clock,
        } = &mut **sessions;
        reaper.check(file, clock.now_ns(), |client, _| forget(client, hot, table));
        // Lanes that become active here may turn out to be empty: the next `look` checks them.
        hot.mend(table, usize::MAX, usize::MAX, usize::MAX);
        false
    }
}

#[cfg(all(test, loom))]
mod model;
