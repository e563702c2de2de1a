//! The memory of a test: words of the heap.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::memory::Memory;

/// Ordinary memory: the regions of tests and simulations, which no device writes.
#[derive(Debug)]
pub(crate) struct HeapMemory(Vec<AtomicU64>);

impl HeapMemory {
    /// Makes a region of `bytes` zero bytes, rounded up to a multiple of 8.
    pub(crate) fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Returns the words, for comparisons of states.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> + '_ {
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
        self.word(offset)
            .map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    fn store(&self, offset: usize, word: u64) {
        if let Some(place) = self.word(offset) {
            place.store(word.to_le(), Ordering::Release);
        }
    }

    fn exchange(&self, offset: usize, old: u64, new: u64) -> bool {
        let exchange = |place: &AtomicU64| {
            place
                .compare_exchange(
                    old.to_le(),
                    new.to_le(),
                    Ordering::AcqRel,
                    Ordering::Acquire,
                )
                .is_ok()
        };
        self.word(offset).is_some_and(exchange)
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        for (at, byte) in into
            .iter_mut()
            .enumerate()
            .map(|(i, byte)| (offset + i, byte))
        {
            let word = self
                .0
                .get(at / 8)
                .map_or(0, |word| word.load(Ordering::Relaxed));
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
