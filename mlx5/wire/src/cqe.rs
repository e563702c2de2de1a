//! Completion queue entries, 64 bytes (`struct mlx5_cqe64`, `struct mlx5_err_cqe`; PRM "Completion
//! Queue Entry").
//!
//! | byte | success | error |
//! |---|---|---|
//! | 24..28 | responder: flags (GRH: bits 28..30, service level: 24..28), 24-bit QPN of the sender (UD) | |
//! | 32..36 | SRQN or user index | SRQN |
//! | 36..40 | immediate | |
//! | 44..48 | byte count; in the title of a compressed session the number of its CQEs | |
//! | 54 | | vendor syndrome |
//! | 55 | | syndrome |
//! | 56..60 | requester: opcode of the WQE, 24-bit QPN; responder: QPN | opcode of the WQE, QPN |
//! | 60..62 | WQE counter | WQE counter |
//! | 63 | op_own: opcode (bits 4..8), format (2..4), solicited (1), owner (0) | same |
//!
//! The owner bit flips on each lap of the device through the CQ. The byte op_own is written last
//! and read first.
//!
//! An entry of 128 bytes consists of 64 other bytes, followed by this CQE ([`CQE128_OFFSET`];
//! libmlx5 `get_sw_cqe` and the kernel's `mlx5_ib` read the second half). The [`CqeFormat`]
//! determines what the first half contains, and which fields of the CQE are replaced by data.

use super::{be16, be32};

/// Length of a CQE in bytes.
pub const CQE_BYTES: usize = 64;
/// Length of an entry in a CQ of large entries in bytes.
pub const CQE128_BYTES: usize = 128;
/// Offset of the CQE in a large entry.
pub const CQE128_OFFSET: usize = CQE128_BYTES - CQE_BYTES;
/// Offset of the op_own byte, which has the opcode and the owner bit.
pub const OP_OWN_OFFSET: usize = 63;
/// Value of the op_own byte in a CQE that the device has not yet written: opcode 0xf, which is
/// invalid on either lap.
pub const OP_OWN_UNTOUCHED: u8 = 0xf1;

const SLID: usize = 22;
const FLAGS_RQPN: usize = 24;
const SRQN: usize = 32;
const IMM: usize = 36;
pub(super) const BYTE_COUNT: usize = 44;
const VENDOR_SYNDROME: usize = 54;
const SYNDROME: usize = 55;
pub(super) const OPCODE_QPN: usize = 56;
/// Offset of the three bytes of the QPN.
pub const QPN_OFFSET: usize = OPCODE_QPN + 1;
/// The QPN in a CQE whose queue pair was destroyed before the CQE was polled. No queue pair has
/// this number, because it means multicast (InfiniBand specification, "Queue Pair Number").
pub const NO_QPN: u32 = 0xff_ffff;
pub(super) const WQE_COUNTER: usize = 60;

/// CQE opcodes (`MLX5_CQE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum CqeOpcode {
    /// A send WQE is complete.
    Requester = 0,
    /// A WRITE with immediate arrived.
    ResponderWriteImm = 1,
    /// A SEND arrived.
    ResponderSend = 2,
    /// A SEND with immediate arrived.
    ResponderSendImm = 3,
    /// A SEND that invalidates an rkey arrived. The rkey replaces the immediate.
    ResponderSendInvalidate = 4,
    /// The CQ was resized: later CQEs are in the new buffer.
    Resize = 5,
    /// A send WQE failed.
    RequesterError = 13,
    /// A receive WQE failed.
    ResponderError = 14,
    /// The device has not written the CQE yet.
    Invalid = 15,
}

impl CqeOpcode {
    /// Returns the opcode in an op_own byte; `None` if this crate does not know it.
    #[must_use]
    #[inline(always)]
    pub const fn from_op_own(op_own: u8) -> Option<Self> {
        Self::from_repr(op_own >> 4)
    }
}

