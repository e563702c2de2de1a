//! Calls whose request is not answered: a slab whose slots count generations, so that a response finds its own call or none (C1), and
//! are used again only when the request was answered (C3).

#[cfg(test)]
#[path = "explore/calls.rs"]
mod explore;

use super::deadlines::Deadlines;
use crate::wire::CallId;

/// Deadline of a call that has none.
pub(super) const NEVER: u64 = u64::MAX;

/// Names one call of one link, for [`Link::cancel`](super::Link::cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    index: u32,
    /// Calls its slot had before, modulo 2^32.
    generation: u32,
}

impl CallKey {
    /// The part of it that travels.
    pub(super) const fn id(self) -> CallId {
        CallId::new(self.index, self.generation)
    }
}

#[derive(Debug)]
enum State<U> {
    Free,
    /// The caller waits for the end of its call.
    Waiting(U),
    /// The call was cancelled or ran out of time, its request is not answered.
    Abandoned,
}

#[derive(Debug)]
struct Slot<U> {
    /// Calls this slot has had before; the id carries it modulo 2,048.
    generation: u32,
    /// Credit the call paid, in bytes; bounds the response.
    internal_allowance: u32,
    deadline_ns: u64,
    state: State<U>,
}

impl<U> Slot<U> {
    const fn is_waiting(&self, key: CallKey) -> bool {
        self.generation == key.generation && matches!(self.state, State::Waiting(_))
    }
}

/// A request that was answered.
#[derive(Debug)]
pub(super) struct Answered<U> {
    /// `None` when its caller does not wait any more.
    pub(super) user_data: Option<U>,
    /// Credit the call paid, in bytes.
    pub(super) internal_allowance: u64,
}

#[derive(Debug)]
pub(super) struct Calls<U> {
    slots: Vec<Slot<U>>,
    free: Vec<u32>,
    waiting: usize,
    deadlines: Deadlines<CallKey>,
}

impl<U> Calls<U> {
    /// With so many `slots`, all free and of this generation: 0 of them unless that is to be something.
    pub(super) fn new(slots: u32, generation: u32) -> Self {
        let slot = |_| Slot { generation, internal_allowance: 0, deadline_ns: NEVER, state: State::Free };
        Self { slots: (0..slots).map(slot).collect(), free: (0..slots).collect(), waiting: 0, deadlines: Deadlines::new() }
    }

    /// Calls whose caller waits.
    pub(super) const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Requests not answered, also those whose caller does not wait.
    pub(super) fn unanswered(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == CallId::MAX_CALLS as usize
    }

    /// Takes a call in; the caller has checked [`Calls::is_full`]. Allocates only while the number of requests not answered reaches a
    /// new high.
    #[inline(always)]
    pub(super) fn insert(&mut self, user_data: U, internal_allowance: u64, deadline_ns: u64) -> CallKey {
        self.waiting += 1;
        let internal_allowance = internal_allowance as u32;
        let state = State::Waiting(user_data);
        let key = if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            let generation = slot.generation.wrapping_add(1);
            *slot = Slot { generation, internal_allowance, deadline_ns, state };
            CallKey { index, generation }
        } else {
            self.slots.push(Slot { generation: 0, internal_allowance, deadline_ns, state });
            CallKey { index: self.slots.len() as u32 - 1, generation: 0 }
        };
        if deadline_ns != NEVER {
            let slots = &self.slots;
            self.deadlines.push(deadline_ns, key, |key| is_waiting(slots, *key));
        }
        key
    }

    /// The request with this id was answered. `None` for an id that names no unanswered request: duplicate or forged.
    #[inline(always)]
    pub(super) fn complete(&mut self, id: CallId) -> Option<Answered<U>> {
        let slot = self.slots.get_mut(id.index() as usize)?;
        if id != CallId::new(id.index(), slot.generation) {
            return None;
        }
        let internal_allowance = u64::from(slot.internal_allowance);
        let state = std::mem::replace(&mut slot.state, State::Free);
        if matches!(state, State::Free) {
            return None;
        }
        self.free.push(id.index());
        match state {
            State::Waiting(user_data) => {
                self.waiting -= 1;
                Some(Answered { user_data: Some(user_data), internal_allowance })
            }
            State::Free | State::Abandoned => Some(Answered { user_data: None, internal_allowance }),
        }
    }

    /// Ends a call before its request is answered. `None` for one that has ended.
    pub(super) fn abandon(&mut self, key: CallKey) -> Option<U> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if !slot.is_waiting(key) {
            return None;
        }
        self.waiting -= 1;
        match std::mem::replace(&mut slot.state, State::Abandoned) {
            State::Waiting(user_data) => Some(user_data),
            State::Free | State::Abandoned => None,
        }
    }

    /// Ends one call whose deadline is before `now_ns`.
    pub(super) fn expire(&mut self, now_ns: u64) -> Option<U> {
        while let Some(key) = self.deadlines.pop_before(now_ns) {
            // An entry outlives its call. 2^32 calls later its key names another one, whose own time counts.
            let is_due = self.slots.get(key.index as usize).is_some_and(|slot| slot.is_waiting(key) && slot.deadline_ns < now_ns);
            if is_due {
                return self.abandon(key);
            }
        }
        None
    }

    /// The earliest deadline of the calls that wait.
    pub(super) fn next_deadline(&mut self) -> Option<u64> {
        let slots = &self.slots;
        self.deadlines.next(|key| is_waiting(slots, *key))
    }

    /// Ends any one call that waits, for a connection that has ended.
    pub(super) fn take_any(&mut self) -> Option<U> {
        while let Some(slot) = self.slots.pop() {
            if let State::Waiting(user_data) = slot.state {
                self.waiting -= 1;
                return Some(user_data);
            }
        }
        None
    }
}

