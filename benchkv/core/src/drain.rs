//! Decides how long the ranks of a job wait for outstanding operations.
//!
//! The ranks wait as long as messages move. Each answer that a client waits for passes a daemon of
//! some rank, so a drain makes progress as long as the daemons of the job move messages. Operations
//! that have not ended when nothing moves any more are lost. Silence alone is no proof on a machine
//! with more threads than cores, or on a virtual machine: a daemon that did not run for a while has
//! not lost the messages that it did not poll. So a short silence counts only if each daemon of the
//! job has polled often in it, and time in which a rank itself did not run counts little.
//!
//! A drain that still makes progress after [`LONGEST`], or 5 s after an interrupt, is cut:
//! operations outstanding then are unfinished, not lost.
//!
//! The main threads of all ranks compare [`View`]s every [`LOOK_INTERVAL`], and decide by the same
//! views. This module has no clock and no thread.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum time without movement, in addition to the pauses in the schedules of clients.
const SILENCE: Duration = Duration::from_secs(3);
/// Maximum time without movement if a daemon of the rank has made fewer than [`ROUNDS`] rounds in
/// this time.
const STALL: Duration = Duration::from_secs(12);
/// The limit is [`SILENCE`] and not [`STALL`] if each daemon of the rank has made this number of
/// rounds without movement.
const ROUNDS: u32 = 1_000;
/// The time between two views of a rank counts as time without movement only up to this length. In
/// a longer time, the rank itself may not have run.
const LONGEST_STEP: Duration = Duration::from_millis(100);
/// Maximum sleep of a daemon between two of its rounds, so that it can make `ROUNDS` rounds in
/// `SILENCE`.
pub const DAEMON_SLEEP: Duration =
    Duration::from_nanos(SILENCE.as_nanos() as u64 / ROUNDS as u64 / 2);
/// Interval at which ranks compare their views.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum length of the drain after the last run.
pub const LONGEST: Duration = Duration::from_secs(60);
/// Maximum length of the remaining drain after an interrupt. It is shorter than the grace period of
/// a launcher.
const AFTER_INTERRUPT: Duration = Duration::from_secs(5);

/// Counts of a daemon, of which a drain compares only the increase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Number of rounds of the daemon; wraps.
    pub rounds: u32,
    /// Number of messages that these rounds moved.
    pub moved: u64,
}

/// The state that a rank reports to the other ranks for each comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Whether the clients of the rank have no operation outstanding.
    pub has_drained: bool,
    /// Number of messages that the rank's daemons have moved. Only its increase counts.
    pub moved: u64,
    /// Whether no message of the job has moved for the maximum time that the rank waits.
    pub is_over: bool,
    /// Whether the drain is to end even if messages still move.
    pub cuts: bool,
}

/// The end of a drain, on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// No operation is outstanding.
    Drained,
    /// No message moved any more: outstanding operations are lost.
    Silent,
    /// The drain took too long: outstanding operations are unfinished.
    Cut,
}

/// The state of the drain at one rank.
#[derive(Debug)]
pub struct Drain {
    /// Maximum time without movement that the schedules of the clients explain.
    quiet: Duration,
    longest: Duration,
    began_ns: u64,
    interrupted_ns: Option<u64>,
    /// Time without movement, each step of it limited to [`LONGEST_STEP`].
    silent: Duration,
    looked_ns: u64,
    /// Number of rounds of each daemon of this rank at the last movement of a message.
    rounds: Vec<u32>,
    /// Messages that all ranks had moved at the last comparison.
    moved: u64,
}

impl Drain {
    /// Begins the drain. A time of up to `quiet` without movement is no sign of loss, because
    /// clients that still issue may have nothing due. After `longest` the drain is cut.
    pub const fn new(now_ns: u64, quiet: Duration, longest: Duration) -> Self {
        Self {
            quiet,
            longest,
            began_ns: now_ns,
            interrupted_ns: None,
            silent: Duration::ZERO,
            looked_ns: now_ns,
            rounds: Vec::new(),
            moved: 0,
        }
    }

