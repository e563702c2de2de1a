//! Policies: what a daemon asks when it could do something now or later. Each rule is a value that knows no clock and no transport; times are
//! arguments, in ns of one clock.
//!
//! A policy is a file with its flags and its rule, and lines here: its module, its field of [`PolicyOptions`] and of the list below it, and its
//! counters in [`PolicyReport`].
//!
//! - `rule`: the traits of flags and rules.
//! - `hold`: answers released together. `polls`, [`budget`]: polls added to a round. `flush`, `coalesce`, `skip_idle`, `stagger`: when to flush, to
//!   take requests, to look at clients, to begin. `window`: that of the connections.
//! - [`rtt`], [`ewma`]: what they measure with.
//! - [`governor`]: all rules that a job asked for, as the one policy of a daemon.

pub mod budget;
mod coalesce;
pub mod ewma;
mod flush;
pub mod governor;
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
pub use flush::FlushArgs;
pub use governor::Governor;
pub use hold::{HoldArgs, HoldChoice};
pub use polls::{PollArgs, PollChoice};
pub use skip_idle::SkipIdleArgs;
pub use stagger::StaggerArgs;
pub use window::WindowArgs;

use crate::counters;
use crate::topology::Topology;
use crate::trace::Sample;
use rule::{Asked, Rule};

/// The policies that a job asks of its daemons, and of its connections; times in us.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
#[command(next_help_heading = "Policies")]
pub struct PolicyOptions {
    /// Answers released together.
    #[command(flatten)]
    #[serde(flatten)]
    pub hold: HoldArgs,
    /// When requests are taken.
    #[command(flatten)]
    #[serde(flatten)]
    pub coalesce: CoalesceArgs,
    /// Polls added to a round.
    #[command(flatten)]
    #[serde(flatten)]
    pub polls: PollArgs,
    /// When to flush.
    #[command(flatten)]
    #[serde(flatten)]
    pub flush: FlushArgs,
    /// When connections begin.
    #[command(flatten)]
    #[serde(flatten)]
    pub stagger: StaggerArgs,
    /// When to look at clients.
    #[command(flatten)]
    #[serde(flatten)]
    pub skip_idle: SkipIdleArgs,
    /// The window of the connections.
    #[command(flatten)]
    #[serde(flatten)]
    pub window: WindowArgs,
}

macro_rules! each {
    ($options:expr $(, $mut:tt)?) => {{
        let PolicyOptions { hold, coalesce, polls, flush, stagger, skip_idle, window } = $options;
        [hold as &$($mut)? dyn Asked, coalesce, polls, flush, stagger, skip_idle, window]
    }};
}

impl PolicyOptions {
    /// Returns the same with the flags of several meanings in the fields of one.
    #[must_use]
    pub fn resolved(mut self) -> Self {
        each!(&mut self, mut).into_iter().for_each(Asked::resolve);
        self
    }

    /// Checks that a job of this `topology` can do what is asked.
    ///
    /// # Errors
    /// The first flag that it cannot obey, and what is legal.
    pub fn check(&self, topology: &Topology) -> Result<(), RangeError> {
        each!(self).into_iter().try_for_each(Asked::check)?;
        self.given().try_for_each(|policy| policy.suits(topology))
    }

    /// Returns whether daemons have something to ask a policy for.
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
        each!(self).into_iter().filter(|policy| policy.typed().is_some())
    }

    fn rules(&self, ranks: usize) -> Vec<Box<dyn Rule>> {
        self.given().filter_map(|policy| policy.rule(ranks)).collect()
    }
}

/// The flags that differ from their defaults, as they are typed.
impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let typed: Vec<String> = each!(self).into_iter().filter_map(Asked::typed).collect();
        f.write_str(&typed.join(", "))
    }
}

counters! {
    /// The counters of a daemon's policies in the whole job. Those of several daemons are added, or the larger counts.
    pub struct PolicyReport {
        /// Answers held back.
        sum held,
        /// Releases because enough were held.
        sum full_releases,
        /// Releases because their time had come.
        sum late_releases,
        /// Maximum time for which answers are held at the end, in ns; 0: none is held.
        max hold_ns,
        /// Polls added to rounds.
        sum extra_polls,
        /// Maximum number of added polls, at the end.
        max poll_budget,
        /// The most that could be.
        max poll_budget_peak,
        /// Rounds that took nothing but answers.
        sum gathering_rounds,
        /// Rounds that left what they gathered for a later flush.
        sum delayed_flushes,
        /// Rounds that did not look at clients.
        sum skipped_looks,
        /// Rounds before all connections could send.
        sum staggered_rounds,
        /// From a flush to the next completion, smoothed; 0: not measured.
        max rtt_ns,
    }
}