/// The data that a CQE carries in addition to its fields (bits 2..4 of op_own; the kernel's
/// `MLX5_NO_INLINE_DATA`, `MLX5_INLINE_DATA32_SEG`, `MLX5_INLINE_DATA64_SEG`, `MLX5_COMPRESSED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CqeFormat {
    /// No data.
    Plain = 0,
    /// The received bytes, maximum 32, are in bytes 0..32 of the CQE itself: they replace the
    /// sender's QPN and the GRH flag. The device does not write them to the receive's buffers (the
    /// kernel's `configure_responder_scat_cqe`: enabled per queue pair, reliable connections only).
    Inline32 = 1,
    /// The received bytes, maximum 64, are in the first half of a 128-byte entry (libmlx5
    /// `mlx5_copy_to_recv_wqe` with `cqe - 1`).
    Inline64 = 2,
    /// The title of a compressed session: see [`MiniCqe`](super::MiniCqe).
    Compressed = 3,
}

impl CqeFormat {
    /// Returns the format in an op_own byte.
    #[must_use]
    #[inline(always)]
    pub const fn from_op_own(op_own: u8) -> Self {
        match (op_own >> 2) & 3 {
            0 => Self::Plain,
            1 => Self::Inline32,
            2 => Self::Inline64,
            _ => Self::Compressed,
        }
    }
}

/// Returns the op_own byte of a plain CQE with this opcode, on a lap whose owner bit is `owner`.
#[must_use]
#[inline(always)]
pub const fn op_own(opcode: CqeOpcode, owner: bool) -> u8 {
    op_own_with(opcode, CqeFormat::Plain, false, owner)
}

/// Returns the op_own byte with all its fields. `solicited` is set if the sender asked for an event
/// (SEND and WRITE with immediate).
#[must_use]
#[inline(always)]
pub const fn op_own_with(opcode: CqeOpcode, format: CqeFormat, solicited: bool, owner: bool) -> u8 {
    (opcode as u8) << 4 | (format as u8) << 2 | (solicited as u8) << 1 | owner as u8
}

/// Returns whether an op_own byte has the solicited bit.
#[must_use]
#[inline(always)]
pub const fn is_solicited(op_own: u8) -> bool {
    op_own & 2 != 0
}

/// Completion of a send WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequesterCqe {
    /// Opcode of the WQE.
    pub wqe_opcode: u8,
    /// QP to which the WQE was posted.
    pub qpn: u32,
    /// Index of the WQE's first WQEBB.
    pub wqe_counter: u16,
    /// Number of bytes that a READ or an atomic fetched; 0 for other operations.
    pub byte_count: u32,
    /// The QP's user index, 24 bits; 0 if the device has none.
    pub user_index: u32,
}

impl RequesterCqe {
    /// Encodes the CQE with the op_own byte [`OP_OWN_UNTOUCHED`]. The caller knows the lap, and
    /// must set that byte.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; CQE_BYTES] {
        let mut b = [0; CQE_BYTES];
        b[SRQN..][..4].copy_from_slice(&self.user_index.to_be_bytes());
        b[BYTE_COUNT..][..4].copy_from_slice(&self.byte_count.to_be_bytes());
        b[OPCODE_QPN..][..4].copy_from_slice(
            &(u32::from(self.wqe_opcode) << 24 | self.qpn & 0xff_ffff).to_be_bytes(),
        );
        b[WQE_COUNTER..][..2].copy_from_slice(&self.wqe_counter.to_be_bytes());
        b[OP_OWN_OFFSET] = OP_OWN_UNTOUCHED;
        b
    }

    /// Decodes a CQE whose opcode is [`CqeOpcode::Requester`].
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; CQE_BYTES]) -> Self {
        Self {
            wqe_opcode: b[OPCODE_QPN],
            qpn: be32(b, OPCODE_QPN) & 0xff_ffff,
            wqe_counter: be16(b, WQE_COUNTER),
            byte_count: be32(b, BYTE_COUNT),
            user_index: be32(b, SRQN) & 0xff_ffff,
        }
    }
}

