//! A heap of deadlines from which entries are not removed when their owner no longer needs them: a
//! dead entry is dropped when it comes to the top. The number of dead entries is bounded: an
//! insertion into a full heap removes all dead entries.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Capacity that the first insertion reserves, if [`Deadlines::reserve`] was not called before.
const FEW: usize = 64;

#[derive(Debug)]
struct Entry<T> {
    at_ns: u64,
    item: T,
}

impl<T> Ord for Entry<T> {
    /// Compares in reverse: a `BinaryHeap` has its greatest entry on top, and here the earliest
    /// time has to be on top.
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
pub struct Deadlines<T> {
    heap: BinaryHeap<Entry<T>>,
}

impl<T> Deadlines<T> {
    /// Makes an empty heap. It allocates as it grows.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
        }
    }

    /// Allocates room for `entries`, if there is less. If at most half of `entries` are live at a
    /// time, this heap never allocates again.
    pub fn reserve(&mut self, entries: usize) {
        self.heap
            .reserve_exact(entries.saturating_sub(self.heap.len()));
    }

    /// Adds an item. `is_live` returns whether an existing item is still needed. Constant time on
    /// average: a full heap loses at least half of its items, or its capacity becomes twice the
    /// number of items that are left.
    pub fn push(&mut self, at_ns: u64, item: T, mut is_live: impl FnMut(&T) -> bool) {
        if self.heap.len() == self.heap.capacity() {
            self.heap.retain(|entry| is_live(&entry.item));
            self.reserve(if self.heap.capacity() == 0 {
                FEW
            } else {
                2 * self.heap.len()
            });
        }
        self.heap.push(Entry { at_ns, item });
    }

    /// Returns whether there are no items, dead or alive.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Returns the earliest time of an item, which may be dead.
    #[must_use]
    pub fn first_ns(&self) -> Option<u64> {
        self.heap.peek().map(|entry| entry.at_ns)
    }

    /// Removes the earliest item whose time is before `now_ns`. It may be dead.
    pub fn pop_before(&mut self, now_ns: u64) -> Option<T> {
        if self.heap.peek()?.at_ns >= now_ns {
            return None;
        }
        self.heap.pop().map(|entry| entry.item)
    }

    /// Returns the earliest time of a live item. Drops the dead items before it.
    pub fn next(&mut self, mut is_live: impl FnMut(&T) -> bool) -> Option<u64> {
        while let Some(entry) = self.heap.peek() {
            if is_live(&entry.item) {
                return Some(entry.at_ns);
            }
            self.heap.pop();
        }
        None
    }
}

impl<T> Default for Deadlines<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
            assert!(deadlines.heap.len() <= 2 * 10 + FEW);
        }
    }

    #[test]
    fn deadlines_come_in_their_order_and_those_of_ended_calls_take_no_room_for_ever() {
        let mut live = BTreeSet::new();
        let mut deadlines = Deadlines::new();
        let mut room = 0;
        for round in 0..100u32 {
            deadlines.reserve(8);
            deadlines.push(1_000 + u64::from(round % 7), 1_000 + round, |item| {
                live.contains(item)
            });
            room = if room == 0 {
                deadlines.heap.capacity()
            } else {
                room
            };
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() == room);
        let armed = [3u32, 1, 2];
        live.extend(armed);
        for at_ns in armed {
            deadlines.push(at_ns.into(), at_ns, |item| live.contains(item));
        }
        assert_eq!(
            (deadlines.first_ns(), deadlines.pop_before(1)),
            (Some(1), None)
        );
        assert_eq!(
            [(); 3].map(|()| deadlines.pop_before(3)),
            [Some(1), Some(2), None]
        );
        assert!(deadlines.next(|item| live.contains(item)).is_some());
        live.remove(&3);
        assert!(deadlines.next(|item| live.contains(item)).is_none() && deadlines.is_empty());
    }
}
