//! Calls whose request is not answered: a slab whose slots count generations, so that a response
//! finds its own call or none (C1 of docs/copyrpc-protocol.md). Slots are used again only when the
//! request was answered (C3).
//!
//! The table of `copyrpc-calls` is not used here, for three reasons. That table finds a call by a
//! tag of 64 bits; the wire format has 31, of which 11 are the low bits of the generation. That
//! table removes a call before the call can be examined; here a call with a reply above its
//! allowance must stay, since the end of the connection ends the call. And that table has a fixed
//! number of entries, with deadlines reserved for all of them; this one grows, since credit permits
//! thousands of calls on a connection that mostly has a few. Adding and removing a call costs about
//! 35 instructions here, and 55 in that table.

#[cfg(test)]
#[path = "explore/calls.rs"]
mod explore;

use std::collections::VecDeque;

use copyrpc_calls::Deadlines;

use crate::wire::{CallId, RESPONSE_OVERHEAD};

const NEVER: u64 = u64::MAX;

/// The identifier of one call of one link, for [`Link::cancel`](super::Link::cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallKey {
    index: u32,
    /// Number of earlier calls of the slot, modulo 2^32.
    generation: u32,
}

impl CallKey {
    /// Returns the part of the key that messages carry.
    pub(super) const fn id(self) -> CallId {
        CallId::new(self.index, self.generation)
    }
}

#[derive(Debug)]
enum State<U> {
    /// Index of the next free slot, or [`NO_SLOT`].
    Free(u32),
    Waiting(U),
    /// The caller does not wait any more, and the request is not answered: the call was cancelled
    /// or ran out of time, or the peer closes and will not execute it.
    Abandoned,
}

/// An index beyond every slab.
const NO_SLOT: u32 = u32::MAX;

#[derive(Debug)]
struct Slot<U> {
    /// Number of earlier calls of this slot; the id carries it modulo 2,048.
    generation: u32,
    /// Credit that the call paid, in bytes; bounds the response.
    internal_allowance: u32,
    deadline_ns: u64,
    /// Number of batches sent before the call was made: the request of the call is in none of them.
    batches_before: u64,
    state: State<U>,
}

impl<U> Slot<U> {
    #[inline(always)]
    const fn next_free(&self) -> Option<u32> {
        if let State::Free(next) = self.state {
            Some(next)
        } else {
            None
        }
    }

    const fn is_waiting(&self, key: CallKey) -> bool {
        self.generation == key.generation && matches!(self.state, State::Waiting(_))
    }
}

#[derive(Debug)]
pub(super) struct Answered<U> {
    /// User data of the call; `None` if its caller does not wait any more.
    pub(super) user_data: Option<U>,
    pub(super) internal_allowance: u64,
}

#[derive(Debug)]
pub(super) struct Calls<U> {
    slots: Vec<Slot<U>>,
    free: u32,
    unanswered: u32,
    /// Number of unanswered requests whose caller does not wait.
    abandoned: u32,
    /// Calls that were given up and whose notices are not sent yet, oldest first. The requests of
    /// some may be answered by now.
    untold: VecDeque<CallKey>,
    deadlines: Deadlines<CallKey>,
}

