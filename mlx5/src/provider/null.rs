//! The provider that creates queues without a device, and [`NullDevice`], the device's side of
//! them. A test or benchmark plays that side: it reads the bytes that the driver wrote, and writes
//! CQEs.

use core::cell::RefCell;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Alarm, Sleeper};
use mlx5_hca::cq::SoftCq;
use mlx5_hca::{CqMemory, DeviceInfo, Pages, Region, RqMemory, check, check_region};

use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, NullOptions};
use crate::error::{ConnectError, CreateError, RegisterError};
use crate::provider::parts::{QpParts, QpRequest, Receives};
use crate::provider::private::{CqPlace, PrivateMemory, SqPlace};
use crate::provider::{Connections, Provider, Queues, Regions};
use crate::wire::{
    Access, AddressVector, AsyncEvent, BLUEFLAME_BYTES, CQE_BYTES, ConnectOptions, CqeOpcode,
    MAX_RECV_SGE, MAX_RECV_WR, MiniCqe, ResponderCqe, SEGMENT, WQEBB, queue_record_index,
};

/// Both halves of a BlueFlame register.
const REGISTER_BYTES: usize = 2 * BLUEFLAME_BYTES;
const PAGE: usize = 4096;
/// The first queue pair number.
const FIRST_QPN: u32 = 0x4000;

/// A device that executes nothing.
pub(crate) struct Null {
    options: NullOptions,
    objects: RefCell<Objects>,
    alarm: Arc<Alarm>,
}

/// The objects that exist. Numbers are never reused, except those of queue pairs, which are reused
/// at once, as a NIC may do.
#[derive(Default)]
struct Objects {
    last: u32,
    cqs: HashMap<u32, NullCq>,
    rqs: HashMap<u32, NullRq>,
    qps: HashMap<u32, NullQp>,
    mrs: HashMap<u32, PrivateMemory>,
}

struct NullCq {
    cq: SoftCq,
    place: CqPlace,
}

struct NullRq {
    _memory: PrivateMemory,
    rq: RqMemory,
}

struct NullQp {
    place: SqPlace,
    rqn: u32,
    owns_rq: bool,
}

impl Objects {
    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }
}

/// Offset of the WQEs of a receive queue. Its record is before them.
const RQ_BUFFER: usize = WQEBB;

impl Null {
    pub(crate) fn new(options: NullOptions) -> Self {
        Self {
            options,
            objects: RefCell::default(),
            alarm: Arc::default(),
        }
    }

    fn create_rq(
        &self,
        depth: u32,
        max_sge: usize,
        is_linked: bool,
    ) -> Result<(u32, RqMemory), CreateError> {
        check(
            "the depth of a receive queue",
            depth.into(),
            1,
            MAX_RECV_WR.into(),
        )?;
        check(
            "the number of buffers of a receive",
            max_sge as u64,
            0,
            MAX_RECV_SGE.into(),
        )?;
        let wqe_cnt = (depth + u32::from(is_linked)).next_power_of_two();
        let stride = (SEGMENT * (max_sge + usize::from(is_linked)))
            .next_power_of_two()
            .max(if is_linked { 2 * SEGMENT } else { SEGMENT });
        let (memory, first) = PrivateMemory::new(
            "a receive queue",
            RQ_BUFFER + wqe_cnt as usize * stride,
            PAGE,
        )?;
        // SAFETY: inside the new memory.
        let buffer = unsafe { first.add(RQ_BUFFER) };
        let rq = RqMemory {
            buffer,
            wqe_cnt,
            stride: stride as u32,
            record: first.cast(),
        };
        let objects = &mut *self.objects.borrow_mut();
        let number = objects.next();
        objects.rqs.insert(
            number,
            NullRq {
                _memory: memory,
                rq,
            },
        );
        Ok((number, rq))
    }

    /// Starts as if `counter` CQEs had already been written to completion queue `cqn`.
    #[cfg(test)]
    pub(crate) fn start_cq_at(&self, cqn: u32, counter: u32) {
        if let Some(queue) = self.objects.borrow_mut().cqs.get_mut(&cqn) {
            queue.cq.start_at(counter);
        }
    }
}

impl Provider for Null {
    // Its queue pairs have the same kind as those of the software HCA.
    fn kind(&self) -> DeviceKind {
        DeviceKind::Soft
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::with_limits_of_formats(
            "null".to_owned(),
            "none".to_owned(),
            "executes nothing".to_owned(),
        )
    }

