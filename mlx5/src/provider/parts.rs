//! The objects that a device creates, as plain memory: a buffer, its actual size, the doorbell
//! record, the BlueFlame register. On hardware `mlx5dv_init_obj` returns these fields; the software
//! HCA takes them as parameters. Code above this module does not know which kind of device owns the
//! memory.

use core::cell::Cell;
use std::rc::Rc;

use mlx5_hca::{RqMemory, SqMemory};

use crate::config::{QpConfig, RqSize};
use crate::mmio::RegisterKind;
use crate::wire::Service;

/// The register of a send queue's doorbells. A BlueFlame register has two halves of 256 bytes; a
/// register of kind [`RegisterKind::DoorbellOnly`] takes 8 bytes and has no halves.
#[derive(Clone)]
pub(crate) struct UarParts {
    /// The half to which the next doorbell on this register stores. All queue pairs on the register
    /// share the cell; they belong to one device, and so to one thread.
    pub(crate) half: Rc<Cell<*mut u8>>,
    pub(crate) kind: RegisterKind,
    /// Index by which the device's hook identifies the register.
    pub(crate) register_index: usize,
}

pub(crate) struct QpParts {
    pub(crate) qpn: u32,
    /// Send queue of the queue pair: at least 16 WQEBBs.
    pub(crate) sq: SqMemory,
    /// The queue pair's own receive queue; `None` with a shared receive queue.
    pub(crate) rq: Option<RqMemory>,
    pub(crate) max_inline: usize,
    pub(crate) has_atomics: bool,
    pub(crate) uar: UarParts,
}

#[derive(Clone, Copy)]
pub(crate) enum Receives {
    /// The shared receive queue with this number.
    Shared(u32),
    Own(RqSize),
}

pub(crate) struct QpRequest<'a> {
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) receives: Receives,
    pub(crate) service: Service,
    pub(crate) config: &'a QpConfig,
}
