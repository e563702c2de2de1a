//! Random jobs in virtual time, half of them with faults. The checks of each job:
//!
//! - every operation ends once and successfully, and all operations of the job are issued, at any
//!   rate; if a rank dies, the operations of the ranks that depend on it end with these ranks,
//!   which report the death in time;
//! - every value that was read had been written, and none is lost;
//! - the credit that a connection used for answers equals the credit that its peer has returned; no
//!   daemon keeps a request or an answer;
//! - no ring is overrun (copyrpc ends a connection whose peer overruns a ring, and asserts that its
//!   own end does not) and no device finds a rule broken;
//! - without faults nothing waits for a check of forgotten work;
//! - a turn is bounded, and so is the job: a watchdog ends the process with the seed.
//!
//! `SWARM_SEEDS=N` runs N jobs, `SWARM_SEED=S` begins with seed S: a failure names the seed of its
//! job. `SWARM_TRACE=1` shows every turn.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use mlx5::NicParameters;

use crate::backend::BackendError;
use crate::drive::faults::{At, Faults};
use crate::drive::simulated::*;
use crate::job::{Job, Sizes};
use crate::pace::{Arrivals, Pace};
use crate::policy::{HoldChoice, PolicyOptions};
use crate::tests::{self as testing, topology};
use crate::topology::{Backend, Carrier, Topology};
use crate::workload::{Distribution, Workload};

/// Number of jobs of a run in CI.
const SEEDS: u64 = 200;
/// Seeds of jobs that once failed. 23215: all threads rested while READs waited for some polls, and
/// no thread polled.
const ONCE_FAILED: [u64; 1] = [23_215];
/// Number of windows of a job.
const RUNS: usize = 2;
/// Upper bound of the messages that a turn moves: each phase of a daemon moves at most a few
/// hundred, and a client has fewer operations outstanding.
const MOST_MOVED: usize = 2_000;
/// Maximum time until a dead peer is detected, in ns: a silent peer is probed, and the probe fails.
const NOTICED_NS: u64 = 1_000_000_000;
/// Maximum duration of a job without faults, in ns. If a thread were not woken for its work, a
/// periodic check would find the work, but later than this.
const PROMPT_NS: u64 = 2_000_000;
/// CPU time of the process, that of other tests included, after which a job counts as endless.
const PATIENCE: Duration = Duration::from_secs(30);

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
        line_ns: 0,
        stall_ns: 0,
        noise: 0,
    };
    World {
        cpu,
        nic,
        strict: true,
        on_turn: Some(look_at),
        ..World::default()
    }
}

/// Returns the faults of a job; half of the jobs have none.
fn faults(rng: &mut Rng, topology: &Topology) -> Faults {
    let mut faults = Faults {
        seed: rng.u64(..),
        ..Faults::default()
    };
    if rng.bool() {
        return faults;
    }
    let rank = rng.usize(..topology.ranks);
    let at = At {
        rank,
        at_ns: rng.u64(..80_000),
    };
    match rng.u8(..8) {
        0 => faults.killed = Some(at),
        // With the backend `direct`, a daemon takes a queue pair in error for a client that has
        // disconnected. The client polls for the half second in which its device tries again, which
        // takes millions of turns.
        1 if topology.backend != Backend::Direct => faults.error = Some((rank, rng.u64(..100))),
        2 | 3 => faults.stopped = Some((at, rng.u64(1_000..5_000_000))),
        4 | 5 => faults.slow = Some((rank, rng.u64(2..50))),
        _ => {}
    }
    if rng.bool() {
        (faults.delay_permille, faults.delay_ns) = (rng.u16(1..500), rng.u64(100..50_000));
    }
    if rng.bool() {
        faults.rnr_permille = rng.u16(1..300);
    }
    if rng.bool() {
        faults.lost_permille = rng.u16(1..=1_000);
    }
    faults
}

/// Returns policies that can be combined. Half of the jobs, and all jobs with the backend `direct`,
/// have no rules of daemons.
fn policies(rng: &mut Rng, topology: &Topology) -> PolicyOptions {
    let is_governed = rng.bool() && topology.backend != Backend::Direct;
    let mut policies = PolicyOptions::default();
    if is_governed {
        let us = |rng: &mut Rng| rng.bool().then(|| f64::from(rng.u32(1..30)));
        let (hold_us, is_adaptive) = (us(rng), rng.bool());
        policies.hold = match (is_adaptive, hold_us) {
            (true, hold_us) => HoldChoice::Adaptive(hold_us),
            (false, hold_us) => hold_us.map_or(HoldChoice::Off, HoldChoice::Fixed),
        };
        policies.coalesce_rtt_us = us(rng);
        policies.poll_budget.polls = rng.u32(0..20);
        policies.poll_budget.cqes = rng.usize(1..8);
        policies.flush_every = rng.u32(1..6);
    }
    if topology.carrier == Carrier::Copyrpc {
        let windows = [
            "off",
            "off",
            "completion:1",
            "consumption:1",
            "completion:3",
            "consumption:4",
        ];
        policies.batch_window = windows[rng.usize(..windows.len())].parse().unwrap();
    }
    policies
}

