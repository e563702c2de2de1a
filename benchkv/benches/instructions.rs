//! The program whose instructions `scripts/instructions` counts. It runs whole jobs: one thread
//! steps the daemons and clients of all ranks in turn, so that no thread waits and the counts are
//! exact.
//!
//! The count is the number of instructions that all threads of a job together execute per
//! operation, without the loop that steps them. Reads and writes are verified. The bounds in this
//! file are a few thousandths above the counts; the bound of a job with a policy is 3 % above the
//! bound of the same job without it.
//!
//! `--lockstep OPTIONS` runs the job with these options of benchkv, and prints two lines. The first
//! line has the number of messages between threads per operation, and the number of these messages
//! that stay within a rank; each message is counted where it is received. The second line has the
//! messages per WRITE, and the completions per round of a daemon: once over all rounds, and once
//! over the rounds that found completions. `--hand-overs TOPOLOGY` prints the same for the job of
//! `kv_remote_TOPOLOGY`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program for measuring"
)]

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use benchkv::cli::Cli;
use benchkv::options::Options;
use benchkv_harness::clock::Clock;
use benchkv_harness::counted::{self, Operation};
use clap::Parser;
use engine::backend::Endpoints;
use engine::backend::plan::Site;
use engine::drive::cluster::{Cluster, Moved};
use mlx5::{Clock as DeviceClock, DeviceSpec, FabricSpec, SoftOptions};

/// Numbers of operations of the two runs of a count. Both are multiples of the queue depth, and use
/// every slot of the queues many times.
const COUNTS: (u64, u64) = (4096, 20_480);

const LOCAL: &str = "--empty --device soft --ranks 1 --server-threads 1 --client-threads 1";
const REMOTE: &str = "--empty --device soft --ranks 2 --server-threads 2 --client-threads 1 --remote-ratio 1 --queue-depth 32";

const fn operation(
    name: &'static str,
    bound: Option<u32>,
    collect: &'static str,
    what: &'static str,
    run: fn(u64),
) -> Operation {
    Operation {
        name,
        bound,
        counts: COUNTS,
        collect,
        what,
        run,
    }
}

const OPERATIONS: &[Operation] = &[
    operation(
        "kv_local_depth1",
        Some(1054),
        "all",
        "benchkv: an operation on the own rank, one at a time",
        |operations| {
            job(
                &format!("{LOCAL} --queue-depth 1 --backend meta"),
                operations,
            );
        },
    ),
    operation(
        "kv_local_depth32",
        Some(368),
        "all",
        "benchkv: the same, 32 at a time",
        |operations| {
            job(
                &format!("{LOCAL} --queue-depth 32 --backend meta"),
                operations,
            );
        },
    ),
    operation(
        "kv_local_depth32_delegation",
        None,
        "all",
        "benchkv: the same beside an empty ring",
        |operations| {
            job(
                &format!("{LOCAL} --queue-depth 32 --backend delegation"),
                operations,
            );
        },
    ),
    operation(
        "kv_local_depth32_unverified",
        None,
        "all",
        "benchkv: as kv_local_depth32, with --no-verify",
        |operations| {
            job(
                &format!("{LOCAL} --queue-depth 32 --backend meta --no-verify"),
                operations,
            );
        },
    ),
    operation(
        "kv_remote_meta",
        Some(1491),
        "nohca",
        "benchkv: an operation on another rank, meta, without the software HCA",
        meta,
    ),
    operation(
        "kv_remote_delegation",
        Some(1252),
        "nohca",
        "benchkv: the same, delegation",
        delegation,
    ),
    operation(
        "kv_remote_sharded",
        Some(1003),
        "nohca",
        "benchkv: the same, sharded",
        sharded,
    ),
    operation(
        "kv_remote_direct",
        Some(707),
        "nohca",
        "benchkv: the same, direct",
        direct,
    ),
    operation(
        "kv_remote_delegation_policy",
        Some(1289),
        "nohca",
        "benchkv: the same, delegation, with a policy",
        with_policy,
    ),
    operation(
        "kv_remote_delegation_hold",
        Some(1289),
        "nohca",
        "benchkv: the same, delegation, with answers held",
        with_hold,
    ),
    operation(
        "kv_remote_meta_hca",
        None,
        "hca",
        "benchkv: what the software HCA adds to kv_remote_meta",
        meta,
    ),
    operation(
        "kv_remote_delegation_hca",
        None,
        "hca",
        "benchkv: the same, delegation",
        delegation,
    ),
    operation(
        "kv_remote_sharded_hca",
        None,
        "hca",
        "benchkv: the same, sharded",
        sharded,
    ),
    operation(
        "kv_remote_direct_hca",
        None,
        "hca",
        "benchkv: the same, direct",
        direct,
    ),
];

