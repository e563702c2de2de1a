//! The same job under every driver.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser;
use engine::backend::composed::Composed;
use engine::backend::daemon::KvDaemon;
use engine::backend::paths::ClientPaths;
use engine::backend::{Backend, BackendError, Daemon, Endpoints};
use engine::counters::Round;
use engine::drive::cluster::Cluster;
use engine::drive::simulated::{Simulated, World};
use engine::job::Job;
use engine::message::{Outcome, Request};
use engine::store::{Shard, owner_of};
use engine::topology::Topology;
use engine::workload::AccessKind;
use harness::clock::Clock;
use shm::sleep::{Sleeper, Watch};

use crate::cli::Cli;
use crate::options::Options;
use crate::orchestrate::run_rank;
use crate::orchestrate::tests::{Meeting, ThreadExchange};
use crate::progress::Progress;

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
        self.stores.lock().unwrap().extend(store.map(|store| (self.number, store)));
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

impl Backend for Keeping {
    type Daemon = Kept;
    type Paths = ClientPaths;

    fn open_daemon(&self, daemon: usize) -> Result<Kept, BackendError> {
        let stores = Arc::clone(&self.stores);
        self.backend.open_daemon(daemon).map(|opened| Kept { daemon: Some(opened), number: daemon, stores })
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
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs each rank with its own threads, in real time. Returns the number of successful operations, and the content of the stores.
fn threads(options: &Options) -> (u64, Stores) {
    let meeting = Arc::<Meeting>::default();
    let run = |rank| {
        let backend = Composed::new(&options.job, options.site(rank, std::process::id()).unwrap()).unwrap();
        let backend = Keeping { backend, stores: Arc::default() };
        let mut exchange = ThreadExchange::new(rank, options.job.topology.ranks, &meeting);
        let report = run_rank(options, &backend, &mut exchange, Clock::monotonic(), &Progress::hidden()).unwrap();
        let mut stores = std::mem::take(&mut *backend.stores.lock().unwrap());
        stores.sort_by_key(|(number, _)| *number);
        let completed = serde_json::to_value(&report).unwrap()["completed"].as_u64().unwrap();
        (completed, stores.into_iter().map(|(_, store)| store).collect())
    };
    let ranks: Vec<(u64, Vec<Shard>)> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..options.job.topology.ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (ranks.iter().map(|(completed, _)| completed).sum(), ranks.into_iter().map(|(_, stores)| stores).collect())
}

/// Runs all ranks in this thread, in turn.
fn lockstep(options: &Options) -> (u64, Stores) {
    let mut cluster = Cluster::new(&options.job, |rank| options.site(rank, std::process::id())).unwrap();
    let moved = cluster.run(u64::MAX, || 0).unwrap();
    let stores = cluster.ranks.into_iter().map(|rank| rank.daemons.into_iter().map(KvDaemon::into_store).collect());
    (moved.by_clients / 2, stores.collect())
}

fn virtual_time(options: &Options) -> (u64, Stores) {
    let world = World { strict: true, ..World::default() };
    let (outcomes, summary) = Simulated::new(&options.job, &world).unwrap().run(Duration::ZERO, Duration::MAX, 1).unwrap();
    assert_eq!(summary.violations, Vec::<String>::new());
    let completed = outcomes.iter().flat_map(|rank| &rank.clients).map(|client| client.counts.completed).sum();
    (completed, outcomes.into_iter().map(|rank| rank.stores).collect())
}

/// Returns the values in the stores of all ranks under the clients' private keys.
fn private_values(job: &Job, mut stores: Stores) -> Vec<(u16, u64, Outcome)> {
    let Topology { ranks, clients, daemons, .. } = job.topology;
    let of_clients = (0..ranks).flat_map(|rank| (0..clients).map(move |client| (rank, client)));
    let accesses = of_clients.flat_map(|(rank, client)| job.client(rank, client).pattern.accesses);
    let mut keys: Vec<_> = accesses.filter(|access| access.kind == AccessKind::Private).map(|access| (access.rank, access.key)).collect();
    keys.sort_unstable();
    keys.dedup();
    let value = |(rank, key): (u16, u64)| {
        let store = &mut stores[usize::from(rank)][owner_of(key, daemons)];
        (rank, key, store.apply(&Request::get(rank.into(), key)).outcome().unwrap())
    };
    keys.into_iter().map(value).collect()
}

/// Any driver of the turns does the same operations, and the stores have the same content.
#[test]
fn threads_lockstep_and_virtual_time_do_the_same_operations() {
    let scratch = Scratch::new();
    for way in ["--backend delegation", "--backend meta --server-threads 2", "--backend direct --carrier rc-send", "--backend sharded"] {
        let args = format!("benchkv -n 4 -d 8 --client-threads 3 --ops {OPS} --wait yield --pin none {way}");
        let args = args.split_whitespace().map(ToOwned::to_owned);
        let args = args.chain(["--shm-dir".to_owned(), scratch.0.display().to_string()]);
        let mut options = Options::resolve(Cli::try_parse_from(args).unwrap()).unwrap();
        options.job.workload.accesses = 1024;
        let (completed, stores) = threads(&options);
        let held = private_values(&options.job, stores);
        assert_eq!(completed, 4 * 3 * OPS, "{way}");
        assert!(held.iter().filter(|(_, _, outcome)| *outcome != Outcome::NotFound).count() > 4 * 3 * 8, "{held:?}");
        for (name, driver) in [("lockstep", lockstep as fn(&Options) -> (u64, Stores)), ("virtual time", virtual_time)] {
            let (completed, stores) = driver(&options);
            assert_eq!((completed, private_values(&options.job, stores)), (4 * 3 * OPS, held.clone()), "{way}, {name}");
        }
    }
}
