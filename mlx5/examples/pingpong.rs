//! Two processes, one RC connection: WRITE with immediate back and forth, on the software HCA or on DEVICE, for example `mlx5_0`.
//!
//! `cargo run --release -p mlx5 --example pingpong [ROUNDS [DEVICE]]`
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Instant;

use mlx5::verbs::VerbsOptions;
use mlx5::{Access, ConnectOptions, Device, DeviceSpec, Inline, QpAddress, QpConfig, Signal, WriteImm};

const BYTES: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rounds: u32 = args.first().map_or(Ok(200_000), |s| s.parse())?;
    let path = std::env::temp_dir().join(format!("mlx5-pingpong-{}", std::process::id()));
    match std::env::var_os("PINGPONG_SOCKET") {
        Some(path) => run(UnixStream::connect(path)?, rounds, false),
        None => {
            let listener = std::os::unix::net::UnixListener::bind(&path)?;
            let mut child = Command::new(std::env::current_exe()?).args(&args).env("PINGPONG_SOCKET", &path).spawn()?;
            let (stream, _) = listener.accept()?;
            std::fs::remove_file(&path)?;
            run(stream, rounds, true)?;
            child.wait()?;
            Ok(())
        }
    }
}

fn run(mut stream: UnixStream, rounds: u32, first: bool) -> Result<(), Box<dyn Error>> {
    let named = |device| DeviceSpec::Verbs(VerbsOptions { device: Some(device), ..VerbsOptions::default() });
    let device = Device::open(&std::env::args().nth(2).map_or_else(DeviceSpec::default, named))?;
    let pd = device.alloc_pd()?;
    let mut send_cq = device.create_cq(64)?;
    let mut recv_cq = device.create_mono_cq(64)?;
    let mut srq = pd.create_srq(32, 0)?;
    let mut qp = pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())?;
    recv_cq.register(qp.qpn(), ());
    let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    for _ in 0..srq.free() {
        srq.post(&[], 0)?;
    }
    srq.ring();

    // Exchange addresses, then connect both ends before the first message.
    stream.write_all(&[&qp.address().to_bytes()[..], &mr.addr().to_le_bytes(), &mr.rkey().to_le_bytes()].concat())?;
    let (mut peer, mut addr, mut rkey) = ([0; QpAddress::LEN], [0; 8], [0; 4]);
    [&mut peer[..], &mut addr, &mut rkey].into_iter().try_for_each(|bytes| stream.read_exact(bytes))?;
    qp.connect(&QpAddress::from_bytes(&peer).ok_or("no address")?, &ConnectOptions::default())?;
    let (addr, rkey) = (u64::from_le_bytes(addr), u32::from_le_bytes(rkey));
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])?;

    let start = Instant::now();
    let payload = [7; BYTES];
    let mut send = |round: u32| -> Result<(), Box<dyn Error>> {
        let op = WriteImm { addr, rkey, imm: round, payload: Inline(&payload[..64]) };
        qp.post(&op, Signal::Reclaim, 0)?;
        qp.ring();
        let mut failed = None;
        send_cq.poll(16, |cqe| {
            qp.complete(&cqe);
            failed = cqe.result().err();
        });
        failed.map_or(Ok(()), |e| Err(e.into()))
    };
    for round in 0..rounds {
        if first {
            send(round)?;
        }
        let mut arrived = false;
        while !arrived {
            recv_cq.poll(1, |_, cqe| {
                arrived = cqe.imm() == round;
                srq.complete_receive(&cqe);
            });
        }
        if srq.free() > 16 {
            while srq.post(&[], 0).is_ok() {}
            srq.ring();
        }
        if !first {
            send(round)?;
        }
    }
    if first {
        println!(
            "{rounds} round trips of {BYTES} B, mean {:.0} ns on {}",
            start.elapsed().as_nanos() as f64 / f64::from(rounds),
            device.info().name
        );
    }
    Ok(())
}
