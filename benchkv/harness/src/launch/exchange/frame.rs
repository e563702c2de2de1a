//! The messages between a rank and the launcher: the length of the body (4 bytes, little-endian),
//! then the body, encoded by postcard.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum bytes of one rank's part in an all-gather.
pub const MAX_PART_BYTES: usize = 4 << 20;

/// Maximum number of ranks of one job. This number of parts of [`MAX_PART_BYTES`] keeps the
/// gathered frame below 2 GiB.
pub(crate) const MAX_RANKS: usize = 256;

const MAX_BODY_BYTES: usize = (MAX_PART_BYTES + 16) * MAX_RANKS;

/// A message. `round` counts the collective operations of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// Rank to launcher: this rank's part of a round, and the maximum time for the other parts.
    Part {
        round: u32,
        within_ms: u32,
        part: Vec<u8>,
    },
    /// Launcher to rank: the parts of all ranks.
    Gathered { round: u32, parts: Vec<Vec<u8>> },
    /// Launcher to rank: the ranks whose parts did not arrive in time.
    Missing {
        round: u32,
        within_ms: u32,
        ranks: Vec<u32>,
    },
    /// Launcher to rank: a rank ended.
    Died { rank: u32, how: String },
    /// Launcher to rank: the user interrupted the job.
    Interrupted,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a malformed message of {0} bytes")]
pub(crate) struct FrameError(usize);

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        // Encoding fails only for sequences of unknown length, and no frame has such a sequence.
        let body = postcard::to_allocvec(self).unwrap_or_default();
        [&(body.len() as u32).to_le_bytes()[..], &body].concat()
    }

    /// Decodes the first frame of `bytes`. Returns it with its length; `None` if incomplete.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some((length, rest)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_BODY_BYTES {
            return Err(FrameError(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        match postcard::take_from_bytes(body) {
            Ok((frame, [])) => Ok(Some((frame, size_of::<u32>() + length))),
            _ => Err(FrameError(length)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_each() -> Vec<Frame> {
        vec![
            Frame::Part {
                round: 7,
                within_ms: 1500,
                part: b"abc".to_vec(),
            },
            Frame::Gathered {
                round: 7,
                parts: vec![b"abc".to_vec(), vec![], vec![0xa5; 300]],
            },
            Frame::Missing {
                round: 7,
                within_ms: 1500,
                ranks: vec![1, 4],
            },
            Frame::Died {
                rank: 2,
                how: "exited with status 3".to_owned(),
            },
            Frame::Interrupted,
        ]
    }

    #[test]
    fn frames_survive_any_split_of_the_stream() {
        for frame in one_of_each() {
            let bytes = frame.encode();
            for cut in 0..bytes.len() {
                assert_eq!(Frame::decode(&bytes[..cut]), Ok(None));
            }
            let mut followed = bytes.clone();
            followed.extend(Frame::Interrupted.encode());
            assert_eq!(Frame::decode(&followed), Ok(Some((frame, bytes.len()))));
        }
    }

    #[test]
    fn garbage_is_refused() {
        let died = Frame::Died {
            rank: 2,
            how: "x".to_owned(),
        }
        .encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = died.clone();
            bytes[at] = byte;
            Frame::decode(&bytes)
        };
        assert_eq!(with(3, 0xff), Err(FrameError(0xff00_0004)), "too long");
        assert_eq!(with(0, 3), Err(FrameError(3)), "shorter than its text");
        assert_eq!(with(4, 9), Err(FrameError(4)), "an unknown kind");
        assert_eq!(with(7, 0xff), Err(FrameError(4)), "no text");
        let bytes = [&5u32.to_le_bytes()[..], &[4; 5]].concat();
        assert_eq!(
            Frame::decode(&bytes),
            Err(FrameError(5)),
            "bytes after an interrupt"
        );
    }
}
