//! The behaviour of a polling loop that found nothing to do.

use std::fmt;

use crate::sync::{spin_loop, yield_now};

/// Number of empty rounds in which [`Waiter::idle`] spins, before it gives the core away or sleeps.
/// Measured under [`WaitStrategy::Yield`] on two cores: with 2 to 16 threads in ping-pong pairs, 0
/// to 32 rounds are equal within the noise, and 64 and more are slower at most thread counts, up to
/// 10 times; in whole benchkv jobs of 4 threads, 1 round gives at least as many operations as 3 or
/// 8 (with delegation, 1.1 times as many as 8).
const SPIN_ROUNDS: u32 = 1;

/// The way in which polling threads share the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitStrategy {
    /// Keep polling: lowest latency, for threads that have a core each.
    Busy,
    /// Give the core to another thread in each empty round after the first: for more threads than
    /// cores, where a polling thread would otherwise hold the core for a whole scheduler slice
    /// while the thread it waits for could run.
    Yield,
    /// Sleep after the first empty round, until there is something to do: the least load, for
    /// threads that are mostly idle. Waking up takes a system call on either side.
    Event,
}

impl WaitStrategy {
    /// Returns the strategy for the option `auto`: [`Busy`](Self::Busy) if each of `threads`
    /// polling threads can have one of `cores` cores to itself, otherwise [`Yield`](Self::Yield).
    #[must_use]
    pub fn auto(threads: usize, cores: usize) -> Self {
        if threads <= cores {
            Self::Busy
        } else {
            Self::Yield
        }
    }

    /// Makes a waiter for one loop of one thread.
    #[must_use]
    pub fn waiter(self) -> Waiter {
        Waiter {
            strategy: self,
            empty_rounds: 0,
        }
    }
}

impl fmt::Display for WaitStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "busy",
            Self::Yield => "yield",
            Self::Event => "event",
        })
    }
}

/// The wait strategy of one loop: call [`busy`](Self::busy) after a round that found work and
/// [`idle`](Self::idle) after a round that found none.
#[derive(Debug, Clone)]
pub struct Waiter {
    strategy: WaitStrategy,
    empty_rounds: u32,
}

impl Waiter {
    /// Restarts the strategy after a round that found work.
    #[inline(always)]
    pub fn busy(&mut self) {
        self.empty_rounds = 0;
    }

    /// Waits after a round that found nothing. Calls `sleep` under [`WaitStrategy::Event`] only,
    /// and ignores its result: `sleep` is the `wait` of the polled object, with a timeout if the
    /// loop has other work.
    pub fn idle<R>(&mut self, sleep: impl FnOnce() -> R) {
        match self.strategy {
            WaitStrategy::Busy => spin_loop(),
            _ if self.empty_rounds < SPIN_ROUNDS => {
                self.empty_rounds += 1;
                spin_loop();
            }
            // After that, each empty round yields or sleeps at once, until there is work again.
            WaitStrategy::Yield => yield_now(),
            WaitStrategy::Event => drop(sleep()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_event_sleeps_and_not_in_the_first_empty_round() {
        for (strategy, sleeps) in [
            (WaitStrategy::Busy, 0),
            (WaitStrategy::Yield, 0),
            (WaitStrategy::Event, 2),
        ] {
            let (mut waiter, mut slept) = (strategy.waiter(), 0);
            for _ in 0..2 {
                waiter.busy();
                (0..SPIN_ROUNDS + 1).for_each(|_| waiter.idle(|| slept += 1));
            }
            assert_eq!(slept, sleeps, "{strategy}");
        }
    }
}
