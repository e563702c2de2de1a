//! Any device of libibverbs, under the data path of this crate: a relay between the formats of mlx5
//! and the calls of libibverbs.
//!
//! The queues are memory of this process, in the formats of mlx5, as on the software HCA. The hook
//! is called after a doorbell, and when a poll finds a queue empty. In this call the relay does
//! what a NIC does by itself: it takes the new WQEs, posts them as work requests (`ibv_post_send`,
//! `ibv_post_recv`, `ibv_post_srq_recv`), takes work completions (`ibv_poll_cq`) and writes them as
//! CQEs. `docs/hardware.md` has the costs, and the devices for which it is meant.
//!
//! - `sends` turns WQEs of a send queue into work requests. `receives` turns WQEs of receive
//!   queues into work requests. `completions` turns work completions into CQEs.
//!
//! A work request's `wr_id` identifies its WQE ([`Id`]).

mod completions;
mod receives;
mod sends;
#[cfg(test)]
mod tests;

use core::ffi::c_int;
use core::ptr::{NonNull, null_mut};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use copyrpc_shm::sleep::Watch;
use mlx5_hca::{CqMemory, RqMemory};
use slab::{Slab, VacantEntry};

use self::completions::{BATCH, CompletionRing};
use self::receives::{ReceiveRing, Target};
use self::sends::{Chain, Device, SendRing};
use super::abi::*;
use super::context::Context;
use super::tables::{CqObject, QpObject};
use crate::config::{CqConfig, RqSize};
use crate::error::CreateError;
use crate::error::verbs::CallError;
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpParts, QpRequest, Receives};
use crate::provider::private::{CqPlace, SqPlace};
use crate::provider::{Connections, Provider, Queues, Regions};
use crate::wire::{Access, AddressVector, CqArm, WQEBB};

/// Maximum number of buffers of a work request: one for the bytes inside a WQE, and one for the
/// memory that the WQE's data segment describes.
const SEND_SGES: u32 = 2;

#[derive(Clone, Copy)]
struct MadeQp {
    qp: NonNull<ibv_qp>,
    qpn: u32,
    max_inline: u32,
}

/// The identifier of a work request, its `wr_id`. Bit 63: whether the request is a receive. Bits
/// 56..63: for a send queue, low bits of the number of queue pairs created until then; 0 for a
/// receive queue. Bits 32..48: place of the queue in the table of send or receive queues. Bits
/// 8..24: counter of the WQE. Bits 0..8: opcode of the WQE.
#[derive(Clone, Copy)]
struct Id(u64);

impl Id {
    /// Makes the identifier of a queue: the bits that all its work requests have.
    fn of_queue(is_receive: bool, place: u16, generation: u16) -> Self {
        Self(
            u64::from(is_receive) << 63
                | u64::from(generation & 0x7f) << 56
                | u64::from(place) << 32,
        )
    }

    fn of_wqe(self, opcode: u8, counter: u16) -> Self {
        Self(self.0 | u64::from(counter) << 8 | u64::from(opcode))
    }

    fn is_of(self, queue: Self) -> bool {
        self.0 >> 32 == queue.0 >> 32
    }

    fn is_receive(self) -> bool {
        self.0 >> 63 != 0
    }

    fn place(self) -> u16 {
        (self.0 >> 32) as u16
    }

    fn wqe_opcode(self) -> u8 {
        self.0 as u8
    }

    fn wqe_counter(self) -> u16 {
        (self.0 >> 8) as u16
    }
}

/// Returns the next free place of a table; an error if its number has more than 16 bits.
fn place_of<T>(free: &VacantEntry<'_, T>, what: &'static str) -> Result<u16, CreateError> {
    let full = mlx5_hca::CreateError::Exhausted { what, max: 1 << 16 };
    u16::try_from(free.key()).map_err(|_| full.into())
}

pub(crate) struct Relay {
    base: Rc<Context>,
    calls: ibv_context_ops,
    rings: RefCell<Rings>,
    /// Last number given to a domain or a shared receive queue: libibverbs has only handles for
    /// them, no numbers.
    last_number: Cell<u32>,
}

#[derive(Default)]
struct Rings {
    cqs: Slab<CompletionRing>,
    receives: Slab<ReceiveRing>,
    sends: Slab<SendRing>,
    /// Number of queue pairs created since the start, modulo 2^16.
    generations: u16,
    chain: Chain,
    taken: [ibv_wc; BATCH],
}

