//! [`Job`]: the parameters of a job, the same on all of its ranks; [`ClientSpec`]: the parameters
//! of a client.

use std::time::Duration;

use copyrpc::ring::{MAX_RING_SIZE, MIN_RING_SIZE};
use serde::{Deserialize, Serialize};

use crate::carrier::Feature;
use crate::message::Request;
use crate::pace::{Pace, Schedule};
use crate::policy::PolicyOptions;
use crate::topology::{Backend, Topology};
use crate::ucx::PeerErrors;
use crate::values::{HEAD_BYTES, Places};
use crate::verify::Verifier;
use crate::workload::{Pattern, Workload};

/// Sizes computed from the options; printed before the start and recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Bytes of each ring of a connection between ranks, 0 if the carrier has none (`rc-send`,
    /// `ucx-am`). `auto`: the smallest power of two that is at least 4 x operations in flight on
    /// the connection x padded message, and at least 8 padded messages, between the smallest and
    /// the largest ring of copyrpc.
    pub ring_bytes: u64,
    /// Requests that each end may have unanswered on a connection of `rc-send` or `ucx-am`, 0 with
    /// copyrpc: the smallest power of two that is at least the number of operations in flight on
    /// the connection, 16 to 1024. It is smaller if the connections of a thread would have more
    /// than 32768 such requests together, or the messages of one connection more than 16 MiB.
    /// Further requests wait in the backlog of the thread.
    pub window: usize,
    /// Words of the delegation ring, as [`delegationrpc::ring_depth_for`] returns them: a power of
    /// two, with at least two words for each client of the rank.
    pub ring_slots: usize,
    /// Maximum number of requests in flight on a flux channel: the smallest power of two that is at
    /// least the number of operations of all ranks, between 256 and 65536. Further requests wait in
    /// the daemon's backlog.
    pub flux_in_flight: usize,
    /// Slots of a flux channel: four times the requests in flight, at least 1024.
    pub flux_capacity: usize,
}

/// Maximum bytes of messages that a window may have under way, unless the window has its minimum
/// length.
const WINDOW_BYTES: usize = 16 << 20;

/// Returns the number of bytes that a put takes in a ring: copyrpc's header of 12 bytes and the
/// message, padded to a multiple of 32.
const fn padded_message(value_bytes: usize) -> usize {
    (12 + size_of::<Request>() + value_bytes - HEAD_BYTES).next_multiple_of(32)
}

/// Returns the size of the smallest ring that takes a put of `value_bytes`, in bytes: a message of
/// copyrpc is at most an eighth of a ring.
pub const fn least_ring(value_bytes: usize) -> u64 {
    (8 * padded_message(value_bytes) as u64).next_power_of_two()
}

impl Sizes {
    /// Computes the sizes for `queue_depth` operations of each client on values of `value_bytes`.
    /// Rings between ranks have `ring_bytes`, if given.
    pub fn compute(
        ring_bytes: Option<u64>,
        topology: &Topology,
        queue_depth: usize,
        value_bytes: usize,
    ) -> Self {
        let in_flight = topology.clients * queue_depth;
        // A client's own connection carries the operations in flight of that client, any other
        // connection carries the operations of all clients of the rank.
        let in_flight_per_connection = if topology.backend == Backend::Direct {
            queue_depth
        } else {
            in_flight
        };
        let padded_message = padded_message(value_bytes);
        let ring_bytes = match ring_bytes {
            _ if topology.is_by_message() => 0,
            Some(bytes) => bytes,
            None => ((4 * in_flight_per_connection * padded_message) as u64)
                .max(least_ring(value_bytes))
                .next_power_of_two()
                .clamp(MIN_RING_SIZE, MAX_RING_SIZE),
        };
        let most = (32_768 / (1 + topology.endpoints_of_a_thread())).max(1);
        let most = most.min((WINDOW_BYTES / value_bytes).max(1));
        let window = in_flight_per_connection
            .next_power_of_two()
            .min(1 << most.ilog2())
            .clamp(16, 1024);
        let flux_in_flight = (topology.ranks * in_flight)
            .next_power_of_two()
            .clamp(256, 65_536);
        Self {
            ring_bytes,
            window: if topology.is_by_message() { window } else { 0 },
            ring_slots: delegationrpc::ring_depth_for(topology.clients),
            flux_in_flight,
            flux_capacity: (4 * flux_in_flight).max(1024),
        }
    }
}

