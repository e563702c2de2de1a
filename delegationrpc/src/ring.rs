//! The ring: one word per position, written by all clients, emptied by the server. A word names a client that has begun to call.
//!
//! A request lies complete in the client's own lane *before* the client is announced here, by one CAS of one word. So nothing in the ring is
//! ever half-done: a client stopped or killed at any instruction has announced itself or has not, and nobody waits for it. While the server
//! polls the client's lane anyway, which is as long as it finds something there, nothing is announced: the flag `armed` of the client's seat
//! says so ([`shm::ready`], R1). The client lowers the flag before it announces itself, so that it does so once.
//!
//! | word | transition | by | pairing |
//! |---|---|---|---|
//! | `words[p % depth]` | `free(lap)` -> `full(lap, client)` | a client, CAS | **D1**: Release / Acquire load of the server: what the client published before is seen |
//! | | `full(lap, client)` -> `free(lap + 1)` | the server, store | **D2**: Release / Acquire load of a client: nothing but the word hands over |
//! | `head` | any -> a position | clients, store | a hint: where to try first |
//! | `tail` | up | the server, store | **D3**: Release / Acquire: everything below was taken |
//!
//! Invariants, `lap(p) = p / depth` (`docs/shm-protocols.md` has them all):
//! - **I1** Positions are announced without gaps: a client announces `p` only after it saw `p - 1` announced or taken in the lap before, or
//!   started at `tail` and saw every position from there to `p`. So the server, going up, misses none.
//! - **I2** `head` and `tail` are only hints to a client: whatever they hold (a stopped client may store an old `head` much later, a broken
//!   one anything), I1 holds, because the words decide.
//! - **I3** The lap in a word has 51 bits, so no CAS is fooled by a word of another lap.
//! - **I4** Garbage that a broken client writes into words, `head` or `tail` is put right by the server as it comes by
//!   ([`Cursor::keep_order`]). An announcement that is lost to it, or that found the ring full, leaves the flag down, which the server finds
//!   when it goes round the seats (R4, [`HotSet::mend`](shm::ready::HotSet::mend)): it costs a delay, and no call.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use shm::ready::{ARMED, HOT, Wakes};
use shm::sleep::Sleep;
use shm::sync::{AtomicU32, AtomicU64, Ordering, light_barrier};

/// Bits of a client's number in a word.
const CLIENT_BITS: u32 = 12;
const FULL: u64 = 1 << CLIENT_BITS;
const LAP_SHIFT: u32 = CLIENT_BITS + 1;
const LAP_MASK: u64 = u64::MAX >> LAP_SHIFT;

const _: () = assert!(64 - LAP_SHIFT == 51 && shm::clients::CLIENTS_MAX <= 1 << CLIENT_BITS);

/// A ring word, relative to the position one looks at it from.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// Free for this position.
    Free,
    /// Client `.0` is announced at this position.
    Full(usize),
    /// Still in an earlier lap: the server has not taken what is here.
    Earlier,
    /// Already in a later lap: this position was taken long ago.
    Later,
}

fn free(lap: u64) -> u64 {
    (lap & LAP_MASK) << LAP_SHIFT
}

fn full(lap: u64, client: usize) -> u64 {
    free(lap) | FULL | client as u64 & (FULL - 1)
}

#[inline(always)]
fn see(word: u64, lap: u64) -> Seen {
    let laps_ahead = (word >> LAP_SHIFT).wrapping_sub(lap) & LAP_MASK;
    match laps_ahead {
        0 if word & FULL != 0 => Seen::Full((word & (FULL - 1)) as usize),
        // The low bits of a free word are zero; anything else is no word of ours.
        0 if word == free(lap) => Seen::Free,
        0 => Seen::Earlier,
        n if n <= LAP_MASK / 2 => Seen::Later,
        _ => Seen::Earlier,
    }
}

/// The words of a ring in shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    head: &'a AtomicU64,
    tail: &'a AtomicU64,
    words: NonNull<AtomicU64>,
    depth: u64,
    _words: PhantomData<&'a [AtomicU64]>,
}

