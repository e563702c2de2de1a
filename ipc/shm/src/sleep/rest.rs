//! Resting: what a driver does that has all peers in its own thread, and so cannot sleep.
//!
//! **W5**: a sleeper that rests has its flag at [`RESTING`], and its waker here, under the address of its word. The producer that sees the flag calls
//! the waker in the place of the kernel. Both are in one thread, so no barrier is needed, and nobody else finds the waker.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Duration;

use super::{Sleeper, Watch, Word, join};
use crate::sync::AtomicU32;

/// `Sleep::sleeping`: its consumer rests in the thread that knows its waker.
pub(super) const RESTING: u32 = 2;

thread_local! {
    /// By the address of the word.
    static WAKERS: RefCell<BTreeMap<usize, Vec<Waker>>> = const { RefCell::new(BTreeMap::new()) };
}

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

/// In the place of [`wait`](super::wait) for a driver that runs many consumers and all of their producers in one thread, by its own clock. Asks for
/// `waker` to be called when there is something to wake up for in any of `parts`: once, in the producer's call that makes it so. `None`: there is
/// something now. Otherwise the time after which to look again in any case: until the earliest deadline, or for what wakes nobody.
///
/// A producer of another thread or process finds no waker: its consumers must not rest.
pub fn rest<'a>(parts: impl IntoIterator<Item = &'a mut (dyn Sleeper + 'a)>, waker: &Waker) -> Option<Duration> {
    let mut look_again = None;
    join(parts, &mut |watch| look_again = rest_on(watch, waker));
    look_again
}

fn rest_on(watch: &mut dyn Watch, waker: &Waker) -> Option<Duration> {
    watch.words(&mut |word| word.leave(waker));
    watch.arm();
    if watch.look(true) {
        watch.words(&mut |word| word.raise(0));
        return None;
    }
    Some(watch.slice())
}

impl Word<'_> {
    /// Has `waker` called when the word is changed. A [`Sleep`](super::Sleep) has one consumer, a [`Bell`](super::Bell) any number.
    fn leave(&self, waker: &Waker) {
        let is_shared = self.sleeping.is_none();
        let waker = waker.clone();
        // Wakers are cloned before the borrow and dropped behind it: they may be anything.
        let _before = WAKERS.try_with(|wakers| {
            let mut wakers = wakers.borrow_mut();
            let of_word = wakers.entry(address(self.wakes)).or_default();
            let (mut kept, before): (Vec<_>, Vec<_>) =
                std::mem::take(of_word).into_iter().partition(|known| is_shared && !known.will_wake(&waker));
            kept.push(waker);
            *of_word = kept;
            before
        });
        self.raise(RESTING);
    }
}

/// Calls the wakers that were left at a word. Whether there were any.
pub(super) fn wake(word: &AtomicU32) -> bool {
    let wakers = WAKERS.try_with(|wakers| wakers.borrow_mut().remove(&address(word))).ok().flatten();
    let is_anyone = wakers.is_some();
    wakers.into_iter().flatten().for_each(Waker::wake);
    is_anyone
}
