//! Faults on purpose: each has its effect and no other, and the seed decides all of it.

use mlx5::*;

use crate::end::*;
use crate::time::{Mode, Net};

fn with(net: &Net, faults: Faults) -> SoftOptions {
    SoftOptions {
        faults,
        ..net.options()
    }
}

/// Makes a pair whose first end makes `faults`.
fn faulty(net: &Net, faults: Faults, options: &ConnectOptions) -> (End, End) {
    let (mut a, mut b) = (
        End::new(net.open(&with(net, faults)), SHARED),
        End::new(net.device(), SHARED),
    );
    connect(&mut a, &mut b, options);
    (a, b)
}

fn write(b: &End) -> Write<Inline<'static>> {
    Write {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        payload: Inline(b"here"),
    }
}

#[test]
fn a_device_says_which_faults_it_makes_and_when_it_executes() {
    let net = Net::new();
    let quiet = net.device().info().modes;
    assert!(quiet.ends_with(", strict"), "{quiet}");
    let faults = Faults {
        seed: 77,
        delay_permille: 5,
        delay_ns: 100,
        fail: Some((9, Syndrome::BadResponse)),
        ..Faults::default()
    };
    let modes = net.open(&with(&net, faults)).info().modes;
    assert!(modes.starts_with(&quiet), "{modes}");
    assert!(
        [
            "seed: 77",
            "delay_permille: 5",
            "delay_ns: 100",
            "BadResponse"
        ]
        .iter()
        .all(|part| modes.contains(part)),
        "{modes}"
    );
    // A seed alone makes no fault.
    assert_eq!(
        net.open(&with(
            &net,
            Faults {
                seed: 1,
                ..Faults::default()
            }
        ))
        .info()
        .modes,
        quiet
    );
    let all = [Mode::Immediate, Mode::Delay, Mode::Virtual]
        .map(|mode| Net::in_mode(mode).device().info().modes);
    assert_eq!(
        all[..2],
        [
            "immediate, manual clock, strict",
            "delay 3000 ns, system clock, strict"
        ]
    );
    assert!(all[2].starts_with("NIC model"), "{}", all[2]);
}

#[test]
fn a_delayed_operation_starts_that_much_later_and_what_is_behind_it_waits() {
    let net = Net::new();
    let delay_ns = 2_000_000;
    let (mut a, b) = faulty(
        &net,
        Faults {
            delay_permille: 1000,
            delay_ns,
            ..Faults::default()
        },
        &ConnectOptions::default(),
    );
    let clock = net.options().clock;
    let start_ns = clock.now_ns();
    a.qp.post(&write(&b), Signal::Always, 1).unwrap();
    a.qp.post(&write(&b), Signal::Always, 2).unwrap();
    a.qp.ring();
    assert_eq!((a.sent(), b.bytes(0, 4)), (vec![], vec![0; 4]));
    for (n, user) in [(1, 1), (2, 2)] {
        let sent = net.collect(1, || {
            if crate::time::mode() == Mode::Immediate {
                net.pass_ns(1000);
            }
            a.sent()
        });
        assert_eq!(sent, [(user, Ok(0))]);
        assert!(clock.now_ns() - start_ns >= n * delay_ns);
    }
    assert_eq!(b.bytes(0, 4), b"here");
}

#[test]
fn a_receive_that_is_not_found_costs_one_retry_and_only_operations_that_take_one() {
    let net = Net::new();
    let faults = || Faults {
        rnr_permille: 1000,
        ..Faults::default()
    };
    let (mut a, mut b) = faulty(
        &net,
        faults(),
        &ConnectOptions {
            rnr_retry: 1,
            rnr_timer_ns: 5_000,
            ..ConnectOptions::default()
        },
    );
    b.receives(3, 8);
    a.post(&write(&b), 0);
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    for user in 1..4 {
        a.post(&Send { payload: () }, user);
        let sent = net.collect(1, || {
            net.pass_ns(5_000);
            a.sent()
        });
        assert_eq!(sent, [(user, Ok(0))]);
    }
    assert_eq!(net.collect(3, || b.received()).len(), 3);
    // Without a retry it is fatal, with or without receives.
    let (mut a, mut b) = faulty(
        &net,
        faults(),
        &ConnectOptions {
            rnr_retry: 0,
            ..ConnectOptions::default()
        },
    );
    b.receives(1, 8);
    a.post(&Send { payload: () }, 0);
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::RnrRetryExceeded
    );
    net.quiet();
    assert_eq!(b.received(), []);
}

