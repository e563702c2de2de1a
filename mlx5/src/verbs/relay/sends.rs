//! A send queue, whose WQEs become work requests.

use core::ffi::c_int;
use core::mem::{replace, zeroed};
use core::ptr::{NonNull, null_mut};
use core::slice;
use core::sync::atomic::Ordering;

use super::super::abi::*;
use super::super::numbers::*;
use super::{Id, MadeQp, SEND_SGES};
use crate::provider::parts::QpRequest;
use crate::provider::private::SqPlace;
use crate::wire::{
    AddressVector, AtomicSegment, CtrlWords, DataWords, DatagramSegment, ErrorCqe, FenceMode,
    Header, Opcode, Piece, RaddrSegment, SEGMENT, Service, Syndrome, WQEBB, Wqe,
    queue_record_index,
};

/// Maximum number of work requests that one call posts.
const CHAIN: usize = 32;

#[repr(C)]
struct Slot {
    request: ibv_send_wr,
    sges: [ibv_sge; SEND_SGES as usize],
}

/// Slots for the work requests that one call posts; all calls use the same slots. Each request
/// points to the SGEs of its slot and to the next request, and the last slot's request to the
/// first. During a call, the last posted request points to no next one.
pub(super) struct Chain(Vec<Slot>);

impl Default for Chain {
    fn default() -> Self {
        // SAFETY: the struct holds numbers and pointers, for which zero is a valid value.
        let mut chain = Self((0..CHAIN).map(|_| unsafe { zeroed() }).collect());
        let first = chain.first();
        for at in 0..CHAIN {
            // SAFETY: the pointers are to slots of the chain, to which no reference exists. The
            // slots live, and are not moved, as long as the chain lives.
            unsafe {
                let slot = first.add(at);
                (*slot).request.next = (&raw mut (*first.add((at + 1) % CHAIN)).request);
                (*slot).request.sg_list = (&raw mut (*slot).sges).cast();
            }
        }
        chain
    }
}

impl Chain {
    /// Returns the first slot. A pointer to a slot is also a pointer to its request, the first
    /// field.
    fn first(&mut self) -> *mut Slot {
        self.0.as_mut_ptr()
    }
}

pub(super) trait Device {
    /// Posts requests (`ibv_post_send`).
    ///
    /// # Safety
    /// `qp` is a queue pair of this device. The requests and their buffers live through the call,
    /// and no reference to them exists.
    unsafe fn post_send(
        &self,
        qp: NonNull<ibv_qp>,
        first: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> c_int;

    fn fail_qp(&self, qpn: u32);

    /// Returns the address handle of a path; `None` if the device refuses the path.
    fn handle(&self, pdn: u32, path: &AddressVector) -> Option<NonNull<ibv_ah>>;

    /// Returns an address handle of the domain, if the domain has one.
    fn any_handle(&self, pdn: u32) -> Option<NonNull<ibv_ah>>;
}

/// The stage of a send queue. After the device has refused a WQE, a *marker* is posted: a request
/// whose completion follows the completions of all earlier requests.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// New WQEs are posted.
    Open,
    /// A WQE was refused: no further WQE is posted, and the marker still has to be posted.
    Refused,
    /// The marker is posted, and its completion has not arrived.
    Draining,
    /// All requests are complete. The refused WQE, and the WQEs after it, can complete.
    Drained,
}

pub(super) struct SendRing {
    pub(super) made: MadeQp,
    pdn: u32,
    id: Id,
    sq: SqPlace,
    /// Key of the queue's own memory, from which a device without inline data takes the bytes of
    /// WQEs.
    pub(super) key: u32,
    is_datagram: bool,
    /// Place of the queue pair's own receive queue.
    pub(super) own_receives: Option<u16>,
    pub(super) send_cq: u16,
    /// Number of WQEBBs taken from the queue, modulo 2^16: the counter of the next WQE.
    next: u16,
    stage: Stage,
    /// Status of the WQE at `next` after a refusal: the refused WQE has its own error, and the WQEs
    /// after it are flushed.
    refusal: Syndrome,
}

impl SendRing {
    pub(super) fn new(
        made: MadeQp,
        id: Id,
        sq: SqPlace,
        key: u32,
        own_receives: Option<u16>,
        request: &QpRequest<'_>,
    ) -> Self {
        Self {
            made,
            pdn: request.pd,
            id,
            sq,
            key,
            is_datagram: request.service == Service::Datagram,
            own_receives,
            send_cq: request.send_cq as u16,
            next: 0,
            stage: Stage::Open,
            refusal: Syndrome::LocalQpOperation,
        }
    }
}

