//! Hooks for the tests of drivers: a peer that writes random words, and sleepers that only a
//! wake-up ends.

use std::sync::atomic::Ordering;

use copyrpc_shm::lane::LaneTx;

use crate::Hca;
use crate::queues::cq::SoftCq;
use crate::random::Random;
use crate::shared::layout::{ATOMIC, LANE_SLOTS, LanePlace, Message};
use crate::sleep::SLEEPS_WITHOUT_END;

const FIRST_LANE: LanePlace = LanePlace {
    first: 0,
    slots: LANE_SLOTS as u32,
};

/// Makes the sleepers of this process sleep without end from now on, so that a lost wake-up is a
/// hang and not a delay.
pub fn sleep_without_end() {
    SLEEPS_WITHOUT_END.store(true, Ordering::Relaxed);
}

#[doc(hidden)]
impl Hca {
    /// Calls `f` with a completion queue, which a test fills in the device's place. Returns `None`
    /// if there is no such queue.
    pub fn with_cq<R>(&self, cqn: u32, f: impl FnOnce(&mut SoftCq) -> R) -> Option<R> {
        let cqs = &mut self.state.borrow_mut().queues.cqs;
        cqs.get_mut(cqn as usize)?.as_mut().map(f)
    }

    /// Overwrites a random word that the device's peers may write with a random value, or publishes
    /// a request for a random atomic.
    pub fn corrupt(&self, seed: u64) {
        let random = &mut Random::new(seed);
        let memory = &self.memory;
        let garbage = match random.below(4) {
            0 => u64::MAX,
            1 => random.below(1 << 20),
            2 => random.next_u64(),
            _ => random.below(4) << 16,
        };
        match random.below(7) {
            6 => {
                // A message that requests an atomic on any memory.
                let request = &memory.lane(0).atomic;
                for word in [
                    &request.kind_key,
                    &request.addr,
                    &request.compare,
                    &request.swap,
                ] {
                    word.store(garbage, Ordering::Relaxed);
                }
                let position = self.state.borrow().queues.qps[0]
                    .as_ref()
                    .map_or(0, |qp| qp.lane.position());
                let slots = memory.lane_slots(FIRST_LANE);
                // SAFETY: `slots` are the slots of the first lane, which live as long as `memory`.
                // `position` is the position of the lane's consuming end. The lane's other
                // producing end belongs to this thread too, and is not in the middle of a publish.
                let mut tx = unsafe { LaneTx::new(slots, LANE_SLOTS as u64, position) };
                tx.publish(Message {
                    op_own: ATOMIC,
                    imm: garbage as u32,
                    ..Message::default()
                });
            }
            0 => memory.lanes().pops[random.below(3) as usize]
                .word
                .store(garbage, Ordering::Relaxed),
            1 => memory.lane(0).intent.store(garbage, Ordering::Relaxed),
            2 => memory.lanes().ready[0].store(garbage, Ordering::Relaxed),
            3 => memory.lanes().datagram_ready[random.below(4) as usize]
                .store(garbage, Ordering::Relaxed),
            _ => {
                let word = random.below(LANE_SLOTS as u64 * 8) as usize;
                let at = memory
                    .lane_slots(FIRST_LANE)
                    .as_ptr()
                    .cast::<u64>()
                    .wrapping_add(word);
                // SAFETY: `at` is an aligned word of the slots of the first lane. No reference to
                // the word exists, because no other code of this thread runs meanwhile.
                unsafe { at.write_volatile(garbage) };
            }
        }
    }
}
