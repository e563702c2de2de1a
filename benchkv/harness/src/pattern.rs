//! The content of payloads, by which a lost, late, duplicate or torn request or reply is detected.
//!
//! The content of a request is derived from its tag (endpoint and number), and the content of a
//! reply from the tag in the request. A request consists of 64-bit words: the first is the tag, and
//! each further word is larger by a constant. A reply consists of such words with all bits
//! inverted. A request of fewer than 8 bytes contains only the first bytes of the tag. Then the
//! answering end cannot identify the request, and only the caller checks the content.

/// Difference of neighbouring words: an odd constant whose set bits are spread over the whole word.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The identity of one request: its endpoint, and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    const NUMBER_BITS: u32 = 48;

    /// Makes the tag of request `number` (below 2^48) of `endpoint` (below 2^16).
    pub const fn new(endpoint: usize, number: u64) -> Self {
        Self((endpoint as u64) << Self::NUMBER_BITS | number)
    }

    /// Returns the endpoint of the request.
    pub const fn endpoint(self) -> usize {
        (self.0 >> Self::NUMBER_BITS) as usize
    }

    /// Returns the number of the request.
    pub const fn number(self) -> u64 {
        self.0 & ((1 << Self::NUMBER_BITS) - 1)
    }

    /// Returns the part of the tag that is in a request of `len` bytes.
    pub const fn within(self, len: usize) -> Self {
        Self(if len < 8 {
            self.0 & ((1 << (8 * len)) - 1)
        } else {
            self.0
        })
    }

    /// Returns the tag in a request.
    pub fn of_request(bytes: &[u8]) -> Self {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(bytes) {
            *to = *from;
        }
        Self(u64::from_le_bytes(word))
    }
}

/// Returns the words of a payload; `flip` is 0 for requests, and has all bits set for replies.
fn words(tag: Tag, flip: u64) -> impl Iterator<Item = [u8; 8]> {
    std::iter::successors(Some(tag.0), |word| Some(word.wrapping_add(STEP)))
        .map(move |word| (word ^ flip).to_le_bytes())
}

fn fill(bytes: &mut [u8], tag: Tag, flip: u64) {
    for (to, word) in bytes.chunks_mut(8).zip(words(tag, flip)) {
        match <&mut [u8; 8]>::try_from(&mut *to) {
            Ok(to) => *to = word,
            Err(_) => to.iter_mut().zip(word).for_each(|(to, byte)| *to = byte),
        }
    }
}

fn is_filled(bytes: &[u8], tag: Tag, flip: u64) -> bool {
    bytes
        .chunks(8)
        .zip(words(tag, flip))
        .all(|(bytes, word)| match <&[u8; 8]>::try_from(bytes) {
            Ok(bytes) => *bytes == word,
            Err(_) => bytes
                .iter()
                .zip(word)
                .all(|(byte, expected)| *byte == expected),
        })
}

/// Fills `bytes` with a request.
pub fn fill_request(bytes: &mut [u8], tag: Tag) {
    fill(bytes, tag, 0);
}

/// Returns whether `bytes` are the request of this tag.
pub fn is_request(bytes: &[u8], tag: Tag) -> bool {
    is_filled(bytes, tag, 0)
}

/// Fills `bytes` with the reply to the request of this tag.
pub fn fill_reply(bytes: &mut [u8], tag: Tag) {
    fill(bytes, tag, u64::MAX);
}

/// Returns whether `bytes` are the reply to the request of this tag.
pub fn is_reply(bytes: &[u8], tag: Tag) -> bool {
    is_filled(bytes, tag, u64::MAX)
}

/// Copies a payload to `target`, and returns it. Returns `None` if the payload has a different
/// length.
#[cfg(feature = "copyrpc")]
pub fn copied<'a>(bytes: copyrpc::RecvBytes<'_>, target: &'a mut [u8]) -> Option<&'a [u8]> {
    (bytes.len() == target.len()).then(|| {
        bytes.copy_to(target);
        &*target
    })
}

/// Reads the first 8 bytes of a payload, without a check, as any receiver would.
#[cfg(feature = "copyrpc")]
pub fn touch(bytes: copyrpc::RecvBytes<'_>) {
    std::hint::black_box(bytes.read::<u64>());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_of_any_length_is_recognised_and_any_flipped_bit_noticed() {
        let tag = Tag::new(5, 0x1234_5678);
        for len in [0, 1, 7, 8, 9, 31, 32, 33, 1000] {
            let mut bytes = vec![0xa5; len];
            fill_request(&mut bytes, tag);
            assert!(is_request(&bytes, tag));
            assert_eq!(Tag::of_request(&bytes), tag.within(len));
            for bit in 0..8 * len {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(!is_request(&bytes, tag), "bit {bit} of {len} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            fill_reply(&mut bytes, tag);
            assert!(is_reply(&bytes, tag) && (len == 0 || !is_request(&bytes, tag)));
        }
    }

    #[test]
    fn a_tag_names_endpoint_and_number() {
        let tag = Tag::new(63, (1 << 48) - 1);
        assert_eq!(
            (tag.endpoint(), tag.number(), tag.within(8)),
            (63, (1 << 48) - 1, tag)
        );
        assert_eq!(tag.within(0), Tag::new(0, 0));
    }
}
