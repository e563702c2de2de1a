//! Pending calls: a slab whose slots count generations, so that a response finds its own call or
//! none (invariant C1).

#[cfg(test)]
#[path = "explore/calls.rs"]
mod explore;

use crate::wire::CallId;

/// One call that waits for its response.
#[derive(Debug)]
pub(super) struct Pending<U> {
    pub(super) user_data: U,
    /// Credit the call paid, in bytes; bounds the response.
    pub(super) internal_allowance: u64,
}

#[derive(Debug)]
struct Slot<U> {
    /// Calls this slot has had; the id carries it modulo 2,048.
    generation: u32,
    pending: Option<Pending<U>>,
}

#[derive(Debug)]
pub(super) struct Calls<U> {
    slots: Vec<Slot<U>>,
    free: Vec<u32>,
    outstanding: usize,
}

impl<U> Calls<U> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), outstanding: 0 }
    }

    pub(super) const fn outstanding(&self) -> usize {
        self.outstanding
    }

    pub(super) fn is_full(&self) -> bool {
        self.outstanding == CallId::MAX_CALLS as usize
    }

    /// Takes a call in; the caller has checked [`Calls::is_full`]. Allocates only while the number
    /// of outstanding calls reaches a new high.
    pub(super) fn insert(&mut self, pending: Pending<U>) -> CallId {
        self.outstanding += 1;
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.generation = slot.generation.wrapping_add(1);
            slot.pending = Some(pending);
            return CallId::new(index, slot.generation);
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, pending: Some(pending) });
        CallId::new(index, 0)
    }

    /// Ends the call with this id. `None` for an id that names no outstanding call: late,
    /// duplicate or forged.
    pub(super) fn complete(&mut self, id: CallId) -> Option<Pending<U>> {
        let slot = self.slots.get_mut(id.index() as usize)?;
        if id != CallId::new(id.index(), slot.generation) {
            return None;
        }
        let pending = slot.pending.take()?;
        self.free.push(id.index());
        self.outstanding -= 1;
        Some(pending)
    }

    /// Ends any one call, for a connection that has ended.
    pub(super) fn take_any(&mut self) -> Option<Pending<U>> {
        while let Some(slot) = self.slots.pop() {
            if let Some(pending) = slot.pending {
                self.outstanding -= 1;
                return Some(pending);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(user_data: u32) -> Pending<u32> {
        Pending { user_data, internal_allowance: 64 }
    }

    #[test]
    fn a_late_response_never_reaches_the_next_call_in_the_slot() {
        let mut calls = Calls::new();
        let first = calls.insert(pending(1));
        assert_eq!(calls.complete(first).unwrap().user_data, 1);
        assert!(calls.complete(first).is_none(), "duplicate");
        for user_data in 2..2_049 {
            let next = calls.insert(pending(user_data));
            assert_eq!(next.index(), first.index());
            assert!(calls.complete(first).is_none(), "late, call {user_data}");
            assert_eq!(calls.complete(next).unwrap().user_data, user_data);
        }
    }

    #[test]
    fn an_id_beyond_the_slab_names_no_call() {
        let mut calls = Calls::new();
        calls.insert(pending(1));
        assert!(calls.complete(CallId::new(1, 0)).is_none());
        assert!(calls.complete(CallId::new(0, 1)).is_none());
    }

    #[test]
    fn ending_the_connection_takes_each_outstanding_call_once() {
        let mut calls = Calls::new();
        let ids: Vec<_> = (0..10).map(|user| calls.insert(pending(user))).collect();
        calls.complete(ids[3]);
        calls.complete(ids[9]);
        let mut taken: Vec<_> = std::iter::from_fn(|| calls.take_any()).map(|pending| pending.user_data).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 4, 5, 6, 7, 8]);
        assert_eq!(calls.outstanding(), 0);
    }
}
