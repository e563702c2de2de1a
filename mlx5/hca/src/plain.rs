//! Plain WQEs: a WRITE, with immediate or not, of one contiguous part, in immediate time, to a peer that answers. Nearly every WQE of an RPC
//! is one.
//!
//! A plain WQE uses the results of the checks of earlier ones on its queue pair: the peer's queue pair is connected to this one
//! ([`Remote::granted`]), the places of both regions ([`Reach`]), the receives that are posted
//! ([`Receives::pop`](super::receive::Receives::pop)), the room in the lane. One word tells of each whether the result still holds; if not, the
//! check is made again. [`execute`](super::execute) executes every other WQE, and a plain one that cannot run now.

use core::ptr::NonNull;

use mlx5_wire::{Access, CqeOpcode, CtrlWords, DataWords, InlineHeader, MAX_MESSAGE_BYTES, RaddrSegment, SEGMENT};
use shm::cache::copy;

use super::complete;
use super::layout::{Message, SOLICITED};
use super::memory::place;
use super::queues::{Remote, SqPlace, Transport, blocks};
use super::reach::Reach;
use super::requester::allows;
use super::{Hca, State};

/// Where the remote address is in a WQE, and where its data.
const RADDR: usize = SEGMENT;
const DATA: usize = 2 * SEGMENT;

/// Executes the new WQEs of queue pair `index` up to the first that is not plain. Returns whether there was none. To be called while the device
/// is marked as executing (H3), so that all results hold until the end of the doorbell.
#[inline(always)]
pub(crate) fn rung(hca: &Hca, state: &mut State, index: usize) -> bool {
    let State { qps, cqs, .. } = state;
    let Some(Some(qp)) = qps.get_mut(index) else { return true };
    let qp = &mut **qp;
    if qp.is_odd || qp.waiting.is_some() {
        return false;
    }
    let Transport::Connected(Some(remote)) = &mut qp.transport else { return false };
    let remote = &mut **remote;
    if !allows(remote.granted(), Access::REMOTE_WRITE) {
        return false;
    }
    let end = qp.sq.producer();
    qp.sq_limit = end;
    let mut at = qp.sq_consumer;
    while at != end {
        let head = Head { sq: &qp.sq, at, end, qpn: qp.qpn, pd: qp.pd };
        let Some(ctrl) = head.execute(hca, &mut qp.source, remote) else { return false };
        at = at.wrapping_add(blocks(ctrl));
        qp.sq_consumer = at;
        if ctrl.signaled() {
            if let Err(overrun) = complete::write_success(cqs, qp.send_cq, qp.user_index, ctrl, 0) {
                qp.overran(hca, qp.send_cq, overrun);
                return false;
            }
        }
    }
    remote.announce(hca.barrier);
    true
}

/// A WQE that is not executed yet.
struct Head<'a> {
    sq: &'a SqPlace,
    at: u16,
    /// Behind the last one that may be executed.
    end: u16,
    qpn: u32,
    pd: u32,
}

impl Head<'_> {
    /// Executes it and returns its control segment. `None`, and nothing has happened, if it is not plain or cannot run now.
    #[inline(always)]
    fn execute(&self, hca: &Hca, source: &mut Reach, remote: &mut Remote) -> Option<CtrlWords> {
        let wqe = self.sq.wqebb(self.at);
        // SAFETY: inside a WQEBB of the SQ, which the driver does not touch between the doorbell and the completion.
        let segment = |at: usize| unsafe { wqe.add(at).cast::<[u8; SEGMENT]>().read() };
        let (ctrl, data) = (CtrlWords::parse(&segment(0)), DataWords::parse(&segment(DATA)));
        if !ctrl.is_write(self.at, self.qpn) {
            return None;
        }
        let len = data.byte_count();
        let from = if data.is_inline() {
            // SAFETY: inside the WQE.
            self.carries(ctrl, len).then(|| unsafe { wqe.add(DATA + InlineHeader::LEN) })?
        } else {
            if usize::from(ctrl.ds()) * SEGMENT != DATA + SEGMENT || len.wrapping_sub(1) >= MAX_MESSAGE_BYTES as u32 {
                return None;
            }
            match source.find(data.lkey(), data.addr(), len) {
                Some(from) => from,
                None => self.look_for_source(hca, source, data.lkey(), data.addr(), len)?,
            }
        };
        let RaddrSegment { addr, rkey } = RaddrSegment::parse(&segment(RADDR));
        let to = remote.target(rkey, addr, len)?;
        if !ctrl.has_imm() {
            // SAFETY: both were found to be `len` bytes, or the source lies in the WQE; as in `Span::write`.
            unsafe { place(to.as_ptr(), from.as_ptr(), len as usize) };
            return Some(ctrl);
        }
        if !remote.has_room() {
            return None;
        }
        let taking = remote.take_known_receive()?;
        // Nothing can fail from here on. The exchange that takes a receive waits for all earlier stores, so it comes before the copy: the lines
        // of payload and message, both last used by the peer, are then fetched at the same time.
        // SAFETY: as above.
        unsafe { copy(to.as_ptr(), from.as_ptr(), len as usize) };
        // Read again: that costs less than to keep it over the copy.
        let ctrl = CtrlWords::parse(&segment(0));
        remote.publish(Message {
            payload: addr,
            byte_count: len,
            imm: ctrl.imm(),
            taking,
            opcode: CqeOpcode::ResponderWriteImm as u8,
            flags: if ctrl.solicited() { SOLICITED } else { 0 },
        });
        Some(ctrl)
    }

    /// Whether the WQE consists of `len` inline bytes, at least one, and does not wrap.
    #[inline(always)]
    fn carries(&self, ctrl: CtrlWords, len: u32) -> bool {
        let segments = DATA / SEGMENT + InlineHeader::segments(len as usize);
        let room = self.sq.to_end(self.at).min(self.end.wrapping_sub(self.at));
        segments == usize::from(ctrl.ds()) && len > 0 && blocks(ctrl) <= room
    }

    #[cold]
    #[inline(never)]
    fn look_for_source(&self, hca: &Hca, source: &mut Reach, lkey: u32, addr: u64, len: u32) -> Option<NonNull<u8>> {
        *source = Reach::of_own(&hca.memory, lkey, addr, len, self.pd).ok()?;
        source.find(lkey, addr, len)
    }
}
