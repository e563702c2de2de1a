//! Throughput of posting and polling: of the driver alone on a null device, and of whole messages
//! on the software HCA with both ends in one thread. First the program checks that the measured
//! operations are correct. Run it with `cargo bench -p mlx5 --bench post_poll`;
//! `scripts/instructions` has exact instruction counts.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark"
)]

#[path = "../tests/support/null.rs"]
mod null;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mlx5::wire::{RequesterCqe, ResponderCqe};
use mlx5::*;
use null::Plays;

const OPERATIONS: usize = 64;

/// The driver alone: a queue pair on a null device. This program writes the CQEs in place of a NIC.
struct Null {
    device: NullDevice,
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<u64>,
    srq: Srq,
    mr: Mr,
    posted: u16,
}

impl Null {
    fn new(register: RegisterKind) -> Self {
        let device = Device::open(DeviceSpec::Null(NullOptions { register })).unwrap();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(64).unwrap();
        let mut recv_cq = device.create_mono_cq(OPERATIONS as u32).unwrap();
        let srq = pd.create_srq(OPERATIONS as u32, 0).unwrap();
        let mut qp = pd
            .create_qp(
                &send_cq,
                &recv_cq,
                &srq,
                &QpConfig {
                    max_send_wr: 1024,
                    max_inline_data: 220,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        recv_cq.register(qp.qpn(), 1);
        let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
        Self {
            device: device.null().unwrap(),
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            posted: 0,
        }
    }

    /// Posts `OPERATIONS` operations of `blocks` WQEBBs, `batch` to a doorbell, writes the CQE that
    /// completes them all as the device would, and polls it.
    #[inline(always)]
    fn post<P: Payload + Copy>(&mut self, payload: P, blocks: u16, batch: usize) {
        let (addr, rkey) = (self.mr.addr(), self.mr.rkey());
        for _ in 0..OPERATIONS / batch {
            for imm in 0..batch as u32 {
                self.qp
                    .post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm,
                            payload,
                        },
                        Signal::Reclaim,
                        0,
                    )
                    .unwrap();
            }
            self.qp.ring();
        }
        self.posted = self.posted.wrapping_add(blocks * OPERATIONS as u16);
        let wqe_counter = self.posted.wrapping_sub(blocks);
        let cqe = RequesterCqe {
            wqe_opcode: 9,
            qpn: self.qp.qpn(),
            wqe_counter,
            byte_count: 0,
            user_index: 0,
        };
        assert!(
            self.device
                .write_cqe(self.send_cq.cqn(), &cqe.emit(), CqeOpcode::Requester)
        );
        let qp = &mut self.qp;
        assert_eq!(
            self.send_cq
                .poll(1, |cqe| assert!(qp.complete(&cqe).is_some())),
            1
        );
    }

    /// Posts `OPERATIONS` receives, writes their CQEs as the device would, polls these in batches
    /// of 16, and returns the entries to the queue. Returns a sum that depends on every completion.
    #[inline(always)]
    fn receive(&mut self) -> u64 {
        for i in 0..OPERATIONS {
            self.srq.post(&[], i as u64).unwrap();
            let wqe_counter = (self.posted as usize + i) % (self.srq.depth() + 1);
            let cqe = ResponderCqe {
                qpn: self.qp.qpn(),
                imm: i as u32,
                wqe_counter: wqe_counter as u16,
                ..Default::default()
            };
            assert!(self.device.write_cqe(
                self.recv_cq.cqn(),
                &cqe.emit(),
                CqeOpcode::ResponderWriteImm
            ));
        }
        self.posted = self.posted.wrapping_add(OPERATIONS as u16);
        self.srq.ring();
        let (mut sum, srq) = (0, &mut self.srq);
        while self.recv_cq.poll(16, |value, cqe| {
            sum += value.unwrap() * srq.complete_receive(&cqe).unwrap()
        }) > 0
        {}
        sum
    }
}

struct Soft {
    qp: RcQp,
    send_cq: Cq,
    from: Mr,
    _peer: RcQp,
    recv_cq: MonoCq<()>,
    srq: Srq,
    to: Mr,
}

