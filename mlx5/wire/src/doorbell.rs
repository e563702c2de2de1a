//! Doorbell records: 32-bit big-endian words in host memory that the device reads (PRM "Doorbell
//! Records").
//!
//! | object | word 0 | word 1 |
//! |---|---|---|
//! | QP | receive counter, 16 bits (`MLX5_RCV_DBR`) | send counter in WQEBBs, 16 bits (`MLX5_SND_DBR`) |
//! | SRQ | posted counter, 16 bits | - |
//! | CQ | consumer counter, 24 bits | arm: sequence number (bits 28..30), solicited only (24), consumer counter (0..24) |
//!
//! A CQ is armed in two steps: word 1 of its record is written, then the same word followed by the
//! CQN is written to [`CQ_DOORBELL_OFFSET`] of its UAR page (libmlx5 `mlx5_arm_cq`, the kernel's
//! `mlx5_cq_arm`). The sequence number counts the events that were taken; the device gives one
//! event per arm.

use crate::ctrl::CtrlWords;
use crate::limits::BLUEFLAME_BYTES;
use crate::{SEGMENT, WQEBB};

/// Index of the word of a QP's record with the number of receives posted.
pub const QP_DBREC_RECEIVE: usize = 0;
/// Index of the word of a QP's record with the number of WQEBBs posted.
pub const QP_DBREC_SEND: usize = 1;
/// Index of the word of a CQ's record with the number of CQEs consumed.
pub const CQ_DBREC_SET_CI: usize = 0;
/// Index of the word of a CQ's record with the command to arm the CQ.
pub const CQ_DBREC_ARM: usize = 1;

/// Returns the length in bytes of the WQEs in half a BlueFlame register: `ctrl` is the control
/// segment at the beginning of that half, and `producer` is the counter in the record. If `ctrl`
/// belongs to the last WQE, this is the length of that WQE. Otherwise the register has a batch, and
/// this is the length of all WQEBBs from this WQE on. Returns `None` if the length is more than
/// half a register. The driver may also store only the first 8 bytes of the last WQE.
#[must_use]
pub fn announced_bytes(ctrl: CtrlWords, producer: u16) -> Option<usize> {
    let outstanding = usize::from(producer.wrapping_sub(ctrl.wqe_index()));
    let len = usize::from(ctrl.ds()) * SEGMENT;
    let is_last = len.div_ceil(WQEBB).max(1) == outstanding;
    Some(if is_last { len } else { outstanding * WQEBB }).filter(|&bytes| bytes <= BLUEFLAME_BYTES)
}

/// Returns the value of a QP or SRQ record word for a counter.
#[must_use]
#[inline(always)]
pub const fn queue_record(counter: u16) -> u32 {
    (counter as u32).to_be()
}

/// Returns the counter in a QP or SRQ record word.
#[must_use]
#[inline(always)]
pub const fn queue_record_index(word: u32) -> u16 {
    u32::from_be(word) as u16
}

/// Returns the value of a CQ's consumer record word.
#[must_use]
#[inline(always)]
pub const fn cq_consumer_record(consumed: u32) -> u32 {
    (consumed & 0xff_ffff).to_be()
}

/// Offset in a UAR page of the command that arms a CQ (`MLX5_CQ_DOORBELL`).
pub const CQ_DOORBELL_OFFSET: usize = 0x20;

/// The command that asks for an event at the next completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqArm {
    /// Low 2 bits of the number of events that were taken.
    pub sequence: u8,
    /// Whether only a solicited or failed completion gives an event (`MLX5_CQ_DB_REQ_NOT_SOL`, else
    /// `MLX5_CQ_DB_REQ_NOT`).
    pub solicited_only: bool,
    /// Number of CQEs consumed, modulo 2^24. If a later CQE is already in the queue and has given
    /// no event, the device gives its event at once.
    pub consumed: u32,
}

impl CqArm {
    const fn word(&self) -> u32 {
        (self.sequence as u32 & 3) << 28
            | (self.solicited_only as u32) << 24
            | self.consumed & 0xff_ffff
    }

    /// Returns the value of the record's word.
    #[must_use]
    #[inline(always)]
    pub const fn record(&self) -> u32 {
        self.word().to_be()
    }

    /// Returns the bytes of the doorbell for queue `cqn`.
    #[must_use]
    #[inline(always)]
    pub const fn doorbell(&self, cqn: u32) -> [u8; 8] {
        ((self.word() as u64) << 32 | cqn as u64).to_be_bytes()
    }

    /// Decodes the command in a record's word.
    #[must_use]
    #[inline(always)]
    pub const fn from_record(word: u32) -> Self {
        let word = u32::from_be(word);
        Self {
            sequence: (word >> 28) as u8 & 3,
            solicited_only: word >> 24 & 1 != 0,
            consumed: word & 0xff_ffff,
        }
    }
}
