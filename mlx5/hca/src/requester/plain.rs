//! Plain WQEs: a WRITE, with immediate or not, of one contiguous part, to a connected peer that
//! lives, on a device with immediate timing. Nearly every WQE of an RPC is plain.
//!
//! A plain WQE reuses the checks of earlier WQEs on its queue pair. For each check, one word shows
//! whether its result still holds; if not, the check is made again. The results are:
//!
//! - the peer's queue pair is connected to this queue pair
//!   ([`Remote::granted`](crate::shared::remote::Remote::granted));
//! - the addresses of both regions ([`MrCache`]);
//! - the posted receives ([`Receives::next_known`](crate::shared::receives::Receives::next_known));
//! - the room in the lane.
//!
//! [`execute`](crate::requester::execute) executes every other WQE, and a plain WQE that cannot run
//! now, or whose receive another requester takes.

use core::ptr::NonNull;

use mlx5_wire::{
    CqeOpcode, CtrlWords, DataWords, InlineHeader, MAX_MESSAGE_BYTES, RaddrSegment, SEGMENT,
};

use crate::queues::cq::{Overrun, SoftCq};
use crate::queues::qp::{Mode, SqPlace, Transport, blocks};
use crate::requester::complete;
use crate::shared::layout::Message;
use crate::shared::memory::{Keyed, place};
use crate::shared::mr_cache::{Lookups, MrCache};
use crate::{Hca, Queues, State};

/// Offsets in a WQE of the remote address, and of the data.
const RADDR: usize = SEGMENT;
const DATA: usize = 2 * SEGMENT;
/// Number of segments of a WQE whose data are in one buffer.
const OF_ONE_BUFFER: u8 = (DATA / SEGMENT) as u8 + 1;

/// Executes the new WQEs of queue pair `index` up to the first that is not plain; fails with the
/// index if there is such a WQE. The caller has marked the device as executing (H3 of
/// `shared::layout`), so all results hold until the end of the doorbell.
#[inline(always)]
pub(crate) fn rung(hca: &Hca, state: &mut State, index: usize) -> Result<(), usize> {
    let Queues { qps, cqs, .. } = &mut state.queues;
    let Some(Some(qp)) = qps.get_mut(index) else {
        return Err(index);
    };
    let qp = &mut **qp;
    if qp.mode != Mode::Plain || qp.waiting.is_some() {
        return Err(index);
    }
    let Transport::Connected(remote) = &mut qp.transport else {
        return Err(index);
    };
    let remote = &mut **remote;
    if !remote.grants_writes() {
        return Err(index);
    }
    let producer = qp.sq.producer();
    while qp.sq_consumer != producer {
        let (at, wqe) = (qp.sq_consumer, qp.sq.wqebb(qp.sq_consumer));
        // SAFETY: the segment is inside a WQEBB of the SQ, which the driver does not touch between
        // the doorbell and the completion.
        let segment = |at: usize| unsafe { wqe.add(at).cast::<[u8; SEGMENT]>().read() };
        let (ctrl, data) = (
            CtrlWords::parse(&segment(0)),
            DataWords::parse(&segment(DATA)),
        );
        // Each branch decodes the length by itself: in the branch of a pointer, the compiler knows
        // that the flag bit is clear.
        let (from, len, ds) = if data.is_inline() {
            let (len, ds) = (u64::from(data.byte_count()), ctrl.ds());
            if !ctrl.is_one_of(qp.writes, at, ds) || !carries(&qp.sq, at, producer, ds, len) {
                return Err(qp.index);
            }
            // SAFETY: the inline data begins inside the WQE.
            (unsafe { wqe.add(DATA + InlineHeader::LEN) }, len, ds)
        } else {
            let len = u64::from(data.byte_count());
            if !ctrl.is_one_of(qp.writes, at, OF_ONE_BUFFER)
                || len.wrapping_sub(1) >= MAX_MESSAGE_BYTES
            {
                return Err(qp.index);
            }
            let Some(from) = qp.source.find(data.lkey(), data.addr(), len) else {
                // The WQE is read again, so that none of it has to be kept across the call.
                if look_up_source(hca, &mut qp.source, &mut qp.lookups, wqe, qp.pd) {
                    continue;
                }
                return Err(qp.index);
            };
            (from, len, OF_ONE_BUFFER)
        };
        let RaddrSegment { addr, rkey } = RaddrSegment::parse(&segment(RADDR));
        let Some(to) = remote.target.find(rkey, addr, len) else {
            if remote.look_up_target(&mut qp.lookups, Keyed::new(rkey, addr, len)) {
                continue;
            }
            return Err(qp.index);
        };
        if ctrl.has_imm() {
            if !remote.has_room() {
                return Err(qp.index);
            }
            let Some(taking) = remote.take_known_receive() else {
                remote.takes_no_receive();
                return Err(qp.index);
            };
            // Nothing can fail from here on. The exchange that takes a receive waits for all
            // earlier stores, so it comes before the copy. Then the lines of payload and message,
            // both last used by the peer, are fetched at the same time. The needed fields of the
            // WQE are read again, which costs less than keeping them.
            let ctrl = CtrlWords::parse(&segment(0));
            let message = Message {
                payload: addr,
                byte_count: len as u32,
                imm: ctrl.imm(),
                taking,
                op_own: Message::op_own(CqeOpcode::ResponderWriteImm, ctrl.solicited()),
            };
            let filled = remote.lane.fill(message);
            // SAFETY: `to` was found to have `len` bytes, and so was `from`, unless it is in the
            // WQE. As in `Span::write`, the two may overlap, and other processes may access the
            // target.
            unsafe { place(to.as_ptr(), from.as_ptr(), len as usize) };
            filled.publish();
            remote.note_published();
        } else {
            // SAFETY: as for the WRITE with immediate above.
            unsafe { place(to.as_ptr(), from.as_ptr(), len as usize) };
        }
        qp.sq_consumer = qp.sq_consumer.wrapping_add(blocks(ds));
        let ctrl = CtrlWords::parse(&segment(0));
        if ctrl.signaled() {
            if let Err(overrun) = complete_signaled(cqs, qp.send_cq, qp.user_index, wqe) {
                qp.wrote_send(hca, Err(overrun));
                return Err(qp.index);
            }
        }
    }
    qp.sq_limit = producer;
    remote.announce(hca.barrier);
    Ok(())
}

