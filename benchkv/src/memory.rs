//! The expected memory of a job on a host, computed before the job starts. With endpoints for each client it grows with the square of the
//! ranks.

use std::fmt;
use std::path::PathBuf;

use harness::cgroup;
use harness::environment::Environment;
use harness::report::bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cli::ClientKind;
use engine::job::Job;
use engine::topology::Topology;
use engine::trace::recorder::Recorder;
use engine::transport::Connection;
use engine::values::Places;
use engine::verify::Verifier;
use engine::workload::Access;

/// A message of the shared-memory crates: 16 bytes and a payload of at most 48.
const SLOT_BYTES: u64 = 64;
/// A call that a daemon can have unanswered at another, or have to answer: its entry in the table of calls and in that of calls held, and
/// its place among the received calls. flux allocates them for the maximum number in flight.
const FLUX_CALL_BYTES: u64 = 36 + 36 + 56;
/// An operation that a client has outstanding: its entry in the tables of the client and of the paths it may take, and of the daemons
/// where it may wait.
const BYTES_PER_OPERATION: u64 = 256;
/// A histogram of latencies; a client has four for each run: of gets and puts, on its own rank and others.
const HISTOGRAM_BYTES: u64 = 240 << 10;
/// A histogram that has grown to the usual range of virtual time, latencies below 2 ms.
const GROWN_HISTOGRAM_BYTES: u64 = 96 << 10;
/// The memory of a rank of a simulated job in the place of a process: a device, and actors. Once its part is done, its report.
const SIMULATED_RANK_BYTES: u64 = 4 << 20;
/// A client of a simulated job, beside the memory of every client: its ends of channels, and itself as an actor.
const SIMULATED_CLIENT_BYTES: u64 = 16 << 10;
/// Code, stacks and allocator of a rank or client process.
const PROCESS_BYTES: u64 = 8 << 20;

/// Bytes, of the ranks of one host together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Endpoints of these ranks.
    pub endpoints: u64,
    /// Connections between ranks: two rings for each endpoint, and its queues.
    pub connections_bytes: u64,
    /// The tables with the keys.
    pub stores_bytes: u64,
    /// Channels within a rank: ipc, rings, flux.
    pub channels_bytes: u64,
    /// Access patterns, verification and histograms of the clients.
    pub clients_bytes: u64,
    /// All of that, the processes themselves, and the time series of the daemons.
    pub total_bytes: u64,
}

/// The memory of a host that a job may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    bytes: u64,
    /// The source of the limit, in words.
    source: String,
}

impl MemoryLimit {
    /// Returns the limit: `--memory-limit`, or else the memory of this host, or the limit of its control group if that is less.
    #[must_use]
    pub fn new(given: Option<u64>) -> Self {
        match given {
            Some(bytes) => Self { bytes, source: "as --memory-limit says".to_owned() },
            None => Self::least(Environment::detect().memory_bytes, cgroup::memory_limit()),
        }
    }

    fn least(host_bytes: u64, group: Option<(u64, PathBuf)>) -> Self {
        match group.filter(|(bytes, _)| *bytes < host_bytes) {
            Some((bytes, file)) => Self { bytes, source: format!("as {} says", file.display()) },
            None => Self { bytes: host_bytes, source: "what the host has".to_owned() },
        }
    }
}

/// A job needs more memory on this host than it may use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the job needs about {} bytes of memory ({}) and may take {} ({}, {}): {}; or raise --memory-limit",
    memory.total_bytes, bytes(memory.total_bytes), limit.bytes, bytes(limit.bytes), limit.source, memory.remedies()
)]
pub struct OverLimit {
    memory: Memory,
    limit: MemoryLimit,
}

