//! Things that wait for an answer, found again by a tag that is good once.

use crate::sync::FIRST;

/// Most entries a [`Pending`] can have: a tag has 24 bits for the slot.
pub const PENDING_MAX: usize = 1 << 24;

/// Names one entry of a [`Pending`] during one use of it: slot and generation. Never 0 as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(u64);

impl Tag {
    /// As a word for a message: generation in the high 32 bits, then 8 bits for a note (what kind of message it is, how the call
    /// went), then 24 bits of slot. Never 0.
    #[must_use]
    #[inline(always)]
    pub fn pack(self, note: u8) -> u64 {
        self.0 | u64::from(note) << 24
    }

    /// Tag and note of a word that came from a peer; any word is allowed, [`Pending::take`] finds out.
    #[must_use]
    #[inline(always)]
    pub fn unpack(word: u64) -> (Self, u8) {
        (Self(word & !(0xff << 24)), (word >> 24) as u8)
    }

    /// The slot.
    #[must_use]
    #[inline(always)]
    pub fn slot(self) -> usize {
        (self.0 & 0xff_ffff) as usize
    }

    fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }
}

/// A message that belongs to a call, as it lies in shared memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Tagged<T> {
    /// The caller's tag, with a note of what the message is: see [`Tag::pack`].
    pub tag: u64,
    /// The rest.
    pub payload: T,
}

const _: () = assert!(std::mem::offset_of!(Tagged<u64>, tag) == 0 && std::mem::offset_of!(Tagged<u64>, payload) == 8);

/// Note of an answer: the payload is what the handler answered.
pub const ANSWERED: u8 = 0;
/// Note of an answer: the handler dropped the request; the payload is zero.
pub const DROPPED: u8 = 1;

#[derive(Debug)]
struct Entry<T> {
    /// Of the current use, or of the next one if the entry is free. Never 0.
    generation: u32,
    value: Option<T>,
}

/// A fixed number of entries with generations: a late, repeated or made-up tag finds nothing. No allocation after `new`.
#[derive(Debug)]
pub struct Pending<T> {
    entries: Box<[Entry<T>]>,
    /// Free slots; the last one freed is the next one used, its memory being warm.
    free: Vec<u32>,
}

impl<T> Pending<T> {
    /// Room for `capacity` entries, at most [`PENDING_MAX`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(PENDING_MAX) as u32;
        Self {
            entries: (0..capacity).map(|_| Entry { generation: FIRST.max(1), value: None }).collect(),
            free: (0..capacity).rev().collect(),
        }
    }

    /// Number of entries in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether no entry is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of entries.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Whether every entry is in use.
    #[must_use]
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Keeps `value` until its tag is taken.
    ///
    /// # Errors
    /// Gives `value` back if all entries are in use.
    #[inline]
    pub fn insert(&mut self, value: T) -> Result<Tag, T> {
        let Some(slot) = self.free.pop() else { return Err(value) };
        let Some(entry) = self.entries.get_mut(slot as usize) else { return Err(value) };
        entry.value = Some(value);
        Ok(Tag::new(slot, entry.generation))
    }

    /// Takes what waits under `tag`; `None` if it was taken before or never was.
    #[inline]
    pub fn take(&mut self, tag: Tag) -> Option<T> {
        let slot = tag.slot();
        let entry = self.entries.get_mut(slot)?;
        if Tag::new(slot as u32, entry.generation) != tag {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.free.push(slot as u32);
        Some(value)
    }

    /// Takes everything that waits and for which `which` holds, and hands it to `f`.
    pub fn take_where(&mut self, mut which: impl FnMut(&T) -> bool, mut f: impl FnMut(T)) {
        for slot in 0..self.entries.len() as u32 {
            let Some(entry) = self.entries.get(slot as usize) else { return };
            if entry.value.as_ref().is_some_and(&mut which) {
                let tag = Tag::new(slot, entry.generation);
                self.take(tag).into_iter().for_each(&mut f);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_is_good_once_and_never_for_the_next_use_of_its_slot() {
        let mut pending = Pending::new(2);
        let a = pending.insert('a').unwrap();
        let b = pending.insert('b').unwrap();
        assert_eq!(pending.insert('c'), Err('c'));
        assert!(pending.is_full());
        assert_eq!(pending.take(a), Some('a'));
        assert_eq!(pending.take(a), None);
        let d = pending.insert('d').unwrap();
        assert_eq!(d.slot(), a.slot());
        assert_eq!(pending.take(a), None, "an old tag reached the slot's next use");
        assert_eq!(pending.take(Tag::unpack(d.pack(0) + 1).0), None);
        assert_eq!((pending.take(b), pending.take(d)), (Some('b'), Some('d')));
        assert!(pending.is_empty());
    }

    #[test]
    fn note_travels_with_the_tag_and_is_no_part_of_it() {
        let mut pending = Pending::new(2);
        pending.insert(0).unwrap();
        let tag = pending.insert(1).unwrap();
        assert_eq!(Tag::unpack(tag.pack(0xa5)), (tag, 0xa5));
        assert_eq!(tag.slot(), 1);
    }

    #[test]
    fn made_up_tags_find_nothing() {
        let mut pending = Pending::new(3);
        pending.insert(()).unwrap();
        for bits in [0, 1, 3, 1 << 32 | 3, u64::MAX, 2 << 32] {
            assert_eq!(pending.take(Tag::unpack(bits).0), None, "{bits:#x}");
        }
        assert_eq!(pending.len(), 1);
    }

    #[test]
    fn generation_wraps_past_zero() {
        let mut pending = Pending::new(1);
        pending.entries[0].generation = u32::MAX;
        let last = pending.insert(1).unwrap();
        assert_eq!(pending.take(last), Some(1));
        assert_eq!(pending.insert(2).unwrap().pack(0), 1 << 32);
    }

    #[test]
    fn take_where_takes_what_it_is_told() {
        let mut pending = Pending::new(4);
        for n in 0..4 {
            pending.insert(n).unwrap();
        }
        let mut taken = vec![];
        pending.take_where(|n| n % 2 == 1, |n| taken.push(n));
        assert_eq!((taken, pending.len()), (vec![1, 3], 2));
    }
}
