//! The deadlines of calls.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::tag::Tag;

/// Deadlines by time. The deadline of a call that has ended stays until it is due, or until there are too many of them.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    heap: BinaryHeap<Reverse<(u64, Tag)>>,
}

impl Deadlines {
    #[inline(always)]
    pub(crate) fn is_armed(&self) -> bool {
        !self.heap.is_empty()
    }

    /// Adds the deadline `at_ns` of the call `tag`. `is_live` returns whether a call has not ended; at most `calls` calls are live. The
    /// first call allocates room for as many.
    pub(crate) fn arm(&mut self, at_ns: u64, tag: Tag, calls: usize, is_live: impl Fn(Tag) -> bool) {
        self.heap.reserve((2 * calls).saturating_sub(self.heap.len()));
        if self.heap.len() >= 2 * calls {
            self.heap.retain(|Reverse((_, tag))| is_live(*tag));
        }
        self.heap.push(Reverse((at_ns, tag)));
    }

    /// Returns the earliest deadline.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at_ns, _))| *at_ns)
    }

    /// Drops the earliest deadlines that belong to ended calls, so that the clock is not read for them. Returns whether a deadline is left.
    pub(crate) fn forget_ended(&mut self, is_live: impl Fn(Tag) -> bool) -> bool {
        while self.heap.peek().is_some_and(|Reverse((_, tag))| !is_live(*tag)) {
            self.heap.pop();
        }
        self.is_armed()
    }

    /// Takes a call whose deadline has passed. The call may have ended.
    pub(crate) fn take_due(&mut self, now_ns: u64) -> Option<Tag> {
        self.next_ns().filter(|at_ns| *at_ns <= now_ns)?;
        self.heap.pop().map(|Reverse((_, tag))| tag)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn deadlines_come_in_their_order_and_those_of_ended_calls_take_no_room_for_ever() {
        let mut live = BTreeSet::new();
        let mut deadlines = Deadlines::default();
        let mut room = 0;
        for round in 0..100u32 {
            deadlines.arm(1_000 + u64::from(round % 7), Tag::new(0, 1 + round), 4, |tag| live.contains(&tag));
            room = if room == 0 { deadlines.heap.capacity() } else { room };
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() == room);
        let armed = [3u64, 1, 2].map(|at_ns| (at_ns, Tag::new(at_ns as u32, 1)));
        live.extend(armed.map(|(_, tag)| tag));
        for (at_ns, tag) in armed {
            deadlines.arm(at_ns, tag, 4, |tag| live.contains(&tag));
        }
        assert_eq!((deadlines.next_ns(), deadlines.take_due(0)), (Some(1), None));
        assert_eq!([(); 3].map(|()| deadlines.take_due(2)), [Some(armed[1].1), Some(armed[2].1), None]);
        assert!(deadlines.forget_ended(|tag| live.contains(&tag)));
        live.remove(&armed[0].1);
        assert!(!deadlines.forget_ended(|tag| live.contains(&tag)) && !deadlines.is_armed());
    }
}
