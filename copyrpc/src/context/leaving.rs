//! The end of a context.

use std::time::{Duration, Instant};

use super::Inner;
use crate::connection::{Connection, Outcome};

/// Maximum time for which a context that is dropped waits for its posted messages. A peer's device takes them without a program, so only a
/// peer that is gone needs this long.
pub(crate) const LINGER: Duration = Duration::from_millis(20);
/// Maximum time that one poll is charged, so that a thread which the system suspended meanwhile does not give up after one poll.
const PER_POLL: Duration = Duration::from_millis(1);

/// The rest of a time to wait.
pub(crate) struct GracePeriod {
    left: Duration,
    last: Instant,
}

impl GracePeriod {
    pub(crate) const fn new(left: Duration, now: Instant) -> Self {
        Self { left, last: now }
    }

    /// Charges one more poll. Returns whether the time is over at `now`.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        let charge = now.saturating_duration_since(self.last).min(PER_POLL);
        self.last = now;
        self.left = self.left.saturating_sub(charge);
        self.left.is_zero()
    }
}

impl<U> Inner<U> {
    /// Ends all connections. Their messages have the context's time to arrive: a queue pair loses
    /// everything under way at its end. Meanwhile it drains as ever: arrivals and completions make room for messages that wait (S2, B1).
    pub(super) fn shut_down_all(&self) {
        let connections = self.connections.borrow().clone();
        connections.iter().for_each(Connection::begin_leaving);
        let mut grace = GracePeriod::new(self.linger.get(), Instant::now());
        loop {
            // Each is called: the call serves it.
            let leaving = connections.iter().filter(|connection| connection.is_leaving()).count();
            if leaving == 0 || grace.is_over(Instant::now()) {
                break;
            }
            self.drain(&mut |_, _: Outcome<'_>| ());
            // A software HCA may need the core.
            std::thread::yield_now();
        }
        connections.iter().for_each(Connection::abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grace_period_lasts_its_time_of_polls_and_not_the_time_that_a_thread_was_suspended() {
        let polls = |every: Duration| {
            let start = Instant::now();
            let mut grace = GracePeriod::new(LINGER, start);
            (1..).find(|&poll| grace.is_over(start + every * poll)).unwrap()
        };
        assert_eq!(polls(Duration::from_micros(10)), 2_000);
        assert_eq!(polls(PER_POLL), 20);
        assert_eq!(polls(Duration::from_secs(1)), 20);
    }
}
