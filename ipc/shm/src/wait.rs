//! What a polling loop does when it found nothing to do.

use std::fmt;
use std::str::FromStr;

use crate::sync::{spin_loop, yield_now};

/// Empty rounds that [`Waiter::idle`] spins under [`WaitStrategy::Yield`] before it gives the core away. Measured on two cores: with 2 to 16
/// threads in ping-pong pairs 0 to 32 are equal within the noise, and 64 and more are slower at most thread counts, up to 10 times; of whole
/// benchkv jobs of 4 threads, 1 makes as many operations as 3 or 8, or more (delegation: 1.1 times the median of 8).
const SPIN_ROUNDS: u32 = 1;

/// How polling threads share the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitStrategy {
    /// Keep polling: lowest latency, for threads that have a core each.
    Busy,
    /// Give the core to another thread after a few empty rounds: for more threads than cores, where a polling thread would otherwise
    /// hold the core for a whole scheduler slice while the thread it waits for could run.
    Yield,
}

impl WaitStrategy {
    /// The rule behind `auto`: [`Busy`](Self::Busy) if each of `threads` polling threads can have one of `cores` cores to itself,
    /// otherwise [`Yield`](Self::Yield).
    #[must_use]
    pub fn auto(threads: usize, cores: usize) -> Self {
        if threads <= cores { Self::Busy } else { Self::Yield }
    }

    /// A waiter for one loop of one thread.
    #[must_use]
    pub fn waiter(self) -> Waiter {
        Waiter { strategy: self, empty_rounds: 0 }
    }
}

impl fmt::Display for WaitStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "busy",
            Self::Yield => "yield",
        })
    }
}

/// The text names no wait strategy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown wait strategy {0:?}: use busy or yield")]
pub struct ParseWaitError(pub String);

impl FromStr for WaitStrategy {
    type Err = ParseWaitError;

    fn from_str(text: &str) -> Result<Self, ParseWaitError> {
        match text {
            "busy" => Ok(Self::Busy),
            "yield" => Ok(Self::Yield),
            _ => Err(ParseWaitError(text.to_owned())),
        }
    }
}

/// The wait strategy of one loop: call [`busy`](Self::busy) after a round that found work and [`idle`](Self::idle) after one that did
/// not. It never sleeps.
#[derive(Debug, Clone)]
pub struct Waiter {
    strategy: WaitStrategy,
    empty_rounds: u32,
}

impl Waiter {
    /// The round found work.
    #[inline(always)]
    pub fn busy(&mut self) {
        self.empty_rounds = 0;
    }

    /// The round found nothing.
    #[inline]
    pub fn idle(&mut self) {
        match self.strategy {
            WaitStrategy::Busy => spin_loop(),
            WaitStrategy::Yield if self.empty_rounds < SPIN_ROUNDS => {
                self.empty_rounds += 1;
                spin_loop();
            }
            // Further empty rounds yield at once, until there is work again.
            WaitStrategy::Yield => yield_now(),
        }
    }
}
