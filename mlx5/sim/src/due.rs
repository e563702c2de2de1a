//! The order of a simulation's events. Finding the first event and changing an event take
//! logarithmic time.

/// The time of a place with nothing to do.
pub(crate) const NEVER: u128 = u128::MAX;

/// A time for each place; its low bits order equal times. A tree in an array: node `i` holds the
/// minimum of nodes `2 i` and `2 i + 1`. The root is node 1. The leaves are the second half: one
/// for each place, then [`NEVER`] in the rest.
#[derive(Debug, Default)]
pub(crate) struct DueTimes {
    tree: Vec<u128>,
    places: usize,
}

impl DueTimes {
    /// Adds a place at the end, with nothing to do.
    pub(crate) fn push(&mut self) {
        if self.places == self.tree.len() / 2 {
            let times = self.times();
            self.build(&times, (2 * self.places).max(1));
        }
        self.places += 1;
    }

    /// Removes a place. Later places move up.
    pub(crate) fn remove(&mut self, place: usize) {
        let mut times = self.times();
        times.remove(place);
        self.places -= 1;
        self.build(&times, self.tree.len() / 2);
    }

    /// Sets the time of a place.
    pub(crate) fn set(&mut self, place: usize, time: u128) {
        let mut node = self.tree.len() / 2 + place;
        if std::mem::replace(&mut self.tree[node], time) == time {
            return;
        }
        while node > 1 {
            node /= 2;
            let first = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if std::mem::replace(&mut self.tree[node], first) == first {
                break;
            }
        }
    }

    /// Returns the earliest time. [`NEVER`] if no place has something to do.
    pub(crate) fn first(&self) -> u128 {
        self.tree.get(1).copied().unwrap_or(NEVER)
    }

    /// Returns the first place with something to do at `time` or before.
    pub(crate) fn first_due(&self, time: u128) -> Option<usize> {
        let time = time.min(NEVER - 1);
        if self.first() > time {
            return None;
        }
        let leaves = self.tree.len() / 2;
        let mut node = 1;
        while node < leaves {
            node *= 2;
            node += usize::from(self.tree[node] > time);
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
    use mlx5_hca::network::Random;

    use super::*;

    #[test]
    fn it_finds_what_a_scan_of_a_plain_list_finds() {
        let mut random = Random::new(1);
        let (mut due, mut list) = (DueTimes::default(), Vec::<u128>::new());
        for _ in 0..20_000 {
            match random.below(16) {
                0 if list.len() < 40 => {
                    due.push();
                    list.push(NEVER);
                }
                1 if !list.is_empty() => {
                    let place = random.below(list.len() as u64) as usize;
                    due.remove(place);
                    list.remove(place);
                }
                _ if !list.is_empty() => {
                    let place = random.below(list.len() as u64) as usize;
                    let time = if random.below(50) == 0 {
                        NEVER - 1
                    } else {
                        random.below(100).into()
                    };
                    list[place] = if random.below(4) == 0 { NEVER } else { time };
                    due.set(place, list[place]);
                }
                _ => {}
            }
            assert_eq!(due.first(), list.iter().min().copied().unwrap_or(NEVER));
            let now = if random.below(20) == 0 {
                NEVER
            } else {
                random.below(100).into()
            };
            assert_eq!(
                due.first_due(now),
                list.iter().position(|time| *time != NEVER && *time <= now)
            );
        }
    }
}
