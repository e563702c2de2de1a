//! The expected memory of a job on a host, computed before the job starts. With all ranks on one
//! host, the memory of connections grows with the square of the number of ranks.

use std::fmt;

use benchkv_harness::Failure;
use benchkv_harness::cgroup;
use benchkv_harness::environment::Environment;
use benchkv_harness::report::bytes;
use serde::{Deserialize, Serialize};

use engine::carrier::Connection;
use engine::job::Job;
use engine::verify::Verifier;
use engine::workload::Access;

/// Memory of a message in a channel within a rank, in bytes.
const SLOT_BYTES: u64 = 64;
/// Memory of a call in flight between two daemons, in the tables of both daemons, in bytes.
const CALL_BYTES: u64 = 128;
/// Memory of an outstanding operation of a client, in the tables of the client, of its paths and of
/// the daemons, in bytes.
const OPERATION_BYTES: u64 = 256;
const SMALLER: &str = "fewer ranks or threads, a smaller --ring-size, --queue-depth, --value-size or --key-range, --no-verify";
/// Number of histograms of a client in a run: of gets and of puts, to its own rank and to other
/// ranks.
const HISTOGRAMS: u64 = 4;

/// The memory of the ranks of one host together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Number of endpoints of these ranks.
    pub endpoints: u64,
    /// Bytes of connections between ranks: the rings, queues and messages of the endpoints, and the
    /// tables of the threads with endpoints.
    pub connections_bytes: u64,
    /// Bytes of the stores: the tables of the keys, with the values.
    pub stores_bytes: u64,
    /// Bytes of channels within ranks: ipc, rings, flux, and the memory for values that are under
    /// way.
    pub channels_bytes: u64,
    /// Total bytes: of the above, of the clients, and of the processes.
    pub total_bytes: u64,
}

impl Memory {
    /// Returns the memory of one rank of the job.
    pub fn of_rank(job: &Job) -> Self {
        let Job {
            topology,
            sizes,
            workload,
            ..
        } = job;
        let [daemons, clients, depth] =
            [topology.daemons, topology.clients, job.queue_depth].map(|count| count as u64);
        // Ranks in virtual time share a process and use small histograms.
        let (rank_bytes, histogram_bytes) = if job.is_frugal {
            (4 << 20, 96 << 10)
        } else {
            (8 << 20, 240 << 10)
        };
        let endpoints = topology.endpoints();
        let carrier = topology.carrier.traits();
        let places = job.places();
        let (under_way, tail_bytes) = (2 * sizes.window as u64, places.tail_bytes as u64);
        let connection = Connection {
            ring_bytes: sizes.ring_bytes,
            under_way,
            tail_bytes,
        };
        let connections_bytes = endpoints * (carrier.connection_bytes)(connection)
            + topology.threads_with_endpoints() * carrier.thread_bytes;
        let flux_bytes =
            sizes.flux_capacity as u64 * SLOT_BYTES + sizes.flux_in_flight as u64 * CALL_BYTES;
        let lanes_bytes = 2 * clients * depth.next_power_of_two() * SLOT_BYTES;
        let channels_bytes = (daemons + topology.rings() as u64) * lanes_bytes
            + daemons * (daemons - 1) * flux_bytes
            + places.bytes() as u64;
        let verifier_bytes = if workload.verify {
            Verifier::bytes(topology.ranks * topology.clients, workload.accesses)
        } else {
            0
        };
        let client_bytes = (workload.accesses * size_of::<Access>()) as u64
            + verifier_bytes
            + HISTOGRAMS * job.runs as u64 * histogram_bytes
            + depth * OPERATION_BYTES;
        let stores_bytes = workload.store_bytes();
        let total_bytes =
            rank_bytes + connections_bytes + stores_bytes + channels_bytes + clients * client_bytes;
        Self {
            endpoints,
            connections_bytes,
            stores_bytes,
            channels_bytes,
            total_bytes,
        }
    }

    /// Returns the memory of `ranks` ranks together, if each needs as much as `self`.
    pub const fn times(self, ranks: usize) -> Self {
        let ranks = ranks as u64;
        Self {
            endpoints: ranks * self.endpoints,
            connections_bytes: ranks * self.connections_bytes,
            stores_bytes: ranks * self.stores_bytes,
            channels_bytes: ranks * self.channels_bytes,
            total_bytes: ranks * self.total_bytes,
        }
    }

    /// Checks the memory against `--memory-limit`. Without this option, checks it against the
    /// memory of this host, or the limit of the process's control group if this limit is lower.
    ///
    /// # Errors
    /// The job needs more memory. The error has the needed memory, the limit, and the remedies.
    pub fn check(self, given: Option<u64>) -> Result<(), Failure> {
        let host = Environment::detect().memory_bytes;
        let group = cgroup::memory_limit().filter(|(bytes, _)| *bytes < host);
        let (limit_bytes, source_of_limit) = match (given, group) {
            (Some(bytes), _) => (bytes, "as --memory-limit says".to_owned()),
            (None, Some((bytes, file))) => (bytes, format!("as {} says", file.display())),
            (None, None) => (host, "what the host has".to_owned()),
        };
        if self.total_bytes <= limit_bytes {
            return Ok(());
        }
        let (need, limit) = (self.total_bytes, bytes(limit_bytes));
        Err(format!(
            "the job needs about {need} bytes of memory ({self}) and may take {limit_bytes} ({limit}, {source_of_limit}): {SMALLER}; or raise --memory-limit"
        )
        .into())
    }

