//! Reliable-connected queue pairs on the software HCA, two devices of a local fabric in one thread.

use mlx5::*;

use crate::time::{Mode, Net, mode};

const SIZE: usize = 1 << 16;
const RKEYS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ);

/// An end: all objects of an RC connection.
struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<()>,
    srq: Srq,
    mr: Mr,
    pd: Pd,
    device: Device,
    net: Net,
}

/// The `user` value of a completed operation, and its result.
type Sent = (Option<u64>, Result<(), Syndrome>);

struct World {
    net: Net,
}

fn world() -> World {
    World { net: Net::new() }
}

impl World {
    fn end(&self, cq_entries: u32, srq_depth: u32, max_send_wr: u32) -> End {
        let net = self.net.clone();
        let device = net.device();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(cq_entries).unwrap();
        let mut recv_cq = device.create_mono_cq(cq_entries).unwrap();
        let srq = pd.create_srq(srq_depth, 0).unwrap();
        let qp = pd
            .create_qp(
                &send_cq,
                &recv_cq,
                &srq,
                &QpConfig {
                    max_send_wr,
                    max_inline_data: 220,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        recv_cq.register(qp.qpn(), ());
        let mr = pd.alloc(SIZE, RKEYS).unwrap();
        End {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
            net,
        }
    }

    fn pass_ns(&self, ns: u64) {
        self.net.pass_ns(ns);
    }

    fn pair(&self) -> (End, End) {
        let (mut a, mut b) = (self.end(64, 63, 64), self.end(64, 63, 64));
        connect(&mut a, &mut b, &ConnectOptions::default());
        (a, b)
    }
}

fn connect(a: &mut End, b: &mut End, options: &ConnectOptions) {
    let (at, bt) = (a.qp.address(), b.qp.address());
    a.qp.connect(&bt, options).unwrap();
    b.qp.connect(&at, options).unwrap();
}

impl End {
    fn post_receives(&mut self, n: usize) {
        for i in 0..n {
            self.srq.post(&[], i as u64).unwrap();
        }
        self.srq.ring();
    }

    /// Returns the immediates and lengths of the messages that have arrived since the last call.
    fn poll_received(&mut self) -> Vec<(u32, u32)> {
        let mut got = vec![];
        let srq = &mut self.srq;
        self.recv_cq.poll(1000, |queue, cqe| {
            assert!(queue.is_some());
            cqe.result().unwrap();
            assert_eq!(cqe.opcode(), Some(CqeOpcode::ResponderWriteImm));
            srq.complete_receive(&cqe).unwrap();
            got.push((cqe.imm(), cqe.byte_count()));
        });
        got
    }

    /// Returns the completions of sends since the last call.
    fn poll_sent(&mut self) -> Vec<Sent> {
        let mut got = vec![];
        let qp = &mut self.qp;
        self.send_cq.poll(1000, |cqe| {
            got.push((qp.complete(&cqe), cqe.result().map_err(|e| e.syndrome)))
        });
        got
    }

    /// Waits until `n` messages have arrived, and returns them.
    fn received(&mut self, n: usize) -> Vec<(u32, u32)> {
        self.net.clone().collect(n, || self.poll_received())
    }

    /// Waits until `n` sends have completed, and returns their results.
    fn sent(&mut self, n: usize) -> Vec<Sent> {
        self.net.clone().collect(n, || self.poll_sent())
    }

    /// Asserts that there is neither an arrival nor a completion, and nothing in flight except
    /// operations that wait for a timer.
    fn assert_nothing(&mut self, why: &str) {
        self.net.quiet();
        assert_eq!(
            (self.poll_received(), self.poll_sent()),
            (vec![], vec![]),
            "{why}"
        );
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mr.read(offset, &mut bytes).unwrap();
        bytes
    }

    /// Closes the device.
    fn close(self) {
        self.net.forget(&self.device);
    }
}

fn write_imm<P>(to: &End, offset: u64, imm: u32, payload: P) -> WriteImm<P> {
    WriteImm {
        addr: to.mr.addr() + offset,
        rkey: to.mr.rkey(),
        imm,
        payload,
    }
}

#[test]
fn every_payload_kind_arrives_with_its_immediate_and_its_bytes() {
    let (mut a, mut b) = world().pair();
    b.post_receives(10);
    let data: Vec<u8> = (0..2000u32).map(|i| (i * 7) as u8).collect();
    a.mr.write(0, &data).unwrap();
    a.qp.post(
        &write_imm(&b, 0, 1, Inline(&data[..220])),
        Signal::Always,
        100,
    )
    .unwrap();
    a.qp.post(
        &write_imm(&b, 4096, 2, a.mr.sge(0, 2000).unwrap()),
        Signal::Always,
        101,
    )
    .unwrap();
    a.qp.post(
        &write_imm(
            &b,
            8192,
            3,
            (Inline(&data[..204]), a.mr.sge(204, 1796).unwrap()),
        ),
        Signal::Always,
        102,
    )
    .unwrap();
    a.qp.post(&write_imm(&b, 0, 4, ()), Signal::Always, 103)
        .unwrap();
    b.assert_nothing("nothing before the doorbell");
    a.qp.ring();
    assert_eq!(b.received(4), [(1, 220), (2, 2000), (3, 2000), (4, 0)]);
    assert_eq!(b.bytes(0, 220), data[..220]);
    assert_eq!(b.bytes(4096, 2000), data);
    assert_eq!(b.bytes(8192, 2000), data);
    assert_eq!(a.sent(4), [100, 101, 102, 103].map(|u| (Some(u), Ok(()))));
}

#[test]
fn write_and_read_are_one_sided() {
    let (mut a, mut b) = world().pair();
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: Inline(b"hello"),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.post(
        &Read {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            into: a.mr.sge(512, 5).unwrap(),
        },
        Signal::Always,
        2,
    )
    .unwrap();
    a.qp.ring();
    assert_eq!(a.sent(2), [(Some(1), Ok(())), (Some(2), Ok(()))]);
    assert_eq!(a.bytes(512, 5), b"hello");
    b.assert_nothing("the peer's CPU notices nothing");
}

#[test]
fn thousands_of_messages_wrap_every_ring_in_both_directions() {
    let world = world();
    let (mut a, mut b) = (world.end(16, 15, 8), world.end(16, 15, 8));
    connect(&mut a, &mut b, &ConnectOptions::default());
    let payload: Vec<u8> = (0..220).collect();
    let (mut posted, mut arrived) = ([0u32; 2], [0u32; 2]);
    // Far more than 2^16 WQEBBs, so the 16-bit indices wrap as well.
    world.net.settle(|| {
        for end in [&mut a, &mut b] {
            let free = end.srq.free();
            end.post_receives(free);
        }
        for (i, posted) in posted.iter_mut().enumerate() {
            let (from, to) = if i == 0 { (&mut a, &b) } else { (&mut b, &a) };
            for _ in 0..3 {
                let n = *posted as usize * 37 % 221;
                let op = write_imm(
                    to,
                    256 * u64::from(*posted % 64),
                    *posted,
                    Inline(&payload[..n]),
                );
                match from.qp.post(&op, Signal::Reclaim, 0) {
                    Ok(()) => *posted += 1,
                    Err(PostError::QueueFull { .. }) => break,
                    Err(e) => panic!("{e}"),
                }
            }
            from.qp.ring();
        }
        for (i, end) in [(1, &mut a), (0, &mut b)] {
            for (imm, len) in end.poll_received() {
                assert_eq!(
                    (imm, len),
                    (arrived[i], arrived[i] * 37 % 221),
                    "in order, none lost"
                );
                let at = 256 * (imm as usize % 64);
                assert_eq!(end.bytes(at, len as usize), payload[..len as usize]);
                arrived[i] += 1;
            }
            assert!(end.poll_sent().iter().all(|(_, r)| r.is_ok()));
        }
        arrived.iter().all(|&n| n >= 40_000)
    });
}

#[test]
fn receives_with_distinct_buffers_come_back_in_post_order_through_the_links() {
    let (mut a, mut b) = world().pair();
    // A second connection: it shares the receive queue, and its receives complete in another CQ.
    let mut second_cq = b.device.create_mono_cq(16).unwrap();
    let mut from =
        a.pd.create_qp(&a.send_cq, &a.recv_cq, &a.srq, &QpConfig::default())
            .unwrap();
    let mut to =
        b.pd.create_qp(&b.send_cq, &second_cq, &b.srq, &QpConfig::default())
            .unwrap();
    from.connect(&to.address(), &ConnectOptions::default())
        .unwrap();
    to.connect(&from.address(), &ConnectOptions::default())
        .unwrap();
    // Rounds in which the entries are returned in another order, so that the list is no longer
    // sequential.
    for round in 0..20u64 {
        for i in 0..6 {
            b.srq.post(&[], round * 10 + i).unwrap();
        }
        b.srq.ring();
        for i in 0..6 {
            // One at a time, because messages of two connections have no order.
            let qp = if i % 2 == 0 { &mut a.qp } else { &mut from };
            qp.post(&write_imm(&b, 0, i, ()), Signal::Always, 0)
                .unwrap();
            qp.ring();
            a.net.settle(|| {
                a.send_cq.poll(1, |cqe| {
                    assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some())
                }) == 1
            });
        }
        // The `user` values are returned in post order only if the device followed the links that
        // the driver wrote.
        for i in [1, 0, 3, 2, 5, 4] {
            let cq = if i % 2 == 0 {
                &mut b.recv_cq
            } else {
                &mut second_cq
            };
            let mut users = vec![];
            b.net.settle(|| {
                cq.poll(1, |_, cqe| {
                    assert_eq!(cqe.imm(), i as u32);
                    users.extend([b.srq.complete_receive(&cqe), b.srq.complete_receive(&cqe)]);
                });
                !users.is_empty()
            });
            assert_eq!(users, [Some(round * 10 + i), None], "once, and not twice");
        }
    }
}

#[test]
fn no_receive_posted_is_retried_and_then_fails_as_configured() {
    let world = world();
    let (mut a, mut b) = (world.end(64, 63, 64), world.end(64, 63, 64));
    let timer_ns = 40_000_000;
    connect(
        &mut a,
        &mut b,
        &ConnectOptions {
            rnr_retry: 3,
            rnr_timer_ns: timer_ns,
            ..Default::default()
        },
    );
    a.qp.post(&write_imm(&b, 0, 1, Inline(b"x")), Signal::Always, 1)
        .unwrap();
    a.qp.ring();
    a.assert_nothing("no receive");
    b.post_receives(1);
    // Only with a clock that the test moves is it certain that the timer has not expired.
    // `nic_model.rs` checks its expiry in virtual time.
    if mode() == Mode::Immediate {
        world.pass_ns(timer_ns - 1);
        a.assert_nothing("the timer has not passed");
        world.pass_ns(1);
        assert_eq!(
            a.poll_sent(),
            [(Some(1), Ok(()))],
            "retried by the sender's empty poll"
        );
    } else {
        assert_eq!(a.sent(1), [(Some(1), Ok(()))]);
    }
    assert_eq!(b.received(1), [(1, 1)]);
    a.qp.post(&write_imm(&b, 0, 2, ()), Signal::Reclaim, 2)
        .unwrap();
    a.qp.post(&write_imm(&b, 0, 3, ()), Signal::Reclaim, 3)
        .unwrap();
    a.qp.ring();
    for _ in 0..3 {
        if mode() == Mode::Immediate {
            a.assert_nothing("there are retries left");
        }
        world.pass_ns(timer_ns);
    }
    assert_eq!(
        a.sent(2),
        [
            (Some(2), Err(Syndrome::RnrRetryExceeded)),
            (Some(3), Err(Syndrome::WorkRequestFlushed))
        ]
    );
    assert_eq!(a.qp.state(), QpState::Error);
    assert_eq!(
        a.qp.post(&write_imm(&b, 0, 4, ()), Signal::Always, 4),
        Err(PostError::WrongState(QpState::Error))
    );
    // The first message found no receive once or more often. The second found none at its first
    // attempt and at each retry.
    let naks = a.device.info().rnr_naks.unwrap();
    assert!(
        naks == 5 || (naks > 5 && mode() != Mode::Immediate),
        "{naks}"
    );
    assert_eq!(b.device.info().rnr_naks, Some(0));
}

#[test]
fn an_endless_rnr_retry_waits_until_a_receive_is_posted() {
    let world = world();
    let (mut a, mut b) = world.pair();
    a.qp.post(&write_imm(&b, 0, 9, ()), Signal::Always, 1)
        .unwrap();
    a.qp.ring();
    for _ in 0..20 {
        world.pass_ns(10_000_000);
        a.assert_nothing("no receive");
    }
    b.post_receives(1);
    world.pass_ns(10_000_000);
    assert_eq!(a.sent(1), [(Some(1), Ok(()))]);
    assert_eq!(b.received(1), [(9, 0)]);
}

#[test]
fn a_lane_that_nobody_empties_stops_the_sender_and_loses_nothing() {
    let world = world();
    let (mut a, mut b) = (world.end(1024, 1000, 512), world.end(1024, 1000, 512));
    connect(&mut a, &mut b, &ConnectOptions::default());
    b.post_receives(400);
    for i in 0..400 {
        a.qp.post(&write_imm(&b, 0, i, ()), Signal::Reclaim, 0)
            .unwrap();
    }
    a.qp.ring();
    let got = world.net.collect(400, || {
        a.poll_sent();
        b.poll_received()
    });
    assert_eq!(
        got.iter().map(|g| g.0).collect::<Vec<_>>(),
        (0..400).collect::<Vec<_>>()
    );
}

/// A value that `post` returns lives as long as its operation.
fn fails_with<T>(post: impl FnOnce(&mut End, &mut End) -> T, want: Syndrome) {
    let (mut a, mut b) = world().pair();
    b.post_receives(4);
    b.mr.write(0, &[0x5a; 64]).unwrap();
    let _alive = post(&mut a, &mut b);
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: Inline(&[1; 8]),
        },
        Signal::Reclaim,
        8,
    )
    .unwrap();
    a.qp.ring();
    assert_eq!(
        a.sent(2),
        [
            (Some(7), Err(want)),
            (Some(8), Err(Syndrome::WorkRequestFlushed))
        ]
    );
    assert_eq!(
        b.bytes(0, 64),
        [0x5a; 64],
        "nothing is written by a failed or flushed operation"
    );
    b.assert_nothing("nothing may arrive");
}

