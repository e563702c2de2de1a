//! Polls of completion queues that a null device has filled. The queue pairs are leaked: their drop
//! would search the unread CQEs, and its instructions would be counted.

use mlx5::wire::{MiniCqe, RequesterCqe, ResponderCqe};
use mlx5::*;

use crate::null::Plays;

/// Fills a CQ, then polls `n` CQEs of it. With `complete`, each receive is returned to its queue.
#[inline(always)]
pub(crate) fn poll_mono(n: usize, complete: bool) {
    const CQES: u32 = 1 << 14;
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_mono_cq::<u64>(CQES).unwrap();
    let mut srq = pd.create_srq(CQES, 0).unwrap();
    let qps: Vec<RcQp> = (0..4)
        .map(|_| pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap())
        .collect();
    for (i, qp) in qps.iter().enumerate() {
        cq.register(qp.qpn(), i as u64);
    }
    for i in 0..CQES {
        srq.post(&[], u64::from(i)).unwrap();
        let qpn = qps[i as usize % 4].qpn();
        let cqe = ResponderCqe {
            qpn,
            imm: i,
            byte_count: 64,
            wqe_counter: i as u16,
            ..Default::default()
        };
        assert!(device.null().unwrap().write_cqe(
            cq.cqn(),
            &cqe.emit(),
            CqeOpcode::ResponderWriteImm
        ));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += match complete {
            false => cq.poll(16, |queue, cqe| {
                sum += queue.map_or(0, |q| q + u64::from(cqe.imm()))
            }),
            true => cq.poll(16, |queue, cqe| {
                let user = srq.complete_receive(&cqe).unwrap_or(0);
                sum += queue.map_or(0, |q| q + u64::from(cqe.imm()).min(user));
            }),
        };
    }
    // The expected sum of i + i % 4 is computed without a loop, which would be counted.
    let want = n * (n - 1) / 2 + n / 4 * 6;
    std::mem::forget(qps);
    assert_eq!((polled, sum), (n, want as u64));
}

pub(crate) fn poll_compressed(n: usize) {
    const CQES: u32 = 1 << 14;
    const SESSION: usize = 16;
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device
        .create_mono_cq::<u64>(CqConfig {
            compression: true,
            ..CqConfig::from(CQES)
        })
        .unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap();
    cq.register(qp.qpn(), 1);
    for session in 0..CQES as usize / SESSION {
        let first = session * SESSION;
        let title = ResponderCqe {
            qpn: qp.qpn(),
            imm: 7,
            wqe_counter: first as u16,
            ..Default::default()
        };
        let minis: Vec<_> = (first..first + SESSION)
            .map(|i| MiniCqe {
                word: 0,
                byte_count: i as u32,
            })
            .collect();
        assert!(null.write_compressed(
            cq.cqn(),
            &title.emit(),
            CqeOpcode::ResponderWriteImm,
            &minis
        ));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += cq.poll(16, |queue, cqe| {
            sum += queue.map_or(0, |q| q + u64::from(cqe.byte_count()))
        });
    }
    std::mem::forget(qp);
    assert_eq!((polled, sum), (n, (0..n as u64).map(|i| i + 1).sum()));
}

/// Number of CQEs that a benchmark writes to its queue before it polls.
const CQES: u32 = 1 << 14;

/// Polls `n` completions of sends of one queue pair, reads the results and completes the sends.
pub(crate) fn poll_send(n: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(CQES).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let mut qp = pd
        .create_qp(
            &cq,
            &cq,
            &srq,
            &QpConfig {
                max_send_wr: CQES,
                ..QpConfig::default()
            },
        )
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    let payload = Sge {
        addr: 8,
        len: 64,
        lkey: 1,
    };
    for i in 0..CQES {
        qp.post(
            &Write {
                addr: 8,
                rkey: 1,
                payload,
            },
            Signal::Always,
            i.into(),
        )
        .unwrap();
        let cqe = RequesterCqe {
            wqe_opcode: 8,
            qpn: qp.qpn(),
            wqe_counter: i as u16,
            byte_count: 0,
            user_index: 0,
        };
        assert!(null.write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::Requester));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += cq.poll(16, |cqe| {
            cqe.result().unwrap();
            sum += qp.complete(&cqe).unwrap();
        });
    }
    std::mem::forget(qp);
    assert_eq!((polled, sum), (n, (n * (n - 1) / 2) as u64));
}

/// Polls `n` completions of one queue pair's own receive queue, and reads their results.
pub(crate) fn poll_receive_rq(n: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(CQES).unwrap();
    let receives = ReceiveSource::Own {
        depth: CQES,
        max_sge: 1,
    };
    let mut qp = pd
        .create_qp(&cq, &cq, receives, &QpConfig::default())
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    for i in 0..CQES {
        qp.post_receive(
            &[Sge {
                addr: 8,
                len: 64,
                lkey: 1,
            }],
            i.into(),
        )
        .unwrap();
        let cqe = ResponderCqe {
            qpn: qp.qpn(),
            imm: i,
            byte_count: 64,
            wqe_counter: i as u16,
            ..Default::default()
        };
        assert!(null.write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::ResponderWriteImm));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += cq.poll(16, |cqe| {
            cqe.result().unwrap();
            sum += qp.complete_receive(&cqe).unwrap() + u64::from(cqe.imm());
        });
    }
    std::mem::forget(qp);
    assert_eq!((polled, sum), (n, (n * (n - 1)) as u64));
}

/// Polls `n` completions of four queue pairs on a shared receive queue, reads their results, and
/// finds the value of each queue pair.
pub(crate) fn poll_receive_srq(n: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_mono_cq::<u64>(CQES).unwrap();
    let mut srq = pd.create_srq(CQES - 1, 1).unwrap();
    let qps: Vec<RcQp> = (0..4)
        .map(|_| pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap())
        .collect();
    for qp in &qps {
        cq.register(qp.qpn(), 0);
    }
    for i in 0..CQES - 1 {
        srq.post(
            &[Sge {
                addr: 8,
                len: 64,
                lkey: 1,
            }],
            i.into(),
        )
        .unwrap();
        let cqe = ResponderCqe {
            qpn: qps[i as usize % 4].qpn(),
            imm: i,
            byte_count: 64,
            wqe_counter: i as u16,
            ..Default::default()
        };
        assert!(null.write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::ResponderWriteImm));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += cq.poll(16, |queue, cqe| {
            cqe.result().unwrap();
            sum += srq.complete_receive(&cqe).unwrap() + u64::from(cqe.imm()) + queue.unwrap();
        });
    }
    std::mem::forget(qps);
    assert_eq!((polled, sum), (n, (n * (n - 1)) as u64));
}

pub(crate) fn poll_empty(n: usize) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let mut cq = device.create_cq(64).unwrap();
    let mut polled = 0;
    for _ in 0..n {
        polled += cq.poll(16, |_| ());
    }
    assert_eq!(polled, 0);
}
