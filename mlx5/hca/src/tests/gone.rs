//! A queue pair that is destroyed, with its memory, while a requester is in the middle of a doorbell.

use std::sync::atomic::Ordering;

use mlx5_wire::{CtrlWords, Syndrome};

use super::hand::{Hand, WRITE, WRITE_IMM};
use crate::requester::operations;
use crate::requester::outcome::{Outcome, WaitFor};
use crate::shared::layout::qp_index;
use crate::{Queues, State};

#[test]
fn a_queue_pair_that_is_gone_does_not_answer_even_where_its_memory_is_seen_to_be_gone_first() {
    for kind in [WRITE, WRITE_IMM] {
        let hand = Hand::new(false, false, false);
        let wqe = hand.wqe(kind, true, &[hand.raddr(0), Hand::inline(b"too late")]);
        let ctrl = CtrlWords::parse(wqe.first_chunk().unwrap());
        let (hca, index) = (&*hand.hca, qp_index(hand.qpn));
        let State { queues: Queues { qps, .. }, links, .. } = &mut *hca.state.borrow_mut();
        let qp = qps[index].as_deref_mut().unwrap();
        // What the doorbell began with.
        let granted = qp.remote().unwrap().granted();
        hca.memory.mr(hand.mr.key).stamp.store(0, Ordering::Release);
        let refused = operations::execute(hca, links, qp, ctrl, &wqe, granted);
        assert!(matches!(refused, Outcome::Fail(Syndrome::RemoteAccess, _)), "the region alone is gone");
        hca.memory.qp(index).identity.store(0, Ordering::Release);
        let unanswered = operations::execute(hca, links, qp, ctrl, &wqe, granted);
        assert!(matches!(unanswered, Outcome::Wait(WaitFor::Peer)));
    }
}
