//! A send queue, whose WQEs become work requests.

use core::ffi::c_int;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering;

use super::super::abi::*;
use super::super::numbers::*;
use super::{Id, MadeQp, SEND_SGES};
use crate::provider::parts::QpRequest;
use crate::provider::private::SqPlace;
use crate::wire::{
    AddressVector, AtomicSegment, CtrlWords, DataWords, DatagramSegment, ErrorCqe, FenceMode, InlineHeader, Opcode, RaddrSegment, SEGMENT,
    Service, Syndrome, WQEBB, queue_record_index,
};

/// Work requests that one call posts.
const CHAIN: usize = 32;

const NO_SGE: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };

/// The work requests of a call, each with its buffers.
pub(super) struct Chain(Box<[(ibv_send_wr, [ibv_sge; SEND_SGES as usize]); CHAIN]>);

impl Default for Chain {
    fn default() -> Self {
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let request: ibv_send_wr = unsafe { core::mem::zeroed() };
        Self(Box::new([(request, [NO_SGE; SEND_SGES as usize]); CHAIN]))
    }
}

/// The device refused a work request, or a WQE means nothing to it.
pub(super) struct Refused;

/// A send queue and its queue pair.
pub(super) struct SendRing {
    qp: NonNull<ibv_qp>,
    pub(super) qpn: u32,
    pub(super) pdn: u32,
    place: u16,
    generation: u16,
    sq: SqPlace,
    /// Key of the queue's own memory, from which a device without inline data takes the bytes of WQEs.
    pub(super) key: u32,
    max_inline: u32,
    is_datagram: bool,
    /// Place of the queue pair's own receive queue.
    pub(super) own_receives: Option<u16>,
    pub(super) send_cq: u16,
    /// WQEBBs taken, and WQE of the last work request posted and of the last that completed.
    next: u16,
    last_posted: Option<u16>,
    last_completed: Option<u16>,
    /// The device refused a WQE: no more are posted.
    is_refused: bool,
    /// Status of the WQE at `next` then: that of the refused one is its own, and those behind it are flushed.
    refusal: Syndrome,
}

impl SendRing {
    /// Makes the ring of a new queue pair.
    pub(super) fn new(
        made: MadeQp,
        place: u16,
        generation: u16,
        sq: SqPlace,
        key: u32,
        own_receives: Option<u16>,
        request: &QpRequest<'_>,
    ) -> Self {
        let MadeQp { qp, qpn, max_inline } = made;
        let (send_cq, is_datagram) = (request.send_cq as u16, request.service == Service::Datagram);
        let (next, last_posted, last_completed, is_refused) = (0, None, None, false);
        Self {
            qp,
            qpn,
            pdn: request.pd,
            place,
            generation,
            sq,
            key,
            max_inline,
            is_datagram,
            own_receives,
            send_cq,
            next,
            last_posted,
            last_completed,
            is_refused,
            refusal: Syndrome::LocalQpOperation,
        }
    }
}

/// The bytes of a WQE, segment by segment.
struct Segments {
    at: NonNull<u8>,
    left: usize,
}

impl Segments {
    /// Takes the next `N` bytes, whole segments, or `None` at the WQE's end.
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.left = self.left.checked_sub(N)?;
        // SAFETY: inside the WQE, which the driver has finished and does not change before its completion.
        let bytes = unsafe { self.at.cast::<[u8; N]>().read() };
        // SAFETY: at most its end.
        self.at = unsafe { self.at.add(N) };
        Some(bytes)
    }

    /// Takes the next buffer: memory, or bytes inside the WQE, which are in the region `key`.
    fn buffer(&mut self, key: u32) -> Option<(ibv_sge, bool)> {
        let start = self.at;
        let bytes = self.take::<SEGMENT>()?;
        let data = DataWords::parse(&bytes);
        let (length, lkey) = (data.byte_count(), data.lkey());
        if !data.is_inline() {
            return Some((ibv_sge { addr: data.addr(), length, lkey }, false));
        }
        for _ in 1..InlineHeader::segments(length as usize) {
            self.take::<SEGMENT>()?;
        }
        Some((ibv_sge { addr: start.as_ptr() as u64 + InlineHeader::LEN as u64, length, lkey: key }, true))
    }
}