/// Completion of a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponderCqe {
    /// QP the message arrived on: 24 bits.
    pub qpn: u32,
    /// SRQ number, or the QP's user index.
    pub srqn: u32,
    /// Immediate, host order; 0 if the opcode carries none.
    pub imm: u32,
    /// Length of the message in bytes.
    pub byte_count: u32,
    /// Index of the receive WQE.
    pub wqe_counter: u16,
    /// QP that sent the message, on UD. 0 on a connected QP, whose peer is always the same.
    pub source_qpn: u32,
    /// LID of the sender of a UD message on InfiniBand, to which an answer is sent; otherwise 0.
    pub slid: u16,
    /// Whether the first 40 bytes of a UD receive hold a GRH; otherwise they are undefined.
    pub grh: bool,
    /// Service level of a UD message, 4 bits. On RoCE the kind of the header in the first 40 bytes
    /// of the receive: 0 is a GRH, 1 is IPv6, 2 is IPv4 in the last 20 of the 40 bytes.
    pub sl: u8,
}

impl ResponderCqe {
    /// Encodes the CQE with the op_own byte [`OP_OWN_UNTOUCHED`]. The caller knows the opcode and
    /// the lap, and must set that byte.
    #[must_use]
    #[inline(always)]
    pub fn emit(&self) -> [u8; CQE_BYTES] {
        let mut b = [0; CQE_BYTES];
        for (bytes, word) in b.chunks_exact_mut(8).zip(self.emit_words(OP_OWN_UNTOUCHED)) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        b
    }

    /// Encodes the CQE as eight words in memory order, with the op_own byte `op_own`, for a device
    /// that stores the words one by one.
    #[must_use]
    #[inline(always)]
    pub fn emit_words(&self, op_own: u8) -> [u64; CQE_BYTES / 8] {
        let word = |upper: u32, lower: u32| (u64::from(upper) << 32 | u64::from(lower)).to_be();
        let sender = u32::from(self.grh) << 28
            | u32::from(self.sl & 0xf) << 24
            | self.source_qpn & 0xff_ffff;
        let last = u32::from(self.wqe_counter) << 16 | u32::from(op_own);
        [
            0,
            0,
            word(0, self.slid.into()),
            word(sender, 0),
            word(self.srqn, self.imm),
            word(0, self.byte_count),
            0,
            word(self.qpn, last),
        ]
    }

    /// Decodes a responder CQE.
    #[must_use]
    #[inline(always)]
    pub fn parse(b: &[u8; CQE_BYTES]) -> Self {
        Self {
            qpn: be32(b, OPCODE_QPN) & 0xff_ffff,
            srqn: be32(b, SRQN) & 0xff_ffff,
            imm: be32(b, IMM),
            byte_count: be32(b, BYTE_COUNT),
            wqe_counter: be16(b, WQE_COUNTER),
            source_qpn: be32(b, FLAGS_RQPN) & 0xff_ffff,
            slid: be16(b, SLID),
            grh: be32(b, FLAGS_RQPN) >> 28 & 3 != 0,
            sl: (be32(b, FLAGS_RQPN) >> 24 & 0xf) as u8,
        }
    }
}