/// The parameters of a job that do not depend on how its threads are distributed over processes.
#[derive(Debug, Clone)]
pub struct Job {
    /// The ranks of the job, their threads, and the connections between the threads.
    pub topology: Topology,
    /// Maximum number of outstanding operations of a client.
    pub queue_depth: usize,
    /// Total number of operations of each client, in one run without a warm-up; `None`: as many as
    /// the runs have time for.
    pub ops: Option<u64>,
    /// The open loop; `None`: closed.
    pub pace: Option<Pace>,
    /// Number of measured runs.
    pub runs: usize,
    /// Whether memory is to be small, even if it is then allocated during the run. It is `true` in
    /// virtual time, where all ranks are in one process.
    pub is_frugal: bool,
    /// Ranks, clients per rank, keys, ratios, seed, verification.
    pub workload: Workload,
    /// Computed sizes.
    pub sizes: Sizes,
    /// Policies of daemons and connections.
    pub policies: PolicyOptions,
    /// Features of mlx5 devices that are on.
    pub features: Vec<Feature>,
    /// Whether UCX detects dead peers; `None` if UCX carries nothing.
    pub ucx_errors: Option<PeerErrors>,
    /// Whether the first client of rank 0 flips one bit of one value that it writes. The
    /// verification has to detect the flipped bit.
    pub corrupts_value: bool,
}

/// The parameters of a client.
#[derive(Debug)]
pub struct ClientSpec {
    /// Rank of the client.
    pub rank: u16,
    /// Maximum number of outstanding operations, at least 1.
    pub queue_depth: usize,
    /// Total number of operations to issue; `None`: as many as there is time for.
    pub ops: Option<u64>,
    /// Number of measured runs.
    pub runs: usize,
    /// See [`Job::is_frugal`].
    pub is_frugal: bool,
    /// The accesses, at least one.
    pub pattern: Pattern,
    /// Schedule of the operations; `None`: closed loop.
    pub schedule: Option<Schedule>,
    /// Judge of the values that the client reads; `None` with `--no-verify`.
    pub verifier: Option<Verifier>,
    /// Whether the client flips one bit of one value that it writes: in the last byte of the value,
    /// or in the 8 bytes of a value without a tail. The verifier has to detect the flipped bit.
    pub corrupt_one: bool,
}

impl Job {
    /// Returns the numbers of places that a rank has for the tails of values under way: the places
    /// of its clients, and of its daemons.
    pub fn places(&self) -> Places {
        Places::new(
            self.workload.value_bytes,
            self.topology.clients,
            self.queue_depth,
            self.topology.passing_daemons(),
        )
    }

    /// Returns the maximum time for which a client of rank `rank` has no operation due, and so
    /// nothing to issue; zero in a closed loop.
    pub fn longest_pause(&self, rank: usize) -> Duration {
        let clients = 0..self.workload.clients;
        let schedules = clients.filter_map(|number| self.schedule(rank, number));
        let pauses = schedules.map(|schedule| schedule.longest_pause());
        pauses.max().unwrap_or_default()
    }

    fn schedule(&self, rank: usize, number: usize) -> Option<Schedule> {
        let all = &self.workload;
        let (client, clients) = (rank * all.clients + number, all.ranks * all.clients);
        let pace = self.pace;
        pace.map(|pace| pace.schedule(client, clients, all.seed))
    }

    /// Returns the parameters of client `number` of rank `rank`.
    pub fn client(&self, rank: usize, number: usize) -> ClientSpec {
        let workload = &self.workload;
        let pattern = workload.pattern(rank, number);
        let writer = rank * workload.clients + number;
        let verifier = || {
            let writers = workload.ranks * workload.clients;
            let (accesses, read_keys) = (workload.accesses, pattern.read_keys);
            let verifier = Verifier::new(writer as u16, writers, accesses, read_keys);
            if workload.empty {
                verifier
            } else {
                verifier.of_filled_stores()
            }
        };
        ClientSpec {
            rank: rank as u16,
            queue_depth: self.queue_depth,
            ops: self.ops,
            runs: self.runs,
            is_frugal: self.is_frugal,
            schedule: self.schedule(rank, number),
            verifier: workload.verify.then(verifier),
            corrupt_one: self.corrupts_value && writer == 0,
            pattern,
        }
    }
}
