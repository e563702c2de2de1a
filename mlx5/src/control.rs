//! The control path: creating and destroying what the data path then drives without asking.
//!
//! Whoever implements it hands the data path plain memory, in the shape `mlx5dv_init_obj` gives for a hardware device: a buffer, its
//! real size, the doorbell record, the BlueFlame register. Nothing above this file knows which device that memory belongs to.
//!
//! The data path's two hooks, a doorbell that was rung and a completion queue that was found empty, do not go through here: they are
//! direct calls of the software HCA ([`Control::hook`]), and hardware has none.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::rc::Rc;

use shm::sleep::{Due, POLL_SLICE, Watch};

use crate::address::{DeviceKind, QpAddress};
use crate::cq::CqConfig;
use crate::device::DeviceInfo;
use crate::mmio::RegisterKind;
use crate::mr::{Access, RegisterError};
use crate::qp::ConnectError;
use crate::soft::{Clock, Hca, Violation};
use crate::verbs::Context;
use crate::wire::{AddressVector, CqArm};

/// A device's control path. Clones are the same device, which closes with the last of them.
#[derive(Clone)]
pub(crate) enum Control {
    /// Path B: the software HCA.
    Soft(Rc<Hca>),
    /// Path A: a device behind libibverbs.
    Verbs(Rc<Context>),
}

/// A BlueFlame register: two halves of [`BF_BYTES`](crate::doorbell::BF_BYTES).
#[derive(Clone)]
pub(crate) struct UarParts {
    /// The half that the next doorbell of any queue pair on this register goes to. All of them are of one device, and so of one thread.
    pub(crate) half: Rc<Cell<*mut u8>>,
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

/// A queue pair as the device made it.
pub(crate) struct QpParts {
    pub(crate) sq: SqParts,
    /// `None` with a shared receive queue.
    pub(crate) rq: Option<RqParts>,
}

/// What a queue pair needs to know of its peer and of the path.
pub(crate) struct ConnectParts {
    pub(crate) qpn: u32,
    pub(crate) remote: crate::QpAddress,
    pub(crate) options: crate::ConnectOptions,
}

/// Where a queue pair's receives come from.
#[derive(Clone, Copy)]
pub(crate) enum Receives {
    /// The shared receive queue of this number.
    Shared(u32),
    /// A queue of its own, which is made, and goes, with it.
    Own { depth: u32, max_sge: usize },
}

/// A queue pair to be made.
pub(crate) struct QpRequest<'a> {
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) receives: Receives,
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
    /// The device cannot do it.
    #[error("this device has no {what}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// libibverbs, or the kernel, refused.
    #[error(transparent)]
    Call(#[from] crate::verbs::CallError),
}

/// Refuses values outside `min..=max`.
pub(crate) fn check(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), CreateError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(CreateError::OutOfRange { what, value, min, max }) }
}

impl Control {
    /// The software HCA or the null device behind it.
    pub(crate) fn soft(&self) -> Option<&Rc<Hca>> {
        match self {
            Self::Soft(hca) => Some(hca),
            Self::Verbs(_) => None,
        }
    }

    /// What doorbells and empty polls call. `None` on hardware, which sees the stores themselves, and on a null device.
    pub(crate) fn hook(&self) -> Option<Rc<Hca>> {
        self.soft().and_then(Hca::hook)
    }

    pub(crate) fn kind(&self) -> DeviceKind {
        match self {
            Self::Soft(_) => DeviceKind::Soft,
            Self::Verbs(_) => DeviceKind::Hardware,
        }
    }

    pub(crate) fn info(&self) -> DeviceInfo {
        match self {
            Self::Soft(hca) => hca.info(),
            Self::Verbs(context) => context.info(),
        }
    }

    pub(crate) fn take_violations(&self) -> Vec<Violation> {
        match self {
            Self::Soft(hca) => hca.take_violations(),
            Self::Verbs(_) => Vec::new(),
        }
    }

    pub(crate) fn trace_hash(&self) -> Option<u64> {
        match self {
            Self::Soft(hca) => hca.trace_hash(),
            Self::Verbs(_) => None,
        }
    }

