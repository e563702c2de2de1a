//! A map from QPN to value: open addressing, with the low bits of the number as the hash.

use core::fmt;
use core::mem;

const MAX_QPN: u32 = (1 << 24) - 1;
const MIN_PLACES: usize = 8;

struct Place<T> {
    /// The QPN, below 2^24, if there is a value. Otherwise the mark that [`vacant_at`] returns for
    /// this place.
    qpn: u32,
    value: Option<T>,
}

/// Returns the number that marks a vacant place. No look-up that starts at this place can match it:
/// it has more bits than a QPN, and its lowest bit differs from the place's. So a look-up that
/// compares numbers need not check whether the place is vacant.
const fn vacant_at(place: usize) -> u32 {
    place as u32 & 1 ^ 1 | !MAX_QPN
}

/// A map from 24-bit queue pair numbers to values: a table of places in which the low bits of a
/// number select its home. A value is stored at the home of its number, or in the next vacant
/// place. The numbers that a device assigns have consecutive low bits, so most values are at home.
/// The table has at least 2 places for each value, and never shrinks.
pub struct FastMap<T> {
    /// Array of places; their number is a power of two.
    places: Box<[Place<T>]>,
    len: usize,
}

impl<T> fmt::Debug for FastMap<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastMap")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl<T> Default for FastMap<T> {
    fn default() -> Self {
        Self {
            places: vacant(MIN_PLACES),
            len: 0,
        }
    }
}

fn vacant<T>(places: usize) -> Box<[Place<T>]> {
    (0..places)
        .map(|place| Place {
            qpn: vacant_at(place),
            value: None,
        })
        .collect()
}

impl<T> FastMap<T> {
    /// Makes an empty map.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the value of `qpn`; `None` also for numbers of more than 24 bits.
    #[must_use]
    #[inline(always)]
    pub fn get(&self, qpn: u32) -> Option<&T> {
        // SAFETY: a home is a valid place, because the number of places is a power of two, at
        // least 8.
        let place = unsafe { self.places.get_unchecked(self.home(qpn)) };
        if place.qpn == qpn {
            // SAFETY: the number in a vacant place never equals a number whose home is that place,
            // and every other place has a value.
            return Some(unsafe { place.value.as_ref().unwrap_unchecked() });
        }
        self.get_further(qpn)
    }

    #[cold]
    fn get_further(&self, qpn: u32) -> Option<&T> {
        self.places[self.find(qpn)].value.as_ref()
    }

    /// Sets the value of `qpn` and returns the previous one.
    ///
    /// # Errors
    /// Returns `value` if `qpn` has more than 24 bits.
    pub fn insert(&mut self, qpn: u32, value: T) -> Result<Option<T>, T> {
        if qpn > MAX_QPN {
            return Err(value);
        }
        let mut at = self.find(qpn);
        if self.is_vacant(at) {
            if (self.len + 1) * 2 > self.places.len() {
                self.grow();
                at = self.find(qpn);
            }
            self.len += 1;
        }
        self.places[at].qpn = qpn;
        Ok(self.places[at].value.replace(value))
    }

    /// Removes the value of `qpn`, and returns it.
    pub fn remove(&mut self, qpn: u32) -> Option<T> {
        let mut hole = self.find(qpn);
        let old = self.places[hole].value.take()?;
        self.len -= 1;
        // A vacant place must not lie between a number's home and its place.
        let mut next = self.behind(hole);
        while !self.is_vacant(next) {
            if self.distance(self.home(self.places[next].qpn), next) >= self.distance(hole, next) {
                self.places.swap(hole, next);
                hole = next;
            }
            next = self.behind(next);
        }
        self.places[hole].qpn = vacant_at(hole);
        Some(old)
    }

    /// Returns the home of a number: the place at which a look-up begins.
    #[inline(always)]
    const fn home(&self, qpn: u32) -> usize {
        qpn as usize & (self.places.len() - 1)
    }

