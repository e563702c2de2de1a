//! Memory that a device, and through it a peer, may write at any time: the operations that the core
//! needs. No operation makes a reference to the memory.

use crate::protocol::wire::HEADER_BYTES;

/// A registered region. Ranges outside of `0..len()` are a mistake of the caller: reads return
/// zeros, and writes do nothing. The core uses no such range.
///
/// A message becomes visible by its trailer: [`load`](Self::load) acquires everything placed before
/// the word that it finds, and [`store`](Self::store) releases everything written before.
pub trait Memory {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Returns whether the region has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Loads the 8 bytes at `offset`, a multiple of 8, as a little-endian word, in one access with
    /// Acquire ordering.
    fn load(&self, offset: usize) -> u64;
    /// Finds the first word that is not 0 in runs of `count` words each; `count` is at most 64.
    /// `runs` has the offset of the first word of each run; word i of a run is `i * stride` bytes
    /// after it. The offsets and `stride` are multiples of 8. Returns the index of the run in
    /// `runs`, and the index of the word in the run. The accesses are Relaxed, so the caller
    /// [loads](Self::load) the word again.
    fn find(&self, runs: &[usize], stride: usize, count: usize) -> Option<(usize, usize)> {
        let in_run = |first: usize| (0..count).find(|nth| self.load(first + nth * stride) != 0);
        runs.iter()
            .enumerate()
            .find_map(|(run, first)| Some((run, in_run(*first)?)))
    }
    /// Calls `f` with the number and the value of each word that is not 0, among the words
    /// `from..count` of a run: word i is at `first + i * stride`. [Loads](Self::load) each word
    /// once, and [stores](Self::store) 0 to it if `f` returns `true`.
    fn each(
        &self,
        first: usize,
        stride: usize,
        from: usize,
        count: usize,
        mut f: impl FnMut(usize, u64) -> bool,
    ) {
        (from..count)
            .map(|nth| (nth, self.load(first + nth * stride)))
            .filter(|(nth, word)| *word != 0 && f(*nth, *word))
            .for_each(|(nth, _)| self.store(first + nth * stride, 0));
    }
    /// Stores 8 bytes at `offset`, a multiple of 8, in one access with Release ordering.
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
    /// Writes a message that ends with a trailer at `trailer_at`, a multiple of 8: first the header
    /// and the payload, then the trailer with Release ordering.
    fn put_message(
        &self,
        trailer_at: usize,
        header: &[u8; HEADER_BYTES],
        payload: &[u8],
        trailer: u64,
    ) {
        let start = trailer_at - HEADER_BYTES - payload.len();
        self.write(start, header);
        self.write(start + HEADER_BYTES, payload);
        self.store(trailer_at, trailer);
    }
}
