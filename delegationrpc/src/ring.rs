//! The ring: one word per position, written by all clients, emptied by the server.
//!
//! A request is written to a slot of the client's own *before* it is announced here, by one CAS of one word. So nothing in the ring is
//! ever half-done: a client stopped or killed at any instruction has announced its request or has not, and nobody waits for it.
//!
//! | word | transition | by | pairing |
//! |---|---|---|---|
//! | `words[p % depth]` | `free(lap)` -> `full(lap, name)` | a client, CAS | **D1**: Release / Acquire load of the server: the named request is complete |
//! | | `full(lap, name)` -> `free(lap + 1)` | the server, store | **D2**: Release / Acquire load of a client: nothing but the word hands over |
//! | `head` | any -> a position | clients, store | a hint: where to try first |
//! | `tail` | up | the server, store | **D3**: Release / Acquire: everything below was taken |
//!
//! Invariants, `lap(p) = p / depth`:
//! - **I1** Positions are announced without gaps: a client announces `p` only after it saw `p - 1` announced or taken in the lap before, or
//!   started at `tail` and saw every position from there to `p`. So the server, going up, misses none.
//! - **I2** `head` and `tail` are only hints to a client: whatever they hold (a stopped client may store an old `head` much later, a broken
//!   one anything), I1 holds, because the words decide.
//! - **I3** The lap in a word has 24 bits, so a CAS can be fooled only by a client stopped for exactly a multiple of 2^24 laps; what
//!   it then announces, it announces at a free position.
//! - **I4** Garbage that a broken client writes into words, `head` or `tail` can cost calls that are announced into it, and is put right by the
//!   server as it comes by ([`Cursor::keep_order`]); it never stops the server or later calls.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use shm::sync::{AtomicU64, Ordering};

/// Bits of a client's number in a word.
const CLIENT_BITS: u32 = 12;
/// Bits of its generation.
const GENERATION_BITS: u32 = 12;
/// Bits of the slot.
const SLOT_BITS: u32 = 15;
const FULL: u64 = 1 << (CLIENT_BITS + GENERATION_BITS + SLOT_BITS);
const LAP_SHIFT: u32 = CLIENT_BITS + GENERATION_BITS + SLOT_BITS + 1;
const LAP_MASK: u64 = u64::MAX >> LAP_SHIFT;

const _: () = assert!(64 - LAP_SHIFT == 24);

/// Which request a word announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    /// The client's number.
    pub(crate) client: usize,
    /// The low 12 bits of the client's generation. They tell it from earlier clients of that number well enough: a word does not stay in
    /// the ring while thousands of clients come and go, since the server must poll for each.
    pub(crate) generation: u32,
    /// Which of the client's slots.
    pub(crate) slot: usize,
}

impl Name {
    fn bits(self) -> u64 {
        let low = |value: u64, bits: u32| value & ((1 << bits) - 1);
        low(self.client as u64, CLIENT_BITS) << (GENERATION_BITS + SLOT_BITS)
            | low(u64::from(self.generation), GENERATION_BITS) << SLOT_BITS
            | low(self.slot as u64, SLOT_BITS)
    }

    fn of_bits(word: u64) -> Self {
        let field = |shift: u32, bits: u32| word >> shift & ((1 << bits) - 1);
        Self {
            client: field(GENERATION_BITS + SLOT_BITS, CLIENT_BITS) as usize,
            generation: field(SLOT_BITS, GENERATION_BITS) as u32,
            slot: field(0, SLOT_BITS) as usize,
        }
    }

    /// Whether the client it names has this generation, as far as the word can tell.
    pub(crate) fn is_of(self, generation: u32) -> bool {
        (self.generation ^ generation) & ((1 << GENERATION_BITS) - 1) == 0
    }
}

/// A ring word, relative to the position one looks at it from.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// Free for this position.
    Free,
    /// Announced at this position.
    Full(Name),
    /// Still in an earlier lap: the server has not taken what is here.
    Earlier,
    /// Already in a later lap: this position was taken long ago.
    Later,
}

fn free(lap: u64) -> u64 {
    (lap & LAP_MASK) << LAP_SHIFT
}

fn full(lap: u64, name: Name) -> u64 {
    free(lap) | FULL | name.bits()
}

