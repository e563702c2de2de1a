//! The measurements as a document: [`JobResult`] is the JSON that `--json` writes. Its modules:
//!
//! - `open_loop`: the offered and the reached rate of `--rate`.
//! - `reduce`: each rank's report, and their reduction to one result.
//! - `table`: the result as a table for people.
//! - `rows`: the result as a flat table, a row for the job and for each run and rank: the content
//!   of `--output`.
//! - `read`: documents read back; documents of other versions are refused.

use std::collections::BTreeMap;

use benchkv_harness::affinity::Plan;
use benchkv_harness::clock::ClockSource;
use benchkv_harness::environment::Environment;
use benchkv_harness::hist::{LatencyHistogram, LatencySummary};
use serde::{Deserialize, Serialize};

use crate::cli::JobArgs;
use crate::cli::sweep::Sweep;
use crate::cli::world::SimulationRecord;
use crate::launcher::Launcher;
use crate::memory::Memory;
use engine::activity::{ActivityRates, WorkerReport};
use engine::client::Counts;
use engine::job::Sizes;
use engine::topology::{Backend, Carrier};

mod open_loop;
mod read;
mod reduce;
mod rows;
mod table;

pub use open_loop::OpenLoop;
pub use reduce::{Conditions, Course, RankReport};
pub use rows::csv;

/// The value of [`JobResult::schema`].
pub const SCHEMA: &str = "benchkv-result";
/// Version of the document. It is raised whenever a field of [`JobResult`] changes its meaning, its
/// type or its name.
pub const SCHEMA_VERSION: u32 = 9;

/// [`JobResult::device`] of a job with one rank.
const NO_DEVICE: &str = "none";

/// The result of a job: the JSON document. Rates are per second; latencies are round trips in
/// nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of benchkv.
    pub benchkv_version: String,
    /// The path of requests to other ranks.
    pub backend: Backend,
    /// The carrier of these requests.
    pub carrier: Carrier,
    /// The device that carried remote requests, without a port or options: `soft`, `mlx5_0`, `ucx`;
    /// `none` for a job of one rank.
    pub device: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of daemon threads of each rank.
    pub server_threads: usize,
    /// Number of client threads of each rank.
    pub client_threads: usize,
    /// Maximum number of outstanding operations of a client.
    pub queue_depth: usize,
    /// Seed of the access patterns.
    pub seed: u64,
    /// The other options.
    pub options: JobArgs,
    /// Sizes computed from the options.
    pub sizes: Sizes,
    /// The expected memory of the ranks of rank 0's host.
    pub memory: Memory,
    /// The launcher of the ranks, and their hosts.
    pub launcher: Launcher,
    /// The cores of the threads of rank 0's host.
    pub placement: Plan,
    /// The clock of the latencies.
    pub clock: ClockSource,
    /// The models of a job in virtual time, and their counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulation: Option<SimulationRecord>,
    /// The machine that ran the job or the simulation, and the build.
    pub environment: Environment,
    /// Whether the user ended the job before its last run was complete. Then `runs` also contains
    /// the incomplete last run, unless it was too short; means over runs are weighted by the
    /// lengths of the runs.
    pub interrupted: bool,
    /// All ranks and runs together; rates are means over runs.
    #[serde(flatten)]
    pub measured: Measured,
    /// The spread of the runs.
    pub over_runs: SpreadOverRuns,
    /// Fate of the operations of the whole job, including warm-up and drain.
    #[serde(flatten)]
    pub fate: Counts,
    /// Number of failed checks of values; null with `--no-verify`.
    pub verify_failures: Option<u64>,
    /// Description of the first failed check.
    pub first_verify_failure: Option<String>,
    /// With `--trace`: the first failure to write the series of a daemon; null if all series were
    /// written.
    pub trace_failure: Option<String>,
    /// With `--rate`: the figures of the open loop, and whether the rate was reached; null for a
    /// closed loop.
    pub open_loop: Option<OpenLoop>,
    /// Core time that the rank processes used in measured runs, including polls that found nothing,
    /// divided by the number of operations that ended in these runs, in nanoseconds. Null in
    /// virtual time.
    pub cpu_ns_per_op: Option<f64>,
    /// Mean number of cores that other programs, and the kernel for them, used on rank 0's host in
    /// measured runs. Null in virtual time, and if the runs are shorter than a second together:
    /// the kernel counts in hundredths of a second.
    pub other_cores: Option<f64>,
    /// The check of the measurements by Little's law.
    pub littles_law: LittlesLaw,
    /// Counters of the NICs' ports; null if no NIC was used.
    pub hardware_counters: Option<Vec<HardwareCounters>>,
    /// Each measured run.
    pub runs: Vec<RunResult>,
    /// Each rank.
    pub per_rank: Vec<RankResult>,
}

