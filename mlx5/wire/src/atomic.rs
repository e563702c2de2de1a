//! Atomic segment (`struct mlx5_wqe_atomic_seg`), after the remote address segment: value to store
//! or add at 0, value to compare at 8.
//!
//! The data segment that follows it describes the 8 bytes of local memory that receive the previous
//! value at the remote address, in host byte order.

use super::{SEGMENT, be64};

/// Atomic segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtomicSegment {
    /// Compare-and-swap: value to store. Fetch-and-add: value to add.
    pub swap_add: u64,
    /// Compare-and-swap: expected value. Fetch-and-add: 0.
    pub compare: u64,
}

impl AtomicSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = SEGMENT;

    /// Encodes the segment.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&self.swap_add.to_be_bytes());
        b[8..16].copy_from_slice(&self.compare.to_be_bytes());
        b
    }

    /// Decodes the segment; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            swap_add: be64(b, 0),
            compare: be64(b, 8),
        }
    }
}
