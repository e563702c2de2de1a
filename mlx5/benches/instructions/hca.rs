//! Benchmarks of the software HCA: polls of one device, and messages between two devices.

use mlx5::*;

/// Polls an empty completion queue `n` times, on a device with 1,000 queue pairs. One of them, with
/// a receive queue of its own, has failed.
pub(crate) fn poll_empty_beside_a_failed_one(n: usize) {
    let options = SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        arena_bytes: 1 << 30,
        ..Default::default()
    };
    let device = Device::open(DeviceSpec::Soft(options)).unwrap();
    let pd = device.alloc_pd().unwrap();
    let (mut cq, srq) = (device.create_cq(64).unwrap(), pd.create_srq(1, 0).unwrap());
    let config = QpConfig {
        max_send_wr: 1,
        ..QpConfig::default()
    };
    let _others: Vec<RcQp> = (0..999)
        .map(|_| pd.create_qp(&cq, &cq, &srq, &config).unwrap())
        .collect();
    let mut failed = pd
        .create_qp(
            &cq,
            &cq,
            ReceiveSource::Own {
                depth: 1,
                max_sge: 0,
            },
            &config,
        )
        .unwrap();
    failed
        .connect(&failed.address(), &ConnectOptions::default())
        .unwrap();
    failed.fail();
    let mut polled = 0;
    for _ in 0..n {
        polled += cq.poll(16, |_| ());
    }
    assert_eq!(polled, 0);
}

/// Sends `n` messages from one device to another, `batch` to a doorbell.
pub(crate) fn write_imm(n: usize, batch: usize) {
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
        let recv_cq = device.create_mono_cq::<()>(64).unwrap();
        let srq = pd.create_srq(63, 0).unwrap();
        let qp = pd
            .create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())
            .unwrap();
        let mr = pd
            .alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap();
        (qp, send_cq, recv_cq, srq, mr)
    };
    let (mut qp, mut send_cq, _, _, from) = end();
    let (mut peer, _, mut recv_cq, mut srq, to) = end();
    qp.connect(&peer.address(), &ConnectOptions::default())
        .unwrap();
    peer.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    recv_cq.register(peer.qpn(), ());
    let payload = from.sge(0, 64).unwrap();
    let mut received = 0;
    for i in (0..n).step_by(batch) {
        for imm in i as u32..(i + batch) as u32 {
            srq.post(&[], 0).unwrap();
            let op = WriteImm {
                addr: to.addr(),
                rkey: to.rkey(),
                imm,
                payload,
            };
            qp.post(&op, Signal::Reclaim, 0).unwrap();
        }
        srq.ring();
        qp.ring();
        recv_cq.poll(batch, |_, cqe| {
            assert_eq!(cqe.imm(), received);
            srq.complete_receive(&cqe).unwrap();
            received += 1;
        });
        if i / 64 != (i + batch) / 64 {
            send_cq.poll(8, |cqe| {
                assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some())
            });
        }
    }
    assert_eq!(received as usize, n);
}