impl SendRing {
    /// Returns the number of WQEBBs that the driver has announced, modulo 2^16.
    fn producer(&self) -> u16 {
        // SAFETY: the record lives as long as the queue; the driver stores it through the same
        // atomic type.
        queue_record_index(unsafe { self.sq.sq.record.as_ref() }.load(Ordering::Acquire))
    }

    /// Returns the beginning of the WQE at `next`, as a `T`.
    ///
    /// # Safety
    /// `T` consists of bytes, and the WQE is at least as long. The WQE is announced: the driver has
    /// finished it, and does not change it before its completion.
    #[inline(always)]
    unsafe fn wqe<'a, T>(&self) -> &'a T {
        let index = usize::from(self.next) & (self.sq.sq.wqe_cnt as usize - 1);
        // SAFETY: the bytes are inside the queue, because a WQE does not wrap. The caller
        // guarantees the rest.
        unsafe { self.sq.sq.buffer.add(index * WQEBB).cast().as_ref() }
    }

    /// Returns the control segment of the WQE at `next`, which must be announced.
    #[inline(always)]
    fn ctrl(&self) -> CtrlWords {
        // SAFETY: the WQE at `next` is announced, and every WQE begins with a control segment.
        CtrlWords::parse(unsafe { self.wqe() })
    }

    /// Advances `next` to the WQE after a WQE of `ds` segments.
    fn pass(&mut self, ds: u8) {
        let blocks = usize::from(ds).div_ceil(WQEBB / SEGMENT);
        self.next = self.next.wrapping_add(blocks as u16);
    }

    /// Posts the new WQEs. Ends the queue pair if one of them is refused.
    #[inline(always)]
    pub(super) fn relay(&mut self, device: &impl Device, chain: &mut Chain) {
        let (producer, first) = (self.producer(), chain.first());
        let mut slot = first;
        while self.next != producer && self.stage == Stage::Open {
            // SAFETY: `slot` points to a slot of the chain, to which no other reference exists.
            let (is_request, next) = unsafe {
                (
                    self.fill_plain(&mut *slot) || self.fill(device, &mut *slot),
                    (*slot).request.next.cast(),
                )
            };
            if !is_request {
                self.pause(device, first, slot);
            } else if self.next != producer && next != first {
                slot = next;
                continue;
            } else {
                self.post(device, first, slot);
            }
            slot = first;
        }
    }

    /// Posts the requests before `slot`; the next WQE gave no request. Ends the queue pair if that
    /// WQE was refused.
    #[cold]
    fn pause(&mut self, device: &impl Device, first: *mut Slot, slot: *mut Slot) {
        if slot != first {
            self.post(device, first, slot.wrapping_sub(1));
        }
        if self.stage == Stage::Refused {
            self.end(device);
        }
    }

    #[inline(always)]
    fn post(&mut self, device: &impl Device, first: *mut Slot, last: *mut Slot) {
        let mut bad = null_mut();
        // SAFETY: `qp` is a queue pair of this device; the requests and their buffers live through
        // the call, and no reference to them exists.
        let result = unsafe {
            let next = replace(&mut (*last).request.next, null_mut());
            let result = device.post_send(self.made.qp, first.cast(), &raw mut bad);
            (*last).request.next = next;
            result
        };
        if result != 0 {
            self.refused(device, first, bad);
        }
    }

    /// Sets `next` back to the WQE of the request `bad`, which the device refused, and ends the
    /// queue pair.
    #[cold]
    fn refused(&mut self, device: &impl Device, first: *const Slot, bad: *const ibv_send_wr) {
        // SAFETY: `first` points to the chain's `CHAIN` slots, to which no other reference exists.
        let slots = unsafe { slice::from_raw_parts(first, CHAIN) };
        let slot = slots
            .iter()
            .find(|slot| &raw const slot.request == bad)
            .unwrap_or(&slots[0]);
        self.next = Id(slot.request.wr_id).wqe_counter();
        self.end(device);
    }

    /// Ends the queue pair: moves it to the error state, and posts the marker.
    fn end(&mut self, device: &impl Device) {
        self.stage = Stage::Refused;
        device.fail_qp(self.made.qpn);
        self.drain(device);
    }

