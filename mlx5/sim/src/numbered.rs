//! Maps by small numbers that this process gives out, so that nobody can choose keys that collide.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Asked for one key at a time: its order decides nothing.
pub(crate) type ByNumber<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// Multiplies, and brings the upper half, where all bits have come together, to the lower one, by which a map chooses.
#[derive(Default)]
pub(crate) struct Mix(u64);

/// 2^64 / golden ratio, odd (Knuth, The Art of Computer Programming 3, 6.4).
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0.rotate_left(32)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(FACTOR);
    }
}
