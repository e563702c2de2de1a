//! Tests of a send queue on a device that keeps what it gets until the test completes it.

use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};

use super::super::abi::*;
use super::sends::{Chain, Device, SendRing};
use super::{Id, MadeQp};
use crate::config::QpConfig;
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpRequest, Receives};
use crate::provider::private::SqPlace;
use crate::wire::{
    AddressVector, CtrlSegment, ErrorCqe, FenceMode, Opcode, Service, Syndrome, WQEBB,
};

/// An opcode that no WQE has.
const UNKNOWN: u8 = 0x7f;

#[derive(Default)]
struct Keeping {
    /// Names of the requests that it holds.
    posted: RefCell<Vec<Id>>,
    /// Answer to every post, once the queue pair has failed.
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

/// Makes a send queue with a SEND without buffers for each of these opcodes, announced.
fn queue(service: Service, opcodes: &[u8]) -> SendRing {
    let config = &QpConfig::default();
    let sq = SqPlace::new(config, RegisterKind::Unread).unwrap();
    for (at, opcode) in opcodes.iter().enumerate() {
        let ctrl = CtrlSegment {
            opcode: *opcode,
            wqe_index: at as u16,
            qpn: 7,
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
        qpn: 7,
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
    SendRing::new(made, Id::of_queue(false, 0, 1), sq, 0, None, &request)
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
    // Two WQEs, and what follows them out of the device.
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
    // The queue pair will be destroyed; the device takes nothing any more; no datagram had a way.
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
