//! Policies: what a daemon asks when it could do something now or later. Each controller is a value that knows no clock and no transport; times
//! are arguments, in ns of one clock.
//!
//! - [`options`]: the flags.
//! - [`hold`]: answers released together. [`budget`]: polls added to a round. [`pace`]: when to flush, to take requests, to look at clients, to
//!   begin.
//! - [`rtt`], [`ewma`]: what they measure with.
//! - [`governor`]: all of those that a job asked for, as the one policy of a daemon.

pub mod budget;
pub mod ewma;
pub mod governor;
pub mod hold;
pub mod options;
pub mod pace;
pub mod rtt;

pub use governor::{Governor, PolicyReport};
pub use options::PolicyOptions;

/// What a round of a daemon asks, in this order. Whatever it is told to leave for later it may leave: each answer is bounded in time.
pub trait Policy {
    /// How many connections may send, of `links`; `has_work`: a request waits for one, or was sent. `None`: all, as before.
    fn open_links(&mut self, links: usize, has_work: bool) -> Option<usize>;

    /// How many polls to add while they find nothing.
    fn extra_polls(&self) -> u32;

    /// Whether an answer that a poll brings is to be kept for [`releases`](Self::releases).
    fn keeps_answer(&mut self) -> bool;

    /// The polls of this round were `polls` and found so much; `passed` answers were not kept.
    fn polled(&mut self, polls: u32, cqes: usize, passed: usize);

    /// Whether what is kept is to be passed on now.
    fn releases(&mut self) -> bool;

    /// Whether this round takes requests, with so many `outstanding` at other ranks.
    fn takes_requests(&mut self, outstanding: usize) -> bool;

    /// Whether this round looks at the clients that come through ipc.
    fn looks_at_clients(&mut self) -> bool;

    /// Such a look found so many requests.
    fn looked_at_clients(&mut self, found: usize);

    /// Whether this round flushes, after it has moved something or not.
    fn flushes(&mut self, has_moved: bool) -> bool;

    /// A flush is done; `sent` requests were sent to other ranks since the start.
    fn flushed(&mut self, sent: u64);
}

/// The policy of a daemon without any: everything at once. The compiler leaves nothing of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unrestricted;

impl Policy for Unrestricted {
    #[inline(always)]
    fn open_links(&mut self, _: usize, _: bool) -> Option<usize> {
        None
    }

    #[inline(always)]
    fn extra_polls(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn keeps_answer(&mut self) -> bool {
        false
    }

    #[inline(always)]
    fn polled(&mut self, _: u32, _: usize, _: usize) {}

    #[inline(always)]
    fn releases(&mut self) -> bool {
        false
    }

    #[inline(always)]
    fn takes_requests(&mut self, _: usize) -> bool {
        true
    }

    #[inline(always)]
    fn looks_at_clients(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn looked_at_clients(&mut self, _: usize) {}

    #[inline(always)]
    fn flushes(&mut self, _: bool) -> bool {
        true
    }

    #[inline(always)]
    fn flushed(&mut self, _: u64) {}
}
