//! Asynchronous events: reports of a device about itself and its objects, in addition to
//! completions.

use crate::end::*;
use crate::time::Net;
use mlx5::*;

/// Options that wait up to 10 s for the peer.
const PATIENT: ConnectOptions = ConnectOptions {
    timeout: 18,
    retry_count: 7,
    rnr_retry: 7,
    rnr_timer_ns: 10_000,
};
/// Options that wait some 100 us.
const HASTY: ConnectOptions = ConnectOptions {
    timeout: 4,
    retry_count: 1,
    ..PATIENT
};

/// Number of completions that a queue of 4 CQEs never holds. With libibverbs the device's queue may
/// hold 8, in addition to the 4 that this crate has taken out of it.
const TOO_MANY: usize = 16;

/// Makes two connected ends on devices that are not strict, because the mistakes here are intended.
fn connected(net: &Net, sizes: [Size; 2], retries: &ConnectOptions) -> [End; 2] {
    let options = SoftOptions {
        strict: false,
        ..net.options()
    };
    let [mut a, mut b] = sizes.map(|size| End::new(net.open(&options), size));
    connect(&mut a, &mut b, retries);
    [a, b]
}

/// Takes the oldest event that is not the last receive of a queue pair: each queue pair here has a
/// shared receive queue, so such an event follows each of its failures.
fn taken(device: &Device) -> Option<AsyncEvent> {
    let events = core::iter::from_fn(|| device.take_async_event());
    let is_last = |event: &AsyncEvent| matches!(event, AsyncEvent::QpLastReceive { .. });
    { events }.find(|event| !is_last(event))
}

/// Returns the next `n` events of a device, and checks that there is no other.
fn events(net: &Net, device: &Device, n: usize) -> Vec<AsyncEvent> {
    let events = net.collect(n, || taken(device).into_iter().collect());
    net.quiet();
    assert_eq!(taken(device), None, "after {events:?}");
    events
}

#[test]
fn a_queue_pair_that_fails_reports_once_that_it_takes_no_more_shared_receives() {
    let net = Net::new();
    let [mut a, mut b] = connected(&net, [SHARED, SHARED], &HASTY);
    b.receives(2, 8);
    // The second message is longer than its receive, so both queue pairs fail.
    let long = [0; 16];
    a.post(
        &Send {
            payload: Inline(&long[..8]),
        },
        0,
    );
    a.post(
        &Send {
            payload: Inline(&long),
        },
        1,
    );
    let received = net.collect(2, || b.received());
    assert_eq!(received.len(), 2);
    for end in [&a, &b] {
        let last = net.collect(1, || end.device.take_async_event().into_iter().collect());
        assert_eq!(last, [AsyncEvent::QpLastReceive { qpn: end.qp.qpn() }]);
        net.quiet();
        assert_eq!(end.device.take_async_event(), None, "once");
    }
    let device = b.device.clone();
    drop(b);
    assert_eq!(device.take_async_event(), None);
}

#[test]
fn a_completion_queue_that_overruns_and_what_it_takes_down_are_reported_once() {
    for of_receives in [false, true] {
        let net = Net::new();
        let small = Size { cqes: 4, ..SHARED };
        let [mut a, mut b] = connected(
            &net,
            if of_receives {
                [SHARED, small]
            } else {
                [small, SHARED]
            },
            &HASTY,
        );
        assert_eq!((taken(&a.device), taken(&b.device)), (None, None));
        b.receives(TOO_MANY, 8);
        for user in 0..TOO_MANY as u64 {
            a.qp.post(
                &Send { payload: () },
                if of_receives {
                    Signal::Reclaim
                } else {
                    Signal::Always
                },
                user,
            )
            .unwrap();
        }
        a.qp.ring();
        let (end, cqn) = if of_receives {
            (&b, b.recv_cq.cqn())
        } else {
            (&a, a.send_cq.cqn())
        };
        let both = [
            AsyncEvent::CqError { cqn },
            AsyncEvent::QpFatal { qpn: end.qp.qpn() },
        ];
        assert_eq!(events(&net, &end.device, 2), both);
        let other = if of_receives { &a } else { &b };
        assert_eq!(
            taken(&other.device),
            None,
            "the other end learns of it by its completions"
        );
    }
}

