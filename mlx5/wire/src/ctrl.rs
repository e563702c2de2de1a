//! Control segment: the first 16 bytes of every send WQE (`struct mlx5_wqe_ctrl_seg`; PRM "Control
//! Segment").
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

use super::{SEGMENT, be32, be64};

/// Send WQE opcodes (`MLX5_OPCODE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Opcode {
    /// No operation; fills the end of the SQ.
    Nop = 0x00,
    /// RDMA WRITE.
    RdmaWrite = 0x08,
    /// RDMA WRITE with immediate: consumes a receive at the target.
    RdmaWriteImm = 0x09,
    /// SEND: consumes a receive at the target. The receive determines the destination of the bytes.
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

/// The condition for the CQE of a WQE (`MLX5_WQE_CTRL_CQ_UPDATE` is `Always`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CompletionMode {
    /// Unsignaled: the WQE gives a CQE only if it fails.
    OnError = 0,
    /// Signaled: the WQE always gives a CQE.
    Always = 2,
}

/// The earlier work that a WQE waits for before it starts (the kernel's `MLX5_FENCE_MODE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FenceMode {
    /// No earlier work.
    None = 0,
    /// Earlier local operations (`MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`).
    InitiatorSmall = 1,
    /// Earlier READs and atomics.
    Fence = 2,
    /// All earlier work.
    StrongOrdering = 3,
    /// Earlier READs, atomics and local operations: libmlx5 translates `IBV_SEND_FENCE` to this
    /// (`MLX5_WQE_CTRL_FENCE`).
    SmallAndFence = 4,
}

/// A control segment to be encoded. [`CtrlWords`] decodes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtrlSegment {
    /// Opcode byte, which [`Opcode::from_repr`] converts to an [`Opcode`].
    pub opcode: u8,
    /// Index of the WQE's first WQEBB.
    pub wqe_index: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Number of 16-byte segments of the WQE, including this segment: 1..=63.
    pub ds: u8,
    /// Whether the WQE gives a CQE on success.
    pub signaled: bool,
    /// The earlier work for which the WQE waits.
    pub fence: FenceMode,
    /// Whether the target's CQE, if the message causes one, is solicited.
    pub solicited: bool,
    /// Immediate, host order.
    pub imm: u32,
}

impl CtrlSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = SEGMENT;

    /// Encodes the segment.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let completion = if self.signaled {
            CompletionMode::Always
        } else {
            CompletionMode::OnError
        };
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(
            &(u32::from(self.wqe_index) << 8 | u32::from(self.opcode)).to_be_bytes(),
        );
        b[4..8].copy_from_slice(&(self.qpn << 8 | u32::from(self.ds & 0x3f)).to_be_bytes());
        let fm_ce_se =
            (self.fence as u8) << 5 | (completion as u8) << 2 | u8::from(self.solicited) << 1;
        b[8..12].copy_from_slice(&u32::from(fm_ce_se).to_be_bytes());
        b[12..16].copy_from_slice(&self.imm.to_be_bytes());
        b
    }
}

/// A control segment as three words in host order. A field is decoded only when its function is
/// called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtrlWords {
    /// Bytes 0..8.
    first: u64,
    /// Bytes 8..12.
    flags: u32,
    /// Bytes 12..16.
    imm: u32,
}

/// The bits that the control segments of all WRITEs of one queue pair have in common, with and
/// without immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writes(u64);

impl Writes {
    /// Returns the common bits for queue pair `qpn`, which has 24 bits.
    #[must_use]
    pub const fn of(qpn: u32) -> Self {
        Self((Opcode::RdmaWrite as u64) << 32 | (qpn as u64) << 8)
    }
}

