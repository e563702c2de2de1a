//! A server, several clients, and the queue pairs between them: one queue of operations in each
//! direction, executed in order (RC).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use crate::protocol::memory::Memory;
use crate::protocol::request::ClientId;
use crate::protocol::tests::memory::HeapMemory;
use crate::protocol::wire::Status;
use crate::protocol::{
    CallFailure, CallToken, Client, ClientMemory, ClientOp, ClientRegions, CloseReason, Completion,
    Handlers, Request, Server, ServerConfig, ServerMemory, ServerOp, ServerRegions, State,
};

const POOLS: u64 = 0x1_0000_0000;
const ENTRIES: u64 = 0x2_0000_0000;
const POOLS_RKEY: u32 = 11;
const ENTRIES_RKEY: u32 = 12;

pub(super) const fn requests_addr(client: usize) -> u64 {
    0x10_0000_0000 + ((client as u64) << 28)
}

pub(super) const fn responses_addr(client: usize) -> u64 {
    0x20_0000_0000 + ((client as u64) << 28)
}

/// Returns the smallest configuration: one slot a client, and three zones a pool.
pub(super) fn small() -> ServerConfig {
    ServerConfig {
        max_clients: 4,
        depth: 1,
        slot_bytes: 128,
        group_size: 2,
        spare_zones: 0,
        slice_ns: 1_000,
        response_buffers: 4,
        drain_ns: 1 << 40,
        ..ServerConfig::default()
    }
}

/// The counters in the core and on the wire at the beginning of a world. All zeros: the state of
/// new programs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// Number of slices served.
    pub(super) epoch: u64,
    /// Number of slices since every client had its last one.
    pub(super) idle: u64,
    /// Number of requests of each slot of each client.
    pub(super) sequence: u32,
    /// Number of announcements of each client.
    pub(super) announcements: u32,
    /// Number of clients admitted.
    pub(super) generation: u32,
}

impl Counters {
    /// Returns counters that are all `left` steps before a counter of `bits` bits wraps. Counters
    /// of fewer bits have wrapped before.
    pub(super) const fn before_wrap(bits: u32, left: u32) -> Self {
        let wide = (u64::MAX >> (64 - bits)) - left as u64;
        Self {
            epoch: wide,
            idle: wide,
            sequence: wide as u32,
            announcements: wide as u32,
            generation: wide as u32,
        }
    }
}

/// A client, and the operations under way between it and the server.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) id: ClientId,
    pub(super) client: Client<HeapMemory>,
    pub(super) to_server: Vec<ClientOp>,
    pub(super) to_client: VecDeque<ServerOp>,
    /// The server has READ the client's rest word. Its next poll finds the completion.
    is_rest_read: bool,
    /// The client's process runs. The memory of a dead process is gone with its queue pair.
    pub(super) is_alive: bool,
    /// The server was informed that the queue pair is destroyed.
    pub(super) has_left: bool,
    pub(super) made: usize,
    /// Calls whose ends were not taken.
    pub(super) open: Vec<(CallToken, usize)>,
    /// Number of runs of the handler, and of responses taken, for each call.
    pub(super) executed: Vec<u8>,
    pub(super) ended: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) server: Server<HeapMemory>,
    pub(super) sides: Vec<Side>,
    /// Requests that a worker has.
    pub(super) working: VecDeque<(Request, [u8; 4])>,
    pub(super) now_ns: u64,
    /// Number of switches since each client began to wait with a free zone in reach.
    pub(super) waited: Vec<usize>,
    /// No client ever rests, so the READ of a rest word finds the same at any time. It is executed
    /// at once, which makes fewer states.
    pub(super) nobody_rests: bool,
    ops: Vec<ServerOp>,
    counters: Counters,
}

impl World {
    pub(super) fn new(config: &ServerConfig, clients: usize) -> Self {
        Self::counting_from(config, clients, Counters::default())
    }

