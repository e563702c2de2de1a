//! The data path allocates nothing after set-up: neither posting, ringing, polling and arming, nor
//! the software HCA below it. That also holds for operations that wait and are tried again.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::*;

#[path = "support/counting.rs"]
mod counting;

use counting::calls_of;

/// Calls `round` once to warm up, then 999 times. Returns the number of allocator calls of these
/// 999 rounds.
fn calls_of_rounds(mut round: impl FnMut(u32)) -> u64 {
    round(0);
    calls_of(|| (1..1000).for_each(round))
}

/// The form of an end's completion queues and receives.
#[derive(Clone, Copy, Debug)]
struct Shape {
    owns_receives: bool,
    scatter_to_cqe: bool,
    cq: CqConfig,
}

const CQ: CqConfig = CqConfig {
    entries: 64,
    cqe_bytes: 64,
    compression: false,
    comp_vector: 0,
};
const PLAIN: Shape = Shape {
    owns_receives: false,
    scatter_to_cqe: false,
    cq: CQ,
};

fn device(fabric: &LocalFabric, clock: &Arc<AtomicU64>) -> Device {
    let clock = Clock::Manual(Arc::clone(clock));
    let options = SoftOptions {
        fabric: FabricSpec::Local(fabric.clone()),
        arena_bytes: 1 << 20,
        clock,
        timing: Timing::Immediate,
        strict: false,
        ..Default::default()
    };
    Device::open(DeviceSpec::Soft(options)).unwrap()
}

const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<u32>,
    /// The shared receive queue. `None`: the queue pair has a receive queue of its own.
    srq: Option<Srq>,
    mr: Mr,
}

impl End {
    fn new(device: &Device, shape: Shape) -> Self {
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(shape.cq).unwrap();
        let mut recv_cq = device.create_mono_cq(shape.cq).unwrap();
        let srq = (!shape.owns_receives).then(|| pd.create_srq(15, 2).unwrap());
        let own = ReceiveSource::Own {
            depth: 16,
            max_sge: 2,
        };
        let config = QpConfig {
            max_send_wr: 64,
            max_inline_data: 220,
            scatter_to_cqe: shape.scatter_to_cqe,
            ..QpConfig::default()
        };
        let qp = pd
            .create_qp(
                &send_cq,
                &recv_cq,
                srq.as_ref().map_or(own, ReceiveSource::Shared),
                &config,
            )
            .unwrap();
        recv_cq.register(qp.qpn(), 7);
        let mr = pd.alloc(16384, ACCESS).unwrap();
        Self {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
        }
    }

    /// Posts receives of two buffers, with 2 KiB together.
    fn receives(&mut self, n: usize) {
        for i in 0..n {
            let buffers = [
                self.mr.sge(8192 + i % 4 * 2048, 128).unwrap(),
                self.mr.sge(8320 + i % 4 * 2048, 1920).unwrap(),
            ];
            match &mut self.srq {
                Some(srq) => srq.post(&buffers, i as u64).unwrap(),
                None => self.qp.post_receive(&buffers, i as u64).unwrap(),
            }
        }
        match &mut self.srq {
            Some(srq) => srq.ring(),
            None => self.qp.ring_receives(),
        }
    }

    /// Returns the number of completed operations.
    fn sent(&mut self) -> u64 {
        let (qp, mut sent) = (&mut self.qp, 0);
        self.send_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            sent += qp.complete_each(&cqe, |_| ()) as u64;
        });
        sent
    }

    /// Returns the number of arrived messages, and the number of messages whose bytes are in the
    /// CQE.
    fn received(&mut self) -> (u64, u64) {
        let Self {
            qp, srq, recv_cq, ..
        } = self;
        let (mut received, mut in_cqe) = (0, 0);
        recv_cq.poll(64, |value, cqe| {
            cqe.result().unwrap();
            assert_eq!(value, Some(&7));
            let user = match srq {
                Some(srq) => srq.complete_receive(&cqe),
                None => qp.complete_receive(&cqe),
            };
            assert!(user.is_some());
            received += 1;
            in_cqe += u64::from(cqe.inline_data().is_some());
        });
        (received, in_cqe)
    }
}

fn pair(clock: &Arc<AtomicU64>, shape: Shape) -> (End, End) {
    let fabric = LocalFabric::new();
    let (mut a, mut b) = (
        End::new(&device(&fabric, clock), shape),
        End::new(&device(&fabric, clock), shape),
    );
    a.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.qp.connect(&a.qp.address(), &ConnectOptions::default())
        .unwrap();
    (a, b)
}

