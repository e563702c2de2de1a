//! Policies: rules by which a daemon delays work to make batches larger. A rule has no clock and no
//! transport; times are arguments, in ns of one clock.
//!
//! [`PolicyOptions`] are the flags. [`Policy`] has the rules of one daemon: `hold` delivers answers
//! together, and `daemon` has the other rules. The window and the batches in flight are options of
//! the connections, which apply them themselves.

mod daemon;
mod hold;

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use benchkv_harness::range::{RangeError, decimal, range, whole};
use benchkv_harness::window::WindowChoice;
use clap::Args;
use serde::{Deserialize, Serialize};

pub use daemon::{Found, Policy, RoundPlan};
pub use hold::HoldChoice;

use crate::counters;
use crate::topology::{Backend, Topology};

/// Legal times for which a daemon takes no new requests, in us.
const TIMES_US: RangeInclusive<f64> = 0.1..=1_000_000.0;
/// Legal numbers of polls added to a round.
const POLLS: RangeInclusive<u32> = 0..=4096;
/// Legal numbers of completions until which polls are added.
const CQES: RangeInclusive<usize> = 1..=65_536;
/// Legal numbers of rounds from one flush to the next.
const ROUNDS: RangeInclusive<u32> = 1..=4096;
/// Legal numbers of batches in flight.
const BATCHES: RangeInclusive<u32> = 1..=1024;

/// The policies of a job's daemons and connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
#[command(next_help_heading = "Policy")]
pub struct PolicyOptions {
    /// Collect answers from other ranks and deliver them together: when one per rank has arrived,
    /// or after TIME, 0.5us to 100us. Pauses while batches are full anyway. adaptive, or
    /// adaptive:TIME, follows the rate of answers and begins with TIME (10us). Simulated
    /// (docs/study.md, where a job is in a low or a high state of throughput): no hold ends the low
    /// state; at depth 1, 10us raises the throughput by a third with 8 ranks, by 9 % with 16 and by
    /// 4 % with 32; adaptive raises it as much, but costs a fifth in the high state.
    #[arg(long, hide_short_help = true, value_name = "off|TIME|adaptive[:TIME]", default_value_t = HoldChoice::Off)]
    #[serde(with = "benchkv_harness::as_text")]
    #[doc(alias = "batch_hold_us")]
    #[doc(alias = "adaptive_hold")]
    pub hold: HoldChoice,

    /// After sending requests, take only answers for this number of us, 0.1 to 1000000. Simulated:
    /// 6 get 8 ranks out of the low state of throughput at depth 8 and raise the throughput by up
    /// to 40 % at depth 1, but cost two thirds at depth 1 with 2 and 4 ranks.
    #[arg(long, hide_short_help = true, value_name = "US", value_parser = decimal(TIMES_US))]
    pub coalesce_rtt_us: Option<f64>,

    /// Extra polls per round while nothing arrives, 0 to 4096; with :CQES, until the round has found
    /// this number of completions, 1 to 65536. Simulated: with the first completion as the limit,
    /// polls do not end the low state of throughput, and 16 raise the throughput by a tenth at
    /// most; 16:37 end the low state of 8 ranks if a poll takes 1 us, and not if it takes 25 ns.
    #[arg(long, hide_short_help = true, value_name = "N[:CQES]", default_value_t = PollBudget::NONE)]
    #[serde(with = "benchkv_harness::as_text")]
    pub poll_budget: PollBudget,

    /// Flush after every N rounds that did something, 1 to 4096, and after a round that did
    /// nothing. Simulated: 8 gets 8 ranks out of the low state of throughput at depth 8, and not at
    /// depth 32 with 512 batches in flight.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(ROUNDS), default_value_t = 1)]
    pub flush_every: u32,

    /// Limit the small batches in flight per connection; later messages are collected. completion:N
    /// counts a batch until its WRITE completes, consumption:N until the peer has read it (N: 1 to
    /// 256). Simulated: both end the low state of throughput; completion:1 costs up to 3 % in the
    /// high state, and 12 % at depth 1 if NICs do not limit the rate of receives, as most do not;
    /// consumption:N lowers the throughput at depth 1.
    #[arg(long, hide_short_help = true, value_name = "off|completion:N|consumption:N", default_value_t = WindowChoice::Off)]
    pub batch_window: WindowChoice,

    /// Limit all batches per connection that the peer has not read, 1 to 1024 [default: 32]: a
    /// limit of copyrpc's protocol. Simulated: the more batches, the lower the throughput of the
    /// low state.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(BATCHES))]
    pub batches_in_flight: Option<u32>,
}

/// The value of `--poll-budget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollBudget {
    /// Number of polls to add to a round.
    pub polls: u32,
    /// Number of completions of the round's polls from which on no poll is added.
    pub cqes: usize,
}

impl PollBudget {
    /// No polls are added.
    pub const NONE: Self = Self { polls: 0, cqes: 1 };
}

impl FromStr for PollBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (polls, cqes) = text.split_once(':').unwrap_or((text, "1"));
        Ok(Self {
            polls: whole(POLLS)(polls)?,
            cqes: whole(CQES)(cqes)?,
        })
    }
}

