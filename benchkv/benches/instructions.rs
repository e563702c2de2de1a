//! The program whose instructions `scripts/instructions` counts: whole jobs, the daemons and clients of all ranks stepped by turns in one
//! thread, so that nothing waits and the counts are exact.
//!
//! Counted is what the threads of a job do for an operation, all of them together, but for the loop around their steps. Reads and writes are
//! verified. Bounds are about a tenth above what was counted.
//!
//! `--hand-overs TOPOLOGY` prints, for the job of `kv_remote_TOPOLOGY`, the messages that pass from thread to thread for one operation, and how
//! many of them stay within a rank; each message is counted where it is taken in.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "a program for measuring")]

use std::path::Path;
use std::process::ExitCode;

use benchkv::backend::composed::Composed;
use benchkv::backend::{Backend, Daemon, Endpoints, Peer, Records, Worker};
use benchkv::cli::Cli;
use benchkv::client::{Client, ClientSpec, Step};
use benchkv::control::Phase;
use benchkv::options::Options;
use benchkv::verify::Verifier;
use clap::Parser;
use harness::clock::Clock;
use harness::counted::{self, Operation};
use mlx5::{DeviceSpec, FabricSpec, SoftOptions};

/// Many laps of every lane, and multiples of the depth.
const COUNTS: (u64, u64) = (4096, 20_480);

const LOCAL: &str = "--ranks 1 --server-threads 1 --client-threads 1";
const REMOTE: &str = "--ranks 2 --server-threads 2 --client-threads 1 --remote-ratio 1 --queue-depth 32";

const fn operation(name: &'static str, bound: Option<u32>, collect: &'static str, what: &'static str, run: fn(u64)) -> Operation {
    Operation { name, bound, counts: COUNTS, collect, what, run }
}

const OPERATIONS: &[Operation] = &[
    operation("kv_local_depth1", Some(1450), "all", "benchkv: an operation on the own rank, one at a time", |operations| {
        Job::new(&format!("{LOCAL} --queue-depth 1 --backend meta")).run(operations);
    }),
    operation("kv_local_depth32", Some(725), "all", "benchkv: the same, 32 at a time", |operations| {
        Job::new(&format!("{LOCAL} --queue-depth 32 --backend meta")).run(operations);
    }),
    operation("kv_local_depth32_delegation", None, "all", "benchkv: the same beside an empty ring", |operations| {
        Job::new(&format!("{LOCAL} --queue-depth 32 --backend delegation")).run(operations);
    }),
    operation("kv_local_depth32_unverified", None, "all", "benchkv: as kv_local_depth32, without --verify", |operations| {
        Job::new(&format!("{LOCAL} --queue-depth 32 --backend meta --verify=false")).run(operations);
    }),
    operation("kv_remote_meta", Some(2690), "nohca", "benchkv: an operation on another rank, meta, without the software HCA", meta),
    operation("kv_remote_delegation", Some(2230), "nohca", "benchkv: the same, delegation", delegation),
    operation("kv_remote_sharded", Some(1970), "nohca", "benchkv: the same, sharded", sharded),
    operation("kv_remote_direct", Some(1290), "nohca", "benchkv: the same, direct", direct),
    operation("kv_remote_meta_hca", None, "hca", "benchkv: what the software HCA adds to kv_remote_meta", meta),
    operation("kv_remote_delegation_hca", None, "hca", "benchkv: the same, delegation", delegation),
    operation("kv_remote_sharded_hca", None, "hca", "benchkv: the same, sharded", sharded),
    operation("kv_remote_direct_hca", None, "hca", "benchkv: the same, direct", direct),
];

fn remote(topology: &str, operations: u64) -> Moved {
    Job::new(&format!("{REMOTE} --backend {topology}")).run(operations)
}

fn meta(operations: u64) {
    remote("meta", operations);
}

fn delegation(operations: u64) {
    remote("delegation", operations);
}

fn sharded(operations: u64) {
    remote("sharded", operations);
}

fn direct(operations: u64) {
    remote("direct", operations);
}

/// The ranks of a job, connected.
struct Job {
    clock: Clock,
    ranks: Vec<Rank>,
}

struct Rank {
    daemons: Vec<<Composed as Backend>::Daemon>,
    clients: Vec<Client<<Composed as Backend>::Paths>>,
}

