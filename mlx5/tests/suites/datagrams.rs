//! Unreliable datagrams on the software HCA: those that arrive, those that are lost silently, and
//! the errors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::end::{ANY, Arrival, BYTES, Received, Sent, of_cqe};
use crate::time::Net;
use mlx5::*;

const QKEY: u32 = 0x1111_2222;

/// A datagram queue pair with its queues and memory.
struct Post {
    qp: UdQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    mr: Mr,
    pd: Pd,
    device: Device,
}

impl Post {
    /// Makes a datagram queue pair that is not active yet.
    fn new(device: Device, owns_receives: bool) -> Self {
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (
            device.create_cq(256).unwrap(),
            device.create_cq(256).unwrap(),
        );
        let config = QpConfig {
            max_send_wr: 64,
            max_inline_data: 200,
            ..QpConfig::default()
        };
        let srq = (!owns_receives).then(|| pd.create_srq(63, 3).unwrap());
        let own = ReceiveSource::Own {
            depth: 64,
            max_sge: 3,
        };
        let qp = pd
            .create_ud_qp(
                &send_cq,
                &recv_cq,
                srq.as_ref().map_or(own, ReceiveSource::Shared),
                &config,
            )
            .unwrap();
        let mr = pd.alloc(BYTES, ANY).unwrap();
        Self {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
        }
    }

    fn active(net: &Net, owns_receives: bool) -> Self {
        let mut post = Self::new(net.device(), owns_receives);
        post.qp.activate(QKEY).unwrap();
        post
    }

    /// The destination by which `other` is reached from here: by its LID, on RoCE by its GID.
    fn to(&self, other: &Self) -> Destination {
        self.qp.destination_of(&other.qp.address(), QKEY).unwrap()
    }

    fn receive(&mut self, buffers: &[Sge], user: u64) {
        match &mut self.srq {
            Some(srq) => {
                srq.post(buffers, user).unwrap();
                srq.ring();
            }
            None => {
                self.qp.post_receive(buffers, user).unwrap();
                self.qp.ring_receives();
            }
        }
    }

    fn post<O: UdOperation>(&mut self, op: &O, user: u64) {
        self.qp.post(op, Signal::Always, user).unwrap();
        self.qp.ring();
    }

    fn sent(&mut self) -> Vec<Sent> {
        let mut got = vec![];
        let qp = &mut self.qp;
        self.send_cq.poll(1000, |cqe| {
            got.push((
                qp.complete(&cqe).unwrap(),
                cqe.result().map(|()| cqe.byte_count()),
            ))
        });
        got
    }

    /// Returns the completed receives with their senders.
    fn received(&mut self) -> Vec<(Received, u32)> {
        let mut got = vec![];
        let has_grh = self.to(self).vector().has_grh();
        let Self {
            qp, srq, recv_cq, ..
        } = self;
        recv_cq.poll(1000, |cqe| {
            assert_eq!(
                (cqe.qpn(), cqe.has_grh()),
                (qp.qpn(), has_grh && cqe.result().is_ok())
            );
            let user = match srq {
                Some(srq) => srq.complete_receive(&cqe),
                None => qp.complete_receive(&cqe),
            };
            got.push((of_cqe(&cqe, user.unwrap()), cqe.source_qpn()));
        });
        got
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mr.read(offset, &mut bytes).unwrap();
        bytes
    }
}

fn arrival(user: u64, imm: Option<u32>, payload: usize) -> Received {
    let opcode = if imm.is_some() {
        CqeOpcode::ResponderSendImm
    } else {
        CqeOpcode::ResponderSend
    };
    Ok(Arrival {
        user,
        opcode,
        imm: imm.unwrap_or(0),
        byte_count: (GRH_BYTES + payload) as u32,
        is_solicited: false,
    })
}

