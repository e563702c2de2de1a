//! Staggered start: the connections of a daemon begin to send one after the other, from its first
//! request on.

use std::time::Duration;

use clap::Args;
use harness::range::{RangeError, decimal};
use serde::{Deserialize, Serialize};

use super::PolicyReport;
use super::rule::{Asked, RoundPlan, RoundState, Rule, TIMES_US, nanos, needs_exchange};
use crate::topology::Topology;

/// The flag of the stagger.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct StaggerArgs {
    /// The connections of a daemon begin to send this number of us after each other, 0.1
    /// to 1000000. Simulated: changes nothing.
    #[arg(long, hide_short_help = true, value_name = "US", value_parser = decimal(TIMES_US))]
    pub initial_stagger_us: Option<f64>,
}

impl Asked for StaggerArgs {
    fn typed(&self) -> Option<String> {
        self.initial_stagger_us
            .map(|us| format!("initial-stagger-us {us}"))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--initial-stagger-us", topology)
    }

    fn longest_hold(&self, ranks: usize) -> Duration {
        Duration::from_secs_f64(self.initial_stagger_us.unwrap_or(0.0) / 1e6) * ranks as u32
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        self.initial_stagger_us
            .map(|us| Box::new(Stagger::new(nanos(us))) as Box<dyn Rule>)
    }
}

/// The state of the stagger.
#[derive(Debug)]
struct Stagger {
    interval_ns: u64,
    started_ns: Option<u64>,
    /// Whether all connections may send.
    is_over: bool,
    rounds: u64,
}

impl Stagger {
    /// Makes a stagger by `interval_ns`, at least 1.
    fn new(interval_ns: u64) -> Self {
        Self {
            interval_ns: interval_ns.max(1),
            started_ns: None,
            is_over: false,
            rounds: 0,
        }
    }

    /// Returns the number of connections that may send. `has_work`: a request waits, or was sent.
    fn open(&mut self, now_ns: u64, has_work: bool) -> usize {
        if self.started_ns.is_none() && !has_work {
            return 1;
        }
        let elapsed_ns = now_ns.saturating_sub(*self.started_ns.get_or_insert(now_ns));
        usize::try_from(elapsed_ns / self.interval_ns)
            .map_or(usize::MAX, |further| further.saturating_add(1))
    }
}

impl Rule for Stagger {
    fn begin(&mut self, round: &RoundState, plan: &mut RoundPlan) {
        if !self.is_over {
            plan.open_links = self.open(round.now_ns, round.has_work);
            self.rounds += u64::from(round.has_work);
            self.is_over = plan.open_links >= round.links;
        }
    }

    fn report(&self, report: &mut PolicyReport) {
        report.staggered_rounds = self.rounds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_begin_one_after_the_other_from_the_first_request_on() {
        let mut policy = Stagger::new(1_000);
        assert_eq!(
            [10, 1_000_000].map(|now_ns| policy.open(now_ns, false)),
            [1, 1]
        );
        let at = [2_000_000, 2_000_999, 2_001_000, 2_005_500, 1_000];
        assert_eq!(at.map(|now_ns| policy.open(now_ns, true)), [1, 1, 2, 6, 1]);
        assert_eq!(Stagger::new(0).interval_ns, 1);
        let mut fast = Stagger::new(1);
        fast.open(0, true);
        assert_eq!(fast.open(u64::MAX, true), usize::MAX);
    }
}
