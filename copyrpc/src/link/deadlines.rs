//! A heap of deadlines from which nothing is taken out when its owner no longer needs it: what comes to the top and is dead is dropped
//! there. The dead ones are bounded: an insertion that finds the heap twice as large as it was after the last rebuild, and 64 more,
//! throws them all out.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

const MIN_REBUILD: usize = 64;

#[derive(Debug)]
struct Entry<T> {
    at_ns: u64,
    item: T,
}

impl<T> Ord for Entry<T> {
    /// The earliest is the greatest: a `BinaryHeap` has its greatest on top.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at_ns.cmp(&self.at_ns)
    }
}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.at_ns == other.at_ns
    }
}

impl<T> Eq for Entry<T> {}

/// Items by time, in nanoseconds of the owner's clock.
#[derive(Debug)]
pub(crate) struct Deadlines<T> {
    heap: BinaryHeap<Entry<T>>,
    rebuild_at: usize,
}

impl<T> Deadlines<T> {
    pub(crate) const fn new() -> Self {
        Self { heap: BinaryHeap::new(), rebuild_at: MIN_REBUILD }
    }

    /// Adds an item. `is_live` says of those that are here already whether they are still needed. Constant on average: a rebuild throws
    /// out at least half of what it looks at, or that many came since the last one.
    pub(crate) fn push(&mut self, at_ns: u64, item: T, mut is_live: impl FnMut(&T) -> bool) {
        if self.heap.len() >= self.rebuild_at {
            self.heap.retain(|entry| is_live(&entry.item));
            self.rebuild_at = 2 * self.heap.len() + MIN_REBUILD;
        }
        self.heap.push(Entry { at_ns, item });
    }

    /// Nothing is in it, dead or alive.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// The earliest time of an item, which may be dead.
    pub(crate) fn first_ns(&self) -> Option<u64> {
        self.heap.peek().map(|entry| entry.at_ns)
    }

    /// Takes out the earliest item whose time is before `now_ns`. It may be dead.
    pub(crate) fn pop_before(&mut self, now_ns: u64) -> Option<T> {
        if self.heap.peek()?.at_ns >= now_ns {
            return None;
        }
        self.heap.pop().map(|entry| entry.item)
    }

    /// The earliest time of a live item; drops the dead ones before it.
    pub(crate) fn next(&mut self, mut is_live: impl FnMut(&T) -> bool) -> Option<u64> {
        while let Some(entry) = self.heap.peek() {
            if is_live(&entry.item) {
                return Some(entry.at_ns);
            }
            self.heap.pop();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_come_in_order_of_time_and_only_once_it_has_passed() {
        let mut deadlines = Deadlines::new();
        for at_ns in [30, 10, 20, 10] {
            deadlines.push(at_ns, at_ns, |_| true);
        }
        assert_eq!(deadlines.pop_before(10), None);
        let taken: Vec<_> = std::iter::from_fn(|| deadlines.pop_before(30)).collect();
        assert_eq!(taken, [10, 10, 20]);
        assert_eq!(deadlines.next(|_| true), Some(30));
        assert_eq!(deadlines.next(|_| false), None);
        assert_eq!(deadlines.pop_before(u64::MAX), None);
    }

    /// A caller whose calls all end long before their deadlines.
    #[test]
    fn dead_items_are_bounded_by_the_live_ones() {
        let mut deadlines = Deadlines::new();
        for now in 0_u64..100_000 {
            deadlines.push(u64::MAX - now, now, |item| item + 10 > now);
            assert!(deadlines.heap.len() <= 2 * 10 + MIN_REBUILD);
        }
    }
}
