//! The ring: one word per position, written by all clients, emptied by the server. A full word has
//! the number of a client that has begun to call.
//!
//! A request is complete in the client's own lane *before* the client is announced in the ring, by
//! one CAS of one word. So the ring is consistent at any time: a client stopped or killed at any
//! instruction has announced itself or has not, and no other client waits for it. While the server
//! polls the client's lane anyway, which it does as long as it finds something in the lane, nothing
//! is announced: the flag `armed` of the client's entry shows that ([`copyrpc_shm::ready`], R1).
//! The client lowers the flag before it announces itself, so that it announces itself once.
//!
//! | word | transition | by | pairing |
//! |---|---|---|---|
//! | `words[p % depth]` | `free(lap)` -> `full(lap, client)` | a client, CAS | **D1**: Release / Acquire load of the server: the client's earlier writes are seen |
//! | | `full(lap, client)` -> `free(lap + 1)` | the server, store | **D2**: Release / Acquire load of a client: nothing but the word hands over |
//! | `head` | any -> a position | clients, store | a hint: where to try first |
//! | `tail` | up | the server, store | **D3**: Release / Acquire: everything below was taken |
//!
//! Invariants, `lap(p) = p / depth` (`docs/shm-protocols.md` has them all):
//! - **I1** Positions are announced without gaps: a client announces `p` only after it saw `p - 1`
//!   announced or taken in the lap before, or started at `tail` and saw every position from there
//!   to `p`. So the server, which takes positions in ascending order, misses none.
//! - **I2** `head` and `tail` are only hints to a client: whatever they contain (a stopped client
//!   may store an old `head` much later, and a broken client any value), I1 holds, because only the
//!   words count.
//! - **I3** The lap in a word has 51 bits, so a CAS for one lap fails on the word of another lap.
//! - **I4** Garbage that a broken client writes into words, `head` or `tail` is repaired by the
//!   server when it reaches the position ([`Ring::keep_order`]). After an announcement that is lost
//!   by garbage, or that found the ring full, the flag stays down. The server finds that in its
//!   sweep of the entries (R4, [`HotSet::mend`](copyrpc_shm::ready::HotSet::mend)): the call is
//!   late, and not lost.

use std::ptr::NonNull;

use copyrpc_shm::ready::{HOT, Wakes};
use copyrpc_shm::sync::{AtomicU32, AtomicU64, Ordering};
use ipc::{Announce, CLIENTS_MAX, OptionError};

const CLIENT_BITS: u32 = 12;
const FULL: u64 = 1 << CLIENT_BITS;
const LAP_SHIFT: u32 = CLIENT_BITS + 1;
const LAP_MASK: u64 = u64::MAX >> LAP_SHIFT;

const _: () = assert!(64 - LAP_SHIFT == 51 && CLIENTS_MAX <= 1 << CLIENT_BITS);

/// A ring word, relative to the position of the reader.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Free,
    /// Client `.0` is announced at this position.
    Full(usize),
    /// The word is of an earlier lap: the server has not taken it.
    Earlier,
    /// The word is of a later lap: this position was taken long ago.
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
        // The low bits of a free word are zero. Another word of this lap without `FULL` is garbage,
        // and is treated like a word of an earlier lap.
        0 if word == free(lap) => Seen::Free,
        0 => Seen::Earlier,
        n if n <= LAP_MASK / 2 => Seen::Later,
        _ => Seen::Earlier,
    }
}

const RING_DEPTH_MAX: usize = 1 << 27;
const LINE: usize = 64;
/// Offset of the words from `head`, in bytes: `head` and `tail` have a cache line each.
const WORDS: usize = 2 * LINE;

const _: () = assert!(cfg!(loom) || size_of::<AtomicU64>() == 8);

/// The ring of a server and its clients: the numbers of the clients that have begun to call.
#[derive(Debug)]
pub struct Ring {
    head: NonNull<AtomicU64>,
    tail: NonNull<AtomicU64>,
    words: NonNull<AtomicU64>,
    depth: u64,
    /// The server's next position to take.
    next: u64,
    /// The server has freed the positions below this position.
    released: u64,
    /// Number of the server's checks for gaps.
    probes: u64,
}

