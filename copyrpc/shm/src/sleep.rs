//! Sleeping until another thread or process publishes something, and waking sleepers. No other
//! crate of the workspace calls futex(2).
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `sleeping` | the consumer | producers | **W1**: publish, [`LightBarrier`], load `sleeping` / store `sleeping`, [`heavy_barrier`], check once more: either the producer sees the flag or the consumer sees what was published |
//! | `wakes` | producers, `fetch_add` | the consumer | **W2**: a producer that sees the flag changes the word before it wakes, and the consumer sleeps only while the word is what it was before the flag went up |
//! | `rings` | the ringer, `fetch_add` | sleepers | **W4**: a [`Bell`] has no flag: it changes the word and wakes at every ring, and a listener sleeps only while the word is what it was when it began to listen |
//!
//! In the steady state `sleeping` and `wakes` are not written, so a producer pays one load of a
//! line that stays in its cache.
//!
//! A consumer that is stopped or killed in its sleep leaves `sleeping` set, which costs each
//! producer a system call per message. Garbage in the words can delay a wake-up to the end of a
//! [`SLICE`].
//!
//! A consumer of several things sleeps on the words of all at once ([`wait`]). It sets every flag
//! before the one barrier and checks everything after it, so W1 and W2 hold for each of its words.
//! A producer touches only the words of its own thing.

mod alarm;
mod futex;
mod notifier;
mod rest;
mod watches;

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, FIRST, LightBarrier, Ordering, heavy_barrier, yield_now};
pub use alarm::Alarm;
use futex::Known;
pub use notifier::Notifier;
use rest::RESTING;
pub use rest::rest;
pub use watches::{Due, Listener, Look};

/// W3 (`docs/shm-protocols.md`): maximum sleep of a waiter before it checks for events that send no
/// wake-up: a dead peer, or garbage in the words.
pub const SLICE: Duration = Duration::from_millis(100);
/// Maximum sleep that may miss a wake-up, because the system has no membarrier(2), or because the
/// thread waits for more words than one futex_waitv(2) takes (128; one before Linux 5.16).
const SHORT_SLICE: Duration = Duration::from_millis(1);

/// Time between two polls of things whose completions wake no sleeper, such as the queues of a
/// library.
pub const POLL_SLICE: Duration = Duration::from_micros(100);

/// The two words of a sleeper, 8 B, aligned to 4. Zeroed bytes are "no sleeper". One consumer
/// sleeps on them; any number of producers wake it.
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
    assert!(size_of::<Bell>() == 4);
};

impl Default for Sleep {
    fn default() -> Self {
        Self {
            wakes: AtomicU32::new(FIRST),
            sleeping: AtomicU32::new(0),
        }
    }
}

impl Sleep {
    /// Producer: wakes the consumer if it sleeps. Call it after publishing.
    #[inline(always)]
    pub fn wake(&self) {
        self.wake_behind(LightBarrier::of_process());
    }

    /// Like [`wake`](Self::wake), for a caller that keeps the [`LightBarrier`] of its process.
    #[inline(always)]
    pub fn wake_behind(&self, barrier: LightBarrier) {
        // W1: between publishing and the load of the flag.
        barrier.execute();
        if self.sleeping.load(Ordering::Relaxed) != 0 {
            self.wake_up();
        }
    }

    #[cold]
    fn wake_up(&self) {
        // W2: changes the word before the wake-up.
        self.wakes.fetch_add(1, Ordering::Release);
        // W5 (module `rest`): a sleeper that rests is woken by its waker and not by the kernel.
        if self.sleeping.load(Ordering::Relaxed) == RESTING && rest::wake(&self.wakes) {
            self.sleeping.store(0, Ordering::Relaxed);
        } else {
            futex::wake(&self.wakes);
        }
    }

    /// Consumer: returns the word for its [`Watch`].
    #[must_use]
    pub const fn word(&self) -> Word<'_> {
        Word {
            wakes: &self.wakes,
            sleeping: Some(&self.sleeping),
        }
    }

    /// Resets the words for the next consumer, when the previous consumer is gone.
    pub fn reset(&self) {
        self.sleeping.store(0, Ordering::Relaxed);
    }
}

/// A word of 4 B that one thread rings, and to which any number of threads listen. Listeners need
/// no write access. Zeroed bytes are "never rung". Every ring is a system call, so a bell is for
/// rare events.
#[derive(Debug)]
#[repr(transparent)]
pub struct Bell {
    rings: AtomicU32,
}

impl Default for Bell {
    fn default() -> Self {
        Self {
            rings: AtomicU32::new(FIRST),
        }
    }
}

impl Bell {
    /// Wakes all listeners. Call it after publishing.
    pub fn ring(&self) {
        // W4: changes the word before the wake-up.
        self.rings.fetch_add(1, Ordering::Release);
        // W5: wakes the listeners that rest.
        rest::wake(&self.rings);
        futex::wake(&self.rings);
    }

