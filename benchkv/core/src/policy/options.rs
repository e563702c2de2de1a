//! The flags of the policies.

use std::fmt;

use clap::Args;
use harness::window::WindowChoice;
use serde::{Deserialize, Serialize};

/// How long an adaptive hold, or one of round trips, holds at first.
pub const DEFAULT_HOLD_US: f64 = 10.0;
/// What a job asks of its daemons, and of its connections, as it is given; times in us.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
#[command(next_help_heading = "Policies")]
pub struct PolicyOptions {
    /// Answers of other ranks are held back until there are as many as ranks, or for this many us, 0.5 to 100, and released together; off while
    /// batches are that large by themselves. Simulated (docs/study.md): gains a third at 8 ranks, and a tenth beyond.
    #[arg(long, hide_short_help = true, value_name = "US")]
    pub batch_hold_us: Option<f64>,

    /// The hold follows the rate at which answers come, from 0.5 to 100 us; it begins with --batch-hold-us [default: 10].
    /// Simulated: gains as much, and costs a fifth where batches are large by themselves.
    #[arg(long, hide_short_help = true)]
    pub adaptive_hold: bool,

    /// The hold is this many round trips, 0.1 to 100. Simulated: gains a tenth at most.
    #[arg(long, hide_short_help = true, value_name = "FACTOR")]
    pub hold_rtt_multiplier: Option<f64>,

    /// After sending requests take nothing but answers for this many us, 0.1 to 1000000. Simulated: gains up to
    /// 40 % from 8 ranks on, and costs two thirds at 2 and 4.
    #[arg(long, hide_short_help = true, value_name = "US")]
    pub coalesce_rtt_us: Option<f64>,

    /// Polls added to a round while they find nothing, 0 to 4096. Simulated: gains a tenth at most.
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0)]
    pub poll_budget: u32,

    /// Polls are added by a controller that learns what they bring, up to 64. Simulated: gains nothing.
    #[arg(long, hide_short_help = true)]
    pub adaptive_budget: bool,

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
            batch_hold_us: None,
            adaptive_hold: false,
            hold_rtt_multiplier: None,
            coalesce_rtt_us: None,
            poll_budget: 0,
            adaptive_budget: false,
            flush_every: 1,
            initial_stagger_us: None,
            ipc_skip_idle: 0,
            batch_window: WindowChoice::Off,
        }
    }
}

/// A time in ns; it was checked.
pub(super) fn nanos(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}

impl PolicyOptions {
    /// Whether daemons have something to ask a policy for.
    #[must_use]
    pub fn govern(&self) -> bool {
        *self != Self { batch_window: self.batch_window, ..Self::default() }
    }
}

/// What differs from the defaults, as it is typed.
impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |flag: &str, given: Option<f64>| given.map(|given| format!("{flag} {given}"));
        let count = |flag: &str, given: u32, default: u32| (given != default).then(|| format!("{flag} {given}"));
        let switch = |flag: &str, is_given: bool| is_given.then(|| flag.to_owned());
        let given = [
            number("batch-hold-us", self.batch_hold_us),
            switch("adaptive-hold", self.adaptive_hold),
            number("hold-rtt-multiplier", self.hold_rtt_multiplier),
            number("coalesce-rtt-us", self.coalesce_rtt_us),
            count("poll-budget", self.poll_budget, 0),
            switch("adaptive-budget", self.adaptive_budget),
            count("flush-every", self.flush_every, 1),
            number("initial-stagger-us", self.initial_stagger_us),
            count("ipc-skip-idle", self.ipc_skip_idle, 0),
            self.batch_window.batches().map(|_| format!("batch-window {}", self.batch_window)),
        ];
        f.write_str(&given.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}