impl<U> Calls<U> {
    pub(super) const fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: NO_SLOT,
            unanswered: 0,
            abandoned: 0,
            untold: VecDeque::new(),
            deadlines: Deadlines::new(),
        }
    }

    pub(super) const fn waiting(&self) -> usize {
        (self.unanswered - self.abandoned) as usize
    }

    /// Returns the number of unanswered requests, also of callers that do not wait.
    pub(super) const fn unanswered(&self) -> usize {
        self.unanswered as usize
    }

    /// Makes room for a call. Returns `false` if every call id is in use. Allocates only when the
    /// number of unanswered requests reaches a new maximum.
    pub(super) fn make_room(&mut self) -> bool {
        if self.free == NO_SLOT {
            let index = self.slots.len() as u32;
            if index == CallId::MAX_CALLS {
                return false;
            }
            // The first call of the slot has generation 0.
            let (generation, state) = (u32::MAX, State::Free(NO_SLOT));
            self.slots.push(Slot {
                generation,
                internal_allowance: 0,
                deadline_ns: NEVER,
                batches_before: 0,
                state,
            });
            self.free = index;
        }
        true
    }

    /// Adds a call, which is made after `batches_before` batches were sent. Returns the user data
    /// if no slot is free: see [`Calls::make_room`].
    #[inline(always)]
    pub(super) fn insert(
        &mut self,
        user_data: U,
        internal_allowance: u64,
        batches_before: u64,
    ) -> Result<CallKey, U> {
        let index = self.free;
        let Some((slot, next)) = self
            .slots
            .get_mut(index as usize)
            .and_then(|slot| slot.next_free().map(|next| (slot, next)))
        else {
            return Err(user_data);
        };
        self.free = next;
        self.unanswered += 1;
        let generation = slot.generation.wrapping_add(1);
        let (internal_allowance, state) = (internal_allowance as u32, State::Waiting(user_data));
        *slot = Slot {
            generation,
            internal_allowance,
            deadline_ns: NEVER,
            batches_before,
            state,
        };
        Ok(CallKey { index, generation })
    }

    /// Sets the deadline of a call. Does nothing if the call has ended. By default, a call has no
    /// deadline.
    pub(super) fn end_at(&mut self, key: CallKey, deadline_ns: u64) {
        let Some(slot) = self
            .slots
            .get_mut(key.index as usize)
            .filter(|slot| slot.is_waiting(key))
        else {
            return;
        };
        slot.deadline_ns = deadline_ns;
        let slots = &self.slots;
        self.deadlines
            .push(deadline_ns, key, |key| is_waiting(slots, *key));
    }

    /// Ends the call of this id, which was answered with `len` payload bytes. Returns `None`, and
    /// changes nothing, unless the caller waits and the bytes fit the call's allowance:
    /// [`Calls::complete`] handles all cases.
    #[inline(always)]
    pub(super) fn complete_waiting(&mut self, id: CallId, len: u32) -> Option<U> {
        let slot = self.slots.get_mut(id.index() as usize)?;
        let fits = u64::from(len) + RESPONSE_OVERHEAD <= u64::from(slot.internal_allowance);
        if !id.is_of(slot.generation) || !fits || !matches!(slot.state, State::Waiting(_)) {
            return None;
        }
        let State::Waiting(user_data) = std::mem::replace(&mut slot.state, State::Free(self.free))
        else {
            return None;
        };
        self.free = id.index();
        self.unanswered -= 1;
        Some(user_data)
    }

    /// Ends the request of this id, which was answered. Returns `None` if no unanswered request has
    /// this id: the answer is duplicate or forged.
    pub(super) fn complete(&mut self, id: CallId) -> Option<Answered<U>> {
        let slot = self.slots.get_mut(id.index() as usize)?;
        if !id.is_of(slot.generation) || matches!(slot.state, State::Free(_)) {
            return None;
        }
        let state = std::mem::replace(&mut slot.state, State::Free(self.free));
        self.free = id.index();
        self.unanswered -= 1;
        let user_data = match state {
            State::Waiting(user_data) => Some(user_data),
            State::Free(_) | State::Abandoned => {
                self.abandoned -= 1;
                None
            }
        };
        Some(Answered {
            user_data,
            internal_allowance: u64::from(slot.internal_allowance),
        })
    }

    /// Ends a call before its request is answered. Returns `None` if the call has ended.
    pub(super) fn abandon(&mut self, key: CallKey) -> Option<U> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if !slot.is_waiting(key) {
            return None;
        }
        self.abandoned += 1;
        match std::mem::replace(&mut slot.state, State::Abandoned) {
            State::Waiting(user_data) => Some(user_data),
            State::Free(_) | State::Abandoned => None,
        }
    }

    /// Like [`abandon`](Self::abandon), for a call of whose end the peer gets a notice.
    pub(super) fn give_up(&mut self, key: CallKey) -> Option<U> {
        let user_data = self.abandon(key)?;
        self.untold.push_back(key);
        Some(user_data)
    }

    /// Returns the id of the oldest call whose notice is not sent. Drops the calls before it whose
    /// requests were answered: they need no notice.
    pub(super) fn untold(&mut self) -> Option<CallId> {
        while let Some(key) = self.untold.front() {
            let is_unanswered = self.slots.get(key.index as usize).is_some_and(|slot| {
                slot.generation == key.generation && matches!(slot.state, State::Abandoned)
            });
            if is_unanswered {
                return Some(key.id());
            }
            self.untold.pop_front();
        }
        None
    }

    /// Notes that the notice of the oldest [untold](Self::untold) call was written.
    pub(super) fn note_told(&mut self) {
        self.untold.pop_front();
    }

    /// Ends a waiting call in slot `from` or a later slot, if it was made when at least `batches`
    /// batches had been sent. Returns the user data and the slot.
    pub(super) fn abandon_later(&mut self, batches: u64, from: usize) -> Option<(U, usize)> {
        let is_later = |slot: &Slot<U>| {
            slot.batches_before >= batches && matches!(slot.state, State::Waiting(_))
        };
        let index = from + self.slots.get(from..)?.iter().position(is_later)?;
        let key = CallKey {
            index: index as u32,
            generation: self.slots[index].generation,
        };
        Some((self.abandon(key)?, index))
    }

    /// Ends one call whose deadline is before `now_ns`.
    pub(super) fn expire(&mut self, now_ns: u64) -> Option<U> {
        while let Some(key) = self.deadlines.pop_before(now_ns) {
            // The entry of a call that has ended stays in `deadlines`. After 2^32 calls of the
            // slot, another call has the same key, so the deadline of the call itself is checked,
            // too.
            let is_due = self
                .slots
                .get(key.index as usize)
                .is_some_and(|slot| slot.is_waiting(key) && slot.deadline_ns < now_ns);
            if is_due {
                return self.give_up(key);
            }
        }
        None
    }

    pub(super) fn next_deadline(&mut self) -> Option<u64> {
        let slots = &self.slots;
        self.deadlines.next(|key| is_waiting(slots, *key))
    }

    /// Ends any one waiting call of a connection that has ended. Returns its user data.
    pub(super) fn take_any(&mut self) -> Option<U> {
        self.free = NO_SLOT;
        while let Some(slot) = self.slots.pop() {
            match slot.state {
                State::Waiting(user_data) => {
                    self.unanswered -= 1;
                    return Some(user_data);
                }
                State::Abandoned => {
                    self.unanswered -= 1;
                    self.abandoned -= 1;
                }
                State::Free(_) => {}
            }
        }
        None
    }
}

