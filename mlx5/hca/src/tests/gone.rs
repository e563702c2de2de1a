//! Queue pairs and peers that are gone: in the middle of a doorbell, with corrupt words left
//! behind, or with a popped receive.

use std::sync::atomic::Ordering;

use mlx5_wire::{CtrlWords, Syndrome};

use super::hand::{Hand, WRITE, WRITE_IMM};
use crate::requester::{execute, operations};
use crate::shared::layout::{Pop, qp_index};
use crate::types::outcome::{Outcome, WaitFor};
use crate::{LocalFabric, Queues, State};

#[test]
fn a_queue_pair_that_is_gone_does_not_answer_even_where_its_memory_is_seen_to_be_gone_first() {
    for kind in [WRITE, WRITE_IMM] {
        let hand = Hand::new(false, false, false);
        let wqe = hand.wqe(kind, true, &[hand.raddr(0), Hand::inline(b"too late")]);
        let ctrl = CtrlWords::parse(wqe.first_chunk().unwrap());
        let (hca, index) = (&*hand.hca, qp_index(hand.qpn));
        let State {
            queues: Queues { qps, .. },
            links,
            wire,
            ..
        } = &mut *hca.state.borrow_mut();
        let qp = qps[index].as_deref_mut().unwrap();
        // The word at the start of the doorbell.
        let granted = qp.remote().unwrap().granted();
        hca.memory.mr(hand.mr.key).stamp.store(0, Ordering::Release);
        let refused = operations::execute(hca, (&mut *links, &mut *wire), qp, ctrl, &wqe, granted);
        assert!(
            matches!(refused, Outcome::Fail(Syndrome::RemoteAccess, _)),
            "the region alone is gone"
        );
        hca.memory.qp(index).identity.store(0, Ordering::Release);
        let unanswered =
            operations::execute(hca, (&mut *links, &mut *wire), qp, ctrl, &wqe, granted);
        assert!(matches!(unanswered, Outcome::Wait(WaitFor::Peer)));
    }
}

#[test]
fn a_dead_peer_that_wrote_nonsense_into_the_pop_word_does_not_keep_the_flush_busy() {
    let fabric = LocalFabric::new();
    let [mut hand, peer] = [(); 2].map(|()| Hand::alone(&fabric, false, false, false));
    hand.connect(&peer);
    hand.post_receives();
    drop(peer);
    hand.hca
        .memory
        .rq(hand.rqn)
        .unwrap()
        .1
        .word
        .store(u64::MAX << 16, Ordering::Relaxed);
    hand.hca.fail_qp(hand.qpn);
    hand.hca.empty_poll();
    assert_eq!(
        hand.recv_cq.poll().len(),
        0,
        "no receive was taken, and none can be"
    );
}

/// The repair takes messages out of lanes, so it must return credit to the peers that wait for
/// room.
#[test]
fn a_full_lane_that_the_repair_drained_has_room_again() {
    const SLOTS: u16 = 8;
    let mut hand = Hand::alone(&LocalFabric::new(), false, true, false);
    hand.memory.lane_slots = SLOTS.into();
    hand.qpn = hand.another();
    hand.connect(&hand);
    for (count, completed) in [(SLOTS, SLOTS), (1, 0)] {
        hand.write_receive_record(hand.producer + count);
        for _ in 0..count {
            let wqe = hand.wqe(WRITE_IMM, true, &[hand.raddr(0), Hand::inline(b"full")]);
            hand.push(&wqe);
        }
        hand.ring();
        assert_eq!(hand.send_cq.poll().len(), completed.into());
    }
    {
        // The peer was about to pop the first receive when it died.
        let hca = &*hand.hca;
        let index = qp_index(hand.qpn);
        let state = &mut *hand.hca.state.borrow_mut();
        let intent = &hca.memory.lane(index).intent;
        intent.store(Pop::ONE, Ordering::Relaxed);
        state.repair.peer_died(&hca.memory, index, hand.rqn);
        intent.store(0, Ordering::Relaxed);
        hca.repair(state);
        execute::run_deferred(hca, state);
    }
    assert_eq!(hand.send_cq.poll().len(), 1);
}