#[test]
fn a_wrong_rkey_range_access_or_domain_is_a_remote_access_error() {
    let remote = Syndrome::RemoteAccess;
    let write = |a: &mut End, addr, rkey| {
        a.qp.post(
            &Write {
                addr,
                rkey,
                payload: Inline(&[1; 8]),
            },
            Signal::Reclaim,
            7,
        )
        .unwrap()
    };
    fails_with(|a, b| write(a, b.mr.addr(), b.mr.rkey() ^ 1), remote);
    fails_with(|a, b| write(a, b.mr.addr(), 0xffff_ffff), remote);
    fails_with(
        |a, b| write(a, b.mr.addr() + SIZE as u64 - 7, b.mr.rkey()),
        remote,
    );
    fails_with(|a, b| write(a, b.mr.addr() - 1, b.mr.rkey()), remote);
    fails_with(|a, b| write(a, u64::MAX - 3, b.mr.rkey()), remote);
    let read_only = |b: &End| b.pd.alloc(64, Access::REMOTE_READ).unwrap();
    fails_with(
        |a, b| posted_to(read_only(b), |mr| write(a, mr.addr(), mr.rkey())),
        remote,
    );
    let other_pd = |b: &End| b.device.alloc_pd().unwrap().alloc(64, RKEYS).unwrap();
    fails_with(
        |a, b| posted_to(other_pd(b), |mr| write(a, mr.addr(), mr.rkey())),
        remote,
    );
}

