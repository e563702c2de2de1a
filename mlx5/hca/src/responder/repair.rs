//! Repair: returns receives to the linked list they came from, if the process that popped them will
//! never announce them. Either the process died, or the queue pair to which it sends was destroyed.
//! (A queue pair's own ring serves one connection, and is flushed with it.)
//!
//! Before a requester exchanges a pop word, it stores the word in its lane's intent; it clears the
//! intent after its message is published (H5 of `shared::layout`). So a dead requester's intent
//! belongs to at most one receive that the requester *may* have taken. It took that receive exactly
//! if the pop word has advanced and no other process accounts for the receive under that count. The
//! order in which the owner reads makes this certain:
//!
//! 1. the pop word: if it has not advanced, the dead requester did not take the receive, and never
//!    will;
//! 2. the intents of the living: the peer that advanced the word had set its intent before (H4,
//!    H5), and the intent is still set, or the message is published;
//! 3. the lanes: a published message accounts for its receive
//!    ([`Taken`](crate::shared::receives::Taken));
//! 4. last, whether the receive is accounted for.

use core::sync::atomic::Ordering;
use std::rc::Rc;

use copyrpc_shm::lane::LaneRx;

use crate::queues::qp::SoftQp;
use crate::queues::rqs::RqSlot;
use crate::responder::arrive;
use crate::shared::layout::{ATOMIC, LANE_SLOTS, Message, Pop, Taking};
use crate::shared::memory::DeviceMemory;
use crate::shared::peer::Peer;
use crate::{Hca, Queues, State};

/// A receive that a process may have taken when it died.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Orphan {
    rqn: u32,
    /// Intent of the dead process: the pop word that it read, plus [`Pop::ONE`].
    intent: u64,
}

/// A queue pair that was destroyed while its peer was in the middle of a doorbell. The peer may
/// still take receives and publish messages, for which no CQE is written. The place of the queue
/// pair is never used again.
struct Leaver {
    index: usize,
    rqn: u32,
    peer: Rc<Peer>,
    /// The peer's `executing` word when the queue pair was destroyed.
    executing: u64,
    lane: LaneRx<Message>,
}

impl Leaver {
    fn intent(&self, memory: &DeviceMemory) -> u64 {
        // H5: the intent is 0 only after the message was published.
        memory.lane(self.index).intent.load(Ordering::Acquire)
    }

    /// Takes the messages published since the queue pair was destroyed. Puts the receives that
    /// these messages took back into the queue, because the peer has finished with them.
    fn drain(&mut self, rqs: &[Option<RqSlot>]) {
        for _ in 0..LANE_SLOTS {
            let Some(message) = self.lane.pop() else {
                break;
            };
            let rq = slot(rqs, self.rqn).filter(|_| message.op_own != ATOMIC);
            let (count, index) = (message.taking.count(), message.taking.index());
            if let Some(rq) = rq.filter(|rq| is_past(rq.receives.popped(), count)) {
                give_back(rq, count, index);
            }
        }
    }
}

/// The receives that dead peers may have taken, and the destroyed queue pairs whose peers may still
/// take receives.
#[derive(Default)]
pub(crate) struct Repair {
    orphans: Vec<Orphan>,
    leavers: Vec<Leaver>,
}

impl Repair {
    /// Remembers the receive that the peer of queue pair `index` was taking when it died.
    pub(crate) fn peer_died(&mut self, memory: &DeviceMemory, index: usize, rqn: u32) {
        // H5: the intent is set before the pop, and cleared after the message was published.
        let orphan = Orphan {
            rqn,
            intent: memory.lane(index).intent.load(Ordering::Acquire),
        };
        if orphan.intent != 0 && !self.orphans.contains(&orphan) {
            self.orphans.push(orphan);
        }
    }

    /// Remembers `qp`, which is destroyed although its peer has not finished a doorbell.
    pub(crate) fn leaves(&mut self, qp: SoftQp, peer: Rc<Peer>) {
        let SoftQp {
            index,
            rqn,
            lane,
            receives,
            ..
        } = qp;
        if receives.is_linked {
            let executing = peer.executing();
            self.leavers.push(Leaver {
                index,
                rqn,
                peer,
                executing,
                lane,
            });
        }
    }

