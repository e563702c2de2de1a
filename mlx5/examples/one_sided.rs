//! One-sided verbs: WRITE, WRITE with immediate and READ towards a process that is stopped
//! (SIGSTOP) meanwhile.
//!
//! No such operation needs the peer's CPU. The peer granted access when it registered the memory
//! and connected, and its device does the rest. So a peer that computes, sleeps or is stopped is
//! written and read as fast as any other. Only the notification needs the peer: bytes in memory do
//! not show that they are complete. So the last WRITE carries an immediate, which takes a receive
//! and gives the peer a CQE.
//!
//! `cargo run --release -p mlx5 --example one_sided [DEVICE]`: on the software HCA, or on DEVICE,
//! for example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mlx5::{
    Access, ConnectOptions, Device, Inline, QpAddress, QpConfig, Read, Signal, Write, WriteImm,
};

const ROLE: &str = "MLX5_EXAMPLE_ONE_SIDED";

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::var_os(ROLE).is_some() {
        return run(std::io::stdin(), std::io::stdout(), None);
    }
    let mut child = Command::new(std::env::current_exe()?);
    let mut child = child
        .args(std::env::args().skip(1))
        .env(ROLE, "peer")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (from, to) = child
        .stdout
        .take()
        .zip(child.stdin.take())
        .ok_or("the peer has no pipes")?;
    let result = run(from, to, Some(&child));
    if result.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    result?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the peer: {status}").into())
    }
}

/// Runs either end. The requester has a `child`, which is the other end.
fn run(
    mut from: impl std::io::Read,
    mut to: impl std::io::Write,
    child: Option<&Child>,
) -> Result<(), Box<dyn Error>> {
    let device = Device::open(std::env::args().nth(1).as_deref().unwrap_or("soft"))?;
    let pd = device.alloc_pd()?;
    let (mut send_cq, mut recv_cq) = (device.create_cq(16)?, device.create_cq(16)?);
    let mut srq = pd.create_srq(15, 0)?;
    let mut qp = pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())?;
    let mr = pd.alloc(
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    )?;
    mr.write(1024, b"left by the peer")?;
    srq.post(&[], 0)?;
    srq.ring();

    // Exchange the addresses of queue pair and memory, and the key.
    to.write_all(
        &[
            &qp.address().to_bytes()[..],
            &mr.addr().to_le_bytes(),
            &mr.rkey().to_le_bytes(),
        ]
        .concat(),
    )?;
    to.flush()?;
    let mut peer = [0; QpAddress::LEN];
    let mut addr = [0; 8];
    let mut rkey = [0; 4];
    [&mut peer[..], &mut addr, &mut rkey]
        .into_iter()
        .try_for_each(|bytes| from.read_exact(bytes))?;
    qp.connect(
        &QpAddress::from_bytes(&peer).ok_or("no address")?,
        &ConnectOptions::default(),
    )?;
    let (addr, rkey) = (u64::from_le_bytes(addr), u32::from_le_bytes(rkey));

    let Some(child) = child else {
        // SAFETY: a system call with no pointers. It returns when the other process resumes this
        // process.
        unsafe { libc::raise(libc::SIGSTOP) };
        let mut imm = None;
        recv_cq.arm(false);
        if recv_cq.has_completion() || device.wait(Some(Duration::from_secs(10))) {
            recv_cq.poll(1, |cqe| {
                imm = cqe
                    .result()
                    .is_ok()
                    .then(|| (cqe.imm(), srq.complete_receive(&cqe)))
            });
        }
        // The CQE is for the last WRITE, so the bytes of all earlier WRITEs have arrived too.
        let mut bytes = [0; 16];
        mr.read(0, &mut bytes)?;
        return if imm == Some((42, Some(0))) && &bytes == b"one, two, three!" {
            Ok(())
        } else {
            Err("not what was written".into())
        };
    };

    let (pid, mut status) = (child.id() as libc::pid_t, 0);
    // SAFETY: the pointer is valid. Returns when the child has stopped (or exited).
    unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) };
    if !libc::WIFSTOPPED(status) {
        return Err("the peer did not stop".into());
    }
    println!("the peer is stopped");
    qp.post(
        &Write {
            addr,
            rkey,
            payload: Inline(b"one, "),
        },
        Signal::Reclaim,
        0,
    )?;
    qp.post(
        &Write {
            addr: addr + 5,
            rkey,
            payload: Inline(b"two, "),
        },
        Signal::Reclaim,
        1,
    )?;
    qp.post(
        &WriteImm {
            addr: addr + 10,
            rkey,
            imm: 42,
            payload: Inline(b"three!"),
        },
        Signal::Reclaim,
        2,
    )?;
    qp.post(
        &Read {
            addr: addr + 1024,
            rkey,
            into: mr.sge(0, 16)?,
        },
        Signal::Always,
        3,
    )?;
    qp.ring();
    let (mut done, mut failed) = (0, None);
    while done < 4 && failed.is_none() {
        send_cq.poll(4, |cqe| {
            failed = cqe.result().err();
            done += qp.complete_each(&cqe, |user| println!("  operation {user} is complete"));
        });
    }
    let mut bytes = [0; 16];
    mr.read(0, &mut bytes)?;
    // SAFETY: a system call with no pointers. The child was not waited for, so the number is still
    // its own.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    println!(
        "read while it was stopped: {:?}",
        String::from_utf8_lossy(&bytes)
    );
    failed
        .map_or(Ok(()), |error| Err(error.into()))
        .and(if &bytes == b"left by the peer" {
            Ok(())
        } else {
            Err("READ".into())
        })
}
