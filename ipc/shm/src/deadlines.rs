//! When calls end that have a deadline.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::pending::Tag;

/// Deadlines by time. One whose call has ended stays until it is due, or until there are too many of them.
#[derive(Debug, Default)]
pub struct Deadlines {
    heap: BinaryHeap<Reverse<(u64, Tag)>>,
}

impl Deadlines {
    /// Room for those of `calls` calls at a time: nothing is allocated for as many.
    pub fn reserve(&mut self, calls: usize) {
        self.heap.reserve((2 * calls).saturating_sub(self.heap.len()));
    }

    /// Whether there is one.
    #[must_use]
    #[inline(always)]
    pub fn is_armed(&self) -> bool {
        !self.heap.is_empty()
    }

    /// Ends the call `tag` at `at_ns`. Of at most `calls` calls `is_live`.
    pub fn arm(&mut self, at_ns: u64, tag: Tag, calls: usize, is_live: impl Fn(Tag) -> bool) {
        if self.heap.len() >= 2 * calls {
            self.heap.retain(|Reverse((_, tag))| is_live(*tag));
        }
        self.heap.push(Reverse((at_ns, tag)));
    }

    /// The earliest.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at_ns, _))| *at_ns)
    }

    /// Drops the earliest deadlines of calls that have ended: nobody need look at the clock for them. Whether one is left.
    pub fn forget_ended(&mut self, is_live: impl Fn(Tag) -> bool) -> bool {
        while self.heap.peek().is_some_and(|Reverse((_, tag))| !is_live(*tag)) {
            self.heap.pop();
        }
        self.is_armed()
    }

    /// Takes a call whose deadline has passed; it may have ended.
    pub fn take_due(&mut self, now_ns: u64) -> Option<Tag> {
        self.next_ns().filter(|at_ns| *at_ns <= now_ns)?;
        self.heap.pop().map(|Reverse((_, tag))| tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pending::Pending;

    #[test]
    fn deadlines_come_in_their_order_and_those_of_ended_calls_take_no_room_for_ever() {
        let mut pending = Pending::new(4);
        let mut deadlines = Deadlines::default();
        deadlines.reserve(4);
        let room = deadlines.heap.capacity();
        for round in 0..100u64 {
            let tag = pending.insert(()).unwrap();
            deadlines.arm(1_000 + round % 7, tag, 4, |tag| pending.holds(tag));
            pending.take(tag);
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() == room);
        let live = [3u64, 1, 2].map(|at_ns| (at_ns, pending.insert(()).unwrap()));
        for (at_ns, tag) in live {
            deadlines.arm(at_ns, tag, 4, |tag| pending.holds(tag));
        }
        assert_eq!((deadlines.next_ns(), deadlines.take_due(0)), (Some(1), None));
        assert_eq!([(); 3].map(|()| deadlines.take_due(2)), [Some(live[1].1), Some(live[2].1), None]);
        assert!(deadlines.forget_ended(|tag| pending.holds(tag)));
        pending.take(live[0].1);
        assert!(!deadlines.forget_ended(|tag| pending.holds(tag)) && !deadlines.is_armed());
    }
}