/// Posts to a region, and returns it.
fn posted_to(mr: Mr, f: impl FnOnce(&Mr)) -> Mr {
    f(&mr);
    mr
}

#[test]
fn a_wrong_local_key_range_or_access_is_a_local_protection_error() {
    let local = Syndrome::LocalProtection;
    let gather = |a: &mut End, b: &End, sge| {
        a.qp.post(&write_imm(b, 0, 0, sge), Signal::Reclaim, 7)
            .unwrap()
    };
    fails_with(
        |a, b| {
            gather(
                a,
                b,
                Sge {
                    lkey: a.mr.lkey() ^ 3,
                    ..a.mr.sge(0, 8).unwrap()
                },
            )
        },
        local,
    );
    fails_with(
        |a, b| {
            gather(
                a,
                b,
                Sge {
                    addr: a.mr.addr() + SIZE as u64 - 4,
                    len: 8,
                    lkey: a.mr.lkey(),
                },
            )
        },
        local,
    );
    let post_read = |a: &mut End, b: &End, into| {
        a.qp.post(
            &Read {
                addr: b.mr.addr(),
                rkey: b.mr.rkey(),
                into,
            },
            Signal::Reclaim,
            7,
        )
        .unwrap();
    };
    fails_with(
        |a, b| {
            let unwritable: &Mr = Box::leak(Box::new(a.pd.alloc(64, Access::empty()).unwrap()));
            post_read(a, b, unwritable.sge(0, 8).unwrap());
        },
        local,
    );
}