    const fn behind(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    const fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.places.len() - 1)
    }

    fn is_vacant(&self, at: usize) -> bool {
        self.places[at].qpn > MAX_QPN
    }

    /// Returns the place of a number, or the vacant place where it would be. At least half of the
    /// places are vacant.
    fn find(&self, qpn: u32) -> usize {
        let mut at = self.home(qpn);
        while self.places[at].qpn != qpn && !self.is_vacant(at) {
            at = self.behind(at);
        }
        at
    }

    fn grow(&mut self) {
        let twice = vacant(2 * self.places.len());
        let old = mem::replace(&mut self.places, twice);
        for place in old.into_iter().filter(|place| place.value.is_some()) {
            let at = self.find(place.qpn);
            self.places[at] = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::random::Random;

    fn qpns<T>(map: &FastMap<T>) -> Vec<u32> {
        let mut qpns: Vec<_> = map
            .places
            .iter()
            .filter(|place| place.value.is_some())
            .map(|place| place.qpn)
            .collect();
        qpns.sort_unstable();
        qpns
    }

    #[test]
    fn sparse_24_bit_numbers_are_found_and_larger_ones_refused() {
        let mut map = FastMap::new();
        for qpn in [0, 1, 4095, 4096, 0x12_3456, 0xff_fffe, 0xff_ffff] {
            assert_eq!(map.insert(qpn, qpn), Ok(None));
        }
        assert_eq!(map.len, 7);
        assert_eq!(map.get(0xff_fffe), Some(&0xff_fffe));
        assert_eq!(map.get(2), None);
        assert_eq!(map.get(0x0100_0000), None);
        assert_eq!(map.insert(0x0100_0000, 9), Err(9));
        assert_eq!(
            qpns(&map),
            [0, 1, 4095, 4096, 0x12_3456, 0xff_fffe, 0xff_ffff]
        );
        assert_eq!(map.remove(4096), Some(4096));
        assert_eq!(map.remove(4096), None);
        assert_eq!(map.remove(0x0100_0000), None);
        assert_eq!(map.len, 6);
    }

    /// The numbers include the marks of vacant places ([`vacant_at`]). They are searched in an
    /// empty map, in a filled one, and in one that was emptied again.
    #[test]
    fn a_number_of_more_than_24_bits_is_never_found() {
        let mut map = FastMap::new();
        let is_none = |map: &FastMap<u32>| {
            (0..64).all(|low| {
                [0xff00_0000, 0x0100_0000, u32::MAX - 63].map(|high| map.get(high + low))
                    == [None; 3]
            })
        };
        assert!(is_none(&map));
        (0..20).for_each(|qpn| assert_eq!(map.insert(qpn, qpn), Ok(None)));
        assert!(is_none(&map));
        (0..20).for_each(|qpn| assert_eq!(map.remove(qpn), Some(qpn)));
        assert!(is_none(&map) && map.len == 0);
    }

    #[test]
    fn numbers_as_the_software_hca_gives_them_are_at_home() {
        let mut map = FastMap::new();
        // QPNs as the software HCA assigns them: the low 14 bits are the place of the queue pair in
        // the device's table, here below 2,000; the upper bits vary.
        let qpn = |place: u32| (place * 7 % 1021 + 1) << 14 | place;
        for place in 0..2_000 {
            assert_eq!(map.insert(qpn(place), place), Ok(None));
        }
        assert_eq!(map.places.len(), 4096);
        assert!((0..2_000).all(|place| map.places[place as usize].qpn == qpn(place)));
    }

    #[test]
    fn any_sequence_of_changes_gives_what_a_btree_map_gives() {
        for seed in [3u64, 1 << 40, 0xfeed] {
            let mut random = Random::new(seed);
            let (mut map, mut model) = (FastMap::new(), std::collections::BTreeMap::new());
            for step in 0..4_000 {
                // The numbers have few homes, including the last places of the table, so that every
                // case is frequent. There are many values at some times, few at others.
                let qpn = random.below(3) << 12
                    | random.below(4)
                    | if random.one_in(2) { 0xff_00fc } else { 0 };
                if random.one_in(if step / 500 % 2 == 0 { 2 } else { 8 }) {
                    assert_eq!(map.insert(qpn, step), Ok(model.insert(qpn, step)));
                } else {
                    assert_eq!(map.remove(qpn), model.remove(&qpn));
                }
                assert_eq!((map.get(qpn), map.len), (model.get(&qpn), model.len()));
            }
            assert_eq!(qpns(&map), model.keys().copied().collect::<Vec<_>>());
            assert!(
                model
                    .iter()
                    .all(|(qpn, value)| map.get(*qpn) == Some(value))
            );
        }
    }
}
