//! When each device of a simulation has something to do: the earliest is found, and one is changed, in a time that grows with the logarithm of
//! their number.

/// Nothing to do: behind all times, of which the last is a legal one.
const NEVER: u128 = 1 << 64;

/// A time for each place, in ns. A tree in an array: the node `i` holds the smaller one of nodes `2 i` and `2 i + 1`, the root is 1, and the
/// leaves are the second half, place by place, filled up with [`NEVER`].
#[derive(Debug, Default)]
pub(super) struct DueTimes {
    tree: Vec<u128>,
    places: usize,
}

impl DueTimes {
    /// One more place, behind the others, with nothing to do.
    pub(super) fn push(&mut self) {
        if self.places == self.tree.len() / 2 {
            let times = self.times();
            self.build(&times, (2 * self.places).max(1));
        }
        self.places += 1;
    }

    /// Takes a place away; those behind it move up.
    pub(super) fn remove(&mut self, place: usize) {
        let mut times = self.times();
        times.remove(place);
        self.places -= 1;
        self.build(&times, self.tree.len() / 2);
    }

    /// Sets the time of a place.
    pub(super) fn set(&mut self, place: usize, at_ns: Option<u64>) {
        let mut node = self.tree.len() / 2 + place;
        self.tree[node] = at_ns.map_or(NEVER, u128::from);
        while node > 1 {
            node /= 2;
            self.tree[node] = self.tree[2 * node].min(self.tree[2 * node + 1]);
        }
    }

    /// The earliest time.
    pub(super) fn first_ns(&self) -> Option<u64> {
        self.tree.get(1).and_then(|at_ns| u64::try_from(*at_ns).ok())
    }

    /// The first place with something to do at `now_ns` or before.
    pub(super) fn first_due(&self, now_ns: u64) -> Option<usize> {
        self.first_ns().filter(|at_ns| *at_ns <= now_ns)?;
        let leaves = self.tree.len() / 2;
        let mut node = 1;
        while node < leaves {
            node *= 2;
            if self.tree[node] > u128::from(now_ns) {
                node += 1;
            }
        }
        Some(node - leaves)
    }

    fn times(&self) -> Vec<u128> {
        let leaves = self.tree.len() / 2;
        self.tree[leaves..leaves + self.places].to_vec()
    }

    fn build(&mut self, times: &[u128], leaves: usize) {
        self.tree = vec![NEVER; 2 * leaves];
        self.tree[leaves..leaves + times.len()].copy_from_slice(times);
        for node in (1..leaves).rev() {
            self.tree[node] = self.tree[2 * node].min(self.tree[2 * node + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn it_finds_what_a_scan_of_a_plain_list_finds() {
        let mut random = Random::new(1);
        let (mut due, mut list) = (DueTimes::default(), Vec::<Option<u64>>::new());
        for _ in 0..20_000 {
            match random.below(16) {
                0 if list.len() < 40 => {
                    due.push();
                    list.push(None);
                }
                1 if !list.is_empty() => {
                    let place = random.below(list.len() as u64) as usize;
                    due.remove(place);
                    list.remove(place);
                }
                _ if !list.is_empty() => {
                    let place = random.below(list.len() as u64) as usize;
                    list[place] = (random.below(4) > 0).then(|| if random.below(50) == 0 { u64::MAX } else { random.below(100) });
                    due.set(place, list[place]);
                }
                _ => {}
            }
            assert_eq!(due.first_ns(), list.iter().flatten().min().copied());
            let now_ns = if random.below(20) == 0 { u64::MAX } else { random.below(100) };
            assert_eq!(due.first_due(now_ns), list.iter().position(|at_ns| at_ns.is_some_and(|at_ns| at_ns <= now_ns)));
        }
    }
}
