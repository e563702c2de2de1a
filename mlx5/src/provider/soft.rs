//! The provider for the software HCA, which takes queues by address. This module allocates and
//! keeps their memory. A null device has the same queues, but its doorbells do not call the HCA.

use core::cell::RefCell;
use core::ptr::NonNull;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use copyrpc_shm::sleep::Alarm;
use mlx5_hca::{
    Address, CqMemory, DeviceInfo, FabricSpec, Hca, LocalFabric, PacketAddress, QpMemory,
    Receives as From, Region, RqMemory, SoftOptions, address_of, check, check_region, gid_of,
};

use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, NullOptions, RqSize};
use crate::error::{ConnectError, CreateError, OpenError, RegisterError};
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpParts, QpRequest, Receives};
use crate::provider::private::{CqPlace, SqPlace};
use crate::provider::{Connections, Provider, Queues, Regions};
use crate::wire::{Access, AddressVector, AsyncEvent, ConnectOptions};

/// Returns the id of this process's user. Only processes of one user share memory.
fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

pub(crate) struct Soft {
    hca: Rc<Hca>,
    /// Kind of the queue pairs' registers. Only a strict device reads them.
    register: RegisterKind,
    /// Whether this is a null device, which executes nothing and connects to any address.
    is_null: bool,
    /// Send queue of each queue pair, and the number of its receive queue, by QPN.
    pub(super) sqs: RefCell<HashMap<u32, (SqPlace, u32)>>,
    pub(super) rqs: RefCell<HashMap<u32, RqMemory>>,
    pub(super) cqs: RefCell<HashMap<u32, CqPlace>>,
    alarm: Arc<Alarm>,
}

impl Soft {
    pub(crate) fn open(options: &SoftOptions) -> Result<Self, OpenError> {
        let register = if options.strict {
            RegisterKind::Ordinary
        } else {
            RegisterKind::Unread
        };
        Self::with(options, register, false)
    }

    pub(crate) fn null(options: NullOptions) -> Result<Self, OpenError> {
        let soft = SoftOptions {
            fabric: FabricSpec::Local(LocalFabric::new()),
            // The arena is small, because valgrind, under which instructions are counted, cannot
            // map 64 GiB.
            arena_bytes: 1 << 30,
            ..SoftOptions::default()
        };
        Self::with(&soft, options.register, true)
    }

    fn with(
        options: &SoftOptions,
        register: RegisterKind,
        is_null: bool,
    ) -> Result<Self, OpenError> {
        Ok(Self {
            hca: Rc::new(Hca::open(options)?),
            register,
            is_null,
            sqs: RefCell::default(),
            rqs: RefCell::default(),
            cqs: RefCell::default(),
            alarm: Arc::default(),
        })
    }

    pub(crate) fn hca(&self) -> &Rc<Hca> {
        &self.hca
    }

    fn create_rq(
        &self,
        pd: u32,
        RqSize { depth, max_sge }: RqSize,
        is_shared: bool,
    ) -> Result<(u32, RqMemory), CreateError> {
        let (rqn, memory) = self.hca.create_rq(pd, depth, max_sge, is_shared)?;
        self.rqs.borrow_mut().insert(rqn, memory);
        Ok((rqn, memory))
    }

    fn address_of(remote: &QpAddress) -> Result<Address, ConnectError> {
        let packets = match remote.kind {
            DeviceKind::Soft => None,
            DeviceKind::Hardware => Some(PacketAddress {
                ip: address_of(&remote.gid).ok_or(ConnectError::NoGid)?,
                port: (remote.port != 0).then_some(remote.port),
                psn: remote.psn,
                mtu: remote.mtu,
                traffic_class: 0,
            }),
        };
        Ok(Address {
            lid: remote.lid,
            qpn: remote.qpn,
            epoch: Some(remote.epoch),
            packets,
        })
    }
}

impl Provider for Soft {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Soft
    }

    fn info(&self) -> DeviceInfo {
        if self.is_null {
            return DeviceInfo {
                name: "null".to_owned(),
                transport: "none".to_owned(),
                modes: "executes nothing".to_owned(),
                ..self.hca.info()
            };
        }
        self.hca.info()
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

    fn address_kind(&self) -> DeviceKind {
        match self.hca.wire_address() {
            Some(_) => DeviceKind::Hardware,
            None => DeviceKind::Soft,
        }
    }
}

impl Regions for Soft {
    fn alloc_registered(
        &self,
        pd: u32,
        bytes: usize,
        access: Access,
        huge: bool,
    ) -> Result<Region, RegisterError> {
        Ok(self.hca.alloc_registered(pd, bytes, access, huge)?)
    }

