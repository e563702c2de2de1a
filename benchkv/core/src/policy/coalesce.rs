//! Receive coalescing: for some time after it sent requests, a daemon takes only answers.

use clap::Args;
use harness::range::{RangeError, decimal};
use serde::{Deserialize, Serialize};

use super::PolicyReport;
use super::rule::{Asked, RoundPlan, RoundState, Rule, TIMES_US, nanos, needs_exchange};
use crate::topology::Topology;

/// The flag of coalescing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct CoalesceArgs {
    /// After sending requests, take only answers for this number of us, 0.1 to 1000000. Simulated:
    /// 6 lift 8 ranks out of the low state at depth 8, gain up to 40 % at depth 1, and cost two
    /// thirds there at 2 and 4 ranks.
    #[arg(long, hide_short_help = true, value_name = "US", value_parser = decimal(TIMES_US))]
    pub coalesce_rtt_us: Option<f64>,
}

impl Asked for CoalesceArgs {
    fn typed(&self) -> Option<String> {
        self.coalesce_rtt_us
            .map(|us| format!("coalesce-rtt-us {us}"))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--coalesce-rtt-us", topology)
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        self.coalesce_rtt_us
            .map(|us| Box::new(Coalesce::new(nanos(us))) as Box<dyn Rule>)
    }
}

/// The state of coalescing.
#[derive(Debug)]
struct Coalesce {
    wait_ns: u64,
    sent_ns: Option<u64>,
    rounds: u64,
}

impl Coalesce {
    const fn new(wait_ns: u64) -> Self {
        Self {
            wait_ns,
            sent_ns: None,
            rounds: 0,
        }
    }

    /// Returns whether this round takes answers only; never without requests in flight.
    fn gathers(&mut self, now_ns: u64, outstanding: usize) -> bool {
        let gathers = outstanding > 0
            && self
                .sent_ns
                .is_some_and(|sent_ns| now_ns.saturating_sub(sent_ns) < self.wait_ns);
        if !gathers {
            self.sent_ns = None;
        }
        self.rounds += u64::from(gathers);
        gathers
    }
}

impl Rule for Coalesce {
    fn begin(&mut self, round: &RoundState, plan: &mut RoundPlan) {
        plan.takes_requests = !self.gathers(round.now_ns, round.outstanding);
    }

    fn sent(&mut self, now_ns: u64) {
        self.sent_ns = Some(now_ns);
    }

    fn report(&self, report: &mut PolicyReport) {
        report.gathering_rounds = self.rounds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathering_ends_with_its_time_or_when_nothing_can_come() {
        let mut policy = Coalesce::new(1_000);
        assert!(!policy.gathers(0, 5), "nothing was sent yet");
        policy.sent(100);
        assert!(policy.gathers(100, 5) && policy.gathers(1_099, 1));
        assert!(!policy.gathers(1_100, 5));
        policy.sent(2_000);
        assert!(!policy.gathers(2_001, 0), "no request is in flight");
        assert!(
            !policy.gathers(2_002, 1),
            "a wait that has ended does not begin again"
        );
        policy.sent(5_000);
        assert!(policy.gathers(4_000, 1), "time went back");
        assert!(!policy.gathers(6_000, 1));
    }
}