#[test]
fn a_datagram_arrives_behind_40_bytes_with_its_sender() {
    for owns_receives in [true, false] {
        let net = Net::new();
        let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, owns_receives));
        assert_ne!(a.qp.qpn(), 0);
        let data: Vec<u8> = (0..4096u32).map(|i| (i * 7) as u8).collect();
        a.mr.write(0, &data).unwrap();
        b.mr.write(0, &[0x5a; BYTES]).unwrap();
        for i in 0..5 {
            let buffer = b.mr.sge(i * 8192, 4096 + GRH_BYTES as u32).unwrap();
            b.receive(&[buffer], i as u64);
        }
        let to = &a.to(&b);
        a.post(
            &UdSend {
                to,
                payload: Inline(&data[..200]),
            },
            0,
        );
        a.post(
            &UdSendImm {
                to,
                imm: 0xdead_beef,
                payload: a.mr.sge(0, 4096).unwrap(),
            },
            1,
        );
        a.post(
            &UdSend {
                to,
                payload: (Inline(&data[..100]), a.mr.sge(100, 900).unwrap()),
            },
            2,
        );
        a.post(
            &UdSendImm {
                to,
                imm: 7,
                payload: (),
            },
            3,
        );
        a.post(&UdSend { to, payload: () }, 4);
        let from = a.qp.qpn();
        let mut want = [
            arrival(0, None, 200),
            arrival(1, Some(0xdead_beef), 4096),
            arrival(2, None, 1000),
        ]
        .to_vec();
        want.extend([arrival(3, Some(7), 0), arrival(4, None, 0)]);
        assert_eq!(
            net.collect(5, || b.received()),
            want.into_iter().map(|w| (w, from)).collect::<Vec<_>>()
        );
        assert_eq!(
            net.collect(5, || a.sent()),
            (0..5).map(|user| (user, Ok(0))).collect::<Vec<_>>()
        );
        for (i, len) in [200, 4096, 1000, 0, 0].into_iter().enumerate() {
            assert_eq!(b.bytes(i * 8192 + GRH_BYTES, len), data[..len]);
            assert_eq!(
                b.bytes(i * 8192 + GRH_BYTES + len, 40),
                [0x5a; 40],
                "nothing behind it"
            );
        }
    }
}

#[test]
fn a_solicited_datagram_says_so_to_its_receiver() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    for user in 0..2 {
        let buffer = b.mr.sge(user as usize * 64, 64).unwrap();
        b.receive(&[buffer], user);
    }
    let to = &a.to(&b);
    a.post(&UdSend { to, payload: () }, 0);
    a.qp.post(&UdSend { to, payload: () }, Signal::Always.solicited(), 1)
        .unwrap();
    a.qp.ring();
    let got = net.collect(2, || b.received());
    assert_eq!(
        got.iter()
            .map(|(arrival, _)| arrival.unwrap().is_solicited)
            .collect::<Vec<_>>(),
        [false, true]
    );
}

#[test]
fn the_40_bytes_may_lie_across_the_first_buffers() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    let buffers = [
        b.mr.sge(0, 16).unwrap(),
        b.mr.sge(100, 30).unwrap(),
        b.mr.sge(200, 50).unwrap(),
    ];
    b.receive(&buffers, 1);
    a.post(
        &UdSend {
            to: &a.to(&b),
            payload: Inline(b"sixand the rest"),
        },
        0,
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(1, None, 15), a.qp.qpn())]
    );
    assert_eq!(
        (b.bytes(124, 6), b.bytes(200, 9)),
        (b"sixand".to_vec(), b" the rest".to_vec())
    );
    // Without a GRH nothing is written to the 40 bytes before a payload. On RoCE they end with the
    // IP header.
    let has_grh = b.to(&b).vector().has_grh();
    assert!(has_grh || (b.bytes(0, 16), b.bytes(100, 24)) == (vec![0; 16], vec![0; 24]));
}