#[test]
fn a_deregistered_region_is_not_written() {
    fails_with(
        |a, b| {
            let mr = b.pd.alloc(64, RKEYS).unwrap();
            let (addr, rkey) = (mr.addr(), mr.rkey());
            drop(mr);
            a.qp.post(
                &Write {
                    addr,
                    rkey,
                    payload: Inline(&[1; 8]),
                },
                Signal::Reclaim,
                7,
            )
            .unwrap();
        },
        Syndrome::RemoteAccess,
    );
}

#[test]
fn a_closed_device_and_an_unconnected_peer_end_in_transport_retry_exceeded() {
    let world = world();
    let (mut a, b) = world.pair();
    let op = write_imm(&b, 0, 1, ());
    b.close();
    a.qp.post(&op, Signal::Always, 1).unwrap();
    a.qp.ring();
    // With packets, the peer's host reports the closed port, and the connection ends within a few
    // ms.
    if mode() != Mode::Packets {
        a.assert_nothing("the time-out of a dead peer has not passed");
    }
    world.pass_ns(10_000_000);
    assert_eq!(
        a.sent(1),
        [(Some(1), Err(Syndrome::TransportRetryExceeded))]
    );

    let (mut a, mut b) = (world.end(64, 63, 64), world.end(64, 63, 64));
    a.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.post_receives(1);
    a.qp.post(&write_imm(&b, 0, 5, ()), Signal::Always, 1)
        .unwrap();
    a.qp.ring();
    world.pass_ns(100_000_000);
    a.assert_nothing("a living peer that is not connected yet has the whole transport timeout");
    b.qp.connect(&a.qp.address(), &ConnectOptions::default())
        .unwrap();
    world.pass_ns(2_000_000);
    assert_eq!(a.sent(1), [(Some(1), Ok(()))]);
    assert_eq!(b.received(1), [(5, 0)]);
}

