//! For the tests of drivers: peers that write anything and die at the worst moment, and sleepers that do not look by themselves.

use core::time::Duration;
use std::sync::atomic::Ordering;

use mlx5_wire::CqeOpcode;
use shm::lane::LaneTx;

use crate::Hca;
use crate::random::Random;
use crate::requester::execute;
use crate::shared::layout::{ATOMIC, DatagramHeader, LANE_SLOTS, LanePlace, Message, Pop, qp_index};
use crate::sleep::{Idle, SLEEPS_WITHOUT_END};

/// The lane of the first queue pair.
const FIRST_LANE: LanePlace = LanePlace { first: 0, slots: LANE_SLOTS as u32 };

/// Makes the sleepers of this process sleep without end from now on, so that a lost wake-up is a hang and not a delay.
pub fn sleep_without_end() {
    SLEEPS_WITHOUT_END.store(true, Ordering::Relaxed);
}

#[doc(hidden)]
impl Hca {
    /// One word of what its peers may write becomes nonsense.
    pub fn spoil(&self, seed: u64) {
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
                // A message of which there are none here, for memory that atomics may reach.
                let request = &memory.lane(0).atomic;
                for word in [&request.kind_key, &request.addr, &request.compare, &request.swap] {
                    word.store(garbage, Ordering::Relaxed);
                }
                let position = self.state.borrow().queues.qps[0].as_ref().map_or(0, |qp| qp.lane.position());
                let slots = memory.lane_slots(FIRST_LANE);
                // SAFETY: the lane's slots; its other producer is this thread too, and not in the middle of anything.
                let mut tx = unsafe { LaneTx::new(slots, LANE_SLOTS as u64, position) };
                tx.publish(Message { op_own: ATOMIC, imm: garbage as u32, ..Message::default() });
            }
            0 => memory.lanes().pops[random.below(3) as usize].word.store(garbage, Ordering::Relaxed),
            1 => memory.lane(0).intent.store(garbage, Ordering::Relaxed),
            2 => memory.lanes().ready[0].store(garbage, Ordering::Relaxed),
            3 => memory.lanes().datagram_ready[random.below(4) as usize].store(garbage, Ordering::Relaxed),
            _ => {
                let word = random.below(LANE_SLOTS as u64 * 8) as usize;
                let at = memory.lane_slots(FIRST_LANE).as_ptr().cast::<u64>().wrapping_add(word);
                // SAFETY: a word of the first lane's slots, which no reference is held to: nothing of this thread runs in between.
                unsafe { at.write_volatile(garbage) };
            }
        }
    }

    /// A peer wrote a count that is behind what it was into the pop word of the receive queue of `qpn`: one that is no number of receives taken.
    pub fn spoil_pops(&self, qpn: u32) {
        let rqn = self.memory.qp(qp_index(qpn)).rqn.load(Ordering::Relaxed);
        if let Some((_, pop)) = self.memory.rq(rqn) {
            pop.word.store(u64::MAX << 16, Ordering::Relaxed);
        }
    }

    /// Sends, to datagram queue pair `qpn` of the device that it sent its first datagram to, what no datagram is.
    pub fn forge_datagrams(&self, qpn: u32, qkey: u32) {
        let out = &mut self.state.borrow_mut().links.outgoing[0];
        let good = DatagramHeader { qpn, qkey, source_qpn: 1, byte_count: 0, imm: 0, opcode: 0, flags: 0 };
        for opcode in [CqeOpcode::ResponderError as u32, CqeOpcode::ResponderWriteImm as u32, 0, 0xff] {
            out.tx.publish(DatagramHeader { opcode, imm: u32::MAX, ..good });
        }
    }

    /// The peer of `qpn` died when it was about to take the first receive; the repair finds that, and nobody polls the lane.
    pub fn peer_dies_taking(&self, qpn: u32) {
        let state = &mut *self.state.borrow_mut();
        let index = qp_index(qpn);
        let rqn = self.memory.qp(index).rqn.load(Ordering::Relaxed);
        self.memory.lane(index).intent.store(Pop::ONE, Ordering::Relaxed);
        state.repair.peer_died(&self.memory, index, rqn);
        self.memory.lane(index).intent.store(0, Ordering::Relaxed);
        self.repair(state);
        execute::run_deferred(self, state);
    }

    /// Sleeps, with no look at the world before it, as if what is sent now had been sent right after the last look.
    pub fn sleep_at_once(&self) {
        shm::sleep::sleep_once(&mut Idle(self), Duration::MAX);
    }
}
