//! Leaves the clients of a daemon out for some rounds after a look at them that found nothing.

use std::ops::RangeInclusive;

use clap::Args;
use harness::range::{RangeError, whole, within};
use serde::{Deserialize, Serialize};

use super::PolicyReport;
use super::rule::{Asked, MAX_ROUNDS, OUTSIDE, Rule};

/// Rounds without a look.
const SKIPPED: RangeInclusive<u32> = 0..=MAX_ROUNDS;

/// The flag of looks at clients.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct SkipIdleArgs {
    /// After a look at local clients that found nothing, leave them out for N rounds, 0 to 4096. Was found useless: local requests starve.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(SKIPPED), default_value_t = 0)]
    pub ipc_skip_idle: u32,
}

impl Asked for SkipIdleArgs {
    fn typed(&self) -> Option<String> {
        (self.ipc_skip_idle > 0).then(|| format!("ipc-skip-idle {}", self.ipc_skip_idle))
    }

    fn check(&self) -> Result<(), RangeError> {
        within("--ipc-skip-idle", self.ipc_skip_idle, SKIPPED, OUTSIDE, "")
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        Some(Box::new(SkipIdle::new(self.ipc_skip_idle)))
    }
}

/// The state of looks at clients.
#[derive(Debug)]
struct SkipIdle {
    rounds: u32,
    left: u32,
    skipped: u64,
}

impl SkipIdle {
    const fn new(rounds: u32) -> Self {
        Self { rounds, left: 0, skipped: 0 }
    }
}

impl Rule for SkipIdle {
    fn looks_at_clients(&mut self) -> bool {
        let looks = self.left == 0;
        self.left = self.left.saturating_sub(1);
        self.skipped += u64::from(!looks);
        looks
    }

    fn looked_at_clients(&mut self, found: usize) {
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
    fn clients_are_left_out_for_a_bounded_number_of_rounds_only_after_a_vain_look() {
        let mut policy = SkipIdle::new(2);
        let mut looks = |found| {
            let looks = policy.looks_at_clients();
            if looks {
                policy.looked_at_clients(found);
            }
            looks
        };
        let found = [3, 0, 9, 9, 1, 0, 0, 0, 0];
        assert_eq!(found.map(&mut looks), [true, true, false, false, true, true, false, false, true]);
    }
}
