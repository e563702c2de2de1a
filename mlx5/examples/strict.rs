//! Strict mode: makes and reports three mistakes to which a NIC would react silently.
//!
//! They are mistakes of a program that uses the driver. Mistakes of a driver (a missing doorbell, a
//! stale WQE, ...) are in `mlx5::Rule` too.
//!
//! `cargo run --release -p mlx5 --example strict`
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::{
    Access, Clock, ConnectOptions, Cq, Device, DeviceSpec, FabricSpec, LocalFabric, Mr, QpConfig,
    RcQp, Read, Rule, Signal,
};
use mlx5::{SoftOptions, Timing, Write};

/// A queue pair that is its own peer. Its strict device executes operations 3 us after the
/// doorbell, on a clock that the program moves. In immediate time the device would have finished
/// with every buffer when `ring` returns, and early reuse would do no harm.
struct Loopback {
    device: Device,
    now_ns: Arc<AtomicU64>,
    qp: RcQp,
    cq: Cq,
    mr: Mr,
}

impl Loopback {
    fn new(cqes: u32) -> Result<Self, Box<dyn Error>> {
        let now_ns = Arc::new(AtomicU64::new(0));
        let device = Device::open(DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(LocalFabric::new()),
            clock: Clock::Manual(Arc::clone(&now_ns)),
            timing: Timing::Delay { ns: 3_000 },
            strict: true,
            ..SoftOptions::default()
        }))?;
        let pd = device.alloc_pd()?;
        let (cq, srq) = (device.create_cq(cqes)?, pd.create_srq(1, 0)?);
        let mut qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default())?;
        qp.connect(&qp.address(), &ConnectOptions::default())?;
        let mr = pd.alloc(
            4096,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        )?;
        Ok(Self {
            device,
            now_ns,
            qp,
            cq,
            mr,
        })
    }

    /// Advances the time, and prints the violations. Returns the broken rules.
    fn finish(&mut self, what: &str) -> Vec<Rule> {
        self.now_ns.fetch_add(3_000, Ordering::Relaxed);
        let qp = &mut self.qp;
        self.cq.poll(64, |cqe| {
            qp.complete(&cqe);
        });
        let violations = self
            .device
            .soft()
            .map_or_else(Vec::new, |soft| soft.take_violations());
        println!("{what}:");
        violations
            .iter()
            .for_each(|violation| println!("  {violation}"));
        violations.iter().map(|violation| violation.rule).collect()
    }
}

/// The region's first `SIZE` bytes are written to its second half, and read back.
const SIZE: u32 = 64;

fn write(l: &Loopback) -> Result<Write<mlx5::Sge>, Box<dyn Error>> {
    Ok(Write {
        addr: l.mr.addr() + 2048,
        rkey: l.mr.rkey(),
        payload: l.mr.sge(0, SIZE)?,
    })
}

fn read(l: &Loopback) -> Result<Read, Box<dyn Error>> {
    Ok(Read {
        addr: l.mr.addr() + 1024,
        rkey: l.mr.rkey(),
        into: l.mr.sge(0, SIZE)?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut l = Loopback::new(64)?;
    l.qp.post(&write(&l)?, Signal::Always, 0)?;
    l.qp.ring();
    l.mr.write(0, b"too early: the device may not have read it")?;
    let reuse = l.finish("a source buffer reused before the completion");

    // A READ may still be in flight when the next operation starts.
    let mut found = Vec::new();
    for fence in [false, true] {
        let mut l = Loopback::new(64)?;
        l.mr.write(1024, &[1; SIZE as usize])?;
        l.qp.post(&read(&l)?, Signal::Reclaim, 0)?;
        let flags = if fence {
            Signal::Always.fence()
        } else {
            Signal::Always.into()
        };
        l.qp.post(&write(&l)?, flags, 1)?;
        l.qp.ring();
        found.push(l.finish(if fence {
            "the same with a fence"
        } else {
            "sent on what a READ brings, without a fence"
        }));
    }

    // Every operation that may complete before the next poll needs an entry.
    let mut l = Loopback::new(2)?;
    for i in 0..5 {
        l.qp.post(&write(&l)?, Signal::Always, i)?;
    }
    l.qp.ring();
    let overrun = l.finish("5 completions and a queue of 2");

    let expected = (
        vec![Rule::SourceChanged],
        vec![vec![Rule::SourceChanged], vec![]],
        vec![Rule::CompletionOverrun],
    );
    if (reuse, found, overrun) == expected {
        Ok(())
    } else {
        Err("strict mode found something else".into())
    }
}
