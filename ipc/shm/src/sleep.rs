//! Sleeping until another thread or process publishes something, and waking who sleeps: the only futex of the workspace.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `sleeping` | the consumer | producers | **W1**: publish, [`light_barrier`], load `sleeping` / store `sleeping`, [`heavy_barrier`], look once more: either the producer sees the flag or the consumer sees what was published |
//! | `wakes` | producers, `fetch_add` | the consumer | **W2**: a producer that sees the flag changes the word before it wakes, and the consumer sleeps only while the word is what it was before the flag went up |
//!
//! In the steady state nobody writes either word, so a producer pays one load of a line that stays in its cache.
//!
//! A consumer that is stopped or killed in its sleep leaves `sleeping` up, which costs each producer a system call per message and nothing
//! else. Who writes garbage here can delay a wake-up to the end of a [`SLICE`].

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering, heavy_barrier, light_barrier};

/// W3: how long a waiter sleeps at most before it looks by itself for what wakes nobody: a dead peer, or garbage in the words.
pub const SLICE: Duration = Duration::from_millis(100);
/// The same where the system has no membarrier(2), so that a wake-up may be missed.
const SHORT_SLICE: Duration = Duration::from_millis(1);

/// The two words, 8 B, aligned to 4. Zeroed bytes are "nobody sleeps". One consumer sleeps on them; any number of producers wake it.
#[derive(Debug)]
#[repr(C)]
pub struct Sleep {
    wakes: AtomicU32,
    sleeping: AtomicU32,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Sleep>() == 8 && align_of::<Sleep>() == 4);
    assert!(std::mem::offset_of!(Sleep, wakes) == 0 && std::mem::offset_of!(Sleep, sleeping) == 4);
};

/// What a sleeper waits for.
pub trait Watch {
    /// Asks producers to announce what they publish from now on, where they do not always: see [`HotSet::arm`](crate::ready::HotSet::arm).
    /// A barrier follows.
    fn arm(&mut self) {}

    /// Whether there is something to wake up for. `is_told`: the barrier is done, so from now on producers announce and wake. Otherwise
    /// they may do neither.
    fn look(&mut self, is_told: bool) -> bool;

    /// After a sleep that nothing ended: looks for what wakes nobody, and says whether it is something to wake up for.
    fn check(&mut self) -> bool {
        false
    }
}

impl Default for Sleep {
    fn default() -> Self {
        Self { wakes: AtomicU32::new(0), sleeping: AtomicU32::new(0) }
    }
}

impl Sleep {
    /// Producer: wakes the consumer if it sleeps. Call it after publishing.
    #[inline(always)]
    pub fn wake(&self) {
        // W1
        light_barrier();
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            self.wake_up();
        }
    }

    #[cold]
    fn wake_up(&self) {
        // W2
        self.wakes.fetch_add(1, Ordering::Release);
        futex_wake(&self.wakes);
    }

    /// Consumer: looks once more and, if there is nothing, sleeps until it is woken, at most for `longest`. `true`: there was something.
    /// `false`: it slept; look again.
    pub fn sleep(&self, longest: Duration, watch: &mut impl Watch) -> bool {
        // W2
        let known = self.wakes.load(Ordering::Acquire);
        self.sleeping.store(1, Ordering::Relaxed);
        watch.arm();
        // W1
        let is_told = heavy_barrier();
        let found = watch.look(is_told);
        if !found {
            futex_wait(&self.wakes, known, if is_told { longest } else { longest.min(SHORT_SLICE) });
        }
        self.sleeping.store(0, Ordering::Relaxed);
        found
    }

    /// Consumer: sleeps, in slices of at most `slice`, until `watch` finds something (`true`), or until `timeout` has passed (`false`;
    /// `None`: never).
    pub fn wait(&self, timeout: Option<Duration>, slice: Duration, watch: &mut impl Watch) -> bool {
        let start = Instant::now();
        while !watch.look(false) {
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(start.elapsed()));
            if left.is_zero() {
                return false;
            }
            if self.sleep(left.min(slice), watch) {
                return true;
            }
            if !watch.look(false) && watch.check() {
                return true;
            }
        }
        true
    }

    /// Makes the words fit for another consumer, the last one being gone.
    pub fn reset(&self) {
        self.sleeping.store(0, Ordering::Relaxed);
    }
}

