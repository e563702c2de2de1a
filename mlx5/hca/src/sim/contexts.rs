//! The cache of queue-pair contexts on a NIC.

use std::collections::BTreeMap;

/// The most recently used contexts.
#[derive(Default)]
pub(crate) struct ContextCache {
    /// Number of the last use of each queue pair, and the reverse map.
    last_uses: BTreeMap<u32, u64>,
    by_use: BTreeMap<u64, u32>,
    uses: u64,
}

impl ContextCache {
    /// Makes `qpn` the newest of at most `capacity` contexts. Returns whether it was there before.
    pub(crate) fn holds(&mut self, qpn: u32, capacity: usize) -> bool {
        self.uses += 1;
        self.by_use.insert(self.uses, qpn);
        let before = self.last_uses.insert(qpn, self.uses);
        let oldest = before.or_else(|| {
            self.by_use
                .keys()
                .next()
                .copied()
                .filter(|_| self.last_uses.len() > capacity)
        });
        if let Some(qpn) = oldest
            .and_then(|number| self.by_use.remove(&number))
            .filter(|_| before.is_none())
        {
            self.last_uses.remove(&qpn);
        }
        before.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

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
                assert_eq!(cache.holds(qpn, capacity), was_there, "capacity {capacity}");
            }
        }
    }
}
