//! The groups of clients: sizes, lazy split and merge, priorities.

use crate::protocol::request::ClientId;

/// Clients of a group by default.
pub const DEFAULT_GROUP_SIZE: u32 = 40;
/// Largest configured group size.
pub const MAX_ACTIVE_PER_GROUP: u32 = 50;
/// Queue-pair contexts that a ConnectX-3 caches.
pub const QPC_CACHE_CONNECTX3: u32 = 400;
/// Queue-pair contexts that a ConnectX-5 caches, estimated.
pub const QPC_CACHE_CONNECTX5: u32 = 1000;
/// Maximum part of the cache that groups use, in percent.
pub const SAFE_CACHE_PERCENT: u32 = 80;
/// Number of groups whose queue pairs are in use at a time: the current group, and the group that
/// is warmed.
pub const GROUPS_IN_CACHE: u32 = 2;

/// Returns the largest group size, 1..=[`MAX_ACTIVE_PER_GROUP`], for a cache of `cache_entries`
/// contexts, with `threads` servers on the NIC.
pub const fn max_group_size(cache_entries: u32, threads: u32) -> u32 {
    let threads = if threads == 0 { 1 } else { threads };
    let size = (cache_entries as u64 * SAFE_CACHE_PERCENT as u64
        / 100
        / threads as u64
        / GROUPS_IN_CACHE as u64) as u32;
    match size {
        0 => 1,
        1..=MAX_ACTIVE_PER_GROUP => size,
        _ => MAX_ACTIVE_PER_GROUP,
    }
}

/// Value of `slice_per_mille` for a slice of the base length.
pub const PER_MILLE: u64 = 1000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Group {
    clients: Vec<ClientId>,
    /// Slice length in thousandths of the base length, 500..=1500.
    slice_per_mille: u64,
}

impl Group {
    fn of(clients: Vec<ClientId>) -> Self {
        Self {
            clients,
            slice_per_mille: PER_MILLE,
        }
    }
}

/// The groups, in the order in which they are served. There is always at least one group, and only
/// the first group may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ConnectionGroup")]
pub struct GroupManager {
    size: usize,
    groups: Vec<Group>,
}

impl GroupManager {
    /// Makes a group without clients. `size` is the result of
    /// [`ServerConfig::clients_per_group`](crate::ServerConfig::clients_per_group).
    pub fn new(size: u32) -> Self {
        Self {
            size: size.max(1) as usize,
            groups: vec![Group::of(Vec::new())],
        }
    }

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Returns the clients of a group; none if the group does not exist.
    pub fn clients(&self, group: usize) -> &[ClientId] {
        self.groups.get(group).map_or(&[], |group| &group.clients)
    }

    /// Returns a group's slice length, in thousandths of the base length, 500..=1500.
    pub fn slice_per_mille(&self, group: usize) -> u64 {
        self.groups
            .get(group)
            .map_or(PER_MILLE, |group| group.slice_per_mille)
    }

    /// Returns the number of a client's group.
    pub fn group_of(&self, client: ClientId) -> Option<usize> {
        self.groups
            .iter()
            .position(|group| group.clients.contains(&client))
    }

    /// Adds a client to the smallest group. A group that grows above 1.5 times the size is split:
    /// its second half becomes the last group.
    pub fn join(&mut self, client: ClientId) {
        let Some(smallest) =
            (0..self.groups.len()).min_by_key(|group| self.groups[*group].clients.len())
        else {
            return;
        };
        self.groups[smallest].clients.push(client);
        self.split_if_large(smallest);
    }

    /// Removes a client. A group that shrinks below half the size is merged with the smallest other
    /// group, and split like in [`join`](Self::join) if it becomes too large. `current` is the
    /// number of the group being served: if this group takes part in a merge, it gets the clients
    /// of the other group. Returns the new number of the group being served.
    pub fn leave(&mut self, client: ClientId, current: usize) -> usize {
        let Some(group) = self.group_of(client) else {
            return current;
        };
        self.groups[group]
            .clients
            .retain(|member| *member != client);
        if self.groups.len() == 1 || 2 * self.groups[group].clients.len() >= self.size {
            return current;
        }
        let others = (0..self.groups.len()).filter(|other| *other != group);
        let Some(other) = others.min_by_key(|other| self.groups[*other].clients.len()) else {
            return current;
        };
        let (into, from) = if group == current {
            (group, other)
        } else {
            (other, group)
        };
        let moved = self.groups.remove(from);
        let into = if from < into { into - 1 } else { into };
        self.groups[into].clients.extend(moved.clients);
        self.split_if_large(into);
        if from < current {
            current - 1
        } else {
            current.min(self.groups.len() - 1)
        }
    }