#[test]
fn the_nth_operation_of_the_device_fails_whichever_queue_pair_it_is_on() {
    for n in 0..6 {
        let net = Net::new();
        let faults = Faults {
            fail: Some((n, Syndrome::RemoteAborted)),
            ..Faults::default()
        };
        let device = net.open(&with(&net, faults));
        let mut ends = [End::new(device.clone(), SHARED), End::new(device, SHARED)];
        for end in &mut ends {
            end.qp
                .connect(&end.qp.address(), &ConnectOptions::default())
                .unwrap();
        }
        for number in 0..6 {
            let end = &mut ends[number as usize % 2];
            let write = write(end);
            if end.qp.state() == QpState::Error {
                continue;
            }
            // Operations of four WQEBBs, so that sometimes NOPs fill the ring's end.
            let write = Write {
                addr: write.addr,
                rkey: write.rkey,
                payload: Inline(&[1; 200]),
            };
            end.post(&write, number);
            let [(user, result)] = net.collect(1, || end.sent())[..] else {
                panic!()
            };
            let want = if number == n {
                Err(Syndrome::RemoteAborted)
            } else {
                Ok(0)
            };
            assert_eq!(
                (user, result.map_err(|e| e.syndrome)),
                (number, want),
                "{n}"
            );
        }
    }
}

#[test]
fn padding_at_the_end_of_a_ring_is_no_operation() {
    let net = Net::new();
    let (mut a, b) = faulty(
        &net,
        Faults {
            fail: Some((30, Syndrome::BadResponse)),
            ..Faults::default()
        },
        &ConnectOptions::default(),
    );
    let write = Write {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        payload: Inline(&[1; 160]),
    };
    for number in 0..=30 {
        // Three WQEBBs in a ring of 64, so one is left over on every lap.
        a.post(&write, number);
        let failed = net.collect(1, || a.sent())[0].1.is_err();
        assert_eq!(failed, number == 30, "{number}");
    }
}

#[test]
fn peers_that_are_dropped_answer_no_more_and_are_themselves_unharmed() {
    let net = Net::new();
    let faults = Faults {
        drop_peers_after: Some(3),
        ..Faults::default()
    };
    let (mut a, mut b) = faulty(
        &net,
        faults,
        &ConnectOptions {
            timeout: 4,
            retry_count: 0,
            ..ConnectOptions::default()
        },
    );
    b.mr.write(100, b"kept").unwrap();
    for user in 0..3 {
        a.post(&write(&b), user);
        assert_eq!(net.collect(1, || a.sent()), [(user, Ok(0))]);
    }
    // The other direction works, because only the peers do not answer.
    let read = Read {
        addr: a.mr.addr(),
        rkey: a.mr.rkey(),
        into: b.mr.sge(64, 8).unwrap(),
    };
    b.post(&read, 0);
    assert_eq!(net.collect(1, || b.sent()), [(0, Ok(8))]);
    let over = Write {
        addr: b.mr.addr() + 100,
        rkey: b.mr.rkey(),
        payload: Inline(b"gone"),
    };
    a.post(&over, 3);
    let sent = net.collect(1, || {
        net.pass_ns(10_000);
        a.sent()
    });
    assert_eq!(
        sent[0].1.unwrap_err().syndrome,
        Syndrome::TransportRetryExceeded
    );
    assert_eq!(b.bytes(100, 4), b"kept");
}

/// Three queue pairs of one device send to three of another, which have one receive CQ and skip
/// lanes. Returns the order of its CQEs as (queue pair, number).
fn arrivals(net: &Net, seed: u64, reorder_permille: u16) -> Vec<(usize, u32)> {
    let device = net.open(&with(
        net,
        Faults {
            seed,
            reorder_permille,
            ..Faults::default()
        },
    ));
    let sender = net.device();
    let pd = device.alloc_pd().unwrap();
    let (send_cq, mut recv_cq) = (
        device.create_cq(64).unwrap(),
        device.create_mono_cq(64).unwrap(),
    );
    let mut srq = pd.create_srq(60, 0).unwrap();
    while srq.post(&[], 0).is_ok() {}
    srq.ring();
    let mut ends = vec![];
    let mut senders: Vec<_> = (0..3).map(|_| End::new(sender.clone(), SHARED)).collect();
    for (i, a) in senders.iter_mut().enumerate() {
        let mut b = pd
            .create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())
            .unwrap();
        recv_cq.register(b.qpn(), i);
        a.qp.connect(&b.address(), &ConnectOptions::default())
            .unwrap();
        b.connect(&a.qp.address(), &ConnectOptions::default())
            .unwrap();
        ends.push(b);
    }
    for imm in 0..20 {
        for a in &mut senders {
            a.post(&SendImm { imm, payload: () }, 0);
        }
    }
    let mut got = vec![];
    net.settle(|| {
        recv_cq.poll(64, |queue, cqe| got.push((*queue.unwrap(), cqe.imm())));
        got.len() == 60
    });
    got
}