/// Makes two connected ends, of which the first has overrun the completion queue of its sends.
fn overrun(net: &Net) -> [End; 2] {
    let small = Size { cqes: 4, ..SHARED };
    let [mut a, mut b] = connected(net, [small, SHARED], &HASTY);
    b.receives(TOO_MANY, 8);
    for user in 0..TOO_MANY as u64 {
        a.qp.post(&Send { payload: () }, Signal::Always, user)
            .unwrap();
    }
    a.qp.ring();
    [a, b]
}

#[test]
fn events_of_what_is_destroyed_are_gone_with_it() {
    let net = Net::new();
    let [a, _b] = overrun(&net);
    net.quiet();
    let device = a.device.clone();
    drop(a);
    assert_eq!(taken(&device), None);
}

#[test]
fn an_event_that_was_taken_does_not_hold_up_the_end_of_its_object() {
    let net = Net::new();
    let [a, _b] = overrun(&net);
    let device = a.device.clone();
    let first = net.collect(1, || taken(&device).into_iter().collect());
    assert!(
        matches!(first[..], [AsyncEvent::CqError { .. }]),
        "{first:?}"
    );
    drop(a);
    assert_eq!(
        taken(&device),
        None,
        "that of the queue pair was not taken, and went with it"
    );
}

#[test]
fn while_the_port_is_down_nothing_arrives_and_connections_go_on_if_it_comes_up_in_time() {
    let net = Net::new();
    let [mut a, mut b] = connected(&net, [SHARED, SHARED], &PATIENT);
    let soft = std::rc::Rc::clone(a.device.soft().unwrap());
    b.receives(4, 8);
    a.post(
        &Send {
            payload: Inline(b"before"),
        },
        0,
    );
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    assert!(soft.is_port_up());
    for _ in 0..2 {
        soft.set_port_up(false);
    }
    assert_eq!(
        events(&net, &a.device, 1),
        [AsyncEvent::PortError { port: 1 }]
    );
    a.post(
        &Send {
            payload: Inline(b"during"),
        },
        1,
    );
    for _ in 0..100 {
        net.progress();
    }
    assert_eq!(
        (a.sent(), net.collect(1, || b.received()).len()),
        (vec![], 1)
    );
    soft.set_port_up(true);
    // The sender tries again from time to time.
    net.pass_ns(1_000_000);
    assert_eq!(net.collect(1, || a.sent()), [(1, Ok(0))]);
    assert_eq!(net.collect(1, || b.received()).len(), 1);
    assert_eq!(
        events(&net, &a.device, 1),
        [AsyncEvent::PortActive { port: 1 }]
    );
}

#[test]
fn a_port_that_stays_down_ends_connections_by_their_retries() {
    let net = Net::new();
    let [mut a, mut b] = connected(&net, [SHARED, SHARED], &HASTY);
    b.receives(4, 8);
    a.device.soft().unwrap().set_port_up(false);
    a.post(&Send { payload: () }, 1);
    let sent = loop {
        let sent = a.sent();
        if !sent.is_empty() {
            break sent;
        }
        net.pass_ns(1_000_000);
        net.progress();
    };
    assert_eq!(
        sent[0].1.unwrap_err().syndrome,
        Syndrome::TransportRetryExceeded
    );
    assert_eq!(b.received(), []);
    assert_eq!(
        events(&net, &a.device, 1),
        [AsyncEvent::PortError { port: 1 }],
        "no completion is missing, so no queue pair has failed"
    );
}

#[test]
fn a_device_that_breaks_down_says_so_and_completes_nothing_more() {
    let net = Net::new();
    let [mut a, mut b] = connected(&net, [SHARED, SHARED], &HASTY);
    b.receives(4, 8);
    a.post(&Send { payload: () }, 0);
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    a.device.soft().unwrap().break_down();
    a.post(&Send { payload: () }, 1);
    assert_eq!(events(&net, &a.device, 1), [AsyncEvent::DeviceFatal]);
    assert_eq!(a.sent(), []);
    assert_eq!(net.collect(1, || b.received()).len(), 1);
    assert_eq!(taken(&b.device), None);
}