    /// Makes a world that has existed for long.
    pub(super) fn counting_from(config: &ServerConfig, clients: usize, counters: Counters) -> Self {
        let layout = config.layout().unwrap();
        let memory = ServerMemory {
            entries: HeapMemory::new(config.entries_bytes()),
            pools: HeapMemory::new(layout.pools_bytes()),
            responses: HeapMemory::new(config.responses_bytes()),
        };
        let mut server = Server::new(config, memory).unwrap();
        server.count_from(counters.epoch, counters.generation);
        let sides = Vec::new();
        let working = VecDeque::new();
        let waited = Vec::new();
        let ops = Vec::new();
        let mut world = Self {
            server,
            sides,
            working,
            now_ns: 0,
            waited,
            nobody_rests: false,
            ops,
            counters,
        };
        (0..clients).for_each(|_| world.join());
        world
    }

    /// Makes a world of three clients in two groups: a group of two, and a group of one.
    pub(super) fn of_two_groups(config: &ServerConfig, counters: Counters) -> Self {
        let mut world = Self::counting_from(config, 4, counters);
        world.sides[3].is_alive = false;
        world.leave(3);
        world.sides.pop();
        world.waited.pop();
        let groups = world.server.groups();
        assert_eq!(
            (
                groups.count(),
                groups.clients(0).len(),
                groups.clients(1).len()
            ),
            (2, 2, 1)
        );
        world
    }

    pub(super) fn join(&mut self) {
        let nth = self.sides.len();
        let (requests_addr, responses_addr) = (requests_addr(nth), responses_addr(nth));
        let regions = ClientRegions {
            requests_addr,
            requests_rkey: 100 + nth as u32,
            responses_addr,
            responses_rkey: 200 + nth as u32,
        };
        let id = self.server.join(regions).unwrap();
        let layout = *self.server.layout();
        let server = ServerRegions {
            client: id,
            pools_addr: POOLS,
            pools_rkey: POOLS_RKEY,
            entry_addr: ENTRIES + u64::from(id.0) * 64,
            entry_rkey: ENTRIES_RKEY,
        };
        let memory = ClientMemory {
            requests: HeapMemory::new(layout.requests_bytes()),
            responses: HeapMemory::new(layout.client_responses_bytes()),
        };
        let mut client = Client::new(
            layout,
            memory,
            server,
            responses_addr,
            regions.responses_rkey,
        );
        let Counters {
            epoch,
            idle,
            sequence,
            announcements,
            ..
        } = self.counters;
        client.count_from(epoch - idle, sequence, announcements);
        if sequence != 0 {
            self.server.accepted_until(id, sequence);
        }
        self.waited.push(0);
        self.sides.push(Side {
            id,
            client,
            to_server: Vec::new(),
            to_client: VecDeque::new(),
            is_rest_read: false,
            is_alive: true,
            has_left: false,
            made: 0,
            open: Vec::new(),
            executed: Vec::new(),
            ended: Vec::new(),
        });
    }

    /// Makes a call whose payload identifies it.
    pub(super) fn call(&mut self, nth: usize) -> Option<CallToken> {
        self.call_type(nth, 7)
    }

    /// Makes a call of this type whose payload identifies it.
    pub(super) fn call_type(&mut self, nth: usize, rpc_type: u16) -> Option<CallToken> {
        let (now_ns, side) = (self.now_ns, &mut self.sides[nth]);
        let payload = [nth as u8, side.made as u8, 0x5a, 0xa5];
        let token = side
            .client
            .call(rpc_type, &payload, now_ns, &mut side.to_server)
            .ok()?;
        assert!(
            side.open.iter().all(|(open, _)| *open != token),
            "a token names two calls"
        );
        side.open.push((token, side.made));
        assert!(
            side.open.len() <= side.client.layout().depth,
            "S14: a slot is used again before the end of its call was taken"
        );
        side.made += 1;
        side.executed.push(0);
        side.ended.push(0);
        Some(token)
    }

    /// Makes a call by each client that can make a call.
    pub(super) fn call_all(&mut self) {
        for nth in 0..self.sides.len() {
            self.call(nth);
        }
    }

