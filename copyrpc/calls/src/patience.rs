//! The number of empty polls before a thread sleeps.

use std::hint::spin_loop;
use std::thread;
use std::time::{Duration, Instant};

/// Number of empty polls before the clock is read for a timeout.
const UNTIMED: u32 = 64;
/// Number of empty polls before a sleep: the usual number, and the maximum.
const FEWEST: u32 = 256;
const MOST: u32 = 8192;
/// Maximum length of a sleep that a few more polls might have avoided. A thread wakes up within
/// 5 us on a host, and 50 us on a virtual machine.
const SHORT: Duration = Duration::from_micros(100);
/// Time of a yield from which on another thread has used the core.
const TAKEN: Duration = Duration::from_micros(500);
/// Number of sleeps after which more polls are tried again, once even the maximum number has not
/// helped.
const SLEEPS_PER_TRY: u32 = 1024;

/// Yields the core. Returns whether another thread has used it for long: on a core that others need,
/// each yield takes a time slice of some milliseconds, and what a thread does once in many polls
/// would be seconds late.
#[must_use]
pub fn yield_core() -> bool {
    let start = Instant::now();
    thread::yield_now();
    start.elapsed() >= TAKEN
}

/// Decides when a thread whose polls find nothing goes to sleep.
///
/// Two threads that answer each other may wake each other for every message: while one wakes up,
/// the polls of the other find nothing, and it sleeps too. So after a short sleep a thread polls
/// twice as often before the next sleep. If more polls do not help, because the other thread needs
/// the same core, the thread sleeps early again. The clock is read only around a sleep.
#[derive(Debug)]
pub struct Patience {
    /// Number of empty polls since the last poll that found something.
    polls: u32,
    /// Number of empty polls before a sleep.
    limit: u32,
    /// Number of sleeps that are left until the limit may grow.
    sleeps: u32,
}

impl Patience {
    /// Makes a strategy that sleeps after 256 empty polls.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            polls: 0,
            limit: FEWEST,
            sleeps: 0,
        }
    }

    /// Notes a poll that found something, or the beginning of a wait.
    #[inline(always)]
    pub const fn reset(&mut self) {
        self.polls = 0;
    }

    /// Returns whether this is the time to read the clock for a timeout: once after a
    /// [`reset`](Self::reset), after the 64th empty poll. An answer that arrives earlier needs no
    /// clock, and a thread does not sleep before that poll.
    #[must_use]
    pub const fn is_clock_due(&self) -> bool {
        self.polls == UNTIMED
    }

    /// Notes an empty poll. Returns the time if there have been enough of them since the last
    /// [`reset`](Self::reset): then the thread sleeps until there is something to poll for, and
    /// calls [`slept`](Self::slept).
    #[inline]
    pub fn idle(&mut self) -> Option<Instant> {
        if self.polls < self.limit {
            self.polls += 1;
            spin_loop();
            return None;
        }
        Some(Instant::now())
    }

    /// Makes the next empty poll the last before a sleep, because another thread needs the core.
    pub const fn exhaust(&mut self) {
        self.polls = self.limit;
    }

    /// Notes a sleep that began at `start` and has ended.
    pub fn slept(&mut self, start: Instant) {
        self.adapt(start.elapsed());
    }

    fn adapt(&mut self, time: Duration) {
        let may_grow = self.sleeps == 0;
        self.sleeps = self.sleeps.saturating_sub(1);
        self.limit = match self.limit {
            limit if time < SHORT && may_grow && limit < MOST => 2 * limit,
            limit => {
                if limit == MOST && time < SHORT {
                    self.sleeps = SLEEPS_PER_TRY;
                }
                FEWEST
            }
        };
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of polls before a sleep of this time.
    fn polls(patience: &mut Patience, time: Duration) -> usize {
        patience.reset();
        let polls = (0..).take_while(|_| patience.idle().is_none()).count();
        patience.adapt(time);
        polls
    }

    #[test]
    fn short_sleeps_let_a_thread_poll_for_longer_and_long_ones_do_not() {
        let mut patience = Patience::new();
        let short = Duration::from_micros(30);
        let long = Duration::from_millis(1);
        assert_eq!(
            [long, short, short, short, long, short].map(|time| polls(&mut patience, time)),
            [256, 256, 512, 1024, 2048, 256]
        );
    }

    #[test]
    fn polls_that_do_not_help_are_given_up_for_a_while() {
        let (mut patience, short) = (Patience::new(), Duration::from_micros(30));
        let of_a_try = [256, 512, 1024, 2048, 4096, 8192];
        for _ in 0..3 {
            assert_eq!(of_a_try.map(|_| polls(&mut patience, short)), of_a_try);
            assert!((0..SLEEPS_PER_TRY).all(|_| polls(&mut patience, short) == 256));
        }
    }
}
