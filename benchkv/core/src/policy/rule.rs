//! A policy: its flags ([`Asked`]) and its controller ([`Rule`]).

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use harness::range::{RangeError, range};

use super::{PolicyReport, Sample};
use crate::topology::{Routing, Topology};

/// Times that can be asked for, in us.
pub(super) const TIMES_US: RangeInclusive<f64> = 0.1..=1_000_000.0;
/// Maximum of the rounds between flushes, or between looks at clients.
pub(super) const MAX_ROUNDS: u32 = 4096;
/// The reason for refusing a number.
pub(super) const OUTSIDE: &str = "outside the supported range";

/// The flags of a policy, as a job gives them.
pub(super) trait Asked {
    /// Moves the flags of several meanings to the fields of one.
    fn resolve(&mut self) {}

    /// Returns the flags that differ from their defaults, as they are typed without dashes.
    fn typed(&self) -> Option<String>;

    /// Checks the ranges.
    ///
    /// # Errors
    /// The first flag outside its range, with the range.
    fn check(&self) -> Result<(), RangeError>;

    /// Checks that a job of this topology can obey. It is asked only if a flag is given.
    ///
    /// # Errors
    /// The flag, and what is legal.
    fn suits(&self, _topology: &Topology) -> Result<(), RangeError> {
        Ok(())
    }

    /// Returns the maximum time for which requests are held back.
    fn longest_hold(&self, _ranks: usize) -> Duration {
        Duration::ZERO
    }

    /// Returns the controller of one daemon in a job of `ranks`, or `None` if daemons have nothing to ask it. It is asked only if a flag is given.
    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        None
    }
}

/// The round, as far as a rule may know it.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// When it began, in ns.
    pub now_ns: u64,
    /// The requests under way at its begin.
    pub outstanding: usize,
    /// The smoothed round trip, in ns, if a rule has it measured and it is known.
    pub rtt_ns: Option<f64>,
}

/// The findings of a round's polls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Polled {
    /// The number of polls.
    pub polls: u32,
    /// The completions.
    pub cqes: usize,
    /// The answers that were passed on at once.
    pub passed: usize,
}

/// A controller. It knows no clock and no transport. Each method is a question of [`Policy`](super::Policy), and restricts nothing by default.
pub(super) trait Rule: fmt::Debug + Send {
    /// Returns the weight of the newest round trip in [`Round::rtt_ns`], if the rule needs that. Of several rules the smallest weight counts.
    fn rtt_weight(&self) -> Option<f64> {
        None
    }

    /// See [`Policy::open_links`](super::Policy::open_links).
    fn open_links(&mut self, _round: &Round, _links: usize, _has_work: bool) -> Option<usize> {
        None
    }

    /// Returns the polls to add to a round while they find nothing.
    fn extra_polls(&self) -> u32 {
        0
    }

    /// Returns whether an answer is to be kept until [`releases`](Self::releases).
    fn keeps_answer(&mut self, _round: &Round) -> bool {
        false
    }

    /// Takes in the outcome of the round's polls.
    fn polled(&mut self, _round: &Round, _found: Polled) {}

    /// Returns whether the kept answers are to be passed on now.
    fn releases(&mut self, _round: &Round) -> bool {
        false
    }

    /// Returns whether this round takes requests. Asked at its begin.
    fn takes_requests(&mut self, _round: &Round) -> bool {
        true
    }

    /// Returns whether this round looks at the clients that come through ipc.
    fn looks_at_clients(&mut self) -> bool {
        true
    }

    /// Takes in the number of requests that such a look found.
    fn looked_at_clients(&mut self, _found: usize) {}

    /// Returns whether this round flushes, after it has moved something or not.
    fn flushes(&mut self, _has_moved: bool) -> bool {
        true
    }

    /// Takes in that a flush sent requests to other ranks.
    fn sent(&mut self, _now_ns: u64) {}

    /// Writes the rule's counters.
    fn report(&self, report: &mut PolicyReport);

    /// Writes the rule's state into a sample of the daemon's series.
    fn gauge(&self, _sample: &mut Sample) {}
}

/// Refuses a flag that is about other ranks where there is none.
pub(super) fn needs_others(flag: &'static str, topology: &Topology) -> Result<(), RangeError> {
    if topology.ranks == 1 {
        return Err(range(flag, "with 1 rank", "it has no other to exchange anything with", "--ranks of 2 and more".to_owned()));
    }
    Ok(())
}

/// Refuses a flag that is about what daemons exchange with other ranks where they exchange nothing.
pub(super) fn needs_exchange(flag: &'static str, topology: &Topology) -> Result<(), RangeError> {
    needs_others(flag, topology)?;
    if topology.routing == Routing::Direct {
        let why = "its clients have connections of their own, and no daemon sends for them";
        return Err(range(flag, "with --backend direct", why, "another --backend".to_owned()));
    }
    Ok(())
}

/// Converts a checked time to ns.
pub(super) fn nanos(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}
