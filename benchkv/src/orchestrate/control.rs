//! The control of a rank's workers by the rank's main thread. A failure of one worker stops all
//! workers.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use copyrpc_shm::sleep::{self, Bell, Look, Sleeper};
use engine::drain::DrainProgress;
use engine::phase::Phase;

use super::RankError;

/// The values that all workers poll, in cache lines without other data.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Words {
    phase: AtomicU32,
    is_stopped: AtomicBool,
    /// Rung after each change of the other fields.
    bell: Bell,
}

const _: () = assert!(Phase::Ready.encode() == 0);

/// The control of a rank's workers, and their first failure.
#[derive(Debug)]
pub(super) struct Control {
    words: Words,
    failure: Mutex<Option<RankError>>,
    drains: Vec<DaemonDrain>,
}

/// The rounds of a daemon while the rank waits for clients to end, in a cache line of its own. Only
/// the daemon itself writes it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct DaemonDrain {
    rounds: AtomicU32,
    moved: AtomicU64,
}

impl Control {
    pub(super) fn new(daemons: usize) -> Self {
        let drains = (0..daemons).map(|_| DaemonDrain::default()).collect();
        Self {
            words: Words::default(),
            failure: Mutex::new(None),
            drains,
        }
    }

    #[inline]
    pub(super) fn phase(&self) -> Phase {
        Phase::decode(self.words.phase.load(Ordering::Acquire))
    }

    /// Returns whether every worker has to end at once.
    #[inline]
    pub(super) fn is_stopped(&self) -> bool {
        self.words.is_stopped.load(Ordering::Acquire)
    }

    /// Sleeps until `part` (a daemon, or the paths of a client) has work, the phase is no longer
    /// `phase`, or workers are stopped; at most for `longest`. A worker calls it when it finds
    /// nothing to do.
    pub(super) fn sleep(&self, phase: Phase, part: &mut dyn Sleeper, longest: Duration) {
        let mut heard = self.words.bell.listen();
        let mut has_changed = Look(|| self.is_stopped() || self.phase() != phase);
        sleep::wait(
            [&mut heard as &mut dyn Sleeper, &mut has_changed, part],
            Some(longest),
        );
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        self.words.phase.store(phase.encode(), Ordering::Release);
        self.words.bell.ring();
    }

    /// Counts a round of a daemon while the rank waits for clients to end. The round moved `moved`
    /// messages.
    pub(super) fn note_drain_round(&self, daemon: usize, moved: usize) {
        if let Some(drain) = self.drains.get(daemon) {
            drain.rounds.fetch_add(1, Ordering::Relaxed);
            drain.moved.fetch_add(moved as u64, Ordering::Relaxed);
        }
    }

    pub(super) fn drain_progress(&self) -> Vec<DrainProgress> {
        let load = |drain: &DaemonDrain| DrainProgress {
            rounds: drain.rounds.load(Ordering::Relaxed),
            moved: drain.moved.load(Ordering::Relaxed),
        };
        self.drains.iter().map(load).collect()
    }

    pub(super) fn stop(&self) {
        self.words.is_stopped.store(true, Ordering::Release);
        self.words.bell.ring();
    }

    /// Ends every worker because of `failure`. Only the first failure is kept, because later
    /// failures follow from it.
    pub(super) fn fail(&self, failure: RankError) {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(failure);
        self.stop();
    }

    pub(super) fn take_failure(&self) -> Option<RankError> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use copyrpc_shm::sleep::Due;

    use super::*;

    #[test]
    fn phases_survive_the_shared_word() {
        let control = Control::new(1);
        assert_eq!(
            (control.phase(), control.is_stopped()),
            (Phase::Ready, false)
        );
        for phase in [
            Phase::WarmUp,
            Phase::Between,
            Phase::Window(0),
            Phase::Window(u16::MAX),
            Phase::Drain,
            Phase::GiveUp,
        ] {
            control.set_phase(phase);
            assert_eq!(control.phase(), phase);
        }
        control.stop();
        assert!(control.is_stopped());
    }

    /// Each thread sleeps until the other thread has begun the next window. A thread that is not
    /// woken would check again only after an hour.
    #[test]
    fn a_change_wakes_a_sleeper() {
        const WINDOWS: u16 = 2_000;
        fn play(mine: &Control, other: &Control, is_first: bool) {
            for window in 0..WINDOWS {
                if is_first {
                    mine.set_phase(Phase::Window(window));
                }
                loop {
                    let phase = other.phase();
                    if phase == Phase::Window(window) {
                        break;
                    }
                    other.sleep(phase, &mut Due(Duration::MAX), Duration::from_secs(3600));
                }
                if !is_first {
                    mine.set_phase(Phase::Window(window));
                }
            }
        }
        let pair: &'static [Control; 2] = Box::leak(Box::new([(); 2].map(|()| Control::new(1))));
        let [one, other] = pair;
        let players = [
            std::thread::spawn(move || play(one, other, true)),
            std::thread::spawn(move || play(other, one, false)),
        ];
        let start = Instant::now();
        while !players.iter().all(|player| player.is_finished()) {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "a change woke nobody"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        players
            .into_iter()
            .for_each(|player| player.join().unwrap());
    }

    #[test]
    fn the_first_failure_is_the_one_reported() {
        let control = Control::new(1);
        control.fail("first".to_owned().into());
        control.fail("second".to_owned().into());
        assert!(control.is_stopped());
        assert!(matches!(control.take_failure(), Some(RankError::Failed(what)) if what == "first"));
        assert!(control.take_failure().is_none());
    }
}