impl Soft {
    fn new() -> Self {
        let fabric = LocalFabric::new();
        let end = || {
            let options = SoftOptions {
                fabric: FabricSpec::Local(fabric.clone()),
                arena_bytes: 1 << 30,
                ..Default::default()
            };
            let device = Device::open(DeviceSpec::Soft(options)).unwrap();
            let pd = device.alloc_pd().unwrap();
            let send_cq = device.create_cq(64).unwrap();
            let recv_cq = device.create_mono_cq::<()>(OPERATIONS as u32).unwrap();
            let srq = pd.create_srq(OPERATIONS as u32 - 1, 0).unwrap();
            let qp = pd
                .create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())
                .unwrap();
            let mr = pd
                .alloc(
                    1 << 16,
                    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
                )
                .unwrap();
            (qp, send_cq, recv_cq, srq, mr)
        };
        let (mut qp, send_cq, _, _, from) = end();
        let (mut peer, _, mut recv_cq, srq, to) = end();
        qp.connect(&peer.address(), &ConnectOptions::default())
            .unwrap();
        peer.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        recv_cq.register(peer.qpn(), ());
        from.write(0, &[0x5a; 4096]).unwrap();
        Self {
            qp,
            send_cq,
            from,
            _peer: peer,
            recv_cq,
            srq,
            to,
        }
    }

    /// Sends `OPERATIONS` messages of `bytes`, `batch` to a doorbell, and receives them. Returns
    /// the number received.
    #[inline(always)]
    fn messages(&mut self, bytes: u32, batch: usize) -> usize {
        let payload = self.from.sge(0, bytes).unwrap();
        let (addr, rkey) = (self.to.addr(), self.to.rkey());
        let mut received = 0;
        for _ in 0..OPERATIONS / batch {
            for imm in 0..batch as u32 {
                self.srq.post(&[], 0).unwrap();
                self.qp
                    .post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm,
                            payload,
                        },
                        Signal::Reclaim,
                        0,
                    )
                    .unwrap();
            }
            self.srq.ring();
            self.qp.ring();
            let (mut expected, srq) = (0, &mut self.srq);
            received += self.recv_cq.poll(batch, |_, cqe| {
                assert_eq!(cqe.imm(), expected);
                expected += 1;
                srq.complete_receive(&cqe).unwrap();
            });
        }
        let qp = &mut self.qp;
        self.send_cq.poll(64, |cqe| {
            assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some())
        });
        received
    }

    fn check(&mut self) {
        for bytes in [64, 4096] {
            self.to.write(0, &[0; 4096]).unwrap();
            assert_eq!(self.messages(bytes, 8), OPERATIONS);
            let mut got = vec![0; bytes as usize + 1];
            self.to.read(0, &mut got).unwrap();
            assert!(got[..bytes as usize].iter().all(|&b| b == 0x5a) && got[bytes as usize] == 0);
        }
    }
}

fn post(c: &mut Criterion) {
    let mut group = c.benchmark_group("post");
    group.throughput(Throughput::Elements(OPERATIONS as u64));
    for (name, register) in [
        ("ordinary register", RegisterKind::Ordinary),
        ("write-combining register", RegisterKind::WriteCombining),
    ] {
        let mut null = Null::new(register);
        let data = [0x5a; 220];
        let sge = null.mr.sge(0, 1024).unwrap();
        null.post(Inline(&data[..28]), 1, 1);
        let (record, wqe) = null.device.send_queue(null.qp.qpn(), 0).unwrap();
        assert_eq!(
            (record, wqe[3], wqe[7], &wqe[36..]),
            (OPERATIONS as u16, 9, 4, &data[..28])
        );
        group.bench_function(
            BenchmarkId::new("inline 28 B, 1 to a doorbell", name),
            |b| b.iter(|| null.post(Inline(&data[..28]), 1, 1)),
        );
        group.bench_function(
            BenchmarkId::new("inline 28 B, 8 to a doorbell", name),
            |b| b.iter(|| null.post(Inline(&data[..28]), 1, 8)),
        );
        group.bench_function(
            BenchmarkId::new("inline 220 B, 1 to a doorbell", name),
            |b| b.iter(|| null.post(Inline(&data), 4, 1)),
        );
        group.bench_function(
            BenchmarkId::new("SGE of 1 KiB, 1 to a doorbell", name),
            |b| b.iter(|| null.post(sge, 1, 1)),
        );
    }
    group.finish();
}

fn poll(c: &mut Criterion) {
    let mut group = c.benchmark_group("poll");
    group.throughput(Throughput::Elements(OPERATIONS as u64));
    let mut null = Null::new(RegisterKind::Ordinary);
    assert_eq!(null.receive(), (0..OPERATIONS as u64).sum::<u64>());
    group.bench_function("post, write, poll and return a receive", |b| {
        b.iter(|| null.receive())
    });
    group.finish();
}

fn messages(c: &mut Criterion) {
    let mut group = c.benchmark_group("software HCA");
    group.throughput(Throughput::Elements(OPERATIONS as u64));
    let mut soft = Soft::new();
    soft.check();
    for (bytes, batch) in [(64, 1), (64, 8), (4096, 1), (4096, 8)] {
        group.bench_function(
            format!("WRITE+IMM of {bytes} B, {batch} to a doorbell"),
            |b| b.iter(|| soft.messages(bytes, batch)),
        );
    }
    group.finish();
}

criterion_group!(benches, post, poll, messages);
criterion_main!(benches);