#[test]
fn nobody_but_the_connected_peer_can_send_to_a_queue_pair() {
    let world = world();
    let (a, mut b) = world.pair();
    let mut c = world.end(64, 63, 64);
    c.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.post_receives(2);
    c.qp.post(&write_imm(&b, 0, 6, ()), Signal::Always, 1)
        .unwrap();
    c.qp.ring();
    world.pass_ns(ConnectOptions::default().transport_timeout_ns());
    assert_eq!(
        c.sent(1),
        [(Some(1), Err(Syndrome::TransportRetryExceeded))]
    );
    b.assert_nothing("nothing may arrive");
    drop(a);
}

#[test]
fn a_destroyed_queue_pairs_number_names_nothing_and_its_place_is_used_again() {
    let world = world();
    let (a, mut b) = world.pair();
    let old = b.qp.address();
    let options = ConnectOptions::default();
    for round in 0..2000u32 {
        let mut c = world.end(8, 7, 8);
        b.qp =
            b.pd.create_qp(&b.send_cq, &b.recv_cq, &b.srq, &QpConfig::default())
                .unwrap();
        b.recv_cq.register(b.qp.qpn(), ());
        assert_ne!(b.qp.qpn(), old.qpn);
        b.qp.connect(&c.qp.address(), &options).unwrap();
        c.qp.connect(&b.qp.address(), &options).unwrap();
        b.post_receives(1);
        c.qp.post(&write_imm(&b, 0, round, ()), Signal::Always, 1)
            .unwrap();
        c.qp.ring();
        assert_eq!(b.received(1), [(round, 0)]);
        c.close();
    }
    let mut d = world.end(8, 7, 8);
    assert!(matches!(
        d.qp.connect(&old, &options),
        Err(ConnectError::Soft(hca::ConnectError::NoSuchQp { .. }))
    ));
    let stale = QpAddress {
        epoch: old.epoch ^ 1,
        ..old
    };
    assert!(matches!(
        d.qp.connect(&stale, &options),
        Err(ConnectError::Soft(hca::ConnectError::StaleDevice { .. }))
    ));
    let nowhere = QpAddress { lid: 999, ..old };
    assert!(matches!(
        d.qp.connect(&nowhere, &options),
        Err(ConnectError::Soft(hca::ConnectError::NoSuchDevice { .. }))
    ));
    // The user id plus 1: see `QpAddress::gid`.
    let own = old
        .gid
        .last_chunk()
        .map(|user| u32::from_le_bytes(*user) - 1)
        .unwrap();
    for elsewhere in [stale, nowhere] {
        let mut gid = [0; 16];
        gid[12..].copy_from_slice(&(own + 8).to_le_bytes());
        let refused =
            d.qp.connect(&QpAddress { gid, ..elsewhere }, &options)
                .unwrap_err()
                .to_string();
        let (theirs, own) = (format!("of user {},", own + 7), format!("of user {own}:"));
        assert!(
            refused.contains(&theirs) && refused.contains(&own),
            "{refused}"
        );
    }
    drop(a);
}

