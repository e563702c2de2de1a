//! A peer that writes random bytes to all words that it can write: ready words, pop words, intents,
//! lanes. The owner may lose messages and connections. It does not panic (overflow checks are on),
//! and does not hang.

use std::sync::Arc;

use super::random::Random;
use crate::*;

const ANY: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

struct End {
    device: Device,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    qp: RcQp,
    mr: Mr,
}

impl End {
    fn new(options: &SoftOptions, random: &mut Random) -> Self {
        let device = Device::open(DeviceSpec::Soft(options.clone())).unwrap();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(1024).unwrap();
        let recv_cq = device
            .create_cq(CqConfig {
                compression: random.below(2) == 0,
                ..CqConfig::from(64)
            })
            .unwrap();
        let srq = (random.below(2) == 0).then(|| pd.create_srq(31, 2).unwrap());
        let receives = srq.as_ref().map_or(
            ReceiveSource::Own {
                depth: 32,
                max_sge: 2,
            },
            ReceiveSource::Shared,
        );
        let config = QpConfig {
            max_send_wr: 64,
            scatter_to_cqe: random.below(2) == 0,
            ..QpConfig::default()
        };
        let qp = pd.create_qp(&send_cq, &recv_cq, receives, &config).unwrap();
        let mr = pd.alloc(4096, ANY).unwrap();
        Self {
            device,
            send_cq,
            recv_cq,
            srq,
            qp,
            mr,
        }
    }

    fn post_receives(&mut self, n: u32) {
        let buffer = self.mr.sge(64, 64).unwrap();
        for user in 0..n {
            // A queue that seems full because of lost receives stays so.
            let _ = match &mut self.srq {
                Some(srq) => srq.post(&[buffer], user.into()),
                None => self.qp.post_receive(&[buffer], user.into()),
            };
        }
        self.srq
            .as_mut()
            .map_or_else(|| self.qp.ring_receives(), Srq::ring);
    }

    fn poll(&mut self) {
        let Self { qp, srq, .. } = self;
        self.send_cq.poll(16, |cqe| {
            qp.complete_each(&cqe, drop);
        });
        self.recv_cq.poll(16, |cqe| {
            let _ = (cqe.inline_data(), cqe.result().map_err(|e| e.to_string()));
            match srq {
                Some(srq) => srq.complete_receive(&cqe),
                None => qp.complete_receive(&cqe),
            };
        });
    }
}

fn run(seed: u64, timing: Timing) {
    let random = &mut Random::new(seed);
    let fabric = FabricSpec::Local(LocalFabric::new());
    let options = SoftOptions {
        fabric,
        arena_bytes: 1 << 22,
        timing,
        strict: random.below(2) == 0,
        ..SoftOptions::default()
    };
    let (mut a, mut b) = (End::new(&options, random), End::new(&options, random));
    let connect = ConnectOptions {
        rnr_timer_ns: 1000,
        ..ConnectOptions::default()
    };
    a.qp.connect(&b.qp.address(), &connect).unwrap();
    b.qp.connect(&a.qp.address(), &connect).unwrap();
    for step in 0..200 {
        b.post_receives(random.below(4));
        for _ in 0..random.below(6) {
            let imm = random.below(3);
            // The queue is full, or has failed by now.
            let _ = match random.below(3) {
                0 => a.qp.post(
                    &WriteImm {
                        addr: b.mr.addr(),
                        rkey: b.mr.rkey(),
                        imm,
                        payload: Inline(&[1; 8]),
                    },
                    Signal::Reclaim,
                    0,
                ),
                1 => a.qp.post(
                    &SendImm {
                        imm,
                        payload: a.mr.sge(0, 32).unwrap(),
                    },
                    Signal::Reclaim,
                    0,
                ),
                _ => b.qp.post(
                    &Read {
                        addr: a.mr.addr(),
                        rkey: a.mr.rkey(),
                        into: b.mr.sge(128, 64).unwrap(),
                    },
                    Signal::Always,
                    0,
                ),
            };
        }
        a.qp.ring();
        b.qp.ring();
        if step > 20 && random.below(4) == 0 {
            b.device
                .soft()
                .unwrap()
                .corrupt(u64::from(random.below(u32::MAX)));
        }
        for _ in 0..random.below(4) {
            a.poll();
            b.poll();
        }
    }
    if random.below(2) == 0 {
        drop(a);
    }
    b.qp.fail();
    // Dead peers are searched for once in 1,024 polls.
    (0..3000).for_each(|_| b.poll());
    drop(b.device.soft().unwrap().take_violations());
}

#[test]
fn nonsense_from_a_peer_neither_panics_nor_hangs_its_victim() {
    for seed in 0..200 {
        run(seed, Timing::Immediate);
        run(seed, Timing::Delay { ns: 500 });
        run(
            seed,
            Timing::Model(Arc::new(NicModel::new(NicParameters::default()))),
        );
    }
}