/// What was moved in a run.
#[derive(Default)]
struct Moved {
    operations: u64,
    /// Messages that daemons took in. Nothing of a run waits, so none is counted twice.
    by_daemons: u64,
    /// Of all messages, those between ranks.
    between_ranks: u64,
}

impl Job {
    fn new(args: &str) -> Self {
        let cli = Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap();
        let options = Options::resolve(cli).unwrap();
        let mut ranks: Vec<Rank> = (0..options.workload.ranks).map(|rank| Rank::new(&options, rank)).collect();
        let mut all: Vec<(Peer, Records)> = Vec::new();
        for (rank, ends) in ranks.iter_mut().enumerate() {
            ends.endpoints(|worker, end| all.push((Peer { rank, worker }, end.records())));
        }
        for (rank, ends) in ranks.iter_mut().enumerate() {
            ends.endpoints(|worker, end| {
                let me = Peer { rank, worker };
                let mine: Records = all
                    .iter()
                    .flat_map(|(from, records)| records.iter().filter(|(to, _)| *to == me).map(|(_, bytes)| (*from, bytes.clone())))
                    .collect();
                end.connect(&mine).unwrap();
            });
        }
        Self { clock: Clock::detect(), ranks }
    }

    /// Steps everybody by turns until so many operations have ended, and nothing is left.
    fn run(mut self, operations: u64) -> Moved {
        let (mut moved, mut moves, mut drained) = (Moved::default(), 0, 0);
        let clients: usize = self.ranks.iter().map(|rank| rank.clients.len()).sum();
        while drained < clients {
            drained = 0;
            let phase = if moves < 2 * operations { Phase::Window(0) } else { Phase::Drain };
            for rank in &mut self.ranks {
                for client in &mut rank.clients {
                    match client.step(phase, || self.clock.now_ns()).unwrap() {
                        Step::Busy(count) => moves += count as u64,
                        Step::Idle => {}
                        Step::Drained => drained += 1,
                    }
                }
                for daemon in &mut rank.daemons {
                    moved.by_daemons += daemon.step(|| self.clock.now_ns()).unwrap().moved as u64;
                }
            }
        }
        moved.operations = moves / 2;
        for rank in &mut self.ranks {
            rank.endpoints(|_, end| moved.between_ranks += end.transport().map_or(0, |report| report.messages));
        }
        moved
    }
}

impl Rank {
    fn new(options: &Options, rank: usize) -> Self {
        let (backend, workload) = (Composed::on(options, rank, small_device).unwrap(), &options.workload);
        let daemons = (0..options.server_threads).map(|daemon| backend.open_daemon(daemon).unwrap()).collect();
        let client = |number| {
            let pattern = workload.pattern(rank, number);
            let writer = (rank * workload.clients + number) as u16;
            let verifier = workload.verify.then(|| Verifier::new(writer, workload.ranks * workload.clients, pattern.read_keys));
            let spec = ClientSpec {
                rank: rank as u16,
                queue_depth: options.queue_depth,
                runs: options.runs,
                pattern,
                schedule: None,
                verifier,
                corrupt_one: false,
            };
            Client::new(spec, backend.open_client(number).unwrap())
        };
        Self { daemons, clients: (0..workload.clients).map(client).collect() }
    }

    fn endpoints(&mut self, mut visit: impl FnMut(Worker, &mut dyn Endpoints)) {
        for (number, daemon) in self.daemons.iter_mut().enumerate() {
            visit(Worker::Daemon(number), daemon);
        }
        for (number, client) in self.clients.iter_mut().enumerate() {
            visit(Worker::Client(number), client.paths_mut());
        }
    }
}

/// The software device with less address space: valgrind has too little for the usual arena.
fn small_device(dir: &Path) -> DeviceSpec {
    let fabric = FabricSpec::Shared { dir: Some(dir.to_owned()) };
    DeviceSpec::Soft(SoftOptions { fabric, arena_bytes: 256 << 20, ..SoftOptions::default() })
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [option, topology] = &args[..] else { return counted::main(OPERATIONS) };
    if option != "--hand-overs" {
        return counted::main(OPERATIONS);
    }
    let moved = remote(topology, COUNTS.1);
    // A client takes one message in for each operation.
    let per_operation = |messages: u64| messages as f64 / moved.operations as f64;
    let all = moved.by_daemons + moved.operations;
    println!("{:.3} {:.3}", per_operation(all), per_operation(all - moved.between_ranks));
    ExitCode::SUCCESS
}
