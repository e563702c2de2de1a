//! The queue-pair contexts that a NIC holds on its chip.

use crate::numbered::ByNumber;

/// No entry.
const NONE: usize = usize::MAX;

struct Entry {
    qpn: u32,
    newer: usize,
    older: usize,
}

/// A cache of the contexts used last: a list from the newest to the oldest, in an array, and where each queue pair is in it. A look costs the
/// same however many there are; the map is only ever asked for one key, so its order decides nothing.
#[derive(Default)]
pub(crate) struct ContextCache {
    entries: Vec<Entry>,
    places: ByNumber<u32, usize>,
    newest: usize,
    oldest: usize,
}

impl ContextCache {
    /// Looks at the context of `qpn`, which is then the newest of at most `capacity`. Returns whether it was there.
    pub(crate) fn look(&mut self, qpn: u32, capacity: usize) -> bool {
        if capacity == 0 {
            return false;
        }
        if let Some(&place) = self.places.get(&qpn) {
            if place != self.newest {
                self.unlink(place);
                self.link(place);
            }
            return true;
        }
        let place = if self.entries.len() < capacity {
            self.entries.push(Entry { qpn, newer: NONE, older: NONE });
            self.entries.len() - 1
        } else {
            let place = self.oldest;
            self.unlink(place);
            self.places.remove(&self.entries[place].qpn);
            self.entries[place].qpn = qpn;
            place
        };
        self.places.insert(qpn, place);
        self.link(place);
        false
    }

    fn unlink(&mut self, place: usize) {
        let Entry { newer, older, .. } = self.entries[place];
        match self.entries.get_mut(newer) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(older) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }

    /// Makes an entry that is in no list the newest.
    fn link(&mut self, place: usize) {
        let is_first = self.places.len() == 1;
        let older = if is_first { NONE } else { self.newest };
        if let Some(entry) = self.entries.get_mut(older) {
            entry.newer = place;
        } else {
            self.oldest = place;
        }
        self.entries[place].newer = NONE;
        self.entries[place].older = older;
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use mlx5_hca::network::Random;

    use super::*;

    #[test]
    fn it_holds_what_a_plain_list_of_the_last_used_holds() {
        for capacity in [0, 1, 2, 3, 17] {
            let (mut cache, mut list) = (ContextCache::default(), Vec::new());
            let mut random = Random::new(capacity as u64);
            for _ in 0..5000 {
                let qpn = random.below(24) as u32;
                let was_there = list.contains(&qpn);
                list.retain(|&q| q != qpn);
                list.push(qpn);
                if list.len() > capacity {
                    list.remove(0);
                }
                assert_eq!(cache.look(qpn, capacity), was_there, "capacity {capacity}");
            }
        }
    }
}