    pub(super) fn poll_server(&mut self) {
        let epoch = self.server.scheduler().epoch();
        let waits: Vec<_> = self
            .sides
            .iter()
            .map(|side| self.server.waits(side.id))
            .collect();
        for side in &mut self.sides {
            if std::mem::take(&mut side.is_rest_read) {
                self.server.on_rest_word(side.id);
            }
        }
        self.server.poll(self.now_ns, &mut self.ops);
        for op in self
            .ops
            .iter()
            .filter(|op| matches!(op, ServerOp::Evict { .. }))
        {
            let release_at = usize::from(op.client().0) * 64 + 8;
            assert_eq!(
                self.server.memory().entries.load(release_at),
                0,
                "S10: evicted, although its release is there"
            );
        }
        self.distribute();
        if self.server.scheduler().epoch() != epoch {
            for (nth, waited) in waits.into_iter().enumerate() {
                self.waited[nth] = if waited && self.server.waits(self.sides[nth].id) {
                    self.waited[nth] + 1
                } else {
                    0
                };
            }
        }
    }

    fn distribute(&mut self) {
        for op in std::mem::take(&mut self.ops) {
            let side = self
                .sides
                .iter_mut()
                .find(|side| side.id == op.client() && !side.has_left)
                .unwrap();
            if self.nobody_rests && matches!(op, ServerOp::ReadRestWord { .. }) {
                self.server.on_rest_word(op.client());
                continue;
            }
            side.to_client.push_back(op);
        }
    }

    /// Lets a server that stops dismiss the clients without a request at a worker.
    pub(super) fn dismiss(&mut self) {
        self.server.dismiss(
            |client| {
                self.working
                    .iter()
                    .any(|(request, _)| request.client == client)
            },
            &mut self.ops,
        );
        self.distribute();
    }

    /// Lets a worker take a request and run its handler. Returns whether there was a request.
    pub(super) fn take(&mut self) -> bool {
        let mut payload = [0; 128];
        let Some(request) = self.server.take(&mut payload) else {
            return false;
        };
        let bytes = self.count_run(&payload[..request.len as usize]);
        assert_eq!(
            self.sides[usize::from(bytes[0])].id,
            request.client,
            "served as whose it is"
        );
        self.working.push_back((request, bytes));
        self.distribute();
        true
    }

    /// Counts a run of the handler with this payload, which it returns.
    fn count_run(&mut self, payload: &[u8]) -> [u8; 4] {
        let &[nth, call, 0x5a, 0xa5] = payload else {
            panic!("the payload did not come whole: {payload:?}")
        };
        let side = &mut self.sides[usize::from(nth)];
        assert!(!side.has_left, "a request of a client that has left runs");
        let executed = &mut side.executed[usize::from(call)];
        *executed += 1;
        assert_eq!(*executed, 1, "executed twice");
        [nth, call, 0x5a, 0xa5]
    }

    /// Lets handlers answer at most `budget` requests. `ran` has the payloads of their runs.
    /// Returns the number of answers.
    pub(super) fn step_handlers(
        &mut self,
        handlers: &mut Handlers,
        budget: usize,
        ran: &RefCell<Vec<Vec<u8>>>,
    ) -> usize {
        let now_ns = self.now_ns;
        let answered = handlers.step(&mut self.server, budget, now_ns, || now_ns, &mut self.ops);
        for payload in ran.take() {
            self.count_run(&payload);
        }
        self.distribute();
        answered
    }

    /// Lets the worker keep its oldest request, which it then answers after its other requests.
    pub(super) fn hold(&mut self) {
        if let Some((mut request, bytes)) = self.working.pop_front() {
            self.server.hold(&mut request);
            self.working.push_back((request, bytes));
        }
    }

    /// Answers a request. Returns whether it was answered: a request that was held may have no
    /// buffer for its response.
    pub(super) fn reply(&mut self) -> bool {
        self.answer(true)
    }

    /// Answers the oldest request of the workers with [`Status::Refused`] in place of a payload.
    /// Returns whether there was such a request that could be resumed.
    pub(super) fn die(&mut self) -> bool {
        self.answer(false)
    }

    fn answer(&mut self, is_well: bool) -> bool {
        let Some((mut request, bytes)) = self.working.pop_front() else {
            return false;
        };
        if !self.server.resume(&mut request) {
            self.working.push_front((request, bytes));
            return false;
        }
        let outcome = if is_well {
            Ok(&bytes[..])
        } else {
            Err(Status::Refused)
        };
        self.server
            .reply(&request, outcome, self.now_ns, &mut self.ops);
        self.distribute();
        true
    }

