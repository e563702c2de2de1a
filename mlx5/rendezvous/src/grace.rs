//! A time to wait at the end of a server.

use std::time::{Duration, Instant};

/// Maximum time that one poll is charged, so that a thread which the system suspended meanwhile
/// does not give up after one poll.
const PER_POLL: Duration = Duration::from_millis(1);

/// The rest of a time to wait. Time in which the thread is suspended between two polls does not
/// count.
#[derive(Debug)]
pub struct GracePeriod {
    left: Duration,
    last: Instant,
}

impl GracePeriod {
    /// Begins a period at `now`.
    #[must_use]
    pub const fn new(left: Duration, now: Instant) -> Self {
        Self { left, last: now }
    }

    /// Charges one more poll. Returns whether the time is over at `now`.
    pub fn is_over(&mut self, now: Instant) -> bool {
        let charge = now.saturating_duration_since(self.last).min(PER_POLL);
        self.last = now;
        self.left = self.left.saturating_sub(charge);
        self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grace_period_lasts_its_time_of_polls_and_not_the_time_that_a_thread_was_suspended() {
        let polls = |every: Duration| {
            let start = Instant::now();
            let mut grace = GracePeriod::new(20 * PER_POLL, start);
            (1..)
                .find(|&poll| grace.is_over(start + every * poll))
                .unwrap()
        };
        assert_eq!(polls(Duration::from_micros(10)), 2_000);
        assert_eq!(polls(PER_POLL), 20);
        assert_eq!(polls(Duration::from_secs(1)), 20);
    }
}