    /// Posts the marker, which the ended queue pair flushes after all other requests. If the device
    /// has no room for the marker, a later call posts it.
    fn drain(&mut self, device: &impl Device) {
        // SAFETY: the struct holds numbers and pointers, for which zero is a valid value.
        let mut marker: ibv_send_wr = unsafe { zeroed() };
        // The opcode of a NOP identifies the marker, because a NOP never becomes a request.
        marker.wr_id = self.id.of_wqe(Opcode::Nop as u8, 0).0;
        marker.send_flags = IBV_SEND_SIGNALED;
        marker.opcode = IBV_WR_RDMA_WRITE;
        if self.is_datagram {
            let Some(handle) = device.any_handle(self.pdn) else {
                // Each posted datagram needed a handle, so without one no request is outstanding.
                self.stage = Stage::Drained;
                return;
            };
            marker.opcode = IBV_WR_SEND;
            marker.wr.ud = ibv_send_ud {
                ah: handle.as_ptr(),
                remote_qpn: 0,
                remote_qkey: 0,
            };
        }
        let mut bad = null_mut();
        // SAFETY: `qp` is a queue pair of this device. The request has no buffers and lives through
        // the call, and no reference to it exists.
        self.stage =
            match unsafe { device.post_send(self.made.qp, &raw mut marker, &raw mut bad) }.abs() {
                0 => Stage::Draining,
                libc::ENOMEM => Stage::Refused,
                // After any other error the device will never take the marker.
                _ => Stage::Drained,
            };
    }