    pub(super) fn poll_client(&mut self, nth: usize) {
        self.look(nth);
        while self.take_completion(nth).is_some() {}
    }

    /// Lets a client rest until it is polled, if no call of it is outstanding. Returns whether it
    /// rests.
    pub(super) fn rest(&mut self, nth: usize) -> bool {
        while !self.sides[nth].client.rest() {
            self.poll_client(nth);
        }
        self.is_resting(nth)
    }

    pub(super) fn is_resting(&self, nth: usize) -> bool {
        self.sides[nth].client.state() == State::Resting
    }

    /// Lets a client read its memory and its clock, without taking the ends of calls.
    pub(super) fn look(&mut self, nth: usize) {
        let side = &mut self.sides[nth];
        side.client.poll(self.now_ns, &mut side.to_server);
        assert!(
            side.client
                .next_event_ns()
                .is_none_or(|at_ns| at_ns > self.now_ns),
            "S14: a call did not end at its deadline"
        );
    }

    /// Lets a client read its clock when the time of all its calls is over.
    pub(super) fn time_out(&mut self, nth: usize) {
        let side = &mut self.sides[nth];
        let later_ns = self.now_ns + side.client.timeout_ns();
        side.client.poll(later_ns, &mut side.to_server);
        side.client.rebase(later_ns - self.now_ns);
        while self.take_completion(nth).is_some() {}
    }

    pub(super) fn take_completion(&mut self, nth: usize) -> Option<Completion> {
        let side = &mut self.sides[nth];
        let mut payload = [0; 4];
        let completion = side.client.poll_completion(&mut payload)?;
        let at = side
            .open
            .iter()
            .position(|(open, _)| *open == completion.call)
            .expect("ended twice");
        let (_, call) = side.open.swap_remove(at);
        match completion.outcome {
            Ok(len) => {
                assert_eq!(
                    (len, payload),
                    (4, [nth as u8, call as u8, 0x5a, 0xa5]),
                    "the response of another call"
                );
                side.ended[call] += 1;
                assert_eq!((side.executed[call], side.ended[call]), (1, 1));
            }
            Err(CallFailure::Refused | CallFailure::Dropped) => {
                side.ended[call] += 1;
                assert_eq!((side.executed[call], side.ended[call]), (1, 1));
            }
            Err(CallFailure::NotSent) => {
                assert_eq!(
                    side.executed[call], 0,
                    "a call that was not sent is executed"
                );
                // The call counts as run, so that a later run is detected.
                side.executed[call] = 1;
            }
            Err(CallFailure::TimedOut) => {}
            Err(failure) => assert!(
                !side.is_alive && matches!(failure, CallFailure::Closed(_)),
                "{failure}"
            ),
        }
        Some(completion)
    }

    /// Executes the next operation of a client. Returns whether there was one.
    pub(super) fn deliver_to_server(&mut self, nth: usize) -> bool {
        let side = &mut self.sides[nth];
        let Some(op) = next_of(&mut side.to_server) else {
            return false;
        };
        match op {
            ClientOp::WriteRequest {
                addr,
                rkey,
                from,
                len,
            } => {
                assert_eq!(rkey, POOLS_RKEY);
                let at = (addr - POOLS) as usize;
                let layout = self.server.layout();
                let zone = self
                    .server
                    .zone_of(side.id)
                    .expect("S8: a write into a zone that is not the client's any more");
                assert_eq!(
                    at / layout.zone_bytes(),
                    layout.pool_slot(zone, 0) / layout.zone_bytes(),
                    "S8: a write into another's zone"
                );
                copy(
                    &side.client.memory().requests,
                    from,
                    &self.server.memory().pools,
                    at,
                    len as usize,
                );
            }
            ClientOp::WriteEntry {
                addr,
                rkey,
                bytes,
                len,
            } => {
                assert_eq!(rkey, ENTRIES_RKEY);
                let at = (addr - ENTRIES) as usize;
                assert_eq!(at / 64, usize::from(side.id.0), "its own entry");
                for trailer in [8, 48] {
                    let start = at % 64;
                    if (start..start + usize::from(len)).contains(&trailer) {
                        let entry = usize::from(side.id.0) * 64;
                        assert_eq!(
                            self.server.memory().entries.load(entry + trailer),
                            0,
                            "S7: an entry is overwritten unread"
                        );
                    }
                }
                self.server
                    .memory()
                    .entries
                    .write(at, &bytes[..usize::from(len)]);
            }
        }
        true
    }

