//! Control segment: the first 16 bytes of every send WQE (`struct mlx5_wqe_ctrl_seg`; PRM "Control Segment").
//!
//! | bytes | field |
//! |---|---|
//! | 0 | opmod |
//! | 1..3 | index of the WQE's first WQEBB, modulo 2^16 |
//! | 3 | opcode |
//! | 4..7 | QPN |
//! | 7 | ds: 16-byte segments of the WQE, control segment included, 6 bits |
//! | 8 | signature |
//! | 9..11 | DCI stream channel id, 0 here |
//! | 11 | fm_ce_se: fence mode (bits 5..8), completion mode (bits 2..4), solicited (bit 1) |
//! | 12..16 | immediate |

use super::{SEGMENT, be16, be32};

/// Send WQE opcodes (`MLX5_OPCODE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Does nothing; fills the end of the SQ.
    Nop = 0x00,
    /// RDMA WRITE.
    RdmaWrite = 0x08,
    /// RDMA WRITE with immediate: consumes a receive at the target.
    RdmaWriteImm = 0x09,
    /// RDMA READ.
    RdmaRead = 0x10,
}

impl Opcode {
    /// The opcode of a WQE byte, if this crate knows it.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Option<Self> {
        Some(match byte {
            0x00 => Self::Nop,
            0x08 => Self::RdmaWrite,
            0x09 => Self::RdmaWriteImm,
            0x10 => Self::RdmaRead,
            _ => return None,
        })
    }
}

/// When a WQE gives a CQE (`MLX5_WQE_CTRL_CQ_UPDATE` is `Always`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CompletionMode {
    /// Unsignaled: a CQE only if it fails.
    OnError = 0,
    /// Signaled.
    Always = 2,
}

/// Control segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtrlSegment {
    /// Opcode byte; [`Opcode::from_wire`] names it.
    pub opcode: u8,
    /// Index of the WQE's first WQEBB.
    pub wqe_index: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// 16-byte segments of the WQE, this one included: 1..=63.
    pub ds: u8,
    /// Whether success gives a CQE.
    pub signaled: bool,
    /// Immediate, host order.
    pub imm: u32,
}

impl CtrlSegment {
    /// Bytes of the segment.
    pub const LEN: usize = SEGMENT;

    /// The bytes.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let completion = if self.signaled { CompletionMode::Always } else { CompletionMode::OnError };
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&(u32::from(self.wqe_index) << 8 | u32::from(self.opcode)).to_be_bytes());
        b[4..8].copy_from_slice(&(self.qpn << 8 | u32::from(self.ds & 0x3f)).to_be_bytes());
        b[8..12].copy_from_slice(&(u32::from(completion as u8) << 2).to_be_bytes());
        b[12..16].copy_from_slice(&self.imm.to_be_bytes());
        b
    }

    /// Reads the bytes; anything decodes.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            opcode: b[3],
            wqe_index: be16(b, 1),
            qpn: be32(b, 4) >> 8,
            ds: b[7] & 0x3f,
            signaled: (b[11] >> 2) & 3 == CompletionMode::Always as u8,
            imm: be32(b, 12),
        }
    }
}