impl fmt::Display for PollBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.polls)?;
        if self.cqes > 1 {
            write!(f, ":{}", self.cqes)?;
        }
        Ok(())
    }
}

impl Default for PolicyOptions {
    fn default() -> Self {
        Self {
            hold: HoldChoice::Off,
            coalesce_rtt_us: None,
            poll_budget: PollBudget::NONE,
            flush_every: 1,
            batch_window: WindowChoice::Off,
            batches_in_flight: None,
        }
    }
}

impl PolicyOptions {
    /// Checks whether a job of this `topology` can apply the given policies.
    ///
    /// # Errors
    /// The first flag of a policy that the topology cannot apply, and the legal values.
    pub fn check(&self, topology: &Topology) -> Result<(), RangeError> {
        self.given().try_for_each(|(flag, _)| {
            let (with, why, legal) = match flag {
                "--flush-every" if !topology.carrier.traits().gathers => (
                    format!("with --carrier {}", topology.carrier),
                    "UCX sends each message at once",
                    "--carrier copyrpc or rc-send",
                ),
                _ if topology.ranks == 1 => (
                    "with 1 rank".to_owned(),
                    "it has no other to exchange anything with",
                    "--ranks of 2 and more",
                ),
                "--batch-window" | "--batches-in-flight" if topology.is_by_message() => (
                    format!("with --carrier {}", topology.carrier),
                    "the window is one of copyrpc's batches",
                    "--carrier copyrpc",
                ),
                "--batch-window" | "--batches-in-flight" => return Ok(()),
                _ if topology.backend == Backend::Direct => (
                    "with --backend direct".to_owned(),
                    "its clients have connections of their own, and no daemon sends for them",
                    "another --backend",
                ),
                _ => return Ok(()),
            };
            Err(range(flag, with, why, legal.to_owned()))
        })
    }

    /// Returns whether daemons have rules: policies other than the options of connections.
    pub fn govern(&self) -> bool {
        self.given().any(|(flag, _)| !flag.starts_with("--batch"))
    }

    /// Returns the flags that differ from their defaults, and their values.
    fn given(&self) -> impl Iterator<Item = (&'static str, String)> {
        let coalesce = self.coalesce_rtt_us.map(|us| us.to_string());
        let batches = self.batches_in_flight.map(|batches| batches.to_string());
        [
            (
                "--hold",
                (self.hold != HoldChoice::Off).then(|| self.hold.to_string()),
            ),
            ("--coalesce-rtt-us", coalesce),
            (
                "--poll-budget",
                (self.poll_budget.polls > 0).then(|| self.poll_budget.to_string()),
            ),
            (
                "--flush-every",
                (self.flush_every != 1).then(|| self.flush_every.to_string()),
            ),
            (
                "--batch-window",
                (self.batch_window != WindowChoice::Off).then(|| self.batch_window.to_string()),
            ),
            ("--batches-in-flight", batches),
        ]
        .into_iter()
        .filter_map(|(flag, value)| Some((flag, value?)))
    }
}

/// Formats the flags that differ from their defaults, without dashes.
impl fmt::Display for PolicyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let typed =
            |(flag, value): (&str, String)| format!("{} {value}", flag.trim_start_matches('-'));
        f.write_str(&self.given().map(typed).collect::<Vec<_>>().join(", "))
    }
}

counters! {
    /// The counters of a daemon's policies in the whole job. The counters of several daemons are
    /// added, or the maximum is taken.
    pub struct PolicyReport {
        /// Answers that a hold held back, or that made a hold full.
        sum held,
        /// Deliveries of held answers because the hold was full.
        sum full_releases,
        /// Deliveries of held answers because the maximum time was over.
        sum late_releases,
        /// Maximum time for which answers are held at the end of the job, in ns; 0: answers are not
        /// held.
        max hold_ns,
        /// Polls added to rounds.
        sum extra_polls,
        /// Rounds that took only answers.
        sum gathering_rounds,
        /// Rounds that collected messages and did not flush them.
        sum delayed_flushes,
    }
}

/// Formats the counters that are not 0.
impl fmt::Display for PolicyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            held,
            full_releases,
            late_releases,
            hold_ns,
            extra_polls,
            gathering_rounds,
            delayed_flushes,
        } = *self;
        let parts = [
            (
                held,
                format!(
                    "{held} answers held, released {full_releases} times full and {late_releases} times late, hold {hold_ns} ns at the end"
                ),
            ),
            (extra_polls, format!("{extra_polls} polls added")),
            (
                gathering_rounds,
                format!("{gathering_rounds} rounds for answers only"),
            ),
            (
                delayed_flushes,
                format!("{delayed_flushes} flushes delayed"),
            ),
        ];
        let done = parts.into_iter().filter(|(count, _)| *count > 0);
        let done: Vec<String> = done.map(|(_, text)| text).collect();
        f.write_str(if done.is_empty() { "nothing to do" } else { "" })?;
        f.write_str(&done.join(", "))
    }
}
