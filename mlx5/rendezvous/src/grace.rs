//! A time to wait at the end of a server.

use std::time::{Duration, Instant};

/// Minimum number of polls of a period, so that a thread that was suspended meanwhile does not give
/// up after one poll. With a larger number, each poll would be charged less, and the period would
/// be longer on a machine on which other threads run between two polls.
const POLLS: u32 = 20;

/// The rest of a time to wait. Time in which the thread is suspended between two polls does not
/// count.
#[derive(Debug)]
pub struct GracePeriod {
    left: Duration,
    last: Instant,
    /// Maximum time that one poll is charged.
    per_poll: Duration,
}

impl GracePeriod {
    /// Begins a period of the length `left` at `now`.
    #[must_use]
    pub fn new(left: Duration, now: Instant) -> Self {
        Self {
            left,
            last: now,
            per_poll: left / POLLS + Duration::from_nanos(1),
        }
    }

    /// Returns the rest of the time.
    #[must_use]
    pub const fn left(&self) -> Duration {
        self.left
    }

    /// Charges one more poll. Returns whether the time is over at `now`.
    pub fn is_over(&mut self, now: Instant) -> bool {
        let charge = now.saturating_duration_since(self.last).min(self.per_poll);
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
        let polls_of = |time: Duration, every: Duration| {
            let start = Instant::now();
            let mut grace = GracePeriod::new(time, start);
            (1..)
                .find(|&poll| grace.is_over(start + every * poll))
                .unwrap()
        };
        let ms = Duration::from_millis(1);
        let polls = |every| polls_of(20 * ms, every);
        assert_eq!(polls(Duration::from_micros(10)), 2_000);
        assert_eq!(polls(ms), 20);
        assert_eq!(polls(Duration::from_secs(1)), 20);
        assert_eq!(
            polls_of(1_000 * ms, 4 * ms),
            250,
            "a machine on which others run"
        );
    }
}