#[test]
fn what_nobody_takes_is_lost_without_a_word() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    let (qpn, local) = (b.qp.qpn(), a.to(&b).vector());
    let mut asleep = Post::new(b.device.clone(), true);
    let mut failed = Post::active(&net, true);
    failed.qp.fail();
    let gone = Post::active(&net, true);
    let to_gone = a.to(&gone);
    net.forget(&gone.device);
    drop(gone);
    // RoCE has no LIDs.
    let elsewhere =
        (!local.has_grh()).then(|| Destination::new(AddressVector::local(777, 0), qpn, QKEY));
    let lost = [
        Destination::new(local, qpn, QKEY ^ 1),
        Destination::new(local, qpn ^ 1, QKEY),
        Destination::new(local, 0xff_ffff, QKEY),
        Destination::new(local, asleep.qp.qpn(), 0),
        a.to(&failed),
        to_gone,
    ];
    // First without a receive, then with one that none of the datagrams may take.
    a.post(
        &UdSend {
            to: &a.to(&b),
            payload: Inline(b"too early"),
        },
        0,
    );
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    net.quiet();
    assert_eq!(b.received(), []);
    let buffer = b.mr.sge(0, 100).unwrap();
    b.receive(&[buffer], 9);
    for (user, to) in lost.iter().chain(&elsewhere).enumerate() {
        a.post(
            &UdSend {
                to,
                payload: Inline(b"lost"),
            },
            user as u64,
        );
        assert_eq!(
            net.collect(1, || a.sent()),
            [(user as u64, Ok(0))],
            "complete as soon as it has left"
        );
    }
    net.quiet();
    assert_eq!(
        (b.received(), asleep.received(), failed.received()),
        (vec![], vec![], vec![])
    );
    a.post(
        &UdSend {
            to: &a.to(&b),
            payload: Inline(b"here"),
        },
        1,
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(9, None, 4), a.qp.qpn())]
    );
    assert_eq!(b.bytes(GRH_BYTES, 4), b"here");
    assert_eq!([a.qp.state(), b.qp.state()], [QpState::ReadyToSend; 2]);
}

#[test]
fn what_was_sent_before_the_sender_closed_its_device_arrives() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    for user in 0..2 {
        let buffer = b.mr.sge(user as usize * 64, 64).unwrap();
        b.receive(&[buffer], user);
    }
    let to = a.to(&b);
    a.post(
        &UdSend {
            to: &to,
            payload: Inline(b"known"),
        },
        0,
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(0, None, 5), a.qp.qpn())]
    );
    assert_eq!(net.collect(1, || a.sent()).len(), 1);
    let qpn = a.qp.qpn();
    a.post(
        &UdSend {
            to: &to,
            payload: Inline(b"last"),
        },
        1,
    );
    assert_eq!(net.collect(1, || a.sent()).len(), 1);
    net.forget(&a.device);
    drop(a);
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(1, None, 4), qpn)]
    );
    assert_eq!(b.bytes(64 + GRH_BYTES, 4), b"last");
}

#[test]
fn a_burst_that_finds_no_room_is_lost_in_part_and_never_stops_the_sender() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    for i in 0..64 {
        let buffer = b.mr.sge(i * 64, 64).unwrap();
        b.receive(&[buffer], i as u64);
    }
    let to = &a.to(&b);
    for imm in 0..60u32 {
        a.qp.post(
            &UdSendImm {
                to,
                imm,
                payload: (),
            },
            Signal::Always,
            imm.into(),
        )
        .unwrap();
    }
    a.qp.ring();
    assert_eq!(net.collect(60, || a.sent()).len(), 60);
    net.quiet();
    let got: Vec<u32> = b.received().iter().map(|(r, _)| r.unwrap().imm).collect();
    assert!(!got.is_empty() && got.is_sorted(), "{got:?}");
}