fn is_waiting<U>(slots: &[Slot<U>], key: CallKey) -> bool {
    slots.get(key.index as usize).is_some_and(|slot| slot.is_waiting(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(calls: &mut Calls<u32>, user_data: u32) -> CallKey {
        calls.insert(user_data, 64, NEVER)
    }

    fn complete(calls: &mut Calls<u32>, key: CallKey) -> Option<Option<u32>> {
        calls.complete(key.id()).map(|answered| answered.user_data)
    }

    #[test]
    fn a_late_response_never_reaches_the_next_call_in_the_slot() {
        let mut calls = Calls::new(0, 0);
        let first = insert(&mut calls, 1);
        assert_eq!(complete(&mut calls, first), Some(Some(1)));
        assert_eq!(complete(&mut calls, first), None, "duplicate");
        for user_data in 2..2_049 {
            let next = insert(&mut calls, user_data);
            assert_eq!(next.index, first.index);
            assert_eq!(complete(&mut calls, first), None, "late, call {user_data}");
            assert_eq!(complete(&mut calls, next), Some(Some(user_data)));
        }
    }

    #[test]
    fn the_slot_of_an_abandoned_call_is_free_only_when_its_request_was_answered() {
        let mut calls = Calls::new(0, 0);
        let first = insert(&mut calls, 1);
        assert_eq!(calls.abandon(first), Some(1));
        assert_eq!(calls.abandon(first), None, "a second time");
        assert_eq!(calls.waiting(), 0);
        let second = insert(&mut calls, 2);
        assert_ne!(second.index, first.index);
        assert_eq!(complete(&mut calls, first), Some(None));
        assert_eq!(complete(&mut calls, first), None, "duplicate");
        assert_eq!(insert(&mut calls, 3).index, first.index);
        assert_eq!(calls.abandon(first), None, "another call has the slot");
        assert_eq!(calls.waiting(), 2);
    }

    #[test]
    fn a_deadline_ends_only_its_own_call_and_once() {
        let mut calls = Calls::new(0, 0);
        let answered = calls.insert(1, 64, 100);
        assert_eq!(complete(&mut calls, answered), Some(Some(1)));
        // The same slot and the same deadline: the entry of the first is dead.
        calls.insert(2, 64, 100);
        let cancelled = calls.insert(3, 64, 50);
        assert_eq!(calls.next_deadline(), Some(50));
        calls.abandon(cancelled);
        assert_eq!(calls.next_deadline(), Some(100));
        assert_eq!(calls.expire(100), None, "not before it has passed");
        assert_eq!(calls.expire(101), Some(2));
        assert_eq!((calls.expire(u64::MAX), calls.next_deadline()), (None, None));
    }

    #[test]
    fn an_id_beyond_the_slab_names_no_call() {
        let mut calls = Calls::new(0, 0);
        insert(&mut calls, 1);
        assert!(calls.complete(CallId::new(1, 0)).is_none());
        assert!(calls.complete(CallId::new(0, 1)).is_none());
    }

    #[test]
    fn ending_the_connection_takes_each_waiting_call_once() {
        let mut calls = Calls::new(0, 0);
        let keys: Vec<_> = (0..10).map(|user| insert(&mut calls, user)).collect();
        complete(&mut calls, keys[3]);
        calls.abandon(keys[5]);
        complete(&mut calls, keys[9]);
        let mut taken: Vec<_> = std::iter::from_fn(|| calls.take_any()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 4, 6, 7, 8]);
        assert_eq!(calls.waiting(), 0);
        assert_eq!(calls.abandon(keys[0]), None);
    }
}
