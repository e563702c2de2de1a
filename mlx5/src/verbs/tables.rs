//! The objects made from a device.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;

use super::abi::*;
use super::pages::Memory;
use crate::error::verbs::CallError;
use crate::mmio;
use crate::wire::{AddressVector, CQ_DOORBELL_OFFSET, ConnectOptions, CqArm};

#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) pds: HashMap<u32, NonNull<ibv_pd>>,
    pub(crate) cqs: HashMap<u32, CqObject>,
    pub(crate) srqs: HashMap<u32, NonNull<ibv_srq>>,
    pub(crate) qps: HashMap<u32, QpObject>,
    pub(crate) mrs: HashMap<u32, MrObject>,
    /// The half that the next doorbell uses, by BlueFlame register. The library keeps a register
    /// until the device is closed.
    pub(crate) halves: HashMap<NonNull<u8>, Rc<Cell<*mut u8>>>,
    /// Address handles of the paths that a relay's datagrams took, by protection domain.
    pub(crate) handles: HashMap<(u32, AddressVector), NonNull<ibv_ah>>,
}

pub(crate) struct CqObject {
    pub(crate) cq: NonNull<ibv_cq>,
    /// The UAR page that takes the command to arm the queue.
    pub(crate) uar: NonNull<u8>,
    /// Doorbell record of the completion queue: the words
    /// [`CQ_DBREC_SET_CI`](crate::wire::CQ_DBREC_SET_CI) and
    /// [`CQ_DBREC_ARM`](crate::wire::CQ_DBREC_ARM).
    pub(crate) record: NonNull<AtomicU32>,
    /// Number of events taken, modulo 4.
    pub(crate) events: u8,
}

impl CqObject {
    /// Arms the queue: repeats the command in the record to the device's register.
    pub(crate) fn tell(&self, cqn: u32, command: &CqArm) {
        // SAFETY: the address is the CQ doorbell in the queue's UAR page. It is 8-aligned, and the
        // page is mapped as long as the device is open.
        unsafe {
            mmio::repeat_to_register(
                self.uar.as_ptr().add(CQ_DOORBELL_OFFSET),
                command.doorbell(cqn),
            )
        };
    }
}

pub(crate) struct MrObject {
    pub(crate) mr: NonNull<ibv_mr>,
    pub(crate) memory: Option<Memory>,
}

pub(crate) struct QpObject {
    pub(crate) qp: NonNull<ibv_qp>,
    /// First packet sequence number that the queue pair sends. It is random, so that packets of an
    /// earlier connection are not taken for packets of this connection.
    pub(crate) psn: u32,
    pub(crate) options: ConnectOptions,
}

impl QpObject {
    pub(crate) fn new(qp: NonNull<ibv_qp>) -> Self {
        let psn = RandomState::new().build_hasher().finish() as u32 & 0xff_ffff;
        Self {
            qp,
            psn,
            options: ConnectOptions::default(),
        }
    }
}

impl Objects {
    pub(crate) fn pd(&self, pdn: u32) -> Result<*mut ibv_pd, CallError> {
        self.pds.get(&pdn).map(|pd| pd.as_ptr()).ok_or_else(foreign)
    }

    /// Returns the cell with the half of `register` that the next doorbell uses. Queue pairs with
    /// the same register share the cell: when libmlx5 has no further register, it gives one
    /// register to several queue pairs, and does not report that.
    pub(crate) fn half_of(&mut self, register: NonNull<u8>) -> Rc<Cell<*mut u8>> {
        Rc::clone(
            self.halves
                .entry(register)
                .or_insert_with(|| Rc::new(Cell::new(register.as_ptr()))),
        )
    }

    pub(crate) fn number_of(&self, cq: *mut ibv_cq) -> Option<u32> {
        self.cqs
            .iter()
            .find_map(|(&cqn, object)| (object.cq.as_ptr() == cq).then_some(cqn))
    }

    pub(crate) fn cq(&self, cqn: u32) -> Result<*mut ibv_cq, CallError> {
        self.cqs
            .get(&cqn)
            .map(|object| object.cq.as_ptr())
            .ok_or_else(foreign)
    }
}

pub(crate) fn foreign() -> CallError {
    CallError::new("an object of another device", libc::EINVAL)
}
