//! The interfaces of a policy: its flags ([`Asked`]) and its controller ([`Rule`]).

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use harness::range::{RangeError, range};

use super::{PolicyReport, Sample};
use crate::topology::{Backend, Topology};

/// Legal times, in us.
pub(super) const TIMES_US: RangeInclusive<f64> = 0.1..=1_000_000.0;
/// Maximum number of rounds between two flushes, or between two polls of the clients.
pub(super) const MAX_ROUNDS: u32 = 4096;

/// The flags of a policy, as a job gives them.
pub(super) trait Asked {
    /// Returns the flags that differ from their defaults, as they are typed without dashes.
    fn typed(&self) -> Option<String>;

    /// Checks whether a job of this topology can obey. Called only if a flag is given.
    ///
    /// # Errors
    /// The flag, and the legal values.
    fn suits(&self, topology: &Topology) -> Result<(), RangeError>;

    /// Returns the maximum time for which requests are held back.
    fn longest_hold(&self, _ranks: usize) -> Duration {
        Duration::ZERO
    }

    /// Returns the controller of one daemon in a job of `ranks`; `None` if daemons do not need one.
    /// Called only if a flag is given.
    fn rule(&self, ranks: usize) -> Option<Box<dyn Rule>>;
}

/// The state of a daemon at the beginning of a round.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundState {
    /// The time, in ns.
    pub now_ns: u64,
    /// Requests in flight.
    pub outstanding: usize,
    /// Connections to other ranks.
    pub links: usize,
    /// A request for them waits, or was sent.
    pub has_work: bool,
    /// Smoothed round trip, in ns, if a rule has it measured and it is known.
    pub rtt_ns: Option<f64>,
}

/// The permissions of a round: all of them, unless a rule takes one away.
#[derive(Debug, Clone, Copy)]
pub struct RoundPlan {
    /// Number of the connections that may send: the first ones.
    pub open_links: usize,
    /// Number of polls to add while they find nothing.
    pub extra_polls: u32,
    /// Maximum number of answers that the daemon holds until
    /// [`Policy::releases`](super::Policy::releases). It delivers further ones at once.
    pub most_held: usize,
    /// The round takes requests.
    pub takes_requests: bool,
    /// The round polls the clients that call through ipc.
    pub polls_clients: bool,
}

impl Default for RoundPlan {
    fn default() -> Self {
        Self {
            open_links: usize::MAX,
            extra_polls: 0,
            most_held: 0,
            takes_requests: true,
            polls_clients: true,
        }
    }
}

/// The result of a round's polls.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    /// Number of polls.
    pub polls: u32,
    /// Completions.
    pub cqes: usize,
    /// Answers that were delivered at once.
    pub passed: usize,
    /// Answers that are held, those of earlier rounds included.
    pub held: usize,
}

/// A controller of one daemon. It has no clock and no transport. The default methods restrict
/// nothing.
pub(super) trait Rule: fmt::Debug + Send {
    /// Returns the weight of the newest sample in [`RoundState::rtt_ns`], if the rule needs the
    /// round trip. The smallest weight counts.
    fn rtt_weight(&self) -> Option<f64> {
        None
    }

    /// Restricts the plan of a round that begins; other rules may have done so before.
    fn begin(&mut self, _round: &RoundState, _plan: &mut RoundPlan) {}

    /// Notes the result of the round's polls. Returns whether to deliver the held answers now.
    fn polled(&mut self, _round: &RoundState, _found: Found) -> bool {
        false
    }

    /// Notes the number of requests that a poll of the clients found.
    fn polled_clients(&mut self, _found: usize) {}

    /// Returns whether this round flushes. `has_moved`: it moved a message.
    fn flushes(&mut self, _has_moved: bool) -> bool {
        true
    }

    /// Notes that a flush sent requests to other ranks.
    fn sent(&mut self, _now_ns: u64) {}

    /// Adds the rule's counters to a report.
    fn report(&self, report: &mut PolicyReport);

    /// Writes the rule's state into a sample of the daemon's time series.
    fn gauge(&self, _sample: &mut Sample) {}
}

/// Refuses a flag that concerns other ranks in a job of one rank.
pub(super) fn needs_others(flag: &'static str, topology: &Topology) -> Result<(), RangeError> {
    if topology.ranks == 1 {
        return Err(range(
            flag,
            "with 1 rank",
            "it has no other to exchange anything with",
            "--ranks of 2 and more".to_owned(),
        ));
    }
    Ok(())
}

/// Refuses a flag that concerns messages of daemons to other ranks in a job whose daemons send
/// none.
pub(super) fn needs_exchange(flag: &'static str, topology: &Topology) -> Result<(), RangeError> {
    needs_others(flag, topology)?;
    if topology.backend == Backend::Direct {
        let why = "its clients have connections of their own, and no daemon sends for them";
        return Err(range(
            flag,
            "with --backend direct",
            why,
            "another --backend".to_owned(),
        ));
    }
    Ok(())
}

/// Converts a time to ns.
pub(super) fn nanos(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}
