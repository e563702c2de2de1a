//! Send-side batching: a flush every N rounds that did something.

use std::ops::RangeInclusive;

use clap::Args;
use harness::range::{RangeError, range, whole};
use serde::{Deserialize, Serialize};

use super::PolicyReport;
use super::rule::{Asked, MAX_ROUNDS, Rule, needs_exchange};
use crate::topology::Topology;

/// Number of rounds from one flush to the next.
const EVERY: RangeInclusive<u32> = 1..=MAX_ROUNDS;

/// The flag of flushes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
pub struct FlushArgs {
    /// Flush after every N rounds that did something, 1 to 4096, and after a round that did
    /// nothing. Simulated: 8 lifts 8 ranks out of the low state at depth 8, and not at depth 32
    /// with 512 batches in flight.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(EVERY), default_value_t = 1)]
    pub flush_every: u32,
}

impl Default for FlushArgs {
    fn default() -> Self {
        Self { flush_every: 1 }
    }
}

impl Asked for FlushArgs {
    fn typed(&self) -> Option<String> {
        (self.flush_every != 1).then(|| format!("flush-every {}", self.flush_every))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        if !topology.carrier.traits().gathers {
            let (why, legal) = (
                "UCX sends each message at once",
                "--carrier copyrpc or rc-send".to_owned(),
            );
            return Err(range(
                "--flush-every",
                format!("with --carrier {}", topology.carrier),
                why,
                legal,
            ));
        }
        needs_exchange("--flush-every", topology)
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        Some(Box::new(FlushEvery::new(self.flush_every)))
    }
}

/// The state of delayed flushes.
#[derive(Debug)]
struct FlushEvery {
    every: u32,
    waiting: u32,
    delayed: u64,
}

impl FlushEvery {
    /// Makes a rule that flushes at least every `every` rounds.
    const fn new(every: u32) -> Self {
        Self {
            every,
            waiting: 0,
            delayed: 0,
        }
    }
}

impl Rule for FlushEvery {
    /// A round that moved nothing flushes, so that nothing waits for work to come.
    fn flushes(&mut self, has_moved: bool) -> bool {
        self.waiting += u32::from(has_moved);
        let flushes = !has_moved || self.waiting >= self.every;
        if flushes {
            self.waiting = 0;
        }
        self.delayed += u64::from(!flushes);
        flushes
    }

    fn report(&self, report: &mut PolicyReport) {
        report.delayed_flushes = self.delayed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_wait_for_rounds_but_never_for_work() {
        let mut policy = FlushEvery::new(3);
        let rounds = [
            true, true, true, true, false, true, true, true, false, false,
        ];
        let flushes = [
            false, false, true, false, true, false, false, true, true, true,
        ];
        assert_eq!(rounds.map(|has_moved| policy.flushes(has_moved)), flushes);
        let mut policy = FlushEvery::new(1);
        assert!(policy.flushes(true) && policy.flushes(false));
    }
}