fn refused_qp() -> CreateError {
    let error = CallError::last("ibv_create_qp");
    match error.errno {
        libc::EOPNOTSUPP | libc::ENOSYS => {
            error.advise("the device has no such queue pairs, use another: reliable connections are needed, and UD for datagrams")
        }
        _ => error,
    }
    .into()
}

impl Relay {
    pub(crate) fn new(base: Context) -> Self {
        Self {
            // SAFETY: the device is open, and its table does not change.
            calls: unsafe { base.device.context.as_ref() }.ops,
            base: Rc::new(base),
            rings: RefCell::default(),
            last_number: Cell::new(0),
        }
    }

    /// Returns the device itself, which manages the regions, addresses and transitions.
    pub(crate) fn base(&self) -> &Rc<Context> {
        &self.base
    }

    pub(crate) fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.base.with_arrivals(|| self.arm_all(), then);
    }

    fn number(&self) -> u32 {
        self.last_number.set(self.last_number.get() + 1);
        self.last_number.get()
    }

    /// Posts the new WQEs of the queue pair with register number `index`.
    #[inline(never)]
    pub(crate) fn ring(&self, index: usize) {
        let Rings { sends, chain, .. } = &mut *self.rings.borrow_mut();
        if let Some(ring) = sends.get_mut(index) {
            ring.relay(self, chain);
        }
    }

    #[cold]
    pub(crate) fn receives_posted(&self) {
        self.rings
            .borrow_mut()
            .receives
            .iter_mut()
            .for_each(|(_, ring)| ring.relay(&self.calls));
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn empty_poll(&self) -> bool {
        self.rings.borrow_mut().poll(self, &self.calls)
    }

    /// Takes all events, and arms every queue for any completion. Then takes the completions that
    /// arrived before, which give no event.
    fn arm_all(&self) {
        self.base.take_events();
        for object in self.base.objects.borrow().cqs.values() {
            // SAFETY: the queue is a queue of this device.
            unsafe { (self.calls.req_notify_cq)(object.cq.as_ptr(), 0) };
        }
        self.empty_poll();
    }

    /// Creates the queue pair at the device, with room for inline data if the device supports that.
    /// A device without that room takes the inline bytes from the send queue's memory.
    fn create_on_device(
        &self,
        request: &QpRequest<'_>,
        wqe_cnt: u32,
    ) -> Result<MadeQp, CreateError> {
        let (pd, init) = self.base.qp_attributes(request, wqe_cnt, SEND_SGES)?;
        let create = |max_inline_data| {
            let mut attr = init;
            attr.cap.max_inline_data = max_inline_data;
            // SAFETY: the attributes contain objects of this device, and live through the call.
            let qp = NonNull::new(unsafe { (self.base.verbs().ibv_create_qp)(pd, &raw mut attr) })?;
            Some(MadeQp {
                qp,
                // SAFETY: the queue pair was just created.
                qpn: unsafe { qp.as_ref() }.qp_num,
                max_inline: attr.cap.max_inline_data,
            })
        };
        create(request.config.max_inline_data as u32)
            .or_else(|| create(0))
            .ok_or_else(refused_qp)
    }
}

impl Rings {
    /// Posts receives that the device had no room for, and takes work completions. Returns whether
    /// there are new CQEs.
    #[inline(always)]
    fn poll(&mut self, device: &impl Device, calls: &ibv_context_ops) -> bool {
        let Self {
            cqs,
            receives,
            sends,
            taken,
            ..
        } = self;
        receives.iter_mut().for_each(|(_, ring)| ring.relay(calls));
        let mut has_new = false;
        for (_, ring) in cqs.iter_mut() {
            has_new |= ring.relay(calls, sends, taken);
        }
        for (_, ring) in sends.iter_mut().filter(|(_, ring)| ring.is_refused()) {
            if let Some(cq) = cqs.get_mut(ring.send_cq.into()) {
                has_new |= ring.complete_refused(device, |cqe| cq.fail_send(cqe));
            }
        }
        has_new
    }

