//! Resting: the waiting of a driver that has all peers in its own thread, and so cannot sleep.
//!
//! **W5**: the flag of a sleeper that rests is [`RESTING`], and its waker is kept in this module,
//! by the address of its word. The producer that sees the flag calls the waker instead of waking
//! through the kernel. Both are in one thread, so no barrier is needed, and no other thread finds
//! the waker.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::task::Waker;
use std::time::Duration;

use super::{Sleeper, Watch, Word, join};
use crate::sync::AtomicU32;

/// Value of `Sleep::sleeping` while the consumer rests, in the thread that has its waker.
pub(super) const RESTING: u32 = 2;

thread_local! {
    /// The wakers, by the address of the word.
    static WAKERS: RefCell<HashMap<usize, Left, BuildHasherDefault<Spread>>> = RefCell::default();
}

/// The wakers of the consumers that rest on one word, nearly always a single one.
struct Left {
    waker: Waker,
    others: Vec<Waker>,
}

/// A hasher for addresses of this process. No peer chooses them, so a simple hash suffices.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_usize(usize::from(*byte)));
    }

    fn write_usize(&mut self, number: usize) {
        // 2^64 / golden ratio. The upper half of the product depends on all bits of the address;
        // the rotation makes it the lower half.
        self.0 = (self.0 ^ number as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

/// Replaces [`wait`](super::wait) in a driver that runs many consumers and all of their producers
/// in one thread, with its own clock. Registers `waker`: the next producer that publishes something
/// in any of `parts` calls it. Returns `None` if there is something already. Otherwise returns the
/// time after which to check again in any case: the time until the earliest deadline, or until the
/// check for events that send no wake-up.
///
/// A producer in another thread or process finds no waker, so the consumers of such a producer must
/// not rest.
pub fn rest<'a>(
    parts: impl IntoIterator<Item = &'a mut (dyn Sleeper + 'a)>,
    waker: &Waker,
) -> Option<Duration> {
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
    /// Registers `waker`, which is called when a producer changes the word. At a
    /// [`Sleep`](super::Sleep), which has one consumer, `waker` replaces the earlier waker; at a
    /// [`Bell`](super::Bell), it is added to the others.
    fn leave(&self, waker: &Waker) {
        let (is_shared, address) = (self.sleeping.is_none(), address(self.wakes));
        let is_known = |left: &Left| {
            left.waker.will_wake(waker)
                || is_shared && left.others.iter().any(|known| known.will_wake(waker))
        };
        let is_left = WAKERS.try_with(|wakers| wakers.borrow().get(&address).is_some_and(is_known));
        if is_left == Ok(false) {
            // Wakers are cloned before the borrow and dropped after it: their code may do anything.
            let waker = waker.clone();
            let _before = WAKERS.try_with(|wakers| match wakers.borrow_mut().entry(address) {
                Entry::Occupied(mut left) if is_shared => {
                    left.get_mut().others.push(waker);
                    None
                }
                Entry::Occupied(mut left) => Some(left.insert(Left {
                    waker,
                    others: Vec::new(),
                })),
                Entry::Vacant(place) => {
                    place.insert(Left {
                        waker,
                        others: Vec::new(),
                    });
                    None
                }
            });
        }
        self.raise(RESTING);
    }
}

/// Calls the wakers that were registered for a word. Returns whether there were any.
pub(super) fn wake(word: &AtomicU32) -> bool {
    let left = WAKERS
        .try_with(|wakers| wakers.borrow_mut().remove(&address(word)))
        .ok()
        .flatten();
    let is_anyone = left.is_some();
    if let Some(Left { waker, others }) = left {
        waker.wake();
        others.into_iter().for_each(Waker::wake);
    }
    is_anyone
}