impl fmt::Debug for Ring<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("depth", &self.depth).finish_non_exhaustive()
    }
}

/// No position is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// Client, after publishing: whether the server does not poll its lane, and must be [notified](Ring::notify).
#[inline(always)]
pub(crate) fn is_armed(armed: &AtomicU32) -> bool {
    // R1
    light_barrier();
    armed.load(Ordering::Relaxed) == ARMED
}

impl<'a> Ring<'a> {
    pub(crate) fn new(head: &'a AtomicU64, tail: &'a AtomicU64, words: &'a [AtomicU64]) -> Self {
        debug_assert!(words.len().is_power_of_two());
        Self { head, tail, words: NonNull::from(words).cast(), depth: words.len() as u64, _words: PhantomData }
    }

    #[inline(always)]
    fn word(&self, position: u64) -> &'a AtomicU64 {
        // SAFETY: `words` had `depth` elements, a power of two, for the lifetime 'a.
        unsafe { self.words.add((position & (self.depth - 1)) as usize).as_ref() }
    }

    #[inline(always)]
    fn lap(&self, position: u64) -> u64 {
        position >> self.depth.trailing_zeros()
    }

    #[inline(always)]
    fn look(&self, position: u64) -> (u64, Seen) {
        // D1 for the server, D2 for clients.
        let word = self.word(position).load(Ordering::Acquire);
        (word, see(word, self.lap(position)))
    }

    /// Client: tells a server that does not poll its lane, and wakes it if it sleeps.
    pub(crate) fn notify(&self, client: usize, armed: &AtomicU32, server: &Sleep) {
        // Once is enough. If this client is stopped here, or the ring is full, the server finds the flag down (I4).
        armed.store(HOT, Ordering::Relaxed);
        // A full ring does not matter: see above.
        let _ = self.announce(client);
        server.wake();
    }

    /// Announces `client` at the first free position. What it has to say must be published.
    pub(crate) fn announce(&self, client: usize) -> Result<(), Full> {
        let mut position = self.head.load(Ordering::Relaxed);
        // I1: the position before it must be announced or taken, or the hint is wrong. (That of position 0 is as free in lap 0 as if it
        // had been taken in the lap before.)
        if matches!(self.look(position.wrapping_sub(1)).1, Seen::Free | Seen::Earlier) {
            // D3
            position = self.tail.load(Ordering::Acquire);
        }
        // From `tail` to the end of the ring, and as many CASes lost to others.
        for _ in 0..2 * self.depth {
            match self.look(position) {
                (seen, Seen::Free) => {
                    let ours = full(self.lap(position), client);
                    // D1; on failure somebody was faster, and the word says what to do.
                    if self.word(position).compare_exchange(seen, ours, Ordering::Release, Ordering::Relaxed).is_ok() {
                        self.head.store(position.wrapping_add(1), Ordering::Relaxed);
                        return Ok(());
                    }
                }
                (_, Seen::Full(_)) => position = position.wrapping_add(1),
                (_, Seen::Later) => {
                    // The server went past it. It frees words before it moves `tail`, so `tail` may be behind for a moment, and then the
                    // next position is the one; otherwise the hint was old, or wrong.
                    let tail = self.tail.load(Ordering::Acquire);
                    let is_near = position.wrapping_sub(tail) < self.depth;
                    position = if is_near { position.wrapping_add(1) } else { tail };
                }
                (_, Seen::Earlier) => {
                    // Full; unless a broken client has led `head` astray and left a gap, which is the next the server waits for (I1).
                    let tail = self.tail.load(Ordering::Acquire);
                    if tail == position || self.look(tail).1 != Seen::Free {
                        return Err(Full);
                    }
                    position = tail;
                }
            }
        }
        Err(Full)
    }
}

/// The announcements as a server takes them.
pub(crate) struct Announced<'a> {
    pub(crate) ring: Ring<'a>,
    pub(crate) cursor: &'a mut Cursor,
}