    /// Destroys a queue pair; `destroy` destroys it at the device. Returns the memory key of its
    /// send queue, or `None` if there is no such queue pair.
    fn destroy_qp(
        &mut self,
        device: &impl Device,
        calls: &ibv_context_ops,
        qpn: u32,
        destroy: impl FnOnce(),
    ) -> Option<u32> {
        let (place, _) = self.sends.iter().find(|(_, ring)| ring.made.qpn == qpn)?;
        let ring = &mut self.sends[place];
        // The ring is abandoned first, so that the poll below posts nothing to the destroyed queue
        // pair.
        ring.abandon();
        ring.own_receives
            .and_then(|rq| self.receives.try_remove(rq.into()));
        destroy();
        // libibverbs may still hold completions of this queue pair, mixed with completions of other
        // queue pairs, which must not be lost. So all completions are taken now, and written to the
        // rings that the driver polls.
        self.poll(device, calls);
        Some(self.sends.remove(place).key)
    }

    /// Makes the ring of a receive queue. Returns the ring's place in the table, and its memory.
    fn create_receives(
        &mut self,
        target: Target,
        size: RqSize,
    ) -> Result<(u16, RqMemory), CreateError> {
        let free = self.receives.vacant_entry();
        let place = place_of(&free, "receive queues")?;
        let ring = ReceiveRing::new(Id::of_queue(true, place, 0), target, size)?;
        Ok((place, free.insert(ring).memory))
    }
}

impl Device for Relay {
    #[inline(always)]
    unsafe fn post_send(
        &self,
        qp: NonNull<ibv_qp>,
        first: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.calls.post_send)(qp.as_ptr(), first, bad) }
    }

    fn fail_qp(&self, qpn: u32) {
        self.base.fail_qp(qpn);
    }

    fn handle(&self, pdn: u32, path: &AddressVector) -> Option<NonNull<ibv_ah>> {
        self.base.handle(pdn, path).ok()
    }

    fn any_handle(&self, pdn: u32) -> Option<NonNull<ibv_ah>> {
        let handles = &self.base.objects.borrow().handles;
        let known = handles.iter().find(|((of, _), _)| *of == pdn);
        known.map(|(_, handle)| *handle)
    }
}

impl Queues for Relay {
    fn alloc_pd(&self) -> Result<u32, CreateError> {
        // SAFETY: the device is open.
        let pd = unsafe { (self.base.verbs().ibv_alloc_pd)(self.base.device.context()) };
        let pd = NonNull::new(pd).ok_or_else(|| CallError::last("ibv_alloc_pd"))?;
        let pdn = self.number();
        self.base.objects.borrow_mut().pds.insert(pdn, pd);
        Ok(pdn)
    }

    fn dealloc_pd(&self, pdn: u32) {
        self.base.dealloc_pd(pdn);
    }

    fn create_cq(&self, config: &CqConfig) -> Result<(u32, CqMemory), CreateError> {
        let max_cqe = self.base.info().max_cqe;
        config.check(max_cqe, self.base.comp_vectors())?;
        if config.compression {
            return Err(CreateError::Unsupported {
                what: "compression of CQEs of that size",
            });
        }
        let place = CqPlace::new(config)?;
        // The size of the ring is a power of two, and may be larger than the device's maximum.
        let entries = place.cq.entries.min(max_cqe);
        // SAFETY: the device is open, and the channel belongs to it.
        let cq = unsafe {
            let create = self.base.verbs().ibv_create_cq;
            create(
                self.base.device.context(),
                entries as i32,
                null_mut(),
                self.base.channel(),
                config.comp_vector as i32,
            )
        };
        let cq = NonNull::new(cq).ok_or_else(|| CallError::last("ibv_create_cq"))?;
        let cqs = &mut self.rings.borrow_mut().cqs;
        let free = cqs.vacant_entry();
        // The queue's number is its place in the table. It need not be a number of the device,
        // because the queue is not armed through a register.
        let cqn = u32::from(place_of(&free, "completion queues").inspect_err(|_| {
            // SAFETY: the object was just created, and is in no table.
            unsafe { (self.base.verbs().ibv_destroy_cq)(cq.as_ptr()) };
        })?);
        let memory = place.cq;
        free.insert(CompletionRing::new(cq, place));
        self.base.objects.borrow_mut().cqs.insert(
            cqn,
            CqObject {
                cq,
                uar: NonNull::dangling(),
                record: memory.record.cast(),
                events: 0,
            },
        );
        Ok((cqn, memory))
    }

    fn destroy_cq(&self, cqn: u32) {
        self.base.destroy_cq(cqn);
        self.rings.borrow_mut().cqs.try_remove(cqn as usize);
    }

