//! The bytes between a rank and the launcher, and between a helper and its owner: a 16-byte header, then the body. Numbers are little-endian.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic `HXC1` |
//! | 4 | 4 | kind |
//! | 8 | 4 | round: counts the collective operations of a job |
//! | 12 | 4 | bytes of the body |

use thiserror::Error;

/// Maximum bytes of a part that one rank can give to an all-gather.
pub const MAX_PART_BYTES: usize = 4 << 20;

/// Maximum number of ranks of one job: with [`MAX_PART_BYTES`] it keeps the gathered frame below 2 GiB.
pub(crate) const MAX_RANKS: usize = 256;

const MAGIC: u32 = u32::from_le_bytes(*b"HXC1");
const HEADER_BYTES: usize = 16;
const MAX_BODY_BYTES: usize = (MAX_PART_BYTES + 4) * MAX_RANKS;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Rank to launcher: this rank's part of a round, and the time limit of the others.
    Part { round: u32, within_ms: u32, part: Vec<u8> },
    /// Launcher to rank: the parts of all ranks.
    Gathered { round: u32, parts: Vec<Vec<u8>> },
    /// Launcher to rank: the ranks that did not arrive.
    Missing { round: u32, within_ms: u32, ranks: Vec<u32> },
    /// Launcher to rank: a rank ended.
    Died { rank: u32, how: String },
    /// Launcher to rank: the user wants the job to end.
    Interrupted,
    /// Between a helper and its owner: their own bytes.
    Message(Vec<u8>),
}

/// Why the bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("magic {0:#010x}")]
    Magic(u32),
    #[error("unknown kind {0}")]
    Kind(u32),
    #[error("a body of {0} bytes")]
    Length(usize),
    #[error("a body that does not fit its kind {0}")]
    Body(u32),
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let (kind, round) = match self {
            Self::Part { round, within_ms, part } => {
                body.extend(within_ms.to_le_bytes());
                body.extend(part);
                (1, *round)
            }
            Self::Gathered { round, parts } => {
                for part in parts {
                    body.extend((part.len() as u32).to_le_bytes());
                    body.extend(part);
                }
                (2, *round)
            }
            Self::Missing { round, within_ms, ranks } => {
                body.extend(within_ms.to_le_bytes());
                body.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
                (3, *round)
            }
            Self::Died { rank, how } => {
                body.extend(rank.to_le_bytes());
                body.extend(how.as_bytes());
                (4, 0)
            }
            Self::Interrupted => (5, 0),
            Self::Message(bytes) => {
                body.extend(bytes);
                (6, 0)
            }
        };
        let header = [MAGIC, kind, round, body.len() as u32];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.append(&mut body);
        bytes
    }

    /// Decodes the first frame of `bytes`. Returns it with its number of bytes; `None` while it is incomplete.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let [magic, kind, round, length] = words(header);
        let length = length as usize;
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        if !(1..=6).contains(&kind) {
            return Err(FrameError::Kind(kind));
        }
        if length > MAX_BODY_BYTES {
            return Err(FrameError::Length(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Self::from_body(kind, round, body).ok_or(FrameError::Body(kind))?;
        Ok(Some((frame, HEADER_BYTES + length)))
    }

    fn from_body(kind: u32, round: u32, mut body: &[u8]) -> Option<Self> {
        Some(match kind {
            1 => Self::Part { round, within_ms: take_u32(&mut body)?, part: body.to_vec() },
            2 => {
                let mut parts = Vec::new();
                while !body.is_empty() {
                    let length = take_u32(&mut body)? as usize;
                    let (part, rest) = body.split_at_checked(length)?;
                    parts.push(part.to_vec());
                    body = rest;
                }
                Self::Gathered { round, parts }
            }
            3 => {
                let within_ms = take_u32(&mut body)?;
                let mut ranks = Vec::new();
                while !body.is_empty() {
                    ranks.push(take_u32(&mut body)?);
                }
                Self::Missing { round, within_ms, ranks }
            }
            4 => Self::Died { rank: take_u32(&mut body)?, how: String::from_utf8(body.to_vec()).ok()? },
            5 => body.is_empty().then_some(Self::Interrupted)?,
            6 => Self::Message(body.to_vec()),
            _ => return None,
        })
    }
}

fn words(header: &[u8; HEADER_BYTES]) -> [u32; 4] {
    let mut rest: &[u8] = header;
    std::array::from_fn(|_| take_u32(&mut rest).unwrap_or(0))
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_each() -> Vec<Frame> {
        vec![
            Frame::Part { round: 7, within_ms: 1500, part: b"abc".to_vec() },
            Frame::Gathered { round: 7, parts: vec![b"abc".to_vec(), vec![], vec![0xa5; 300]] },
            Frame::Missing { round: 7, within_ms: 1500, ranks: vec![1, 4] },
            Frame::Died { rank: 2, how: "exited with status 3".to_owned() },
            Frame::Interrupted,
            Frame::Message(vec![0xa5; 7]),
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
    fn garbage_is_named_not_believed() {
        let good = Frame::Died { rank: 2, how: "x".to_owned() }.encode();
        let with = |at: usize, word: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            Frame::decode(&bytes)
        };
        assert_eq!(with(0, 1), Err(FrameError::Magic(1)));
        assert_eq!(with(4, 9), Err(FrameError::Kind(9)));
        assert_eq!(with(12, u32::MAX), Err(FrameError::Length(u32::MAX as usize)));
        assert_eq!(with(12, 2), Err(FrameError::Body(4)));
        // An Interrupted frame with a body, and a gathered part longer than its frame.
        assert_eq!(with(4, 5), Err(FrameError::Body(5)));
        assert_eq!(with(4, 2), Err(FrameError::Body(2)));
    }
}
