//! Tests of a send queue on a device that keeps what it gets until the test completes it.

use core::ffi::c_int;
use core::ptr::{NonNull, null};
use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};

use super::super::abi::*;
use super::completions::CompletionRing;
use super::receives::Target;
use super::sends::{Chain, Device, SendRing};
use super::{Id, MadeQp, Rings};
use crate::config::{CqConfig, QpConfig, RqSize};
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpRequest, Receives};
use crate::provider::private::{CqPlace, SqPlace};
use crate::wire::{
    AddressVector, CQE_BYTES, CtrlSegment, ErrorCqe, FenceMode, Opcode, RequesterCqe, Service,
    Syndrome, WQEBB,
};

/// An opcode that no WQE has.
const UNKNOWN: u8 = 0x7f;

#[derive(Default)]
struct Keeping {
    /// Identifiers of the requests that the device holds.
    posted: RefCell<Vec<Id>>,
    /// Result of every post once the queue pair has failed: 0, or the errno of a refusal.
    result: Cell<c_int>,
    is_failed: Cell<bool>,
}

impl Device for Keeping {
    unsafe fn post_send(
        &self,
        _: NonNull<ibv_qp>,
        first: *mut ibv_send_wr,
        _: *mut *mut ibv_send_wr,
    ) -> c_int {
        if self.is_failed.get() && self.result.get() != 0 {
            return self.result.get();
        }
        let mut next = first;
        // SAFETY: the caller's requests live through the call.
        while let Some(request) = unsafe { next.as_ref() } {
            self.posted.borrow_mut().push(Id(request.wr_id));
            next = request.next.cast();
        }
        0
    }

    fn fail_qp(&self, _: u32) {
        self.is_failed.set(true);
    }

    fn handle(&self, _: u32, _: &AddressVector) -> Option<NonNull<ibv_ah>> {
        None
    }

    fn any_handle(&self, _: u32) -> Option<NonNull<ibv_ah>> {
        None
    }
}

/// Makes a send queue with one announced WQE without buffers for each of these opcodes.
fn queue(service: Service, opcodes: &[u8]) -> SendRing {
    queue_of(7, Id::of_queue(false, 0, 1), None, service, opcodes)
}

/// Makes the send queue of queue pair `qpn`, whose requests have identifiers made from `id`.
fn queue_of(
    qpn: u32,
    id: Id,
    own_receives: Option<u16>,
    service: Service,
    opcodes: &[u8],
) -> SendRing {
    let config = &QpConfig::default();
    let sq = SqPlace::new(config, RegisterKind::Unread).unwrap();
    for (at, opcode) in opcodes.iter().enumerate() {
        let ctrl = CtrlSegment {
            opcode: *opcode,
            wqe_index: at as u16,
            qpn,
            ds: 1,
            signaled: false,
            fence: FenceMode::None,
            solicited: false,
            imm: 0,
        };
        // SAFETY: a WQE of the new queue.
        unsafe { sq.sq.buffer.add(at * WQEBB).cast().write(ctrl.emit()) };
    }
    // SAFETY: the record of the new queue.
    unsafe { sq.sq.record.as_ref() }.store((opcodes.len() as u32).to_be(), Ordering::Release);
    let made = MadeQp {
        qp: NonNull::dangling(),
        qpn,
        max_inline: 0,
    };
    let request = QpRequest {
        pd: 1,
        send_cq: 0,
        recv_cq: 0,
        receives: Receives::Shared(0),
        service,
        config,
    };
    SendRing::new(made, id, sq, qpn, own_receives, &request)
}

/// Returns the WQEs that complete now because one was refused, with their statuses.
fn refused(ring: &mut SendRing, device: &Keeping) -> Vec<(u16, Syndrome)> {
    let mut all = Vec::new();
    ring.complete_refused(device, |cqe: &ErrorCqe| {
        let syndrome = Syndrome::from_repr(cqe.raw_syndrome).unwrap();
        all.push((cqe.wqe_counter, syndrome));
        true
    });
    all
}

const SEND: u8 = Opcode::Send as u8;
const REFUSED_AND_FLUSHED: [(u16, Syndrome); 2] = [
    (2, Syndrome::LocalQpOperation),
    (3, Syndrome::WorkRequestFlushed),
];

#[test]
fn a_refused_wqe_completes_after_those_in_flight_however_late_the_device_flushes_them() {
    let device = Keeping::default();
    let mut ring = queue(Service::Connected, &[SEND, SEND, UNKNOWN, SEND]);
    ring.relay(&device, &mut Chain::default());
    assert!(device.is_failed.get() && ring.is_refused());
    // The device holds the requests of two WQEs, and the marker after them.
    let posted = device.posted.take();
    assert_eq!(posted.len(), 3);
    for (at, id) in posted.iter().enumerate() {
        assert_eq!(refused(&mut ring, &device), [], "before request {at}");
        assert_eq!(ring.completed(*id), at < 2, "whether it is a WQE's");
    }
    assert_eq!(refused(&mut ring, &device), REFUSED_AND_FLUSHED);
}

