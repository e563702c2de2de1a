//! Polls added to a round while they find nothing: a number, or as many as the controller of [`budget`](super::budget) says.

use std::str::FromStr;

use clap::Args;
use harness::range::{RangeError, range, within};
use serde::{Deserialize, Serialize};

use super::budget::{BudgetController, Observed, Tuning};
use super::rule::{Asked, OUTSIDE, Polled, Round, Rule, needs_exchange};
use super::{PolicyReport, Sample};
use crate::topology::Topology;

/// Weight of the newest round trip.
const RTT_ALPHA: f64 = 0.02;
/// Maximum of the polls that can be asked for.
const MAX_FIXED_POLLS: u32 = 4096;

/// The flags of the poll budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct PollArgs {
    /// Polls added to a round while they find nothing, 0 to 4096; or adaptive: by a controller that learns what they bring, up to 64. Simulated: neither
    /// lifts the low state; 16 gain a tenth at most, the controller nothing.
    #[arg(long = "poll-budget", hide_short_help = true, value_name = "N|adaptive", conflicts_with = "adaptive_budget")]
    #[serde(skip)]
    pub polls: Option<PollChoice>,

    /// Polls added to a round.
    #[arg(skip)]
    pub poll_budget: u32,

    /// --poll-budget adaptive, as it once was.
    #[arg(long, hide = true)]
    pub adaptive_budget: bool,

    /// Thresholds of the controller of --poll-budget adaptive, as KEY=VALUE,...: rho_low=0.8, rho_high=1.2 (length of a round over the round trip);
    /// empty_low=0.4, empty_high=0.75 (share of rounds that find nothing); low_need=64, high_need=128, hold_min=32 (rounds); probe=8 (polls);
    /// identify=128 (rounds of each step), again=0 (rounds from one identification to the next; 0: there is one).
    #[arg(long, hide_short_help = true, value_name = "KEY=VALUE,...", default_value_t = Tuning::default(), hide_default_value = true)]
    #[serde(default, skip_serializing_if = "Tuning::is_default")]
    pub budget_tuning: Tuning,
}

/// The choices of `--poll-budget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollChoice {
    /// So many.
    Fixed(u32),
    /// As many as the controller says.
    Adaptive,
}

impl FromStr for PollChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "adaptive" => Ok(Self::Adaptive),
            count => count.parse().map(Self::Fixed).map_err(|_| "use a number of polls from 0 to 4096, or adaptive".to_owned()),
        }
    }
}

impl Asked for PollArgs {
    fn resolve(&mut self) {
        match self.polls.take() {
            Some(PollChoice::Fixed(polls)) => self.poll_budget = polls,
            Some(PollChoice::Adaptive) => self.adaptive_budget = true,
            None => {}
        }
    }

    fn typed(&self) -> Option<String> {
        match (self.adaptive_budget, self.poll_budget) {
            (true, _) if self.budget_tuning.is_default() => Some("poll-budget adaptive".to_owned()),
            (true, _) => Some(format!("poll-budget adaptive, budget-tuning {}", self.budget_tuning)),
            (false, 0) => None,
            (false, polls) => Some(format!("poll-budget {polls}")),
        }
    }

    fn check(&self) -> Result<(), RangeError> {
        within("--poll-budget", self.poll_budget, 0..=MAX_FIXED_POLLS, OUTSIDE, "")?;
        if !self.budget_tuning.is_default() && !self.adaptive_budget {
            let why = "no controller uses it";
            return Err(range("--budget-tuning", self.budget_tuning, why, "with --poll-budget adaptive".to_owned()));
        }
        Ok(())
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--poll-budget", topology)
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        let budget = match (self.adaptive_budget, self.poll_budget) {
            (true, _) => Budget::Adaptive(BudgetController::new(self.budget_tuning)),
            (false, 0) => return None,
            (false, polls) => Budget::Fixed(polls),
        };
        Some(Box::new(ExtraPolls { budget, last_ns: None, added: 0, peak: 0 }))
    }
}

/// The polls added to rounds.
#[derive(Debug)]
struct ExtraPolls {
    budget: Budget,
    /// When the last round began.
    last_ns: Option<u64>,
    added: u64,
    peak: u64,
}

#[derive(Debug)]
enum Budget {
    Fixed(u32),
    Adaptive(BudgetController),
}

impl Rule for ExtraPolls {
    fn rtt_weight(&self) -> Option<f64> {
        matches!(self.budget, Budget::Adaptive(_)).then_some(RTT_ALPHA)
    }

    fn extra_polls(&self) -> u32 {
        match &self.budget {
            Budget::Fixed(polls) => *polls,
            Budget::Adaptive(controller) => controller.polls(),
        }
    }

    fn polled(&mut self, round: &Round, found: Polled) {
        self.added += u64::from(found.polls.saturating_sub(1));
        let last_ns = self.last_ns.replace(round.now_ns);
        if let (Budget::Adaptive(controller), Some(last_ns)) = (&mut self.budget, last_ns.filter(|_| round.outstanding > 0)) {
            let round_ns = round.now_ns.saturating_sub(last_ns);
            controller.note(Observed { cqes: found.cqes, round_ns, rtt_ns: round.rtt_ns });
        }
        self.peak = self.peak.max(self.extra_polls().into());
    }

    fn report(&self, report: &mut PolicyReport) {
        let poll_budget = self.extra_polls().into();
        *report = PolicyReport { extra_polls: self.added, poll_budget, poll_budget_peak: self.peak, ..*report };
    }

    fn gauge(&self, sample: &mut Sample) {
        sample.poll_budget = self.extra_polls().into();
    }
}