    pub(crate) fn forget(&mut self, rqn: u32) {
        self.orphans.retain(|orphan| orphan.rqn != rqn);
        self.leavers.retain(|leaver| leaver.rqn != rqn);
    }

    /// Takes the messages of the leavers, and removes the leavers whose peers are done or dead.
    fn follow(&mut self, memory: &DeviceMemory, rqs: &[Option<RqSlot>]) {
        let Self { orphans, leavers } = self;
        leavers.retain_mut(|leaver| {
            let is_gone = leaver.peer.is_gone();
            let is_done = leaver.peer.executing() != leaver.executing && leaver.intent(memory) == 0;
            leaver.drain(rqs);
            let intent = leaver.intent(memory);
            if is_gone && intent != 0 {
                orphans.push(Orphan {
                    rqn: leaver.rqn,
                    intent,
                });
            }
            !is_gone && !is_done
        });
    }
}

fn slot(rqs: &[Option<RqSlot>], rqn: u32) -> Option<&RqSlot> {
    rqs.get(rqn as usize).and_then(Option::as_ref)
}

/// Returns whether receive number `count`, counted from 0, is among the first `popped` receives.
fn is_past(popped: u32, count: u32) -> bool {
    popped.wrapping_sub(count) as i32 > 0
}

/// Puts receive `index`, taken as number `count`, back into its queue, unless it is accounted for.
fn give_back(rq: &RqSlot, count: u32, index: u16) {
    if rq.receives.is_linked
        && !rq.taken.is_accounted(index, count)
        && rq.taken.account(Taking::new(count, index))
    {
        rq.receives.give_back(index, &rq.taken);
    }
}

impl Hca {
    /// Puts the receives of dead requesters back into their queues, as far as it is certain now
    /// that the requesters had taken them.
    #[cold]
    pub(crate) fn repair(&self, state: &mut State) {
        let State {
            queues: Queues { qps, cqs, .. },
            repair,
            rqs,
            ..
        } = state;
        let memory = &self.memory;
        repair.follow(memory, rqs);
        // Step 1 of the order above: an orphan whose pop word has not advanced was not taken.
        repair.orphans.retain(|orphan| {
            let (count, _) = Pop::unpack(orphan.intent.wrapping_sub(Pop::ONE));
            slot(rqs, orphan.rqn).is_some_and(|rq| is_past(rq.receives.popped(), count))
        });
        if repair.orphans.is_empty() {
            return;
        }
        // Step 2: a living requester with the same intent may have taken the receive without having
        // announced it yet. Such an orphan is tried again later.
        let Repair { orphans, leavers } = repair;
        let (later, now): (Vec<_>, Vec<_>) = orphans.iter().partition(|orphan| {
            let is_named =
                |index: usize| memory.lane(index).intent.load(Ordering::Acquire) == orphan.intent;
            let by_peer = |qp: &SoftQp| {
                qp.rqn == orphan.rqn
                    && is_named(qp.index)
                    && qp.remote().is_some_and(|r| !r.peer.is_gone())
            };
            let by_leaver = |leaver: &Leaver| {
                leaver.rqn == orphan.rqn && is_named(leaver.index) && !leaver.peer.is_gone()
            };
            qps.iter().flatten().any(|qp| by_peer(qp)) || leavers.iter().any(by_leaver)
        });
        *orphans = later;
        // Step 3: published messages account for their receives.
        for qp in qps
            .iter_mut()
            .flatten()
            .filter(|qp| now.iter().any(|orphan: &Orphan| orphan.rqn == qp.rqn))
        {
            arrive::drain(self, qp, cqs);
        }
        for leaver in leavers {
            leaver.drain(rqs);
        }
        // Step 4: receives that are not accounted for are returned.
        for orphan in now {
            let (count, index) = Pop::unpack(orphan.intent.wrapping_sub(Pop::ONE));
            if let Some(rq) = slot(rqs, orphan.rqn) {
                give_back(rq, count, index);
            }
        }
    }
}

#[cfg(test)]
mod model;
