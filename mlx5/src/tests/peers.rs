//! The receives of a queue pair that fails.

use crate::*;

#[test]
fn what_has_arrived_completes_before_what_is_flushed() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let device = Device::open(DeviceSpec::Soft(SoftOptions {
        fabric,
        arena_bytes: 1 << 20,
        ..SoftOptions::default()
    }))
    .unwrap();
    let pd = device.alloc_pd().unwrap();
    let (send_cq, mut recv_cq) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own {
        depth: 4,
        max_sge: 0,
    };
    let mut from = pd
        .create_qp(&send_cq, &recv_cq, own, &QpConfig::default())
        .unwrap();
    let mut to = pd
        .create_qp(&send_cq, &recv_cq, own, &QpConfig::default())
        .unwrap();
    from.connect(&to.address(), &ConnectOptions::default())
        .unwrap();
    to.connect(&from.address(), &ConnectOptions::default())
        .unwrap();
    let mr = pd
        .alloc(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    (0..4).for_each(|user| to.post_receive(&[], user).unwrap());
    to.ring_receives();
    for imm in 0..2 {
        from.post(
            &WriteImm {
                addr: mr.addr(),
                rkey: mr.rkey(),
                imm,
                payload: Inline(&[1]),
            },
            Signal::Reclaim,
            0,
        )
        .unwrap();
    }
    from.ring();
    to.fail();
    let mut got = vec![];
    for _ in 0..8 {
        recv_cq.poll(16, |cqe| {
            got.push((to.complete_receive(&cqe), cqe.result().is_ok()))
        });
    }
    assert_eq!(
        got,
        [
            (Some(0), true),
            (Some(1), true),
            (Some(2), false),
            (Some(3), false)
        ]
    );
}
