//! The device's byte formats, pure: no queue, no pointer, no `unsafe`.
//!
//! One file per format. A format is a plain struct with `LEN`, `emit(&self) -> [u8; LEN]` and
//! `parse(&[u8; LEN]) -> Self`; reserved bytes are emitted as zero. Control and data segments are
//! read in words, [`CtrlWords`] and [`DataWords`], whose fields are decoded one by one.
//!
//! - WQEs: `wqe`, composed of `ctrl`, `raddr`, `atomic`, `datagram` and `data`. Receives: `srq` and
//!   `data`.
//! - `doorbell`: doorbell records, and the bytes of a BlueFlame register.
//! - Completions: `cqe`, `mini_cqe`. Asynchronous events: `event`.
//! - Packets: [`roce`].
//! - Commands: `attributes`, `limits`.
//!
//! The driver emits WQEs and parses CQEs, the software HCA does the reverse, and both use these
//! definitions. The golden bytes in the tests have other sources: `infiniband/mlx5dv.h`, and bytes
//! that NVIDIA's libmlx5 wrote.
//!
//! All fields are big-endian, except the ICRC of packets. "PRM" is NVIDIA's *Adapters Programmer's
//! Reference Manual*.
//!
//! ```
//! use mlx5_wire::{DataSegment, DataWords};
//!
//! let buffer = DataSegment { byte_count: 64, lkey: 0x1234, addr: 0x7f00_0000_1000 };
//! let bytes = buffer.emit();
//! assert_eq!(bytes, [0, 0, 0, 64, 0, 0, 0x12, 0x34, 0, 0, 0x7f, 0, 0, 0, 0x10, 0]);
//! assert_eq!(DataWords::parse(&bytes).addr(), buffer.addr);
//! ```
#![no_std]
#![forbid(unsafe_code)]

mod atomic;
mod attributes;
mod cqe;
mod ctrl;
mod data;
mod datagram;
mod doorbell;
mod event;
mod limits;
mod mini_cqe;
mod raddr;
pub mod roce;
mod srq;
mod wqe;

pub use atomic::AtomicSegment;
pub use attributes::{Access, ConnectOptions, Service, rnr_timer_code, rnr_timer_ns};
pub use cqe::{
    CQE_BYTES, CQE128_BYTES, CQE128_OFFSET, CqeFormat, CqeOpcode, ErrorCqe, NO_QPN, OP_OWN_OFFSET,
    OP_OWN_UNTOUCHED, QPN_OFFSET, RequesterCqe, ResponderCqe, Syndrome, is_solicited, op_own,
    op_own_with,
};
pub use ctrl::{CompletionMode, CtrlSegment, CtrlWords, FenceMode, Opcode, Writes};
pub use data::{DataSegment, DataWords, INVALID_LKEY, InlineHeader};
pub use datagram::{AddressVector, DatagramSegment};
pub use doorbell::{
    CQ_DBREC_ARM, CQ_DBREC_SET_CI, CQ_DOORBELL_OFFSET, CqArm, QP_DBREC_RECEIVE, QP_DBREC_SEND,
    announced_bytes, cq_consumer_record, queue_record, queue_record_index,
};
pub use event::AsyncEvent;
pub use limits::{
    ATOMIC_BYTES, BLUEFLAME_BYTES, GRH_BYTES, MAX_CQE, MAX_DATAGRAM_BYTES, MAX_INLINE,
    MAX_MESSAGE_BYTES, MAX_RECV_SGE, MAX_RECV_WR, MAX_SEND_WR,
};
pub use mini_cqe::{MINI_CQES_PER_ARRAY, MiniCqe, TitleCqe, mini_array_offset};
pub use raddr::RaddrSegment;
pub use srq::NextSegment;
pub use wqe::{Header, Piece, Pieces, Wqe, WqeError};

/// Length of a basic block of a send WQE (WQEBB), in bytes: the unit of the SQ.
pub const WQEBB: usize = 64;
/// Length of a segment in bytes: the unit of a WQE's `ds` count.
pub const SEGMENT: usize = 16;

/// Returns the `N` bytes at `at`, or zeros if `b` ends before them.
#[inline(always)]
fn bytes<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    b.get(at..)
        .and_then(<[u8]>::first_chunk)
        .copied()
        .unwrap_or([0; N])
}

#[inline(always)]
fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes(b, at))
}

#[inline(always)]
fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes(b, at))
}

#[inline(always)]
fn be64(b: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes(b, at))
}