    /// Returns a listener that is woken by every ring from now on. Data that were published before
    /// earlier rings are visible.
    #[must_use]
    pub fn listen(&self) -> Listener<'_> {
        Listener::new(self)
    }
}

/// A word, of a [`Sleep`] or of a [`Bell`], whose change ends a sleep.
#[derive(Debug, Clone, Copy)]
pub struct Word<'a> {
    wakes: &'a AtomicU32,
    /// The flag by which producers know that they must change the word; `None`: they always change
    /// it.
    sleeping: Option<&'a AtomicU32>,
}

impl Word<'_> {
    fn raise(&self, up: u32) {
        if let Some(sleeping) = self.sleeping {
            sleeping.store(up, Ordering::Relaxed);
        }
    }
}

/// The condition that a sleeper waits for.
pub trait Watch {
    /// Shows the words through which producers wake the sleeper: always the same words, in the same
    /// order. There may be none, if [`slice`](Self::slice) is short.
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>));

    /// Makes producers announce their messages from now on, if they do not always announce them:
    /// see [`HotSet::arm`](crate::ready::HotSet::arm). A barrier follows.
    fn arm(&mut self) {}

    /// Returns whether there is something to wake up for. If `is_told`, the barrier is done, so
    /// from now on producers announce and wake; otherwise they may do neither.
    fn look(&mut self, is_told: bool) -> bool;

    /// Returns the maximum sleep before [`check`](Self::check). With zero the thread does not
    /// sleep.
    fn slice(&mut self) -> Duration {
        SLICE
    }

    /// Checks, after a sleep without a wake-up, for events that send no wake-up. Returns whether
    /// there is such an event. It may be called before the slice is over, if a condition that is
    /// [joined](join) with this condition has a shorter slice.
    fn check(&mut self) -> bool {
        false
    }
}

/// A thing to sleep on, alone or with others.
pub trait Sleeper {
    /// Calls `then` once, with the condition to wait for.
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch));
}

impl<W: Watch> Sleeper for W {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(self);
    }
}

impl<S: Sleeper> Sleeper for copyrpc_calls::Server<S> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        (**self).with_watch(then);
    }
}

/// Joins several conditions: calls `then` with the condition that any of `parts` is met.
pub fn join<'a>(
    parts: impl IntoIterator<Item = &'a mut (dyn Sleeper + 'a)>,
    then: &mut dyn FnMut(&mut dyn Watch),
) {
    watches::link(&mut parts.into_iter(), &mut Due(Duration::MAX), then);
}

/// Consumer: sleeps until the condition of any of `parts` holds (`true`), or until `timeout` has
/// passed (`false`; `None`: never).
///
/// All parts belong to the calling thread, which alone sleeps on them. The thread is woken through
/// any of their words. One sleep takes at most 128 words, and more than one word only where the
/// system has futex_waitv(2), Linux 5.16. Beyond that, and without membarrier(2), the thread checks
/// all parts every millisecond.
pub fn wait<'a>(
    parts: impl IntoIterator<Item = &'a mut (dyn Sleeper + 'a)>,
    timeout: Option<Duration>,
) -> bool {
    let mut found = false;
    join(parts, &mut |watch| found = wait_for(watch, timeout));
    found
}

fn wait_for(watch: &mut dyn Watch, timeout: Option<Duration>) -> bool {
    let start = Instant::now();
    while !watch.look(false) {
        let left = timeout.map_or(Duration::MAX, |timeout| {
            timeout.saturating_sub(start.elapsed())
        });
        if left.is_zero() {
            return false;
        }
        let slice = watch.slice();
        if slice.is_zero() {
            yield_now();
        } else if sleep_once(watch, left.min(slice)) {
            return true;
        }
        if !watch.look(false) && watch.check() {
            return true;
        }
    }
    true
}

/// Consumer: checks once more and, if there is nothing, sleeps until it is woken, at most for
/// `longest`. Returns whether there was something; after `false` the thread has slept, and the
/// caller checks again.
pub fn sleep_once(watch: &mut dyn Watch, longest: Duration) -> bool {
    let mut known = Known::default();
    watch.words(&mut |word| {
        // W2, W4. A flag is raised only if the thread sleeps on its word.
        if known.note(word.wakes) {
            word.raise(1);
        }
    });
    watch.arm();
    // W1: between raising the flags and the last check.
    let is_told = heavy_barrier();
    let found = watch.look(is_told);
    if !found {
        known.sleep(
            watch,
            if is_told {
                longest
            } else {
                longest.min(SHORT_SLICE)
            },
        );
    }
    watch.words(&mut |word| word.raise(0));
    found
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
