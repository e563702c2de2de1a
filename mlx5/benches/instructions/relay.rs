//! The relay to libibverbs, on the device of mlx5-run.

use std::thread::sleep;
use std::time::Duration;

use mlx5::*;

const CHUNK: usize = 32;

/// Posts `n` WRITEs from a queue pair to another of the same device, one WRITE to a doorbell.
pub(crate) fn write_relayed(n: usize) {
    let device = Device::open("relay:mlx5_0").unwrap();
    let pd = device.alloc_pd().unwrap();
    let (mut cq, srq) = (
        device.create_cq(2 * CHUNK as u32).unwrap(),
        pd.create_srq(1, 0).unwrap(),
    );
    let create = || pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap();
    let (mut qp, mut peer) = (create(), create());
    qp.connect(&peer.address(), &ConnectOptions::default())
        .unwrap();
    peer.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    let mr = pd
        .alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    for _ in 0..n / CHUNK {
        for _ in 0..CHUNK {
            qp.post(
                &Write {
                    addr: mr.addr() + 64,
                    rkey: mr.rkey(),
                    payload: mr.sge(0, 64).unwrap(),
                },
                Signal::Always,
                0,
            )
            .unwrap();
            qp.ring();
        }
        let mut completed = 0;
        while completed < CHUNK {
            // The sleep is long enough for all outstanding operations to complete, so that few
            // polls find nothing.
            sleep(Duration::from_millis(20));
            cq.poll(CHUNK, |cqe| {
                assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some());
                completed += 1;
            });
        }
    }
}