/// Writes the CQE of the WQE at `wqe`. Not inlined: otherwise every WQE would decode its whole
/// control segment.
#[inline(never)]
fn complete_signaled(
    cqs: &mut [Option<SoftCq>],
    send_cq: u32,
    user_index: u32,
    wqe: NonNull<u8>,
) -> Result<(), Overrun> {
    // SAFETY: the control segment is inside a WQEBB of the SQ, as in `rung`.
    let ctrl = CtrlWords::parse(&unsafe { wqe.cast::<[u8; SEGMENT]>().read() });
    complete::write_success(cqs, send_cq, user_index, ctrl, 0)
}

/// Returns whether the WQE at `at` contains `len` inline bytes, at least one, does not wrap around
/// the end of the buffer, and does not reach beyond WQEBB counter `end`.
#[inline(always)]
fn carries(sq: &SqPlace, at: u16, end: u16, ds: u8, len: u64) -> bool {
    let segments = DATA / SEGMENT + InlineHeader::segments(len as usize);
    let room = sq.to_end(at).min(end.wrapping_sub(at));
    segments == usize::from(ds) && len > 0 && blocks(ds) <= room
}

/// Looks up the source region of the WQE at `wqe` and caches it. Returns `false` if the access is
/// refused, or no look-up is left in `lookups`.
#[cold]
#[inline(never)]
fn look_up_source(
    hca: &Hca,
    source: &mut MrCache,
    lookups: &mut Lookups,
    wqe: NonNull<u8>,
    pd: u32,
) -> bool {
    if !lookups.take() {
        return false;
    }
    // SAFETY: the data segment is inside a WQEBB of the SQ, as in `rung`.
    let data = DataWords::parse(&unsafe { wqe.add(DATA).cast::<[u8; SEGMENT]>().read() });
    let bytes = Keyed::new(data.lkey(), data.addr(), data.byte_count().into());
    let found = MrCache::of_own(&hca.memory, bytes, pd).ok();
    found.map(|found| *source = found).is_some()
}