impl Memory {
    /// Returns the memory of one rank of the job.
    #[must_use]
    pub fn of_rank(job: &Job) -> Self {
        let Job { topology, sizes, workload, queue_depth, runs, is_frugal, .. } = job;
        let (queue_depth, is_frugal) = (*queue_depth, *is_frugal);
        let [daemons, clients] = [topology.daemons, topology.clients].map(|count| count as u64);
        let slots = clients * queue_depth.next_power_of_two() as u64 * 2;
        let channels = daemons * slots * SLOT_BYTES
            + topology.rings() as u64 * (slots * SLOT_BYTES + 8 * sizes.ring_slots as u64)
            + daemons * (daemons - 1) * (sizes.flux_capacity as u64 * SLOT_BYTES + sizes.flux_in_flight as u64 * FLUX_CALL_BYTES);
        let verifier = if workload.verify { Verifier::bytes(topology.ranks * topology.clients, workload.accesses) } else { 0 };
        let client = (workload.accesses * size_of::<Access>()) as u64
            + verifier
            + 4 * *runs as u64 * if is_frugal { GROWN_HISTOGRAM_BYTES } else { HISTOGRAM_BYTES }
            + if is_frugal { SIMULATED_CLIENT_BYTES } else { 0 }
            + queue_depth as u64 * BYTES_PER_OPERATION;
        let places = Places::new(workload.value_bytes, topology.clients, queue_depth, topology.passing_daemons());
        let (endpoints, carrier) = (topology.endpoints(), topology.transport.traits());
        let (under_way, tail_bytes) = (2 * sizes.window as u64, places.tail_bytes as u64);
        let connection = Connection { ring_bytes: sizes.ring_bytes, under_way, tail_bytes };
        let memory = Self {
            endpoints,
            connections_bytes: endpoints * (carrier.connection_bytes)(connection)
                + topology.threads_with_endpoints() * carrier.thread_bytes,
            stores_bytes: workload.store_bytes(),
            channels_bytes: channels + places.bytes() as u64,
            clients_bytes: clients * client,
            total_bytes: 0,
        };
        let parts = [memory.connections_bytes, memory.stores_bytes, memory.channels_bytes, memory.clients_bytes];
        let rank_bytes = if is_frugal { SIMULATED_RANK_BYTES } else { PROCESS_BYTES };
        Self { total_bytes: rank_bytes + parts.iter().sum::<u64>(), ..memory }
    }

    /// Adds the memory of the processes of clients, if there are any.
    #[must_use]
    pub const fn with_clients(self, kind: ClientKind, topology: &Topology) -> Self {
        match kind {
            ClientKind::Threads => self,
            ClientKind::Processes => Self { total_bytes: self.total_bytes + topology.clients as u64 * PROCESS_BYTES, ..self },
        }
    }

    /// Adds the memory of the time series of the daemons, if they are wanted.
    #[must_use]
    pub fn with_traces(self, are_wanted: bool, topology: &Topology) -> Self {
        let series = (0..topology.daemons).filter(|_| are_wanted).map(|daemon| Recorder::bytes(topology.asks(0, daemon).len()) as u64);
        Self { total_bytes: self.total_bytes + series.sum::<u64>(), ..self }
    }

    /// Returns the memory of that many such ranks together.
    #[must_use]
    pub const fn times(self, ranks: usize) -> Self {
        let ranks = ranks as u64;
        Self {
            endpoints: ranks * self.endpoints,
            connections_bytes: ranks * self.connections_bytes,
            stores_bytes: ranks * self.stores_bytes,
            channels_bytes: ranks * self.channels_bytes,
            clients_bytes: ranks * self.clients_bytes,
            total_bytes: ranks * self.total_bytes,
        }
    }

    /// # Errors
    /// [`OverLimit`] when the job needs more than `limit` on this host.
    pub fn check(self, limit: MemoryLimit) -> Result<(), OverLimit> {
        if self.total_bytes <= limit.bytes { Ok(()) } else { Err(OverLimit { memory: self, limit }) }
    }

    /// Returns the parts, each with its remedy.
    fn parts(&self) -> [(&'static str, u64, &'static str); 5] {
        let Self { connections_bytes, stores_bytes, channels_bytes, clients_bytes, .. } = *self;
        [
            (
                "connections between ranks",
                connections_bytes,
                "fewer --ranks or --client-threads, a smaller --ring-size or --queue-depth, another --backend",
            ),
            ("stores", stores_bytes, "fewer --ranks, a smaller --key-range or --value-size"),
            ("channels within ranks", channels_bytes, "fewer --server-threads or --client-threads, a smaller --queue-depth"),
            ("clients", clients_bytes, "fewer --client-threads or --runs, --no-verify"),
            ("processes", self.rest_bytes(), "fewer --ranks, --clients threads, no --trace"),
        ]
    }

    /// Returns the parts, the largest first, the significant ones with their remedies.
    fn remedies(&self) -> String {
        let mut parts = self.parts();
        parts.sort_by_key(|(_, part, _)| std::cmp::Reverse(*part));
        let text = parts.map(|(name, part, remedy)| {
            let remedy = if part >= self.total_bytes / 10 { format!(" ({remedy})") } else { String::new() };
            format!("{name} {}{remedy}", bytes(part))
        });
        text.join(", ")
    }

    /// Returns the bytes of the processes themselves, and of the time series.
    const fn rest_bytes(&self) -> u64 {
        self.total_bytes - self.connections_bytes - self.stores_bytes - self.channels_bytes - self.clients_bytes
    }
}