    /// Makes the work request of the WQE at `next`, and advances `next`, if the WQE is a READ or
    /// WRITE with one buffer outside of the WQE. This is the usual case, and takes 60 instructions
    /// less than [`fill`](Self::fill). Returns whether the WQE is of this kind.
    #[inline(always)]
    fn fill_plain(&mut self, Slot { request, sges }: &mut Slot) -> bool {
        let ctrl = self.ctrl();
        let opcode = match Opcode::from_repr(ctrl.opcode()) {
            Some(Opcode::RdmaWrite) => IBV_WR_RDMA_WRITE,
            Some(Opcode::RdmaWriteImm) => IBV_WR_RDMA_WRITE_WITH_IMM,
            Some(Opcode::RdmaRead) => IBV_WR_RDMA_READ,
            _ => return false,
        };
        // Such a WQE has three segments: control, remote address, buffer. It takes one WQEBB.
        if ctrl.ds() != 3 {
            return false;
        }
        // SAFETY: the WQE is announced, and has exactly these three segments.
        let [_, remote, data] = unsafe { self.wqe::<[[u8; SEGMENT]; 3]>() };
        let (remote, data) = (RaddrSegment::parse(remote), DataWords::parse(data));
        if data.is_inline() {
            return false;
        }
        request.wr.rdma = ibv_send_rdma {
            remote_addr: remote.addr,
            rkey: remote.rkey,
        };
        sges[0] = ibv_sge {
            addr: data.addr(),
            length: data.byte_count(),
            lkey: data.lkey(),
        };
        self.finish(request, opcode, ctrl, 1, 0);
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Makes the work request of any WQE at `next`. Returns `false` for a NOP, which needs no
    /// request, and for a WQE that is refused. Advances `next`, except if the WQE is refused.
    #[cold]
    fn fill(&mut self, device: &impl Device, slot: &mut Slot) -> bool {
        let ds = self.ctrl().ds();
        // SAFETY: the WQE is announced, has `ds` segments, and does not wrap; the driver does not
        // change it before its completion.
        let bytes = unsafe { slice::from_raw_parts(self.wqe(), usize::from(ds) * SEGMENT) };
        let wqe = Wqe::parse(bytes, self.is_datagram).ok();
        let is_nop = wqe.is_some_and(|wqe| wqe.opcode == Opcode::Nop);
        let made = wqe.and_then(|wqe| self.request(device, &wqe, slot));
        if made.is_none() && !is_nop {
            self.stage = Stage::Refused;
            return false;
        }
        self.pass(ds);
        !is_nop
    }

    /// Makes the work request of a WQE; `None` for a WQE that this crate does not make, or if the
    /// device refuses the path of a datagram.
    fn request(
        &self,
        device: &impl Device,
        wqe: &Wqe<'_>,
        Slot { request, sges }: &mut Slot,
    ) -> Option<()> {
        match wqe.header {
            Header::None => {}
            Header::Memory(RaddrSegment { addr, rkey }) => {
                request.wr.rdma = ibv_send_rdma {
                    remote_addr: addr,
                    rkey,
                };
            }
            Header::Atomic(RaddrSegment { addr, rkey }, operands) => {
                let AtomicSegment { swap_add, compare } = operands;
                let (compare_add, swap) = match wqe.opcode {
                    Opcode::AtomicFetchAdd => (swap_add, 0),
                    _ => (compare, swap_add),
                };
                request.wr.atomic = ibv_send_atomic {
                    remote_addr: addr,
                    compare_add,
                    swap,
                    rkey,
                };
            }
            Header::Datagram(DatagramSegment { vector, qpn, qkey }) => {
                let handle = device.handle(self.pdn, &vector)?;
                request.wr.ud = ibv_send_ud {
                    ah: handle.as_ptr(),
                    remote_qpn: qpn,
                    remote_qkey: qkey,
                };
            }
        }
        // Inline data is a property of the whole request: the device takes the bytes of all buffers
        // when the request is posted, or of none. A gathered buffer comes last, so the request is
        // inline only if its last part is.
        let (mut count, mut is_inline) = (0, false);
        for piece in wqe.pieces() {
            let length = piece.len() as u32;
            let (addr, lkey) = match piece {
                Piece::Buffer { lkey, addr, .. } => (addr, lkey),
                Piece::Inline(bytes) => (bytes.as_ptr() as u64, self.key),
            };
            is_inline = matches!(piece, Piece::Inline(_)) && length <= self.made.max_inline;
            *sges.get_mut(count)? = ibv_sge { addr, length, lkey };
            count += 1;
        }
        let inline = if is_inline { IBV_SEND_INLINE } else { 0 };
        let opcode = request_opcode(wqe.opcode)?;
        self.finish(request, opcode, wqe.ctrl, count as i32, inline);
        Some(())
    }

    #[inline(always)]
    fn finish(
        &self,
        request: &mut ibv_send_wr,
        opcode: i32,
        ctrl: CtrlWords,
        buffers: i32,
        inline: u32,
    ) {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        request.num_sge = buffers;
        request.opcode = opcode;
        request.send_flags = flag(ctrl.signaled(), IBV_SEND_SIGNALED)
            | flag(ctrl.solicited(), IBV_SEND_SOLICITED)
            | flag(ctrl.fence() != FenceMode::None, IBV_SEND_FENCE)
            | inline;
        request.imm_data = ctrl.imm().to_be();
        request.wr_id = self.id.of_wqe(ctrl.opcode(), ctrl.wqe_index()).0;
    }

    /// Notes that the work request `id` is complete. Returns whether it was the request of a WQE of
    /// this queue; a marker is not.
    pub(super) fn completed(&mut self, id: Id) -> bool {
        let is_own = id.is_of(self.id);
        let is_marker = id.wqe_opcode() == Opcode::Nop as u8;
        if is_own && is_marker {
            self.stage = Stage::Drained;
        }
        is_own && !is_marker
    }

    pub(super) fn is_refused(&self) -> bool {
        self.stage != Stage::Open
    }

    /// Prepares for the destruction of the queue pair. If a WQE was refused, no marker is awaited
    /// any more: the refused WQE, and the WQEs after it, can complete now.
    pub(super) fn abandon(&mut self) {
        if self.is_refused() {
            self.stage = Stage::Drained;
        }
    }

    /// Completes the refused WQE and the WQEs after it, once all earlier requests are complete.
    /// Stops when `fail` has no room for a CQE. Returns whether it completed a WQE.
    #[cold]
    pub(super) fn complete_refused(
        &mut self,
        device: &impl Device,
        mut fail: impl FnMut(&ErrorCqe) -> bool,
    ) -> bool {
        if self.stage == Stage::Refused {
            self.drain(device);
        }
        if self.stage != Stage::Drained {
            return false;
        }
        let producer = self.producer();
        let mut any = false;
        while self.next != producer {
            let ctrl = self.ctrl();
            if ctrl.opcode() != Opcode::Nop as u8 {
                let cqe = ErrorCqe {
                    raw_syndrome: self.refusal as u8,
                    vendor_syndrome: 0,
                    wqe_opcode: ctrl.opcode(),
                    qpn: self.made.qpn,
                    wqe_counter: self.next,
                    user_index: 0,
                };
                if !fail(&cqe) {
                    break;
                }
                (self.refusal, any) = (Syndrome::WorkRequestFlushed, true);
            }
            self.pass(ctrl.ds());
        }
        any
    }
}

/// Returns the opcode of libibverbs. A NOP has no such opcode.
fn request_opcode(opcode: Opcode) -> Option<i32> {
    Some(match opcode {
        Opcode::RdmaWrite => IBV_WR_RDMA_WRITE,
        Opcode::RdmaWriteImm => IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::RdmaRead => IBV_WR_RDMA_READ,
        Opcode::AtomicCompareSwap => IBV_WR_ATOMIC_CMP_AND_SWP,
        Opcode::AtomicFetchAdd => IBV_WR_ATOMIC_FETCH_AND_ADD,
        Opcode::Send => IBV_WR_SEND,
        Opcode::SendImm => IBV_WR_SEND_WITH_IMM,
        Opcode::Nop => return None,
    })
}
