//! The scheduler: which group has the slice, when the slice ends, which group is warmed next.

use crate::protocol::groups::{GroupManager, PER_MILLE};
use crate::protocol::request::ClientId;

/// The decision of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The slice continues, or no slice has begun.
    Same,
    /// A new slice began.
    Switched,
}

/// The slices, in sequence. Epochs count them from 1; 0 is before the first slice. With the
/// shortest slice, 1 us, epochs last for 584,000 years.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scheduler {
    slice_ns: u64,
    /// Length of a slice of factor 1 (`slice_per_mille` 1000) that begins now and is not
    /// synchronised.
    length_ns: u64,
    epoch: u64,
    current: usize,
    next: Option<usize>,
    slice_end_ns: u64,
    /// Offset of the global clock from this clock, in ns, if slices are synchronised.
    offset_ns: Option<i64>,
    has_regrouped: bool,
}

impl Scheduler {
    /// Makes a scheduler before its first slice.
    pub const fn new(slice_ns: u64) -> Self {
        Self {
            slice_ns,
            length_ns: slice_ns,
            epoch: 0,
            current: 0,
            next: None,
            slice_end_ns: 0,
            offset_ns: None,
            has_regrouped: false,
        }
    }

    /// Returns the epoch of the slice.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of the group that is served.
    pub const fn current(&self) -> usize {
        self.current
    }

    /// Returns the number of the group that is warmed, if one was found.
    pub const fn next(&self) -> Option<usize> {
        self.next
    }

    /// Returns the time at which the slice may end, in ns.
    pub const fn slice_end_ns(&self) -> u64 {
        self.slice_end_ns
    }

    /// Makes slices end at multiples of their length in global time, which is this clock's time
    /// plus `offset_ns`; `None` ends that.
    pub const fn synchronise(&mut self, offset_ns: Option<i64>) {
        self.offset_ns = offset_ns;
    }

    /// Sets the length of slices of factor 1 (`slice_per_mille` 1000) that are not synchronised,
    /// from the next slice on.
    pub(crate) const fn set_length(&mut self, length_ns: u64) {
        self.length_ns = length_ns;
    }

    /// Returns the length of slices of factor 1 that are not synchronised, in ns.
    pub const fn length_ns(&self) -> u64 {
        self.length_ns
    }

    /// Returns whether the groups were formed anew since the last call.
    pub(crate) const fn take_regrouped(&mut self) -> bool {
        std::mem::replace(&mut self.has_regrouped, false)
    }

    /// Takes the new numbers of the current group and of the warmed group after a change of the
    /// groups. The numbers are equal if these two groups were merged. If `next` is `None`, the next
    /// group is chosen anew.
    pub(crate) const fn renumber(&mut self, current: usize, next: Option<usize>) {
        self.current = current;
        self.next = next;
    }

    /// Chooses the next group, and switches to it when the slice is over, or when `is_vacant`, that
    /// is, if no client has a zone in the slice. `waits` returns whether a client has announced
    /// requests and has no zone. A group in which no client waits is not chosen. The current group
    /// gets two slices in a row only after a call of `repeat` (S16 of docs/scalerpc.md).
    pub fn step(
        &mut self,
        now_ns: u64,
        groups: &mut GroupManager,
        waits: impl Fn(ClientId) -> bool,
        priority: impl Fn(ClientId) -> u64,
        is_vacant: bool,
    ) -> Turn {
        let is_first = self.epoch == 0;
        if self.next.is_none() {
            self.next = if is_first {
                first_waiting(groups, 0..groups.count(), &waits)
            } else {
                self.choose(groups, &waits, priority)
            };
        }
        let Some(next) = self.next else {
            return Turn::Same;
        };
        if !is_first && !is_vacant && now_ns < self.slice_end_ns {
            return Turn::Same;
        }
        self.next = None;
        self.current = next;
        self.epoch += 1;
        self.slice_end_ns = match self.offset_ns {
            Some(offset_ns) => aligned_end(now_ns, self.slice_ns, offset_ns),
            None => now_ns.saturating_add(
                self.length_ns.saturating_mul(groups.slice_per_mille(next)) / PER_MILLE,
            ),
        };
        Turn::Switched
    }

    /// Makes the current group get the next slice as well, if a client waits in it.
    pub(crate) fn repeat(&mut self, groups: &GroupManager, waits: impl Fn(ClientId) -> bool) {
        self.next = first_waiting(groups, self.current..self.current + 1, &waits);
    }

    /// Returns the first group after the current one in which a client waits. After the last group
    /// a rotation ends, and the groups are formed anew (S17).
    fn choose(
        &mut self,
        groups: &mut GroupManager,
        waits: &impl Fn(ClientId) -> bool,
        priority: impl Fn(ClientId) -> u64,
    ) -> Option<usize> {
        let behind = first_waiting(groups, self.current + 1..groups.count(), waits);
        if behind.is_some() {
            return behind;
        }
        first_waiting(groups, 0..self.current, waits)?;
        groups.regroup(self.current, priority);
        self.current = 0;
        self.has_regrouped = true;
        first_waiting(groups, 1..groups.count(), waits)
    }
}

/// Returns the end of a slice that begins now: the next multiple of `slice_ns` in global time that
/// is at least half a slice away.
fn aligned_end(now_ns: u64, slice_ns: u64, offset_ns: i64) -> u64 {
    let slice = i128::from(slice_ns.max(1));
    let global = i128::from(now_ns) + i128::from(offset_ns);
    let earliest = global + slice / 2;
    let end = earliest + (slice - earliest.rem_euclid(slice)) % slice;
    u64::try_from(end - i128::from(offset_ns)).unwrap_or(u64::MAX)
}