    fn split_if_large(&mut self, group: usize) {
        let clients = &mut self.groups[group].clients;
        if clients.len() > self.size + self.size / 2 {
            let second = clients.split_off(clients.len().div_ceil(2));
            self.groups.push(Group::of(second));
        }
    }

    /// Sorts the clients of all groups but `keep`, the group being served, by priority. Clients of
    /// high priority get smaller groups and longer slices. `keep` becomes group 0, unchanged.
    ///
    /// `priority` measures the requests of a client in the rotation that ends. The result is
    /// divided by the client's share of the time, which is the slice of its group divided by the
    /// number of the group's clients. Without this division, a client with a larger share would
    /// complete more requests, and so get a still larger share.
    pub fn regroup(&mut self, keep: usize, priority: impl Fn(ClientId) -> u64) {
        if keep >= self.groups.len() {
            return;
        }
        let kept = self.groups.remove(keep);
        let mut ranked = Vec::new();
        for Group {
            clients,
            slice_per_mille,
        } in self.groups.drain(..)
        {
            let by_share = |client| {
                u128::from(priority(client)) * clients.len() as u128 * u128::from(PER_MILLE)
                    / u128::from(slice_per_mille)
            };
            ranked.extend(clients.iter().map(|client| Ranked {
                priority: by_share(*client),
                client: *client,
            }));
        }
        self.groups.push(kept);
        // Ties are sorted by client number, so that clients of equal priority keep their groups.
        ranked.sort_by_key(|ranked| (std::cmp::Reverse(ranked.priority), ranked.client));
        let total = sum(&ranked);
        let mean = total / ranked.len().max(1) as u128;
        let spread = spread_per_mille(&ranked);
        let mut rest = ranked.as_slice();
        let parts = group_count(ranked.len(), self.size);
        for part in 0..parts {
            let len = part_len(rest.len(), part, parts, spread, self.size);
            let (head, tail) = rest.split_at(len);
            rest = tail;
            let per_mille = u128::from(PER_MILLE);
            let slice_per_mille = if total == 0 {
                per_mille
            } else {
                sum(head) * per_mille / (mean.max(1) * head.len().max(1) as u128)
            };
            let clients = head.iter().map(|ranked| ranked.client).collect();
            self.groups.push(Group {
                clients,
                slice_per_mille: slice_per_mille.clamp(500, 1500) as u64,
            });
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ranked {
    priority: u128,
    client: ClientId,
}

fn sum(ranked: &[Ranked]) -> u128 {
    ranked
        .iter()
        .map(|ranked| ranked.priority)
        .fold(0, u128::saturating_add)
}

/// Returns the number of groups for `clients` clients: `clients / size`, rounded to the nearest
/// whole number, and at least 1 if there is a client. So equal groups have at most 1.5 times `size`
/// clients.
fn group_count(clients: usize, size: usize) -> usize {
    if clients == 0 {
        0
    } else {
        ((clients + size / 2) / size).max(1)
    }
}

/// Returns the inequality of priorities, from 0 (all are equal) to 500. `sorted` begins with the
/// highest priority.
fn spread_per_mille(sorted: &[Ranked]) -> usize {
    let (Some(highest), Some(lowest)) = (sorted.first(), sorted.last()) else {
        return 0;
    };
    let (highest, lowest) = (highest.priority, lowest.priority);
    (500 * (highest - lowest) / (highest + lowest).max(1)) as usize
}

/// Returns the number of clients of group `part` of `parts`. `left` clients are left for this group
/// and the later groups. The first groups are smaller than the mean, by up to `spread` thousandths,
/// and the last groups are larger. The number is chosen so that the later groups can take the other
/// clients without being too small or too large.
fn part_len(left: usize, part: usize, parts: usize, spread: usize, size: usize) -> usize {
    let behind = parts - part - 1;
    if behind == 0 {
        return left;
    }
    let mean = left / (behind + 1);
    let wanted = mean - mean * spread * behind / (1000 * (parts - 1));
    let (min, max) = (size.div_ceil(2), size + size / 2);
    let low = min.max(left.saturating_sub(behind * max)).min(left);
    let high = max.min(left.saturating_sub(behind * min)).max(low);
    wanted.clamp(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(size: u32, clients: u16) -> GroupManager {
        let mut groups = GroupManager::new(size);
        (0..clients).for_each(|client| groups.join(ClientId(client)));
        groups
    }

    fn check(groups: &GroupManager, clients: usize) {
        let mut all: Vec<_> = (0..groups.count())
            .flat_map(|group| groups.clients(group))
            .collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), clients, "each client is in one group");
        for group in 0..groups.count() {
            let len = groups.clients(group).len();
            assert!(2 * len <= 3 * groups.size, "group of {len}");
            assert!((500..=1500).contains(&groups.slice_per_mille(group)));
        }
    }

    #[test]
    fn the_cache_bounds_a_group_and_two_are_in_it() {
        assert_eq!(max_group_size(QPC_CACHE_CONNECTX3, 1), 50);
        assert_eq!(max_group_size(QPC_CACHE_CONNECTX3, 4), 40);
        assert_eq!(max_group_size(QPC_CACHE_CONNECTX3, 8), 20);
        assert_eq!(max_group_size(QPC_CACHE_CONNECTX5, 16), 25);
        assert_eq!((max_group_size(0, 0), max_group_size(400, 1000)), (1, 1));
    }

    #[test]
    fn joining_splits_above_one_and_a_half_and_leaving_merges_below_a_half() {
        let mut groups = manager(4, 6);
        assert_eq!(groups.count(), 1);
        groups.join(ClientId(6));
        assert_eq!(
            (
                groups.count(),
                groups.clients(0).len(),
                groups.clients(1).len()
            ),
            (2, 4, 3)
        );
        for client in 0..2 {
            groups.leave(ClientId(client), 0);
        }
        assert_eq!(groups.count(), 2, "two of four are not below a half");
        groups.leave(ClientId(2), 0);
        assert_eq!((groups.count(), groups.clients(0).len()), (1, 4));
        check(&groups, 4);
    }

    #[test]
    fn a_group_of_one_client_is_legal() {
        let mut groups = manager(1, 3);
        assert_eq!(groups.count(), 3);
        groups.leave(ClientId(1), 0);
        assert_eq!(groups.count(), 2);
        check(&groups, 2);
    }

    /// Returns, by client number, the work that each client gets done if it uses its whole share.
    fn full_use(groups: &GroupManager, clients: usize) -> Vec<u64> {
        let mut done = vec![0; clients];
        for group in 0..groups.count() {
            let members = groups.clients(group);
            members.iter().for_each(|client| {
                done[client.index()] = 1_000 * groups.slice_per_mille(group) / members.len() as u64
            });
        }
        done
    }

    #[test]
    fn high_priority_gets_smaller_groups_and_longer_slices() {
        let mut groups = manager(8, 32);
        let kept = groups.clients(0).to_vec();
        let done = full_use(&groups, 32);
        groups.regroup(0, |client| {
            if client.0 % 2 == 0 {
                done[client.index()]
            } else {
                done[client.index()] / 100
            }
        });
        check(&groups, 32);
        assert_eq!(
            groups.clients(0),
            kept,
            "the group being served stays as it is"
        );
        let last = groups.count() - 1;
        assert!(
            groups.clients(1).len() < groups.clients(last).len(),
            "{groups:?}"
        );
        assert!(
            groups.slice_per_mille(1) > 1000 && groups.slice_per_mille(last) < 1000,
            "{groups:?}"
        );
    }

    /// Pitfall: a client with a long slice in a small group gets more done, and gets an even longer
    /// slice in a smaller group for it.
    #[test]
    fn clients_that_all_want_the_same_have_the_same_share_after_some_rotations_whatever_it_was_before()
     {
        let mut groups = manager(8, 64);
        groups.regroup(0, |client| u64::from(client.0 + 1) * 100);
        let unequal = full_use(&groups, 64);
        assert!(
            unequal.iter().max() > unequal.iter().min().map(|min| 3 * min).as_ref(),
            "{groups:?}"
        );
        for keep in [3, 1, 2, 1] {
            let done = full_use(&groups, 64);
            groups.regroup(keep, |client| done[client.index()]);
            check(&groups, 64);
        }
        for group in 1..groups.count() {
            assert!(
                (990..=1010).contains(&groups.slice_per_mille(group)),
                "{groups:?}"
            );
            assert!(
                (7..=10).contains(&groups.clients(group).len()),
                "{groups:?}"
            );
        }
    }

    #[test]
    fn every_history_keeps_the_groups_within_their_limits() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let size = rng.u32(1..9);
            let mut groups = GroupManager::new(size);
            let mut clients = Vec::new();
            let mut current = 0;
            for next in 0..200 {
                match rng.u8(..5) {
                    0 | 1 => {
                        groups.join(ClientId(next));
                        clients.push(ClientId(next));
                    }
                    2 if !clients.is_empty() => {
                        current =
                            groups.leave(clients.swap_remove(rng.usize(..clients.len())), current);
                    }
                    3 => current = rng.usize(..groups.count()),
                    _ => {
                        let salt = rng.u64(1..1 << 40);
                        groups.regroup(current, |client| {
                            salt.rotate_left(u32::from(client.0)) % 1000
                        });
                        current = 0;
                    }
                }
                assert!(current < groups.count(), "seed {seed}");
                check(&groups, clients.len());
            }
        }
    }
}