/// The counters in words, without those of 0.
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
                format!("{} polls added, budget {} at the end, peak {}", self.extra_polls, self.poll_budget, self.poll_budget_peak),
            ),
            (self.gathering_rounds, format!("{} rounds for answers only", self.gathering_rounds)),
            (self.delayed_flushes, format!("{} flushes delayed", self.delayed_flushes)),
            (self.skipped_looks, format!("{} looks at clients left out", self.skipped_looks)),
            (self.staggered_rounds, format!("{} staggered rounds", self.staggered_rounds)),
            (self.rtt_ns, format!("round trip {} ns", self.rtt_ns)),
        ];
        let done: Vec<String> = parts.into_iter().filter_map(|(count, text)| (count > 0).then_some(text)).collect();
        f.write_str(if done.is_empty() { "nothing to do" } else { "" })?;
        f.write_str(&done.join(", "))
    }
}

/// The questions of a daemon in its rounds, in the order of these methods. A daemon may leave for later whatever it is told to leave: each answer
/// is bounded in time. Without a governor everything is done at once, and a question costs one branch that always goes the same way.
#[derive(Debug, Default)]
pub struct Policy {
    acting: Option<Box<Governor>>,
    resting: Option<Box<Governor>>,
}

impl Policy {
    /// That of a daemon in a job of `ranks`.
    #[must_use]
    pub fn new(options: &PolicyOptions, ranks: usize) -> Self {
        Self { acting: Governor::new(options, ranks), resting: None }
    }

    /// Lets the governor act, as it does at first, or rest. The daemon then passes on the answers that are held.
    pub fn act(&mut self, acts: bool) {
        if acts == self.resting.is_some() {
            std::mem::swap(&mut self.acting, &mut self.resting);
        }
    }

    /// A round begins, with so many requests `outstanding` at other ranks.
    #[inline]
    pub fn begin(&mut self, now_ns: impl FnOnce() -> u64, outstanding: usize) {
        if let Some(governor) = &mut self.acting {
            governor.begin(now_ns(), outstanding);
        }
    }

    /// Returns the number of connections that may send, of `links`, or `None` if it is as before. `has_work`: a request waits for one, or was sent.
    #[inline]
    pub fn open_links(&mut self, links: usize, has_work: bool) -> Option<usize> {
        self.acting.as_mut()?.open_links(links, has_work)
    }

    /// Returns the number of polls to add while they find nothing.
    #[inline]
    #[must_use]
    pub fn extra_polls(&self) -> u32 {
        self.acting.as_ref().map_or(0, |governor| governor.extra_polls())
    }

    /// Whether an answer that a poll brings is to be kept for [`releases`](Self::releases).
    #[inline]
    pub fn keeps_answer(&mut self) -> bool {
        self.acting.as_mut().is_some_and(|governor| governor.keeps_answer())
    }

    /// The polls of this round were `polls` and found so much; `passed` answers were not kept. Whether what is kept is to be passed on now.
    #[inline]
    pub fn releases(&mut self, polls: u32, cqes: usize, passed: usize) -> bool {
        self.acting.as_mut().is_some_and(|governor| {
            governor.polled(polls, cqes, passed);
            governor.releases()
        })
    }

    /// Returns whether this round takes requests.
    #[inline]
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.acting.as_ref().is_none_or(|governor| governor.takes_requests)
    }

    /// Whether this round looks at the clients that come through ipc.
    #[inline]
    pub fn looks_at_clients(&mut self) -> bool {
        self.acting.as_mut().is_none_or(|governor| governor.looks_at_clients())
    }

    /// Such a look found so many requests.
    #[inline]
    pub fn looked_at_clients(&mut self, found: usize) {
        if let Some(governor) = &mut self.acting {
            governor.looked_at_clients(found);
        }
    }

    /// Whether this round flushes, after it has moved something or not.
    #[inline]
    pub fn flushes(&mut self, has_moved: bool) -> bool {
        self.acting.as_mut().is_none_or(|governor| governor.flushes(has_moved))
    }

    /// A flush is done; `sent` requests were sent to other ranks since the start.
    #[inline]
    pub fn flushed(&mut self, sent: u64) {
        if let Some(governor) = &mut self.acting {
            governor.flushed(sent);
        }
    }

    /// How its controllers stand, for the series of the daemon.
    #[must_use]
    pub fn gauges(&self) -> Sample {
        self.acting.as_ref().map_or_else(Sample::default, |governor| governor.gauges())
    }

    /// Returns the counters so far, or `None` without policies.
    #[must_use]
    pub fn report(&self) -> Option<PolicyReport> {
        self.acting.as_ref().or(self.resting.as_ref()).map(|governor| governor.report())
    }
}
