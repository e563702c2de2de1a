//! Compressed completions: several similar CQEs, as a title and 8-byte mini CQEs (the kernel's
//! `struct mlx5_mini_cqe8`).
//!
//! Layout of a session of `count` CQEs whose title is at entry `c` of the CQ (indices modulo the
//! CQ's size; derived from the kernel's `mlx5e_decompress_cqes_start`, `mlx5e_decompress_cqes_cont`
//! and `mlx5e_read_mini_arr_slot`, and DPDK's `mlx5_rx_poll_len` and `rxq_cq_decompress_v`):
//!
//! - Entry `c` is the title: a CQE of format 3 whose byte count is `count`, and whose WQE counter
//!   belongs to the first CQE. The title holds, for all CQEs, the fields that no mini CQE has
//!   (opcode, QPN, SRQN, immediate, flags). Only its op_own shows that the session is complete.
//! - Eight mini CQEs make an array that fills an entry, its byte 63 included. The first array is
//!   entry `c + 1`; the others are entries `c + 8`, `c + 16`, ... ([`mini_array_offset`]), each at
//!   the place of the first CQE that it describes. In a CQ of 128-byte entries an array is in the
//!   second half, as a CQE is.
//! - The session replaces `count` CQEs, so the consumer counter advances by `count`. The device
//!   writes only the title and the arrays. Byte 63 of an array entry is data, and the other entries
//!   still have the bytes of the last lap, so on the next lap any such byte 63 may look like a
//!   written owner bit. After it has read a session, the software therefore sets byte 63 of all
//!   `count` entries to a value of an unwritten entry: the inverse of the next lap's owner bit, or
//!   an invalid opcode (the kernel's `mlx5e_cqes_update_owner`, DPDK's `MLX5_CQE_INVALIDATE`).
//! - A mini CQE of a receive has no WQE counter: each counter is the previous one plus 1, modulo
//!   the receive queue's size. A mini CQE of a send has the counter and the opcode.
//!
//! No public source shows a session over an SRQ whose WQEs are not consumed in the order of their
//! indices. Such completions differ in more fields than a mini CQE holds, and are not compressed
//! here.

use super::cqe::{BYTE_COUNT, OPCODE_QPN, WQE_COUNTER};
use super::{CQE_BYTES, CqeFormat, OP_OWN_OFFSET, be16, be32, bytes};

/// Number of mini CQEs in an array (`MLX5_MINI_CQE_ARRAY_SIZE`).
pub const MINI_CQES_PER_ARRAY: usize = CQE_BYTES / MiniCqe::LEN;

/// A completion of a compressed session.
#[doc(alias = "MiniCqeIterator")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MiniCqe {
    /// The first word, in host order. For a receive: RSS hash, or checksum and stride index, of an
    /// Ethernet packet; not used here. For a send: WQE counter, opcode, reserved byte.
    pub word: u32,
    /// Length of the message in bytes.
    pub byte_count: u32,
}

impl MiniCqe {
    /// Length of a mini CQE in bytes.
    pub const LEN: usize = 8;

    /// Makes the mini CQE of a send (`s_wqe_info` of the kernel's struct).
    #[must_use]
    #[inline(always)]
    pub const fn requester(wqe_counter: u16, wqe_opcode: u8, byte_count: u32) -> Self {
        Self {
            word: (wqe_counter as u32) << 16 | (wqe_opcode as u32) << 8,
            byte_count,
        }
    }

    /// Returns the index of the WQE; valid for the mini CQE of a send.
    #[must_use]
    #[inline(always)]
    pub const fn wqe_counter(&self) -> u16 {
        (self.word >> 16) as u16
    }

    /// Returns the opcode of the WQE; valid for the mini CQE of a send.
    #[must_use]
    #[inline(always)]
    pub const fn wqe_opcode(&self) -> u8 {
        (self.word >> 8) as u8
    }

    /// Encodes the mini CQE.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        (u64::from(self.word) << 32 | u64::from(self.byte_count)).to_be_bytes()
    }

    /// Decodes the mini CQE; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            word: be32(b, 0),
            byte_count: be32(b, 4),
        }
    }

    /// Returns mini CQE `entry` from `array`, which must be the array that holds it
    /// ([`mini_array_offset`]). `entry` counts from the session's first mini CQE.
    #[must_use]
    #[inline(always)]
    pub fn of_array(array: &[u8; CQE_BYTES], entry: u32) -> Self {
        let at = entry as usize % MINI_CQES_PER_ARRAY * Self::LEN;
        Self::parse(&bytes(array, at))
    }

    /// Turns `title`, a copy of the session's title, into the plain CQE of this receive; op_own is
    /// unchanged.
    #[inline(always)]
    pub fn expand_receive(&self, title: &mut [u8; CQE_BYTES], wqe_counter: u16) {
        title[BYTE_COUNT..][..4].copy_from_slice(&self.byte_count.to_be_bytes());
        title[WQE_COUNTER..][..2].copy_from_slice(&wqe_counter.to_be_bytes());
    }

    /// Turns `title`, a copy of the session's title, into the plain CQE of this send; op_own is
    /// unchanged.
    #[inline(always)]
    pub fn expand_send(&self, title: &mut [u8; CQE_BYTES]) {
        self.expand_receive(title, self.wqe_counter());
        title[OPCODE_QPN] = self.wqe_opcode();
    }
}

/// Returns the distance from the title to the entry with the array of mini CQE `entry`.
#[must_use]
#[inline(always)]
pub const fn mini_array_offset(entry: u32) -> u32 {
    let first = entry & !(MINI_CQES_PER_ARRAY as u32 - 1);
    if first == 0 { 1 } else { first }
}

/// The fields of the title that describe its session. All other fields have the values of every CQE
/// of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TitleCqe {
    /// Number of CQEs that the session replaces.
    pub count: u32,
    /// Index of the first CQE's WQE.
    pub wqe_counter: u16,
}

impl TitleCqe {
    /// Turns `cqe`, the session's first CQE, into its title; also sets the format in op_own.
    #[inline(always)]
    pub fn emit_into(&self, cqe: &mut [u8; CQE_BYTES]) {
        cqe[BYTE_COUNT..][..4].copy_from_slice(&self.count.to_be_bytes());
        cqe[WQE_COUNTER..][..2].copy_from_slice(&self.wqe_counter.to_be_bytes());
        cqe[OP_OWN_OFFSET] |= (CqeFormat::Compressed as u8) << 2;
    }

    /// Decodes a CQE whose format is [`CqeFormat::Compressed`].
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; CQE_BYTES]) -> Self {
        Self {
            count: be32(b, BYTE_COUNT),
            wqe_counter: be16(b, WQE_COUNTER),
        }
    }
}
