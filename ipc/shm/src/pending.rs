//! Things that wait for an answer, found again by a tag that is good once.

use crate::sync::FIRST;

/// Most entries a [`Pending`] can have: a tag has 24 bits for the slot.
pub const PENDING_MAX: usize = 1 << 24;

/// Names one call of a client until it has ended, and none after that. Inside, one entry of a [`Pending`] during one use of it: slot and
/// generation. Never 0 as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// Its value was taken, and it waits for its answer all the same.
    is_abandoned: bool,
    value: Option<T>,
}

/// A fixed number of entries with generations: a late, repeated or made-up tag finds nothing. No allocation after `new`.
#[derive(Debug)]
pub struct Pending<T> {
    entries: Box<[Entry<T>]>,
    /// Free slots; the last one freed is the next one used, its memory being warm.
    free: Vec<u32>,
    abandoned: usize,
}

impl<T> Pending<T> {
    /// Room for `capacity` entries, at most [`PENDING_MAX`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(PENDING_MAX) as u32;
        Self {
            entries: (0..capacity).map(|_| Entry { generation: FIRST.max(1), is_abandoned: false, value: None }).collect(),
            free: (0..capacity).rev().collect(),
            abandoned: 0,
        }
    }

    /// Number of entries in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Number of entries that wait, and were not abandoned.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.len() - self.abandoned
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
        let value = entry.value.take();
        if value.is_none() {
            return self.reclaim(slot);
        }
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.free.push(slot as u32);
        value
    }

    /// An entry without a value is free, or was abandoned: then it is free from now on.
    #[cold]
    fn reclaim(&mut self, slot: usize) -> Option<T> {
        let entry = self.entries.get_mut(slot).filter(|entry| entry.is_abandoned)?;
        entry.is_abandoned = false;
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.abandoned -= 1;
        self.free.push(slot as u32);
        None
    }

    /// Takes what waits under `tag`, whose entry stays in use until its answer is here: what goes with it is the peer's until then.
    pub fn abandon(&mut self, tag: Tag) -> Option<T> {
        let entry = self.entries.get_mut(tag.slot()).filter(|entry| Tag::new(tag.slot() as u32, entry.generation) == tag)?;
        let value = entry.value.take()?;
        entry.is_abandoned = true;
        self.abandoned += 1;
        Some(value)
    }

    /// Whether something waits under `tag`.
    #[must_use]
    pub fn holds(&self, tag: Tag) -> bool {
        self.entries.get(tag.slot()).is_some_and(|entry| entry.value.is_some() && Tag::new(tag.slot() as u32, entry.generation) == tag)
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
    fn an_abandoned_entry_is_in_use_until_its_answer_is_here_and_gives_nothing_then() {
        let mut pending = Pending::new(2);
        let [a, b] = ['a', 'b'].map(|value| pending.insert(value).unwrap());
        assert!(pending.holds(a));
        assert_eq!((pending.abandon(a), pending.abandon(a)), (Some('a'), None));
        assert!(!pending.holds(a));
        assert_eq!((pending.insert('c'), pending.len(), pending.waiting()), (Err('c'), 2, 1));
        assert_eq!(pending.take(a), None, "the answer of nobody");
        assert_eq!((pending.len(), pending.waiting()), (1, 1));
        let c = pending.insert('c').unwrap();
        assert_eq!(c.slot(), a.slot());
        assert_eq!((pending.take(a), pending.abandon(a), pending.take(c), pending.take(b)), (None, None, Some('c'), Some('b')));
        let mut taken = vec![];
        let d = pending.insert('d').unwrap();
        pending.abandon(d);
        pending.take_where(|_| true, |value| taken.push(value));
        assert_eq!(taken, []);
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
