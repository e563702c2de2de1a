//! The flags of the policies.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use harness::units;
use harness::window::WindowChoice;
use serde::{Deserialize, Serialize};

use super::budget::Tuning;
use super::hold::HOLD_NS;

/// How long an adaptive hold, or one of round trips, holds at first.
pub const DEFAULT_HOLD_US: f64 = 10.0;
/// What a job asks of its daemons, and of its connections, as it is given; times in us.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
#[command(next_help_heading = "Policies")]
pub struct PolicyOptions {
    /// Answers of other ranks are held back until there are as many as ranks, or for this long, 0.5us to 100us, and released together; off while batches are
    /// that large by themselves. adaptive or adaptive:TIME follows the rate at which answers come, and begins with TIME [default: 10us]; rtt:FACTOR is so many
    /// round trips, 0.1 to 100. Simulated (docs/study.md): 10us gains a third at 8 ranks, and a tenth beyond; adaptive as much, and costs a fifth where
    /// batches are large by themselves; rtt:2 gains a tenth at most.
    #[arg(long, hide_short_help = true, value_name = "off|TIME|adaptive[:TIME]|rtt:FACTOR", conflicts_with_all = ["batch_hold_us", "adaptive_hold", "hold_rtt_multiplier"])]
    #[serde(skip)]
    pub hold: Option<HoldChoice>,

    /// --hold TIME, as it once was, in us.
    #[arg(long, hide = true, value_name = "US")]
    pub batch_hold_us: Option<f64>,

    /// --hold adaptive, as it once was; it begins with --batch-hold-us.
    #[arg(long, hide = true)]
    pub adaptive_hold: bool,

    /// --hold rtt:FACTOR, as it once was.
    #[arg(long, hide = true, value_name = "FACTOR")]
    pub hold_rtt_multiplier: Option<f64>,

    /// After sending requests take nothing but answers for this many us, 0.1 to 1000000. Simulated: gains up to
    /// 40 % from 8 ranks on, and costs two thirds at 2 and 4.
    #[arg(long, hide_short_help = true, value_name = "US")]
    pub coalesce_rtt_us: Option<f64>,

    /// Polls added to a round while they find nothing, 0 to 4096; or adaptive: by a controller that learns what they bring, up to 64. Simulated: 16 gain a
    /// tenth at most, the controller nothing.
    #[arg(long = "poll-budget", hide_short_help = true, value_name = "N|adaptive", conflicts_with = "adaptive_budget")]
    #[serde(skip)]
    pub polls: Option<PollChoice>,

    /// Polls added to a round.
    #[arg(skip)]
    pub poll_budget: u32,

    /// --poll-budget adaptive, as it once was.
    #[arg(long, hide = true)]
    pub adaptive_budget: bool,

    /// What the controller of --poll-budget adaptive goes by, as KEY=VALUE,...: rho_low=0.8, rho_high=1.2 (length of a round over the round trip);
    /// empty_low=0.4, empty_high=0.75 (share of rounds that find nothing); low_need=64, high_need=128, hold_min=32 (rounds); probe=8 (polls);
    /// identify=128 (rounds of each step), again=0 (rounds from one identification to the next; 0: there is one).
    #[arg(long, hide_short_help = true, value_name = "KEY=VALUE,...", default_value_t = Tuning::default())]
    #[serde(default, skip_serializing_if = "Tuning::is_default")]
    pub budget_tuning: Tuning,

    /// Send after every N rounds that did something, 1 to 4096, and after one that did nothing. Simulated: repairs 8 ranks, and no
    /// other number.
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 1)]
    pub flush_every: u32,

    /// The connections of a daemon begin to send this many us after each other, 0.1 to 1000000. Simulated: changes nothing.
    #[arg(long, hide_short_help = true, value_name = "US")]
    pub initial_stagger_us: Option<f64>,

    /// After a look at local clients that found nothing, leave them out for N rounds, 0 to 4096. Was found useless: local requests starve.
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0)]
    pub ipc_skip_idle: u32,

    /// Small batches of each connection under way before the next ones gather, 1 to 256, and until when one is under way: until its WRITE
    /// completes, or until the peer has told that it was taken. Or off. Simulated: completion:1 repairs delegation from 8 ranks on, consumption:N
    /// harms it.
    #[arg(long, hide_short_help = true, value_name = "off|completion:N|consumption:N", default_value_t = WindowChoice::Off)]
    pub batch_window: WindowChoice,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self {
            hold: None,
            batch_hold_us: None,
            adaptive_hold: false,
            hold_rtt_multiplier: None,
            coalesce_rtt_us: None,
            polls: None,
            poll_budget: 0,
            adaptive_budget: false,
            budget_tuning: Tuning::default(),
            flush_every: 1,
            initial_stagger_us: None,
            ipc_skip_idle: 0,
            batch_window: WindowChoice::Off,
        }
    }
}

