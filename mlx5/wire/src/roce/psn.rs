//! Packet sequence numbers: 24 bits, circular.

const MASK: u32 = 0xff_ffff;

/// A packet sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Makes a number of the low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// Returns the number's value, below 2^24.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number `count` packets later.
    #[must_use]
    pub const fn after(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// Returns the number of packets from `earlier` to this PSN, from -2^23 to 2^23 - 1: negative
    /// if this PSN is earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> i32 {
        (self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8
    }
}
