//! The objects that a device creates, as plain memory in the shape that `mlx5dv_init_obj` gives for hardware: a buffer, its actual size,
//! the doorbell record, the BlueFlame register. Code above this module does not know which kind of device owns the memory.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::rc::Rc;

use crate::config::{Pages, QpConfig};
use crate::mmio::RegisterKind;
use crate::wire::Service;

/// A BlueFlame register: two halves of 256 bytes.
#[derive(Clone)]
pub(crate) struct UarParts {
    /// The half that the next doorbell of any queue pair on this register stores to. All of them belong to one device, and so to one
    /// thread.
    pub(crate) half: Rc<Cell<*mut u8>>,
    pub(crate) kind: RegisterKind,
    /// Offset in the device's UAR pages, for the hook.
    pub(crate) uar_offset: usize,
}

/// A send queue as the device created it.
pub(crate) struct SqParts {
    pub(crate) qpn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// WQEBBs, a power of two, maximum 32,768.
    pub(crate) wqe_cnt: u16,
    pub(crate) max_inline: usize,
    /// Whether the device has atomics.
    pub(crate) has_atomics: bool,
    /// The send word of the QP's doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
    pub(crate) uar: UarParts,
}

/// A completion queue as the device created it; every `op_own` has the opcode [`Invalid`](crate::CqeOpcode::Invalid).
pub(crate) struct CqParts {
    pub(crate) cqn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// A power of two.
    pub(crate) entries: u32,
    /// Bytes of an entry, 64 or 128; the CQE is in its last 64 bytes.
    pub(crate) stride: usize,
    /// The consumer word of the doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
}

/// A shared receive queue as the device created it.
pub(crate) struct SrqParts {
    pub(crate) srqn: u32,
    pub(crate) buffer: NonNull<u8>,
    /// WQEs, a power of two, maximum 32,768.
    pub(crate) wqe_cnt: u16,
    /// Bytes of a WQE, a power of two.
    pub(crate) stride: usize,
    pub(crate) record: NonNull<AtomicU32>,
}

/// A queue pair's own receive queue as the device created it.
pub(crate) struct RqParts {
    pub(crate) buffer: NonNull<u8>,
    /// WQEs, a power of two, maximum 32,768.
    pub(crate) wqe_cnt: u16,
    /// Bytes of a WQE: 16 for each buffer of a receive, rounded up to a power of two.
    pub(crate) stride: usize,
    /// The receive word of the QP's doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
}

/// A memory region as the device registered it.
#[derive(Clone, Copy)]
pub(crate) struct MrParts {
    pub(crate) key: u32,
    pub(crate) addr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) pages: Pages,
}

/// A queue pair as the device created it.
pub(crate) struct QpParts {
    pub(crate) sq: SqParts,
    /// `None` with a shared receive queue.
    pub(crate) rq: Option<RqParts>,
}

/// The source of a queue pair's receives.
#[derive(Clone, Copy)]
pub(crate) enum Receives {
    /// The shared receive queue with this number.
    Shared(u32),
    /// A receive queue of its own, created and destroyed with the queue pair.
    Own { depth: u32, max_sge: usize },
}

/// A request to create a queue pair.
pub(crate) struct QpRequest<'a> {
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) receives: Receives,
    pub(crate) service: Service,
    pub(crate) config: &'a QpConfig,
}
