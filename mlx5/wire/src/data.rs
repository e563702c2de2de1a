//! Data segments (`struct mlx5_wqe_data_seg`, `struct mlx5_wqe_inl_data_seg`; PRM "Memory
//! Management Unit: Data Segments").
//!
//! Bit 31 of the first word is 0 in a segment by pointer, and 1 in inline data. A segment by
//! pointer has a byte count (31 bits; **0 means 2^31 bytes**, so a zero-length message has no data
//! segment), an lkey and an address. Inline data has a 4-byte header with the count, followed by
//! the bytes; header and bytes are padded to a multiple of 16 B.

use super::{SEGMENT, be64};

/// The lkey of the segment that ends a receive's list of data segments (`MLX5_INVALID_LKEY`). The
/// byte count of that segment is 0.
pub const INVALID_LKEY: u32 = 0x100;

const INLINE: u32 = 1 << 31;

/// Data segment by pointer: the device reads the buffer on send, and writes it on receive and READ.
/// [`DataWords`] decodes data segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSegment {
    /// Length of the buffer in bytes, 1..2^31.
    pub byte_count: u32,
    /// lkey of the local memory region.
    pub lkey: u32,
    /// Virtual address inside the region.
    pub addr: u64,
}

impl DataSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = SEGMENT;
    /// Terminator of a receive WQE that has fewer segments than its stride can hold.
    pub const TERMINATOR: Self = Self {
        byte_count: 0,
        lkey: INVALID_LKEY,
        addr: 0,
    };

    /// Encodes the segment.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&(self.byte_count & !INLINE).to_be_bytes());
        b[4..8].copy_from_slice(&self.lkey.to_be_bytes());
        b[8..16].copy_from_slice(&self.addr.to_be_bytes());
        b
    }
}

/// A data segment, or the start of inline data, as two words in host order. A field is decoded only
/// when its function is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataWords {
    /// Bytes 0..8.
    first: u64,
    /// Bytes 8..16.
    second: u64,
}

impl DataWords {
    /// Decodes the two words; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; DataSegment::LEN]) -> Self {
        Self {
            first: be64(b, 0),
            second: be64(b, 8),
        }
    }

    /// Returns whether the segment is an [`InlineHeader`] and not a [`DataSegment`].
    #[must_use]
    #[inline(always)]
    pub const fn is_inline(self) -> bool {
        (self.first as i64) < 0
    }

    /// Returns [`DataSegment::byte_count`] or [`InlineHeader::byte_count`].
    #[must_use]
    #[inline(always)]
    pub const fn byte_count(self) -> u32 {
        (self.first >> 32) as u32 & !INLINE
    }

    /// Returns the length of the buffer of a segment by pointer, in bytes: a byte count of 0 means
    /// 2^31.
    #[must_use]
    #[inline(always)]
    pub const fn buffer_bytes(self) -> usize {
        match self.byte_count() {
            0 => 1 << 31,
            bytes => bytes as usize,
        }
    }

    /// Returns [`DataSegment::lkey`].
    #[must_use]
    #[inline(always)]
    pub const fn lkey(self) -> u32 {
        self.first as u32
    }

    /// Returns [`DataSegment::addr`].
    #[must_use]
    #[inline(always)]
    pub const fn addr(self) -> u64 {
        self.second
    }
}

/// The 4-byte header of inline data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineHeader {
    /// Number of data bytes after the header.
    pub byte_count: u32,
}

impl InlineHeader {
    /// Length of the header in bytes.
    pub const LEN: usize = 4;

    /// Returns the number of 16-byte segments that `bytes` bytes of inline data take, header
    /// included: `ceil((4 + bytes) / 16)`.
    #[must_use]
    #[inline(always)]
    pub const fn segments(bytes: usize) -> usize {
        // The header has at least one byte, so the difference is not negative.
        (Self::LEN + bytes - 1) / SEGMENT + 1
    }

    /// Encodes the header.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        (self.byte_count | INLINE).to_be_bytes()
    }
}
