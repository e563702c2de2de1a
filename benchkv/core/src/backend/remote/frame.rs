//! The frames of carriers that send each message separately: a request, its response, or a refusal,
//! after a header of 8 bytes.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | call id, chosen by the caller, which its answer returns |
//! | 4..8 | 1 request, 2 response, 3 refusal |
//! | 8.. | [`Request`], [`Response`], nothing; then the tail of the value, if it has one |
//!
//! The fields are little-endian, like the messages.

use zerocopy::{FromBytes, IntoBytes};

use crate::message::{Request, Response};

const HEADER_BYTES: usize = 8;
const REQUEST: u32 = 1;
const RESPONSE: u32 = 2;
const REFUSAL: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) call: u32,
    pub(super) content: Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Request(Request),
    Response(Response),
    Refusal,
}

/// An encoded frame without a tail.
#[derive(Debug, Clone, Copy)]
pub(super) struct FrameBytes {
    bytes: [u8; Frame::MAX_BYTES],
    len: usize,
}

impl FrameBytes {
    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl Frame {
    /// Maximum length of a frame without its tail, in bytes.
    pub(super) const MAX_BYTES: usize = HEADER_BYTES
        + if size_of::<Request>() > size_of::<Response>() {
            size_of::<Request>()
        } else {
            size_of::<Response>()
        };

    #[inline]
    pub(super) fn encode(&self) -> FrameBytes {
        let (kind, body) = match &self.content {
            Content::Request(request) => (REQUEST, request.as_bytes()),
            Content::Response(response) => (RESPONSE, response.as_bytes()),
            Content::Refusal => (REFUSAL, &[][..]),
        };
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..4].copy_from_slice(&self.call.to_le_bytes());
        bytes[4..HEADER_BYTES].copy_from_slice(&kind.to_le_bytes());
        bytes[HEADER_BYTES..HEADER_BYTES + body.len()].copy_from_slice(body);
        FrameBytes {
            bytes,
            len: HEADER_BYTES + body.len(),
        }
    }

    /// Decodes a frame, and the tail of `tail_bytes` bytes after it if the frame has a value.
    /// Returns `None` for bytes of a peer that are not a frame.
    #[inline]
    pub(super) fn decode(bytes: &[u8], tail_bytes: usize) -> Option<(Self, &[u8])> {
        let (call, rest) = bytes.split_first_chunk()?;
        let (kind, body) = rest.split_first_chunk()?;
        let (content, behind, tail) = match u32::from_le_bytes(*kind) {
            REQUEST => Request::read_from_prefix(body)
                .map(|(it, tail)| (Content::Request(it), it.bytes_behind(tail_bytes), tail))
                .ok()?,
            RESPONSE => Response::read_from_prefix(body)
                .map(|(it, tail)| (Content::Response(it), it.bytes_behind(tail_bytes), tail))
                .ok()?,
            REFUSAL => (Content::Refusal, 0, body),
            _ => return None,
        };
        let call = u32::from_le_bytes(*call);
        (tail.len() == behind).then_some((Self { call, content }, tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Outcome;

    fn frames() -> [Frame; 3] {
        let request = Content::Request(Request::put(2, 3, 4));
        [
            request,
            Content::Response(Response::new(Outcome::GetOk { value: 5 })),
            Content::Refusal,
        ]
        .map(|content| Frame {
            call: 0x0102_0304,
            content,
        })
    }

    #[test]
    fn frames_read_back_and_their_bytes_are_those_of_the_table() {
        for (kind, frame) in (1..).zip(frames()) {
            let bytes = frame.encode();
            assert_eq!(bytes.as_bytes()[..8], [4, 3, 2, 1, kind, 0, 0, 0]);
            assert_eq!(Frame::decode(bytes.as_bytes(), 0), Some((frame, &[][..])));
        }
        assert_eq!(
            frames().map(|frame| frame.encode().as_bytes().len()),
            [32, 24, 8]
        );
    }

    #[test]
    fn bytes_of_another_length_or_kind_are_no_frame() {
        for frame in frames() {
            let bytes = [frame.encode().as_bytes(), &[0]].concat();
            for len in (0..=bytes.len()).filter(|len| *len != bytes.len() - 1) {
                assert_eq!(
                    Frame::decode(&bytes[..len], 0),
                    None,
                    "{frame:?}, {len} bytes"
                );
            }
            for kind in [0, 4, 0x81] {
                let mut other = frame.encode();
                other.bytes[4] = kind;
                assert_eq!(
                    Frame::decode(other.as_bytes(), 0),
                    None,
                    "{frame:?}, kind {kind}"
                );
            }
        }
    }

    /// Frames with a value (a put, and the answer to a get that found a value) end with a tail of
    /// the agreed length; other frames have none.
    #[test]
    fn a_tail_has_its_length_or_is_none() {
        let [put, found, refusal] = frames();
        let done = Frame {
            call: 1,
            content: Content::Response(Response::new(Outcome::PutOk)),
        };
        let get = Frame {
            call: 1,
            content: Content::Request(Request::get(2, 3)),
        };
        for (frame, behind) in [(put, 5), (found, 5), (refusal, 0), (done, 0), (get, 0)] {
            let head = frame.encode();
            for tail in (0..8).map(|len| vec![7; len]) {
                let bytes = [head.as_bytes(), &tail].concat();
                assert_eq!(
                    Frame::decode(&bytes, 5),
                    (tail.len() == behind).then_some((frame, &tail[..])),
                    "{frame:?}, {tail:?}"
                );
            }
        }
    }
}
