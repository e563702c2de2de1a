//! Polls added to a round while they find nothing: a fixed number, or the number of the adaptive
//! [`budget`](super::budget).

use std::fmt;
use std::str::FromStr;

use clap::Args;
use harness::range::RangeError;
use serde::{Deserialize, Serialize};

use super::budget::{BudgetController, Observed};
use super::rule::{Asked, Found, RoundPlan, RoundState, Rule, needs_exchange};
use super::{PolicyReport, Sample};
use crate::topology::Topology;

/// Weight of the newest round trip.
const RTT_ALPHA: f64 = 0.02;
/// Maximum of the polls that can be asked for.
const MAX_FIXED_POLLS: u32 = 4096;

/// The flags of the poll budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct PollArgs {
    /// Extra polls per round while nothing arrives: 0 to 4096, or adaptive (at most 72). The
    /// controller measures the effect of a poll once, or with adaptive:ROUNDS again after so many
    /// rounds. Simulated: neither lifts the low state; 16 gain a tenth at most, the controller
    /// nothing.
    #[arg(
        long,
        hide_short_help = true,
        value_name = "N|adaptive[:ROUNDS]",
        default_value_t
    )]
    #[serde(with = "harness::as_text")]
    #[doc(alias = "adaptive_budget")]
    pub poll_budget: PollChoice,
}

/// The choices of `--poll-budget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollChoice {
    /// This number.
    Fixed(u32),
    /// The number of the controller, which identifies again each so many rounds, or once if that
    /// is 0.
    Adaptive(u32),
}

impl Default for PollChoice {
    fn default() -> Self {
        Self::Fixed(0)
    }
}

impl fmt::Display for PollChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(polls) => polls.fmt(f),
            Self::Adaptive(0) => f.write_str("adaptive"),
            Self::Adaptive(again) => write!(f, "adaptive:{again}"),
        }
    }
}

impl FromStr for PollChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = match text.strip_prefix("adaptive") {
            Some("") => Some(Self::Adaptive(0)),
            Some(again) => again
                .strip_prefix(':')
                .and_then(|rounds| rounds.parse().ok())
                .filter(|rounds| *rounds > 0)
                .map(Self::Adaptive),
            None => text
                .parse()
                .ok()
                .filter(|polls| *polls <= MAX_FIXED_POLLS)
                .map(Self::Fixed),
        };
        parsed.ok_or_else(|| "use a number of polls from 0 to 4096, adaptive, or adaptive:ROUNDS with 1 to 4294967295".to_owned())
    }
}

impl Asked for PollArgs {
    fn typed(&self) -> Option<String> {
        (self.poll_budget != PollChoice::default())
            .then(|| format!("poll-budget {}", self.poll_budget))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--poll-budget", topology)
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        let budget = match self.poll_budget {
            PollChoice::Adaptive(again) => Budget::Adaptive(BudgetController::new(again)),
            PollChoice::Fixed(polls) => Budget::Fixed(polls),
        };
        Some(Box::new(ExtraPolls {
            budget,
            last_ns: None,
            added: 0,
            peak: 0,
        }))
    }
}

/// The polls added to rounds.
#[derive(Debug)]
struct ExtraPolls {
    budget: Budget,
    /// Begin of the last round.
    last_ns: Option<u64>,
    added: u64,
    peak: u64,
}

#[derive(Debug)]
enum Budget {
    Fixed(u32),
    Adaptive(BudgetController),
}

impl ExtraPolls {
    const fn extra_polls(&self) -> u32 {
        match &self.budget {
            Budget::Fixed(polls) => *polls,
            Budget::Adaptive(controller) => controller.polls(),
        }
    }
}

impl Rule for ExtraPolls {
    fn rtt_weight(&self) -> Option<f64> {
        matches!(self.budget, Budget::Adaptive(_)).then_some(RTT_ALPHA)
    }

    fn begin(&mut self, _round: &RoundState, plan: &mut RoundPlan) {
        plan.extra_polls += self.extra_polls();
    }

    fn polled(&mut self, round: &RoundState, found: Found) -> bool {
        self.added += u64::from(found.polls.saturating_sub(1));
        let last_ns = self.last_ns.replace(round.now_ns);
        if let (Budget::Adaptive(controller), Some(last_ns)) =
            (&mut self.budget, last_ns.filter(|_| round.outstanding > 0))
        {
            let round_ns = round.now_ns.saturating_sub(last_ns);
            controller.note(Observed {
                cqes: found.cqes,
                round_ns,
                rtt_ns: round.rtt_ns,
            });
        }
        self.peak = self.peak.max(self.extra_polls().into());
        false
    }

    fn report(&self, report: &mut PolicyReport) {
        let poll_budget = self.extra_polls().into();
        *report = PolicyReport {
            extra_polls: self.added,
            poll_budget,
            poll_budget_peak: self.peak,
            ..*report
        };
    }

    fn gauge(&self, sample: &mut Sample) {
        sample.poll_budget = self.extra_polls().into();
    }
}
