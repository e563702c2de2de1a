//! Policies: what a daemon asks when it could do something now or later. Each controller is a value that knows no clock and no transport; times
//! are arguments, in ns of one clock.
//!
//! - [`options`]: the flags.
//! - [`hold`]: answers released together. [`budget`]: polls added to a round. [`defer`]: when to flush, to take requests, to look at clients, to
//!   begin.
//! - [`rtt`], [`ewma`]: what they measure with.
//! - [`governor`]: all of those that a job asked for, as the one policy of a daemon.

pub mod budget;
pub mod defer;
pub mod ewma;
pub mod governor;
pub mod hold;
pub mod options;
pub mod rtt;

pub use governor::{Governor, PolicyReport};
pub use options::PolicyOptions;

use crate::trace::Sample;

/// What a daemon asks in its rounds, in the order of these methods. Whatever it is told to leave for later it may leave: each answer is bounded in
/// time. Without a governor everything is done at once, and a question costs one branch that always goes the same way.
#[derive(Debug, Default)]
pub struct Policy(Option<Box<Governor>>);

impl Policy {
    /// That of a daemon in a job of `ranks`.
    #[must_use]
    pub fn new(options: &PolicyOptions, ranks: usize) -> Self {
        Self(Governor::new(options, ranks))
    }

    /// A round begins, with so many requests `outstanding` at other ranks.
    #[inline]
    pub fn begin(&mut self, now_ns: impl FnOnce() -> u64, outstanding: usize) {
        if let Some(governor) = &mut self.0 {
            governor.begin(now_ns(), outstanding);
        }
    }

    /// How many connections may send, of `links`; `has_work`: a request waits for one, or was sent. `None`: as before.
    #[inline]
    pub fn open_links(&mut self, links: usize, has_work: bool) -> Option<usize> {
        self.0.as_mut()?.open_links(links, has_work)
    }

    /// How many polls to add while they find nothing.
    #[inline]
    #[must_use]
    pub fn extra_polls(&self) -> u32 {
        self.0.as_ref().map_or(0, |governor| governor.extra_polls())
    }

    /// Whether an answer that a poll brings is to be kept for [`releases`](Self::releases).
    #[inline]
    pub fn keeps_answer(&mut self) -> bool {
        self.0.as_mut().is_some_and(|governor| governor.keeps_answer())
    }

    /// The polls of this round were `polls` and found so much; `passed` answers were not kept. Whether what is kept is to be passed on now.
    #[inline]
    pub fn releases(&mut self, polls: u32, cqes: usize, passed: usize) -> bool {
        self.0.as_mut().is_some_and(|governor| {
            governor.polled(polls, cqes, passed);
            governor.releases()
        })
    }

    /// Whether this round takes requests, with so many `outstanding` at other ranks.
    #[inline]
    pub fn takes_requests(&mut self, outstanding: usize) -> bool {
        self.0.as_mut().is_none_or(|governor| governor.takes_requests(outstanding))
    }

    /// Whether this round looks at the clients that come through ipc.
    #[inline]
    pub fn looks_at_clients(&mut self) -> bool {
        self.0.as_mut().is_none_or(|governor| governor.looks_at_clients())
    }

    /// Such a look found so many requests.
    #[inline]
    pub fn looked_at_clients(&mut self, found: usize) {
        if let Some(governor) = &mut self.0 {
            governor.looked_at_clients(found);
        }
    }

    /// Whether this round flushes, after it has moved something or not.
    #[inline]
    pub fn flushes(&mut self, has_moved: bool) -> bool {
        self.0.as_mut().is_none_or(|governor| governor.flushes(has_moved))
    }

    /// A flush is done; `sent` requests were sent to other ranks since the start.
    #[inline]
    pub fn flushed(&mut self, sent: u64) {
        if let Some(governor) = &mut self.0 {
            governor.flushed(sent);
        }
    }

    /// How its controllers stand, for the series of the daemon.
    #[must_use]
    pub fn gauges(&self) -> Sample {
        self.0.as_ref().map_or_else(Sample::default, |governor| governor.gauges())
    }

    /// What was done so far; `None` without policies.
    #[must_use]
    pub fn report(&self) -> Option<PolicyReport> {
        self.0.as_ref().map(|governor| governor.report())
    }
}
