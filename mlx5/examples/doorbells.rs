//! Doorbells: the ways to announce new WQEs. First on a null device, which only keeps the bytes
//! that the driver writes; then on a strict software HCA, which checks and executes each WQE.
//!
//! `cargo run --release -p mlx5 --example doorbells [DEVICE]`: instead of the strict software HCA
//! on DEVICE, for example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

#[path = "../tests/support/null.rs"]
mod null;

use std::error::Error;

use mlx5::wire::RequesterCqe;
use mlx5::{
    Access, ConnectOptions, Cq, CqeOpcode, Device, DeviceSpec, Inline, NullOptions, Pd, QpConfig,
};
use mlx5::{RcQp, RegisterKind, Signal, SoftOptions, Write};
use null::Plays;

fn main() -> Result<(), Box<dyn Error>> {
    for register in [RegisterKind::Ordinary, RegisterKind::WriteCombining] {
        println!("{register:?} register: {}", register.copy_routine());
        on_a_null_device(NullOptions { register })?;
    }
    let strict = || {
        DeviceSpec::Soft(SoftOptions {
            strict: true,
            ..SoftOptions::default()
        })
    };
    on_a_working_device(
        &std::env::args()
            .nth(1)
            .map_or_else(strict, |name| DeviceSpec::from(&*name)),
    )
}

/// Makes a queue pair that is its own peer.
fn loopback(device: &Device) -> Result<(Pd, Cq, RcQp), Box<dyn Error>> {
    let pd = device.alloc_pd()?;
    let (cq, srq) = (device.create_cq(64)?, pd.create_srq(1, 0)?);
    let mut qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default())?;
    qp.connect(&qp.address(), &ConnectOptions::default())?;
    Ok((pd, cq, qp))
}

/// Posts `n` WRITEs of 20 bytes, one WQEBB each.
fn post(qp: &mut RcQp, (addr, rkey): (u64, u32), n: usize) -> Result<(), Box<dyn Error>> {
    for _ in 0..n {
        qp.post(
            &Write {
                addr,
                rkey,
                payload: Inline(&[1; 20]),
            },
            Signal::Always,
            0,
        )?;
    }
    Ok(())
}

/// Operations of a batch: four of 64 bytes fill the register.
const BATCH: u16 = 4;

/// Rings in every mode once. Returns the number of WQEs.
fn ring_in_every_mode(qp: &mut RcQp, to: (u64, u32)) -> Result<u16, Box<dyn Error>> {
    // The default: one short WQE goes through BlueFlame, so that the device need not fetch it.
    // Otherwise 8 bytes.
    post(qp, to, 1)?;
    qp.ring();
    post(qp, to, 3)?;
    qp.ring();
    // 8 bytes; then the last WQE through BlueFlame, although there are two.
    post(qp, to, 1)?;
    qp.ring_doorbell();
    post(qp, to, 2)?;
    qp.ring_doorbell_bf();
    // Up to 256 bytes of WQEs through BlueFlame.
    let mut several = qp.blueflame_batch();
    for _ in 0..BATCH {
        several.post(
            &Write {
                addr: to.0,
                rkey: to.1,
                payload: Inline(&[2; 20]),
            },
            Signal::Always,
            0,
        )?;
    }
    several.finish();
    Ok(7 + BATCH)
}

fn on_a_null_device(options: NullOptions) -> Result<(), Box<dyn Error>> {
    let device = Device::open(DeviceSpec::Null(options))?;
    let (_pd, mut cq, mut qp) = loopback(&device)?;
    let null = device.null().ok_or("not a null device")?;
    let posted = ring_in_every_mode(&mut qp, (0x1000, 1))?;
    let (record, wqe) = null
        .send_queue(qp.qpn(), posted - 1)
        .ok_or("no such queue pair")?;
    println!(
        "  the doorbell record says {record}; WQE {} starts {:02x?}",
        posted - 1,
        &wqe[..16]
    );
    // The device's part: one completion, for the last WQE.
    let done = RequesterCqe {
        wqe_opcode: wqe[3],
        qpn: qp.qpn(),
        wqe_counter: posted - 1,
        byte_count: 0,
        user_index: 0,
    };
    null.write_cqe(cq.cqn(), &done.emit(), CqeOpcode::Requester);
    let mut finished = 0;
    cq.poll(64, |cqe| finished += qp.complete_each(&cqe, |_| ()));
    if (record, finished) == (posted, usize::from(posted)) {
        Ok(())
    } else {
        Err("the record is wrong".into())
    }
}

fn on_a_working_device(spec: &DeviceSpec) -> Result<(), Box<dyn Error>> {
    let device = Device::open(spec)?;
    let (pd, mut cq, mut qp) = loopback(&device)?;
    let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let posted = ring_in_every_mode(&mut qp, (mr.addr(), mr.rkey()))?;
    let (mut done, mut failed) = (0, None);
    while done < posted && failed.is_none() {
        cq.poll(64, |cqe| {
            failed = cqe.result().err();
            done += u16::from(qp.complete(&cqe).is_some());
        });
    }
    let (mut bytes, violations) = (
        [0; 20],
        device
            .soft()
            .map_or_else(Vec::new, |soft| soft.take_violations()),
    );
    mr.read(0, &mut bytes)?;
    println!(
        "{}: {done} of {posted} operations done, violations: {violations:?}",
        device.info().name
    );
    if failed.is_none() && bytes == [2; 20] && violations.is_empty() {
        Ok(())
    } else {
        Err("a doorbell went wrong".into())
    }
}