fn is_waiting<U>(slots: &[Slot<U>], key: CallKey) -> bool {
    slots
        .get(key.index as usize)
        .is_some_and(|slot| slot.is_waiting(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(calls: &mut Calls<u32>, user_data: u32) -> CallKey {
        assert!(calls.make_room());
        calls.insert(user_data, 64, 0).unwrap()
    }

    fn insert_until(calls: &mut Calls<u32>, user_data: u32, deadline_ns: u64) -> CallKey {
        let key = insert(calls, user_data);
        calls.end_at(key, deadline_ns);
        key
    }

    fn complete(calls: &mut Calls<u32>, key: CallKey) -> Option<Option<u32>> {
        calls.complete(key.id()).map(|answered| answered.user_data)
    }

    #[test]
    fn a_late_response_never_reaches_the_next_call_in_the_slot() {
        let mut calls = Calls::new();
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

    /// Covers the whole range of both numbers in an id: each slot is used, and the generation of a
    /// slot passes the end of its 32 bits.
    #[test]
    fn calls_end_with_the_call_ids_and_go_on_past_the_last_generation() {
        let mut calls = Calls::with_generations(CallId::MAX_CALLS, u32::MAX - 1);
        let keys: Vec<_> = (0..CallId::MAX_CALLS)
            .map(|user_data| insert(&mut calls, user_data))
            .collect();
        assert!(!calls.make_room() && calls.insert(0, 64, 0).is_err());
        let (first, last) = (keys[0], *keys.last().unwrap());
        assert_eq!(last.id().index(), CallId::MAX_CALLS - 1);
        assert_eq!(
            [first, last].map(|key| complete(&mut calls, key)),
            [Some(Some(0)), Some(Some(CallId::MAX_CALLS - 1))]
        );
        let next = insert(&mut calls, 1);
        assert_eq!(
            (last.generation, next.index, next.generation),
            (u32::MAX, last.index, 0)
        );
        assert_eq!(
            (
                complete(&mut calls, last),
                calls.abandon(last),
                complete(&mut calls, next)
            ),
            (None, None, Some(Some(1)))
        );
        assert_eq!(calls.unanswered(), CallId::MAX_CALLS as usize - 2);
    }

    #[test]
    fn the_slot_of_an_abandoned_call_is_free_only_when_its_request_was_answered() {
        let mut calls = Calls::new();
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
        let mut calls = Calls::new();
        let answered = insert_until(&mut calls, 1, 100);
        assert_eq!(complete(&mut calls, answered), Some(Some(1)));
        // This call has the slot and the deadline of the answered call, whose entry is dead.
        insert_until(&mut calls, 2, 100);
        let cancelled = insert_until(&mut calls, 3, 50);
        assert_eq!(calls.next_deadline(), Some(50));
        calls.abandon(cancelled);
        calls.end_at(cancelled, 10);
        assert_eq!(calls.next_deadline(), Some(100));
        assert_eq!(calls.expire(100), None, "not before it has passed");
        assert_eq!(calls.expire(101), Some(2));
        assert_eq!(
            (calls.expire(u64::MAX), calls.next_deadline()),
            (None, None)
        );
    }

    #[test]
    fn a_reply_reaches_a_caller_that_waits_and_allowed_it_and_else_changes_nothing() {
        let mut calls = Calls::new();
        let (waits, abandoned) = (insert(&mut calls, 1), insert(&mut calls, 2));
        calls.abandon(abandoned);
        assert_eq!(calls.complete_waiting(abandoned.id(), 0), None);
        assert_eq!(
            calls.complete_waiting(waits.id(), (64 - RESPONSE_OVERHEAD) as u32 + 1),
            None,
            "too long"
        );
        assert_eq!(
            calls.complete_waiting(CallId::new(waits.index, waits.generation + 1), 0),
            None,
            "another generation"
        );
        assert_eq!((calls.waiting(), calls.unanswered()), (1, 2));
        assert_eq!(
            calls.complete_waiting(waits.id(), (64 - RESPONSE_OVERHEAD) as u32),
            Some(1)
        );
        assert_eq!(calls.complete_waiting(waits.id(), 0), None, "duplicate");
        assert_eq!(
            (
                complete(&mut calls, abandoned),
                calls.waiting(),
                calls.unanswered()
            ),
            (Some(None), 0, 0)
        );
    }

    #[test]
    fn an_id_beyond_the_slab_names_no_call() {
        let mut calls = Calls::new();
        insert(&mut calls, 1);
        assert!(calls.complete(CallId::new(1, 0)).is_none());
        assert!(calls.complete(CallId::new(0, 1)).is_none());
    }

    #[test]
    fn ending_the_connection_takes_each_waiting_call_once() {
        let mut calls = Calls::new();
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
