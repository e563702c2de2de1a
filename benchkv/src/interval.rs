//! `--report-interval`: a line for each interval of a running job, with the operations of rank 0.
//!
//! Each client publishes its counts after a step in which operations were issued or have ended: two
//! stores into a cache line of its own. Without the option it publishes nothing.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use benchkv_harness::report::{nanos, rate};
use engine::client::Tally;
use engine::phase::Phase;

use crate::progress::name_of;

/// The published counts of one client. Only this client writes them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Published {
    ended: AtomicU64,
    outstanding_ns: AtomicU64,
}

impl Published {
    /// Publishes the two counts. A reader may see the new value of one count before the new value
    /// of the other.
    #[inline]
    pub fn set(
        &self,
        Tally {
            ended,
            outstanding_ns,
        }: Tally,
    ) {
        self.ended.store(ended, Ordering::Relaxed);
        self.outstanding_ns.store(outstanding_ns, Ordering::Relaxed);
    }
}

/// The operations of an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// End of the interval, since the beginning of load.
    pub since_start: Duration,
    /// Length of the interval, in ns; never 0.
    pub length_ns: u64,
    /// The phase in which the interval ended.
    pub phase: Phase,
    /// The increase of the counts in the interval.
    pub done: Tally,
}

/// The state of `--report-interval`: the current interval, and the counts at its beginning.
#[derive(Debug)]
pub struct Reporter<'a> {
    clients: &'a [Published],
    interval_ns: u64,
    begin_ns: u64,
    end_ns: u64,
    /// Time and counts of the last line.
    last: (u64, Tally),
}

impl<'a> Reporter<'a> {
    /// Makes a reporter whose first interval begins at `now_ns`.
    pub fn new(clients: &'a [Published], interval: Duration, now_ns: u64) -> Self {
        let interval_ns = (interval.as_nanos() as u64).max(1);
        Self {
            clients,
            interval_ns,
            begin_ns: now_ns,
            end_ns: now_ns + interval_ns,
            last: (now_ns, Tally::default()),
        }
    }

    /// Returns the interval that has ended; `None` before its end. A late call returns one interval
    /// instead of several.
    pub fn look(&mut self, now_ns: u64, phase: Phase) -> Option<Interval> {
        if now_ns < self.end_ns {
            return None;
        }
        self.end_ns = now_ns + self.interval_ns - (now_ns - self.begin_ns) % self.interval_ns;
        let sum = self.clients.iter().fold(Tally::default(), |sum, client| {
            let ended = client.ended.load(Ordering::Relaxed);
            let outstanding_ns = client.outstanding_ns.load(Ordering::Relaxed);
            Tally {
                ended: sum.ended.wrapping_add(ended),
                outstanding_ns: sum.outstanding_ns.wrapping_add(outstanding_ns),
            }
        });
        let (from_ns, from) = std::mem::replace(&mut self.last, (now_ns, sum));
        let done = Tally {
            ended: sum.ended.wrapping_sub(from.ended),
            outstanding_ns: sum.outstanding_ns.wrapping_sub(from.outstanding_ns),
        };
        Some(Interval {
            since_start: Duration::from_nanos(now_ns - self.begin_ns),
            length_ns: now_ns - from_ns,
            phase,
            done,
        })
    }
}

impl Interval {
    /// Returns the line of the interval in a job of `runs`, on rank 0 of `ranks`.
    pub fn line(&self, runs: usize, ranks: usize) -> impl fmt::Display {
        let Tally {
            ended,
            outstanding_ns,
        } = self.done;
        let seconds = self.since_start.as_secs_f64();
        let per_s = rate(ended as f64 * 1e9 / self.length_ns as f64);
        // Little's law: the time is the mean number of outstanding operations, divided by the rate
        // at which operations end.
        let time = if ended == 0 {
            String::new()
        } else {
            let mean_ns = outstanding_ns as f64 / ended as f64;
            format!(", mean time {}", nanos(mean_ns))
        };
        let name = name_of(self.phase, runs).unwrap_or_else(|| "between runs".to_owned());
        let ranks = if ranks == 1 {
            String::new()
        } else {
            format!(" (rank 0 of {ranks})")
        };
        format!("{seconds:8.2} s  {name:<12}  {ended:>12} operations  {per_s:>12}{time}{ranks}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn an_interval_is_the_difference_of_the_counts_at_its_ends() {
        let clients: [Published; 2] = Default::default();
        let publish = |ended: [u64; 2], outstanding_ns| {
            clients.iter().zip(ended).for_each(|(client, ended)| {
                client.set(Tally {
                    ended,
                    outstanding_ns,
                })
            });
        };
        let mut reporter = Reporter::new(&clients, Duration::from_millis(500), 7);
        publish([1_000, 3_000], 32 * 500 * MS);
        assert_eq!(reporter.look(6 + 500 * MS, Phase::WarmUp), None);
        let first = reporter.look(7 + 500 * MS, Phase::WarmUp).unwrap();
        let done = Tally {
            ended: 4_000,
            outstanding_ns: 64 * 500 * MS,
        };
        assert_eq!(
            first,
            Interval {
                since_start: Duration::from_millis(500),
                length_ns: 500 * MS,
                phase: Phase::WarmUp,
                done
            }
        );
        assert_eq!(
            first.line(3, 1).to_string(),
            "    0.50 s  warming up            4000 operations       8.0 k/s, mean time 8.00 ms"
        );
        // The main thread calls late.
        publish([1_075, 3_000], 32 * 1_250 * MS);
        let second = reporter.look(7 + 1_250 * MS, Phase::Window(1)).unwrap();
        assert_eq!(
            second.line(3, 4).to_string(),
            "    1.25 s  run 2 of 3              75 operations        100 /s, mean time 640.00 ms (rank 0 of 4)"
        );
        // The next interval ends at the time of the schedule, not one length after the late line.
        assert_eq!(reporter.look(6 + 1_500 * MS, Phase::Between), None);
        let third = reporter.look(7 + 1_500 * MS, Phase::Between).unwrap();
        assert_eq!((third.length_ns, third.done), (250 * MS, Tally::default()));
        assert!(
            !third.line(1, 1).to_string().contains("mean time"),
            "without an operation there is no time"
        );
    }
}
