//! The owner: turns the messages that peers left in its lanes into CQEs in its own completion queues.

use core::sync::atomic::{AtomicU32, Ordering};

use shm::ready::Lanes;

use super::cq::SoftCq;
use super::layout::{Message, QpEntry};
use super::memory::DeviceMemory;
use super::queues::SoftQp;
use super::{Hca, State};
use crate::wire::{CqeOpcode, ResponderCqe};

/// The requester learns of its room this often, in messages.
const CONSUMED_EVERY: u64 = 16;

/// One bounded pass over the lanes with traffic. Returns the number of messages taken.
#[inline(always)]
pub(crate) fn pass(hca: &Hca, state: &mut State) -> usize {
    let State { qps, cqs, hot, .. } = state;
    let ready = super::objects::ready_words(&hca.memory);
    hot.pass(&ready, &mut Arrivals { qps, cqs, memory: &hca.memory }, || hca.clock.now_ns())
}

/// Takes everything that is in one queue pair's lane, before it goes away.
pub(crate) fn drain(memory: &DeviceMemory, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    while let Some(message) = qp.lane.pop() {
        deliver(memory, qp, cqs, &message);
    }
}

struct Arrivals<'a> {
    qps: &'a mut [Option<Box<SoftQp>>],
    cqs: &'a mut [Option<SoftCq>],
    memory: &'a DeviceMemory,
}

impl Lanes for Arrivals<'_> {
    #[inline(always)]
    fn visit(&mut self, lane: usize, budget: usize) -> usize {
        let Some(Some(qp)) = self.qps.get_mut(lane) else { return 0 };
        let mut taken = 0;
        while taken < budget {
            let Some(message) = qp.lane.pop() else { break };
            deliver(self.memory, qp, self.cqs, &message);
            taken += 1;
            if qp.lane.position() % CONSUMED_EVERY == 0 {
                // L2
                self.memory.qp(lane).consumed.store(qp.lane.position(), Ordering::Release);
            }
        }
        taken
    }

    fn is_ready(&self, lane: usize) -> bool {
        matches!(self.qps.get(lane), Some(Some(qp)) if qp.lane.is_ready())
    }

    fn armed(&self, lane: usize) -> Option<&AtomicU32> {
        matches!(self.qps.get(lane), Some(Some(_))).then(|| &self.memory.qp(lane).armed)
    }
}

#[inline(always)]
fn deliver(memory: &DeviceMemory, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>], message: &Message) {
    prefetch(message.payload);
    // The peer wrote this. A wrong opcode or index makes no CQE: the connection ends instead.
    if message.opcode != CqeOpcode::ResponderWriteImm as u8 || message.wqe_index >= qp.srq_wqes {
        return reject(memory, qp);
    }
    let cqe = ResponderCqe {
        qpn: qp.qpn,
        srqn: qp.srqn,
        imm: message.imm,
        byte_count: message.byte_count,
        wqe_counter: message.wqe_index,
        ..ResponderCqe::default()
    };
    if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
        if cq.write(cqe.emit(), CqeOpcode::ResponderWriteImm).is_err() {
            reject(memory, qp);
        }
    }
}

/// The queue pair goes to the error state: its own operations are flushed, and its peer's are not answered any more.
#[cold]
fn reject(memory: &DeviceMemory, qp: &mut SoftQp) {
    qp.failed = true;
    memory.qp(qp.index).identity.store(QpEntry::pack_identity(qp.qpn, 0), Ordering::Release);
}

#[inline(always)]
fn prefetch(addr: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect but on the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(addr as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}
