//! What was measured, as a document: [`JobResult`] is the JSON that `--json` writes. Beside it:
//!
//! - `open_loop`: what `--rate` asked for and got.
//! - `reduce`: each rank's report, and all of them made one result.
//! - `table`: the result as a person reads it.
//! - `rows`: the same flat, a row for the job and for each run and rank: what `--output` writes.
//! - `read`: documents read back, those of other versions refused.

use std::collections::BTreeMap;

use harness::affinity::Plan;
use harness::clock::ClockSource;
use harness::echo::EchoResult;
use harness::environment::Environment;
use harness::hist::{LatencyHistogram, LatencySummary};
use serde::{Deserialize, Serialize};

use crate::cli::JobArgs;
use crate::launcher::Launcher;
use crate::memory::Memory;
use crate::sim::options::SimulationRecord;
use engine::activity::{ActivityRates, WorkerReport};
use engine::client::Counts;
use engine::job::Sizes;
use engine::topology::{Routing, Transport};

mod open_loop;
mod read;
mod reduce;
mod rows;
mod table;

pub use open_loop::OpenLoop;
pub use read::ReadError;
pub use reduce::{Conditions, Course, RankReport, ReduceError};
pub use rows::{Cell, Column, Row, Value, columns, rows};

/// What [`JobResult::schema`] says.
pub const SCHEMA: &str = "benchkv-result";
/// Raised whenever a field of [`JobResult`] changes its meaning, its type or its name.
pub const SCHEMA_VERSION: u32 = 4;

/// [`JobResult::device`] where no rank has another to talk to.
const NO_DEVICE: &str = "none";

/// The result of a job: the JSON document. Rates are per second, latencies round trips in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of benchkv.
    pub benchkv_version: String,
    /// Which way requests took to other ranks.
    pub backend: Routing,
    /// What carried them.
    pub carrier: Transport,
    /// Kind of the device that carried remote requests, `none` if no rank has another to talk to.
    pub device: String,
    /// Rank processes.
    pub ranks: usize,
    /// Daemon threads of each rank.
    pub server_threads: usize,
    /// Client threads of each rank.
    pub client_threads: usize,
    /// Operations each client kept outstanding.
    pub queue_depth: usize,
    /// Seed of the access patterns.
    pub seed: u64,
    /// The other options.
    pub options: JobArgs,
    /// Sizes computed from them.
    pub sizes: Sizes,
    /// What the ranks of rank 0's host were expected to take of its memory.
    pub memory: Memory,
    /// Who started the ranks, and where.
    pub launcher: Launcher,
    /// Where the threads of rank 0's host ran.
    pub placement: Plan,
    /// What latencies were measured with.
    pub clock: ClockSource,
    /// Of a job in virtual time: its models, and what they did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulation: Option<SimulationRecord>,
    /// What it was measured on.
    pub environment: Environment,
    /// The user ended the job before its last run was complete: `runs` has those that were, and the last one as far as it came, which counts
    /// in means by its length.
    pub interrupted: bool,
    /// All ranks and runs together; rates are means over runs.
    #[serde(flatten)]
    pub measured: Measured,
    /// How far the runs are apart.
    pub over_runs: SpreadOverRuns,
    /// Operations of the whole job.
    #[serde(flatten)]
    pub fate: Counts,
    /// Checks of `--verify` that failed; null when values were not checked.
    pub verify_failures: Option<u64>,
    /// The first of them, in words.
    pub first_verify_failure: Option<String>,
    /// With `--trace`: why the series of some daemon could not be written, the first such failure; null if all were.
    pub trace_failure: Option<String>,
    /// With `--rate`: whether it was reached; null for a closed loop.
    pub open_loop: Option<OpenLoop>,
    /// Core time that the rank processes took in measured runs, in nanoseconds for each operation that ended there: polls that found nothing are in it.
    /// Null where clients were processes of their own, and in virtual time.
    #[serde(default)]
    pub cpu_ns_per_op: Option<f64>,
    /// L = X W.
    pub littles_law: LittlesLaw,
    /// Counters of the NICs' ports; null where no NIC was used.
    pub hardware_counters: Option<Vec<HardwareCounters>>,
    /// The Unix-socket echo measured in the same job.
    pub unix_echo: Vec<EchoBaseline>,
    /// Each measured run.
    pub runs: Vec<RunResult>,
    /// Each rank.
    pub per_rank: Vec<RankResult>,
}

/// What was measured in a run, on a rank, or in all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations per second, of all ranks meant; over several runs the mean.
    pub total_rps: f64,
    /// Of these, on the rank that issued them.
    pub local_rps: f64,
    /// Of these, on another rank.
    pub remote_rps: f64,
    /// Local operations that ended in a measured window.
    pub local_ops: u64,
    /// Remote operations that ended in a measured window.
    pub remote_ops: u64,
    /// Of these operations: gets that found no value.
    #[serde(default)]
    pub not_found_ops: u64,
    /// Round trips of these operations together.
    pub latency_ns: LatencySummary,
    /// Of the local ones.
    pub local_latency_ns: LatencySummary,
    /// Of the remote ones.
    pub remote_latency_ns: LatencySummary,
    /// Of the gets.
    #[serde(default)]
    pub get_latency_ns: LatencySummary,
    /// Of the puts.
    #[serde(default)]
    pub put_latency_ns: LatencySummary,
    /// All of these round trips.
    pub histograms_ns: Histograms,
    /// What daemons and connections did in measured windows.
    pub activity: ActivityRates,
}

