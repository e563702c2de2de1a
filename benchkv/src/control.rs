//! The control of a rank's workers by its main thread. A failure of a worker stops them all.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine::drain::Progress;
use engine::phase::Phase;
use shm::memfd::{Memfd, MemfdAttachError, MemfdCreateError, MemfdId};
use shm::sleep::{self, Bell, Look, Sleeper};

/// The words that steer workers, in memory that client processes map too, without write access. It starts as zero bytes.
#[derive(Debug)]
pub struct Steering(Memfd);

#[repr(C)]
struct Words {
    phase: AtomicU32,
    /// Not 0: every worker has to end.
    stopped: AtomicU32,
    /// Rung after each change of these words.
    bell: Bell,
}

/// Maximum number of daemons of a rank.
pub const MAX_DAEMONS: usize = 64;
const BYTES: usize = 4096;
const _: () = assert!(size_of::<Words>() <= BYTES && Phase::Ready.encode() == 0);

impl Steering {
    /// Creates the words, in [`Phase::Ready`].
    ///
    /// # Errors
    /// The system's reason why there is no such memory.
    pub fn create() -> Result<Self, MemfdCreateError> {
        Memfd::create("benchkv-steering", BYTES).map(Self)
    }

    /// Attaches to the words of another process, which may be read only.
    ///
    /// # Errors
    /// The system's reason why it cannot be mapped.
    pub fn attach(id: &MemfdId) -> Result<Self, MemfdAttachError> {
        // Memory of another size is not the words, and is refused.
        Memfd::attach(&MemfdId { bytes: BYTES as u64, ..*id }, false).map(Self)
    }

    /// Returns the id by which other processes attach.
    #[must_use]
    pub fn id(&self) -> MemfdId {
        self.0.id()
    }

    #[inline]
    fn words(&self) -> &Words {
        // SAFETY: the mapping is page-aligned, has BYTES (a peer's of another size is refused) and lives as long as `self`; a
        // `Words` is atomics only, valid for any bytes.
        unsafe { self.0.base().cast().as_ref() }
    }

    /// Returns the phase of the clients.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        Phase::decode(self.words().phase.load(Ordering::Acquire))
    }

    /// Sleeps until there is work in `part` or these words change, at most for `longest`. Called by a worker that saw `phase` and finds
    /// nothing to do.
    pub fn sleep(&self, phase: Phase, part: &mut dyn Sleeper, longest: Duration) {
        let mut heard = self.words().bell.listen();
        let mut has_changed = Look(|| self.is_stopped() || self.phase() != phase);
        sleep::wait([&mut heard as &mut dyn Sleeper, &mut has_changed, part], Some(longest));
    }

    /// Returns whether every worker has to end at once.
    #[inline]
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.words().stopped.load(Ordering::Acquire) != 0
    }
}

/// The control of a rank's workers, and their failures. `E` is the type of a failure.
#[derive(Debug)]
pub struct Control<E> {
    steering: Steering,
    failure: Mutex<Option<E>>,
    /// Progress of the drain, by daemon.
    drains: [DaemonDrain; MAX_DAEMONS],
}

/// The work of a daemon since the drain began, in a cache line of its own. Only its daemon writes it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct DaemonDrain {
    rounds: AtomicU32,
    moved: AtomicU64,
}

impl<E> Control<E> {
    /// Makes a control, in [`Phase::Ready`].
    ///
    /// # Errors
    /// The system's reason why there is no memory for the words.
    pub fn new() -> Result<Self, MemfdCreateError> {
        Ok(Self { steering: Steering::create()?, failure: Mutex::new(None), drains: std::array::from_fn(|_| DaemonDrain::default()) })
    }

