//! Memory that a device, and through it a peer, may write at any time: the operations that the core needs. None of them makes a reference
//! to it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::wire::HEADER_BYTES;

/// A registered region. Ranges outside of `0..len()` are a mistake of the caller: reads return zeros, and writes do nothing. The core
/// uses none.
///
/// A message becomes visible by its trailer: [`load`](Self::load) acquires everything placed before the word that it finds, and
/// [`store`](Self::store) releases everything written before.
pub trait Memory {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Returns whether the region has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the 8 bytes at `offset`, a multiple of 8, little-endian, in one access; Acquire.
    fn load(&self, offset: usize) -> u64;
    /// Finds the first word that is not 0. Returns its run, and its number in the run. Each run has `count` words, at most 64; word i of a
    /// run that begins at `first` is at `first + i * stride`, both multiples of 8. Relaxed: the result only says where to
    /// [`load`](Self::load).
    fn find(&self, runs: &[usize], stride: usize, count: usize) -> Option<(usize, usize)> {
        let in_run = |first: usize| (0..count).find(|nth| self.load(first + nth * stride) != 0);
        runs.iter().enumerate().find_map(|(run, first)| Some((run, in_run(*first)?)))
    }
    /// Calls `f` with the number and the value of each word that is not 0, of the words `from..count` of such a run. Each is
    /// [loaded](Self::load) once.
    #[inline]
    fn each(&self, first: usize, stride: usize, from: usize, count: usize, mut f: impl FnMut(usize, u64)) {
        (from..count).map(|nth| (nth, self.load(first + nth * stride))).filter(|(_, word)| *word != 0).for_each(|(nth, word)| f(nth, word));
    }
    /// Stores 8 bytes at `offset`, a multiple of 8, in one access; Release.
    fn store(&self, offset: usize, word: u64);
    /// Replaces `old` at `offset`, a multiple of 8, by `new`. Returns whether the word was `old`.
    fn exchange(&self, offset: usize, old: u64, new: u64) -> bool;
    /// Copies bytes out of the region.
    fn read(&self, offset: usize, into: &mut [u8]);
    /// Returns the header at `offset`; `None` if it is not inside the region.
    fn header(&self, offset: usize) -> Option<[u8; HEADER_BYTES]> {
        let mut bytes = [0; HEADER_BYTES];
        (offset.checked_add(HEADER_BYTES)? <= self.len()).then(|| self.read(offset, &mut bytes))?;
        Some(bytes)
    }
    /// Copies bytes into the region.
    fn write(&self, offset: usize, from: &[u8]);
    /// Puts a message before its trailer, which is at `trailer_at`, a multiple of 8. Writes the header, the payload, and then the
    /// trailer; Release.
    fn put_message(&self, trailer_at: usize, header: &[u8; HEADER_BYTES], payload: &[u8], trailer: u64) {
        let start = trailer_at - HEADER_BYTES - payload.len();
        self.write(start, header);
        self.write(start + HEADER_BYTES, payload);
        self.store(trailer_at, trailer);
    }
}

/// Ordinary memory: the regions of tests and simulations, which no device writes.
#[derive(Debug)]
pub struct HeapMemory(Vec<AtomicU64>);

impl HeapMemory {
    /// Makes a region of `bytes` zero bytes, rounded up to a multiple of 8.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Returns the words, for comparisons of states.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|word| word.load(Ordering::Relaxed))
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        debug_assert!(offset % 8 == 0, "a word at {offset}");
        self.0.get(offset / 8)
    }
}

impl Clone for HeapMemory {
    fn clone(&self) -> Self {
        Self(self.words().map(AtomicU64::new).collect())
    }
}

impl Memory for HeapMemory {
    fn len(&self) -> usize {
        self.0.len() * 8
    }

    fn load(&self, offset: usize) -> u64 {
        self.word(offset).map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    fn store(&self, offset: usize, word: u64) {
        if let Some(place) = self.word(offset) {
            place.store(word.to_le(), Ordering::Release);
        }
    }

    fn exchange(&self, offset: usize, old: u64, new: u64) -> bool {
        let exchange = |place: &AtomicU64| place.compare_exchange(old.to_le(), new.to_le(), Ordering::AcqRel, Ordering::Acquire).is_ok();
        self.word(offset).is_some_and(exchange)
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        for (at, byte) in into.iter_mut().enumerate().map(|(i, byte)| (offset + i, byte)) {
            let word = self.0.get(at / 8).map_or(0, |word| word.load(Ordering::Relaxed));
            *byte = word.to_ne_bytes()[at % 8];
        }
    }

    fn write(&self, offset: usize, from: &[u8]) {
        for (at, byte) in from.iter().enumerate().map(|(i, byte)| (offset + i, byte)) {
            if let Some(place) = self.0.get(at / 8) {
                let mut bytes = place.load(Ordering::Relaxed).to_ne_bytes();
                bytes[at % 8] = *byte;
                place.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_are_the_same_memory_and_nothing_is_outside() {
        let memory = HeapMemory::new(20);
        assert_eq!(memory.len(), 24);
        memory.write(3, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(memory.load(0), 0x0504_0302_0100_0000);
        assert!(!memory.exchange(8, 1, 9));
        assert!(memory.exchange(8, 0x0706, 9));
        memory.store(16, 0x1122);
        memory.write(24, &[1]);
        let mut bytes = [0xa5; 10];
        memory.read(16, &mut bytes);
        assert_eq!(bytes, [0x22, 0x11, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
