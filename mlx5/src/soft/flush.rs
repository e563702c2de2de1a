//! What becomes of what is posted when a queue pair goes to the error state: a send that waits does so no longer; receives of its own queue are
//! flushed, those of a shared one stay.

use super::cq::SoftCq;
use super::queues::SoftQp;
use super::trace::What;
use super::{Hca, State, arrive, execute};
use crate::wire::{CqeOpcode, ErrorCqe, Syndrome};

/// Flushes the sends of failed queue pairs that were waiting for something, and what is posted in their own receive queues, now and from then
/// on. Returns whether there was something.
#[cold]
pub(crate) fn flush_failed(hca: &Hca, state: &mut State) -> bool {
    let (mut any, mut flushed) = (false, false);
    for index in 0..state.qps.len() {
        let qp = state.qps.get_mut(index).and_then(Option::as_mut);
        if qp.is_some_and(|qp| qp.failed && qp.waiting.take().is_some()) {
            flushed = true;
            execute::run_due(hca, state, index, hca.clock.now_ns());
        }
    }
    let State { qps, cqs, .. } = state;
    for qp in qps.iter_mut().flatten().filter(|qp| qp.failed && qp.owns_rq) {
        any = true;
        flushed |= flush_receives(hca, qp, cqs);
    }
    hca.has_failed.set(any);
    flushed
}

/// Receives complete in the order in which they are taken. So a receive that the peer took comes first, even if it has not told of it yet: it
/// will soon, or is dead, and then that receive is flushed too.
fn flush_receives(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) -> bool {
    // Before the lane is looked at: the dead publish no more.
    let is_peer_gone = qp.remote().is_some_and(|r| r.peer.is_gone());
    let before = qp.lane.position();
    arrive::drain(hca, qp, cqs);
    let mut flushed = qp.lane.position() != before;
    loop {
        // Datagrams take their receives here, and complete them at once.
        let next = if qp.is_datagram() { qp.receives.popped() } else { (qp.lane.position() as u32).wrapping_add(qp.flushed) };
        if qp.receives.popped() == next {
            if !qp.receives.take(next) {
                return flushed;
            }
        } else if !is_peer_gone || qp.receives.popped().wrapping_sub(next) as usize > qp.taken.wqes() {
            // Not told of yet; or a word that no requester wrote, and no count of receives.
            return flushed;
        }
        flushed = true;
        qp.flushed = qp.flushed.wrapping_add(1);
        let index = next as u16 & (qp.taken.wqes() as u16).wrapping_sub(1);
        qp.taken.account(index, next);
        if let Some(trace) = &hca.trace {
            trace.record(What::Flushed, qp.qpn, index, 0, 0);
        }
        let cqe = ErrorCqe {
            raw_syndrome: Syndrome::WorkRequestFlushed as u8,
            vendor_syndrome: 0,
            wqe_opcode: 0,
            qpn: qp.qpn,
            wqe_counter: qp.receives.wqe_counter(index, next),
            user_index: qp.user_index,
        };
        if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
            // An overrun CQ tells nobody anything more.
            let _ = cq.write(cqe.emit(), CqeOpcode::ResponderError);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Access, ConnectOptions, Device, DeviceSpec, FabricSpec, Inline, LocalFabric, QpConfig, ReceiveSource, Signal, SoftOptions, WriteImm,
    };

    #[test]
    fn what_has_arrived_completes_before_what_is_flushed() {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let device = Device::open(&DeviceSpec::Soft(SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() })).unwrap();
        let pd = device.alloc_pd().unwrap();
        let (send_cq, mut recv_cq) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
        let own = ReceiveSource::Own { depth: 4, max_sge: 0 };
        let mut from = pd.create_qp(&send_cq, &recv_cq, own, &QpConfig::default()).unwrap();
        let mut to = pd.create_qp(&send_cq, &recv_cq, own, &QpConfig::default()).unwrap();
        from.connect(&to.address(), &ConnectOptions::default()).unwrap();
        to.connect(&from.address(), &ConnectOptions::default()).unwrap();
        let mr = pd.alloc(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        (0..4).for_each(|user| to.post_receive(&[], user).unwrap());
        to.ring_receives();
        for imm in 0..2 {
            from.post(&WriteImm { addr: mr.addr(), rkey: mr.rkey(), imm, payload: Inline(&[1]) }, Signal::Reclaim, 0).unwrap();
        }
        from.ring();
        to.fail();
        let mut got = vec![];
        for _ in 0..8 {
            recv_cq.poll(16, |cqe| got.push((to.complete_receive(&cqe), cqe.result().is_ok())));
        }
        assert_eq!(got, [(Some(0), true), (Some(1), true), (Some(2), false), (Some(3), false)]);
    }

    #[test]
    fn a_dead_peer_that_wrote_nonsense_into_the_pop_word_does_not_keep_the_flush_busy() {
        use std::sync::atomic::Ordering;
        let fabric = FabricSpec::Local(LocalFabric::new());
        let options = SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() };
        let [device, peer] = [(); 2].map(|()| Device::open(&DeviceSpec::Soft(options.clone())).unwrap());
        let own = ReceiveSource::Own { depth: 4, max_sge: 0 };
        let [(mut cq, mut to), (peer_cq, from)] = [&device, &peer].map(|device| {
            let cq = device.create_cq(16).unwrap();
            let qp = device.alloc_pd().unwrap().create_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
            (cq, qp)
        });
        to.connect(&from.address(), &ConnectOptions::default()).unwrap();
        to.post_receive(&[], 0).unwrap();
        to.ring_receives();
        drop((peer_cq, from, peer));
        // Its count is behind what it was: one that is no number of receives taken.
        let memory = &device.control().soft().unwrap().memory;
        let rqn = memory.qp(super::super::objects::qp_index(to.qpn())).rqn.load(Ordering::Relaxed);
        memory.rq(rqn).unwrap().1.word.store(u64::MAX << 16, Ordering::Relaxed);
        to.fail();
        assert_eq!(cq.poll(16, |_| ()), 0, "no receive was taken, and none can be");
    }
}