    /// Returns a warning if the job needs more than the memory `available` at the moment. This is
    /// not a part of [`check`](Self::check), because other programs may end.
    pub fn warning(&self, available: u64) -> Option<String> {
        let [need, has] = [self.total_bytes, available].map(bytes);
        let end = "so it swaps, is killed, or its ranks start too late";
        (self.total_bytes > available)
            .then(|| format!("MEMORY: the job needs about {need}, and {has} is available on this host at the moment, {end}: {SMALLER}; or end other programs"))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let endpoints = self.endpoints;
        let connections = bytes(self.connections_bytes);
        let stores = bytes(self.stores_bytes);
        let channels = bytes(self.channels_bytes);
        let total = bytes(self.total_bytes);
        write!(
            f,
            "{total}: connections between ranks {connections}, stores {stores}, channels within ranks {channels}; {endpoints} endpoints"
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
        let cli =
            Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap();
        Options::resolve(cli).map_err(|error| error.to_string())
    }

    fn memory(args: &str) -> Memory {
        resolve(&format!("{args} --memory-limit {}", u64::MAX))
            .unwrap()
            .memory
    }

    #[test]
    fn each_backend_pays_for_its_own_endpoints() {
        let with = |backend: &str| {
            memory(&format!(
                "--backend {backend} --ranks 8 --server-threads 2 --client-threads 46 --ring-size 65536"
            ))
        };
        let [meta, delegation, sharded, direct] =
            ["meta", "delegation", "sharded", "direct"].map(with);
        assert_eq!(
            [meta, delegation, sharded, direct].map(|all| all.endpoints),
            [56, 56, 112, 8 * 2 * 46 * 2 * 7]
        );
        assert!(direct.connections_bytes > direct.endpoints * 2 * 65_536);
        assert!(
            direct.connections_bytes > 50 * sharded.connections_bytes
                && sharded.connections_bytes > meta.connections_bytes
        );
        assert_eq!(meta.stores_bytes, direct.stores_bytes);
        let rc_send = memory("--backend rc-send --ranks 8 --server-threads 2 --client-threads 46");
        assert_eq!(
            (rc_send.endpoints, rc_send.channels_bytes),
            (delegation.endpoints, delegation.channels_bytes)
        );
        let ucx = memory("--backend ucx-am --ranks 8 --server-threads 2 --client-threads 46");
        assert_eq!(
            (ucx.endpoints, ucx.connections_bytes),
            (56, 56 * (384 << 10) + 8 * (8 << 20))
        );
        assert!(
            rc_send.connections_bytes > 56 * 2 * 1024 * 128,
            "a window of 1024 requests and as many answers, at least 128 bytes each"
        );
        assert!(
            delegation.channels_bytes > meta.channels_bytes
                && sharded.channels_bytes > delegation.channels_bytes,
            "rings"
        );
    }

    #[test]
    fn a_job_that_takes_more_than_is_free_is_warned_of_with_both_sizes() {
        let memory = Memory {
            total_bytes: 23 << 30,
            ..memory("")
        };
        assert_eq!(memory.warning(23 << 30), None);
        let warning = memory.warning(5 << 30).unwrap();
        assert!(
            warning.contains("needs about 23.0 GiB, and 5.0 GiB is available")
                && warning.contains("--value-size"),
            "{warning}"
        );
        assert!(
            benchkv_harness::machine::available_memory().unwrap()
                <= Environment::detect().memory_bytes
        );
    }

    #[test]
    fn it_grows_with_ranks_squared_and_with_what_is_asked_for() {
        let of = |args: &str| memory(&format!("--backend direct {args}")).connections_bytes;
        let base = of("--ranks 32");
        assert!(of("--ranks 64") > 3 * base && of("--ranks 32 --client-threads 4") > 3 * base);
        assert!(of("--ranks 32 --ring-size 1048576") > 8 * base);
        let stores = memory("--ranks 3 --key-range 1000000 --no-verify").stores_bytes;
        assert_eq!(stores, 3 * 16 * 1_000_000);
        assert!(memory("--no-verify").total_bytes < memory("").total_bytes);
    }

    #[test]
    fn a_job_above_the_limit_is_refused_with_need_and_limit() {
        let args = "--backend direct --ranks 24 --client-threads 46 --ring-size 1048576";
        let need = memory(args).total_bytes;
        let refused = resolve(&format!("{args} --memory-limit {}", need - 1)).unwrap_err();
        for part in [
            &*need.to_string(),
            &(need - 1).to_string(),
            "as --memory-limit says",
            "connections between ranks",
        ] {
            assert!(refused.contains(part), "{part:?} is missing: {refused}");
        }
        resolve(&format!("{args} --memory-limit {need}")).unwrap();
        assert!(
            resolve("--backend direct --ranks 256 --client-threads 128 --ring-size 16777216")
                .is_err(),
            "no host has 4 PiB"
        );
    }
}
