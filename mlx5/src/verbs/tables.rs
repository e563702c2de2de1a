//! What was made from a device.

use core::cell::Cell;
use core::ptr::NonNull;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;

use super::abi::*;
use super::error::CallError;
use super::pages::Memory;
use crate::wire::ConnectOptions;

/// What was made from a device and not destroyed yet.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) pds: HashMap<u32, NonNull<ibv_pd>>,
    pub(crate) cqs: HashMap<u32, CqObject>,
    pub(crate) srqs: HashMap<u32, NonNull<ibv_srq>>,
    pub(crate) qps: HashMap<u32, QpObject>,
    pub(crate) mrs: HashMap<u32, Region>,
    /// By BlueFlame register, which the library keeps as long as the device: the half that is next.
    pub(crate) halves: HashMap<NonNull<u8>, Rc<Cell<*mut u8>>>,
}

pub(crate) struct CqObject {
    pub(crate) cq: NonNull<ibv_cq>,
    /// The UAR page that takes the command to arm it.
    pub(crate) uar: NonNull<u8>,
    /// Events taken, modulo 4.
    pub(crate) events: u8,
}

/// A region, and its memory if it is this crate's.
pub(crate) struct Region {
    pub(crate) mr: NonNull<ibv_mr>,
    pub(crate) memory: Option<Memory>,
}

pub(crate) struct QpObject {
    pub(crate) qp: NonNull<ibv_qp>,
    /// First packet sequence number of what it sends. At random, so that packets of an earlier connection are not taken for this one's.
    pub(crate) psn: u32,
    /// As given with the peer's address.
    pub(crate) options: ConnectOptions,
}

impl QpObject {
    pub(crate) fn new(qp: NonNull<ibv_qp>) -> Self {
        let psn = RandomState::new().build_hasher().finish() as u32 & 0xff_ffff;
        Self { qp, psn, options: ConnectOptions::default() }
    }
}

impl Objects {
    pub(crate) fn pd(&self, pdn: u32) -> Result<*mut ibv_pd, CallError> {
        self.pds.get(&pdn).map(|pd| pd.as_ptr()).ok_or_else(foreign)
    }

    /// Which half of a register is next: libmlx5 gives a register to several queue pairs when it has no more, and tells none of that.
    pub(crate) fn half_of(&mut self, register: NonNull<u8>) -> Rc<Cell<*mut u8>> {
        Rc::clone(self.halves.entry(register).or_insert_with(|| Rc::new(Cell::new(register.as_ptr()))))
    }

    pub(crate) fn number_of(&self, cq: *mut ibv_cq) -> Option<u32> {
        self.cqs.iter().find_map(|(&cqn, object)| (object.cq.as_ptr() == cq).then_some(cqn))
    }

    pub(crate) fn cq(&self, cqn: u32) -> Result<*mut ibv_cq, CallError> {
        self.cqs.get(&cqn).map(|object| object.cq.as_ptr()).ok_or_else(foreign)
    }
}

/// A domain or queue that the caller does not have: it belongs to another device.
pub(crate) fn foreign() -> CallError {
    CallError::new("an object of another device", libc::EINVAL)
}
