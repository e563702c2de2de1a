use super::{CallKey, Calls, NEVER, NO_SLOT, Slot, State};
use crate::wire::CallId;

impl<U> Calls<U> {
    /// Makes a table of `slots` free slots of this generation.
    pub(in crate::link) fn with_generations(slots: u32, generation: u32) -> Self {
        let mut calls = Self::new();
        calls.free = if slots > 0 { 0 } else { NO_SLOT };
        calls.slots.extend((1..=slots).map(|next| Slot {
            generation,
            internal_allowance: 0,
            deadline_ns: NEVER,
            batches_before: 0,
            state: State::Free(if next < slots { next } else { NO_SLOT }),
        }));
        calls
    }

    /// Returns the allowance of the call whose request has this id and is not answered, and whether
    /// its caller waits.
    pub(in crate::link) fn pending(&self, id: CallId) -> Option<(u64, bool)> {
        let slot = self
            .slots
            .get(id.index() as usize)
            .filter(|slot| CallId::new(id.index(), slot.generation) == id)?;
        let is_waiting = match slot.state {
            State::Free(_) => return None,
            State::Waiting(_) => true,
            State::Abandoned => false,
        };
        Some((u64::from(slot.internal_allowance), is_waiting))
    }

    /// Iterates over the calls whose caller waits.
    pub(in crate::link) fn keys(&self) -> impl Iterator<Item = CallKey> {
        let key = |(index, generation)| CallKey { index, generation };
        let is_waiting = |key: &CallKey| self.slots[key.index as usize].is_waiting(*key);
        (0..)
            .zip(self.slots.iter().map(|slot| slot.generation))
            .map(key)
            .filter(is_waiting)
    }

    /// Returns the slots of the calls that were given up, that are not answered, and whose notices
    /// are not sent.
    pub(in crate::link) fn untold_slots(&self) -> impl Iterator<Item = u32> {
        let keys = self.untold.iter();
        keys.filter(|key| self.pending(key.id()).is_some())
            .map(|key| key.index)
    }

    /// Restores these calls as not answered, with the ids 0, 1, 2.. Each call is given as its user
    /// data, its allowance, and whether its caller waits. The calls in the slots `untold` were
    /// given up, and their notices are not sent.
    pub(in crate::link) fn restore(
        &mut self,
        calls: impl Iterator<Item = (U, u64, bool)>,
        untold: impl Iterator<Item = u32>,
    ) {
        self.slots.clear();
        (self.free, self.unanswered, self.abandoned) = (NO_SLOT, 0, 0);
        for (user_data, internal_allowance, is_waiting) in calls {
            assert!(self.make_room());
            let key = self
                .insert(user_data, internal_allowance, 0)
                .ok()
                .expect("there is room");
            if !is_waiting {
                self.abandon(key);
            }
        }
        let key = |index| CallKey {
            index,
            generation: 0,
        };
        self.untold = untold.map(key).collect();
    }
}
