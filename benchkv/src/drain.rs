//! How long the clients of a rank wait at the end for what is outstanding, before they call it lost.
//!
//! Time alone is no measure of it on a machine with more to do than cores, or on a virtual one: a daemon that did not run for a while has not
//! lost what it did not look at. So the daemons of the rank must have looked often, and a step of a client in which it, or the whole machine,
//! stood still counts for no more than a short wait. That other ranks run cannot be seen from here.

use std::time::Duration;

/// How long clients wait at least.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// How long they wait for daemons that do not run.
pub const STALL_LIMIT: Duration = Duration::from_secs(12);
/// How often each daemon of the rank has to look, if it runs at all: it takes at least 16 requests of each client in a round.
const ROUNDS: u32 = 1_000;
/// How long a daemon sleeps at most between two of them.
pub const DAEMON_SLEEP: Duration = Duration::from_nanos(DRAIN_LIMIT.as_nanos() as u64 / ROUNDS as u64 / 2);
/// Most that the time between two looks of a client counts.
const LONGEST_STEP: Duration = Duration::from_millis(100);

/// How long a client has waited.
#[derive(Debug)]
pub struct Patience {
    waited: Duration,
    looked_ns: u64,
}

impl Patience {
    /// The wait begins.
    #[must_use]
    pub const fn new(now_ns: u64) -> Self {
        Self { waited: Duration::ZERO, looked_ns: now_ns }
    }

    /// The client looks again.
    pub fn look(&mut self, now_ns: u64) {
        self.waited += Duration::from_nanos(now_ns.saturating_sub(self.looked_ns)).min(LONGEST_STEP);
        self.looked_ns = now_ns;
    }

    /// Whether the client gives up. `rounds`: how often each daemon of the rank has looked since the drain began.
    #[must_use]
    pub fn is_over(&self, mut rounds: impl Iterator<Item = u32>) -> bool {
        self.waited >= STALL_LIMIT || (self.waited >= DRAIN_LIMIT && rounds.all(|rounds| rounds >= ROUNDS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that looked every 10 ms for so long.
    fn waited(time: Duration) -> Patience {
        let mut patience = Patience::new(5);
        (1..=time.as_millis() as u64 / 10).for_each(|look| patience.look(5 + look * 10_000_000));
        patience
    }

    #[test]
    fn a_client_gives_up_when_time_has_passed_and_every_daemon_has_looked() {
        assert!(!waited(DRAIN_LIMIT).is_over([ROUNDS, ROUNDS - 1].into_iter()), "daemon 1 has not looked");
        assert!(waited(DRAIN_LIMIT).is_over([ROUNDS, ROUNDS].into_iter()));
        assert!(!waited(DRAIN_LIMIT - Duration::from_millis(10)).is_over([ROUNDS, ROUNDS].into_iter()));
    }

    #[test]
    fn daemons_that_never_run_are_not_waited_for_without_end() {
        assert!(!waited(STALL_LIMIT - Duration::from_millis(10)).is_over([0].into_iter()));
        assert!(waited(STALL_LIMIT).is_over([0].into_iter()));
    }

    #[test]
    fn time_in_which_the_client_stood_still_does_not_count() {
        let mut patience = Patience::new(0);
        (1..30).for_each(|hour| patience.look(hour * 3_600_000_000_000));
        assert!(!patience.is_over([].into_iter()));
        patience.look(30 * 3_600_000_000_000);
        assert!(patience.is_over([].into_iter()), "30 looks of 100 ms");
    }
}
