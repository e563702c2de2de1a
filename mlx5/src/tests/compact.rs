//! The entries that a software HCA writes to a completion queue with compressed sessions.

use crate::wire::{CqeFormat, OP_OWN_OFFSET};
use crate::{
    Access, ConnectOptions, CqConfig, Device, DeviceSpec, FabricSpec, Inline, LocalFabric,
    QpConfig, Signal, SoftOptions, WriteImm,
};

/// Returns the formats of the entries at which completions start, for messages with these
/// immediates, sent in one doorbell.
fn formats(compression: bool, imms: &[u32]) -> Vec<CqeFormat> {
    let options = SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        strict: true,
        ..Default::default()
    };
    let device = Device::open(DeviceSpec::Soft(options)).unwrap();
    let pd = device.alloc_pd().unwrap();
    let send_cq = device.create_cq(64).unwrap();
    let mut recv_cq = device
        .create_cq(CqConfig {
            compression,
            ..CqConfig::from(64)
        })
        .unwrap();
    let mut srq = pd.create_srq(63, 0).unwrap();
    let mut qp = pd
        .create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    let mr = pd
        .alloc(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    while srq.post(&[], 0).is_ok() {}
    srq.ring();
    for &imm in imms {
        qp.post(
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
    qp.ring();
    let mut formats = vec![];
    while recv_cq.poll(64, |cqe| {
        formats.push(CqeFormat::from_op_own(cqe.title_bytes()[OP_OWN_OFFSET]))
    }) > 0
    {}
    formats
}

#[test]
fn messages_alike_are_compressed_and_others_are_not() {
    use CqeFormat::{Compressed, Plain};
    assert_eq!(formats(true, &[7; 9]), [Compressed; 9]);
    assert_eq!(formats(false, &[7; 9]), [Plain; 9]);
    assert_eq!(
        formats(true, &[1, 2, 2, 3]),
        [Plain, Compressed, Compressed, Plain]
    );
}
