//! The rate that an open loop offered, and the rate that it reached.

use std::fmt;

use benchkv_harness::report::{nanos, rate};
use serde::{Deserialize, Serialize};

use engine::client::OpenWindow;

/// Tolerated difference between the number of operations that became due in a window and the number
/// that ended in it: one operation in `TOLERATED`, and at least one operation.
const TOLERATED: u64 = 100;
/// Maximum difference that is accepted if chance, or a pause of the machine at the beginning or end
/// of the window, explains it: one operation in `EXPLAINED`. With a larger difference the rate was
/// not kept.
const EXPLAINED: u64 = 20;

/// The figures of an open loop, in one run or in all.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OpenLoop {
    /// Operations per second that became due.
    pub offered_rps: f64,
    /// Operations per second that ended: `total_rps` of the same run or job.
    pub reached_rps: f64,
    /// Operations that became due.
    pub due: u64,
    /// Operations that were due and not issued when the window ended. For several windows it is the
    /// maximum.
    pub backlog: u64,
    /// Whether the rate was kept, in each window and in all together: the number of operations that
    /// became due and the number that ended differ by at most a hundredth, or by one. A larger
    /// difference is accepted if chance or a short pause explains it, but only up to a twentieth,
    /// and up to the number of operations that the clients may have outstanding. Chance explains a
    /// difference below three times the square root of the mean number outstanding. A pause at the
    /// beginning or end of the window delays operations only for a small part of the window. So it
    /// explains a difference above four times the mean number of operations that were due and had
    /// not ended. (If operations fell behind steadily, this mean would be half of the difference.)
    /// If more operations end than become due, some were due before the window, and their latencies
    /// include the wait since then.
    pub kept_up: bool,
    /// Mean time from an operation's intended start to its issue, in nanoseconds. It is part of
    /// each latency.
    pub issue_delay_ns: f64,
}

/// Sums of [`OpenWindow`]s over clients and ranks. In a sum over runs, rates and means are weighted
/// by the lengths of the runs.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct OpenTally {
    offered_rps: f64,
    due: u64,
    backlog: u64,
    /// Mean over time of the number of operations that are due and not issued.
    held: f64,
}

impl OpenTally {
    pub(super) fn add(&mut self, window: &OpenWindow, span_ns: f64) {
        self.offered_rps += window.due as f64 * 1e9 / span_ns;
        self.due += window.due;
        self.backlog += window.backlog;
        self.held += window.held_ns as f64 / span_ns;
    }

    pub(super) fn add_tally(&mut self, other: &Self, weight: f64) {
        self.offered_rps += weight * other.offered_rps;
        self.due += other.due;
        self.backlog += other.backlog;
        self.held += weight * other.held;
    }
}

impl OpenLoop {
    /// Returns the figures of one run of all ranks together. In the run, `ended` operations ended,
    /// `reached_rps` of them per second, and `outstanding` operations were outstanding on average.
    /// Clients may have `depth` operations outstanding.
    pub(super) fn of_run(
        all: &OpenTally,
        reached_rps: f64,
        ended: u64,
        outstanding: f64,
        depth: u64,
    ) -> Self {
        let apart = all.due.abs_diff(ended);
        let is_explained = (apart as f64) < 3.0 * outstanding.sqrt()
            || 4.0 * (outstanding + all.held) < apart as f64;
        Self {
            offered_rps: all.offered_rps,
            reached_rps,
            due: all.due,
            backlog: all.backlog,
            kept_up: apart <= (all.due.max(ended) / TOLERATED).max(1)
                || (apart <= depth.min(all.due / EXPLAINED) && is_explained),
            issue_delay_ns: if reached_rps > 0.0 {
                all.held / reached_rps * 1e9
            } else {
                0.0
            },
        }
    }

    /// Returns the figures of all runs. `self` contains means and sums over the runs; `runs`
    /// contains the figures of each run.
    pub(super) fn of_job(self, runs: impl Iterator<Item = Self> + Clone) -> Self {
        Self {
            backlog: runs.clone().map(|run| run.backlog).max().unwrap_or(0),
            kept_up: self.kept_up && runs.clone().all(|run| run.kept_up),
            ..self
        }
    }
}

/// Formats a line of the table.
impl fmt::Display for OpenLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let offered = rate(self.offered_rps);
        let reached = rate(self.reached_rps);
        let delay = nanos(self.issue_delay_ns);
        write!(
            f,
            "open loop: offered {offered}, reached {reached}; latency from the intended start, {delay} of it before the issue"
        )?;
        if self.kept_up {
            return Ok(());
        }
        if self.reached_rps > self.offered_rps {
            return f.write_str(
                "\nMORE OPERATIONS ENDED THAN BECAME DUE: a run began with a backlog, whose latencies these are; use a longer --warmup or a lower --rate",
            );
        }
        write!(
            f,
            "\nTHE RATE WAS NOT REACHED: {} operations were overdue at the end of a run, so these latencies only grow with its length",
            self.backlog
        )
    }
}
