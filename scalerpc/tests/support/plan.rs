//! The bytes of each request and its response: a function of the client's name and the request's
//! number.

use std::ops::Range;

/// Bytes of a slot in all tests; the longest messages fill a slot.
pub(crate) const SLOT_BYTES: u32 = 512;
const MAX_PAYLOAD: usize = SLOT_BYTES as usize - 40;

/// The type of all requests.
pub(crate) const WORK: u16 = 1;

/// Returns a request: name, number, and bytes that follow from both.
pub(crate) fn request(name: u64, number: u64) -> Vec<u8> {
    message(name, number, 0)
}

/// Returns the response to a request: bytes that follow from the client's name, the request's
/// number, and the checksum of the request.
pub(crate) fn response(name: u64, number: u64) -> Vec<u8> {
    let mut bytes = message(name, number, checksum(&request(name, number)));
    bytes.rotate_left(1);
    bytes
}

/// Returns the name and the number in a request, if the bytes are a request.
pub(crate) fn name_and_number(request: &[u8]) -> Option<(u64, u64)> {
    let word = |range: Range<usize>| Some(u64::from_le_bytes(request.get(range)?.try_into().ok()?));
    Some((word(0..8)?, word(8..16)?))
}

/// Returns the bytes of a message: mostly some tens of bytes, which are inside or outside of the
/// WQE; in one of sixteen messages any number that fits.
fn message(name: u64, number: u64, seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(name.rotate_left(32) ^ number ^ seed);
    let len = if rng.u8(..16) == 0 {
        rng.usize(16..=MAX_PAYLOAD)
    } else {
        rng.usize(16..80)
    };
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes[..8].copy_from_slice(&name.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Returns the FNV-1a hash.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}