// SAFETY: a `Ring` consists of a view of shared atomics, which any thread may use, and of numbers
// that only its owner uses.
unsafe impl Send for Ring {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Full;

impl Ring {
    fn head(&self) -> &AtomicU64 {
        // SAFETY: `head` lies in the memory that `new` was given, which stays mapped as long as
        // this value is used.
        unsafe { self.head.as_ref() }
    }

    fn tail(&self) -> &AtomicU64 {
        // SAFETY: `tail` lies in the memory that `new` was given, which stays mapped as long as
        // this value is used.
        unsafe { self.tail.as_ref() }
    }

    #[inline(always)]
    fn word(&self, position: u64) -> &AtomicU64 {
        // SAFETY: the index is below `depth`, a power of two, and the memory that `new` was given
        // has `depth` words, which stay mapped as long as this value is used.
        unsafe {
            self.words
                .add((position & (self.depth - 1)) as usize)
                .as_ref()
        }
    }

    #[inline(always)]
    fn lap(&self, position: u64) -> u64 {
        position >> self.depth.trailing_zeros()
    }

    #[inline(always)]
    fn look(&self, position: u64) -> (u64, Seen) {
        // D1 for the server, D2 for clients: the writes before the word are visible.
        let word = self.word(position).load(Ordering::Acquire);
        (word, see(word, self.lap(position)))
    }
}

/// The client's side.
impl Ring {
    /// Announces `client` at the first free position. The client's request must be published.
    fn push(&self, client: usize) -> Result<(), Full> {
        let mut position = self.head().load(Ordering::Relaxed);
        // I1: the position before `position` must be announced or taken; otherwise the hint is
        // wrong. (The word before position 0 is the last word of the ring: in lap 0 it is free,
        // which counts as taken in the lap before.)
        if matches!(
            self.look(position.wrapping_sub(1)).1,
            Seen::Free | Seen::Earlier
        ) {
            // D3: all positions below `tail` were taken.
            position = self.tail().load(Ordering::Acquire);
        }
        // Enough steps to visit each position of the ring once, and to lose `depth` CASes to other
        // clients.
        for _ in 0..2 * self.depth {
            match self.look(position) {
                (seen, Seen::Free) => {
                    let ours = full(self.lap(position), client);
                    // D1: publishes the announcement. On failure another client was faster: the
                    // next read of the word decides.
                    if self
                        .word(position)
                        .compare_exchange(seen, ours, Ordering::Release, Ordering::Relaxed)
                        .is_ok()
                    {
                        self.head()
                            .store(position.wrapping_add(1), Ordering::Relaxed);
                        return Ok(());
                    }
                }
                (_, Seen::Full(_)) => position = position.wrapping_add(1),
                (_, Seen::Later) => {
                    // The server has passed this position. It frees words before it moves `tail`,
                    // so `tail` may be too low for a moment; then the next position is the right
                    // one. Otherwise the hint was old, or wrong, and the search continues at
                    // `tail`.
                    let tail = self.tail().load(Ordering::Acquire);
                    let is_near = position.wrapping_sub(tail) < self.depth;
                    position = if is_near {
                        position.wrapping_add(1)
                    } else {
                        tail
                    };
                }
                (_, Seen::Earlier) => {
                    // The ring is full, unless a broken client has stored a wrong `head` and so
                    // caused a gap. Then the server takes the position of the gap next (I1), so the
                    // search continues there.
                    let tail = self.tail().load(Ordering::Acquire);
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

/// The server's side.
impl Ring {
    /// Takes the next announced client. At most `depth` taken positions can be unreleased: the word
    /// of a further position still belongs to the previous lap.
    fn take(&mut self) -> Option<usize> {
        let (_, Seen::Full(client)) = self.look(self.next) else {
            return None;
        };
        self.next = self.next.wrapping_add(1);
        Some(client)
    }

    fn release(&mut self) {
        if self.released == self.next {
            return;
        }
        while self.released != self.next {
            let next_lap = self.lap(self.released).wrapping_add(1);
            // D2: hands the word to the clients.
            self.word(self.released)
                .store(free(next_lap), Ordering::Release);
            self.released = self.released.wrapping_add(1);
        }
        // D3: all positions below this position were taken.
        self.tail().store(self.released, Ordering::Release);
    }

    /// Repairs damage that only a broken client causes, so that the other clients can continue: in
    /// the next word, in `tail`, and in a gap before the word that is `ahead` positions after the
    /// next word. Call it when everything taken is released.
    fn keep_order(&mut self, ahead: u64) {
        if let (garbage, Seen::Earlier | Seen::Later) = self.look(self.next) {
            // The exchange may fail, because the word has changed: a later poll checks again.
            let free = free(self.lap(self.next));
            let _ = self.word(self.next).compare_exchange(
                garbage,
                free,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
        if self.tail().load(Ordering::Relaxed) != self.released {
            self.tail().store(self.released, Ordering::Release);
        }
        self.close_gap(ahead);
    }

    /// Skips the free positions before an announced position, which is `ahead` positions after the
    /// next. By I1 there are no such free positions, unless garbage in the words made a client
    /// announce itself too far ahead. (A load that sees the announced position makes everything
    /// before it visible.)
    fn close_gap(&mut self, ahead: u64) {
        let announced = self.next.wrapping_add(ahead);
        if self.next != self.released || !matches!(self.look(announced).1, Seen::Full(_)) {
            return;
        }
        while self.next != announced {
            let lap = self.lap(self.next);
            let (skipped, taken) = (free(lap), free(lap.wrapping_add(1)));
            // D2. The exchange fails if the position is announced after all.
            if self
                .word(self.next)
                .compare_exchange(skipped, taken, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                break;
            }
            self.next = self.next.wrapping_add(1);
        }
        self.released = self.next;
        self.tail().store(self.released, Ordering::Release);
    }
}

impl Wakes for Ring {
    #[inline(always)]
    fn any(&self) -> bool {
        let word = self.word(self.next).load(Ordering::Relaxed);
        word & FULL != 0 && matches!(see(word, self.lap(self.next)), Seen::Full(_))
    }

    fn drain(&mut self, f: impl FnMut(usize)) {
        // At most all positions of the ring are taken, since nothing is released meanwhile.
        std::iter::from_fn(|| self.take()).for_each(f);
        self.release();
    }

    /// Repairs damage; each call checks for a gap one position further.
    fn rest(&mut self) {
        self.probes = self.probes.wrapping_add(1);
        self.keep_order(self.probes % self.depth);
    }
}

impl Announce for Ring {
    const KIND: u64 = u64::from_be_bytes(*b"DLGRPC\x02\x00");
    /// "DLGRPCV1".
    const MAGIC: u64 = 0x444C_4752_5043_5631;
    const VERSION: u32 = 4;

    fn words_for(max_clients: usize) -> usize {
        ring_depth_for(max_clients)
    }

    fn bytes(_: usize, words: usize) -> Result<usize, OptionError> {
        let is_legal = words.is_power_of_two() && words <= RING_DEPTH_MAX;
        if is_legal {
            Ok(WORDS + (8 * words).next_multiple_of(LINE))
        } else {
            Err(OptionError::new(
                "words",
                words as u64,
                format!("a power of two from 1 to {RING_DEPTH_MAX}"),
            ))
        }
    }

    unsafe fn new(base: NonNull<u8>, _: usize, words: usize) -> Self {
        // SAFETY: the memory at `base` has room for the two hints and the words (contract of this
        // function), so both offsets lie inside it.
        let (tail, first) = unsafe { (base.add(LINE).cast(), base.add(WORDS).cast()) };
        Self {
            head: base.cast(),
            tail,
            words: first,
            depth: words as u64,
            next: 0,
            released: 0,
            probes: 0,
        }
    }

    fn announce(&self, client: usize, armed: &AtomicU32) {
        // One announcement is enough. If this client is stopped here, or the ring is full, the
        // server finds the flag down (I4).
        armed.store(HOT, Ordering::Relaxed);
        let _ = self.push(client);
    }
}

/// Returns the depth of a ring that is never full: a power of two with at least two words for each
/// client, and at least the words of a cache line. A client has one announcement in the ring, or
/// two if it was stopped while it announced itself. A smaller ring works too: the server finds a
/// client that found the ring full, after at most a millisecond per 64 clients.
#[must_use]
pub fn ring_depth_for(max_clients: usize) -> usize {
    (2 * max_clients.min(CLIENTS_MAX))
        .next_power_of_two()
        .max(LINE / 8)
}

#[cfg(test)]
mod tests;