    fn armed(&self, cqn: u32, command: &CqArm, holds: &dyn Fn(bool) -> bool) {
        if let Ok(cq) = self.base.objects.borrow().cq(cqn) {
            // SAFETY: the queue is a queue of this device.
            unsafe { (self.calls.req_notify_cq)(cq, command.solicited_only.into()) };
        }
        // Completions that arrived before the command give no event, so they are taken now. Their
        // CQEs do not show whether they are solicited, so any CQE ends the next wait.
        self.empty_poll();
        if holds(false) {
            self.base.is_due.set(true);
        }
    }

    fn create_srq(&self, pdn: u32, size: RqSize) -> Result<(u32, RqMemory), CreateError> {
        if self.base.info().max_srq_wr == 0 || self.calls.post_srq_recv.is_none() {
            return Err(CreateError::Unsupported {
                what: "shared receive queues: give each queue pair receives of its own, which copyrpc cannot do",
            });
        }
        let srq = self.base.make_srq(pdn, size)?;
        let created = self
            .rings
            .borrow_mut()
            .create_receives(Target::Shared(srq), size);
        let (_, memory) = created.inspect_err(|_| {
            // SAFETY: the object was just created, and is in no table.
            unsafe { (self.base.verbs().ibv_destroy_srq)(srq.as_ptr()) };
        })?;
        let srqn = self.number();
        self.base.objects.borrow_mut().srqs.insert(srqn, srq);
        Ok((srqn, memory))
    }

    fn destroy_srq(&self, srqn: u32) {
        let srq = self.base.objects.borrow().srqs.get(&srqn).copied();
        let is_of = |ring: &ReceiveRing| srq.is_some_and(|srq| ring.is_of(srq));
        let receives = &mut self.rings.borrow_mut().receives;
        receives.retain(|_, ring| !is_of(ring));
        self.base.destroy_srq(srqn);
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        self.base.check_qp(request)?;
        let config = request.config;
        if config.scatter_to_cqe {
            return Err(CreateError::Unsupported {
                what: "data in the CQE, which a relayed device does not write",
            });
        }
        let sq = SqPlace::new(config, RegisterKind::Unread)?;
        let made = self.create_on_device(request, sq.sq.wqe_cnt)?;
        self.open_qp(request, sq, made).inspect_err(|_| {
            // SAFETY: the object was just created, and is in no table.
            unsafe { (self.base.verbs().ibv_destroy_qp)(made.qp.as_ptr()) };
        })
    }

    fn destroy_qp(&self, qpn: u32) {
        let rings = &mut *self.rings.borrow_mut();
        let key = rings.destroy_qp(self, &self.calls, qpn, || self.base.destroy_qp(qpn));
        key.into_iter().for_each(|key| self.base.deregister(key));
    }
}

impl Relay {
    fn open_qp(
        &self,
        request: &QpRequest<'_>,
        sq: SqPlace,
        made: MadeQp,
    ) -> Result<QpParts, CreateError> {
        // If the device has no room for inline bytes, it takes the bytes from the queue, which
        // needs a memory key.
        let key = self
            .base
            .register_memory(
                request.pd,
                sq.sq.buffer,
                sq.sq.wqe_cnt as usize * WQEBB,
                Access::empty(),
                None,
            )?
            .key;
        self.open_rings(request, sq, made, key)
            .inspect_err(|_| self.base.deregister(key))
    }

    fn open_rings(
        &self,
        request: &QpRequest<'_>,
        sq: SqPlace,
        made: MadeQp,
        key: u32,
    ) -> Result<QpParts, CreateError> {
        let rings = &mut *self.rings.borrow_mut();
        let own = match request.receives {
            Receives::Shared(_) => None,
            Receives::Own(size) => Some(rings.create_receives(Target::Own(made.qp), size)?),
        };
        let own_receives = own.map(|(place, _)| place);
        let free = rings.sends.vacant_entry();
        let place = place_of(&free, "queue pairs").inspect_err(|_| {
            own_receives.and_then(|rq| rings.receives.try_remove(rq.into()));
        })?;
        rings.generations = rings.generations.wrapping_add(1);
        let id = Id::of_queue(false, place, rings.generations);
        let parts = sq.parts(
            made.qpn,
            own.map(|(_, memory)| memory),
            request.config,
            RegisterKind::Unread,
            place.into(),
        );
        free.insert(SendRing::new(made, id, sq, key, own_receives, request));
        let qps = &mut self.base.objects.borrow_mut().qps;
        qps.insert(made.qpn, QpObject::new(made.qp));
        Ok(QpParts {
            has_atomics: self.base.has_atomics(),
            ..parts
        })
    }
}