#[test]
fn messages_reads_receives_and_retries_allocate_nothing() {
    let clock = Arc::<AtomicU64>::default();
    let (mut a, mut b) = pair(&clock, PLAIN);
    let data = [0x5a; 220];
    let mut sent = 0u64;
    let mut received = 0u32;
    let mut waited = 0u32;
    let mut posted = 0u64;
    let calls = calls_of(|| {
        for round in 0..2000u32 {
            let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
            // In every other round the receives come too late, and the messages are tried again.
            let late = round % 2 == 1;
            let receives = |srq: &mut Srq| {
                (0..4).for_each(|i| srq.post(&[], i).unwrap());
                srq.ring();
            };
            if !late {
                receives(b.srq.as_mut().unwrap());
            }
            let sge = a.mr.sge(0, 1024).unwrap();
            let mut post = |qp: &mut RcQp, kind| {
                posted += 1;
                match kind {
                    0 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: round,
                            payload: Inline(&data[..28]),
                        },
                        Signal::Reclaim,
                        posted,
                    ),
                    1 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: round,
                            payload: sge,
                        },
                        Signal::Reclaim,
                        posted,
                    ),
                    2 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: round,
                            payload: (Inline(&data[..204]), sge),
                        },
                        Signal::Reclaim,
                        posted,
                    ),
                    3 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: round,
                            payload: (),
                        },
                        Signal::Reclaim,
                        posted,
                    ),
                    4 => qp.post(
                        &Write {
                            addr,
                            rkey,
                            payload: sge,
                        },
                        Signal::Reclaim,
                        posted,
                    ),
                    _ => qp.post(
                        &Read {
                            addr,
                            rkey,
                            into: a.mr.sge(4096, 512).unwrap(),
                        },
                        Signal::Always,
                        posted,
                    ),
                }
                .unwrap();
            };
            match round % 3 {
                0 => (0..6).for_each(|kind| {
                    post(&mut a.qp, kind);
                    a.qp.ring();
                }),
                1 => {
                    (0..6).for_each(|kind| post(&mut a.qp, kind));
                    a.qp.ring_doorbell_bf();
                }
                _ => {
                    (1..4).for_each(|kind| post(&mut a.qp, kind));
                    a.qp.ring_doorbell();
                    let mut batch = a.qp.blueflame_batch();
                    batch
                        .post(
                            &WriteImm {
                                addr,
                                rkey,
                                imm: round,
                                payload: Inline(&data[..28]),
                            },
                            Signal::Reclaim,
                            0,
                        )
                        .unwrap();
                    batch
                        .post(
                            &Read {
                                addr,
                                rkey,
                                into: a.mr.sge(4096, 512).unwrap(),
                            },
                            Signal::Always,
                            0,
                        )
                        .unwrap();
                    batch.finish();
                    posted += 2;
                }
            }
            if late {
                assert_eq!(b.recv_cq.poll(16, |_, _| ()), 0);
                receives(b.srq.as_mut().unwrap());
                assert_eq!(a.send_cq.poll(16, |_| ()), 0);
                waited += 1;
                clock.fetch_add(ConnectOptions::default().rnr_timer_ns, Ordering::Relaxed);
                let qp = &mut a.qp;
                a.send_cq
                    .poll(16, |cqe| sent += qp.complete_each(&cqe, |_| ()) as u64);
            }
            let (qp, srq) = (&mut a.qp, b.srq.as_mut().unwrap());
            a.send_cq
                .poll(16, |cqe| sent += qp.complete_each(&cqe, |_| ()) as u64);
            b.recv_cq.poll(16, |value, cqe| {
                assert_eq!((value, cqe.imm()), (Some(&7), round));
                srq.complete_receive(&cqe).unwrap();
                received += 1;
            });
        }
    });
    assert_eq!(
        (sent, received, waited),
        (posted, 8000, 1000),
        "everything arrived"
    );
    assert_eq!(calls, 0, "allocator calls");
    assert!(
        calls_of(|| drop(std::hint::black_box(Box::new(1)))) == 2,
        "the counter counts"
    );
}

/// Numbers of operations and messages of [`every_operation`].
const OPERATIONS: u64 = 14;
const MESSAGES: u64 = 11;
/// Number of these messages with at most 32 bytes.
const SHORT: u64 = 6;

