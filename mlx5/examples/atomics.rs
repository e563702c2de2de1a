//! Atomics: two threads, each with a device of its own, share a counter (fetch-and-add) and a lock
//! (compare-and-swap) in the memory of a third thread, which sleeps meanwhile.
//!
//! `cargo run --release -p mlx5 --example atomics [DEVICE]`: on the software HCA, or on DEVICE, for
//! example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::sync::mpsc;

use mlx5::{
    Access, CompareSwap, ConnectOptions, Cq, Device, DeviceSpec, FetchAdd, Inline, Mr, QpAddress,
    QpConfig,
};
use mlx5::{RcOperation, RcQp, Read, Signal, Write};

const THREADS: u64 = 2;
const ROUNDS: u64 = 2_000;
/// Offsets in the shared region.
const COUNTER: u64 = 0;
const LOCK: u64 = 64;
const VALUE: u64 = 128;

type Failure = Box<dyn Error + Send + Sync>;
/// A queue pair of the owner; address and key of the region.
type Target = (QpAddress, u64, u32);

fn main() -> Result<(), Failure> {
    let spec = DeviceSpec::from(std::env::args().nth(1).as_deref().unwrap_or("soft"));
    let device = Device::open(&spec)?;
    let pd = device.alloc_pd()?;
    let (cq, srq) = (device.create_cq(16)?, pd.create_srq(1, 0)?);
    let all =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let shared = pd.alloc(4096, all)?;

    let mut qps = Vec::new();
    let mut threads = Vec::new();
    for id in 1..=THREADS {
        let mut qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default())?;
        let (target, spec) = ((qp.address(), shared.addr(), shared.rkey()), spec.clone());
        let (tell, told) = mpsc::channel();
        // A device is not `Send`, but its description is.
        threads.push(std::thread::spawn(move || worker(id, &spec, target, &tell)));
        qp.connect(&told.recv()?, &ConnectOptions::default())?;
        qps.push(qp);
    }
    let mut tickets = Vec::new();
    for thread in threads {
        tickets.extend(thread.join().map_err(|_| "a worker panicked")??);
    }
    tickets.sort_unstable();
    if !tickets.iter().copied().eq(0..THREADS * ROUNDS) {
        return Err("two threads drew the same number".into());
    }
    let mut value = [0; 8];
    shared.read(VALUE as usize, &mut value)?;
    println!(
        "{} tickets, each drawn once; counted to {} under the lock",
        tickets.len(),
        u64::from_ne_bytes(value)
    );
    if u64::from_ne_bytes(value) == THREADS * ROUNDS {
        Ok(())
    } else {
        Err("an increment was lost".into())
    }
}

/// Draws numbers, and increments a plain word under a lock. Returns the numbers.
fn worker(
    id: u64,
    spec: &DeviceSpec,
    (owner, addr, rkey): Target,
    tell: &mpsc::Sender<QpAddress>,
) -> Result<Vec<u64>, Failure> {
    let device = Device::open(spec)?;
    let (pd, mut cq) = (device.alloc_pd()?, device.create_cq(16)?);
    let mut qp = pd.create_qp(&cq, &cq, &pd.create_srq(1, 0)?, &QpConfig::default())?;
    let mr = pd.alloc(8, Access::LOCAL_WRITE)?;
    let into = mr.sge(0, 8)?;
    qp.connect(&owner, &ConnectOptions::default())?;
    tell.send(qp.address())?;
    let mut tickets = Vec::new();
    for _ in 0..ROUNDS {
        tickets.push(run(
            &mut qp,
            &mut cq,
            &mr,
            &FetchAdd {
                addr: addr + COUNTER,
                rkey,
                add: 1,
                into,
            },
        )?);
        while run(
            &mut qp,
            &mut cq,
            &mr,
            &CompareSwap {
                addr: addr + LOCK,
                rkey,
                compare: 0,
                swap: id,
                into,
            },
        )? != 0
        {
            std::thread::yield_now();
        }
        let value = run(
            &mut qp,
            &mut cq,
            &mr,
            &Read {
                addr: addr + VALUE,
                rkey,
                into,
            },
        )?;
        // The WRITE is executed before the operation after it, so the next holder of the lock reads
        // the new value.
        qp.post(
            &Write {
                addr: addr + VALUE,
                rkey,
                payload: Inline(&(value + 1).to_ne_bytes()),
            },
            Signal::Reclaim,
            0,
        )?;
        if run(
            &mut qp,
            &mut cq,
            &mr,
            &CompareSwap {
                addr: addr + LOCK,
                rkey,
                compare: id,
                swap: 0,
                into,
            },
        )? != id
        {
            return Err("somebody else took the lock".into());
        }
    }
    Ok(tickets)
}

/// Runs one operation and waits for it. Returns the 8 bytes of its result, in host order.
fn run(qp: &mut RcQp, cq: &mut Cq, mr: &Mr, op: &impl RcOperation) -> Result<u64, Failure> {
    qp.post(op, Signal::Always, 1)?;
    qp.ring();
    let mut result = None;
    while result.is_none() {
        cq.poll(1, |cqe| {
            // Some WRITEs above give a completion, with the value 0.
            if qp.complete(&cqe) == Some(1) || cqe.result().is_err() {
                result = Some(cqe.result());
            }
        });
    }
    result.unwrap_or(Ok(()))?;
    let mut value = [0; 8];
    mr.read(0, &mut value)?;
    Ok(u64::from_ne_bytes(value))
}
