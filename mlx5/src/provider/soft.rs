//! The provider on the software HCA, which takes queues by address. This module allocates and keeps their memory.

use core::cell::RefCell;
use core::ptr::NonNull;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use mlx5_hca::{Address, CqMemory, Hca, QpMemory, Receives as From, Region, RqMemory, SoftOptions, SqMemory};

use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, DeviceInfo, Pages};
use crate::error::{ConnectError, CreateError, OpenError, RegisterError, check, check_region};
use crate::mmio::RegisterKind;
use crate::provider::alarm::Alarm;
use crate::provider::parts::{CqParts, MrParts, QpParts, QpRequest, Receives, RqParts, SrqParts};
use crate::provider::private::{COMP_VECTORS, CqPlace, PrivateMemory, SqPlace};
use crate::provider::{Connections, Provider, Queues, Regions};
use crate::wire::{Access, AddressVector, AsyncEvent, ConnectOptions, MAX_CQE, MAX_INLINE, MAX_RECV_SGE, MAX_RECV_WR, MAX_SEND_WR};

/// Returns the user whose processes this one shares memory with.
fn own_user() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}

/// A software HCA and the memory of its queues.
pub(crate) struct Soft {
    hca: Rc<Hca>,
    /// Kind of the queue pairs' registers: only strict devices read them.
    register: RegisterKind,
    sqs: RefCell<HashMap<u32, PrivateMemory>>,
    cqs: RefCell<HashMap<u32, PrivateMemory>>,
    alarm: Arc<Alarm>,
}

impl Soft {
    pub(crate) fn open(options: &SoftOptions) -> Result<Self, OpenError> {
        let register = if options.strict { RegisterKind::Ordinary } else { RegisterKind::Unread };
        let hca = Rc::new(Hca::open(options)?);
        Ok(Self { hca, register, sqs: RefCell::default(), cqs: RefCell::default(), alarm: Arc::default() })
    }

    pub(crate) fn hca(&self) -> &Rc<Hca> {
        &self.hca
    }
}

/// Describes a queue in memory that peers reach.
fn srq_parts((srqn, memory): (u32, RqMemory)) -> SrqParts {
    let RqMemory { buffer, wqe_cnt, stride, record } = memory;
    SrqParts { srqn, buffer, wqe_cnt: wqe_cnt as u16, stride: stride as usize, record }
}

fn mr_parts(region: Region, pages: Pages) -> MrParts {
    MrParts { key: region.key, addr: region.addr, len: region.len, pages }
}

impl Provider for Soft {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Soft
    }

    fn info(&self) -> DeviceInfo {
        let mlx5_hca::Info { name, transport, modes, dead_peer_timeout_ns, quarantined, violations, rnr_naks } = self.hca.info();
        DeviceInfo {
            name,
            transport,
            max_send_wr: MAX_SEND_WR,
            max_recv_wr: MAX_RECV_WR,
            max_recv_sge: MAX_RECV_SGE,
            max_inline_data: MAX_INLINE as u32,
            max_cqe: MAX_CQE,
            comp_vectors: COMP_VECTORS,
            max_srq_wr: MAX_RECV_WR,
            max_qp: mlx5_hca::MAX_QP,
            max_mr: mlx5_hca::MAX_MR,
            has_atomics: true,
            numa_node: None,
            modes,
            dead_peer_timeout_ns,
            quarantined,
            violations,
            rnr_naks: Some(rnr_naks),
        }
    }

    fn wait(&self, timeout_ns: Option<u64>) -> bool {
        let has_event = self.hca.wait(timeout_ns, &mut &*self.alarm);
        self.alarm.take();
        has_event
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    fn take_async_event(&self) -> Option<AsyncEvent> {
        self.hca.take_async_event()
    }
}

impl Regions for Soft {
    fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError> {
        let region = self.hca.alloc_registered(pd, bytes, access, huge)?;
        let pages = if huge { region.not_huge.map_or(Pages::Huge, Pages::NotHuge) } else { Pages::Base };
        Ok(mr_parts(region, pages))
    }

    unsafe fn register(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        check_region(bytes, access)?;
        if access.contains(Access::REMOTE_ATOMIC) {
            return Err(RegisterError::Unreachable { reason: "no process can do an atomic operation on another's private memory" });
        }
        // SAFETY: guaranteed by the caller.
        Ok(mr_parts(unsafe { self.hca.register(pd, addr, bytes, access) }?, Pages::Base))
    }

    fn try_deregister(&self, key: u32) -> bool {
        self.hca.try_deregister(key)
    }