impl Wakes for Announced<'_> {
    #[inline(always)]
    fn drain(&mut self, f: impl FnMut(usize)) {
        if self.any() { self.take_all(f) } else { self.cursor.quiet(&self.ring) }
    }

    #[inline(always)]
    fn any(&self) -> bool {
        self.cursor.any(&self.ring)
    }
}

impl Announced<'_> {
    #[cold]
    fn take_all(&mut self, f: impl FnMut(usize)) {
        let Self { ring, cursor } = self;
        // At most a ring's worth: nothing is released meanwhile.
        std::iter::from_fn(|| cursor.take(ring)).for_each(f);
        cursor.release(ring);
    }
}

/// The server's place in the ring.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// The next position to take.
    next: u64,
    /// Positions below are free again.
    released: u64,
    /// Polls that found nothing.
    quiet_polls: u64,
}

/// Polls that find nothing between two looks for damage.
const POLLS_PER_PROBE: u64 = 64;

impl Cursor {
    /// Takes the next announced client. At most a ring's worth can be taken and not released: the word of a further position still is
    /// that of the lap before.
    #[inline]
    pub(crate) fn take(&mut self, ring: &Ring<'_>) -> Option<usize> {
        let (_, Seen::Full(client)) = ring.look(self.next) else { return None };
        self.next = self.next.wrapping_add(1);
        Some(client)
    }

    /// Whether a client is announced.
    #[inline(always)]
    pub(crate) fn any(&self, ring: &Ring<'_>) -> bool {
        matches!(ring.look(self.next).1, Seen::Full(_))
    }

    /// Frees what was taken for the clients' next lap.
    #[inline]
    pub(crate) fn release(&mut self, ring: &Ring<'_>) {
        if self.released == self.next {
            return;
        }
        while self.released != self.next {
            let next_lap = ring.lap(self.released).wrapping_add(1);
            // D2
            ring.word(self.released).store(free(next_lap), Ordering::Release);
            self.released = self.released.wrapping_add(1);
        }
        // D3
        ring.tail.store(self.released, Ordering::Release);
    }

    /// Counts a poll that found nothing, and now and then [keeps order](Self::keep_order).
    #[inline(always)]
    fn quiet(&mut self, ring: &Ring<'_>) {
        self.quiet_polls = self.quiet_polls.wrapping_add(1);
        if self.quiet_polls % POLLS_PER_PROBE == 0 {
            self.keep_order(ring, self.quiet_polls / POLLS_PER_PROBE % ring.depth);
        }
    }

    /// Puts right what only a broken client can have damaged, so that the others can go on: the next word, `tail`, and a gap before the word that
    /// many places `ahead`. For when everything taken is released.
    #[cold]
    fn keep_order(&mut self, ring: &Ring<'_>, ahead: u64) {
        if let (garbage, Seen::Earlier | Seen::Later) = ring.look(self.next) {
            // Whether it succeeds or the word has changed meanwhile: a later poll looks again.
            let free = free(ring.lap(self.next));
            let _ = ring.word(self.next).compare_exchange(garbage, free, Ordering::AcqRel, Ordering::Relaxed);
        }
        if ring.tail.load(Ordering::Relaxed) != self.released {
            ring.tail.store(self.released, Ordering::Release);
        }
        self.close_gap(ring, ahead);
    }

    /// Skips free positions before one that is announced `ahead` of the next. By I1 there are none, unless garbage in the words made a client
    /// announce itself too far ahead. (Seeing it announced makes everything before it visible.)
    fn close_gap(&mut self, ring: &Ring<'_>, ahead: u64) {
        let announced = self.next.wrapping_add(ahead);
        if self.next != self.released || !matches!(ring.look(announced).1, Seen::Full(_)) {
            return;
        }
        while self.next != announced {
            let lap = ring.lap(self.next);
            let (skipped, taken) = (free(lap), free(lap.wrapping_add(1)));
            // D2; it fails where the position is announced after all.
            if ring.word(self.next).compare_exchange(skipped, taken, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                break;
            }
            self.next = self.next.wrapping_add(1);
        }
        self.released = self.next;
        ring.tail.store(self.released, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