#[test]
fn objects_can_be_dropped_in_any_order() {
    for order in 0..720usize {
        let (a, mut b) = world().pair();
        b.post_receives(3);
        let End {
            mut qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
            net,
        } = a;
        net.forget(&device);
        qp.post(&write_imm(&b, 0, 1, ()), Signal::Always, 1)
            .unwrap();
        qp.ring();
        let mut parts: Vec<Box<dyn std::any::Any>> = vec![
            Box::new(qp),
            Box::new(send_cq),
            Box::new(recv_cq),
            Box::new(srq),
            Box::new(mr),
            Box::new((pd, device)),
        ];
        let mut order = order;
        for left in (1..=parts.len()).rev() {
            drop(parts.remove(order % left));
            order /= left;
            b.recv_cq.poll(8, |_, _| ());
        }
    }
}

/// Lanes are next to each other in memory. Each sender has far more messages for its receiver than
/// its lane holds.
#[test]
fn short_lanes_hold_senders_up_and_neither_lose_nor_mix_anything() {
    const MESSAGES: usize = 200;
    let world = world();
    let (mut a, mut b) = (world.end(1023, 1023, 16), world.end(1023, 1023, 16));
    let mut pairs = Vec::new();
    for lane_slots in [1, 128, 17, 16, 8] {
        let config = QpConfig {
            max_send_wr: 512,
            max_inline_data: 4,
            lane_slots,
            ..QpConfig::default()
        };
        let [mut from, mut to] = [&a, &b].map(|end| {
            end.pd
                .create_qp(&end.send_cq, &end.recv_cq, &end.srq, &config)
                .unwrap()
        });
        let addresses = [from.address(), to.address()];
        from.connect(&addresses[1], &ConnectOptions::default())
            .unwrap();
        to.connect(&addresses[0], &ConnectOptions::default())
            .unwrap();
        b.recv_cq.register(to.qpn(), ());
        pairs.push((from, to));
    }
    b.post_receives(1023);
    for (at, (from, _)) in pairs.iter_mut().enumerate() {
        for number in 0..MESSAGES {
            from.post(
                &write_imm(&b, 0, (at * MESSAGES + number) as u32, ()),
                Signal::Reclaim,
                0,
            )
            .unwrap();
        }
        from.ring();
    }
    let mut next: Vec<_> = (0..pairs.len()).map(|at| at * MESSAGES).collect();
    world.net.settle(|| {
        a.poll_sent();
        for (imm, _) in b.poll_received() {
            let next = &mut next[imm as usize / MESSAGES];
            assert_eq!(imm as usize, *next);
            *next += 1;
        }
        (0..pairs.len()).all(|at| next[at] == (at + 1) * MESSAGES)
    });
}

#[test]
fn sizes_out_of_range_are_refused_with_the_range() {
    let world = world();
    let e = world.end(8, 7, 8);
    let message = |r: Result<(), CreateError>| r.unwrap_err().to_string();
    assert!(message(e.device.create_cq(0).map(drop)).contains("1..=4194304"));
    assert!(message(e.device.create_cq(1 << 23).map(drop)).contains("1..=4194304"));
    assert!(message(e.pd.create_srq(0, 0).map(drop)).contains("1..=32767"));
    assert!(message(e.pd.create_srq(1, 99).map(drop)).contains("0..=15"));
    let qp = |max_send_wr, max_inline_data| {
        e.pd.create_qp(
            &e.send_cq,
            &e.recv_cq,
            &e.srq,
            &QpConfig {
                max_send_wr,
                max_inline_data,
                ..QpConfig::default()
            },
        )
        .map(drop)
    };
    assert!(message(qp(0, 0)).contains("1..=32768"));
    assert!(message(qp(1, 221)).contains("0..=220"));
    for lane_slots in [0, 129] {
        let config = QpConfig {
            lane_slots,
            ..QpConfig::default()
        };
        assert!(
            message(
                e.pd.create_qp(&e.send_cq, &e.recv_cq, &e.srq, &config)
                    .map(drop)
            )
            .contains("1..=128")
        );
    }
    assert!(matches!(
        e.pd.alloc(0, RKEYS),
        Err(RegisterError::Refused(hca::RegisterError::Empty))
    ));
    assert!(matches!(
        e.pd.alloc(64, Access::REMOTE_WRITE),
        Err(RegisterError::Refused(
            hca::RegisterError::RemoteWithoutLocalWrite
        ))
    ));
    assert!(matches!(
        e.pd.alloc(2 << 30, RKEYS),
        Err(RegisterError::Refused(hca::RegisterError::Memory { .. }))
    ));
    assert_eq!(
        e.mr.sge(SIZE - 1, 2),
        Err(OutOfBounds {
            offset: SIZE - 1,
            len: 2,
            region: SIZE
        })
    );
}