/// Posts sends of every kind, some of them the same in a row, a WRITE with immediate and atomics.
/// Rings for them in one of three ways.
fn every_operation(a: &mut End, b: &End, round: u32) {
    let addr = b.mr.addr();
    let rkey = b.mr.rkey();
    let data = [0x5a; 220];
    let (sge, into) = (a.mr.sge(0, 1024).unwrap(), a.mr.sge(4096, 8).unwrap());
    let qp = &mut a.qp;
    qp.post(
        &Send {
            payload: Inline(&data),
        },
        Signal::Reclaim,
        0,
    )
    .unwrap();
    qp.post(
        &SendImm {
            imm: round,
            payload: sge,
        },
        Signal::Reclaim.solicited(),
        1,
    )
    .unwrap();
    qp.post(
        &Send {
            payload: (Inline(&data[..204]), sge),
        },
        Signal::Reclaim,
        2,
    )
    .unwrap();
    qp.post(
        &SendImm {
            imm: round,
            payload: (),
        },
        Signal::Reclaim,
        3,
    )
    .unwrap();
    qp.post(
        &CompareSwap {
            addr,
            rkey,
            compare: 0,
            swap: 1,
            into,
        },
        Signal::Reclaim,
        4,
    )
    .unwrap();
    qp.post(
        &FetchAdd {
            addr,
            rkey,
            add: 1,
            into,
        },
        Signal::Always,
        5,
    )
    .unwrap();
    for i in 0..4 {
        qp.post(
            &Send {
                payload: Inline(&data[..28]),
            },
            Signal::Reclaim.fence(),
            6 + i,
        )
        .unwrap();
        if round % 3 == 0 {
            qp.ring();
        }
    }
    qp.ring_doorbell_bf();
    let mut batch = qp.blueflame_batch();
    batch
        .post(
            &Send {
                payload: Inline(&data[..1]),
            },
            Signal::Reclaim,
            10,
        )
        .unwrap();
    batch
        .post(
            &SendImm {
                imm: 0,
                payload: Inline(&data[..32]),
            },
            Signal::Reclaim,
            11,
        )
        .unwrap();
    batch
        .post(
            &WriteImm {
                addr,
                rkey,
                imm: round,
                payload: Inline(&data[..28]),
            },
            Signal::Reclaim,
            12,
        )
        .unwrap();
    batch
        .post(
            &FetchAdd {
                addr,
                rkey,
                add: 1,
                into,
            },
            Signal::Always,
            13,
        )
        .unwrap();
    batch.finish();
}

#[test]
fn sends_and_atomics_allocate_nothing_whatever_the_queues_are() {
    let large = CqConfig {
        cqe_bytes: 128,
        ..CQ
    };
    let shapes = [
        PLAIN,
        Shape {
            owns_receives: true,
            ..PLAIN
        },
        Shape {
            cq: CqConfig {
                compression: true,
                ..CQ
            },
            ..PLAIN
        },
        Shape {
            cq: CqConfig {
                compression: true,
                ..large
            },
            owns_receives: true,
            ..PLAIN
        },
        Shape { cq: large, ..PLAIN },
        Shape {
            scatter_to_cqe: true,
            ..PLAIN
        },
        Shape {
            cq: large,
            scatter_to_cqe: true,
            owns_receives: true,
        },
    ];
    for shape in shapes {
        let clock = Arc::<AtomicU64>::default();
        let (mut a, mut b) = pair(&clock, shape);
        let mut sent = 0;
        let mut received = 0;
        let mut in_cqe = 0;
        let calls = calls_of_rounds(|round| {
            a.send_cq.arm(false);
            b.recv_cq.arm(round % 2 == 0);
            // In every other round the receives come too late, and the messages are tried again.
            let late = round % 2 == 1;
            if !late {
                b.receives(MESSAGES as usize);
            }
            every_operation(&mut a, &b, round);
            if late {
                assert_eq!(b.received(), (0, 0));
                b.receives(MESSAGES as usize);
                clock.fetch_add(ConnectOptions::default().rnr_timer_ns, Ordering::Relaxed);
            }
            sent += a.sent();
            sent += a.sent();
            let (all, short) = b.received();
            received += all;
            in_cqe += short;
            if round % 50 == 0 {
                // The queue pairs are idle for so long that the device stops polling their lanes.
                (0..200).for_each(|_| {
                    clock.fetch_add(100_000, Ordering::Relaxed);
                    assert_eq!((a.sent(), b.received()), (0, (0, 0)));
                });
            }
        });
        assert_eq!(
            (sent, received),
            (1000 * OPERATIONS, 1000 * MESSAGES),
            "everything arrived: {shape:?}"
        );
        assert_eq!(
            in_cqe,
            if shape.scatter_to_cqe {
                1000 * SHORT
            } else {
                0
            },
            "{shape:?}"
        );
        assert_eq!(calls, 0, "allocator calls: {shape:?}");
    }
}