#[test]
fn a_refused_wqe_waits_until_a_full_device_takes_the_request_that_drains_it() {
    let device = Keeping::default();
    device.result.set(libc::ENOMEM);
    let mut ring = queue(Service::Connected, &[SEND, SEND, UNKNOWN, SEND]);
    ring.relay(&device, &mut Chain::default());
    assert_eq!(device.posted.take().len(), 2);
    assert_eq!(refused(&mut ring, &device), []);
    device.result.set(0);
    assert_eq!(refused(&mut ring, &device), []);
    let [marker] = device.posted.take()[..] else {
        panic!("the device has room now");
    };
    assert!(!ring.completed(marker));
    assert_eq!(refused(&mut ring, &device), REFUSED_AND_FLUSHED);
}

#[test]
fn a_refused_wqe_completes_where_nothing_can_follow_those_in_flight() {
    // No marker is awaited in three cases: the queue pair will be destroyed, the device refuses the
    // marker, or no datagram had an address handle.
    for (service, result, is_abandoned) in [
        (Service::Connected, 0, true),
        (Service::Connected, libc::EINVAL, false),
        (Service::Datagram, 0, false),
    ] {
        let device = Keeping::default();
        device.result.set(result);
        let mut ring = queue(service, &[UNKNOWN]);
        ring.relay(&device, &mut Chain::default());
        if is_abandoned {
            ring.abandon();
        }
        let all = refused(&mut ring, &device);
        assert_eq!(all, [(0, Syndrome::LocalQpOperation)]);
    }
}

thread_local! {
    /// Whether the queue pair is destroyed.
    static IS_GONE: Cell<bool> = const { Cell::new(false) };
    /// Work completions of the device that were not taken.
    static COMPLETIONS: RefCell<Vec<ibv_wc>> = const { RefCell::new(Vec::new()) };
}

/// `post_recv` of a device without room for receives; the queue pair must not be destroyed yet.
unsafe extern "C" fn refuse_receive(
    _: *mut ibv_qp,
    _: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    assert!(!IS_GONE.get(), "a receive for a queue pair that is gone");
    libc::ENOMEM
}

unsafe extern "C" fn take_completions(_: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let taken = COMPLETIONS.take();
    assert!(taken.len() <= room as usize);
    for (at, wc) in taken.iter().enumerate() {
        // SAFETY: there is room for this number of completions.
        unsafe { to.add(at).write(*wc) };
    }
    taken.len() as c_int
}

unsafe extern "C" fn arm(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn refuse_send(
    _: *mut ibv_qp,
    _: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    libc::EINVAL
}

#[test]
fn a_destroyed_queue_pair_gets_no_receives_and_its_completions_and_those_of_others_stay() {
    let calls = ibv_context_ops {
        _compat_query_device: [null(); 11],
        poll_cq: take_completions,
        req_notify_cq: arm,
        _compat_cq_event: [null(); 7],
        post_srq_recv: None,
        _compat_create_qp: [null(); 4],
        post_send: refuse_send,
        post_recv: refuse_receive,
        _compat_create_ah: [null(); 5],
    };
    let mut rings = Rings::default();
    let cq = CqPlace::new(&CqConfig::from(4)).unwrap();
    let entries = cq.cq.buffer;
    rings
        .cqs
        .insert(CompletionRing::new(NonNull::dangling(), cq));
    let size = RqSize {
        depth: 1,
        max_sge: 0,
    };
    let target = Target::Own(NonNull::dangling());
    let (rq, memory) = rings.create_receives(target, size).unwrap();
    // SAFETY: the record of the new queue.
    unsafe { memory.record.as_ref() }.store(1u32.to_be(), Ordering::Release);
    let ids = [0, 1].map(|place| Id::of_queue(false, place, place + 1));
    for (id, (qpn, own)) in ids.iter().zip([(7, Some(rq)), (8, None)]) {
        let ring = queue_of(qpn, *id, own, Service::Connected, &[SEND]);
        rings.sends.insert(ring);
    }
    let device = Keeping::default();
    assert!(!rings.poll(&device, &calls), "the receive is refused");

    let key = rings.destroy_qp(&device, &calls, 7, || {
        IS_GONE.set(true);
        COMPLETIONS.set(
            ids.iter()
                .zip([7, 8])
                .map(|(id, qp_num)| ibv_wc {
                    wr_id: id.of_wqe(SEND, 0).0,
                    qp_num,
                    ..ibv_wc::default()
                })
                .collect(),
        );
    });
    assert_eq!(key, Some(7));
    let completed = [0, 1].map(|at| {
        // SAFETY: an entry of the queue.
        RequesterCqe::parse(&unsafe { entries.add(at * CQE_BYTES).cast().read() }).qpn
    });
    assert_eq!(completed, [7, 8]);
    assert_eq!((rings.sends.len(), rings.receives.len()), (1, 0));
    rings.poll(&device, &calls);
    assert_eq!(rings.destroy_qp(&device, &calls, 7, || panic!()), None);
    // A later completion belongs to no queue pair, even if another queue pair has the place.
    let id = Id::of_queue(false, 0, 3);
    let place = rings
        .sends
        .insert(queue_of(9, id, None, Service::Connected, &[SEND]));
    assert_eq!(place, 0);
    COMPLETIONS.set(vec![ibv_wc {
        wr_id: ids[0].of_wqe(SEND, 0).0,
        qp_num: 7,
        ..ibv_wc::default()
    }]);
    assert!(!rings.poll(&device, &calls));
}