    /// Returns the view of this rank. `daemons` is the progress of the rank's daemons.
    pub fn look(
        &mut self,
        now_ns: u64,
        has_drained: bool,
        is_interrupted: bool,
        daemons: &[DrainProgress],
    ) -> View {
        self.silent += since(self.looked_ns, now_ns).min(LONGEST_STEP);
        self.looked_ns = now_ns;
        self.rounds.resize(daemons.len(), 0);
        if is_interrupted {
            self.interrupted_ns.get_or_insert(now_ns);
        }
        let has_looked = daemons
            .iter()
            .zip(&self.rounds)
            .all(|(daemon, before)| daemon.rounds.wrapping_sub(*before) >= ROUNDS);
        let limit = if has_looked { SILENCE } else { STALL };
        View {
            has_drained,
            moved: daemons.iter().map(|daemon| daemon.moved).sum(),
            is_over: self.silent >= limit + self.quiet,
            cuts: since(self.began_ns, now_ns) >= self.longest
                || self
                    .interrupted_ns
                    .is_some_and(|at_ns| since(at_ns, now_ns) >= AFTER_INTERRUPT),
        }
    }

    /// Compares the views of all ranks, and returns the same result on each; `None`: the drain
    /// continues. `daemons` must be the same as in the last [`look`](Self::look).
    pub fn compare(&mut self, views: &[View], daemons: &[DrainProgress]) -> Option<End> {
        if views.iter().all(|view| view.has_drained) {
            return Some(End::Drained);
        }
        let moved = views.iter().map(|view| view.moved).sum();
        if moved != self.moved {
            self.moved = moved;
            self.silent = Duration::ZERO;
            self.rounds = daemons.iter().map(|daemon| daemon.rounds).collect();
        } else if views.iter().all(|view| view.is_over) {
            return Some(End::Silent);
        }
        views.iter().any(|view| view.cuts).then_some(End::Cut)
    }
}

