//! The effect of lying or dying peers on a device of this crate.

use crate::*;

#[test]
fn a_sender_that_writes_what_is_no_datagram_disturbs_nobody() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let options = SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() };
    let [device, sender] = [(); 2].map(|()| Device::open(DeviceSpec::Soft(options.clone())).unwrap());
    let own = ReceiveSource::Own { depth: 8, max_sge: 1 };
    let [(pd, mut cq, mut to), (_, _sender_cq, mut from)] = [&device, &sender].map(|device| {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
        let mut qp = pd.create_ud_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
        qp.activate(7).unwrap();
        (pd, cq, qp)
    });
    let destination = to.destination();
    let mr = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    for user in 0..4 {
        to.post_receive(&[mr.sge(0, 64).unwrap()], user).unwrap();
    }
    to.ring_receives();
    let send = UdSend { to: &destination, payload: Inline(&[]) };
    from.post(&send, Signal::Reclaim, 0).unwrap();
    from.ring();
    sender.soft().unwrap().forge_datagrams(to.qpn(), 7);
    from.post(&send, Signal::Reclaim, 0).unwrap();
    from.ring();
    let mut opcodes = vec![];
    for _ in 0..4 {
        cq.poll(16, |cqe| opcodes.push(cqe.opcode()));
    }
    assert_eq!(opcodes, [Some(CqeOpcode::ResponderSend); 2]);
}

#[test]
fn what_has_arrived_completes_before_what_is_flushed() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let device = Device::open(DeviceSpec::Soft(SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() })).unwrap();
    let pd = device.alloc_pd().unwrap();
    let (send_cq, mut recv_cq) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
    let own = ReceiveSource::Own { depth: 4, max_sge: 0 };
    let mut from = pd.create_qp(&send_cq, &recv_cq, own, &QpConfig::default()).unwrap();
    let mut to = pd.create_qp(&send_cq, &recv_cq, own, &QpConfig::default()).unwrap();
    from.connect(&to.address(), &ConnectOptions::default()).unwrap();
    to.connect(&from.address(), &ConnectOptions::default()).unwrap();
    let mr = pd.alloc(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    (0..4).for_each(|user| to.post_receive(&[], user).unwrap());
    to.ring_receives();
    for imm in 0..2 {
        from.post(&WriteImm { addr: mr.addr(), rkey: mr.rkey(), imm, payload: Inline(&[1]) }, Signal::Reclaim, 0).unwrap();
    }
    from.ring();
    to.fail();
    let mut got = vec![];
    for _ in 0..8 {
        recv_cq.poll(16, |cqe| got.push((to.complete_receive(&cqe), cqe.result().is_ok())));
    }
    assert_eq!(got, [(Some(0), true), (Some(1), true), (Some(2), false), (Some(3), false)]);
}

#[test]
fn a_dead_peer_that_wrote_nonsense_into_the_pop_word_does_not_keep_the_flush_busy() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let options = SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() };
    let [device, peer] = [(); 2].map(|()| Device::open(DeviceSpec::Soft(options.clone())).unwrap());
    let own = ReceiveSource::Own { depth: 4, max_sge: 0 };
    let [(mut cq, mut to), (peer_cq, from)] = [&device, &peer].map(|device| {
        let cq = device.create_cq(16).unwrap();
        let qp = device.alloc_pd().unwrap().create_qp(&cq, &cq, own, &QpConfig::default()).unwrap();
        (cq, qp)
    });
    to.connect(&from.address(), &ConnectOptions::default()).unwrap();
    to.post_receive(&[], 0).unwrap();
    to.ring_receives();
    drop((peer_cq, from, peer));
    device.soft().unwrap().spoil_pops(to.qpn());
    to.fail();
    assert_eq!(cq.poll(16, |_| ()), 0, "no receive was taken, and none can be");
}

/// The repair takes messages out of lanes, so it must say so to the peers that wait for room.
#[test]
fn a_full_lane_that_the_repair_drained_has_room_again() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let device = Device::open(DeviceSpec::Soft(SoftOptions { fabric, arena_bytes: 1 << 20, ..SoftOptions::default() })).unwrap();
    let pd = device.alloc_pd().unwrap();
    let (mut send_cq, recv_cq) = (device.create_cq(256).unwrap(), device.create_cq(256).unwrap());
    let mut srq = pd.create_srq(200, 0).unwrap();
    let config = QpConfig { max_send_wr: 256, max_inline_data: 8, ..QpConfig::default() };
    let mut from = pd.create_qp(&send_cq, &recv_cq, &srq, &config).unwrap();
    let mut to = pd.create_qp(&send_cq, &recv_cq, &srq, &config).unwrap();
    from.connect(&to.address(), &ConnectOptions::default()).unwrap();
    to.connect(&from.address(), &ConnectOptions::default()).unwrap();
    let mr = pd.alloc(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    while srq.post(&[], 0).is_ok() {}
    srq.ring();
    let slots = mlx5_hca::MAX_LANE_SLOTS as usize;
    for _ in 0..=slots {
        from.post(&WriteImm { addr: mr.addr(), rkey: mr.rkey(), imm: 0, payload: Inline(&[1]) }, Signal::Always, 0).unwrap();
    }
    from.ring();
    device.soft().unwrap().peer_dies_taking(to.qpn());
    let mut completed = 0;
    send_cq.poll(256, |cqe| completed += usize::from(cqe.result().is_ok()));
    assert_eq!(completed, slots + 1);
}
