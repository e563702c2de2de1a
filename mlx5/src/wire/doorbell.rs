//! Doorbell records: 32-bit big-endian words in host memory that the device reads (PRM "Doorbell Records").
//!
//! | object | word 0 | word 1 |
//! |---|---|---|
//! | QP | receive counter, 16 bits (`MLX5_RCV_DBR`) | send counter in WQEBBs, 16 bits (`MLX5_SND_DBR`) |
//! | SRQ | posted counter, 16 bits | - |
//! | CQ | consumer counter, 24 bits | arm |

/// Word of a QP's record: receives posted.
pub const QP_DBREC_RECEIVE: usize = 0;
/// Word of a QP's record: WQEBBs posted.
pub const QP_DBREC_SEND: usize = 1;
/// Word of a CQ's record: CQEs consumed.
pub const CQ_DBREC_SET_CI: usize = 0;
/// Word of a CQ's record: arm command.
pub const CQ_DBREC_ARM: usize = 1;

/// The value of a QP or SRQ record word for a counter.
#[must_use]
#[inline(always)]
pub const fn queue_record(counter: u16) -> u32 {
    (counter as u32).to_be()
}

/// The counter in a QP or SRQ record word.
#[must_use]
#[inline(always)]
pub const fn queue_record_index(word: u32) -> u16 {
    u32::from_be(word) as u16
}

/// The value of a CQ's consumer record word.
#[must_use]
#[inline(always)]
pub const fn cq_consumer_record(consumed: u32) -> u32 {
    (consumed & 0xff_ffff).to_be()
}
