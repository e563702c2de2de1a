//! Next segment: the first 16 bytes of an SRQ WQE (`struct mlx5_wqe_srq_next_seg`): the index of
//! the following WQE at byte 2.
//!
//! The device walks the SRQ as a linked list, so every WQE contains the index of its successor,
//! even if the list is sequential.

use super::{SEGMENT, be16};

/// Next segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextSegment {
    /// Index of the WQE that the device consumes after this WQE.
    pub next_wqe_index: u16,
}

impl NextSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = SEGMENT;

    /// Encodes the segment.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[2..4].copy_from_slice(&self.next_wqe_index.to_be_bytes());
        b
    }

    /// Decodes the segment; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            next_wqe_index: be16(b, 2),
        }
    }
}