#[test]
fn a_datagram_that_does_not_fit_the_receive_is_a_local_length_error_there_only() {
    // The payload, and 40 bytes that need room even without a payload.
    for (room, payload) in [(GRH_BYTES + 9, 10), (GRH_BYTES - 1, 0), (0, 0)] {
        for owns_receives in [true, false] {
            let net = Net::new();
            let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, owns_receives));
            let buffer = b.mr.sge(0, room as u32).unwrap();
            b.receive(&[buffer], 1);
            b.receive(&[buffer], 2);
            a.post(
                &UdSend {
                    to: &a.to(&b),
                    payload: Inline(&[7; 10][..payload]),
                },
                0,
            );
            assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
            let failed = net.collect(if owns_receives { 2 } else { 1 }, || b.received());
            let (user, error) = failed[0].0.unwrap_err();
            assert_eq!((user, error.syndrome), (1, Syndrome::LocalLength));
            assert_eq!(
                error.vendor_text(),
                crate::time::detail("the buffers of the receive end before the message")
            );
            if owns_receives {
                let (user, error) = failed[1].0.unwrap_err();
                assert_eq!((user, error.syndrome), (2, Syndrome::WorkRequestFlushed));
                assert_eq!(b.qp.state(), QpState::Error);
            }
            assert_eq!(a.qp.state(), QpState::ReadyToSend);
            a.post(
                &UdSend {
                    to: &a.to(&b),
                    payload: (),
                },
                1,
            );
            assert_eq!(net.collect(1, || a.sent()), [(1, Ok(0))]);
            net.quiet();
            assert_eq!(b.received(), [], "it does not receive any more");
        }
    }
}

#[test]
fn a_datagram_longer_than_the_mtu_is_a_local_length_error_of_its_sender() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    let buffer = b.mr.sge(0, 8192).unwrap();
    b.receive(&[buffer], 1);
    let to = &a.to(&b);
    a.qp.post(
        &UdSend {
            to,
            payload: a.mr.sge(0, MAX_DATAGRAM_BYTES as u32 + 1).unwrap(),
        },
        Signal::Reclaim,
        1,
    )
    .unwrap();
    a.qp.post(&UdSend { to, payload: () }, Signal::Reclaim, 2)
        .unwrap();
    a.qp.ring();
    let sent = net.collect(2, || a.sent());
    let [first, second] = [0, 1].map(|i| sent[i].1.unwrap_err());
    assert_eq!(
        (first.syndrome, first.vendor_text()),
        (
            Syndrome::LocalLength,
            crate::time::detail("a datagram longer than 4096 bytes")
        )
    );
    assert_eq!(second.syndrome, Syndrome::WorkRequestFlushed);
    assert_eq!(
        a.qp.post(&UdSend { to, payload: () }, Signal::Always, 3),
        Err(PostError::WrongState(QpState::Error))
    );
    net.quiet();
    assert_eq!(b.received(), []);
}

#[test]
fn a_wrong_local_key_of_a_datagram_is_a_local_protection_error() {
    let net = Net::new();
    let (mut a, b) = (Post::active(&net, true), Post::active(&net, true));
    let payload = Sge {
        lkey: b.mr.lkey() ^ 0x5500,
        ..a.mr.sge(0, 8).unwrap()
    };
    a.post(
        &UdSend {
            to: &a.to(&b),
            payload,
        },
        1,
    );
    assert_eq!(
        net.collect(1, || a.sent())[0].1.unwrap_err().syndrome,
        Syndrome::LocalProtection
    );
}

#[test]
fn a_controlled_qkey_stands_for_the_senders_own() {
    let net = Net::new();
    let (mut a, mut b) = (Post::active(&net, true), Post::active(&net, true));
    let mut other = Post::new(net.device(), true);
    other.qp.activate(QKEY ^ 1).unwrap();
    let buffer = b.mr.sge(0, 100).unwrap();
    b.receive(&[buffer], 5);
    let to = Destination::new(a.to(&b).vector(), b.qp.qpn(), 1 << 31 | 99);
    other.post(
        &UdSend {
            to: &to,
            payload: (),
        },
        0,
    );
    assert_eq!(net.collect(1, || other.sent()), [(0, Ok(0))]);
    net.quiet();
    assert_eq!(b.received(), []);
    a.post(
        &UdSend {
            to: &to,
            payload: (),
        },
        0,
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(5, None, 0), a.qp.qpn())]
    );
}