/// The measurements of one run, of one rank, or of all runs and ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Local and remote operations per second; over several runs the mean.
    pub total_rps: f64,
    /// Operations per second on the store of the rank that issued them.
    pub local_rps: f64,
    /// Operations per second on the store of another rank.
    pub remote_rps: f64,
    /// Number of local operations that ended in a measured window.
    pub local_ops: u64,
    /// Number of remote operations that ended in a measured window.
    pub remote_ops: u64,
    /// Number of gets that found no value, among the local and remote operations.
    pub not_found_ops: u64,
    /// Round trips of the local and remote operations together.
    pub latency_ns: LatencySummary,
    /// Round trips of the local operations.
    pub local_latency_ns: LatencySummary,
    /// Round trips of the remote operations.
    pub remote_latency_ns: LatencySummary,
    /// Round trips of the gets.
    pub get_latency_ns: LatencySummary,
    /// Round trips of the puts.
    pub put_latency_ns: LatencySummary,
    /// Histograms of all of these round trips.
    pub histograms_ns: Histograms,
    /// Activity of daemons and connections in measured windows.
    pub activity: ActivityRates,
}

/// Round trips in nanoseconds, as HdrHistograms: compressed V2 in base64.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histograms {
    /// Operations on the store of the rank that issued them.
    pub local: LatencyHistogram,
    /// Operations on the store of another rank.
    pub remote: LatencyHistogram,
    /// Gets, local and remote.
    pub get: LatencyHistogram,
    /// Puts, local and remote.
    pub put: LatencyHistogram,
}

/// The spread of the runs of a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpreadOverRuns {
    /// Operations per second.
    pub total_rps: RunSpread,
    /// Local operations per second.
    pub local_rps: RunSpread,
    /// Remote operations per second.
    pub remote_rps: RunSpread,
    /// Median round trip of all operations.
    pub p50_ns: RunSpread,
    /// 99th percentile of the round trips of all operations.
    pub p99_ns: RunSpread,
}

/// The spread of values. Without a value, `min` and `max` are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSpread {
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
    /// Standard deviation of the sample (with the divisor n - 1); null for fewer than two values.
    pub std_dev: Option<f64>,
}

impl RunSpread {
    /// Returns the spread of `values`.
    pub fn of(values: &[f64]) -> Self {
        let Some(min) = values.iter().copied().reduce(f64::min) else {
            return Self::default();
        };
        let max = values.iter().copied().fold(min, f64::max);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std_dev = (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt());
        Self { min, max, std_dev }
    }
}

/// The counters of one NIC's port: `hw_counters` of the kernel, which count for all users of the
/// port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareCounters {
    /// Rank that read the counters: the first rank of its host.
    pub rank: usize,
    /// The port: `mlx5_0:1`.
    pub port: String,
    /// Values by name, before the rank opened the port.
    pub before: BTreeMap<String, u64>,
    /// Values by name, after the rank had closed the port.
    pub after: BTreeMap<String, u64>,
}

impl HardwareCounters {
    /// Returns the increase of a counter; `None` for a NIC without such a counter.
    pub fn counted(&self, name: &str) -> Option<u64> {
        Some(
            self.after
                .get(name)?
                .saturating_sub(*self.before.get(name)?),
        )
    }
}