    /// The time on the device's clock.
    pub(crate) fn now_ns(&self) -> u64 {
        match self {
            Self::Soft(hca) => hca.now_ns(),
            Self::Verbs(_) => Clock::System.now_ns(),
        }
    }

    /// As [`now_ns`](Self::now_ns), cheaper and behind.
    pub(crate) fn coarse_now_ns(&self) -> u64 {
        match self {
            Self::Soft(hca) => hca.coarse_now_ns(),
            Self::Verbs(_) => Clock::System.coarse_now_ns(),
        }
    }

    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        match self {
            Self::Soft(hca) => hca.next_event_ns(),
            // It does everything by itself.
            Self::Verbs(_) => None,
        }
    }

    /// What the device cannot do without being given time; whether there may be new CQEs.
    pub(crate) fn progress(&self) -> bool {
        match self {
            Self::Soft(hca) => hca.empty_poll(),
            Self::Verbs(_) => false,
        }
    }

    /// Sleeps until an armed CQ has an event, or `timeout_ns` have passed; whether there is one.
    pub(crate) fn wait(&self, timeout_ns: Option<u64>) -> bool {
        match self {
            Self::Soft(hca) => hca.wait(timeout_ns),
            Self::Verbs(context) => context.wait(timeout_ns),
        }
    }

    /// Calls `then` with what a sleep on the device, maybe beside others, ends at.
    pub(crate) fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        match self {
            Self::Soft(hca) => hca.with_watch(then),
            // It wakes through a descriptor, which cannot be waited for together with words.
            Self::Verbs(_) => then(&mut Due(POLL_SLICE)),
        }
    }

    pub(crate) fn alloc_pd(&self) -> Result<u32, CreateError> {
        match self {
            Self::Soft(hca) => Ok(hca.alloc_pd()),
            Self::Verbs(context) => context.alloc_pd(),
        }
    }

    /// Nothing of the domain is left.
    pub(crate) fn dealloc_pd(&self, pdn: u32) {
        match self {
            // A number, and never used again.
            Self::Soft(_) => {}
            Self::Verbs(context) => context.dealloc_pd(pdn),
        }
    }

    pub(crate) fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError> {
        match self {
            Self::Soft(hca) => hca.alloc_registered(pd, bytes, access, huge),
            Self::Verbs(context) => context.alloc_registered(pd, bytes, access, huge),
        }
    }

    pub(crate) fn register_foreign(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        match self {
            Self::Soft(hca) => hca.register_foreign(pd, addr, bytes, access),
            Self::Verbs(context) => context.register_foreign(pd, addr, bytes, access),
        }
    }

    /// Deregisters, unless a peer is in the middle of using the region, which it says with `false`; then it may be called again.
    pub(crate) fn try_deregister(&self, key: u32) -> bool {
        match self {
            Self::Soft(hca) => hca.try_deregister(key),
            Self::Verbs(context) => context.try_deregister(key),
        }
    }

    /// Deregisters for good.
    pub(crate) fn deregister(&self, key: u32) {
        match self {
            Self::Soft(hca) => hca.deregister(key),
            Self::Verbs(context) => context.deregister(key),
        }
    }

    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<CqParts, CreateError> {
        match self {
            Self::Soft(hca) => hca.create_cq(config),
            Self::Verbs(context) => context.create_cq(config),
        }
    }

    /// How many events of this CQ were taken, modulo 4: the next command to arm it must say so.
    pub(crate) fn events_taken(&self, cqn: u32) -> u8 {
        match self {
            // It reads the record and nothing else.
            Self::Soft(_) => 0,
            Self::Verbs(context) => context.events_taken(cqn),
        }
    }

    /// The command to arm a CQ is in its record: tells the device.
    pub(crate) fn armed(&self, cqn: u32, command: &CqArm) {
        match self {
            Self::Soft(_) => {}
            Self::Verbs(context) => context.armed(cqn, command),
        }
    }

    /// An armed CQ holds a CQE that it was armed for: the next wait ends at once. A soft device looks for itself.
    pub(crate) fn holds_what_was_armed_for(&self) {
        match self {
            Self::Soft(_) => {}
            Self::Verbs(context) => context.is_due.set(true),
        }
    }

    pub(crate) fn destroy_cq(&self, cqn: u32) {
        match self {
            Self::Soft(hca) => hca.destroy_cq(cqn),
            Self::Verbs(context) => context.destroy_cq(cqn),
        }
    }

    pub(crate) fn create_srq(&self, pd: u32, depth: u32, max_sge: usize) -> Result<SrqParts, CreateError> {
        match self {
            Self::Soft(hca) => hca.create_rq(pd, depth, max_sge, true),
            Self::Verbs(context) => context.create_srq(pd, depth, max_sge),
        }
    }

    pub(crate) fn destroy_srq(&self, srqn: u32) {
        match self {
            Self::Soft(hca) => hca.destroy_rq(srqn),
            Self::Verbs(context) => context.destroy_srq(srqn),
        }
    }

    pub(crate) fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        match self {
            Self::Soft(hca) => hca.create_qp(request),
            Self::Verbs(context) => context.create_qp(request),
        }
    }

    /// Where peers reach a queue pair.
    pub(crate) fn address(&self, qpn: u32) -> QpAddress {
        match self {
            Self::Soft(hca) => hca.address(qpn),
            Self::Verbs(context) => context.address(qpn),
        }
    }

    /// RESET to INIT, of a reliable connection.
    pub(crate) fn initialize(&self, qpn: u32) -> Result<(), ConnectError> {
        match self {
            // To this device a queue pair that is not connected is the same in both.
            Self::Soft(_) => Ok(()),
            Self::Verbs(context) => context.initialize(qpn),
        }
    }

    /// INIT to RTR, of a reliable connection. A null device connects to anything.
    pub(crate) fn connect(&self, parts: &ConnectParts) -> Result<(), ConnectError> {
        let (local, remote) = (self.kind(), parts.remote.kind);
        if local != remote && (self.hook().is_some() || local == DeviceKind::Hardware) {
            return Err(ConnectError::DifferentKinds { local, remote });
        }
        match self {
            // A queue pair of this crate allows all that regions do.
            Self::Soft(hca) => hca.connect(parts, Access::REMOTE),
            Self::Verbs(context) => context.connect(parts),
        }
    }

    /// RTR to RTS, of a reliable connection, with what [`connect`](Self::connect) was given.
    pub(crate) fn ready_to_send(&self, qpn: u32) -> Result<(), ConnectError> {
        match self {
            // That nothing is sent before is the driver's to see to.
            Self::Soft(_) => Ok(()),
            Self::Verbs(context) => context.ready_to_send(qpn),
        }
    }

    /// RESET to RTS, of datagrams.
    pub(crate) fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError> {
        match self {
            Self::Soft(hca) => {
                hca.activate_datagrams(qpn, qkey);
                Ok(())
            }
            Self::Verbs(context) => context.activate_datagrams(qpn, qkey),
        }
    }

    /// To the error state.
    pub(crate) fn fail_qp(&self, qpn: u32) {
        match self {
            Self::Soft(hca) => hca.fail_qp(qpn),
            Self::Verbs(context) => context.fail_qp(qpn),
        }
    }

    pub(crate) fn destroy_qp(&self, qpn: u32) {
        match self {
            Self::Soft(hca) => hca.destroy_qp(qpn),
            Self::Verbs(context) => context.destroy_qp(qpn),
        }
    }

    /// How datagrams get to the port of `remote`.
    pub(crate) fn address_vector(&self, pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        let (local, kind) = (self.kind(), remote.kind);
        if local != kind {
            return Err(ConnectError::DifferentKinds { local, remote: kind });
        }
        match self {
            Self::Soft(_) => Ok(AddressVector::local(remote.lid, 0)),
            Self::Verbs(context) => context.address_vector(pd, remote),
        }
    }
}
