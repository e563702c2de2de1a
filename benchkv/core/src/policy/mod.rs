//! Policies: rules by which a daemon delays work to make batches larger. A rule has no clock and no
//! transport; times are arguments, in ns of one clock.
//!
//! A policy is a file with its flags and its rule, and lines here: its module, its field of
//! [`PolicyOptions`] and of the list below it, and its counters in [`PolicyReport`].
//!
//! - `rule`: the traits of flags and rules. `daemon`: all rules of a daemon, as one [`Policy`].
//! - `hold`: delivers answers together. `polls`, [`budget`]: add polls to a round. `flush`,
//!   `coalesce`, `skip_idle`, `stagger`: decide when to flush, to take requests, to poll clients,
//!   to begin. `window`: the window of the connections, which is no rule of a daemon.
//! - [`rtt`], [`ewma`]: measure for the rules.

pub mod budget;
mod coalesce;
mod daemon;
pub mod ewma;
mod flush;
mod hold;
mod polls;
pub mod rtt;
mod rule;
mod skip_idle;
mod stagger;
mod window;

use std::fmt;
use std::time::Duration;

use clap::Args;
use harness::range::RangeError;
use serde::{Deserialize, Serialize};

pub use coalesce::CoalesceArgs;
pub use daemon::Policy;
pub use flush::FlushArgs;
pub use hold::{HoldArgs, HoldChoice};
pub use polls::{PollArgs, PollChoice};
pub use rule::{Found, RoundPlan, RoundState};
pub use skip_idle::SkipIdleArgs;
pub use stagger::StaggerArgs;
pub use window::WindowArgs;

use crate::counters;
use crate::topology::Topology;
use crate::trace::Sample;
use rule::{Asked, Rule};

/// The policies of a job's daemons and connections; times in us.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
#[command(next_help_heading = "Policy")]
pub struct PolicyOptions {
    /// Holding of answers.
    #[command(flatten)]
    #[serde(flatten)]
    pub hold: HoldArgs,
    /// Times without new requests.
    #[command(flatten)]
    #[serde(flatten)]
    pub coalesce: CoalesceArgs,
    /// Added polls.
    #[command(flatten)]
    #[serde(flatten)]
    pub polls: PollArgs,
    /// Intervals of flushes.
    #[command(flatten)]
    #[serde(flatten)]
    pub flush: FlushArgs,
    /// Start times of connections.
    #[command(flatten)]
    #[serde(flatten)]
    pub stagger: StaggerArgs,
    /// Intervals of polls of clients.
    #[command(flatten)]
    #[serde(flatten)]
    pub skip_idle: SkipIdleArgs,
    /// The window of the connections.
    #[command(flatten)]
    #[serde(flatten)]
    pub window: WindowArgs,
}

macro_rules! each {
    ($options:expr) => {{
        let PolicyOptions {
            hold,
            coalesce,
            polls,
            flush,
            stagger,
            skip_idle,
            window,
        } = $options;
        [
            hold as &dyn Asked,
            coalesce,
            polls,
            flush,
            stagger,
            skip_idle,
            window,
        ]
    }};
}

impl PolicyOptions {
    /// Checks whether a job of this `topology` can obey.
    ///
    /// # Errors
    /// The first flag that it cannot obey, and the legal values.
    pub fn check(&self, topology: &Topology) -> Result<(), RangeError> {
        self.given().try_for_each(|policy| policy.suits(topology))
    }

    /// Returns whether daemons have rules.
    #[must_use]
    pub fn govern(&self) -> bool {
        !self.rules(1).is_empty()
    }

    /// Returns the maximum time for which requests are held back in a job of `ranks`.
    #[must_use]
    pub fn longest_hold(&self, ranks: usize) -> Duration {
        self.given().map(|policy| policy.longest_hold(ranks)).sum()
    }

    fn given(&self) -> impl Iterator<Item = &dyn Asked> {
        each!(self)
            .into_iter()
            .filter(|policy| policy.typed().is_some())
    }

    fn rules(&self, ranks: usize) -> Vec<Box<dyn Rule>> {
        self.given()
            .filter_map(|policy| policy.rule(ranks))
            .collect()
    }
}

/// Formats the flags that differ from their defaults, as they are typed.
impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let typed: Vec<String> = each!(self).into_iter().filter_map(Asked::typed).collect();
        f.write_str(&typed.join(", "))
    }
}

counters! {
    /// The counters of a daemon's policies in the whole job. For several daemons they are added, or
    /// the larger one counts.
    pub struct PolicyReport {
        /// Answers of holds: that were held back, or made a hold full.
        sum held,
        /// Deliveries of held answers because there were enough.
        sum full_releases,
        /// Deliveries of held answers because their time was over.
        sum late_releases,
        /// Maximum time for which answers are held at the end, in ns; 0: none is held.
        max hold_ns,
        /// Polls added to rounds.
        sum extra_polls,
        /// Maximum number of added polls, at the end.
        max poll_budget,
        /// Peak of the number of added polls.
        max poll_budget_peak,
        /// Rounds that took only answers.
        sum gathering_rounds,
        /// Rounds that did not flush the messages they had collected.
        sum delayed_flushes,
        /// Rounds that did not poll clients.
        sum skipped_looks,
        /// Rounds before all connections could send.
        sum staggered_rounds,
        /// Time from a flush to the next completion, smoothed, in ns; 0: not measured.
        max rtt_ns,
    }
}

/// Formats the counters that are not 0.
impl fmt::Display for PolicyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holds = format!(
            "{} answers held, released {} times full and {} times late, hold {} ns at the end",
            self.held, self.full_releases, self.late_releases, self.hold_ns
        );
        let parts = [
            (self.held, holds),
            (
                self.extra_polls,
                format!(
                    "{} polls added, budget {} at the end, peak {}",
                    self.extra_polls, self.poll_budget, self.poll_budget_peak
                ),
            ),
            (
                self.gathering_rounds,
                format!("{} rounds for answers only", self.gathering_rounds),
            ),
            (
                self.delayed_flushes,
                format!("{} flushes delayed", self.delayed_flushes),
            ),
            (
                self.skipped_looks,
                format!("{} looks at clients left out", self.skipped_looks),
            ),
            (
                self.staggered_rounds,
                format!("{} staggered rounds", self.staggered_rounds),
            ),
            (self.rtt_ns, format!("round trip {} ns", self.rtt_ns)),
        ];
        let done: Vec<String> = parts
            .into_iter()
            .filter_map(|(count, text)| (count > 0).then_some(text))
            .collect();
        f.write_str(if done.is_empty() { "nothing to do" } else { "" })?;
        f.write_str(&done.join(", "))
    }
}