    /// Executes the next operation of the server towards a client. Returns whether there was one.
    pub(super) fn deliver_to_client(&mut self, nth: usize) -> bool {
        let side = &mut self.sides[nth];
        let Some(op) = side.to_client.pop_front() else {
            return false;
        };
        match op {
            ServerOp::Read {
                client,
                addr,
                into,
                len,
                is_last,
                ..
            } => {
                let from = (addr - requests_addr(nth)) as usize;
                assert!(
                    side.client.is_lent(from / side.client.layout().slot_bytes),
                    "S6: READ of a slot that is not lent"
                );
                copy(
                    &side.client.memory().requests,
                    from,
                    &self.server.memory().pools,
                    into,
                    len as usize,
                );
                if is_last {
                    self.server.on_reads_done(client, self.now_ns);
                }
            }
            ServerOp::WriteResponse {
                client,
                addr,
                from,
                len,
                ..
            } => {
                let to = (addr - responses_addr(nth)) as usize;
                copy(
                    &self.server.memory().responses,
                    from,
                    &side.client.memory().responses,
                    to,
                    len as usize,
                );
                self.server.on_responses_done(client, 1);
            }
            ServerOp::WriteEvent { addr, bytes, .. } => {
                let to = (addr - responses_addr(nth)) as usize;
                let trailer = to + bytes.len() - 8;
                assert_eq!(
                    side.client.memory().responses.load(trailer),
                    0,
                    "S12: an event is overwritten unread"
                );
                side.client.memory().responses.write(to, &bytes);
            }
            ServerOp::ReadRestWord { addr, into, .. } => {
                let from = (addr - requests_addr(nth)) as usize;
                assert_eq!(into / 64, usize::from(side.id.0), "its own entry");
                copy(
                    &side.client.memory().requests,
                    from,
                    &self.server.memory().entries,
                    into,
                    8,
                );
                side.is_rest_read = true;
            }
            ServerOp::Evict { .. } => {
                side.client.close(CloseReason::Disconnected);
                side.is_alive = false;
                self.leave(nth);
            }
        }
        true
    }

    /// Ends the process of a client. Operations that its queue pair has not executed are not
    /// executed any more.
    pub(super) fn vanish(&mut self, nth: usize) {
        let side = &mut self.sides[nth];
        side.is_alive = false;
        side.to_server.clear();
    }

    /// Lets the server detect that the queue pair of a client is gone.
    pub(super) fn leave(&mut self, nth: usize) {
        let side = &mut self.sides[nth];
        side.to_server.clear();
        side.to_client.clear();
        side.is_rest_read = false;
        side.has_left = true;
        self.server.leave(side.id);
    }

    /// Lets the server die when the time of all calls is over, and every client call. S20: each
    /// client posts something, or probes, so that its device reports the death.
    pub(super) fn lose_server(&mut self) {
        for nth in (0..self.sides.len())
            .filter(|nth| self.sides[*nth].is_alive)
            .collect::<Vec<_>>()
        {
            self.time_out(nth);
            self.sides[nth].to_server.clear();
            self.call(nth);
            self.look(nth);
            let side = &self.sides[nth];
            let learns = side.client.awaits_server() || !side.to_server.is_empty();
            assert!(
                learns,
                "S20: client {nth} does not learn that its server has died: {:?}",
                side.client
            );
        }
    }

    /// Advances the time to the server's next event. Returns whether there is one that is not only
    /// an eviction.
    pub(super) fn tick(&mut self) -> bool {
        match self.server.next_event_ns() {
            Some(at_ns) if at_ns > self.now_ns && at_ns - self.now_ns < 1 << 30 => {
                self.now_ns = at_ns;
                true
            }
            _ => false,
        }
    }

