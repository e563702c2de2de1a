//! The reachable states, breadth first.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use copyrpc_shm::cache::prefetch;

use super::world::{Action, Setup, Step, World};

const NONE: u32 = u32::MAX;

/// States by number, in the order of discovery. Whole states are kept and compared, not their
/// hashes.
struct States {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Hash table with open addressing, at most half full: numbers of states, each with the hash of
    /// the state, which avoids most comparisons.
    table: Vec<(u32, u32)>,
}

impl States {
    fn new() -> Self {
        Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            table: vec![(NONE, 0); 1 << 16],
        }
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, state: usize) -> &[u8] {
        let start = if state == 0 { 0 } else { self.ends[state - 1] };
        &self.bytes[start..self.ends[state]]
    }

    /// Returns the first place for this hash that is free, or whose state has these bytes.
    fn slot(&self, hash: u32, bytes: &[u8]) -> usize {
        let mask = self.table.len() - 1;
        let mut slot = hash as usize & mask;
        let is_other = |(state, of): (u32, u32)| {
            state != NONE && (of != hash || self.get(state as usize) != bytes)
        };
        while is_other(self.table[slot]) {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Loads the first place for this hash into the cache. A table of millions of states does not
    /// fit in the cache.
    fn fetch(&self, hash: u32) {
        prefetch(std::ptr::from_ref(&self.table[hash as usize & (self.table.len() - 1)]).addr());
    }

    fn number(&mut self, hash: u32, bytes: &[u8]) -> (u32, bool) {
        let slot = self.slot(hash, bytes);
        if self.table[slot].0 != NONE {
            return (self.table[slot].0, false);
        }
        let number = self.len() as u32;
        self.table[slot] = (number, hash);
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        if self.len() * 2 > self.table.len() {
            let mut grown = vec![(NONE, 0); self.table.len() * 2];
            let mask = grown.len() - 1;
            for &entry in self.table.iter().filter(|(state, _)| *state != NONE) {
                let mut slot = entry.1 as usize & mask;
                while grown[slot].0 != NONE {
                    slot = (slot + 1) & mask;
                }
                grown[slot] = entry;
            }
            self.table = grown;
        }
        (number, true)
    }
}

fn hash(bytes: &[u8]) -> u32 {
    let mix = |hash: u64, word: u64| {
        (hash ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    let mut chunks = bytes.chunks_exact(8);
    let whole = chunks.by_ref().fold(bytes.len() as u64, |hash, chunk| {
        mix(hash, u64::from_le_bytes(chunk.try_into().unwrap()))
    });
    let rest = chunks
        .remainder()
        .iter()
        .fold(0, |word, &byte| word << 8 | u64::from(byte));
    (mix(mix(whole, rest), 0) >> 32) as u32
}

#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) states: usize,
    pub(super) transitions: u64,
    pub(super) refused: u64,
    /// Number of states in which all requests are answered and each side that calls can make the
    /// largest call.
    pub(super) done: usize,
    /// Maximum over all states of the number of steps to the nearest state that `done` counts.
    pub(super) farthest: usize,
    pub(super) is_complete: bool,
}

/// A transition whose target's number is not determined yet.
struct Found {
    from: u32,
    hash: u32,
    len: usize,
    /// See [`Graph::finishing`].
    is_finishing: bool,
}

pub(super) struct Graph {
    world: World,
    /// The world may be in a state other than the state that is expanded.
    has_moved: bool,
    /// All actions except those of the kind `Action::Serve`.
    actions: Vec<Action>,
    states: States,
    /// Transitions whose targets' numbers are not determined yet: those from the state that is
    /// expanded, and those from the state expanded before. The delay lets the prefetch of each
    /// entry of the table complete.
    found: Vec<Found>,
    found_bytes: Vec<u8>,
    /// For each state, the state from which it was found first.
    parents: Vec<u32>,
    /// Transitions by actions that neither begin a call (`Action::Call`) nor give one up
    /// (`Action::Abandon`), as (from, to): the possible events once the applications only finish
    /// the calls that exist.
    finishing: Vec<(u32, u32)>,
    done: Vec<u32>,
    report: Report,
    buffer: Vec<u8>,
}

impl Graph {
    pub(super) fn new(setup: Setup, start: [u64; 2]) -> Self {
        let mut graph = Self {
            world: World::new(setup, start),
            has_moved: false,
            actions: actions(setup).collect(),
            states: States::new(),
            found: Vec::new(),
            found_bytes: Vec::new(),
            parents: Vec::new(),
            finishing: Vec::new(),
            done: Vec::new(),
            report: Report::default(),
            buffer: Vec::new(),
        };
        graph.arrive(NONE, false);
        graph.number(1);
        graph
    }

    /// Records the world's state, which was reached from `from`.
    fn arrive(&mut self, from: u32, is_finishing: bool) {
        self.world.save(&mut self.buffer);
        let hash = hash(&self.buffer);
        self.states.fetch(hash);
        self.found.push(Found {
            from,
            hash,
            len: self.buffer.len(),
            is_finishing,
        });
        self.found_bytes.extend_from_slice(&self.buffer);
    }

    /// Determines the numbers of the targets of the oldest `transitions` transitions.
    fn number(&mut self, transitions: usize) {
        let mut start = 0;
        for Found {
            from,
            hash,
            len,
            is_finishing,
        } in self.found.drain(..transitions)
        {
            let (to, is_new) = self
                .states
                .number(hash, &self.found_bytes[start..start + len]);
            start += len;
            if is_new {
                self.parents.push(from);
            }
            if is_finishing && to != from {
                self.finishing.push((from, to));
            }
        }
        self.found_bytes.drain(..start);
    }

    /// Finds the states, at most about `most_states`. If all states are found, checks that all
    /// calls can end.
    pub(super) fn explore(mut self, most_states: usize) -> Report {
        let mut next = 0;
        while next < self.states.len() && self.states.len() < most_states {
            let before = self.found.len();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.expand(next as u32))) {
                self.tell_way_to(next as u32);
                resume_unwind(panic);
            }
            next += 1;
            self.number(if next < self.states.len() {
                before
            } else {
                self.found.len()
            });
        }
        self.report.is_complete = next == self.states.len();
        self.report.states = self.states.len();
        self.report.done = self.done.len();
        if self.report.is_complete {
            self.check_that_all_finish();
        }
        self.report
    }

    fn expand(&mut self, from: u32) {
        let state = self.states.get(from as usize).to_vec();
        self.world.restore(&state);
        self.has_moved = false;
        if self.world.may_be_done() {
            self.has_moved = true;
            if self.world.takes_the_largest(&state) {
                self.done.push(from);
            }
        }
        for side in [0, 1] {
            for nth in 0..self.actions.len() {
                self.attempt(from, &state, side, self.actions[nth]);
            }
            if self.world.setup.defers {
                let mut room = 0;
                while self.attempt(from, &state, side, Action::Serve { room }) == Step::Deferred {
                    room += 1;
                }
            } else {
                self.attempt(from, &state, side, Action::Serve { room: usize::MAX });
            }
        }
    }

    fn attempt(&mut self, from: u32, state: &[u8], side: usize, action: Action) -> Step {
        if self.has_moved {
            self.world.restore(state);
        }
        let step = self.world.apply(side, action);
        self.has_moved = step != Step::Disabled;
        if matches!(step, Step::Disabled | Step::Outside) {
            return step;
        }
        let is_finishing = !matches!(action, Action::Call { .. } | Action::Abandon { .. })
            || step == Step::Refused;
        self.arrive(from, is_finishing);
        self.report.transitions += 1;
        self.report.refused += u64::from(step == Step::Refused);
        step
    }

    /// Checks that from each state, if the applications only answer and repeat refused calls, a
    /// state can be reached in which all calls have ended and a call of the maximum length is
    /// accepted. So there is no state in which both sides are stuck, and every fair schedule ends
    /// all calls.
    fn check_that_all_finish(&mut self) {
        let states = self.states.len();
        let mut ends = vec![0_u32; states + 1];
        for &(_, to) in &self.finishing {
            ends[to as usize] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            sum += *end;
            *end = sum;
        }
        // Source states of the transitions into each state. Each state's part of the array is
        // filled from the back, so its entry in `ends` becomes its start.
        let mut sources = vec![0_u32; self.finishing.len()];
        for &(from, to) in &self.finishing {
            ends[to as usize] -= 1;
            sources[ends[to as usize] as usize] = from;
        }
        let mut distance = vec![NONE; states];
        let mut queue = VecDeque::new();
        for &state in &self.done {
            distance[state as usize] = 0;
            queue.push_back(state);
        }
        while let Some(state) = queue.pop_front() {
            let next = distance[state as usize] + 1;
            self.report.farthest = next as usize - 1;
            for &source in
                &sources[ends[state as usize] as usize..ends[state as usize + 1] as usize]
            {
                if distance[source as usize] == NONE {
                    distance[source as usize] = next;
                    queue.push_back(source);
                }
            }
        }
        if let Some(stuck) = distance.iter().position(|&steps| steps == NONE) {
            self.tell_way_to(stuck as u32);
            panic!("stuck: no way from this state to where all calls have ended");
        }
    }

    fn tell_way_to(&mut self, state: u32) {
        let mut way = vec![state];
        while self.parents[way[way.len() - 1] as usize] != NONE {
            way.push(self.parents[way[way.len() - 1] as usize]);
        }
        let mut world = World::new(self.world.setup, [0, 0]);
        for pair in way.windows(2).rev() {
            let to = self.states.get(pair[0] as usize);
            let from = self.states.get(pair[1] as usize);
            let rooms = (0..8)
                .chain([usize::MAX])
                .map(|room| Action::Serve { room });
            for (side, action) in actions(world.setup)
                .chain(rooms)
                .flat_map(|action| [(0, action), (1, action)])
            {
                world.restore(from);
                if world.apply(side, action) == Step::Disabled {
                    continue;
                }
                world.save(&mut self.buffer);
                if self.buffer == to {
                    eprintln!("side {side}: {action:?}");
                    break;
                }
            }
        }
        world.restore(self.states.get(state as usize));
        eprintln!("reached: {:#?}", world.links);
    }
}

fn actions(setup: Setup) -> impl Iterator<Item = Action> {
    let replies = (0..setup.calls[0].max(setup.calls[1]))
        .flat_map(|nth| [false, true].map(|is_short| Action::Reply { nth, is_short }));
    let calls = [Action::Call { kind: 0 }, Action::Call { kind: 1 }];
    let early_ends = if setup.abandons {
        setup.calls[0].max(setup.calls[1])
    } else {
        0
    };
    let early_ends = (0..early_ends).map(|nth| Action::Abandon { nth });
    calls.into_iter().chain(replies).chain(early_ends).chain([
        Action::TakeBatch,
        Action::ExecuteRead,
        Action::TakeRead,
    ])
}
