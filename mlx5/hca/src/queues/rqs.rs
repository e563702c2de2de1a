//! Receive queues of this device: makes and destroys them.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::error::{CreateError, exhausted};
use crate::queues::mirror::Mirror;
use crate::shared::arena::{PAGE, free_index};
use crate::shared::layout::{LINKED, MAX_RQS, QUEUE_BYTES};
use crate::shared::memory::{commit, memory_error};
use crate::shared::receives::{Receives, Taken};
use crate::types::request::RqMemory;
use crate::types::watch::RqWatch;
use crate::{Hca, State};

pub(crate) struct RqSlot {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
    pub(crate) receives: Receives,
    pub(crate) taken: Taken,
    pub(crate) watch: RqWatch,
    /// The driver's queue from which posted receives are copied.
    pub(crate) mirror: Option<Mirror>,
    /// Whether a peer may still pop from the queue, so that its place is never reused.
    pub(crate) is_quarantined: bool,
}

impl RqSlot {
    /// Copies the receives that the driver has posted in its own memory since the last call. Returns
    /// whether there were any.
    pub(crate) fn refresh(&mut self) -> bool {
        self.mirror
            .as_mut()
            .is_some_and(|mirror| mirror.copy(&self.receives))
    }
}

impl Hca {
    /// Returns the number of receives in a shared receive queue that no message has taken yet.
    #[must_use]
    pub fn available_receives(&self, srqn: u32) -> u16 {
        let state = self.state.borrow();
        let rq = state.rqs.get(srqn as usize).and_then(Option::as_ref);
        rq.map_or(0, |rq| rq.receives.available())
    }

    /// Makes a receive queue of `wqe_cnt` WQEs of `stride` bytes. The caller has checked that both
    /// are legal powers of two.
    pub(crate) fn place_rq(
        &self,
        state: &mut State,
        pd: u32,
        (wqe_cnt, stride): (u32, u32),
        is_linked: bool,
        mirror: Option<Mirror>,
    ) -> Result<(u32, RqMemory), CreateError> {
        let bytes = (wqe_cnt as usize * stride as usize).next_multiple_of(PAGE);
        let (rqs, queue_area) = (&mut state.rqs, &mut state.queue_area);
        let index = free_index(rqs, MAX_RQS, Option::is_none, || None)
            .ok_or(exhausted("receive queue", MAX_RQS))?;
        let entry = &self.memory.control().rqs[index];
        let pop = &self.memory.lanes().pops[index];
        commit(&self.memory.control_memfd, entry).map_err(memory_error("a receive queue"))?;
        commit(&self.memory.lanes_memfd, pop).map_err(memory_error("a receive queue"))?;
        let offset = queue_area
            .take(bytes)
            .ok_or(exhausted("bytes for queues", QUEUE_BYTES))?;
        let ring = &self.memory.control().queues[offset / 8..(offset + bytes) / 8];
        commit(&self.memory.control_memfd, ring).map_err(|e| {
            queue_area.give(offset, bytes);
            memory_error("a receive queue")(e)
        })?;
        for word in ring {
            word.store(0, Ordering::Relaxed);
        }
        entry.record.store(0, Ordering::Relaxed);
        entry.returned.store(0, Ordering::Relaxed);
        entry.stride.store(stride, Ordering::Relaxed);
        entry.ring.store(offset as u64, Ordering::Relaxed);
        entry
            .kind
            .store(if is_linked { LINKED } else { 0 }, Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        pop.word.store(0, Ordering::Relaxed);
        entry.wqe_cnt.store(wqe_cnt, Ordering::Release);
        let Some(receives) = Receives::of(&self.memory, index as u32) else {
            return Err(exhausted("receive queue", MAX_RQS));
        };
        rqs[index] = Some(RqSlot {
            offset,
            bytes,
            receives,
            taken: Taken::new(wqe_cnt as u16),
            watch: RqWatch::default(),
            mirror,
            is_quarantined: false,
        });
        let memory = RqMemory {
            buffer: NonNull::from(ring).cast(),
            wqe_cnt,
            stride,
            record: NonNull::from(&entry.record),
        };
        Ok((index as u32, memory))
    }

    /// Frees a receive queue that no queue pair uses any more. If a peer of a destroyed queue pair
    /// may still pop from the queue, the queue's place and ring are not reused.
    pub(crate) fn give_rq(&self, state: &mut State, rqn: u32) {
        state.repair.forget(rqn);
        let slot = state.rqs.get_mut(rqn as usize);
        if let Some(rq) = slot.and_then(|slot| slot.take_if(|rq| !rq.is_quarantined)) {
            self.memory.control().rqs[rqn as usize]
                .wqe_cnt
                .store(0, Ordering::Release);
            state.queue_area.give(rq.offset, rq.bytes);
        }
    }
}
