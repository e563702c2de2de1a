//! The same job under every driver.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use benchkv_harness::clock::Clock;
use clap::Parser;
use copyrpc_shm::sleep::{Sleeper, Watch};
use engine::activity::Activity;
use engine::backend::composed::Composed;
use engine::backend::daemon::KvDaemon;
use engine::backend::paths::ClientPaths;
use engine::backend::{BackendError, Daemon, Endpoints, Workers};
use engine::counters::Round;
use engine::drive::cluster::Cluster;
use engine::drive::simulated::{Simulated, World};
use engine::job::Job;
use engine::message::{Outcome, Request};
use engine::store::{Shard, owner_of};
use engine::topology::Topology;
use engine::workload::AccessKind;

use crate::cli::{Cli, Command};
use crate::options::Options;
use crate::orchestrate::run_rank;
use crate::orchestrate::tests::{Meeting, ThreadExchange};
use crate::progress::Progress;
use crate::result::JobResult;

const OPS: u64 = 400;

/// Stores, by rank and daemon.
type Stores = Vec<Vec<Shard>>;

/// A backend that keeps the stores of its daemons.
struct Keeping {
    backend: Composed,
    stores: Arc<Mutex<Vec<(usize, Shard)>>>,
}

struct Kept {
    daemon: Option<KvDaemon>,
    number: usize,
    stores: Arc<Mutex<Vec<(usize, Shard)>>>,
}

impl Kept {
    fn daemon(&mut self) -> &mut KvDaemon {
        self.daemon.as_mut().unwrap()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let store = self.daemon.take().map(KvDaemon::into_store);
        self.stores
            .lock()
            .unwrap()
            .extend(store.map(|store| (self.number, store)));
    }
}

impl Endpoints for Kept {
    fn remote(&mut self) -> Option<&mut dyn Endpoints> {
        Some(self.daemon())
    }
}

impl Sleeper for Kept {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.daemon().with_watch(then);
    }
}

impl Daemon for Kept {
    fn step(&mut self, now_ns: impl FnOnce() -> u64) -> Result<Round, BackendError> {
        self.daemon().step(now_ns)
    }
}

impl Workers for Keeping {
    type Daemon = Kept;
    type Paths = ClientPaths;

    fn open_daemon(&self, daemon: usize) -> Result<Kept, BackendError> {
        let stores = Arc::clone(&self.stores);
        self.backend.open_daemon(daemon).map(|opened| Kept {
            daemon: Some(opened),
            number: daemon,
            stores,
        })
    }

    fn open_client(&self, client: usize) -> Result<ClientPaths, BackendError> {
        self.backend.open_client(client)
    }
}

/// A directory for this test only.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = PathBuf::from(format!("/dev/shm/benchkv-drivers-{}", std::process::id()));
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
            .create(&path)
            .unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs each rank with its own threads, in real time. Returns the number of successful operations,
/// and the content of the stores.
fn threads(options: &Options) -> (u64, Stores) {
    let meeting = Arc::<Meeting>::default();
    let run = |rank| {
        let backend = Composed::new(&options.job, options.site(rank).unwrap()).unwrap();
        let backend = Keeping {
            backend,
            stores: Arc::default(),
        };
        let mut exchange = ThreadExchange::new(rank, options.job.topology.ranks, &meeting);
        let report = run_rank(
            options,
            &backend,
            &mut exchange,
            Clock::monotonic(),
            &Progress::hidden(),
        )
        .unwrap();
        let mut stores = std::mem::take(&mut *backend.stores.lock().unwrap());
        stores.sort_by_key(|(number, _)| *number);
        let completed = serde_json::to_value(&report).unwrap()["completed"]
            .as_u64()
            .unwrap();
        (
            completed,
            stores.into_iter().map(|(_, store)| store).collect(),
        )
    };
    let ranks: Vec<(u64, Vec<Shard>)> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..options.job.topology.ranks)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (
        ranks.iter().map(|(completed, _)| completed).sum(),
        ranks.into_iter().map(|(_, stores)| stores).collect(),
    )
}

/// Runs all ranks in this thread, in turn.
fn lockstep(options: &Options) -> (u64, Stores) {
    let mut cluster = Cluster::new(&options.job, |rank| options.site(rank)).unwrap();
    let moved = cluster.run(u64::MAX, || 0).unwrap();
    let stores = cluster
        .ranks
        .into_iter()
        .map(|rank| rank.daemons.into_iter().map(KvDaemon::into_store).collect());
    (moved.by_clients / 2, stores.collect())
}