/// The reason why a WQE failed (`MLX5_CQE_SYNDROME_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error, strum::FromRepr)]
#[repr(u8)]
pub enum Syndrome {
    /// The message is longer than the receive, or has a length that the port cannot carry.
    #[error(
        "local length error: the message is longer than the receive buffer or than the port allows"
    )]
    LocalLength = 0x01,
    /// The WQE is malformed or not allowed on this QP.
    #[error("local QP operation error: the WQE is malformed or not allowed on this QP")]
    LocalQpOperation = 0x02,
    /// A data segment's lkey, bounds, access or protection domain is wrong.
    #[error(
        "local protection error: wrong lkey, bounds, access flags or protection domain of a data segment"
    )]
    LocalProtection = 0x04,
    /// The QP was in the error state before this WQE ran.
    #[error("flushed: the queue pair went to the error state before this work request ran")]
    WorkRequestFlushed = 0x05,
    /// A memory window could not be bound.
    #[error("memory window bind error")]
    MemoryWindowBind = 0x06,
    /// The peer's transport sent an unexpected answer.
    #[error("bad response from the peer")]
    BadResponse = 0x10,
    /// The responder's buffer could not be accessed.
    #[error("local access error at the responder")]
    LocalAccess = 0x11,
    /// The responder does not support the request.
    #[error("remote invalid request error")]
    RemoteInvalidRequest = 0x12,
    /// The remote key, bounds, access flags or protection domain is wrong.
    #[error(
        "remote access error: wrong rkey, bounds, access flags or protection domain at the peer"
    )]
    RemoteAccess = 0x13,
    /// The responder could not complete the operation.
    #[error("remote operation error")]
    RemoteOperation = 0x14,
    /// No answer arrived within timeout and retries: the peer is dead, closed or not connected, or
    /// the network loses the packets.
    #[error(
        "transport retry counter exceeded: no answer arrives (the peer is dead, closed or not connected, or packets are lost)"
    )]
    TransportRetryExceeded = 0x15,
    /// The peer had no receive posted for longer than the RNR timer and retries allow.
    #[error("RNR retry counter exceeded: the peer has no receive posted")]
    RnrRetryExceeded = 0x16,
    /// The peer aborted the operation.
    #[error("aborted by the peer")]
    RemoteAborted = 0x22,
    /// A value this crate does not know; the raw byte is in [`ErrorCqe::raw_syndrome`].
    #[error("unknown completion syndrome")]
    Unknown = 0xff,
}

impl Syndrome {
    /// Returns the syndrome of a CQE byte.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Self {
        match Self::from_repr(byte) {
            Some(syndrome) => syndrome,
            None => Self::Unknown,
        }
    }
}

/// Completion with error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCqe {
    /// The syndrome byte as the device wrote it.
    pub raw_syndrome: u8,
    /// Detail of the error, whose meaning the vendor defines. The software HCA documents its
    /// details.
    pub vendor_syndrome: u8,
    /// Opcode of the WQE, in the completion of a send.
    pub wqe_opcode: u8,
    /// QP to which the WQE was posted.
    pub qpn: u32,
    /// Index of the WQE.
    pub wqe_counter: u16,
    /// The QP's user index, 24 bits; 0 if the device has none.
    pub user_index: u32,
}

impl ErrorCqe {
    /// Encodes the CQE with the op_own byte [`OP_OWN_UNTOUCHED`]. The caller knows the opcode and
    /// the lap, and must set that byte.
    #[must_use]
    pub fn emit(&self) -> [u8; CQE_BYTES] {
        let mut b = [0; CQE_BYTES];
        b[SRQN..][..4].copy_from_slice(&self.user_index.to_be_bytes());
        b[VENDOR_SYNDROME] = self.vendor_syndrome;
        b[SYNDROME] = self.raw_syndrome;
        b[OPCODE_QPN..][..4].copy_from_slice(
            &(u32::from(self.wqe_opcode) << 24 | self.qpn & 0xff_ffff).to_be_bytes(),
        );
        b[WQE_COUNTER..][..2].copy_from_slice(&self.wqe_counter.to_be_bytes());
        b[OP_OWN_OFFSET] = OP_OWN_UNTOUCHED;
        b
    }

    /// Decodes an error CQE.
    #[must_use]
    pub fn parse(b: &[u8; CQE_BYTES]) -> Self {
        Self {
            raw_syndrome: b[SYNDROME],
            vendor_syndrome: b[VENDOR_SYNDROME],
            wqe_opcode: b[OPCODE_QPN],
            qpn: be32(b, OPCODE_QPN) & 0xff_ffff,
            wqe_counter: be16(b, WQE_COUNTER),
            user_index: be32(b, SRQN) & 0xff_ffff,
        }
    }

    /// Returns the syndrome.
    #[must_use]
    pub fn syndrome(&self) -> Syndrome {
        Syndrome::from_wire(self.raw_syndrome)
    }
}