#[test]
fn completions_change_places_across_queue_pairs_never_within_one() {
    let net = Net::new();
    let orders: Vec<_> = (0..8).map(|seed| arrivals(&net, seed, 700)).collect();
    for order in &orders {
        for queue in 0..3 {
            let own: Vec<u32> = order
                .iter()
                .filter(|(q, _)| *q == queue)
                .map(|(_, imm)| *imm)
                .collect();
            assert_eq!(own, (0..20).collect::<Vec<_>>());
        }
    }
    assert!(
        orders.iter().any(|order| *order != orders[0]),
        "no seed changed anything"
    );
}

/// Returns the run of a seed: the trace of both devices, and the number of times that the sender
/// had to wait.
fn run(mode: Mode, seed: u64) -> (Vec<Option<u64>>, u32) {
    let net = Net::in_mode(mode);
    let faults = Faults {
        seed,
        delay_permille: 200,
        delay_ns: 10_000,
        rnr_permille: 200,
        reorder_permille: 300,
        ..Faults::default()
    };
    let options = SoftOptions {
        trace: true,
        ..with(&net, faults)
    };
    let (mut a, mut b) = (
        End::new(net.open(&options), SHARED),
        End::new(net.open(&options), SHARED),
    );
    connect(
        &mut a,
        &mut b,
        &ConnectOptions {
            rnr_timer_ns: 3_000,
            ..ConnectOptions::default()
        },
    );
    let (mut waits, mut arrived) = (0, 0);
    for user in 0..100 {
        b.receives(1, 8);
        a.post(
            &Send {
                payload: Inline(&[1; 8]),
            },
            user,
        );
        net.settle(|| {
            waits += 1;
            if mode == Mode::Immediate {
                net.pass_ns(500);
            }
            arrived += b.received().len();
            !a.sent().is_empty()
        });
    }
    net.settle(|| {
        arrived += b.received().len();
        arrived == 100
    });
    (
        vec![
            a.device.soft().and_then(|soft| soft.trace_hash()),
            b.device.soft().and_then(|soft| soft.trace_hash()),
        ],
        waits,
    )
}

#[test]
fn the_same_seed_is_the_same_run_and_another_seed_another() {
    for mode in [Mode::Immediate, Mode::Virtual] {
        let first = run(mode, 5);
        assert!(first.0.iter().all(Option::is_some));
        assert_eq!(first, run(mode, 5), "{mode:?}");
        assert_ne!(first, run(mode, 6), "{mode:?}");
    }
}

#[test]
fn the_faults_of_one_queue_pair_leave_the_others_alone() {
    let net = Net::new();
    // The device assigns the places in the order of creation, so place 1 belongs to the second
    // queue pair.
    let faults = Faults {
        fail: Some((1, Syndrome::RemoteAborted)),
        only: Some(1),
        ..Faults::default()
    };
    let device = net.open(&with(&net, faults));
    let mut ends = [End::new(device.clone(), SHARED), End::new(device, SHARED)];
    assert_eq!(ends[1].qp.qpn() & 0x3fff, 1);
    for end in &mut ends {
        end.qp
            .connect(&end.qp.address(), &ConnectOptions::default())
            .unwrap();
    }
    for (number, at, want) in [
        (0, 0, Ok(0)),
        (1, 1, Ok(0)),
        (2, 0, Ok(0)),
        (3, 1, Err(Syndrome::RemoteAborted)),
        (4, 0, Ok(0)),
    ] {
        let end = &mut ends[at];
        let write = write(end);
        end.post(&write, number);
        let [(user, result)] = net.collect(1, || end.sent())[..] else {
            panic!()
        };
        assert_eq!((user, result.map_err(|e| e.syndrome)), (number, want));
    }
}

#[test]
fn a_lost_message_is_sent_again_after_the_timeout_and_fails_if_no_attempt_arrives() {
    // 4.1 ms.
    let options = ConnectOptions {
        timeout: 10,
        retry_count: 7,
        ..ConnectOptions::default()
    };
    let once_ns = ConnectOptions {
        retry_count: 0,
        ..options
    }
    .transport_timeout_ns();
    for (loss_permille, want) in [(300, Ok(0)), (1000, Err(Syndrome::TransportRetryExceeded))] {
        let net = Net::new();
        let (mut a, b) = faulty(
            &net,
            Faults {
                loss_permille,
                ..Faults::default()
            },
            &options,
        );
        let clock = net.options().clock;
        let mut late = 0;
        for number in 0..10 {
            let start_ns = clock.now_ns();
            a.post(&write(&b), number);
            let sent = net.collect(1, || {
                if crate::time::mode() == Mode::Immediate {
                    net.pass_ns(1000);
                }
                a.sent()
            });
            assert_eq!(sent[0].1.map_err(|e| e.syndrome), want);
            if want.is_err() {
                break;
            }
            late += u32::from(clock.now_ns() - start_ns >= once_ns);
        }
        assert!(
            want.is_err() || (1..10).contains(&late),
            "{late} of 10 were sent again"
        );
        assert_eq!(b.bytes(0, 4) == b"here", want.is_ok());
    }
}