fn virtual_time(options: &Options) -> (u64, Stores) {
    let world = World {
        strict: true,
        ..World::default()
    };
    let (outcomes, summary) = Simulated::new(&options.job, &world)
        .unwrap()
        .run(Duration::ZERO, Duration::MAX, 1)
        .unwrap();
    assert_eq!(summary.violations, Vec::<String>::new());
    let completed = outcomes
        .iter()
        .flat_map(|rank| &rank.clients)
        .map(|client| client.counts.completed)
        .sum();
    (
        completed,
        outcomes.into_iter().map(|rank| rank.stores).collect(),
    )
}

/// Returns the values in the stores of all ranks under the clients' private keys.
fn private_values(job: &Job, mut stores: Stores) -> Vec<(u16, u64, Outcome)> {
    let Topology {
        ranks,
        clients,
        daemons,
        ..
    } = job.topology;
    let of_clients = (0..ranks).flat_map(|rank| (0..clients).map(move |client| (rank, client)));
    let accesses = of_clients.flat_map(|(rank, client)| job.client(rank, client).pattern.accesses);
    let mut keys: Vec<_> = accesses
        .filter(|access| access.kind == AccessKind::Private)
        .map(|access| (access.rank, access.key))
        .collect();
    keys.sort_unstable();
    keys.dedup();
    let value = |(rank, key): (u16, u64)| {
        let store = &mut stores[usize::from(rank)][owner_of(key, daemons)];
        (
            rank,
            key,
            store
                .apply(&Request::get(rank.into(), key))
                .outcome()
                .unwrap(),
        )
    };
    keys.into_iter().map(value).collect()
}

/// Any driver of the turns does the same operations, and the stores have the same content.
#[test]
fn threads_lockstep_and_virtual_time_do_the_same_operations() {
    let scratch = Scratch::new();
    for way in [
        "--backend delegation",
        "--backend meta --server-threads 2",
        "--backend direct --carrier rc-send",
        "--backend sharded",
    ] {
        let args = format!(
            "benchkv -n 4 -d 8 --client-threads 3 --ops {OPS} --wait yield --pin none {way}"
        );
        let args = args.split_whitespace().map(ToOwned::to_owned);
        let args = args.chain(["--shm-dir".to_owned(), scratch.0.display().to_string()]);
        let mut options = Options::resolve(Cli::try_parse_from(args).unwrap()).unwrap();
        options.job.workload.accesses = 1024;
        let (completed, stores) = threads(&options);
        let held = private_values(&options.job, stores);
        assert_eq!(completed, 4 * 3 * OPS, "{way}");
        assert!(
            held.iter()
                .filter(|(_, _, outcome)| *outcome != Outcome::NotFound)
                .count()
                > 4 * 3 * 8,
            "{held:?}"
        );
        for (name, driver) in [
            ("lockstep", lockstep as fn(&Options) -> (u64, Stores)),
            ("virtual time", virtual_time),
        ] {
            let (completed, stores) = driver(&options);
            assert_eq!(
                (completed, private_values(&options.job, stores)),
                (4 * 3 * OPS, held.clone()),
                "{way}, {name}"
            );
        }
    }
}

/// Runs `benchkv sim` with these words, or returns why it is refused.
fn sim(words: &str) -> Result<JobResult, String> {
    let cli = Cli::try_of(
        ["benchkv", "sim"]
            .into_iter()
            .chain(words.split_whitespace()),
    )
    .map_err(|error| error.to_string())?;
    let Some(Command::Sim(args)) = cli.command else {
        unreachable!()
    };
    let options = super::resolve(&args).map_err(|error| error.to_string())?;
    super::run(&args, &options).map_err(|error| error.to_string())
}

/// Returns million operations per second of each run.
fn rates(result: &JobResult) -> Vec<f64> {
    result
        .runs
        .iter()
        .map(|run| run.measured.total_rps / 1e6)
        .collect()
}

#[test]
fn a_sweep_sets_the_load_of_each_run() {
    for (sweep, outstanding) in [("clients=6,1,6", [24, 4, 24]), ("depth=4,1,4", [24, 6, 24])] {
        let result = sim(&format!(
            "-n 2 --client-threads 6 -d 4 -t 200us --warmup 100us --sweep {sweep}"
        ))
        .unwrap();
        let found: Vec<f64> = result
            .runs
            .iter()
            .map(|run| run.measured.total_rps * run.measured.latency_ns.mean / 1e9)
            .collect();
        // Little's law gives the load, except for operations that are under way when the load
        // changes.
        let is_near = |(found, ranks_load): (&f64, usize)| {
            (found / (2 * ranks_load) as f64 - 1.0).abs() < 0.15
        };
        assert!(
            found.iter().zip(outstanding).all(is_near),
            "{sweep}: {found:?}"
        );
        assert_eq!(
            (
                result.fate.lost,
                result.fate.issued,
                result.sweep().map(ToString::to_string)
            ),
            (0, result.fate.completed, Some(sweep.to_owned()))
        );
    }
}