    fn deregister(&self, key: u32) {
        self.hca.deregister(key);
    }
}

impl Queues for Soft {
    fn alloc_pd(&self) -> Result<u32, CreateError> {
        Ok(self.hca.alloc_pd())
    }

    // A domain is only a number, which is never reused.
    fn dealloc_pd(&self, _pdn: u32) {}

    fn create_cq(&self, config: &CqConfig) -> Result<CqParts, CreateError> {
        let CqPlace { memory, buffer, entries, record } = CqPlace::new(config)?;
        let queue = CqMemory { buffer, entries, cqe_bytes: config.cqe_bytes, compression: config.compression, record: record.cast() };
        // SAFETY: the memory is kept until the queue is destroyed.
        let cqn = unsafe { self.hca.create_cq(&queue) }?;
        self.cqs.borrow_mut().insert(cqn, memory);
        Ok(CqParts { cqn, buffer, entries, stride: config.cqe_bytes as usize, record })
    }

    fn destroy_cq(&self, cqn: u32) {
        self.hca.destroy_cq(cqn);
        self.cqs.borrow_mut().remove(&cqn);
    }

    fn create_srq(&self, pd: u32, depth: u32, max_sge: usize) -> Result<SrqParts, CreateError> {
        Ok(srq_parts(self.hca.create_rq(pd, depth, max_sge, true)?))
    }

    fn destroy_srq(&self, srqn: u32) {
        self.hca.destroy_srq(srqn);
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        let (pd, config) = (request.pd, request.config);
        let (receives, rq) = match request.receives {
            Receives::Shared(srqn) => (From::Shared(srqn), None),
            Receives::Own { depth, max_sge } => {
                let SrqParts { srqn, buffer, wqe_cnt, stride, record } = srq_parts(self.hca.create_rq(pd, depth, max_sge, false)?);
                (From::OwnInReach(srqn), Some((srqn, RqParts { buffer, wqe_cnt, stride, record })))
            }
        };
        let created = SqPlace::new(config, self.register).and_then(|place| {
            check("lane_slots", config.lane_slots.into(), 1, mlx5_hca::MAX_LANE_SLOTS.into())?;
            let memory = QpMemory {
                service: request.service,
                pd,
                send_cq: request.send_cq,
                recv_cq: request.recv_cq,
                receives,
                sq: SqMemory { buffer: place.buffer, wqe_cnt: place.wqe_cnt.into(), record: place.record, register: place.register },
                user_index: None,
                scatter_to_cqe: config.scatter_to_cqe,
                lane_slots: config.lane_slots,
            };
            // SAFETY: the memory is kept until the queue pair is destroyed.
            Ok((unsafe { self.hca.create_qp(&memory) }?, place))
        });
        let (qpn, place) = created.inspect_err(|_| rq.iter().for_each(|(rqn, _)| self.hca.destroy_srq(*rqn)))?;
        let sq = place.parts(qpn, config, self.register, Hca::register_offset(qpn));
        self.sqs.borrow_mut().insert(qpn, place.memory);
        Ok(QpParts { sq, rq: rq.map(|(_, parts)| parts) })
    }

    fn destroy_qp(&self, qpn: u32) {
        self.hca.destroy_qp(qpn);
        self.sqs.borrow_mut().remove(&qpn);
    }
}

impl Connections for Soft {
    fn address(&self, qpn: u32) -> QpAddress {
        let Address { lid, qpn, epoch } = self.hca.address(qpn);
        QpAddress::soft(lid, qpn, epoch).of_user(own_user())
    }

    fn connect(&self, qpn: u32, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        use mlx5_hca::ConnectError::{NoSuchDevice, StaleDevice};

        let (theirs, own) = (remote.user().unwrap_or(own_user()), own_user());
        let remote = Address { lid: remote.lid, qpn: remote.qpn, epoch: remote.epoch };
        // A queue pair of this crate allows all access that regions allow. The queue pair itself prevents sends before RTS.
        match self.hca.connect(qpn, &remote, options, Access::REMOTE) {
            // Each user has a directory of devices: what the LID names in this one is another device.
            Err(NoSuchDevice { .. } | StaleDevice { .. }) if theirs != own => Err(ConnectError::OtherUser { theirs, own }),
            connected => Ok(connected?),
        }
    }

    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError> {
        self.hca.activate_datagrams(qpn, qkey);
        Ok(())
    }

    fn fail_qp(&self, qpn: u32) {
        self.hca.fail_qp(qpn);
    }

    fn address_vector(&self, _pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        Ok(AddressVector::local(remote.lid, 0))
    }
}