impl SendRing {
    /// Posts the new WQEs.
    pub(super) fn relay(
        &mut self,
        calls: &ibv_context_ops,
        chain: &mut Chain,
        mut handle: impl FnMut(&AddressVector) -> Option<NonNull<ibv_ah>>,
    ) -> Result<(), Refused> {
        // SAFETY: the record lives as long as the queue; the driver stores it through the same atomic type.
        let producer = queue_record_index(unsafe { self.sq.sq.record.as_ref() }.load(Ordering::Acquire));
        while self.next != producer && !self.is_refused {
            let (start, mut count) = (self.next, 0);
            while self.next != producer && count < CHAIN {
                let Some(is_request) = self.fill(&mut chain.0[count], &mut handle) else {
                    self.is_refused = true;
                    break;
                };
                count += usize::from(is_request);
            }
            if count > 0 {
                self.post(calls, &mut chain.0[..count], start);
            }
        }
        if self.is_refused { Err(Refused) } else { Ok(()) }
    }

    /// Posts `requests`, made of the WQEs from `start` on.
    fn post(&mut self, calls: &ibv_context_ops, requests: &mut [(ibv_send_wr, [ibv_sge; SEND_SGES as usize])], start: u16) {
        let mut next = null_mut();
        for (request, sges) in requests.iter_mut().rev() {
            (request.next, request.sg_list) = (next, sges.as_mut_ptr());
            next = request;
        }
        let mut bad = null_mut();
        // SAFETY: a queue pair of this device; the requests and buffers live through the call.
        let result = unsafe { (calls.post_send)(self.qp.as_ptr(), next, &raw mut bad) };
        if result == 0 {
            self.last_posted = requests.last().map(|(request, _)| Id::from_bits(request.wr_id).wqe_counter);
            return;
        }
        let posted = requests.iter().position(|(request, _)| core::ptr::from_ref(request) == bad).unwrap_or(0);
        let counter = |at: usize| requests.get(at).map(|(request, _)| Id::from_bits(request.wr_id).wqe_counter);
        self.last_posted = posted.checked_sub(1).and_then(counter).or(self.last_posted);
        (self.next, self.is_refused) = (counter(posted).unwrap_or(start), true);
    }

    /// Makes the work request of the WQE at `next`, and goes on to the WQE after it. Returns `false` for a NOP, which needs none, and `None`, and stays,
    /// for a WQE that this crate does not make.
    fn fill(
        &mut self,
        (request, sges): &mut (ibv_send_wr, [ibv_sge; SEND_SGES as usize]),
        handle: &mut impl FnMut(&AddressVector) -> Option<NonNull<ibv_ah>>,
    ) -> Option<bool> {
        let index = usize::from(self.next) & (self.sq.sq.wqe_cnt as usize - 1);
        // SAFETY: inside the queue. A WQE does not cross its end.
        let mut wqe = Segments { at: unsafe { self.sq.sq.buffer.add(index * WQEBB) }, left: SEGMENT };
        let ctrl = CtrlWords::parse(&wqe.take()?);
        wqe.left = (usize::from(ctrl.ds()) * SEGMENT).min((self.sq.sq.wqe_cnt as usize - index) * WQEBB).checked_sub(SEGMENT)?;
        let opcode = Opcode::from_wire(ctrl.opcode())?;
        let blocks = u16::from(ctrl.ds()).div_ceil((WQEBB / SEGMENT) as u16).max(1);
        if opcode == Opcode::Nop {
            self.next = self.next.wrapping_add(blocks);
            return Some(false);
        }
        request.opcode = self.operands(opcode, &mut wqe, handle, &mut request.wr)?;
        let (mut count, mut bytes, mut is_inline) = (0, 0, true);
        while wqe.left > 0 {
            let (sge, is_in_wqe) = wqe.buffer(self.key)?;
            *sges.get_mut(count)? = sge;
            (count, bytes, is_inline) = (count + 1, bytes + sge.length, is_inline && is_in_wqe);
        }
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        request.num_sge = count as c_int;
        request.imm_data = ctrl.imm().to_be();
        request.send_flags = flag(ctrl.signaled(), IBV_SEND_SIGNALED)
            | flag(ctrl.solicited(), IBV_SEND_SOLICITED)
            | flag(ctrl.fence() != FenceMode::None, IBV_SEND_FENCE)
            | flag(is_inline && count > 0 && bytes <= self.max_inline, IBV_SEND_INLINE);
        let (place, generation) = (self.place, self.generation);
        request.wr_id = Id { is_receive: false, place, generation, wqe_opcode: ctrl.opcode(), wqe_counter: self.next }.to_bits();
        self.next = self.next.wrapping_add(blocks);
        Some(true)
    }