#[test]
fn a_queue_pair_may_send_to_itself_and_to_others_of_its_device() {
    let net = Net::new();
    let mut a = Post::active(&net, true);
    let mut b = Post::new(a.device.clone(), false);
    b.qp.activate(QKEY).unwrap();
    for post in [&mut a, &mut b] {
        let buffer = post.mr.sge(0, 100).unwrap();
        post.receive(&[buffer], 1);
    }
    let (to_a, to_b) = (a.to(&a), a.to(&b));
    a.post(
        &UdSend {
            to: &to_a,
            payload: Inline(b"self"),
        },
        0,
    );
    a.post(
        &UdSend {
            to: &to_b,
            payload: Inline(b"other"),
        },
        1,
    );
    assert_eq!(
        net.collect(1, || a.received()),
        [(arrival(1, None, 4), a.qp.qpn())]
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(1, None, 5), a.qp.qpn())]
    );
    assert_eq!(
        (a.bytes(40, 4), b.bytes(40, 5)),
        (b"self".to_vec(), b"other".to_vec())
    );
}

#[test]
fn a_queue_pair_that_fails_flushes_its_receives_and_refuses_posts() {
    let net = Net::new();
    let mut a = Post::new(net.device(), true);
    let to = a.to(&a);
    assert_eq!(
        a.qp.post(
            &UdSend {
                to: &to,
                payload: ()
            },
            Signal::Always,
            0
        ),
        Err(PostError::WrongState(QpState::Reset))
    );
    assert_eq!(a.qp.post_receive(&[], 0), Err(PostReceiveError::WrongState));
    a.qp.activate(QKEY).unwrap();
    let again = a.qp.activate(QKEY);
    assert!(
        matches!(
            again,
            Err(ConnectError::WrongState {
                from: QpState::ReadyToSend,
                needs: QpState::Reset
            })
        ),
        "{again:?}"
    );
    for user in 0..3 {
        a.receive(&[], user);
    }
    a.qp.fail();
    let flushed: Vec<_> = net
        .collect(3, || a.received())
        .iter()
        .map(|(r, _)| r.unwrap_err())
        .collect();
    assert_eq!(
        flushed
            .iter()
            .map(|(user, error)| (*user, error.syndrome))
            .collect::<Vec<_>>(),
        [0, 1, 2].map(|u| (u, Syndrome::WorkRequestFlushed))
    );
    assert_eq!(
        a.qp.post(
            &UdSend {
                to: &to,
                payload: ()
            },
            Signal::Always,
            0
        ),
        Err(PostError::WrongState(QpState::Error))
    );
}

/// A device with the LID of a dead one has neither its queue pair numbers nor its keys.
#[test]
fn what_is_for_a_device_that_is_gone_is_not_for_the_next_one_with_its_lid() {
    let net = Net::new();
    let mut a = Post::active(&net, true);
    let mut b = Post::active(&net, true);
    let to = a.to(&b);
    let key = b.mr.rkey();
    let lid = b.device.info().name;
    net.forget(&b.device);
    drop(b);
    b = Post::active(&net, true);
    assert_eq!(b.device.info().name, lid);
    assert_ne!(b.mr.rkey(), key);
    let buffer = b.mr.sge(0, 256).unwrap();
    b.receive(&[buffer], 0);
    a.post(
        &UdSend {
            to: &to,
            payload: Inline(b"for the dead"),
        },
        0,
    );
    assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
    // The next datagram, to the new device, arrives.
    a.post(
        &UdSend {
            to: &a.to(&b),
            payload: (),
        },
        1,
    );
    assert_eq!(
        net.collect(1, || b.received()),
        [(arrival(0, None, 0), a.qp.qpn())]
    );
}

