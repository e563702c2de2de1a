//! The parameters that all points of a curve share.

use mlx5::NicParameters;
use scalerpc::{Grouping, ServerConfig};
use serde::Serialize;

use super::calibration::PUBLISHED;
use super::workload::Workload;
use crate::compare::scale_rpc::slot_bytes;

/// Number of rotations of the maximum length within which slices reach their final length.
const ROTATIONS_TO_SETTLE: u64 = 5;

/// The parameters, as typed.
#[derive(Clone, Copy, Debug, PartialEq, clap::Args, Serialize)]
pub(crate) struct Setting {
    /// Calls that each client keeps outstanding, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) depth: u32,

    /// The requests of clients. Rates of smallbank are transactions.
    #[arg(long, value_enum, default_value_t = Workload::Echo)]
    pub(crate) workload: Workload,

    /// Payload bytes of a request of echo, 8 to 65496.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..=65_496))]
    pub(crate) request_bytes: u32,

    /// Payload bytes of a response of echo, 8 to 65496.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..=65_496))]
    pub(crate) response_bytes: u32,

    /// Clients of a group, 1 to 50.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub(crate) group_size: u32,

    /// Length of a time slice in us, 1 to 1000000.
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) slice_us: u64,

    /// Maximum length of a rotation with longer slices, in us, 0 to 1000000: slices become longer
    /// where that gets more done; 0 keeps their length.
    #[arg(long, value_name = "US", default_value_t = 25_000, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub(crate) max_rotation_us: u64,

    /// Queue pair contexts that a NIC holds, 1 to 65536. A ConnectX-3 is said to hold 400.
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) cache: u32,

    /// Cost of a context that the NIC does not hold, in ns, 0 to 1000000; the default follows from
    /// a published measurement.
    #[arg(long, value_name = "NS", default_value_t = PUBLISHED.miss_ns(), value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub(crate) miss_ns: u64,

    /// CPU time of the server for a request, in ns, 1 to 1000000: 50 ns represents 10 threads that
    /// take 500 ns each.
    #[arg(long, value_name = "NS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) server_ns: u64,

    /// Maximum random delay of each message on its way, in ns, 0 to 1000000.
    #[arg(long, value_name = "NS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub(crate) jitter_ns: u64,

    /// Seed of the random numbers: equal options give equal results.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,

    /// Virtual time that is measured at each point, in us, 100 to 10000000. Before it, half of this
    /// time passes, and with several groups also five of the longest rotations, in which slices
    /// reach their final length.
    #[arg(long, value_name = "US", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    pub(crate) window_us: u64,
}

impl Setting {
    /// CPU time of a step of the server in addition to the CPU time of the step's requests, in ns:
    /// polling of completions, entries and slots.
    pub(crate) const SERVER_STEP_NS: u64 = 100;
    /// CPU time of a client for a call, in ns.
    pub(crate) const CLIENT_CALL_NS: u64 = 100;

    /// Returns the maximum payload bytes of a request and of a response.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let echo = (self.request_bytes as usize, self.response_bytes as usize);
        self.workload.bytes(self.depth).unwrap_or(echo)
    }

    pub(crate) fn nic(&self) -> NicParameters {
        NicParameters {
            context_entries: self.cache as usize,
            context_miss_ns: self.miss_ns,
            jitter_ns: self.jitter_ns,
            seed: self.seed,
            ..NicParameters::default()
        }
    }

    pub(crate) fn server(&self, clients: u32, grouping: Grouping) -> ServerConfig {
        let (request_bytes, response_bytes) = self.bytes();
        ServerConfig {
            max_clients: clients,
            depth: self.depth,
            slot_bytes: slot_bytes(request_bytes.max(response_bytes)),
            grouping,
            group_size: self.group_size,
            slice_ns: self.slice_us * 1000,
            max_rotation_ns: self.max_rotation_us * 1000,
            ..ServerConfig::default()
        }
    }

    pub(crate) const fn window_ns(&self) -> u64 {
        self.window_us * 1000
    }

    /// Returns the virtual time before the measured window, in ns. Clients up to 1.5 times the
    /// group size are one group, which never switches.
    pub(crate) fn settle_ns(&self, clients: u32, grouping: Grouping) -> u64 {
        let is_switched =
            grouping == Grouping::On && clients > self.group_size + self.group_size / 2;
        let rotations = ROTATIONS_TO_SETTLE * u64::from(is_switched);
        self.window_ns() / 2 + rotations * self.max_rotation_us * 1000
    }
}
