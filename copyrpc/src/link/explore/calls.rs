use super::{Calls, NEVER, State};
use crate::wire::CallId;

impl<U> Calls<U> {
    /// User data and allowance of the call that waits with this id.
    pub(in crate::link) fn pending(&self, id: CallId) -> Option<(&U, u64)> {
        let slot = self.slots.get(id.index() as usize)?;
        match &slot.state {
            State::Waiting(user_data) if CallId::new(id.index(), slot.generation) == id => {
                Some((user_data, u64::from(slot.internal_allowance)))
            }
            _ => None,
        }
    }

    /// These calls wait, with the ids 0, 1, 2.. Each is given as user data and allowance.
    pub(in crate::link) fn restore(&mut self, calls: impl Iterator<Item = (U, u64)>) {
        self.free.clear();
        self.slots.clear();
        self.waiting = 0;
        for (user_data, internal_allowance) in calls {
            self.insert(user_data, internal_allowance, NEVER);
        }
    }
}
