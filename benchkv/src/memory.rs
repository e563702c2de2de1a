//! What a job will take of the host's memory, reckoned before it starts: with endpoints for each client it grows with the square of the ranks.

use std::fmt;

use harness::report::bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::plan::{Topology, Transport};
use crate::cli::ClientKind;
use crate::options::Sizes;
use crate::store::Shard;
use crate::trace::recorder::Recorder;
use crate::verify::Verifier;
use crate::workload::{Access, PATTERN_LEN, Workload};

/// A message of the shared-memory crates: 16 bytes and a payload of at most 48.
const SLOT_BYTES: u64 = 64;
/// Beside its two rings an endpoint of copyrpc has a send queue of 256 WQEBBs, its bookkeeping, and the lane of the software device: what `copyrpc_memory
/// --send-wr 256` measures.
const QUEUE_BYTES_PER_ENDPOINT: u64 = 23 << 10;
/// Completion queues, receive queue and tables of a thread with endpoints, of the default sizes, which hold what 21 endpoints need.
const CONTEXT_BYTES: u64 = 1 << 20;
/// The same for each endpoint beyond: 48 receives, and 64 completions in each of two queues.
const CONTEXT_BYTES_PER_ENDPOINT: u64 = 48 * 64 + 2 * 64 * 64 + 2 * 64 * 32;
/// A message under way on a connection of rc-send, a window of requests and of answers in each direction: its WQE and completion at one end, the
/// receive with 64 bytes and its completion at the other, what is kept of the call.
const BYTES_PER_SEND: u64 = 64 + 8 + 64 + 64 + 32 + 64 + 32;
/// Beside these such a connection has the lane of the software device, and its tables.
const SEND_QUEUE_BYTES: u64 = 16 << 10;
/// An endpoint of UCX, and beside these its library and worker: what UCX 1.13 took over shared memory. Its transports decide.
const UCX_BYTES_PER_ENDPOINT: u64 = 384 << 10;
const UCX_WORKER_BYTES: u64 = 8 << 20;
/// A histogram of latencies; a client has two for each run.
const HISTOGRAM_BYTES: u64 = 240 << 10;
/// Code, stacks and allocator of a rank or client process.
const PROCESS_BYTES: u64 = 8 << 20;

/// Bytes, of all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Endpoints of all ranks.
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

/// A job needs more memory than it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the job needs about {needed_bytes} bytes of memory ({}) and may take {limit_bytes} ({}): connections between ranks {}, stores {}; \
     take fewer --ranks, --client-threads or --server-threads, a smaller --ring-size or --queue-depth, another --backend, or raise --memory-limit",
    bytes(*needed_bytes), bytes(*limit_bytes), bytes(*connections_bytes), bytes(*stores_bytes)
)]
pub struct OverLimit {
    needed_bytes: u64,
    limit_bytes: u64,
    connections_bytes: u64,
    stores_bytes: u64,
}

impl Memory {
    /// For a job all of whose ranks are on this host.
    #[must_use]
    pub fn estimate(topology: &Topology, sizes: &Sizes, workload: &Workload, queue_depth: usize, runs: usize) -> Self {
        let [ranks, daemons, clients] = [topology.ranks, topology.daemons, topology.clients].map(|count| count as u64);
        let slots = clients * queue_depth.next_power_of_two() as u64 * 2;
        let channels = daemons * slots * SLOT_BYTES
            + topology.rings() as u64 * (slots * SLOT_BYTES + 8 * sizes.ring_slots as u64)
            + daemons * (daemons - 1) * sizes.flux_capacity as u64 * SLOT_BYTES;
        let verifier = if workload.verify { Verifier::bytes(topology.ranks * topology.clients) } else { 0 };
        let client = (PATTERN_LEN * size_of::<Access>()) as u64 + verifier + 2 * runs as u64 * HISTOGRAM_BYTES;
        let endpoints = ranks * topology.endpoints();
        let memory = Self {
            endpoints,
            connections_bytes: endpoints * Self::connection_bytes(topology, sizes)
                + ranks * topology.threads_with_endpoints() * Self::context_bytes(topology),
            stores_bytes: ranks * workload.store_keys() * Shard::BYTES_PER_KEY as u64,
            channels_bytes: ranks * channels,
            clients_bytes: ranks * clients * client,
            total_bytes: 0,
        };
        let parts = [memory.connections_bytes, memory.stores_bytes, memory.channels_bytes, memory.clients_bytes];
        Self { total_bytes: ranks * PROCESS_BYTES + parts.iter().sum::<u64>(), ..memory }
    }

