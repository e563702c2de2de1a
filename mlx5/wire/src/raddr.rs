//! Remote address segment of RDMA WQEs (`struct mlx5_wqe_raddr_seg`): address at 0, rkey at 8, 4
//! reserved bytes.

use super::{SEGMENT, be32, be64};

/// Remote address segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaddrSegment {
    /// Virtual address in the target's memory region.
    pub addr: u64,
    /// The region's rkey.
    pub rkey: u32,
}

impl RaddrSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = SEGMENT;

    /// Encodes the segment.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&self.addr.to_be_bytes());
        b[8..16].copy_from_slice(&(u64::from(self.rkey) << 32).to_be_bytes());
        b
    }

    /// Decodes the segment; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            addr: be64(b, 0),
            rkey: be32(b, 8),
        }
    }
}