    fn wait(&self, timeout_ns: Option<u64>) -> bool {
        let has_event = self
            .objects
            .borrow_mut()
            .cqs
            .values_mut()
            .filter_map(|queue| queue.cq.take_event().then_some(()))
            .count()
            > 0;
        if !has_event {
            // No event occurs by itself.
            sleep::wait(
                [&mut &*self.alarm as &mut dyn Sleeper],
                timeout_ns.map(Duration::from_nanos),
            );
            self.alarm.take();
        }
        has_event
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    fn take_async_event(&self) -> Option<AsyncEvent> {
        None
    }
}

impl Regions for Null {
    fn alloc_registered(
        &self,
        pd: u32,
        bytes: usize,
        access: Access,
        _huge: bool,
    ) -> Result<Region, RegisterError> {
        check_region(bytes, access)?;
        let no_memory = |_| mlx5_hca::RegisterError::Memory {
            bytes,
            source: std::io::ErrorKind::OutOfMemory.into(),
        };
        let (memory, first) = PrivateMemory::new("a region", bytes, PAGE).map_err(no_memory)?;
        // SAFETY: the memory is kept until the region is deregistered.
        let parts = unsafe { self.register(pd, first, bytes, access) }?;
        self.objects.borrow_mut().mrs.insert(parts.key, memory);
        Ok(parts)
    }

    unsafe fn register(
        &self,
        _pd: u32,
        addr: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        check_region(len, access)?;
        // Keys 0 and 0x100 name no region; 0x100 ends a receive's buffers.
        let key = (self.objects.borrow_mut().next() + 1) << 8;
        Ok(Region {
            key,
            addr,
            len,
            pages: Pages::Base,
        })
    }

    fn try_deregister(&self, key: u32) -> bool {
        self.objects.borrow_mut().mrs.remove(&key);
        true
    }

    fn deregister(&self, key: u32) {
        self.try_deregister(key);
    }
}

impl Queues for Null {
    fn alloc_pd(&self) -> Result<u32, CreateError> {
        Ok(self.objects.borrow_mut().next())
    }

    fn dealloc_pd(&self, _pdn: u32) {}

    fn create_cq(&self, config: &CqConfig) -> Result<(u32, CqMemory), CreateError> {
        let place = CqPlace::new(config)?;
        let memory = place.cq;
        // SAFETY: the memory is kept with the queue.
        let cq = unsafe { SoftCq::new(&memory) };
        let objects = &mut *self.objects.borrow_mut();
        let cqn = objects.next();
        objects.cqs.insert(cqn, NullCq { cq, place });
        Ok((cqn, memory))
    }

    fn destroy_cq(&self, cqn: u32) {
        self.objects.borrow_mut().cqs.remove(&cqn);
    }

    fn create_srq(
        &self,
        _pd: u32,
        depth: u32,
        max_sge: usize,
    ) -> Result<(u32, RqMemory), CreateError> {
        self.create_rq(depth, max_sge, true)
    }

    fn destroy_srq(&self, srqn: u32) {
        self.objects.borrow_mut().rqs.remove(&srqn);
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        let place = SqPlace::new(request.config, self.options.register)?;
        let (rqn, rq) = match request.receives {
            Receives::Shared(srqn) => (srqn, None),
            Receives::Own { depth, max_sge } => {
                let (number, memory) = self.create_rq(depth, max_sge, false)?;
                (number, Some(memory))
            }
        };
        let objects = &mut *self.objects.borrow_mut();
        let qpn = (FIRST_QPN..)
            .find(|qpn| !objects.qps.contains_key(qpn))
            .unwrap_or(FIRST_QPN);
        let parts = place.parts(qpn, rq, request.config, self.options.register, 0);
        objects.qps.insert(
            qpn,
            NullQp {
                place,
                rqn,
                owns_rq: rq.is_some(),
            },
        );
        Ok(parts)
    }

    fn destroy_qp(&self, qpn: u32) {
        let objects = &mut *self.objects.borrow_mut();
        if let Some(NullQp {
            rqn, owns_rq: true, ..
        }) = objects.qps.remove(&qpn)
        {
            objects.rqs.remove(&rqn);
        }
    }
}

impl Connections for Null {
    fn address(&self, qpn: u32) -> QpAddress {
        QpAddress::soft(1, qpn, 0)
    }

    // Connects to any address.
    fn connect(
        &self,
        _qpn: u32,
        _remote: &QpAddress,
        _options: &ConnectOptions,
    ) -> Result<(), ConnectError> {
        Ok(())
    }

    fn activate_datagrams(&self, _qpn: u32, _qkey: u32) -> Result<(), ConnectError> {
        Ok(())
    }

    fn fail_qp(&self, _qpn: u32) {}

    fn address_vector(&self, _pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        Ok(AddressVector::local(remote.lid, 0))
    }
}

/// The device's side of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
#[doc(hidden)]
pub struct NullDevice {
    null: Rc<Null>,
}

impl fmt::Debug for NullDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").finish_non_exhaustive()
    }
}

impl NullDevice {
    pub(crate) fn new(null: Rc<Null>) -> Self {
        Self { null }
    }

    #[cfg(test)]
    pub(crate) fn null(&self) -> &Null {
        &self.null
    }

    fn with_cq(&self, cqn: u32, f: impl FnOnce(&mut SoftCq) -> bool) -> bool {
        self.null
            .objects
            .borrow_mut()
            .cqs
            .get_mut(&cqn)
            .is_some_and(|queue| f(&mut queue.cq))
    }