/// What `--hold` asks for; times in us.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HoldChoice {
    /// Nothing is held.
    Off,
    /// For so long.
    Fixed(f64),
    /// By the rate of answers; for so long at first.
    Adaptive(Option<f64>),
    /// So many round trips.
    Rtt(f64),
}

impl FromStr for HoldChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || "use off, a time from 0.5us to 100us, adaptive, adaptive:TIME, or rtt:FACTOR with 0.1 to 100".to_owned();
        let us = |time: &str| {
            // A number without a unit would be seconds, which nobody means.
            let us = units::seconds(time).ok().filter(|_| time.ends_with('s')).map(|seconds| seconds * 1e6);
            us.filter(|us| HOLD_NS.contains(&(us * 1000.0))).ok_or_else(known)
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "adaptive" => Ok(Self::Adaptive(None)),
            None => us(text).map(Self::Fixed),
            Some(("adaptive", time)) => us(time).map(|us| Self::Adaptive(Some(us))),
            Some(("rtt", factor)) => factor.parse().ok().filter(|factor| (0.1..=100.0).contains(factor)).map(Self::Rtt).ok_or_else(known),
            Some(_) => Err(known()),
        }
    }
}

/// What `--poll-budget` asks for.
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

/// A time in ns; it was checked.
pub(super) fn nanos(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}

impl PolicyOptions {
    /// The same with what the flags of several meanings say in the fields of one.
    #[must_use]
    pub fn resolved(mut self) -> Self {
        match self.hold.take() {
            Some(HoldChoice::Fixed(us)) => self.batch_hold_us = Some(us),
            Some(HoldChoice::Adaptive(us)) => (self.batch_hold_us, self.adaptive_hold) = (us, true),
            Some(HoldChoice::Rtt(factor)) => self.hold_rtt_multiplier = Some(factor),
            Some(HoldChoice::Off) | None => {}
        }
        match self.polls.take() {
            Some(PollChoice::Fixed(polls)) => self.poll_budget = polls,
            Some(PollChoice::Adaptive) => self.adaptive_budget = true,
            None => {}
        }
        self
    }

    /// Whether daemons have something to ask a policy for.
    #[must_use]
    pub fn govern(&self) -> bool {
        *self != Self { batch_window: self.batch_window, budget_tuning: self.budget_tuning, ..Self::default() }
    }
}

/// What differs from the defaults, as it is typed.
impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |flag: &str, given: Option<f64>| given.map(|given| format!("{flag} {given}"));
        let count = |flag: &str, given: u32, default: u32| (given != default).then(|| format!("{flag} {given}"));
        let hold = match (self.batch_hold_us, self.adaptive_hold, self.hold_rtt_multiplier) {
            (Some(us), true, _) => Some(format!("hold adaptive:{us}us")),
            (None, true, _) => Some("hold adaptive".to_owned()),
            (_, false, Some(factor)) => Some(format!("hold rtt:{factor}")),
            (us, false, None) => us.map(|us| format!("hold {us}us")),
        };
        let tuning = (self.adaptive_budget && !self.budget_tuning.is_default()).then(|| format!("budget-tuning {}", self.budget_tuning));
        let given = [
            hold,
            number("coalesce-rtt-us", self.coalesce_rtt_us),
            count("poll-budget", self.poll_budget, 0),
            self.adaptive_budget.then(|| "poll-budget adaptive".to_owned()),
            tuning,
            count("flush-every", self.flush_every, 1),
            number("initial-stagger-us", self.initial_stagger_us),
            count("ipc-skip-idle", self.ipc_skip_idle, 0),
            self.batch_window.batches().map(|_| format!("batch-window {}", self.batch_window)),
        ];
        f.write_str(&given.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_are_named_with_their_times() {
        for (text, choice) in [
            ("off", HoldChoice::Off),
            ("10us", HoldChoice::Fixed(10.0)),
            ("500ns", HoldChoice::Fixed(0.5)),
            ("adaptive", HoldChoice::Adaptive(None)),
            ("adaptive:5us", HoldChoice::Adaptive(Some(5.0))),
            ("rtt:2", HoldChoice::Rtt(2.0)),
        ] {
            match (text.parse().unwrap(), choice) {
                (HoldChoice::Fixed(found), HoldChoice::Fixed(us)) => assert!((found - us).abs() < 1e-9, "{text}"),
                (HoldChoice::Adaptive(Some(found)), HoldChoice::Adaptive(Some(us))) => assert!((found - us).abs() < 1e-9, "{text}"),
                (found, choice) => assert_eq!(found, choice, "{text}"),
            }
        }
        for text in ["", "10", "0.4us", "101us", "1s", "rtt", "rtt:0", "rtt:101", "rtt:NaN", "adaptive:", "adaptive:10", "never"] {
            assert!(text.parse::<HoldChoice>().unwrap_err().contains("0.5us to 100us"), "{text}");
        }
    }
}