fn remote(topology: &str) -> String {
    format!("{REMOTE} --backend {topology}")
}

fn meta(operations: u64) {
    job(&remote("meta"), operations);
}

fn delegation(operations: u64) {
    job(&remote("delegation"), operations);
}

/// Runs a job with the policy that adds the least work: a round that moves nothing flushes, as it
/// does without a policy.
fn with_policy(operations: u64) {
    job(
        &format!("{} --flush-every 2", remote("delegation")),
        operations,
    );
}

/// Runs a job with the policy that adds the most work.
fn with_hold(operations: u64) {
    job(
        &format!("{} --hold adaptive", remote("delegation")),
        operations,
    );
}

fn sharded(operations: u64) {
    job(&remote("sharded"), operations);
}

fn direct(operations: u64) {
    job(&remote("direct"), operations);
}

/// Runs `operations` operations of the job with `args`, and does not drop the job: a copyrpc
/// context that is dropped polls its queues for a time, and these polls would be counted.
fn job(args: &str, operations: u64) {
    let dir = PathBuf::from(format!(
        "/dev/shm/benchkv-instructions-{}",
        std::process::id()
    ));
    DirBuilder::new().mode(0o700).create(&dir).unwrap();
    std::mem::forget(run(
        &format!("{args} --shm-dir {}", dir.display()),
        operations,
    ));
    fs::remove_dir_all(dir).unwrap();
}

fn run(args: &str, operations: u64) -> (Cluster, Moved) {
    let cli =
        Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap();
    let options = Options::resolve(cli).unwrap();
    let site = |rank| {
        options.site(rank).map(|site| Site {
            devices: vec![small_device(site.dir.path())],
            ..site
        })
    };
    let mut cluster = Cluster::new(&options.job, site).unwrap();
    let clock = Clock::detect();
    let moved = cluster.run(2 * operations, || clock.now_ns()).unwrap();
    (cluster, moved)
}

/// Returns a software device with a small arena, because valgrind has too little address space for
/// the usual one, and with a clock that does not advance. With a real clock, the number of times
/// that a context reads the clock, and the work that the context then finds due, would depend on
/// the speed of the machine.
fn small_device(dir: &Path) -> DeviceSpec {
    let fabric = FabricSpec::Shared {
        dir: Some(dir.to_owned()),
    };
    let clock = DeviceClock::Manual(Arc::new(AtomicU64::new(1_000_000_000)));
    DeviceSpec::Soft(SoftOptions {
        fabric,
        arena_bytes: 256 << 20,
        clock,
        ..SoftOptions::default()
    })
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let options = match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--hand-overs", topology] => remote(topology),
        ["--lockstep", options] => (*options).to_owned(),
        _ => return counted::main(OPERATIONS),
    };
    let (mut cluster, moved) = run(&options, COUNTS.1);
    let (mut messages, mut writes) = (0, 0);
    let count = |_, end: &mut dyn Endpoints| {
        let counted = end.transport().map(|report| report.counted);
        messages += counted.as_ref().map_or(0, |counted| counted.of("messages"));
        writes += counted.as_ref().map_or(0, |counted| counted.of("writes"));
        Ok(())
    };
    cluster.endpoints(count).unwrap();
    // `by_clients` counts an operation at its issue and at its end. The client of an operation
    // receives one message, the answer. No message of a run waits, so a daemon counts none twice.
    let operations = moved.by_clients / 2;
    let all = moved.by_daemons + operations;
    let ratio = |of: u64, to: u64| of as f64 / to as f64;
    println!(
        "{:.3} {:.3}",
        ratio(all, operations),
        ratio(all - messages, operations)
    );
    println!(
        "{:.3} {:.3} {:.3}",
        ratio(messages, writes),
        ratio(moved.cqes, moved.rounds),
        ratio(moved.cqes, moved.rounds_with_cqes)
    );
    ExitCode::SUCCESS
}
