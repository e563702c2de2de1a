//! Idle skipping: after a poll of its clients that found nothing, a daemon does not poll them for
//! some rounds.

use std::ops::RangeInclusive;

use clap::Args;
use harness::range::{RangeError, whole};
use serde::{Deserialize, Serialize};

use super::PolicyReport;
use super::rule::{Asked, MAX_ROUNDS, RoundPlan, RoundState, Rule};
use crate::topology::Topology;

/// Number of rounds without a poll.
const SKIPPED: RangeInclusive<u32> = 0..=MAX_ROUNDS;

/// The flag of idle skipping.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct SkipIdleArgs {
    /// After a poll of local clients that found nothing, do not poll them for N rounds, 0 to 4096.
    /// It starves local requests.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(SKIPPED), default_value_t = 0)]
    pub ipc_skip_idle: u32,
}

impl Asked for SkipIdleArgs {
    fn typed(&self) -> Option<String> {
        (self.ipc_skip_idle > 0).then(|| format!("ipc-skip-idle {}", self.ipc_skip_idle))
    }

    fn suits(&self, _topology: &Topology) -> Result<(), RangeError> {
        Ok(())
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        Some(Box::new(SkipIdle {
            rounds: self.ipc_skip_idle,
            left: 0,
            skipped: 0,
        }))
    }
}

/// The state of idle skipping.
#[derive(Debug)]
struct SkipIdle {
    rounds: u32,
    /// Rounds until the next poll.
    left: u32,
    skipped: u64,
}

impl Rule for SkipIdle {
    /// A round without requests does not poll clients anyway, and does not count.
    fn begin(&mut self, _round: &RoundState, plan: &mut RoundPlan) {
        if plan.takes_requests && self.left > 0 {
            plan.polls_clients = false;
            self.left -= 1;
            self.skipped += 1;
        }
    }

    fn polled_clients(&mut self, found: usize) {
        if found == 0 {
            self.left = self.rounds;
        }
    }

    fn report(&self, report: &mut PolicyReport) {
        report.skipped_looks = self.skipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_not_polled_for_some_rounds_after_a_poll_that_found_nothing() {
        let mut policy = SkipIdle {
            rounds: 2,
            left: 0,
            skipped: 0,
        };
        let mut polls = |found| {
            let mut plan = RoundPlan::default();
            policy.begin(&RoundState::default(), &mut plan);
            if plan.polls_clients {
                policy.polled_clients(found);
            }
            plan.polls_clients
        };
        let found = [3, 0, 9, 9, 1, 0, 0, 0, 0];
        assert_eq!(
            found.map(&mut polls),
            [true, true, false, false, true, true, false, false, true]
        );
    }
}