/// Wakes who waits on `word`, in whatever process.
#[cfg(not(loom))]
fn futex_wake(word: &AtomicU32) {
    // SAFETY: the address is valid; the kernel only looks for sleepers on it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(not(loom))]
fn futex_wait(word: &AtomicU32, expected: u32, longest: Duration) {
    let seconds = longest.as_secs().min(i32::MAX as u64);
    let timeout = libc::timespec { tv_sec: seconds as _, tv_nsec: longest.subsec_nanos() as _ };
    // SAFETY: both addresses are valid for the call. Any return is only a reason to look again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout) };
}

#[cfg(loom)]
fn futex_wake(_: &AtomicU32) {}

/// As if time stood still: a wake-up that is lost is a model that does not end.
#[cfg(loom)]
fn futex_wait(word: &AtomicU32, expected: u32, _: Duration) {
    while word.load(Ordering::Acquire) == expected {
        crate::sync::yield_now();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    struct Counter<'a> {
        published: &'a AtomicU64,
        taken: u64,
        checks: u32,
        gives_up_after: u32,
    }

    impl Watch for Counter<'_> {
        fn look(&mut self, _: bool) -> bool {
            self.published.load(Ordering::Acquire) > self.taken
        }
        fn check(&mut self) -> bool {
            self.checks += 1;
            self.checks == self.gives_up_after
        }
    }

    #[test]
    fn timeout_ends_a_wait_and_a_zero_one_only_looks() {
        let (sleep, published) = (Sleep::default(), AtomicU64::new(0));
        let mut watch = Counter { published: &published, taken: 0, checks: 0, gives_up_after: 0 };
        assert!(!sleep.wait(Some(Duration::ZERO), SLICE, &mut watch));
        assert_eq!(watch.checks, 0);
        assert!(!sleep.wait(Some(Duration::from_millis(5)), Duration::from_millis(1), &mut watch));
        assert!(watch.checks > 0);
        published.store(1, Ordering::Release);
        assert!(sleep.wait(Some(Duration::ZERO), SLICE, &mut watch));
    }

    #[test]
    fn what_wakes_nobody_is_found_after_a_slice() {
        let (sleep, published) = (Sleep::default(), AtomicU64::new(0));
        let mut watch = Counter { published: &published, taken: 0, checks: 0, gives_up_after: 3 };
        assert!(sleep.wait(None, Duration::from_millis(1), &mut watch));
        assert_eq!(watch.checks, 3);
    }

    /// One slice is longer than anybody waits for a test, so a wake-up that is lost is a hang.
    #[test]
    fn two_that_wait_for_each_other_lose_no_wake_up() {
        const ROUNDS: u64 = 20_000;
        let ends: Arc<[(Sleep, AtomicU64); 2]> = Arc::default();
        let play = |own: usize| {
            let ends = Arc::clone(&ends);
            std::thread::spawn(move || {
                for round in 0..ROUNDS {
                    let (mine, other) = (&ends[own], &ends[1 - own]);
                    if own == 0 {
                        other.1.fetch_add(1, Ordering::Release);
                        other.0.wake();
                    }
                    let mut watch = Counter { published: &mine.1, taken: round, checks: 0, gives_up_after: 0 };
                    assert!(mine.0.wait(None, Duration::from_secs(3600), &mut watch));
                    if own == 1 {
                        other.1.fetch_add(1, Ordering::Release);
                        other.0.wake();
                    }
                }
            })
        };
        let players = [play(0), play(1)];
        let start = Instant::now();
        while !players.iter().all(|player| player.is_finished()) {
            assert!(start.elapsed() < Duration::from_secs(60), "a wake-up was lost");
            std::thread::sleep(Duration::from_millis(1));
        }
        players.into_iter().for_each(|player| player.join().unwrap());
    }
}

/// W1 and W2: a consumer is woken by what is published, at whatever point it falls asleep, and falls asleep again.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    struct Count<'a>(&'a AtomicU32, u32);

    impl Watch for Count<'_> {
        fn look(&mut self, _: bool) -> bool {
            self.0.load(Ordering::Acquire) >= self.1
        }
    }

    #[test]
    fn loom_a_sleeper_is_woken_by_what_is_published() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Arc::new((Sleep::default(), AtomicU32::new(0)));
            let also_shared = Arc::clone(&shared);
            let producer = loom::thread::spawn(move || {
                for _ in 0..2 {
                    also_shared.1.fetch_add(1, Ordering::Release);
                    also_shared.0.wake();
                }
            });
            for wanted in 1..=2 {
                assert!(shared.0.wait(None, SLICE, &mut Count(&shared.1, wanted)));
            }
            producer.join().unwrap();
        });
    }
}
