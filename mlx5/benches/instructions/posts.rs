//! Posts of operations on a null device with a write-combining register, in steady state; and posts
//! of receives.

use std::hint::black_box;

use mlx5::wire::RequesterCqe;
use mlx5::*;

use crate::null::Plays;

/// Number of WQEBBs between two completions of a post benchmark: a quarter of the send queue, the
/// interval at which `Signal::Reclaim` asks for a CQE.
const RECLAIM_EVERY: usize = 1024;

struct Poster {
    device: NullDevice,
    qp: RcQp,
    cq: Cq,
    mr: Mr,
    posted: u16,
}

impl Poster {
    fn new() -> Self {
        let device = Device::open(DeviceSpec::Null(NullOptions {
            register: RegisterKind::WriteCombining,
        }))
        .unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let srq = pd.create_srq(1, 0).unwrap();
        let mut qp = pd
            .create_qp(
                &cq,
                &cq,
                &srq,
                &QpConfig {
                    max_send_wr: 4 * RECLAIM_EVERY as u32,
                    max_inline_data: 220,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
        Self {
            device: device.null().unwrap(),
            qp,
            cq,
            mr,
            posted: 0,
        }
    }

    /// Completes `RECLAIM_EVERY` WQEBBs, posted in WQEs of `blocks` WQEBBs each.
    #[inline(never)]
    fn reclaim(&mut self, blocks: usize) {
        self.posted = self.posted.wrapping_add(RECLAIM_EVERY as u16);
        let wqe_counter = self.posted.wrapping_sub(blocks as u16);
        let cqe = RequesterCqe {
            wqe_opcode: 9,
            qpn: self.qp.qpn(),
            wqe_counter,
            byte_count: 0,
            user_index: 0,
        };
        assert!(
            self.device
                .write_cqe(self.cq.cqn(), &cqe.emit(), CqeOpcode::Requester)
        );
        let qp = &mut self.qp;
        assert_eq!(
            self.cq.poll(1, |cqe| assert!(qp.complete(&cqe).is_some())),
            1
        );
    }

    /// Posts `n` operations, each made by `op` from its number, `batch` to a doorbell.
    #[inline(always)]
    fn run<O: RcOperation>(
        &mut self,
        n: usize,
        blocks: usize,
        batch: usize,
        op: impl Fn(u32) -> O,
    ) {
        let mut i = 0;
        while i < n {
            let round = i + RECLAIM_EVERY / blocks;
            while i != round {
                for _ in 0..batch {
                    self.qp
                        .post(&op(i as u32), Signal::Reclaim, i as u64)
                        .unwrap();
                    i += 1;
                }
                self.qp.ring();
            }
            self.reclaim(blocks);
        }
    }
}

/// Posts `n` inline operations of `BYTES` bytes, `batch` to a doorbell. The length is a constant if
/// `known` is true; otherwise it is known only at run time.
#[inline(always)]
pub(crate) fn post_inline<const BYTES: usize>(n: usize, batch: usize, known: bool) {
    let mut poster = Poster::new();
    let data = black_box([0x5a; BYTES]);
    let data = if known {
        &data
    } else {
        &data[..black_box(BYTES)]
    };
    let (addr, rkey) = (poster.mr.addr(), poster.mr.rkey());
    poster.run(n, (16 + 16 + 4 + BYTES).div_ceil(64), batch, |imm| {
        WriteImm {
            addr,
            rkey,
            imm,
            payload: Inline(data),
        }
    });
}

pub(crate) fn post_sge(n: usize) {
    let mut poster = Poster::new();
    let (addr, rkey) = (poster.mr.addr(), poster.mr.rkey());
    let payload = black_box(poster.mr.sge(0, 1024).unwrap());
    poster.run(n, 1, 1, |imm| WriteImm {
        addr,
        rkey,
        imm,
        payload,
    });
}

#[derive(Clone, Copy)]
pub(crate) enum Bell {
    EightBytes,
    /// Doorbell that puts the last of every four WQEs through BlueFlame.
    BlueFlame,
    Batch,
}

#[inline(always)]
pub(crate) fn post4_inline28(n: usize, bell: Bell) {
    let mut poster = Poster::new();
    let data = black_box([0x5a; 28]);
    let (addr, rkey) = (poster.mr.addr(), poster.mr.rkey());
    let operation = |imm| WriteImm {
        addr,
        rkey,
        imm,
        payload: Inline(&data),
    };
    for _ in 0..n / RECLAIM_EVERY {
        for first in (0..RECLAIM_EVERY as u32).step_by(4) {
            let (qp, four) = (&mut poster.qp, first..first + 4);
            if let Bell::Batch = bell {
                let mut batch = qp.blueflame_batch();
                four.for_each(|imm| batch.post(&operation(imm), Signal::Reclaim, 0).unwrap());
                batch.finish();
            } else {
                four.for_each(|imm| qp.post(&operation(imm), Signal::Reclaim, 0).unwrap());
                if let Bell::BlueFlame = bell {
                    qp.ring_doorbell_bf()
                } else {
                    qp.ring_doorbell()
                }
            }
        }
        poster.reclaim(1);
    }
}

pub(crate) fn post_send_inline28(n: usize) {
    let mut poster = Poster::new();
    let data = black_box([0x5a; 28]);
    poster.run(n, 1, 1, |_| Send {
        payload: Inline(&data),
    });
}

/// Number of receives that a queue holds, and so the maximum number that a benchmark may post.
pub(crate) const RECEIVES: u32 = 1 << 14;

#[inline(always)]
pub(crate) fn post_receive_rq(n: usize, batch: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64).unwrap();
    let receives = ReceiveSource::Own {
        depth: RECEIVES,
        max_sge: 1,
    };
    let mut qp = pd
        .create_qp(&cq, &cq, receives, &QpConfig::default())
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
    let buffer = black_box(mr.sge(0, 64).unwrap());
    let mut i = 0;
    while i < n {
        for _ in 0..batch {
            qp.post_receive(&[buffer], i as u64).unwrap();
            i += 1;
        }
        qp.ring_receives();
    }
}

#[inline(always)]
pub(crate) fn post_receive_srq(n: usize, batch: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut srq = pd.create_srq(RECEIVES - 1, 1).unwrap();
    let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
    let buffer = black_box(mr.sge(0, 64).unwrap());
    let mut i = 0;
    while i < n {
        for _ in 0..batch {
            srq.post(&[buffer], i as u64).unwrap();
            i += 1;
        }
        srq.ring();
    }
}
