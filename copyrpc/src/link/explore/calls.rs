use super::{Calls, Pending, Slot};
use crate::wire::CallId;

impl<U> Calls<U> {
    /// The outstanding call with this id.
    pub(in crate::link) fn pending(&self, id: CallId) -> Option<&Pending<U>> {
        let slot = self.slots.get(id.index() as usize)?;
        (CallId::new(id.index(), slot.generation) == id).then_some(slot.pending.as_ref()).flatten()
    }

    /// These calls are outstanding, with the ids 0, 1, 2..
    pub(in crate::link) fn restore(&mut self, calls: impl Iterator<Item = Pending<U>>) {
        self.free.clear();
        self.slots.clear();
        self.slots.extend(calls.map(|pending| Slot { generation: 0, pending: Some(pending) }));
        self.outstanding = self.slots.len();
    }
}