    /// Writes the next CQE of completion queue `cqn` as a device would, owner bit last. Only the
    /// solicited bit of the op_own byte in `cqe` is used. Returns `false` if there is no such
    /// queue, or no room in it: as on any device, the queue gets no CQE after that.
    pub fn write_cqe(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode) -> bool {
        self.with_cq(cqn, |cq| cq.write(*cqe, opcode).is_ok())
    }

    /// Like [`write_cqe`](Self::write_cqe), with the received bytes in the CQE (scatter to CQE).
    /// Also returns `false`, and writes nothing, if `data` is not as long as the CQE's byte count,
    /// or longer than an entry of this queue can carry: 32 bytes, or 64 in an entry of 128.
    pub fn write_scattered(
        &self,
        cqn: u32,
        cqe: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        data: &[u8],
    ) -> bool {
        let is_whole = ResponderCqe::parse(cqe).byte_count as usize == data.len();
        self.with_cq(cqn, |cq| {
            is_whole
                && data.len() <= cq.scatter_room()
                && cq.write_scattered(*cqe, opcode, data).is_ok()
        })
    }

    /// Writes the completions of `minis` as one compressed session. `title` gives their common
    /// fields and the first WQE counter. Writes nothing and returns `false` also if the queue was
    /// created without compression.
    pub fn write_compressed(
        &self,
        cqn: u32,
        title: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        minis: &[MiniCqe],
    ) -> bool {
        self.with_cq(cqn, |cq| {
            cq.compresses() && cq.write_session(*title, opcode, minis).is_ok()
        })
    }

    fn with_qp<R>(&self, qpn: u32, f: impl FnOnce(&NullQp) -> R) -> Option<R> {
        self.null.objects.borrow().qps.get(&qpn).map(f)
    }

    /// Returns the producer counter in the doorbell record of queue pair `qpn`, and the WQEBB at
    /// `counter` of its send queue. Returns `None` if there is no such queue pair.
    #[must_use]
    pub fn send_queue(&self, qpn: u32, counter: u16) -> Option<(u16, [u8; WQEBB])> {
        self.with_qp(
            qpn,
            |NullQp {
                 place: SqPlace { sq, .. },
                 ..
             }| {
                let index = usize::from(counter) & (sq.wqe_cnt as usize - 1);
                // SAFETY: the queue's own memory: the record, which the driver accesses through the
                // same atomic type, and a WQEBB of the queue, which the driver, this thread, is not
                // writing now.
                let (record, wqebb) = unsafe {
                    (
                        sq.record.as_ref(),
                        sq.buffer.add(index * WQEBB).cast().read(),
                    )
                };
                (queue_record_index(record.load(Ordering::Acquire)), wqebb)
            },
        )
    }

    /// Returns the bytes of the BlueFlame register of queue pair `qpn`, and fills the register with
    /// `fill`. At the next call, bytes that differ from `fill` were stored in between. Returns
    /// `None` if there is no such queue pair, or it has no register.
    #[must_use]
    pub fn take_register(&self, qpn: u32, fill: u8) -> Option<[u8; REGISTER_BYTES]> {
        let register = self.with_qp(qpn, |qp| qp.place.sq.register)??;
        // SAFETY: the register, both halves, in the queue's own memory; the driver is this thread
        // and not writing now.
        Some(unsafe {
            register
                .cast::<[u8; REGISTER_BYTES]>()
                .replace([fill; REGISTER_BYTES])
        })
    }

    /// Returns the counter in the doorbell record of the receive queue of queue pair `qpn`, its own
    /// or a shared one, and the bytes of WQE `index` of that queue. Returns `None` if there is no
    /// such queue pair or WQE.
    #[must_use]
    pub fn receive_queue(&self, qpn: u32, index: u16) -> Option<(u16, Vec<u8>)> {
        let rqn = self.with_qp(qpn, |qp| qp.rqn)?;
        let objects = self.null.objects.borrow();
        let RqMemory {
            buffer,
            wqe_cnt,
            stride,
            record,
        } = objects.rqs.get(&rqn)?.rq;
        let first = (u32::from(index) < wqe_cnt).then_some(index as usize * stride as usize)?;
        // SAFETY: a WQE inside the queue; the driver is this thread and not writing now.
        let wqe = (first..first + stride as usize)
            .map(|byte| unsafe { buffer.add(byte).read() })
            .collect();
        // SAFETY: the record lies in the queue's memory; the driver accesses it through the same
        // atomic type.
        Some((
            queue_record_index(unsafe { record.as_ref() }.load(Ordering::Acquire)),
            wqe,
        ))
    }

    /// Returns the two words of completion queue `cqn`'s doorbell record, as the driver wrote them.
    /// Returns `None` if there is no such queue.
    #[must_use]
    pub fn cq_record(&self, cqn: u32) -> Option<[u32; 2]> {
        let objects = self.null.objects.borrow();
        let record = objects.cqs.get(&cqn)?.place.cq.record;
        // SAFETY: the record has two words and lives as long as the queue; the driver accesses them
        // through the same atomic type.
        Some(
            unsafe { record.as_ref() }
                .each_ref()
                .map(|word| word.load(Ordering::Acquire)),
        )
    }
}