    /// Returns the words that workers poll.
    #[must_use]
    pub const fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Returns whether every worker has to end at once.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.steering.is_stopped()
    }

    /// Starts a phase.
    pub fn set_phase(&self, phase: Phase) {
        self.steering.words().phase.store(phase.encode(), Ordering::Release);
        self.steering.words().bell.ring();
    }

    /// Notes a round of a daemon while clients drain, in which it moved that many messages.
    pub fn note_drain_round(&self, daemon: usize, moved: usize) {
        if let Some(drain) = self.drains.get(daemon) {
            drain.rounds.fetch_add(1, Ordering::Relaxed);
            drain.moved.fetch_add(moved as u64, Ordering::Relaxed);
        }
    }

    /// Returns the progress of each of the first `daemons` daemons since the drain began.
    pub fn drain_progress(&self, daemons: usize) -> Vec<Progress> {
        let load =
            |drain: &DaemonDrain| Progress { rounds: drain.rounds.load(Ordering::Relaxed), moved: drain.moved.load(Ordering::Relaxed) };
        self.drains.iter().take(daemons).map(load).collect()
    }

    /// Ends every worker.
    pub fn stop(&self) {
        self.steering.words().stopped.store(1, Ordering::Release);
        self.steering.words().bell.ring();
    }

    /// Ends every worker because of `failure`. Keeps the first failure: the others follow from it.
    pub fn fail(&self, failure: E) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.stop();
    }

    /// Takes the failure.
    pub fn take_failure(&self) -> Option<E> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use shm::sleep::Due;

    use super::*;

    #[test]
    fn phases_survive_the_shared_word() {
        let control = Control::<()>::new().unwrap();
        let seen = Steering::attach(&control.steering().id()).unwrap();
        assert_eq!((seen.phase(), seen.is_stopped()), (Phase::Ready, false));
        for phase in [Phase::WarmUp, Phase::Between, Phase::Window(0), Phase::Window(u16::MAX), Phase::Drain, Phase::GiveUp] {
            control.set_phase(phase);
            assert_eq!((control.steering().phase(), seen.phase()), (phase, phase));
        }
        control.stop();
        assert!(seen.is_stopped());
    }

    /// Each thread sleeps until the other has begun the next window, in memory that it can only read. Without a wake-up, neither would
    /// look again within an hour.
    #[test]
    fn a_change_wakes_whoever_maps_the_words() {
        const WINDOWS: u16 = 2_000;
        let play = |control: Control<()>, other: MemfdId, is_first: bool| {
            let other = Steering::attach(&other).unwrap();
            for window in 0..WINDOWS {
                if is_first {
                    control.set_phase(Phase::Window(window));
                }
                loop {
                    let phase = other.phase();
                    if phase == Phase::Window(window) {
                        break;
                    }
                    other.sleep(phase, &mut Due(Duration::MAX), Duration::from_secs(3600));
                }
                if !is_first {
                    control.set_phase(Phase::Window(window));
                }
            }
            control
        };
        let [one, other] = [(); 2].map(|()| Control::new().unwrap());
        let [one_id, other_id] = [&one, &other].map(|control| control.steering().id());
        let players = [std::thread::spawn(move || play(one, other_id, true)), std::thread::spawn(move || play(other, one_id, false))];
        let start = Instant::now();
        while !players.iter().all(|player| player.is_finished()) {
            assert!(start.elapsed() < Duration::from_secs(60), "a change woke nobody");
            std::thread::sleep(Duration::from_millis(1));
        }
        players.into_iter().for_each(|player| assert!(!player.join().unwrap().is_stopped()));
    }

    #[test]
    fn memory_of_another_size_is_not_attached() {
        let long = Memfd::create("long", 8192).unwrap();
        assert!(Steering::attach(&long.id()).is_err());
    }

    #[test]
    fn the_first_failure_is_the_one_reported() {
        let control = Control::new().unwrap();
        control.fail("peer gone");
        control.fail("server gone");
        assert!(control.is_stopped());
        assert_eq!((control.take_failure(), control.take_failure()), (Some("peer gone"), None));
    }
}