fn see(word: u64, lap: u64) -> Seen {
    let laps_ahead = (word >> LAP_SHIFT).wrapping_sub(lap) & LAP_MASK;
    match laps_ahead {
        0 if word & FULL != 0 => Seen::Full(Name::of_bits(word)),
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

impl<'a> Ring<'a> {
    pub(crate) fn new(head: &'a AtomicU64, tail: &'a AtomicU64, words: &'a [AtomicU64]) -> Self {
        debug_assert!(words.len().is_power_of_two());
        Self { head, tail, words: NonNull::from(words).cast(), depth: words.len() as u64, _words: PhantomData }
    }

    fn word(&self, position: u64) -> &'a AtomicU64 {
        // SAFETY: `words` had `depth` elements, a power of two, for the lifetime 'a.
        unsafe { self.words.add((position & (self.depth - 1)) as usize).as_ref() }
    }

    fn lap(&self, position: u64) -> u64 {
        position >> self.depth.trailing_zeros()
    }

    fn look(&self, position: u64) -> (u64, Seen) {
        // D1 for the server, D2 for clients.
        let word = self.word(position).load(Ordering::Acquire);
        (word, see(word, self.lap(position)))
    }

    /// Announces `name` at the first free position. The named request must be complete.
    pub(crate) fn announce(&self, name: Name) -> Result<(), Full> {
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
                    let ours = full(self.lap(position), name);
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

/// The server's place in the ring.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// The next position to take.
    next: u64,
    /// Positions below are free again.
    released: u64,
    /// Polls that found nothing, for [`Cursor::keep_order`].
    quiet_polls: u64,
}

/// Polls without a request between two looks for a gap.
const POLLS_PER_PROBE: u64 = 64;
/// Most words that a server looks at between two sleeps.
const PROBES_PER_SLEEP: u64 = 4096;

impl Cursor {
    /// Takes the next announced name. At most a ring's worth can be taken and not released: the word of a further position still is
    /// that of the lap before.
    #[inline]
    pub(crate) fn take(&mut self, ring: &Ring<'_>) -> Option<Name> {
        if self.room(ring) == 0 {
            return None;
        }
        let (_, Seen::Full(name)) = ring.look(self.next) else { return None };
        self.next = self.next.wrapping_add(1);
        Some(name)
    }

    fn room(&self, ring: &Ring<'_>) -> u64 {
        ring.depth - self.next.wrapping_sub(self.released)
    }

    /// Number of names that can be taken, looking at no more than `limit`; each goes to `f`.
    #[inline]
    pub(crate) fn available(&self, ring: &Ring<'_>, limit: usize, f: impl FnMut(Name)) -> usize {
        let limit = self.room(ring).min(limit as u64);
        let name_at = |ahead: u64| match ring.look(self.next.wrapping_add(ahead)).1 {
            Seen::Full(name) => Some(name),
            _ => None,
        };
        (0..limit).map_while(name_at).map(f).count()
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

    /// Puts right what only a broken client can have damaged, so that the others can go on: the next word, `tail`, and gaps. For polls that
    /// find nothing, when everything taken is released; nearly always two loads of lines that are at hand.
    #[inline]
    pub(crate) fn keep_order(&mut self, ring: &Ring<'_>) {
        if let (garbage, Seen::Earlier | Seen::Later) = ring.look(self.next) {
            // Whether it succeeds or the word has changed meanwhile: the next poll looks again.
            let free = free(ring.lap(self.next));
            let _ = ring.word(self.next).compare_exchange(garbage, free, Ordering::AcqRel, Ordering::Relaxed);
        }
        if ring.tail.load(Ordering::Relaxed) != self.released {
            ring.tail.store(self.released, Ordering::Release);
        }
        self.quiet_polls = self.quiet_polls.wrapping_add(1);
        if self.quiet_polls % POLLS_PER_PROBE == 0 {
            self.close_gap(ring, self.quiet_polls / POLLS_PER_PROBE % ring.depth);
        }
    }

    /// As [`keep_order`](Self::keep_order), of a server that is about to sleep and will not be polled: it looks for gaps at once.
    pub(crate) fn keep_order_asleep(&mut self, ring: &Ring<'_>) {
        self.keep_order(ring);
        for _ in 0..ring.depth.min(PROBES_PER_SLEEP) {
            self.quiet_polls = self.quiet_polls.wrapping_add(POLLS_PER_PROBE);
            self.close_gap(ring, self.quiet_polls / POLLS_PER_PROBE % ring.depth);
        }
    }

    /// Skips free positions before one that is announced `ahead` of the next. By I1 there are none, unless garbage in the words made a client
    /// announce too far ahead: its call would wait for others to fill the gap. (Seeing it announced makes everything before it visible.)
    #[cold]
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