/// The check of clients' measurements by Little's law: the mean number of outstanding operations is
/// their rate times their mean time from issue to end. It holds in open loops too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LittlesLaw {
    /// Mean over time of the number of outstanding operations.
    pub outstanding: f64,
    /// Sum over clients of the operations per second times the mean latency from the issue.
    pub throughput_times_latency: f64,
    /// The correction for the edges of windows. An operation counts in the window in which it ends,
    /// with its whole latency. The term is the age of the operations that were outstanding at the
    /// ends of windows, minus the age of the operations that were outstanding at the beginnings,
    /// divided by the length of the windows. It is small if windows are long and the load is
    /// steady.
    pub carried: f64,
    /// The difference between `outstanding` and the sum of `throughput_times_latency` and
    /// `carried`, divided by `outstanding`. If a client detects the ends of its operations in time
    /// and records them correctly, the difference is only the rounding of the histograms.
    pub deviation: f64,
}

impl LittlesLaw {
    fn new(outstanding: f64, throughput_times_latency: f64, carried: f64) -> Self {
        let deviation = (throughput_times_latency + carried - outstanding).abs()
            / outstanding.max(f64::MIN_POSITIVE);
        Self {
            outstanding,
            throughput_times_latency,
            carried,
            deviation,
        }
    }
}

/// A measured run, all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Length of the run's window in seconds, the mean over ranks.
    pub duration_s: f64,
    /// The measurements of the run.
    #[serde(flatten)]
    pub measured: Measured,
    /// Number of operations that ended with an error.
    pub errors: u64,
    /// With `--rate`: the figures of the open loop.
    pub open_loop: Option<OpenLoop>,
}

/// A rank, all runs together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankResult {
    /// The rank.
    pub rank: usize,
    /// The measurements of the rank; rates are means over runs.
    #[serde(flatten)]
    pub measured: Measured,
    /// Digest of the accesses of the rank's clients, in order, as 16 hexadecimal digits. It is
    /// equal for equal options and seeds.
    pub pattern_hash: String,
    /// Fate of the rank's operations in the whole job.
    #[serde(flatten)]
    pub fate: Counts,
    /// Number of failed checks of values; null with `--no-verify`.
    pub verify_failures: Option<u64>,
    /// Reports of the rank's daemons.
    pub daemons: Vec<WorkerReport>,
    /// Reports of the rank's clients.
    pub clients: Vec<WorkerReport>,
    /// Maximum resident memory of the rank process, including the shared memory that it touched.
    /// Missing in virtual time, in which all ranks are one process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_rss_bytes: Option<u64>,
}

impl JobResult {
    /// Returns the number of operations that ended in a measured window.
    pub const fn measured_ops(&self) -> u64 {
        self.measured.local_ops + self.measured.remote_ops
    }

    /// Returns the number of operations of `--ops` that clients did not issue; 0 if the user ended
    /// the job.
    pub fn unissued(&self) -> u64 {
        let asked = self
            .options
            .ops
            .filter(|_| !self.interrupted)
            .unwrap_or(0)
            .saturating_mul((self.ranks * self.client_threads) as u64);
        asked.saturating_sub(self.fate.issued)
    }

    /// Returns the sweep of a job: the load of each of its runs, which do not repeat each other.
    pub const fn sweep(&self) -> Option<&Sweep> {
        self.options.sweep.as_ref()
    }

    /// Returns whether rank 0's host had more polling threads than usable cores; `false` in virtual
    /// time.
    pub fn is_oversubscribed(&self) -> bool {
        self.simulation.is_none() && self.placement.threads > self.placement.usable_cores.len()
    }

    /// Returns whether all operations that were asked for were issued, none was lost, and every
    /// check passed.
    pub fn is_sound(&self) -> bool {
        self.fate.lost == 0 && self.verify_failures.unwrap_or(0) == 0 && self.unissued() == 0
    }
}

#[cfg(test)]
mod tests;
