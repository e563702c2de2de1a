//! A map from QPN to value: two loads, no hash.

use core::fmt;

const LEAF_BITS: u32 = 12;
const LEAF: usize = 1 << LEAF_BITS;
const ROOT: usize = 1 << (24 - LEAF_BITS);

type Leaf<T> = Box<[Option<T>; LEAF]>;

/// Makes an empty leaf in place: a leaf may be too large for the stack.
fn empty_leaf<T>() -> Leaf<T> {
    let entries: Box<[Option<T>]> = (0..LEAF).map(|_| None).collect();
    // SAFETY: a slice of `LEAF` entries has the layout of the array.
    unsafe { Box::from_raw(Box::into_raw(entries).cast()) }
}

/// A map from 24-bit queue pair numbers to values, as a two-level table. Sparse numbers (a device may give any) cost one leaf of 4,096
/// entries each while the leaf holds a value. A look-up is two dependent loads.
pub struct FastMap<T> {
    root: Box<[Option<Leaf<T>>; ROOT]>,
    /// Number of values in each leaf, stored outside the leaves so that a look-up does not read it.
    used: Box<[u16; ROOT]>,
    len: usize,
}

impl<T> fmt::Debug for FastMap<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastMap").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T> Default for FastMap<T> {
    fn default() -> Self {
        Self { root: Box::new([const { None }; ROOT]), used: Box::new([0; ROOT]), len: 0 }
    }
}

const fn split(qpn: u32) -> (usize, usize) {
    ((qpn >> LEAF_BITS) as usize, qpn as usize & (LEAF - 1))
}

impl<T> FastMap<T> {
    /// Makes an empty map (40 KiB: 4,096 leaf pointers and counts).
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the map is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the value of `qpn`; `None` also for numbers of more than 24 bits.
    #[must_use]
    #[inline(always)]
    pub fn get(&self, qpn: u32) -> Option<&T> {
        let (root, leaf) = split(qpn);
        self.root.get(root)?.as_ref()?[leaf].as_ref()
    }

    /// Sets the value of `qpn` and returns the previous one.
    ///
    /// # Errors
    /// Returns `value` if `qpn` has more than 24 bits.
    pub fn insert(&mut self, qpn: u32, value: T) -> Result<Option<T>, T> {
        let (root, leaf) = split(qpn);
        let Some(slot) = self.root.get_mut(root) else { return Err(value) };
        let table = slot.get_or_insert_with(empty_leaf);
        let old = table[leaf].replace(value);
        if old.is_none() {
            self.used[root] += 1;
            self.len += 1;
        }
        Ok(old)
    }

    /// Removes the value of `qpn`, and returns it. A leaf without values is freed.
    pub fn remove(&mut self, qpn: u32) -> Option<T> {
        let (root, leaf) = split(qpn);
        let slot = self.root.get_mut(root)?;
        let old = slot.as_mut()?[leaf].take()?;
        self.used[root] -= 1;
        self.len -= 1;
        if self.used[root] == 0 {
            *slot = None;
        }
        Some(old)
    }

    /// Returns all values, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.root.iter().enumerate().filter_map(|(r, leaf)| Some((r, leaf.as_ref()?))).flat_map(|(r, leaf)| {
            leaf.iter().enumerate().filter_map(move |(l, value)| Some(((r << LEAF_BITS | l) as u32, value.as_ref()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::random::Random;

    #[test]
    fn sparse_24_bit_numbers_are_found_and_larger_ones_refused() {
        let mut map = FastMap::new();
        for qpn in [0, 1, 4095, 4096, 0x12_3456, 0xff_fffe, 0xff_ffff] {
            assert_eq!(map.insert(qpn, qpn), Ok(None));
        }
        assert_eq!(map.len(), 7);
        assert_eq!(map.get(0xff_fffe), Some(&0xff_fffe));
        assert_eq!(map.get(2), None);
        assert_eq!(map.get(0x0100_0000), None);
        assert_eq!(map.insert(0x0100_0000, 9), Err(9));
        assert_eq!(map.iter().map(|(q, _)| q).collect::<Vec<_>>(), [0, 1, 4095, 4096, 0x12_3456, 0xff_fffe, 0xff_ffff]);
        assert_eq!(map.remove(4096), Some(4096));
        assert_eq!(map.remove(4096), None);
        assert_eq!(map.remove(0x0100_0000), None);
        assert_eq!(map.len(), 6);
    }

    #[test]
    fn a_leaf_lives_exactly_as_long_as_it_has_values() {
        let leaves = |map: &FastMap<u32>| map.root.iter().flatten().count();
        let mut map = FastMap::new();
        for round in 0..3 {
            for qpn in [0xff_fffe, 0xff_ffff, 5] {
                assert_eq!(map.insert(qpn, round), Ok(None));
            }
            assert_eq!(map.insert(0xff_fffe, 7), Ok(Some(round)), "a replaced value counts once");
            assert_eq!(leaves(&map), 2);
            assert_eq!(map.remove(0xff_fffe), Some(7));
            assert_eq!((leaves(&map), map.get(0xff_ffff)), (2, Some(&round)));
            assert_eq!(map.remove(0xff_fffe), None);
            assert_eq!((leaves(&map), map.get(0xff_ffff)), (2, Some(&round)));
            assert_eq!(map.remove(0xff_ffff), Some(round));
            assert_eq!((leaves(&map), map.len()), (1, 1));
            assert_eq!(map.get(0xff_ffff), None);
            assert_eq!(map.remove(0xff_fffe), None);
            assert_eq!(map.remove(5), Some(round));
            assert_eq!((leaves(&map), map.is_empty()), (0, true));
        }
    }

    #[test]
    fn any_sequence_of_changes_gives_what_a_btree_map_gives() {
        for seed in [3u64, 1 << 40, 0xfeed] {
            let mut random = Random::new(seed);
            let (mut map, mut model) = (FastMap::new(), std::collections::BTreeMap::new());
            for step in 0..4_000 {
                // Few leaves with few places each, so that every case occurs often.
                let qpn = random.below(3) << LEAF_BITS | random.below(4) | if random.one_in(2) { 0xff_0000 } else { 0 };
                if random.one_in(2) {
                    assert_eq!(map.insert(qpn, step), Ok(model.insert(qpn, step)));
                } else {
                    assert_eq!(map.remove(qpn), model.remove(&qpn));
                }
                assert_eq!((map.get(qpn), map.len()), (model.get(&qpn), model.len()));
            }
            assert!(map.iter().eq(model.iter().map(|(&qpn, value)| (qpn, value))));
        }
    }
}
