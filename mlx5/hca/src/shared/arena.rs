//! Allocator of ranges of a sparse memory segment: first fit over a sorted list of free ranges.

use std::collections::BTreeMap;

/// Page size, the unit of all shared memory, in bytes.
pub(crate) const PAGE: usize = 4096;

/// Free ranges: length by offset, in bytes. Adjacent ranges are always merged.
pub(crate) struct Arena {
    free: BTreeMap<usize, usize>,
}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            free: BTreeMap::from([(0, bytes)]),
        }
    }

    /// Takes a range of `bytes`, a multiple of [`PAGE`]. Returns its offset; `None` if no free
    /// range is long enough.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        self.take_aligned(bytes, PAGE)
    }

    /// Takes a range of `bytes` whose offset is a multiple of `align`, a power of two. Returns the
    /// offset. The lengths of all ranges of one arena must be multiples of one unit.
    pub(crate) fn take_aligned(&mut self, bytes: usize, align: usize) -> Option<usize> {
        let gap = |start: usize| start.next_multiple_of(align) - start;
        let (&start, &len) = self
            .free
            .iter()
            .find(|&(&start, &len)| len >= gap(start) && len - gap(start) >= bytes)?;
        let (gap, offset) = (gap(start), start + gap(start));
        self.free.remove(&start);
        if gap > 0 {
            self.free.insert(start, gap);
        }
        if len > gap + bytes {
            self.free.insert(offset + bytes, len - gap - bytes);
        }
        Some(offset)
    }

    pub(crate) fn give(&mut self, offset: usize, bytes: usize) {
        let mut start = offset;
        let mut end = offset + bytes;
        if let Some((&before, &len)) = self.free.range(..offset).next_back() {
            debug_assert!(before + len <= offset, "double free");
            if before + len == offset {
                self.free.remove(&before);
                start = before;
            }
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
    }
}

/// Returns the first free index. If no entry is free, adds one to the table; returns `None` if the
/// table has `max` entries.
pub(crate) fn free_index<T>(
    table: &mut Vec<T>,
    max: usize,
    is_free: impl Fn(&T) -> bool,
    empty: impl FnOnce() -> T,
) -> Option<usize> {
    if let Some(index) = table.iter().position(is_free) {
        return Some(index);
    }
    (table.len() < max).then(|| {
        table.push(empty());
        table.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_all_space_comes_back() {
        let mut arena = Arena::new(64 * PAGE);
        let mut held: Vec<(usize, usize)> = vec![];
        let mut seed = 1u64;
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pages = (seed >> 33) as usize % 7 + 1;
            if seed >> 63 == 0 || held.is_empty() {
                let align = PAGE << (seed >> 50 & 3);
                if let Some(at) = arena.take_aligned(pages * PAGE, align) {
                    assert_eq!(at % align, 0);
                    assert!(
                        held.iter()
                            .all(|&(o, l)| at + pages * PAGE <= o || o + l <= at)
                    );
                    held.push((at, pages * PAGE));
                }
            } else {
                let (o, l) = held.swap_remove((seed >> 40) as usize % held.len());
                arena.give(o, l);
            }
        }
        for (o, l) in held {
            arena.give(o, l);
        }
        assert_eq!(arena.take(64 * PAGE), Some(0));
        assert_eq!(arena.take(PAGE), None);
    }
}
