//! Random jobs in virtual time: every operation ends once and well, and no device finds a rule broken.
//!
//! `SWARM_SEEDS=N` runs so many jobs, `SWARM_SEED=S` begins with seed S: a failure names the seed of its job.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use fastrand::Rng;
use mlx5::NicParameters;

use super::simulated::*;
use crate::job::{Job, Sizes};
use crate::pace::{Arrivals, Pace};
use crate::policy::PolicyOptions;
use crate::testing::{self, topology};
use crate::topology::{Routing, Topology, Transport};
use crate::workload::{Distribution, Workload};

/// Jobs of a run in CI.
const SEEDS: u64 = 200;
/// Windows of a job.
const RUNS: usize = 2;

fn world(rng: &mut Rng) -> World {
    let nic = NicParameters::default();
    let receive_ns = rng.u64(0..2 * nic.receive_ns);
    let nic = NicParameters {
        link_ns: rng.u64(100..5_000),
        jitter_ns: if rng.bool() { rng.u64(1..3_000) } else { 0 },
        receive_ns,
        unordered_receive_ns: receive_ns + rng.u64(0..1_000),
        context_entries: rng.usize(1..64),
        seed: rng.u64(..),
        ..nic
    };
    let mut ns = |most: u64| rng.u64(1..most);
    let cpu = Cpu {
        round_ns: ns(400),
        poll_ns: ns(100),
        message_ns: ns(500),
        completion_ns: ns(200),
        write_ns: ns(400),
        client_ns: ns(100),
        operation_ns: ns(300),
    };
    World { cpu, nic, strict: true, trace_interval: None }
}

/// Policies that go together; none half of the time.
fn policies(rng: &mut Rng, topology: &Topology) -> PolicyOptions {
    let is_governed = rng.bool() && topology.routing != Routing::Direct;
    let mut policies = PolicyOptions::default();
    if is_governed {
        let us = |rng: &mut Rng| rng.bool().then(|| rng.u32(1..30).into());
        policies.batch_hold_us = us(rng);
        policies.adaptive_hold = rng.bool();
        policies.hold_rtt_multiplier = if policies.adaptive_hold { None } else { us(rng).map(|us: f64| us / 10.0) };
        policies.coalesce_rtt_us = us(rng);
        policies.adaptive_budget = rng.bool();
        policies.poll_budget = if policies.adaptive_budget { 0 } else { rng.u32(0..20) };
        policies.flush_every = rng.u32(1..6);
        policies.initial_stagger_us = us(rng);
    }
    policies.ipc_skip_idle = if rng.bool() { rng.u32(0..8) } else { 0 };
    if topology.transport == Transport::Copyrpc {
        let windows = ["off", "off", "completion:1", "consumption:1", "completion:3", "consumption:4"];
        policies.batch_window = windows[rng.usize(..windows.len())].parse().unwrap();
    }
    policies
}

fn job(rng: &mut Rng) -> Job {
    let routing = [Routing::Meta, Routing::Delegation, Routing::Sharded, Routing::Direct][rng.usize(..4)];
    let transport = if routing == Routing::Delegation && rng.bool() { Transport::RcSend } else { Transport::Copyrpc };
    let topology = topology(routing, transport, rng.usize(2..=8), rng.usize(1..=3), rng.usize(1..=5));
    let depth = rng.usize(1..=24);
    let distribution = if rng.bool() { Distribution::Uniform } else { Distribution::Zipfian { theta: 0.99 } };
    let job = testing::job(topology);
    let workload = Workload {
        key_range: rng.u64(1..5_000),
        read_ratio: rng.f64(),
        remote_ratio: rng.f64(),
        distribution,
        seed: rng.u64(..),
        accesses: 1024,
        ..job.workload
    };
    let ring_bytes = if rng.bool() { Some(4096) } else { None };
    let pace = (rng.u8(..4) == 0)
        .then(|| Pace { rate: rng.u32(10_000..5_000_000).into(), arrivals: if rng.bool() { Arrivals::Even } else { Arrivals::Poisson } });
    Job {
        workload,
        queue_depth: depth,
        pace,
        runs: RUNS,
        sizes: Sizes::compute(ring_bytes, &topology, depth, 8),
        policies: policies(rng, &topology),
        ..job
    }
}

/// Runs the job of a seed. Returns its operations.
fn run(seed: u64) -> u64 {
    let mut rng = Rng::with_seed(seed);
    let (job, world) = (job(&mut rng), world(&mut rng));
    let simulated = Simulated::new(&job, &world).unwrap();
    let window = Duration::from_micros(rng.u64(20..60));
    let (ranks, summary) = simulated.run(Duration::from_micros(20), window, RUNS).unwrap();
    let mut completed = 0;
    for (rank, outcome) in ranks.iter().enumerate() {
        for (number, client) in outcome.clients.iter().enumerate() {
            let (counts, verdict) = (client.counts, client.verdict.as_ref().unwrap());
            let who = format!("client {number} of rank {rank} of {job:?}");
            assert_eq!((counts.issued, counts.errors, client.outstanding), (counts.completed, 0, 0), "{who}");
            assert_eq!((verdict.failures, &verdict.first), (0, &None), "{who}");
            completed += counts.completed;
        }
    }
    assert!(summary.violations.is_empty(), "{:?} {job:?}", summary.violations);
    completed
}

#[test]
fn random_jobs_end_well() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let first = number("SWARM_SEED").unwrap_or(1);
    let seeds = number("SWARM_SEEDS").unwrap_or(if number("SWARM_SEED").is_some() { 1 } else { SEEDS });
    let mut completed = 0;
    for seed in first..first + seeds {
        let ended = catch_unwind(AssertUnwindSafe(|| run(seed)));
        completed +=
            ended.unwrap_or_else(|_| panic!("seed {seed} failed: SWARM_SEED={seed} cargo test -p benchkv-core random_jobs repeats it"));
    }
    println!("{seeds} jobs, {completed} operations");
    assert!(completed > 100 * seeds, "{completed}");
}