fn since(then_ns: u64, now_ns: u64) -> Duration {
    Duration::from_nanos(now_ns.saturating_sub(then_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = 10_000_000;

    struct Rank {
        drain: Drain,
        now_ns: u64,
        daemon: DrainProgress,
        is_interrupted: bool,
    }

    fn rank(quiet: Duration) -> Rank {
        Rank {
            drain: Drain::new(5, quiet, LONGEST),
            now_ns: 5,
            daemon: DrainProgress::default(),
            is_interrupted: false,
        }
    }

    /// Lets all ranks make and compare views every 10 ms of their clocks, for `time` or until the
    /// drain ends. Before each view, `act` changes the ranks: it adds to the rounds and the moved
    /// messages of their daemons, or to their clocks.
    fn pass(
        ranks: &mut [Rank],
        time: Duration,
        mut act: impl FnMut(u64, &mut [Rank]),
    ) -> Option<End> {
        (0..time.as_nanos() as u64 / STEP_NS).find_map(|step| {
            act(step, ranks);
            let mut look = |rank: &mut Rank| {
                rank.now_ns += STEP_NS;
                rank.drain
                    .look(rank.now_ns, false, rank.is_interrupted, &[rank.daemon])
            };
            let views: Vec<View> = ranks.iter_mut().map(&mut look).collect();
            let ends: Vec<_> = ranks
                .iter_mut()
                .map(|rank| rank.drain.compare(&views, &[rank.daemon]))
                .collect();
            assert!(
                ends.windows(2).all(|pair| pair[0] == pair[1]),
                "ranks differ: {ends:?}"
            );
            ends[0]
        })
    }

    fn run(_: u64, ranks: &mut [Rank]) {
        ranks.iter_mut().for_each(|rank| rank.daemon.rounds += 100);
    }

    #[test]
    fn a_job_in_which_nothing_moves_has_lost_what_is_outstanding() {
        let mut ranks = [rank(Duration::ZERO), rank(Duration::ZERO)];
        assert_eq!(
            pass(&mut ranks, SILENCE - Duration::from_millis(10), run),
            None
        );
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(10), run),
            Some(End::Silent)
        );
    }

    #[test]
    fn a_drain_goes_on_while_any_daemon_moves_something() {
        let mut ranks = [rank(Duration::ZERO), rank(Duration::ZERO)];
        let slow = |step: u64, ranks: &mut [Rank]| {
            run(step, ranks);
            // The other rank moves a message every 2.5 s.
            ranks[1].daemon.moved += u64::from(step % 250 == 249);
        };
        assert_eq!(pass(&mut ranks, Duration::from_secs(50), slow), None);
        assert_eq!(pass(&mut ranks, SILENCE, run), Some(End::Silent));
    }

    #[test]
    fn a_quiet_time_that_has_a_reason_is_waited_for() {
        let quiet = Duration::from_secs(20);
        let mut ranks = [rank(quiet)];
        assert_eq!(
            pass(&mut ranks, quiet + SILENCE - Duration::from_millis(10), run),
            None
        );
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(10), run),
            Some(End::Silent)
        );
    }

    #[test]
    fn silence_counts_once_every_daemon_of_the_job_has_looked_since() {
        let mut ranks = [rank(Duration::ZERO), rank(Duration::ZERO)];
        let one_stands_still = |_: u64, ranks: &mut [Rank]| ranks[0].daemon.rounds += 100;
        run(0, &mut ranks);
        // Rounds before the last movement do not count.
        ranks[1].daemon = DrainProgress {
            rounds: 10 * ROUNDS,
            moved: 1,
        };
        assert_eq!(
            pass(
                &mut ranks,
                STALL - Duration::from_millis(10),
                one_stands_still
            ),
            None
        );
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(20), one_stands_still),
            Some(End::Silent),
            "it is not waited for without end"
        );
    }

    #[test]
    fn time_in_which_a_rank_stood_still_counts_little() {
        let mut ranks = [rank(Duration::ZERO)];
        let stand_still = |step: u64, ranks: &mut [Rank]| {
            run(step, ranks);
            ranks[0].now_ns += 1_000_000_000;
        };
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(290), stand_still),
            None,
            "29 looks, a second apart"
        );
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(10), stand_still),
            Some(End::Silent)
        );
    }

    #[test]
    fn a_drain_is_cut_when_it_takes_too_long_and_sooner_after_an_interrupt() {
        let busy = |step: u64, ranks: &mut [Rank]| {
            run(step, ranks);
            ranks[0].daemon.moved += 1;
        };
        let mut ranks = [rank(Duration::ZERO), rank(Duration::ZERO)];
        assert_eq!(
            pass(&mut ranks, LONGEST - Duration::from_millis(10), busy),
            None
        );
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(10), busy),
            Some(End::Cut)
        );
        let mut ranks = [rank(Duration::ZERO), rank(Duration::ZERO)];
        assert_eq!(pass(&mut ranks, Duration::from_secs(10), busy), None);
        // The interrupt does not reach all ranks at once.
        ranks[1].is_interrupted = true;
        assert_eq!(pass(&mut ranks, AFTER_INTERRUPT, busy), None);
        assert_eq!(
            pass(&mut ranks, Duration::from_millis(10), busy),
            Some(End::Cut)
        );
    }

    #[test]
    fn a_drain_ends_when_all_ranks_have_nothing_outstanding() {
        let mut drain = Drain::new(0, Duration::ZERO, LONGEST);
        let view = |has_drained| View {
            has_drained,
            moved: 0,
            is_over: false,
            cuts: true,
        };
        assert_eq!(
            drain.compare(&[view(true), view(false)], &[]),
            Some(End::Cut)
        );
        assert_eq!(
            drain.compare(&[view(true), view(true)], &[]),
            Some(End::Drained)
        );
    }
}