#[test]
fn a_host_that_stands_still_ends_nothing_and_loses_nothing() {
    let job = "-n 2 --client-threads 2 -d 2 -t 200us --warmup 100us --runs 3 --remote-ratio 1";
    let result = sim(&format!("{job} --pause 1@300us+200us")).unwrap();
    let found = rates(&result);
    assert!(
        found[1] < 0.05 * found[0] && found[2] > 0.9 * found[0],
        "{found:?}"
    );
    assert_eq!(result.fate.lost, 0);
    // The host runs again in the middle of the last window.
    let late = sim(&format!("{job} --pause 1@400us+200us")).unwrap();
    for run in [&result, &late].into_iter().flat_map(|result| &result.runs) {
        let ended = (run.measured.local_ops + run.measured.remote_ops) as f64;
        let rate = run.measured.total_rps;
        assert!((rate * 200e-6 - ended).abs() < 1e-6, "{rate}, {ended}");
    }
}

/// A policy that is on for a time: before and after, the job runs as without it. Answers held at
/// the end of that time are passed on.
#[test]
fn policies_act_in_their_time_only() {
    let job = "-n 3 --client-threads 2 -d 1 -t 300us --warmup 100us --runs 3 --nic queue=2000";
    let without = rates(&sim(job).unwrap());
    let result = sim(&format!(
        "{job} --hold 100us --policies-from 400us --policies-until 700us"
    ))
    .unwrap();
    let found = rates(&result);
    assert!(
        found[1] < 0.5 * without[1] && (found[2] / without[2] - 1.0).abs() < 0.1,
        "{found:?}, {without:?}"
    );
    // The first run has exactly the rate of a job without the policy, so the policy has not acted
    // in the first turns either.
    for policy in [
        "--hold 100us",
        "--poll-budget 16",
        "--flush-every 8",
        "--batch-window consumption:1",
    ] {
        let found = rates(&sim(&format!("{job} {policy} --policies-from 400us")).unwrap());
        assert_eq!(found[0], without[0], "{policy}");
    }
    assert_eq!(result.fate.lost, 0);
}

#[test]
fn a_window_acts_in_its_time_only() {
    let job = "-n 2 --client-threads 4 -d 4 -t 100us --warmup 100us --runs 3 --batch-window consumption:1";
    let result = sim(&format!(
        "{job} --policies-from 200us --policies-until 300us"
    ))
    .unwrap();
    let stalls = |window: &Activity| {
        window
            .transport
            .as_ref()
            .unwrap()
            .counted
            .of("window_stalls")
    };
    let found: Vec<u64> = result.per_rank[0].daemons[0]
        .windows
        .iter()
        .map(stalls)
        .collect();
    assert!(found[0] == 0 && found[1] > 0 && found[2] == 0, "{found:?}");
}

#[test]
fn changes_that_mean_nothing_are_refused_by_name() {
    let window = "--batch-window completion:1";
    for (words, name, legal) in [
        ("--pause 2@1ms+1ms".to_owned(), "--pause", "0 to 1"),
        ("--pause 0@9ms+1ms".to_owned(), "--pause", "below 0.0025s"),
        ("--pause 0@1ms".to_owned(), "--pause", "RANK@TIME+TIME"),
        (
            "--sweep depth=1,5 -d 4".to_owned(),
            "--sweep",
            "--queue-depth",
        ),
        (
            "--sweep clients=0".to_owned(),
            "--sweep",
            "--client-threads",
        ),
        ("--sweep load=1".to_owned(), "--sweep", "depth=N"),
        ("--sweep depth=1 --runs 2".to_owned(), "--sweep", "--runs"),
        ("--sweep depth=1 --ops 9".to_owned(), "--sweep", "--ops"),
        (
            "--policies-from 1ms".to_owned(),
            "--policies-from",
            "--batch-window",
        ),
        (
            "--policies-from 1ms --batches-in-flight 8".to_owned(),
            "--policies-from",
            "--batch-window",
        ),
        (
            format!("--policies-until 1ms {window} --backend direct"),
            "--policies-until",
            "clients send the requests; legal is no value, so that its window acts all the time; or another --backend",
        ),
        (
            format!("--policies-from 9ms {window}"),
            "--policies-from",
            "below 0.0025s",
        ),
        (
            format!("--policies-from 2ms --policies-until 1ms {window}"),
            "--policies-until",
            "above 0.002s",
        ),
    ] {
        let error = sim(&words).unwrap_err();
        assert!(
            error.contains(name) && error.contains(legal),
            "{words}: {error}"
        );
    }
}
