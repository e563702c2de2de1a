//! The identifier of a call.

/// The identifier of one call of a client, until the call has ended. It consists of the slot of the
/// call's entry in [`Calls`](crate::Calls) and the generation of that entry. Never 0 as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u64);

impl Tag {
    #[inline(always)]
    pub(crate) fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// Returns the tag of the next use of the same entry: the generation is higher by 2, so it
    /// stays odd.
    #[inline(always)]
    pub(crate) fn of_next_use(self) -> Self {
        Self(self.0.wrapping_add(2 << 32))
    }

    /// Returns the word for a message: generation in the high 32 bits, then 8 bits for a note (the
    /// kind of message, or the outcome of the call), then 24 bits of slot. Never 0.
    #[must_use]
    #[inline(always)]
    pub fn pack(self, note: u8) -> u64 {
        // A sum and not an OR, because the sum with a constant note needs only a signed constant of
        // 32 bits. The bits of the note are 0 before.
        self.0.wrapping_add(u64::from(note) << 24)
    }

    /// Splits a word of a peer into tag and note. Any word is allowed:
    /// [`Calls::take`](crate::Calls::take) checks the tag.
    #[must_use]
    #[inline(always)]
    pub fn unpack(word: u64) -> (Self, u8) {
        (Self(word & !(0xff << 24)), (word >> 24) as u8)
    }

    /// The bit of a note that [`with_last_bit`](Self::with_last_bit) checks and removes.
    pub const LAST_BIT: u8 = 0x80;

    /// Returns the tag of a word whose note is the [last bit](Self::LAST_BIT) alone; `None` if the
    /// note lacks this bit. If the note has other bits too, the result belongs to no call.
    #[must_use]
    #[inline(always)]
    pub fn with_last_bit(word: u64) -> Option<Self> {
        const BIT: u64 = (Tag::LAST_BIT as u64) << 24;
        if word & BIT == 0 {
            None
        } else {
            Some(Self(word - BIT))
        }
    }

    /// Like [`unpack`](Self::unpack), for a word whose note should be 0. With another note the
    /// result belongs to no call: its slot is beyond [`CALLS_MAX`](crate::CALLS_MAX).
    #[must_use]
    #[inline(always)]
    pub fn without_note(word: u64) -> Self {
        Self(word)
    }

    /// Returns the slot.
    #[must_use]
    #[inline(always)]
    pub fn slot(self) -> usize {
        self.0 as u32 as usize
    }
}

/// A message that belongs to a call, as it lies in shared memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Tagged<T> {
    /// The caller's tag, with a note for the kind of message: see [`Tag::pack`].
    pub tag: u64,
    /// The payload.
    pub payload: T,
}

const _: () = assert!(
    std::mem::offset_of!(Tagged<u64>, tag) == 0 && std::mem::offset_of!(Tagged<u64>, payload) == 8
);

/// Note of an answer: the payload is the handler's response.
pub const ANSWERED: u8 = 0;
/// Note of an answer: the handler dropped the request. The payload is zero with this note, and with
/// all notes below.
pub const DROPPED: u8 = 1;
/// Note of an answer: the handler refused the request.
pub const REFUSED: u8 = 2;
/// Note of an answer: the handler's response is longer than the lanes, the queues of messages,
/// carry.
pub const TOO_LONG: u8 = 3;
/// Note of an answer: the server stops, and no handler got the request.
pub const SENT_BACK: u8 = 4;