/// Formats the parts, as in a line of the plan.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts().map(|(name, part, _)| format!("{name} {}", bytes(part)));
        write!(f, "memory about {}: {}; {} endpoints", bytes(self.total_bytes), parts.join(", "), self.endpoints)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;
    use crate::options::Options;

    fn resolve(args: &str) -> Result<Options, String> {
        let cli = Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap();
        Options::resolve(cli).map_err(|error| error.to_string())
    }

    fn memory(args: &str) -> Memory {
        resolve(&format!("{args} --memory-limit {}", u64::MAX)).unwrap().memory
    }

    #[test]
    fn each_backend_pays_for_its_own_endpoints() {
        let with =
            |backend: &str| memory(&format!("--backend {backend} --ranks 8 --server-threads 2 --client-threads 46 --ring-size 65536"));
        let [meta, delegation, sharded, direct] = ["meta", "delegation", "sharded", "direct"].map(with);
        assert_eq!([meta, delegation, sharded, direct].map(|all| all.endpoints), [56, 56, 112, 8 * 2 * 46 * 2 * 7]);
        assert!(direct.connections_bytes > direct.endpoints * 2 * 65_536);
        assert!(direct.connections_bytes > 50 * sharded.connections_bytes && sharded.connections_bytes > meta.connections_bytes);
        assert_eq!(meta.stores_bytes, direct.stores_bytes);
        let rc_send = memory("--backend rc-send --ranks 8 --server-threads 2 --client-threads 46");
        assert_eq!((rc_send.endpoints, rc_send.channels_bytes), (delegation.endpoints, delegation.channels_bytes));
        let ucx = memory("--backend ucx-am --ranks 8 --server-threads 2 --client-threads 46");
        assert_eq!((ucx.endpoints, ucx.connections_bytes), (56, 56 * (384 << 10) + 8 * (8 << 20)));
        assert!(rc_send.connections_bytes > 56 * 2 * 1024 * 128, "a window of 1024 requests and as many answers, at least 128 bytes each");
        assert!(delegation.channels_bytes > meta.channels_bytes && sharded.channels_bytes > delegation.channels_bytes, "rings");
    }

    #[test]
    fn it_grows_with_ranks_squared_and_with_what_is_asked_for() {
        let of = |args: &str| memory(&format!("--backend direct {args}")).connections_bytes;
        let base = of("--ranks 32");
        assert!(of("--ranks 64") > 3 * base && of("--ranks 32 --client-threads 4") > 3 * base);
        assert!(of("--ranks 32 --ring-size 1048576") > 8 * base);
        let stores = memory("--ranks 3 --key-range 1000000 --verify=false").stores_bytes;
        assert_eq!(stores, 3 * 16 * 1_000_000);
        assert!(memory("--verify=false").clients_bytes < memory("--verify").clients_bytes);
        let series = |args: &str| memory(&format!("{args} --trace series")).total_bytes - memory(args).total_bytes;
        assert_eq!(series("--ranks 3 --server-threads 2"), 3 * (Recorder::bytes(2) + Recorder::bytes(0)) as u64, "one of each daemon");
    }

    #[test]
    fn a_control_group_that_allows_less_than_the_host_has_is_named() {
        let group = |bytes| Some((bytes, PathBuf::from("/sys/fs/cgroup/job/memory.max")));
        let need = memory("");
        let refused = need.check(MemoryLimit::least(1 << 40, group(1 << 20))).unwrap_err().to_string();
        assert!(refused.contains("may take 1048576 (1.0 MiB, as /sys/fs/cgroup/job/memory.max says): "), "{refused}");
        for group in [None, group(1 << 63)] {
            let refused = need.check(MemoryLimit::least(1 << 20, group)).unwrap_err().to_string();
            assert!(refused.contains("(1.0 MiB, what the host has): "), "{refused}");
        }
    }

    #[test]
    fn a_job_above_the_limit_is_refused_with_need_and_limit() {
        let args = "--backend direct --ranks 24 --client-threads 46 --ring-size 1048576";
        let need = memory(args).total_bytes;
        let refused = resolve(&format!("{args} --memory-limit {}", need - 1)).unwrap_err();
        for part in [&*need.to_string(), &(need - 1).to_string(), "as --memory-limit says", "connections between ranks"] {
            assert!(refused.contains(part), "{part:?} is missing: {refused}");
        }
        resolve(&format!("{args} --memory-limit {need}")).unwrap();
        for (args, remedy) in [
            ("--key-range 60000000 --verify=false", ": stores 1.8 GiB (fewer --ranks, a smaller --key-range or --value-size), "),
            (
                "--backend meta --server-threads 16 --queue-depth 4096",
                " GiB (fewer --server-threads or --client-threads, a smaller --queue-depth), ",
            ),
            ("--client-threads 200 --queue-depth 1", " GiB (fewer --client-threads or --runs, --no-verify), "),
            ("--verify=false --trace series", " MiB (fewer --ranks, --clients threads, no --trace), "),
        ] {
            let refused = resolve(&format!("{args} --memory-limit 1")).unwrap_err();
            assert!(refused.contains(remedy), "{args}: {refused}");
        }
        assert!(resolve("--backend direct --ranks 256 --client-threads 128 --ring-size 16777216").is_err(), "no host has 4 PiB");
    }
}
