//! The order of a simulation's events. Finding the first event and changing an event take
//! logarithmic time.

use std::collections::BTreeSet;

/// The time of a place at which nothing is due.
pub(crate) const NEVER: u128 = u128::MAX;

/// The time of the next event of each place. A place is the index of a device or an actor. The low
/// bits of a time may give the order of simultaneous events.
#[derive(Debug, Default)]
pub(crate) struct DueTimes {
    times: Vec<u128>,
    /// The times except [`NEVER`], each with its place.
    order: BTreeSet<(u128, usize)>,
}

impl DueTimes {
    /// Adds a place at the end, at which nothing is due.
    pub(crate) fn push(&mut self) {
        self.times.push(NEVER);
    }

    /// Removes a place. Later places move up.
    pub(crate) fn remove(&mut self, place: usize) {
        self.times.remove(place);
        let times = (0..).zip(&self.times).map(|(place, time)| (*time, place));
        self.order = times.filter(|(time, _)| *time != NEVER).collect();
    }

    pub(crate) fn set(&mut self, place: usize, time: u128) {
        let before = std::mem::replace(&mut self.times[place], time);
        if before != time {
            self.order.remove(&(before, place));
            if time != NEVER {
                self.order.insert((time, place));
            }
        }
    }

    /// Returns the earliest time; [`NEVER`] if nothing is due at any place.
    pub(crate) fn first(&self) -> u128 {
        self.order.first().map_or(NEVER, |(time, _)| *time)
    }

    /// Returns the lowest place at which an event is due at `time` or before.
    pub(crate) fn first_due(&self, time: u128) -> Option<usize> {
        let due = self.order.range(..=(time, usize::MAX));
        due.map(|(_, place)| *place).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

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
