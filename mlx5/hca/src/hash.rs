//! A hash of numbers.

/// Start value and prime of 64-bit FNV-1a (draft-eastlake-fnv).
pub(crate) const START: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// Returns the hash of a sequence of bytes followed by `bytes`. `hash` is the hash of the sequence;
/// [`START`] is the hash of the empty sequence.
pub(crate) fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(PRIME)
    })
}

pub(crate) fn hash_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers
        .into_iter()
        .fold(START, |hash, number| fnv1a(hash, &number.to_le_bytes()))
}
