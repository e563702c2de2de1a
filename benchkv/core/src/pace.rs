//! Open loop: the intended start of each operation of a client, independent of earlier operations.
//!
//! Latency is measured from the intended start, so that a stall counts for every operation it
//! delayed (no coordinated omission). If a client is too slow for the rate, operations are due and
//! not issued. [`Schedule::backlog`] returns their number.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::carrier::name_of;

/// Number of random gaps between the operations of a client, 64 KiB of memory. After the last gap
/// the gaps repeat.
const RANDOM_GAPS: usize = 1 << 13;

/// The distribution of the intended starts over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// At equal intervals; clients take turns.
    Even,
    /// At exponentially distributed intervals, independently for each client.
    Poisson,
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

/// An open loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Operations per second of all clients of the job together.
    pub rate: f64,
    /// Distribution of their starts.
    pub arrivals: Arrivals,
}

impl Pace {
    /// Returns the schedule of client number `client` of `clients` in the job.
    pub fn schedule(&self, client: usize, clients: usize, seed: u64) -> Schedule {
        let starts = match self.arrivals {
            Arrivals::Even => vec![client as f64 / clients as f64],
            // The random stream differs from the stream of the accesses, although both have the
            // same seed.
            Arrivals::Poisson => {
                let stream = (client as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                random_starts(&mut Rng::with_seed(!seed ^ stream))
            }
        };
        let interval_ns = clients as f64 * 1e9 / self.rate;
        let mut schedule = Schedule {
            interval_ns,
            starts,
            origin_ns: None,
            taken: 0,
            next_ns: 0,
        };
        schedule.next_ns = schedule.start_ns(0);
        schedule
    }
}

/// Returns the starts of one cycle, with exponentially distributed gaps between them. They are
/// scaled so that the cycle lasts as many mean intervals as it has starts, which makes the mean
/// rate exact.
fn random_starts(rng: &mut Rng) -> Vec<f64> {
    let mut at = 0.0;
    let mut gap = || {
        // `1 - f64()` is above 0, so its logarithm is finite.
        at -= (1.0 - rng.f64()).ln();
        at
    };
    let mut starts: Vec<f64> = (0..RANDOM_GAPS).map(|_| gap()).collect();
    // One more gap separates the last start from the end of the cycle.
    let scale = RANDOM_GAPS as f64 / gap().max(f64::MIN_POSITIVE);
    starts.iter_mut().for_each(|start| *start *= scale);
    starts
}

/// The intended starts of one client's operations.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// Mean interval between two operations, in ns.
    interval_ns: f64,
    /// The intended starts in one cycle, in ascending order. A start is the number of intervals
    /// since the beginning of the cycle. A cycle with `n` starts is `n` intervals long.
    starts: Vec<f64>,
    /// Time at which load began, in ns; `None` before.
    origin_ns: Option<u64>,
    taken: u64,
    /// Intended start of the next operation, in ns.
    next_ns: u64,
}

impl Schedule {
    /// Begins the load at `now_ns`. Further calls have no effect.
    pub fn begin(&mut self, now_ns: u64) {
        if self.origin_ns.is_none() {
            self.origin_ns = Some(now_ns);
            self.next_ns = self.start_ns(0);
        }
    }

    /// Returns the intended start of the next operation, if it is due, in ns.
    #[inline]
    pub fn due_ns(&self, now_ns: u64) -> Option<u64> {
        (self.next_ns <= now_ns).then_some(self.next_ns)
    }

    /// Returns the time until the intended start of the next operation; zero if it is due.
    pub const fn until_next(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(self.next_ns.saturating_sub(now_ns))
    }

    /// Takes the next operation from the schedule, if it is due. Returns its intended start in ns.
    #[inline(never)]
    pub fn take_due(&mut self, now_ns: u64) -> Option<u64> {
        let due_ns = self.due_ns(now_ns)?;
        self.taken += 1;
        self.next_ns = self.start_ns(self.taken);
        Some(due_ns)
    }

    /// Returns the number of operations that have become due since load began.
    pub fn due(&self, now_ns: u64) -> u64 {
        let cycle = self.starts.len() as f64;
        let elapsed_ns = now_ns.saturating_sub(self.origin_ns.unwrap_or(now_ns));
        let intervals = elapsed_ns as f64 / self.interval_ns;
        let whole = (intervals / cycle).floor() * cycle;
        let of_cycle = |start: &f64| *start <= intervals - whole;
        whole as u64 + self.starts.partition_point(of_cycle) as u64
    }

    /// Returns the number of operations that are due and were not taken.
    pub fn backlog(&self, now_ns: u64) -> u64 {
        self.due(now_ns).saturating_sub(self.taken)
    }

    /// Returns the maximum time between two intended starts, or between the beginning of the load
    /// and the first intended start.
    pub fn longest_pause(&self) -> Duration {
        let first = self.starts.first().copied().unwrap_or_default();
        let wrap = self.starts.len() as f64 + first;
        let next = self.starts.iter().skip(1).chain([&wrap]);
        let pauses = self
            .starts
            .iter()
            .zip(next)
            .map(|(start, next)| next - start);
        let longest = pauses.fold(first, f64::max);
        Duration::from_nanos((longest * self.interval_ns) as u64)
    }