#[test]
fn a_completion_queue_overrun_ends_the_queue_pair_and_overwrites_nothing() {
    let world = world();
    let (mut a, mut b) = (world.end(4, 63, 64), world.end(64, 63, 64));
    connect(&mut a, &mut b, &ConnectOptions::default());
    for i in 0..10u64 {
        a.qp.post(
            &Write {
                addr: b.mr.addr(),
                rkey: b.mr.rkey(),
                payload: (),
            },
            Signal::Always,
            i,
        )
        .unwrap();
    }
    a.qp.ring();
    // All ten are complete before the first completion is consumed.
    world.net.quiet();
    assert_eq!(a.poll_sent(), [0, 1, 2, 3].map(|u| (Some(u), Ok(()))));
    a.assert_nothing("nothing more");
    assert_eq!(world.net.broken_rules(), [Rule::CompletionOverrun]);
}

#[test]
fn memory_of_another_allocator_is_reached_through_the_kernel() {
    let (mut a, mut b) = world().pair();
    b.post_receives(1);
    let mut heap = vec![0u8; 4096].into_boxed_slice();
    let at = std::ptr::NonNull::new(heap.as_mut_ptr()).unwrap();
    // SAFETY: the box outlives the region, and no reference into it is held while the device may
    // write.
    let mr = unsafe { b.pd.register(at, 4096, RKEYS) }.unwrap();
    a.qp.post(
        &WriteImm {
            addr: mr.addr() + 100,
            rkey: mr.rkey(),
            imm: 1,
            payload: Inline(b"foreign"),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.post(
        &Read {
            addr: mr.addr() + 100,
            rkey: mr.rkey(),
            into: a.mr.sge(0, 7).unwrap(),
        },
        Signal::Always,
        2,
    )
    .unwrap();
    a.qp.ring();
    assert_eq!(a.sent(2), [(Some(1), Ok(())), (Some(2), Ok(()))]);
    assert_eq!(b.received(1), [(1, 7)]);
    assert_eq!(a.bytes(0, 7), b"foreign");
    drop(mr);
    assert_eq!(&heap[100..107], b"foreign");
}

#[test]
fn a_queue_that_is_never_found_empty_does_not_starve_the_device() {
    let world = world();
    let (mut a, b) = (world.end(64, 63, 64), world.end(64, 63, 64));
    // One CQ for sends and receives.
    let mut cq = b.device.create_cq(64).unwrap();
    let mut srq = b.pd.create_srq(4, 0).unwrap();
    srq.post(&[], 0).unwrap();
    srq.ring();
    let mut qp =
        b.pd.create_qp(&cq, &cq, &srq, &QpConfig::default())
            .unwrap();
    let options = ConnectOptions::default();
    qp.connect(&a.qp.address(), &options).unwrap();
    a.qp.connect(&qp.address(), &options).unwrap();
    a.qp.post(&write_imm(&b, 0, 7, ()), Signal::Always, 0)
        .unwrap();
    a.qp.ring();
    let mut arrived = false;
    world.net.settle(|| {
        // In immediate time every poll finds this completion. In the other modes nothing can be
        // complete that early.
        qp.post(
            &Write {
                addr: a.mr.addr(),
                rkey: a.mr.rkey(),
                payload: (),
            },
            Signal::Always,
            0,
        )
        .unwrap();
        qp.ring();
        let n = cq.poll(8, |cqe| match qp.complete(&cqe) {
            Some(_) => {}
            None => arrived |= cqe.opcode() == Some(CqeOpcode::ResponderWriteImm) && cqe.imm() == 7,
        });
        assert!(n > 0 || mode() != Mode::Immediate);
        arrived
    });
}

#[test]
fn the_longest_operation_fits_the_smallest_queue_at_every_position() {
    let world = world();
    let (mut a, mut b) = (world.end(64, 63, 1), world.end(64, 63, 1));
    connect(&mut a, &mut b, &ConnectOptions::default());
    for _ in 0..200 {
        for n in [0, 220] {
            let sge = a.mr.sge(0, 100).unwrap();
            a.qp.post(
                &Write {
                    addr: b.mr.addr(),
                    rkey: b.mr.rkey(),
                    payload: (Inline(&[1; 220][..n]), sge),
                },
                Signal::Always,
                0,
            )
            .unwrap();
            a.qp.ring();
            assert_eq!(a.sent(1), [(Some(0), Ok(()))]);
        }
    }
}

#[test]
fn a_device_with_the_lid_of_a_dead_one_is_not_let_into_its_connection() {
    let world = world();
    let (a, mut b) = world.pair();
    let old = a.qp.address();
    a.close();
    let mut c = world.end(64, 63, 64);
    assert_eq!(c.qp.address().lid, old.lid, "the number is used again");
    assert_ne!(c.qp.address().qpn, old.qpn, "and this one is not");
    c.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.post_receives(1);
    c.qp.post(&write_imm(&b, 0, 1, ()), Signal::Always, 1)
        .unwrap();
    c.qp.ring();
    world.pass_ns(ConnectOptions::default().transport_timeout_ns());
    assert_eq!(
        c.sent(1),
        [(Some(1), Err(Syndrome::TransportRetryExceeded))]
    );
    b.assert_nothing("nothing may arrive");
}

#[test]
fn completions_of_others_change_nothing() {
    let (mut a, mut b) = world().pair();
    b.post_receives(1);
    a.qp.post(&write_imm(&b, 0, 1, Inline(&[0; 200])), Signal::Always, 5)
        .unwrap();
    a.qp.ring();
    let End { qp, recv_cq, .. } = &mut b;
    a.net.settle(|| {
        recv_cq.poll(1, |_, cqe| {
            assert_eq!(qp.complete(&cqe), None, "a receive is no send")
        }) == 1
    });
    a.net.settle(|| {
        a.send_cq.poll(1, |cqe| {
            assert_eq!(qp.complete(&cqe), None, "another queue pair's");
            assert_eq!(a.qp.complete(&cqe), Some(5));
        }) == 1
    });
}

#[test]
fn no_key_is_the_one_that_ends_a_list_of_buffers() {
    let world = world();
    let e = world.end(8, 7, 8);
    for _ in 0..2000 {
        let (a, b) = (e.pd.alloc(1, RKEYS).unwrap(), e.pd.alloc(1, RKEYS).unwrap());
        assert!(
            ![0, mlx5::wire::INVALID_LKEY].contains(&a.lkey())
                && ![0, mlx5::wire::INVALID_LKEY].contains(&b.lkey())
        );
    }
}

#[test]
fn a_region_can_be_deregistered_and_options_out_of_range_are_refused() {
    let world = world();
    let (mut a, b) = (world.end(8, 7, 8), world.end(8, 7, 8));
    b.pd.alloc(64, RKEYS).unwrap().deregister().unwrap();
    let refused = |options: ConnectOptions, a: &mut End| {
        a.qp.connect(&b.qp.address(), &options)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused(
            ConnectOptions {
                timeout: 0,
                ..Default::default()
            },
            &mut a
        ),
        "timeout is 0; legal is 1..=31"
    );
    assert_eq!(
        refused(
            ConnectOptions {
                rnr_retry: 8,
                ..Default::default()
            },
            &mut a
        ),
        "rnr_retry is 8; legal is 0..=7"
    );
}

#[test]
fn a_write_that_cannot_reach_its_memory_completes_nothing_at_the_peer_and_takes_no_receive() {
    let (mut a, mut b) = world().pair();
    b.post_receives(1);
    // SAFETY: a new private mapping.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let at = std::ptr::NonNull::new(page.cast::<u8>()).unwrap();
    // SAFETY: it stays mapped, without access, until the end of the process.
    let mr = unsafe { b.pd.register(at, 4096, RKEYS) }.unwrap();
    a.qp.post(
        &WriteImm {
            addr: mr.addr(),
            rkey: mr.rkey(),
            imm: 1,
            payload: Inline(b"lost"),
        },
        Signal::Reclaim,
        1,
    )
    .unwrap();
    a.qp.ring();
    assert_eq!(a.sent(1), [(Some(1), Err(Syndrome::RemoteAccess))]);
    b.assert_nothing("no completion for bytes that did not arrive");
    // The receive is still there, for a queue pair that works.
    let mut qp =
        b.pd.create_qp(&b.send_cq, &b.recv_cq, &b.srq, &QpConfig::default())
            .unwrap();
    b.recv_cq.register(qp.qpn(), ());
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    qp.post(
        &WriteImm {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            imm: 2,
            payload: Inline(b"here"),
        },
        Signal::Reclaim,
        2,
    )
    .unwrap();
    qp.ring();
    assert_eq!(b.received(1), [(2, 4)]);
}
