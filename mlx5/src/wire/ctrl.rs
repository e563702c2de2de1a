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
//! | 11 | fm_ce_se: fence mode (bits 5..8, [`FenceMode`]), completion mode (2..4, [`CompletionMode`]), solicited (1) |
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
    /// SEND: consumes a receive at the target, which says where the bytes go.
    Send = 0x0a,
    /// SEND with immediate.
    SendImm = 0x0b,
    /// RDMA READ.
    RdmaRead = 0x10,
    /// Atomic compare-and-swap of 8 bytes.
    AtomicCompareSwap = 0x11,
    /// Atomic fetch-and-add of 8 bytes.
    AtomicFetchAdd = 0x12,
}

impl Opcode {
    /// The opcode of a WQE byte, if this crate knows it.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Option<Self> {
        Some(match byte {
            0x00 => Self::Nop,
            0x08 => Self::RdmaWrite,
            0x09 => Self::RdmaWriteImm,
            0x0a => Self::Send,
            0x0b => Self::SendImm,
            0x10 => Self::RdmaRead,
            0x11 => Self::AtomicCompareSwap,
            0x12 => Self::AtomicFetchAdd,
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

/// What a WQE waits for before it starts (the kernel's `MLX5_FENCE_MODE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FenceMode {
    /// Nothing.
    None = 0,
    /// Earlier local operations (`MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`).
    InitiatorSmall = 1,
    /// Earlier READs and atomics.
    Fence = 2,
    /// Everything earlier.
    StrongOrdering = 3,
    /// Earlier READs, atomics and local operations: what libmlx5 makes of `IBV_SEND_FENCE` (`MLX5_WQE_CTRL_FENCE`).
    SmallAndFence = 4,
}

impl FenceMode {
    /// The fence mode in a fm_ce_se byte; `None` for the values nobody names.
    #[must_use]
    pub const fn from_fm_ce_se(byte: u8) -> Option<Self> {
        Some(match byte >> 5 {
            0 => Self::None,
            1 => Self::InitiatorSmall,
            2 => Self::Fence,
            3 => Self::StrongOrdering,
            4 => Self::SmallAndFence,
            _ => return None,
        })
    }
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
    /// What it waits for; a mode nobody names is read as [`FenceMode::StrongOrdering`], which is safe for all.
    pub fence: FenceMode,
    /// Whether the target's CQE is solicited, where it gets one.
    pub solicited: bool,
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
        let flags = (self.fence as u8) << 5 | (completion as u8) << 2 | u8::from(self.solicited) << 1;
        b[8..12].copy_from_slice(&u32::from(flags).to_be_bytes());
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
            fence: match FenceMode::from_fm_ce_se(b[11]) {
                Some(mode) => mode,
                None => FenceMode::StrongOrdering,
            },
            solicited: b[11] & 2 != 0,
            imm: be32(b, 12),
        }
    }
}