    fn start_ns(&self, number: u64) -> u64 {
        let cycle = self.starts.len() as u64;
        let start = self.starts.get((number % cycle) as usize);
        let start = start.copied().unwrap_or_default();
        self.origin_ns.unwrap_or(0)
            + (((number - number % cycle) as f64 + start) * self.interval_ns) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN_NS: u64 = 5_000;

    fn begun(arrivals: Arrivals, client: usize, seed: u64) -> Schedule {
        let mut schedule = Pace {
            rate: 1e6,
            arrivals,
        }
        .schedule(client, 4, seed);
        schedule.begin(ORIGIN_NS);
        schedule
    }

    fn starts(schedule: &mut Schedule, count: usize) -> Vec<u64> {
        let start = |_| schedule.take_due(u64::MAX).unwrap() - ORIGIN_NS;
        (0..count).map(start).collect()
    }

    #[test]
    fn clients_take_turns_at_equal_distances() {
        let each = [0, 1, 2, 3].map(|client| starts(&mut begun(Arrivals::Even, client, 1), 3));
        assert_eq!(
            each,
            [
                [0, 4000, 8000],
                [1000, 5000, 9000],
                [2000, 6000, 10_000],
                [3000, 7000, 11_000]
            ]
        );
    }

    #[test]
    fn nothing_is_due_before_its_time_or_before_load_begins() {
        let mut schedule = begun(Arrivals::Even, 1, 1);
        assert_eq!(
            (
                schedule.due_ns(ORIGIN_NS + 999),
                schedule.due_ns(ORIGIN_NS + 1000)
            ),
            (None, Some(ORIGIN_NS + 1000))
        );
        schedule.begin(ORIGIN_NS + 77);
        assert_eq!(
            schedule.due_ns(ORIGIN_NS + 1000),
            Some(ORIGIN_NS + 1000),
            "load begins once"
        );
        assert_eq!(
            Pace {
                rate: 1.0,
                arrivals: Arrivals::Even
            }
            .schedule(0, 1, 1)
            .due(1 << 40),
            1,
            "none but the first"
        );
    }

    #[test]
    fn the_backlog_is_what_is_due_and_not_taken() {
        for arrivals in [Arrivals::Even, Arrivals::Poisson] {
            let mut schedule = begun(arrivals, 1, 1);
            let all = starts(&mut schedule.clone(), 3 * RANDOM_GAPS);
            for now_ns in [0, 1, 999, 1000, 4999, 5000, 123_456, 40_000_000, 70_000_000] {
                let due = all.iter().filter(|start| **start <= now_ns).count() as u64;
                assert_eq!(
                    schedule.due(ORIGIN_NS + now_ns),
                    due,
                    "{arrivals:?} {now_ns}"
                );
            }
            let due = schedule.due(ORIGIN_NS + 123_456);
            (0..10).for_each(|_| assert!(schedule.take_due(u64::MAX).is_some()));
            assert_eq!(schedule.backlog(ORIGIN_NS + 123_456), due - 10);
            assert_eq!(
                schedule.backlog(ORIGIN_NS),
                0,
                "taken too early is not owed"
            );
        }
    }

    #[test]
    fn poisson_keeps_the_rate_with_distances_as_random_as_they_should_be() {
        let all = starts(&mut begun(Arrivals::Poisson, 2, 7), 2 * RANDOM_GAPS);
        assert!(all.is_sorted());
        assert_eq!(
            all[RANDOM_GAPS] - all[0],
            4000 * RANDOM_GAPS as u64,
            "a cycle has its mean rate exactly"
        );
        let gaps: Vec<f64> = all
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64 / 4000.0)
            .collect();
        // An exponential distribution of mean 1 has variance 1, and 1/e of its gaps are above the
        // mean.
        let variance = gaps.iter().map(|gap| (gap - 1.0).powi(2)).sum::<f64>() / gaps.len() as f64;
        let long = gaps.iter().filter(|gap| **gap > 1.0).count() as f64 / gaps.len() as f64;
        assert!(
            (variance - 1.0).abs() < 0.1 && (long - 0.368).abs() < 0.02,
            "{variance} {long}"
        );
    }

    #[test]
    fn no_pause_is_longer_than_the_longest() {
        for (arrivals, client) in [
            (Arrivals::Even, 0),
            (Arrivals::Even, 3),
            (Arrivals::Poisson, 0),
            (Arrivals::Poisson, 1),
        ] {
            let mut schedule = begun(arrivals, client, 1);
            let all = [vec![0], starts(&mut schedule.clone(), 2 * RANDOM_GAPS)].concat();
            let longest_ns = all.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
            assert!(
                longest_ns.abs_diff(schedule.longest_pause().as_nanos() as u64) <= 1,
                "{arrivals:?}: {longest_ns}, {:?}",
                schedule.longest_pause()
            );
            schedule.take_due(u64::MAX);
        }
    }

    #[test]
    fn the_seed_decides_and_clients_differ() {
        let of = |client, seed| starts(&mut begun(Arrivals::Poisson, client, seed), 100);
        assert_eq!(of(0, 1), of(0, 1));
        assert_ne!(of(0, 1), of(1, 1));
        assert_ne!(of(0, 1), of(0, 2));
    }
}