#[cfg(test)]
impl Scheduler {
    pub(crate) const fn count_from(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Shifts all times so that `now_ns` becomes 0. Earlier times become 0 too.
    pub(crate) fn rebase(&mut self, now_ns: u64) {
        self.slice_end_ns = self.slice_end_ns.saturating_sub(now_ns);
    }
}

fn first_waiting(
    groups: &GroupManager,
    mut range: std::ops::Range<usize>,
    waits: &impl Fn(ClientId) -> bool,
) -> Option<usize> {
    range.find(|group| groups.clients(*group).iter().any(|client| waits(*client)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: u64 = 1_000;

    fn groups_of_one(clients: u16) -> GroupManager {
        let mut groups = GroupManager::new(1);
        (0..clients).for_each(|client| groups.join(ClientId(client)));
        groups
    }

    #[test]
    fn a_single_group_never_switches() {
        let mut groups = GroupManager::new(4);
        (0..4).for_each(|client| groups.join(ClientId(client)));
        let mut scheduler = Scheduler::new(SLICE);
        assert_eq!(
            scheduler.step(0, &mut groups, |_| true, |_| 0, true),
            Turn::Switched,
            "the first slice begins"
        );
        for now in (0..100 * SLICE).step_by(300) {
            assert_eq!(
                scheduler.step(now, &mut groups, |_| true, |_| 0, false),
                Turn::Same
            );
        }
        assert_eq!((scheduler.epoch(), scheduler.next()), (1, None));
    }

    #[test]
    fn a_slice_goes_on_until_somebody_of_another_group_waits_and_then_ends_by_time() {
        let mut groups = groups_of_one(3);
        let mut scheduler = Scheduler::new(SLICE);
        scheduler.step(0, &mut groups, |client| client.0 == 0, |_| 0, true);
        assert_eq!(
            scheduler.step(5 * SLICE, &mut groups, |_| false, |_| 0, false),
            Turn::Same
        );
        assert_eq!(
            scheduler.step(5 * SLICE, &mut groups, |client| client.0 == 2, |_| 0, false),
            Turn::Switched
        );
        assert_eq!(
            (scheduler.current(), scheduler.slice_end_ns()),
            (2, 6 * SLICE),
            "group 1 is passed over"
        );
        assert_eq!(
            scheduler.step(
                6 * SLICE - 1,
                &mut groups,
                |client| client.0 == 0,
                |_| 0,
                false
            ),
            Turn::Same
        );
        assert!(scheduler.next().is_some(), "chosen early, to be warmed");
        assert_eq!(
            scheduler.step(6 * SLICE, &mut groups, |_| false, |_| 0, false),
            Turn::Switched
        );
    }

    #[test]
    fn an_empty_slice_ends_early() {
        let mut groups = groups_of_one(2);
        let mut scheduler = Scheduler::new(SLICE);
        scheduler.step(0, &mut groups, |client| client.0 == 0, |_| 0, true);
        assert_eq!(
            scheduler.step(1, &mut groups, |client| client.0 == 1, |_| 0, true),
            Turn::Switched
        );
    }

    /// Random sets of waiting clients, with priorities that move them between groups (S17).
    #[test]
    fn who_waits_is_served_within_two_rotations() {
        for seed in 0..100 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let clients = rng.u16(2..12);
            let mut groups = GroupManager::new(rng.u32(1..4));
            (0..clients).for_each(|client| groups.join(ClientId(client)));
            let mut scheduler = Scheduler::new(SLICE);
            let mut waiting = vec![0_usize; usize::from(clients)];
            for now in 0..2_000_u64 {
                let salt = rng.u64(..);
                let turn = scheduler.step(
                    now * SLICE * 2,
                    &mut groups,
                    |c| waiting[c.index()] > 0,
                    |c| salt >> (c.0 % 8) & 0xff,
                    false,
                );
                if turn == Turn::Switched {
                    waiting
                        .iter_mut()
                        .filter(|since| **since > 0)
                        .for_each(|since| *since += 1);
                    for client in groups.clients(scheduler.current()) {
                        waiting[client.index()] = 0;
                    }
                    let longest = waiting.iter().max().unwrap();
                    assert!(
                        *longest <= 2 * groups.count() + 1,
                        "seed {seed}: {longest} switches with {} groups",
                        groups.count()
                    );
                }
                let client = rng.usize(..waiting.len());
                if waiting[client] == 0
                    && !groups
                        .clients(scheduler.current())
                        .contains(&ClientId(client as u16))
                {
                    waiting[client] = 1;
                }
            }
        }
    }

    #[test]
    fn slices_of_servers_with_different_clocks_end_at_the_same_global_time() {
        for (now, offset) in [
            (1_000_000, 0),
            (1_000_321, -321),
            (999_000, 1_000),
            (400, 999_600),
        ] {
            let end = aligned_end(now, 100, offset);
            assert_eq!(
                end.checked_add_signed(offset).unwrap(),
                1_000_100,
                "now {now}"
            );
        }
        assert_eq!(aligned_end(149, 100, 0), 200);
        assert_eq!(
            aligned_end(151, 100, 0),
            300,
            "not shorter than half a slice"
        );
        assert_eq!(aligned_end(u64::MAX, 100, 0), u64::MAX);
    }
}