    /// Lets everything happen in turn, for at most `rounds` rounds, until no call is outstanding.
    /// Returns the number of rounds.
    pub(super) fn run(&mut self, rounds: usize) -> usize {
        self.run_until(rounds, false, Self::is_done)
    }

    /// Like [`run`](Self::run), while clients that sleep continue to sleep.
    pub(super) fn run_beside_rests(&mut self, rounds: usize) -> usize {
        self.run_until(rounds, true, Self::is_done)
    }

    /// Like [`run`](Self::run), until no slot of a living client is in use or lent.
    pub(super) fn settle(&mut self, rounds: usize) -> usize {
        self.run_until(rounds, false, Self::is_settled)
    }

    fn run_until(
        &mut self,
        rounds: usize,
        may_rest: bool,
        is_done: impl Fn(&Self) -> bool,
    ) -> usize {
        for round in 0..rounds {
            if is_done(self) {
                return round;
            }
            self.now_ns += 100;
            for nth in 0..self.sides.len() {
                if self.sides[nth].is_alive {
                    if !may_rest
                        || !self.is_resting(nth)
                        || self.sides[nth].client.outstanding() > 0
                    {
                        self.poll_client(nth);
                    }
                    while self.deliver_to_server(nth) {}
                } else if !self.sides[nth].has_left {
                    self.leave(nth);
                }
            }
            self.poll_server();
            while self.take() {}
            while self.reply() {}
            for nth in 0..self.sides.len() {
                while self.sides[nth].is_alive && self.deliver_to_client(nth) {}
            }
        }
        rounds
    }

    /// Returns whether no call of a living client is outstanding, or its end not taken.
    pub(super) fn is_done(&self) -> bool {
        self.sides
            .iter()
            .all(|side| !side.is_alive || side.client.outstanding() == 0)
    }

    fn is_settled(&self) -> bool {
        let is_idle = |side: &Side| {
            side.open.is_empty() && side.client.free_slots() == side.client.layout().depth
        };
        self.sides
            .iter()
            .all(|side| !side.is_alive || is_idle(side))
    }

    /// Makes now the time 0.
    pub(super) fn rebase(&mut self) {
        self.server.rebase(self.now_ns);
        self.sides
            .iter_mut()
            .for_each(|side| side.client.rebase(self.now_ns));
        self.now_ns = 0;
    }

    /// Returns a hash of everything that affects a decision.
    pub(super) fn hash(&self) -> u128 {
        let mut hasher = Wide::default();
        self.server.hash_state(&mut hasher);
        for side in &self.sides {
            side.client.hash_state(&mut hasher);
            let Side {
                to_server,
                to_client,
                is_rest_read,
                is_alive,
                has_left,
                made,
                executed,
                ended,
                ..
            } = side;
            (
                to_server,
                to_client,
                is_rest_read,
                is_alive,
                has_left,
                made,
                executed,
                ended,
            )
                .hash(&mut hasher);
        }
        (&self.working, &self.waited).hash(&mut hasher);
        hasher.0
    }
}

/// A hash of 128 bits, so that among some millions of states no two collide. It takes a few
/// multiplications a word.
#[derive(Default)]
struct Wide(u128);

impl Hasher for Wide {
    fn finish(&self) -> u64 {
        self.0 as u64
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(47) ^ u128::from(word).wrapping_add(1))
            .wrapping_mul(0x2d99_787a_f3b4_61c5_9e37_79b9_7f4a_7c15);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

fn copy(from: &HeapMemory, at: usize, to: &HeapMemory, into: usize, len: usize) {
    assert!(
        at + len <= from.len() && into + len <= to.len(),
        "outside of a region"
    );
    let mut bytes = vec![0; len];
    from.read(at, &mut bytes);
    to.write(into, &bytes);
}

/// Takes the operation that a client's queue pair executes next.
pub(super) fn next_of(ops: &mut Vec<ClientOp>) -> Option<ClientOp> {
    if ops.is_empty() {
        None
    } else {
        Some(ops.remove(0))
    }
}
