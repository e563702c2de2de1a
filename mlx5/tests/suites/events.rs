//! Waiting for completions: events that end a wait, events that do not, and progress meanwhile.
//! `src/tests/events.rs` tests that no event is missed.

use std::time::{Duration, Instant};

use crate::end::*;
use crate::time::Net;
use copyrpc_shm::sleep::{Look, Sleeper, wait};
use mlx5::*;

/// Watchdog.
const WATCHDOG: Duration = Duration::from_secs(120);
const SHORT: Option<Duration> = Some(Duration::from_millis(5));

/// Two ends on the system's clock, which advances while a thread sleeps. Their completions are
/// there when the doorbell returns.
fn ends(net: &Net, options: &ConnectOptions) -> (End, End) {
    copyrpc_testing::limits::watchdog(WATCHDOG);
    let spec = SoftOptions {
        clock: Clock::System,
        timing: Timing::Immediate,
        ..net.options()
    };
    let (mut a, mut b) = (
        End::new(net.open(&spec), SHARED),
        End::new(net.open(&spec), SHARED),
    );
    connect(&mut a, &mut b, options);
    (a, b)
}

#[test]
fn a_wait_ends_with_its_time_or_with_a_completion_that_was_armed_for() {
    let net = Net::new();
    let (mut a, mut b) = ends(&net, &ConnectOptions::default());
    b.receives(8, 8);
    assert!(!b.device.wait(SHORT) && !b.device.wait(Some(Duration::ZERO)));
    b.recv_cq.arm(false);
    assert!(!b.device.wait(SHORT), "armed, and nothing came");
    a.post(&Send { payload: () }, 0);
    assert!(b.device.wait(None));
    assert!(!b.device.wait(SHORT), "one event per arm");
    // The queue is armed while it holds an unread completion.
    b.recv_cq.arm(false);
    assert!(b.device.wait(None));
    assert_eq!(b.received().len(), 1);
    b.recv_cq.arm(false);
    assert!(!b.device.wait(SHORT), "that one was polled");
    // Completions of another queue do not end the wait.
    let read = Read {
        addr: a.mr.addr(),
        rkey: a.mr.rkey(),
        into: b.mr.sge(0, 8).unwrap(),
    };
    b.post(&read, 0);
    assert!(!b.device.wait(SHORT));
    b.send_cq.arm(false);
    assert!(b.device.wait(None));
}

/// Waits like a thread that also sleeps on shared memory. A device that cannot end such a sleep
/// would be polled every 100 us.
#[test]
fn a_sleep_beside_other_things_ends_with_a_completion_and_is_no_poll() {
    let net = Net::new();
    let (mut a, mut b) = ends(&net, &ConnectOptions::default());
    b.receives(8, 8);
    for round in 0..3 {
        let mut looks = 0;
        let mut sleep = |timeout| {
            let mut has_something = Look(|| {
                looks += 1;
                b.recv_cq.has_completion()
            });
            wait(
                [&mut &b.device as &mut dyn Sleeper, &mut has_something],
                timeout,
            )
        };
        // A sleep may also end because of progress that earlier messages need.
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            sleep(Some(end - Instant::now()));
        }
        a.post(&Send { payload: () }, round);
        sleep(None);
        assert!(looks < 60, "{looks} looks in 300 ms");
        assert_eq!(b.received().len(), 1);
    }
}

#[test]
fn a_wait_for_solicited_completions_ends_with_one_or_with_an_error() {
    let net = Net::new();
    let (mut a, mut b) = ends(&net, &ConnectOptions::default());
    b.receives(2, 8);
    b.receives(1, 0);
    b.recv_cq.arm(true);
    a.post(&Send { payload: () }, 0);
    assert!(!b.device.wait(SHORT));
    a.qp.post(&Send { payload: () }, Signal::Always.solicited(), 1)
        .unwrap();
    a.qp.ring();
    assert!(b.device.wait(None));
    assert_eq!(b.received().len(), 2);
    b.recv_cq.arm(true);
    // The message is not solicited, but is longer than its receive: its completion is an error.
    a.post(
        &Send {
            payload: Inline(b"x"),
        },
        2,
    );
    assert!(b.device.wait(None));
    // The queue is armed again while it holds the unread completion.
    b.recv_cq.arm(true);
    assert!(b.device.wait(None));
    assert_eq!(
        b.received()[0].unwrap_err().1.syndrome,
        Syndrome::LocalLength
    );
}