/// A datagram queue pair.
struct Post {
    qp: UdQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    mr: Mr,
}

impl Post {
    fn new(device: &Device, owns_receives: bool) -> Self {
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (device.create_cq(64).unwrap(), device.create_cq(64).unwrap());
        let srq = (!owns_receives).then(|| pd.create_srq(63, 1).unwrap());
        let own = ReceiveSource::Own {
            depth: 64,
            max_sge: 1,
        };
        let config = QpConfig {
            max_send_wr: 64,
            max_inline_data: 220,
            ..QpConfig::default()
        };
        let mut qp = pd
            .create_ud_qp(
                &send_cq,
                &recv_cq,
                srq.as_ref().map_or(own, ReceiveSource::Shared),
                &config,
            )
            .unwrap();
        qp.activate(1).unwrap();
        let mr = pd.alloc(8192, ACCESS).unwrap();
        Self {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
        }
    }

    fn receives(&mut self, n: usize) {
        let buffer = [self.mr.sge(4096, 2048).unwrap()];
        match &mut self.srq {
            Some(srq) => {
                (0..n).for_each(|_| srq.post(&buffer, 0).unwrap());
                srq.ring();
            }
            None => {
                (0..n).for_each(|_| self.qp.post_receive(&buffer, 0).unwrap());
                self.qp.ring_receives();
            }
        }
    }

    /// Sends four datagrams and takes their completions.
    fn send(&mut self, to: &Destination, imm: u32) -> usize {
        let (data, sge) = ([0x5a; 220], self.mr.sge(0, 1024).unwrap());
        let qp = &mut self.qp;
        qp.post(
            &UdSend {
                to,
                payload: Inline(&data),
            },
            Signal::Reclaim,
            0,
        )
        .unwrap();
        qp.ring();
        qp.post(
            &UdSendImm {
                to,
                imm,
                payload: sge,
            },
            Signal::Reclaim,
            1,
        )
        .unwrap();
        qp.post(
            &UdSend {
                to,
                payload: (Inline(&data[..204]), sge),
            },
            Signal::Reclaim.solicited(),
            2,
        )
        .unwrap();
        qp.ring_doorbell();
        qp.post(
            &UdSendImm {
                to,
                imm,
                payload: (),
            },
            Signal::Always,
            3,
        )
        .unwrap();
        qp.ring_doorbell_bf();
        self.send_cq.arm(false);
        let mut sent = 0;
        self.send_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            sent += qp.complete_each(&cqe, |_| ());
        });
        sent
    }

    fn received(&mut self) -> usize {
        let Self {
            qp, srq, recv_cq, ..
        } = self;
        recv_cq.arm(true);
        recv_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            let user = match srq {
                Some(srq) => srq.complete_receive(&cqe),
                None => qp.complete_receive(&cqe),
            };
            assert!(user.is_some());
        })
    }
}

#[test]
fn datagrams_allocate_nothing_on_either_side() {
    const SENDERS: usize = 6;
    for owns_receives in [false, true] {
        let (clock, fabric) = (Arc::<AtomicU64>::default(), LocalFabric::new());
        let mut b = Post::new(&device(&fabric, &clock), owns_receives);
        let mut senders: [Post; SENDERS] =
            std::array::from_fn(|_| Post::new(&device(&fabric, &clock), true));
        let to = &b.qp.destination();
        let mut sent = 0;
        let mut received = 0;
        let mut lost = 0;
        let calls = calls_of_rounds(|round| {
            // In the first round the receiver polls after each sender. In every third round only 10
            // datagrams find a receive; in the other rounds all do.
            let receives = if round % 3 == 2 { 10 } else { 4 * SENDERS };
            b.receives(receives);
            let before = received;
            for a in &mut senders {
                sent += a.send(to, round);
                if round == 0 {
                    received += b.received();
                }
            }
            received += b.received();
            lost += 4 * SENDERS - (received - before);
            clock.fetch_add(1_000_000, Ordering::Relaxed);
            assert_eq!(received - before, receives);
        });
        assert_eq!(
            (sent, received + lost, lost),
            (4000 * SENDERS, 4000 * SENDERS, 333 * 14),
            "owns receives: {owns_receives}"
        );
        assert_eq!(calls, 0, "allocator calls, owns receives: {owns_receives}");
    }
}