fn job(rng: &mut Rng) -> Job {
    let backend = [
        Backend::Meta,
        Backend::Delegation,
        Backend::Sharded,
        Backend::Direct,
    ][rng.usize(..4)];
    let carrier = if backend == Backend::Delegation && rng.bool() {
        Carrier::RcSend
    } else {
        Carrier::Copyrpc
    };
    let topology = topology(
        backend,
        carrier,
        rng.usize(2..=8),
        rng.usize(1..=3),
        rng.usize(1..=5),
    );
    let depth = rng.usize(1..=24);
    let distribution = if rng.bool() {
        Distribution::Uniform
    } else {
        Distribution::Zipfian { theta: 0.99 }
    };
    let job = testing::job(topology);
    let workload = Workload {
        // With few keys, each key is written often, so wrong orders of writes are detected.
        key_range: if rng.u8(..3) == 0 {
            rng.u64(1..8)
        } else {
            rng.u64(1..5_000)
        },
        read_ratio: rng.f64(),
        remote_ratio: rng.f64(),
        distribution,
        seed: rng.u64(..),
        accesses: 1024,
        ..job.workload
    };
    let ring_bytes = if rng.bool() { Some(4096) } else { None };
    let pace = (rng.u8(..4) == 0).then(|| Pace {
        rate: rng.u32(10_000..5_000_000).into(),
        arrivals: if rng.bool() {
            Arrivals::Even
        } else {
            Arrivals::Poisson
        },
    });
    Job {
        workload,
        queue_depth: depth,
        pace,
        runs: RUNS,
        is_frugal: true,
        sizes: Sizes::compute(ring_bytes, &topology, depth, 8),
        policies: policies(rng, &topology),
        ..job
    }
}

fn look_at(turn: &Turn<'_>) {
    if std::env::var_os("SWARM_TRACE").is_some() {
        let Turn {
            at_ns,
            rank,
            who,
            number,
            moved,
            did,
        } = turn;
        eprintln!("{at_ns:>12} ns, rank {rank}, {who} {number}: {moved} moved, {did:?}");
    }
    assert!(turn.moved <= MOST_MOVED, "{turn:?}");
}

/// The counters of jobs.
#[derive(Debug, Default)]
struct Tally {
    operations: u64,
    /// Number of jobs in which a rank died.
    fatal: u64,
    /// Number of failures that ranks reported because another rank was lost.
    noticed: u64,
    rnr_naks: u64,
    /// Duration of the longest job without faults.
    longest_ns: u64,
}

/// Limits the number of operations in a quarter of the jobs. Half of these jobs have an open loop,
/// a few with pauses of seconds.
fn of_operations(job: Job, rng: &mut Rng) -> Job {
    if rng.u8(..4) > 0 {
        return job;
    }
    let arrivals = if rng.bool() {
        Arrivals::Even
    } else {
        Arrivals::Poisson
    };
    let (slowest, ops) = if rng.u8(..8) == 0 {
        (0.5, 1..4)
    } else {
        (1e4, 1..100)
    };
    let pace = rng.bool().then(|| Pace {
        rate: slowest * 10f64.powf(2.0 * rng.f64()),
        arrivals,
    });
    Job {
        ops: Some(rng.u64(ops)),
        pace,
        ..job
    }
}

/// Returns the time at which the last operation of a job is due.
fn last_due_ns(job: &Job) -> u64 {
    let last = |(rank, client)| {
        let mut schedule = job.client(rank, client).schedule?;
        (0..job.ops?)
            .filter_map(|_| schedule.take_due(u64::MAX))
            .last()
    };
    let clients = (0..job.topology.ranks)
        .flat_map(|rank| (0..job.topology.clients).map(move |client| (rank, client)));
    clients.filter_map(last).max().unwrap_or(0)
}

