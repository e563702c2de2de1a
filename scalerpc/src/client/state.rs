//! What the exploration of all states needs of a client.

use std::hash::{Hash, Hasher};

use super::Client;
use crate::memory::HeapMemory;

impl Client<HeapMemory> {
    /// Without times, which the exploration does not reach.
    pub(crate) fn hash_state(&self, hasher: &mut impl Hasher) {
        let Self { memory, state, closed_epoch, announcements, slots, calls, pending, lent, lent_free, ended, .. } = self;
        (state, closed_epoch, announcements, slots, pending, lent, lent_free, ended).hash(hasher);
        calls.iter().for_each(|call| (call.sequence, call.len, call.is_offered, call.fetch).hash(hasher));
        memory.requests.words().chain(memory.responses.words()).for_each(|word| word.hash(hasher));
    }

    /// Whether the server may READ a slot.
    pub(crate) fn is_lent(&self, slot: usize) -> bool {
        self.lent >> slot & 1 != 0
    }

    /// Calls that have not ended, or whose ends were not taken.
    pub(crate) fn outstanding(&self) -> usize {
        self.pending.count_ones() as usize + self.ended.len()
    }
}
