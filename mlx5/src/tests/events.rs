//! No wake-up is lost. Here a sleeper has no time limit, so a lost wake-up is a hang.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::*;

const QKEY: u32 = 3;
/// Watchdog, far above the duration of a test.
const WATCHDOG: Duration = Duration::from_secs(120);

fn options(fabric: &LocalFabric) -> SoftOptions {
    SoftOptions {
        fabric: FabricSpec::Local(fabric.clone()),
        arena_bytes: 1 << 20,
        ..SoftOptions::default()
    }
}

/// Spins for a time that depends on `round`, so that the spins of all rounds end at every step of
/// the other thread between its last poll and its sleep.
fn stagger(round: u64) {
    for _ in 0..round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54 {
        std::hint::spin_loop();
    }
}

/// Sends the messages, and waits until they have been taken.
struct Sender<'a> {
    device: &'a Device,
    taken: Arc<AtomicU64>,
}

impl Sender<'_> {
    fn rounds(&self, rounds: u64, per_round: u64, mut send: impl FnMut(u64)) {
        for round in 0..rounds {
            stagger(round);
            (0..per_round).for_each(|i| send(round * per_round + i));
            let mut spins = 0u32;
            while self.taken.load(Ordering::Acquire) < (round + 1) * per_round {
                self.device.progress();
                spins += 1;
                if spins % 64 == 0 {
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// Receives: sleeps whenever there is no message, and counts the messages.
fn sleeper(
    device: &Device,
    cq: &mut Cq,
    solicited_only: bool,
    total: u64,
    taken: &AtomicU64,
    mut take: impl FnMut(&Cqe<'_>),
) {
    let mut seen = 0;
    while seen < total {
        let n = cq.poll(64, |cqe| {
            cqe.result().unwrap();
            take(&cqe);
        }) as u64;
        seen += n;
        taken.fetch_add(n, Ordering::Release);
        if n == 0 {
            cq.arm(solicited_only);
            assert!(device.wait(None));
        }
    }
}

/// Runs both threads to their end. The receiver takes each message within the watchdog's time.
fn together(
    taken: &AtomicU64,
    receiver: impl FnOnce() + std::marker::Send + 'static,
    sender: impl FnOnce() + std::marker::Send + 'static,
) {
    mlx5_hca::testing::sleep_without_end();
    let (done_tx, done_rx) = mpsc::channel();
    let also_done = done_tx.clone();
    let threads = [
        std::thread::spawn(move || {
            receiver();
            done_tx.send(()).unwrap();
        }),
        std::thread::spawn(move || {
            sender();
            also_done.send(()).unwrap();
        }),
    ];
    let (mut running, mut before) = (2, 0);
    while running > 0 {
        if done_rx.recv_timeout(WATCHDOG).is_ok() {
            running -= 1;
        } else {
            let now = taken.load(Ordering::Relaxed);
            assert_ne!(
                std::mem::replace(&mut before, now),
                now,
                "a sleeper was not woken"
            );
        }
    }
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

/// Number of queue pairs that send in turn, so that the queue pair of a message was idle before it.
const QUEUES: usize = 4;

/// Makes `QUEUES` queue pairs on one CQ, and their shared receives.
fn queues(options: SoftOptions) -> (Device, Cq, Srq, Vec<RcQp>) {
    let device = Device::open(DeviceSpec::Soft(options)).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256).unwrap();
    let mut srq = pd.create_srq(63, 0).unwrap();
    while srq.post(&[], 0).is_ok() {}
    srq.ring();
    let qps = (0..QUEUES)
        .map(|_| pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap())
        .collect();
    (device, cq, srq, qps)
}

fn connect(
    qps: &mut [RcQp],
    own: &mpsc::Sender<Vec<QpAddress>>,
    other: &mpsc::Receiver<Vec<QpAddress>>,
) {
    own.send(qps.iter().map(RcQp::address).collect()).unwrap();
    for (qp, to) in qps.iter_mut().zip(other.recv().unwrap()) {
        qp.connect(&to, &ConnectOptions::default()).unwrap();
    }
}

/// Sends `per_round` messages in each of `rounds`. The last of each round is solicited.
fn connected(rounds: u64, per_round: u64, solicited_only: bool) {
    let fabric = LocalFabric::new();
    let (to_sender, from_receiver) = mpsc::channel();
    let (to_receiver, from_sender) = mpsc::channel();
    let taken = Arc::<AtomicU64>::default();
    let (receivers, senders) = (options(&fabric), options(&fabric));
    let (count, progress) = (Arc::clone(&taken), Arc::clone(&taken));
    together(
        &progress,
        move || {
            let (device, mut cq, mut srq, mut qps) = queues(receivers);
            connect(&mut qps, &to_sender, &from_sender);
            sleeper(
                &device,
                &mut cq,
                solicited_only,
                rounds * per_round,
                &count,
                |cqe| {
                    srq.complete_receive(cqe).unwrap();
                    srq.post(&[], 0).unwrap();
                    srq.ring();
                },
            );
        },
        move || {
            let (device, mut cq, _srq, mut qps) = queues(senders);
            connect(&mut qps, &to_receiver, &from_receiver);
            let sender = Sender {
                device: &device,
                taken,
            };
            sender.rounds(rounds, per_round, |n| {
                let is_last = n % per_round == per_round - 1;
                let signal = if is_last {
                    Signal::Reclaim.solicited()
                } else {
                    Signal::Reclaim.into()
                };
                let qp = &mut qps[(n / per_round) as usize % QUEUES];
                qp.post(&crate::Send { payload: () }, signal, 0).unwrap();
                qp.ring();
                cq.poll(64, |cqe| {
                    cqe.result().unwrap();
                    assert!(qps.iter_mut().any(|qp| qp.complete(&cqe).is_some()));
                });
            });
        },
    );
}

#[test]
fn a_sleeper_is_woken_by_every_message() {
    connected(100_000, 1, false);
}

#[test]
fn a_sleeper_for_solicited_messages_is_woken_by_each_of_them() {
    connected(20_000, 3, true);
}

#[test]
fn a_sleeper_is_woken_by_every_datagram() {
    let rounds = 100_000;
    let fabric = LocalFabric::new();
    let (to_sender, from_receiver) = mpsc::channel();
    let taken = Arc::<AtomicU64>::default();
    let (receivers, senders) = (options(&fabric), options(&fabric));
    let (count, progress) = (Arc::clone(&taken), Arc::clone(&taken));
    let create = |options: SoftOptions| {
        let device = Device::open(DeviceSpec::Soft(options)).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
        let mut qp = pd
            .create_ud_qp(
                &cq,
                &cq,
                ReceiveSource::Own {
                    depth: 8,
                    max_sge: 1,
                },
                &QpConfig::default(),
            )
            .unwrap();
        qp.activate(QKEY).unwrap();
        let mr = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
        (device, cq, qp, mr)
    };
    together(
        &progress,
        move || {
            let (device, mut cq, mut qp, mr) = create(receivers);
            let post = |qp: &mut UdQp| {
                qp.post_receive(&[mr.sge(0, 64).unwrap()], 0).unwrap();
                qp.ring_receives();
            };
            (0..8).for_each(|_| post(&mut qp));
            to_sender.send(qp.destination()).unwrap();
            sleeper(&device, &mut cq, false, rounds, &count, |cqe| {
                qp.complete_receive(cqe).unwrap();
                post(&mut qp);
            });
        },
        move || {
            let (device, mut cq, mut qp, _mr) = create(senders);
            let to = from_receiver.recv().unwrap();
            let sender = Sender {
                device: &device,
                taken,
            };
            sender.rounds(rounds, 1, |_| {
                qp.post(
                    &UdSend {
                        to: &to,
                        payload: (),
                    },
                    Signal::Reclaim,
                    0,
                )
                .unwrap();
                qp.ring();
                cq.poll(64, |cqe| {
                    cqe.result().unwrap();
                    qp.complete(&cqe);
                });
            });
        },
    );
}

/// Uses the waker at every step of the other thread between its last poll and its sleep.
#[test]
fn every_use_of_a_waker_ends_a_wait() {
    let device = Device::open(DeviceSpec::Soft(options(&LocalFabric::new()))).unwrap();
    rings_end_waits(&device);
    rings_end_waits(&Device::open(DeviceSpec::Null(NullOptions::default())).unwrap());
}

fn rings_end_waits(device: &Device) {
    const ROUNDS: u64 = 2_000;
    mlx5_hca::testing::sleep_without_end();
    let waker = device.waker();
    let told = Arc::new(AtomicU64::new(0));
    let heard = Arc::new(AtomicU64::new(0));
    let (tell, hear) = (Arc::clone(&told), Arc::clone(&heard));
    let ringer = std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            stagger(round);
            tell.store(round, Ordering::Relaxed);
            waker.wake_by_ref();
            let since = std::time::Instant::now();
            while hear.load(Ordering::Acquire) < round {
                assert!(
                    since.elapsed() < WATCHDOG,
                    "round {round}: a ring woke nobody"
                );
                std::thread::yield_now();
            }
        }
    });
    while heard.load(Ordering::Relaxed) < ROUNDS && !ringer.is_finished() {
        assert!(!device.wait(Some(WATCHDOG)), "no queue is armed");
        heard.store(told.load(Ordering::Relaxed), Ordering::Release);
    }
    ringer.join().unwrap();
}