/// Checks the end of a job, and adds the job's counts to `tally`.
fn judge(ended: &Ended, job: &Job, faults: &Faults, tally: &mut Tally) {
    let Ended {
        ranks,
        summary,
        failures,
    } = ended;
    let fatal = faults
        .killed
        .map(|at| at.rank)
        .or(faults.error.map(|(rank, _)| rank));
    for (number, failure) in failures.iter().enumerate() {
        let SimulationError::Failed {
            rank,
            at_ns,
            source: BackendError::PeerGone { rank: gone, .. },
            ..
        } = failure
        else {
            panic!("{failure}");
        };
        // The first error is the error of the queue pair that was made to fail, if any, and both
        // its ranks are unharmed.
        let is_cause = number == 0
            && faults
                .error
                .is_some_and(|(failing, _)| [*rank, *gone].contains(&failing));
        assert!(
            fatal.is_some() && (ranks[*gone].is_dead || is_cause),
            "{failure}"
        );
        let since_ns = faults.killed.map_or(0, |at| at.at_ns) + NOTICED_NS;
        assert!(
            *at_ns < since_ns + number as u64 * NOTICED_NS,
            "{failure}, which is late"
        );
    }
    tally.fatal += u64::from(ranks.iter().any(|rank| rank.is_dead));
    tally.noticed += failures.len() as u64;
    for (rank, outcome) in ranks.iter().enumerate() {
        assert!(!outcome.is_dead || fatal.is_some(), "rank {rank} died");
        for (number, client) in outcome.clients.iter().enumerate() {
            let (counts, verdict) = (client.counts, client.verdict.as_ref().unwrap());
            let who = format!("client {number} of rank {rank}");
            assert_eq!((verdict.failures, &verdict.first), (0, &None), "{who}");
            tally.operations += counts.completed;
            if !outcome.is_dead {
                assert_eq!(
                    (counts.issued, counts.errors, client.outstanding),
                    (counts.completed, 0, 0),
                    "{who}"
                );
                assert!(
                    job.ops.is_none_or(|asked| asked == counts.issued),
                    "{who} issued {} of {:?}",
                    counts.issued,
                    job.ops
                );
            }
        }
    }
    let naks = ranks
        .iter()
        .flat_map(|rank| &rank.daemons)
        .filter_map(|daemon| daemon.transport.as_ref()?.counted.get("rnr_naks"));
    tally.rnr_naks += naks.sum::<u64>();
    assert!(summary.violations.is_empty(), "{:?}", summary.violations);
    if *faults
        == (Faults {
            seed: faults.seed,
            ..Faults::default()
        })
    {
        tally.longest_ns = tally.longest_ns.max(summary.ended_ns);
        let kept_ns = last_due_ns(job);
        assert!(
            summary.ended_ns < kept_ns + PROMPT_NS,
            "it took {} ns, and nothing kept it after {kept_ns} ns",
            summary.ended_ns
        );
    }
}

/// Runs the job of a seed.
fn run(seed: u64, tally: &mut Tally) {
    let mut rng = Rng::with_seed(seed);
    let (job, world) = (job(&mut rng), world(&mut rng));
    let world = World {
        faults: faults(&mut rng, &job.topology),
        ..world
    };
    if std::env::var_os("SWARM_TRACE").is_some() {
        eprintln!("{job:?}\n{:?}", world.faults);
    }
    let window = Duration::from_micros(rng.u64(20..60));
    let job = of_operations(job, &mut rng);
    let window = if job.ops.is_some() {
        Duration::MAX
    } else {
        window
    };
    let simulated = Simulated::new(&job, &world).unwrap();
    let ended = simulated.run_on(Duration::from_micros(20), window, RUNS);
    let judged = catch_unwind(AssertUnwindSafe(|| {
        judge(&ended, &job, &world.faults, tally)
    }));
    judged.unwrap_or_else(|why| {
        eprintln!(
            "{job:?}\n{:?}\nfailures: {:?}",
            world.faults, ended.failures
        );
        std::panic::resume_unwind(why)
    })
}

/// Returns the CPU time of this process, which other processes do not lengthen.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    assert_eq!(
        // SAFETY: the kernel writes one `timespec` into the variable of that type.
        unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) },
        0
    );
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Ends the process if a seed takes too long.
struct Watchdog {
    seed: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Watchdog {
    fn new() -> Self {
        let (seed, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (watched, ends) = (Arc::clone(&seed), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let (mut last, mut since) = (0, cpu_time());
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
                let now = watched.load(Ordering::Relaxed);
                if now != last {
                    (last, since) = (now, cpu_time());
                } else if cpu_time() - since > PATIENCE {
                    eprintln!("seed {now} does not end: {}", again(now));
                    std::process::abort();
                }
            }
        });
        Self { seed, is_over }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn again(seed: u64) -> String {
    format!(
        "SWARM_SEED={seed} cargo test -p benchkv-core random_jobs repeats it, and shows it with SWARM_TRACE=1"
    )
}

#[test]
fn random_jobs_end_well() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let first = number("SWARM_SEED").unwrap_or(1);
    let seeds = number("SWARM_SEEDS").unwrap_or(if number("SWARM_SEED").is_some() {
        1
    } else {
        SEEDS
    });
    let (watchdog, tells) = (Watchdog::new(), number("SWARM_SEED").is_some());
    let mut tally = Tally::default();
    let known = ONCE_FAILED
        .into_iter()
        .filter(|_| number("SWARM_SEED").is_none());
    for seed in known.chain(first..first + seeds) {
        watchdog.seed.store(seed, Ordering::Relaxed);
        if tells {
            println!("seed {seed}");
        }
        let ended = catch_unwind(AssertUnwindSafe(|| run(seed, &mut tally)));
        ended.unwrap_or_else(|_| panic!("seed {seed} failed: {}", again(seed)));
    }
    println!("{seeds} jobs: {tally:?}");
    let Tally {
        operations,
        fatal,
        noticed,
        rnr_naks,
        ..
    } = tally;
    assert!(
        seeds < SEEDS
            || (operations > 100 * seeds
                && fatal > seeds / 20
                && noticed > fatal
                && rnr_naks > seeds)
    );
}
