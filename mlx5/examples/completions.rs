//! Completions: one for many operations, a sleep until a completion arrives, and several
//! completions in one compressed session.
//!
//! `cargo run --release -p mlx5 --example completions [DEVICE]`: on the software HCA, or on DEVICE,
//! for example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

#[path = "../tests/support/null.rs"]
mod null;

use std::error::Error;
use std::sync::mpsc;
use std::time::Duration;

use mlx5::wire::{MiniCqe, ResponderCqe};
use mlx5::{Access, ConnectOptions, Cq, CqConfig, CqeOpcode, Device, DeviceSpec, Inline, Pd};
use mlx5::{QpAddress, QpConfig, RcQp, SendImm, Signal, Srq, Write};
use null::Plays;

fn main() -> Result<(), Box<dyn Error>> {
    let spec = DeviceSpec::from(std::env::args().nth(1).as_deref().unwrap_or("soft"));
    one_for_many(&spec)?;
    sleep_until_one_comes(&spec)?;
    several_in_one_session()
}

/// Makes a queue pair with one completion queue, and three receives.
fn queues(device: &Device) -> Result<(Pd, Cq, Srq, RcQp), Box<dyn Error>> {
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(64)?);
    let mut srq = pd.create_srq(3, 0)?;
    (0..3).try_for_each(|i| srq.post(&[], i))?;
    srq.ring();
    let qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default())?;
    Ok((pd, cq, srq, qp))
}

/// Shows that a completion finishes its operation and all earlier operations on the queue pair.
fn one_for_many(spec: &DeviceSpec) -> Result<(), Box<dyn Error>> {
    let (pd, mut cq, _srq, mut qp) = queues(&Device::open(spec)?)?;
    qp.connect(&qp.address(), &ConnectOptions::default())?;
    let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    for i in 0..10u8 {
        let signal = if i == 9 {
            Signal::Always
        } else {
            Signal::Reclaim
        };
        qp.post(
            &Write {
                addr: mr.addr() + u64::from(i),
                rkey: mr.rkey(),
                payload: Inline(&[i]),
            },
            signal,
            i.into(),
        )?;
    }
    qp.ring();
    let mut finished = Vec::new();
    let mut operations = 0;
    let mut cqes = 0;
    while operations < 10 {
        cqes += cq.poll(64, |cqe| {
            operations += qp.complete_each(&cqe, |user| finished.push(user))
        });
    }
    println!("{cqes} completion for {operations} operations");
    if cqes == 1 && finished.iter().copied().eq(0..10) {
        Ok(())
    } else {
        Err("not all, or not in order".into())
    }
}

/// Polls until the queue is empty, arms it, waits. A completion in between ends the wait at once.
fn sleep_until_one_comes(spec: &DeviceSpec) -> Result<(), Box<dyn Error>> {
    let device = Device::open(spec)?;
    let (_pd, mut cq, mut srq, mut qp) = queues(&device)?;
    let (address, spec) = (qp.address(), spec.clone());
    let (tell, told) = mpsc::channel();
    let sender = std::thread::spawn(move || {
        send_later(&spec, &address, &tell).map_err(|error| error.to_string())
    });
    qp.connect(&told.recv()?, &ConnectOptions::default())?;
    let (mut imms, mut sleeps) = (Vec::new(), 0);
    while imms.len() < 3 {
        if cq.poll(16, |cqe| {
            imms.extend(srq.complete_receive(&cqe).map(|_| cqe.imm()))
        }) == 0
        {
            // Only a message that its sender marked as solicited ends this sleep. `arm(false)` is
            // for any message.
            cq.arm(true);
            sleeps += 1;
            if !device.wait(Some(Duration::from_secs(10))) {
                return Err("nothing came".into());
            }
        }
    }
    sender.join().map_err(|_| "the sender panicked")??;
    println!("slept {sleeps} times until 3 messages were there, the last of which was solicited");
    if imms == [0, 1, 2] {
        Ok(())
    } else {
        Err(format!("received {imms:?}").into())
    }
}

fn send_later(
    spec: &DeviceSpec,
    to: &QpAddress,
    tell: &mpsc::Sender<QpAddress>,
) -> Result<(), Box<dyn Error>> {
    let (_pd, mut cq, _srq, mut qp) = queues(&Device::open(spec)?)?;
    qp.connect(to, &ConnectOptions::default())?;
    tell.send(qp.address())?;
    std::thread::sleep(Duration::from_millis(20));
    for imm in 0..3 {
        qp.post(
            &SendImm { imm, payload: () },
            if imm == 2 {
                Signal::Always.solicited()
            } else {
                Signal::Reclaim.into()
            },
            0,
        )?;
    }
    qp.ring();
    let mut result = None;
    while result.is_none() {
        cq.poll(16, |cqe| result = qp.complete(&cqe).map(|_| cqe.result()));
    }
    Ok(result.unwrap_or(Ok(()))?)
}

/// Shows a compressed session. A device may write similar completions as one session, if the queue
/// allows it; polls return each like any other. Here the program plays the device.
fn several_in_one_session() -> Result<(), Box<dyn Error>> {
    let device = Device::open("null")?;
    let mut cq = device.create_cq(CqConfig {
        compression: true,
        ..CqConfig::from(32)
    })?;
    let title = ResponderCqe {
        qpn: 7,
        wqe_counter: 100,
        ..ResponderCqe::default()
    }
    .emit();
    let minis = [10, 20, 30].map(|byte_count| MiniCqe {
        word: 0,
        byte_count,
    });
    device.null().ok_or("not a null device")?.write_compressed(
        cq.cqn(),
        &title,
        CqeOpcode::ResponderSend,
        &minis,
    );
    let mut received = Vec::new();
    cq.poll(32, |cqe| {
        received.push((cqe.qpn(), cqe.wqe_counter(), cqe.byte_count()))
    });
    println!("QPN, receive and bytes, from one session: {received:?}");
    if received == [(7, 100, 10), (7, 101, 20), (7, 102, 30)] {
        Ok(())
    } else {
        Err("a wrong completion".into())
    }
}