impl CtrlWords {
    /// Decodes the segment; any bytes are accepted.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; CtrlSegment::LEN]) -> Self {
        Self {
            first: be64(b, 0),
            flags: be32(b, 8),
            imm: be32(b, 12),
        }
    }

    /// Returns whether this segment belongs to WQE `wqe_index` of queue pair `qpn`, which has 24
    /// bits.
    #[must_use]
    #[inline(always)]
    pub const fn names(self, wqe_index: u16, qpn: u32) -> bool {
        self.first & 0x00ff_ff00_ffff_ff00 == (wqe_index as u64) << 40 | (qpn as u64) << 8
    }

    /// Returns whether this WQE is a WRITE, has index `wqe_index` and `ds` segments, and belongs to
    /// the queue pair for which `writes` was made.
    #[must_use]
    #[inline(always)]
    pub const fn is_one_of(self, writes: Writes, wqe_index: u16, ds: u8) -> bool {
        let expected = (wqe_index as u64) << 40 | writes.0 | ds as u64;
        (self.first ^ expected) & 0x00ff_fffe_ffff_ffff == 0
    }

    /// Returns whether the WQE, which must be a WRITE or a SEND, has an immediate.
    #[must_use]
    #[inline(always)]
    pub const fn has_imm(self) -> bool {
        self.first & 1 << 32 != 0
    }

    /// Returns [`CtrlSegment::opcode`].
    #[must_use]
    #[inline(always)]
    pub const fn opcode(self) -> u8 {
        (self.first >> 32) as u8
    }

    /// Returns [`CtrlSegment::wqe_index`].
    #[must_use]
    #[inline(always)]
    pub const fn wqe_index(self) -> u16 {
        (self.first >> 40) as u16
    }

    /// Returns [`CtrlSegment::qpn`].
    #[must_use]
    #[inline(always)]
    pub const fn qpn(self) -> u32 {
        self.first as u32 >> 8
    }

    /// Returns [`CtrlSegment::ds`].
    #[must_use]
    #[inline(always)]
    pub const fn ds(self) -> u8 {
        self.first as u8 & 0x3f
    }

    /// Returns [`CtrlSegment::signaled`].
    #[must_use]
    #[inline(always)]
    pub const fn signaled(self) -> bool {
        self.flags & 0b1100 == (CompletionMode::Always as u32) << 2
    }

    /// Returns [`CtrlSegment::solicited`].
    #[must_use]
    #[inline(always)]
    pub const fn solicited(self) -> bool {
        self.flags & 2 != 0
    }

    /// Returns [`CtrlSegment::fence`]. An undefined mode becomes [`FenceMode::StrongOrdering`],
    /// which is safe for every WQE.
    #[must_use]
    #[inline(always)]
    pub const fn fence(self) -> FenceMode {
        match self.flags as u8 >> 5 {
            0 => FenceMode::None,
            1 => FenceMode::InitiatorSmall,
            2 => FenceMode::Fence,
            4 => FenceMode::SmallAndFence,
            _ => FenceMode::StrongOrdering,
        }
    }

    /// Returns [`CtrlSegment::imm`].
    #[must_use]
    #[inline(always)]
    pub const fn imm(self) -> u32 {
        self.imm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_segment_is_read_as_it_was_emitted() {
        let fences = [
            FenceMode::None,
            FenceMode::InitiatorSmall,
            FenceMode::Fence,
            FenceMode::StrongOrdering,
            FenceMode::SmallAndFence,
        ];
        for (n, opcode) in [
            Opcode::Nop,
            Opcode::RdmaWrite,
            Opcode::RdmaWriteImm,
            Opcode::Send,
            Opcode::SendImm,
        ]
        .into_iter()
        .enumerate()
        {
            let opcode = opcode as u8;
            let wqe_index = 0x8001 << n;
            let qpn = 0x80_0001 << n & 0xff_ffff;
            let (signaled, solicited) = (n % 2 == 0, n % 3 == 0);
            let segment = CtrlSegment {
                opcode,
                wqe_index,
                qpn,
                ds: 0x21 + n as u8,
                signaled,
                fence: fences[n],
                solicited,
                imm: !0 << n,
            };
            let words = CtrlWords::parse(&segment.emit());
            assert_eq!(
                (words.opcode(), words.wqe_index(), words.qpn(), words.ds()),
                (opcode, wqe_index, qpn, segment.ds)
            );
            assert_eq!(
                (
                    words.signaled(),
                    words.solicited(),
                    words.fence(),
                    words.imm()
                ),
                (signaled, solicited, fences[n], segment.imm)
            );
            let is_write = [Opcode::RdmaWrite as u8, Opcode::RdmaWriteImm as u8].contains(&opcode);
            let writes = Writes::of(qpn);
            assert_eq!(words.is_one_of(writes, wqe_index, segment.ds), is_write);
            assert_eq!(
                words.has_imm() && is_write,
                opcode == Opcode::RdmaWriteImm as u8
            );
            assert!(
                !words.is_one_of(writes, wqe_index ^ 1, segment.ds)
                    && !words.is_one_of(Writes::of(qpn ^ 1), wqe_index, segment.ds)
                    && !words.is_one_of(writes, wqe_index, segment.ds ^ 1)
            );
            assert!(words.names(wqe_index, qpn) && !words.names(wqe_index ^ 1, qpn));
        }
    }
}