/// Maximum number of datagrams of a sender in flight, so that all senders together never find the
/// receiver without room.
const AHEAD: u64 = 12;

/// Starts a sender in a thread of its own: `count` numbered datagrams of growing length, as fast as
/// `taken` allows.
fn send_numbered(
    options: SoftOptions,
    to: Destination,
    id: u32,
    count: u64,
    taken: &AtomicU64,
    own: &mpsc::Sender<(u32, u32)>,
) {
    let mut a = Post::new(Device::open(Net::spec(&options)).unwrap(), true);
    a.qp.activate(0).unwrap();
    own.send((id, a.qp.qpn())).unwrap();
    for n in 0..count {
        while n >= taken.load(Ordering::Acquire) + AHEAD {
            a.sent();
            crate::end::pause();
        }
        let payload: Vec<u8> = (0..n % 190).map(|i| (i + n) as u8).collect();
        a.post(
            &UdSendImm {
                to: &to,
                imm: id << 24 | n as u32,
                payload: Inline(&payload),
            },
            n,
        );
        while a.sent().is_empty() {
            crate::end::pause();
        }
    }
    // The device, whose memory holds the last datagrams, stays open until they are taken.
    while taken.load(Ordering::Acquire) < count {
        crate::end::pause();
    }
    assert_eq!(
        a.device
            .soft()
            .map_or_else(Vec::new, |soft| soft.take_violations()),
        []
    );
}

#[test]
fn several_senders_of_one_queue_pair_are_told_apart_and_each_is_in_order() {
    copyrpc_testing::limits::watchdog(Duration::from_secs(120));
    let net = Net::new();
    let mut options = net.options();
    if crate::time::mode() == crate::time::Mode::Immediate {
        options.clock = Clock::System;
    }
    let (senders, count) = (4u32, 3000u64);
    let mut b = Post::new(net.open(&options), true);
    b.qp.activate(QKEY).unwrap();
    for i in 0..64 {
        let buffer = b.mr.sge(i * 256, 256).unwrap();
        b.receive(&[buffer], i as u64);
    }
    let taken: Vec<_> = (0..senders).map(|_| Arc::<AtomicU64>::default()).collect();
    let (own_tx, own_rx) = mpsc::channel();
    std::thread::scope(|scope| {
        for (id, taken) in (0..).zip(&taken) {
            let options = options.clone();
            let to = b.to(&b);
            let own = own_tx.clone();
            scope.spawn(move || send_numbered(options, to, id, count, taken, &own));
        }
        let mut qpns = vec![0; senders as usize];
        for _ in 0..senders {
            let (id, qpn) = own_rx.recv().unwrap();
            qpns[id as usize] = qpn;
        }
        while taken
            .iter()
            .any(|taken| taken.load(Ordering::Relaxed) < count)
        {
            crate::end::pause();
            for (received, source_qpn) in b.received() {
                let arrival = received.unwrap();
                let (id, n) = (
                    (arrival.imm >> 24) as usize,
                    u64::from(arrival.imm & 0xff_ffff),
                );
                assert_eq!(
                    (n, source_qpn),
                    (taken[id].load(Ordering::Relaxed), qpns[id]),
                    "sender {id}"
                );
                assert_eq!(u64::from(arrival.byte_count), GRH_BYTES as u64 + n % 190);
                let payload: Vec<u8> = (0..n % 190).map(|i| (i + n) as u8).collect();
                assert_eq!(
                    b.bytes(arrival.user as usize * 256 + GRH_BYTES, payload.len()),
                    payload
                );
                let buffer = b.mr.sge(arrival.user as usize * 256, 256).unwrap();
                b.receive(&[buffer], arrival.user);
                taken[id].store(n + 1, Ordering::Release);
            }
        }
    });
    drop(b.pd);
}