/// Round trips in nanoseconds, as HdrHistograms: compressed V2 in base64.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histograms {
    /// Operations on the rank that issued them.
    pub local: LatencyHistogram,
    /// Operations on another rank.
    pub remote: LatencyHistogram,
    /// Gets, wherever.
    #[serde(default)]
    pub get: LatencyHistogram,
    /// Puts, wherever.
    #[serde(default)]
    pub put: LatencyHistogram,
}

/// How far the runs of a job are apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpreadOverRuns {
    /// Operations per second.
    pub total_rps: Spread,
    /// Of these local.
    pub local_rps: Spread,
    /// Of these remote.
    pub remote_rps: Spread,
    /// Median round trip of all operations.
    pub p50_ns: Spread,
    /// 99th percentile.
    pub p99_ns: Spread,
}

/// Of some values; all 0 without one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Standard deviation of what the values are a sample of (divided by n - 1); null for fewer than two.
    pub std_dev: Option<f64>,
}

impl Spread {
    /// The spread of `values`.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let Some(min) = values.iter().copied().reduce(f64::min) else { return Self::default() };
        let max = values.iter().copied().fold(min, f64::max);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std_dev = (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt());
        Self { min, max, std_dev }
    }
}

/// The counters of one NIC's port: `hw_counters` of the kernel, which count for all users of the port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareCounters {
    /// The first rank on its host.
    pub rank: usize,
    /// The port: `mlx5_0:1`.
    pub port: String,
    /// By name, before the rank opened it.
    pub before: BTreeMap<String, u64>,
    /// By name, after the rank had closed it.
    pub after: BTreeMap<String, u64>,
}

impl HardwareCounters {
    /// How far a counter went on; `None` for a NIC that has no such counter.
    #[must_use]
    pub fn counted(&self, name: &str) -> Option<u64> {
        Some(self.after.get(name)?.saturating_sub(*self.before.get(name)?))
    }
}

/// Little's law: what clients measure must satisfy it. It is about operations from their issue to their end, in open loops too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LittlesLaw {
    /// Operations outstanding, integrated over time.
    pub outstanding: f64,
    /// Operations per second times mean latency from the issue, the sum over clients.
    pub throughput_times_latency: f64,
    /// What the windows' edges add to the second. An operation counts where it ends, with all of its latency; this is the age of what was
    /// outstanding at the ends of windows, less that at their beginnings, over their length. Small where windows are long and load is steady.
    pub carried: f64,
    /// How far the first is from the sum of the others, over the first. What a client ends in time and books rightly leaves nothing but the
    /// precision of the histograms.
    pub deviation: f64,
}

impl LittlesLaw {
    fn new(outstanding: f64, throughput_times_latency: f64, carried: f64) -> Self {
        let deviation = (throughput_times_latency + carried - outstanding).abs() / outstanding.max(f64::MIN_POSITIVE);
        Self { outstanding, throughput_times_latency, carried, deviation }
    }
}

/// The echo, and how the job compares with it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EchoBaseline {
    /// What the echo reached.
    #[serde(flatten)]
    pub echo: EchoResult,
    /// Remote operations per second over the echo's round trips per second.
    pub remote_ratio: f64,
}

/// One measured run, all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Length of its window in seconds, the mean over ranks.
    pub duration_s: f64,
    /// What it measured.
    #[serde(flatten)]
    pub measured: Measured,
    /// Operations that ended with an error.
    pub errors: u64,
    /// With `--rate`: whether it was reached.
    pub open_loop: Option<OpenLoop>,
}

/// One rank, all runs together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankResult {
    /// The rank.
    pub rank: usize,
    /// What it measured; rates are means over runs.
    #[serde(flatten)]
    pub measured: Measured,
    /// Digest of the accesses its clients had to make, in order, as 16 hexadecimal digits: equal for equal options and seed.
    pub pattern_hash: String,
    /// Operations of the whole job.
    #[serde(flatten)]
    pub fate: Counts,
    /// Checks of `--verify` that failed; null when values were not checked.
    pub verify_failures: Option<u64>,
    /// Its daemons.
    pub daemons: Vec<WorkerReport>,
    /// Its clients.
    pub clients: Vec<WorkerReport>,
    /// Maximum memory resident, shared memory it touched included: of the rank process and its client processes, each of which counts what they share.
    pub peak_rss_bytes: u64,
}

impl JobResult {
    /// Operations that ended in a measured window.
    #[must_use]
    pub const fn measured_ops(&self) -> u64 {
        self.measured.local_ops + self.measured.remote_ops
    }

    /// The percentiles of all round trips, as HdrHistogram's tools write them.
    #[must_use]
    pub fn percentiles(&self) -> String {
        let mut all = self.measured.histograms_ns.local.clone();
        // Histograms of one result have the same bounds.
        let _ = all.merge(&self.measured.histograms_ns.remote);
        all.percentiles()
    }

    /// Whether no operation was lost and every check passed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.fate.lost == 0 && self.verify_failures.unwrap_or(0) == 0
    }
}

#[cfg(test)]
mod tests;
