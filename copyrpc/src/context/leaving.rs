//! The end of a context.

use std::time::{Duration, Instant};

use super::Inner;
use crate::connection::{Connection, Outcome};

/// Maximum time that a context that goes waits for its posted messages. A peer's device takes them without a program, so only a peer that
/// is gone needs this long.
const LINGER: Duration = Duration::from_millis(20);
/// The maximum that one look at the queues counts for. A thread that the system suspends for longer has not looked meanwhile: what was to happen
/// within [`LINGER`] needs several looks, one after the other.
const LOOK: Duration = Duration::from_millis(1);

/// The rest of [`LINGER`].
pub(crate) struct Patience {
    left: Duration,
    last: Instant,
}

impl Patience {
    pub(crate) fn from(now: Instant) -> Self {
        Self { left: LINGER, last: now }
    }

    /// Returns whether it is over at `now`, after one more look.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        let look = now.saturating_duration_since(self.last).min(LOOK);
        self.last = now;
        self.left = self.left.saturating_sub(look);
        self.left.is_zero()
    }
}

impl<U> Inner<U> {
    /// Ends all connections. Their messages have [`LINGER`] to arrive: a queue pair loses everything
    /// under way at its end. Meanwhile it drains as ever: arrivals and completions make room for messages that wait (S2, B1).
    pub(super) fn part_all(&self) {
        let connections = self.connections.borrow().clone();
        connections.iter().for_each(Connection::part);
        let mut patience = Patience::from(Instant::now());
        loop {
            // Each is called: the call serves it.
            let leaving = connections.iter().filter(|connection| connection.is_leaving()).count();
            if leaving == 0 || patience.is_over(Instant::now()) {
                break;
            }
            self.drain(&mut |_, _: Outcome<'_>| ());
        }
        connections.iter().for_each(Connection::abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_lasts_its_time_of_looks_and_not_the_time_that_a_thread_was_suspended() {
        let looks = |every: Duration| {
            let start = Instant::now();
            let mut patience = Patience::from(start);
            (1..).find(|&look| patience.is_over(start + every * look)).unwrap()
        };
        assert_eq!(looks(Duration::from_micros(10)), 2_000);
        assert_eq!(looks(LOOK), 20);
        assert_eq!(looks(Duration::from_secs(1)), 20);
    }
}
