//! QPN to value with two loads and no hash.

use core::fmt;

const LEAF_BITS: u32 = 12;
const LEAF: usize = 1 << LEAF_BITS;
const ROOT: usize = 1 << (24 - LEAF_BITS);

type Leaf<T> = Box<[Option<T>]>;

/// A map from 24-bit queue pair numbers to values: a two-level table, so sparse numbers (a device hands out any) cost one leaf of
/// 4,096 entries each and look-up is two dependent loads.
pub struct FastMap<T> {
    root: Box<[Option<Leaf<T>>]>,
    len: usize,
}

impl<T> fmt::Debug for FastMap<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastMap").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T> Default for FastMap<T> {
    fn default() -> Self {
        Self { root: (0..ROOT).map(|_| None).collect(), len: 0 }
    }
}

const fn split(qpn: u32) -> (usize, usize) {
    ((qpn >> LEAF_BITS) as usize, qpn as usize & (LEAF - 1))
}

impl<T> FastMap<T> {
    /// An empty map (32 KiB on a 64-bit machine, 4,096 leaf pointers).
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value of `qpn`; `None` also for numbers above 24 bits.
    #[must_use]
    #[inline(always)]
    pub fn get(&self, qpn: u32) -> Option<&T> {
        let (root, leaf) = split(qpn);
        self.root.get(root)?.as_ref()?.get(leaf)?.as_ref()
    }

    /// Sets the value of `qpn` and returns the one it had. Numbers above 24 bits are given back as `Err`.
    ///
    /// # Errors
    /// The value itself, when `qpn` has more than 24 bits.
    pub fn insert(&mut self, qpn: u32, value: T) -> Result<Option<T>, T> {
        let (root, leaf) = split(qpn);
        let Some(slot) = self.root.get_mut(root) else { return Err(value) };
        let table = slot.get_or_insert_with(|| (0..LEAF).map(|_| None).collect());
        let old = table[leaf].replace(value);
        self.len += usize::from(old.is_none());
        Ok(old)
    }

    /// Takes the value of `qpn` out.
    pub fn remove(&mut self, qpn: u32) -> Option<T> {
        let (root, leaf) = split(qpn);
        let old = self.root.get_mut(root)?.as_mut()?.get_mut(leaf)?.take();
        self.len -= usize::from(old.is_some());
        old
    }

    /// All values, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.root.iter().enumerate().filter_map(|(r, leaf)| Some((r, leaf.as_ref()?))).flat_map(|(r, leaf)| {
            leaf.iter().enumerate().filter_map(move |(l, value)| Some(((r << LEAF_BITS | l) as u32, value.as_ref()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(map.len(), 6);
    }
}