    unsafe fn register(
        &self,
        pd: u32,
        addr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        check_region(bytes, access)?;
        if access.contains(Access::REMOTE_ATOMIC) {
            let reason =
                "no process can do an atomic operation on another's private memory; use Pd::alloc";
            return Err(mlx5_hca::RegisterError::Unreachable { reason }.into());
        }
        // SAFETY: guaranteed by the caller.
        Ok(unsafe { self.hca.register(pd, addr, bytes, access) }?)
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

    // Nothing is freed: a domain is only a number, which repeats after 2^32 calls of `alloc_pd`.
    fn dealloc_pd(&self, _pdn: u32) {}

    fn create_cq(&self, config: &CqConfig) -> Result<(u32, CqMemory), CreateError> {
        let place = CqPlace::new(config)?;
        let memory = place.cq;
        // SAFETY: `cqs` keeps the memory until the queue is destroyed.
        let cqn = unsafe { self.hca.create_cq(&memory) }?;
        self.cqs.borrow_mut().insert(cqn, place);
        Ok((cqn, memory))
    }

    fn destroy_cq(&self, cqn: u32) {
        self.hca.destroy_cq(cqn);
        self.cqs.borrow_mut().remove(&cqn);
    }

    fn create_srq(&self, pd: u32, size: RqSize) -> Result<(u32, RqMemory), CreateError> {
        self.create_rq(pd, size, true)
    }

    fn destroy_srq(&self, srqn: u32) {
        self.hca.destroy_srq(srqn);
        self.rqs.borrow_mut().remove(&srqn);
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        let &QpRequest {
            pd,
            send_cq,
            recv_cq,
            service,
            config,
            ..
        } = request;
        let (rqn, receives, rq) = match request.receives {
            Receives::Shared(srqn) => (srqn, From::Shared(srqn), None),
            Receives::Own(size) => {
                let (rqn, memory) = self.create_rq(pd, size, false)?;
                (rqn, From::OwnInReach(rqn), Some(memory))
            }
        };
        let created = SqPlace::new(config, self.register).and_then(|place| {
            check(
                "lane_slots",
                config.lane_slots,
                1..=mlx5_hca::MAX_LANE_SLOTS,
            )?;
            let (scatter_to_cqe, lane_slots) = (config.scatter_to_cqe, config.lane_slots);
            let memory = QpMemory {
                service,
                pd,
                send_cq,
                recv_cq,
                receives,
                sq: place.sq,
                user_index: None,
                scatter_to_cqe,
                lane_slots,
            };
            // SAFETY: `sqs` keeps the memory until the queue pair is destroyed.
            Ok((unsafe { self.hca.create_qp(&memory) }?, place))
        });
        let (qpn, place) =
            created.inspect_err(|_| rq.iter().for_each(|_| self.destroy_srq(rqn)))?;
        let parts = place.parts(qpn, rq, config, self.register, Hca::register_index(qpn));
        self.sqs.borrow_mut().insert(qpn, (place, rqn));
        Ok(parts)
    }

    fn destroy_qp(&self, qpn: u32) {
        self.hca.destroy_qp(qpn);
        self.sqs.borrow_mut().remove(&qpn);
    }
}

impl Connections for Soft {
    fn address(&self, qpn: u32) -> QpAddress {
        let Address {
            lid,
            qpn,
            epoch,
            packets,
        } = self.hca.address(qpn);
        let soft = QpAddress::soft(lid, qpn, epoch.unwrap_or(0));
        let Some(packets) = packets else {
            return soft.of_user(own_user());
        };
        QpAddress {
            kind: DeviceKind::Hardware,
            mtu: packets.mtu,
            port: packets.port.unwrap_or(0),
            psn: packets.psn,
            gid: gid_of(packets.ip),
            ..soft
        }
    }

    fn connect(
        &self,
        qpn: u32,
        remote: &QpAddress,
        options: &ConnectOptions,
    ) -> Result<(), ConnectError> {
        use mlx5_hca::ConnectError::{NoAccess, NoSuchDevice, StaleDevice};

        if self.is_null {
            return Ok(());
        }
        let (theirs, own) = (remote.user().unwrap_or(own_user()), own_user());
        let remote = Self::address_of(remote)?;
        // A queue pair of this crate allows all remote access that regions can allow. `Qp` refuses
        // sends before RTS, so the HCA need not check the state.
        match self.hca.connect(qpn, &remote, options, Access::REMOTE) {
            // Each user has a directory of devices, in which the LIDs are assigned. So in the
            // directory of this user the peer's LID belongs to a different device, or to none.
            Err(NoAccess { .. } | NoSuchDevice { .. } | StaleDevice { .. }) if theirs != own => {
                Err(ConnectError::OtherUser { theirs, own })
            }
            connected => Ok(connected?),
        }
    }

    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError> {
        self.hca.activate_datagrams(qpn, qkey);
        Ok(())
    }

    fn fail_qp(&self, qpn: u32) {
        if !self.is_null {
            self.hca.fail_qp(qpn);
        }
    }

    fn address_vector(&self, _pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        Ok(self.hca.address_vector(&Self::address_of(remote)?))
    }
}