    /// One end of a connection between ranks.
    const fn connection_bytes(topology: &Topology, sizes: &Sizes) -> u64 {
        match topology.transport {
            Transport::RcSend => 2 * sizes.window as u64 * BYTES_PER_SEND + SEND_QUEUE_BYTES,
            Transport::UcxAm => UCX_BYTES_PER_ENDPOINT,
            Transport::Copyrpc => 2 * sizes.ring_bytes + QUEUE_BYTES_PER_ENDPOINT + CONTEXT_BYTES_PER_ENDPOINT,
        }
    }

    /// A thread with connections, without these.
    const fn context_bytes(topology: &Topology) -> u64 {
        match topology.transport {
            Transport::Copyrpc | Transport::RcSend => CONTEXT_BYTES,
            Transport::UcxAm => UCX_WORKER_BYTES,
        }
    }

    /// The same with what the processes of clients take, where they have some.
    #[must_use]
    pub const fn with_clients(self, kind: ClientKind, topology: &Topology) -> Self {
        match kind {
            ClientKind::Threads => self,
            ClientKind::Processes => {
                Self { total_bytes: self.total_bytes + (topology.ranks * topology.clients) as u64 * PROCESS_BYTES, ..self }
            }
        }
    }

    /// The same with the time series of the daemons, where they are wanted.
    #[must_use]
    pub const fn with_traces(self, are_wanted: bool, topology: &Topology) -> Self {
        let recorders = if are_wanted { topology.ranks * topology.daemons } else { 0 };
        Self { total_bytes: self.total_bytes + (recorders * Recorder::BYTES) as u64, ..self }
    }

    /// # Errors
    /// [`OverLimit`] when the job needs more than `limit_bytes`.
    pub fn check(&self, limit_bytes: u64) -> Result<(), OverLimit> {
        let Self { connections_bytes, stores_bytes, total_bytes: needed_bytes, .. } = *self;
        if needed_bytes <= limit_bytes { Ok(()) } else { Err(OverLimit { needed_bytes, limit_bytes, connections_bytes, stores_bytes }) }
    }
}

/// A line of the plan.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [total, connections] = [self.total_bytes, self.connections_bytes].map(bytes);
        let [stores, channels, clients] = [self.stores_bytes, self.channels_bytes, self.clients_bytes].map(bytes);
        write!(
            f,
            "memory about {total}: {} endpoints {connections}, stores {stores}, channels {channels}, clients {clients}",
            self.endpoints
        )
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
        assert_eq!((ucx.endpoints, ucx.connections_bytes), (56, 56 * UCX_BYTES_PER_ENDPOINT + 8 * UCX_WORKER_BYTES));
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
        assert_eq!(series("--ranks 3 --server-threads 2"), 6 * Recorder::BYTES as u64, "one of each daemon");
    }

    #[test]
    fn a_job_above_the_limit_is_refused_with_need_and_limit() {
        let args = "--backend direct --ranks 24 --client-threads 46 --ring-size 1048576";
        let need = memory(args).total_bytes;
        let refused = resolve(&format!("{args} --memory-limit {}", need - 1)).unwrap_err();
        for part in [&*need.to_string(), &(need - 1).to_string(), "--memory-limit", "connections between ranks"] {
            assert!(refused.contains(part), "{part:?} is missing: {refused}");
        }
        resolve(&format!("{args} --memory-limit {need}")).unwrap();
        assert!(resolve("--backend direct --ranks 256 --client-threads 128 --ring-size 16777216").is_err(), "no host has 4 PiB");
    }
}