    /// Takes the segments between control segment and buffers. Returns the opcode of libibverbs.
    fn operands(
        &self,
        opcode: Opcode,
        wqe: &mut Segments,
        handle: &mut impl FnMut(&AddressVector) -> Option<NonNull<ibv_ah>>,
        out: &mut ibv_send_wr_operands,
    ) -> Option<c_int> {
        let mut remote = || wqe.take().map(|bytes| RaddrSegment::parse(&bytes));
        Some(match opcode {
            Opcode::Nop => return None,
            Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => {
                let RaddrSegment { addr, rkey } = remote()?;
                out.rdma = ibv_send_rdma { remote_addr: addr, rkey };
                match opcode {
                    Opcode::RdmaWrite => IBV_WR_RDMA_WRITE,
                    Opcode::RdmaWriteImm => IBV_WR_RDMA_WRITE_WITH_IMM,
                    _ => IBV_WR_RDMA_READ,
                }
            }
            Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => {
                let RaddrSegment { addr, rkey } = remote()?;
                let AtomicSegment { swap_add, compare } = AtomicSegment::parse(&wqe.take()?);
                let is_add = opcode == Opcode::AtomicFetchAdd;
                let (compare_add, swap) = if is_add { (swap_add, 0) } else { (compare, swap_add) };
                out.atomic = ibv_send_atomic { remote_addr: addr, compare_add, swap, rkey };
                if is_add { IBV_WR_ATOMIC_FETCH_AND_ADD } else { IBV_WR_ATOMIC_CMP_AND_SWP }
            }
            Opcode::Send | Opcode::SendImm => {
                if self.is_datagram {
                    let DatagramSegment { vector, qpn, qkey } = DatagramSegment::parse(&wqe.take()?);
                    out.ud = ibv_send_ud { ah: handle(&vector)?.as_ptr(), remote_qpn: qpn, remote_qkey: qkey };
                }
                if opcode == Opcode::Send { IBV_WR_SEND } else { IBV_WR_SEND_WITH_IMM }
            }
        })
    }

    /// Notes that the work request of WQE `wqe_counter` is complete. Returns whether `generation` is this queue pair's.
    pub(super) fn completed(&mut self, id: Id) -> bool {
        let is_own = id.generation == self.generation & 0x7f;
        if is_own {
            self.last_completed = Some(id.wqe_counter);
        }
        is_own
    }

    /// Returns whether refused WQEs can complete: every work request before them has, or gives no completion, which is so if the device had none
    /// left (`is_quiet`): a success that was not signaled gives none.
    pub(super) fn has_refused(&self, is_quiet: bool) -> bool {
        self.is_refused && (is_quiet || self.last_posted == self.last_completed)
    }

    /// Completes the refused WQE and those after it, once all before them are complete, as long as `fail` writes their CQEs. Returns whether there was one.
    #[cold]
    pub(super) fn complete_refused(&mut self, mut fail: impl FnMut(&ErrorCqe) -> bool) -> bool {
        // SAFETY: as in `relay`.
        let producer = queue_record_index(unsafe { self.sq.sq.record.as_ref() }.load(Ordering::Acquire));
        let (qpn, mut any) = (self.qpn, false);
        while self.next != producer {
            let index = usize::from(self.next) & (self.sq.sq.wqe_cnt as usize - 1);
            // SAFETY: inside the queue.
            let ctrl = CtrlWords::parse(&unsafe { self.sq.sq.buffer.add(index * WQEBB).cast().read() });
            if ctrl.opcode() != Opcode::Nop as u8 {
                let (raw_syndrome, wqe_opcode, wqe_counter) = (self.refusal as u8, ctrl.opcode(), self.next);
                if !fail(&ErrorCqe { raw_syndrome, vendor_syndrome: 0, wqe_opcode, qpn, wqe_counter, user_index: 0 }) {
                    break;
                }
                (self.refusal, any) = (Syndrome::WorkRequestFlushed, true);
            }
            self.next = self.next.wrapping_add(u16::from(ctrl.ds()).div_ceil((WQEBB / SEGMENT) as u16).max(1));
        }
        any
    }
}
