//! The control path: creating and destroying what the data path then drives without asking.
//!
//! Whoever implements it hands the data path plain memory, in the shape `mlx5dv_init_obj` gives for a hardware device: a buffer, its
//! real size, the doorbell record, the BlueFlame register. Nothing above this file knows which device that memory belongs to.
//!
//! Path B, the software HCA, is the only implementation so far; path A (libibverbs and libmlx5, opened at run time) turns this alias
//! into an enum.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;

use crate::mmio::RegisterKind;

/// The device's control path, and the target of its two hooks.
pub(crate) type Control = crate::soft::Hca;

/// A BlueFlame register: two halves of [`BF_BYTES`](crate::doorbell::BF_BYTES).
#[derive(Clone, Copy)]
pub(crate) struct UarParts {
    pub(crate) register: NonNull<u8>,
    pub(crate) kind: RegisterKind,
    /// Where it is in the device's UAR pages, for the hook.
    pub(crate) uar_offset: usize,
}

/// A send queue as the device made it.
pub(crate) struct SqParts {
    pub(crate) qpn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// WQEBBs, a power of two of at most 32,768.
    pub(crate) wqe_cnt: u16,
    pub(crate) max_inline: usize,
    /// The send word of the QP's doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
    pub(crate) uar: UarParts,
}

/// A completion queue as the device made it; every `op_own` has the opcode [`Invalid`](crate::CqeOpcode::Invalid).
pub(crate) struct CqParts {
    pub(crate) cqn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// A power of two.
    pub(crate) entries: u32,
    /// Bytes of an entry, 64 or 128; the CQE is its last 64.
    pub(crate) stride: usize,
    /// The consumer word of the doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
}

/// A shared receive queue as the device made it.
pub(crate) struct SrqParts {
    pub(crate) srqn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// WQEs, a power of two of at most 32,768.
    pub(crate) wqe_cnt: u16,
    /// Bytes of a WQE, a power of two.
    pub(crate) stride: usize,
    pub(crate) record: NonNull<AtomicU32>,
}

/// A queue pair's own receive queue as the device made it.
pub(crate) struct RqParts {
    pub(crate) buffer: NonNull<u8>,
    /// WQEs, a power of two of at most 32,768.
    pub(crate) wqe_cnt: u16,
    /// Bytes of a WQE: 16 for each buffer of a receive, rounded up to a power of two.
    pub(crate) stride: usize,
    /// The receive word of the QP's doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
}

/// A memory region as the device knows it.
#[derive(Clone, Copy)]
pub(crate) struct MrParts {
    pub(crate) key: u32,
    pub(crate) addr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) pages: crate::mr::Pages,
}

/// What a queue pair needs to know of its peer and of the path.
pub(crate) struct ConnectParts {
    pub(crate) qpn: u32,
    pub(crate) remote: crate::QpAddress,
    pub(crate) options: crate::ConnectOptions,
}

/// A queue pair to be made.
pub(crate) struct QpRequest<'a> {
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    /// Its receive queue, and whether no other queue pair takes from it.
    pub(crate) rqn: u32,
    pub(crate) owns_rq: bool,
    /// Unreliable datagrams instead of a reliable connection.
    pub(crate) is_datagram: bool,
    pub(crate) config: &'a crate::QpConfig,
}

/// Why an object could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A size outside the device's capabilities.
    #[error("{what} is {value}; the device takes {min}..={max}")]
    OutOfRange {
        /// The parameter.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// Smallest legal value.
        min: u64,
        /// Largest legal value.
        max: u64,
    },
    /// A value that is none of the few legal ones.
    #[error("{what} is {value}; legal is {legal}")]
    Illegal {
        /// The parameter.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The legal values.
        legal: &'static str,
    },
    /// The device has no free object of this kind; destroy one first.
    #[error("the device has no free {what}: all {max} are in use")]
    Exhausted {
        /// The kind.
        what: &'static str,
        /// How many there are.
        max: u64,
    },
    /// Memory could not be had.
    #[error("no memory for {what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
}

/// Refuses values outside `min..=max`.
pub(crate) fn check(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), CreateError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(CreateError::OutOfRange { what, value, min, max }) }
}
