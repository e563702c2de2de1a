//! A client as the exploration of all states, and random worlds, need it.

use std::hash::{Hash, Hasher};

use super::Client;
use crate::protocol::bits;
use crate::protocol::tests::memory::HeapMemory;

impl Client<HeapMemory> {
    /// Hashes the state without times, which the exploration does not reach.
    pub(crate) fn hash_state(&self, hasher: &mut impl Hasher) {
        let Self {
            memory,
            state,
            rested,
            closed_epoch,
            announcements,
            calls,
            free,
            pending,
            quarantined,
            told,
            fresh,
            lent,
            lent_free,
            ended,
            ended_later,
            ..
        } = self;
        (
            state,
            rested,
            closed_epoch,
            announcements,
            free,
            pending,
            quarantined,
            told,
            fresh,
            lent,
            lent_free,
            (ended, ended_later),
        )
            .hash(hasher);
        calls
            .iter()
            .for_each(|call| (call.sequence, call.len, call.is_offered).hash(hasher));
        bits(ended | ended_later).for_each(|slot| calls[slot].outcome.hash(hasher));
        memory
            .requests
            .words()
            .chain(memory.responses.words())
            .for_each(|word| word.hash(hasher));
    }

    /// Returns whether the server may READ a slot.
    pub(crate) fn is_lent(&self, slot: usize) -> bool {
        self.lent >> slot & 1 != 0
    }

    /// Sets the counters as if the client had been connected for long, and idle since the slice
    /// `closed_epoch`.
    pub(crate) fn count_from(&mut self, closed_epoch: u64, sequence: u32, announcements: u32) {
        self.closed_epoch = closed_epoch;
        self.announcements = announcements;
        self.calls
            .iter_mut()
            .for_each(|call| call.sequence = sequence);
    }

    /// Makes `now_ns` the time 0, and all earlier times too.
    pub(crate) fn rebase(&mut self, now_ns: u64) {
        self.calls
            .iter_mut()
            .for_each(|call| call.deadline_ns = call.deadline_ns.saturating_sub(now_ns));
        self.expire_ns = self.expire_ns.saturating_sub(now_ns);
    }

    /// Returns the number of calls that have not ended, or whose ends were not taken.
    pub(crate) fn outstanding(&self) -> usize {
        (self.pending.count_ones() + (self.ended | self.ended_later).count_ones()) as usize
    }
}