#[test]
fn retries_go_on_while_their_device_waits() {
    let net = Net::new();
    let (mut a, mut b) = ends(
        &net,
        &ConnectOptions {
            rnr_retry: 3,
            rnr_timer_ns: 300_000,
            ..ConnectOptions::default()
        },
    );
    a.send_cq.arm(false);
    a.post(&Send { payload: () }, 7);
    assert_eq!(a.sent(), []);
    assert!(a.device.wait(None), "the last retry failed");
    let [(user, result)] = a.sent()[..] else {
        panic!()
    };
    assert_eq!(
        (user, result.unwrap_err().syndrome),
        (7, Syndrome::RnrRetryExceeded)
    );
    assert_eq!(b.received(), []);
}

#[test]
fn what_is_delayed_comes_while_its_device_waits() {
    copyrpc_testing::limits::watchdog(WATCHDOG);
    let net = Net::new();
    let spec = SoftOptions {
        clock: Clock::System,
        timing: Timing::Delay { ns: 400_000 },
        ..net.options()
    };
    let mut a = End::new(net.open(&spec), SHARED);
    a.qp.connect(&a.qp.address(), &ConnectOptions::default())
        .unwrap();
    a.receives(1, 8);
    a.send_cq.arm(false);
    a.recv_cq.arm(true);
    a.qp.post(&Send { payload: () }, Signal::Always.solicited(), 0)
        .unwrap();
    a.qp.ring();
    assert!(a.device.wait(None));
    assert_eq!((a.sent().len(), a.received().len()), (1, 1));
}

#[test]
fn a_wait_goes_on_in_virtual_time() {
    copyrpc_testing::limits::watchdog(WATCHDOG);
    let net = Net::in_mode(crate::time::Mode::Virtual);
    let (mut a, mut b) = pair(&net, SHARED);
    b.receives(1, 8);
    a.send_cq.arm(false);
    a.post(&Send { payload: () }, 0);
    assert!(a.device.wait(None));
    assert_eq!(a.sent(), [(0, Ok(0))]);
    b.recv_cq.arm(false);
    assert!(b.device.wait(None));
    assert_eq!(b.received().len(), 1);
}

#[test]
fn the_death_of_a_peer_ends_the_wait_for_its_answer() {
    let net = Net::new();
    let (mut a, b) = ends(&net, &ConnectOptions::default());
    let device = b.device.clone();
    net.forget(&device);
    drop((b, device));
    a.send_cq.arm(true);
    a.post(
        &Write {
            addr: 0,
            rkey: 0,
            payload: (),
        },
        0,
    );
    assert!(a.device.wait(None));
    assert_eq!(
        a.sent()[0].1.unwrap_err().syndrome,
        Syndrome::TransportRetryExceeded
    );
}

#[test]
fn a_waker_ends_the_wait_under_way_or_the_next_one_once() {
    const LONG: Duration = Duration::from_secs(60);
    let net = Net::new();
    let (mut a, mut b) = ends(&net, &ConnectOptions::default());
    let waker = b.device.waker();
    // Two wakes before a wait end this wait only.
    waker.wake_by_ref();
    waker.wake_by_ref();
    let since = Instant::now();
    assert!(!b.device.wait(Some(LONG)) && since.elapsed() < LONG);
    let since = Instant::now();
    assert!(
        !b.device.wait(SHORT) && since.elapsed() >= SHORT.unwrap(),
        "the second ring is over"
    );
    // A wake during a wait ends this wait.
    let ringer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        waker.wake();
    });
    assert!(!b.device.wait(Some(LONG)) && since.elapsed() < LONG);
    ringer.join().unwrap();
    // A wake-up through the waker takes no event of a queue.
    b.receives(1, 8);
    b.recv_cq.arm(false);
    b.device.waker().wake();
    a.post(&Send { payload: () }, 0);
    assert!(b.device.wait(None) || b.device.wait(None));
    assert_eq!(b.received().len(), 1);
}
