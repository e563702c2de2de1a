//! What was measured: each rank's report, reduced over all ranks to one result, shown as a table and written as JSON.

use harness::affinity::Plan;
use harness::clock::ClockSource;
use harness::echo::EchoResult;
use harness::environment::{Environment, peak_rss_bytes};
use harness::hist::{HistogramError, LatencyHistogram, LatencySummary};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::activity::{Activity, ActivityRates, WorkerReport};
use crate::cli::BackendKind;
use crate::client::{ClientReport, Window};
use crate::launcher::Launcher;
use crate::memory::Memory;
use crate::options::{Options, Recorded, SHORTEST_RUN_S, Sizes};
use crate::verify::never_issued;

mod open_loop;
mod table;

pub use open_loop::OpenLoop;

/// Raised whenever a field of [`JobResult`] changes its meaning, its type or its name.
pub const SCHEMA_VERSION: u32 = 1;

/// What one rank measured, as it travels to the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    rank: usize,
    issued: u64,
    completed: u64,
    errors: u64,
    lost: u64,
    not_found: u64,
    course: Course,
    windows: Vec<Tally>,
    verdict: Option<RankVerdict>,
    daemons: Vec<WorkerReport>,
    clients: Vec<WorkerReport>,
    peak_rss_bytes: u64,
}

/// The windows of a job as they came to pass on one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Course {
    /// Length of each window that was begun, in seconds.
    pub windows_s: Vec<f64>,
    /// The user ended the job before its last window was complete.
    pub is_interrupted: bool,
}

/// What was measured in a window, or in several: sums over clients, ranks or runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Tally {
    local_rps: f64,
    remote_rps: f64,
    errors: u64,
    outstanding: f64,
    waited: f64,
    carried: f64,
    open_loop: OpenTally,
    local: LatencyHistogram,
    remote: LatencyHistogram,
}

/// See [`OpenWindow`](crate::client::OpenWindow).
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct OpenTally {
    offered_rps: f64,
    due: u64,
    backlog_before: u64,
    backlog: u64,
    held: f64,
}

/// What `--verify` found on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RankVerdict {
    failures: u64,
    first: Option<String>,
    /// By client of this rank.
    issued: Vec<u32>,
    /// By writer of the job.
    highest: Vec<u32>,
}

impl RankReport {
    /// Puts the reports of a rank's threads together.
    #[must_use]
    pub fn new(rank: usize, course: Course, clients: Vec<ClientReport>, daemons: Vec<WorkerReport>) -> Self {
        let mut report = Self {
            rank,
            issued: 0,
            completed: 0,
            errors: 0,
            lost: 0,
            not_found: 0,
            windows: vec![Tally::default(); course.windows_s.len()],
            course,
            verdict: None,
            daemons,
            clients: Vec::with_capacity(clients.len()),
            peak_rss_bytes: peak_rss_bytes(),
        };
        for client in clients {
            report.issued += client.counts.issued;
            report.completed += client.counts.completed;
            report.errors += client.counts.errors;
            report.not_found += client.counts.not_found;
            report.lost += client.lost;
            report.windows.iter_mut().zip(&client.windows).for_each(|(window, client)| window.add(client));
            report.clients.push(client.worker);
            let Some(verdict) = client.verdict else { continue };
            let none = RankVerdict { failures: 0, first: None, issued: Vec::new(), highest: vec![0; verdict.highest.len()] };
            let all = report.verdict.get_or_insert(none);
            all.failures += verdict.failures;
            all.first = all.first.take().or_else(|| verdict.first.map(|failure| failure.to_string()));
            all.issued.push(verdict.issued);
            all.highest.iter_mut().zip(verdict.highest).for_each(|(highest, other)| *highest = other.max(*highest));
        }
        report
    }

    /// Leaves out what came after the first `count` windows.
    fn truncate(&mut self, count: usize) {
        self.course.windows_s.truncate(count);
        self.windows.truncate(count);
        self.daemons.iter_mut().chain(&mut self.clients).for_each(|worker| worker.windows.truncate(count));
    }

    /// Windows, each with its weight in a mean over all of them: its share of their length.
    fn weighted(&self) -> impl Iterator<Item = (&Tally, f64)> {
        let total_s: f64 = self.course.windows_s.iter().sum();
        self.windows.iter().zip(self.course.windows_s.iter().map(move |length_s| length_s / total_s))
    }

    fn result(&self) -> Result<RankResult, HistogramError> {
        let all = Tally::sum(self.weighted())?;
        Ok(RankResult {
            rank: self.rank,
            total_rps: all.local_rps + all.remote_rps,
            local_rps: all.local_rps,
            remote_rps: all.remote_rps,
            local_ops: all.local.count(),
            remote_ops: all.remote.count(),
            issued: self.issued,
            completed: self.completed,
            errors: self.errors,
            lost: self.lost,
            verify_failures: self.verdict.as_ref().map(|verdict| verdict.failures),
            activity: ActivityRates::new(windows_of(&self.daemons), windows_of(&self.clients), self.course.windows_s.iter().sum()),
            daemons: self.daemons.clone(),
            clients: self.clients.clone(),
            peak_rss_bytes: self.peak_rss_bytes,
        })
    }
}

fn windows_of(workers: &[WorkerReport]) -> impl Iterator<Item = &Activity> {
    workers.iter().flat_map(|worker| &worker.windows)
}

impl Tally {
    fn add(&mut self, client: &Window) {
        let span_ns = client.ended_ns.saturating_sub(client.started_ns).max(1) as f64;
        self.local_rps += client.local.count() as f64 * 1e9 / span_ns;
        self.remote_rps += client.remote.count() as f64 * 1e9 / span_ns;
        self.errors += client.errors;
        self.outstanding += client.outstanding_ns as f64 / span_ns;
        let waited_ns = [&client.local, &client.remote].map(LatencyHistogram::summary).map(|all| all.mean * all.count as f64);
        let held_ns = client.open_loop.held_ns as f64;
        self.waited += (waited_ns.iter().sum::<f64>() - held_ns) / span_ns;
        self.carried += client.carried_ns as f64 / span_ns;
        self.open_loop.offered_rps += client.open_loop.due as f64 * 1e9 / span_ns;
        self.open_loop.due += client.open_loop.due;
        self.open_loop.backlog_before += client.open_loop.backlog_before;
        self.open_loop.backlog += client.open_loop.backlog;
        self.open_loop.held += held_ns / span_ns;
        // Histograms of one process have the same bounds.
        let _ = self.local.merge(&client.local).and_then(|()| self.remote.merge(&client.remote));
    }

    /// Adds up counts and histograms, and rates and means with the weight of each: 1 for ranks, which measure side by side.
    fn sum<'a>(tallies: impl Iterator<Item = (&'a Self, f64)>) -> Result<Self, HistogramError> {
        let mut sum = Self::default();
        for (tally, weight) in tallies {
            sum.local_rps += weight * tally.local_rps;
            sum.remote_rps += weight * tally.remote_rps;
            sum.errors += tally.errors;
            sum.outstanding += weight * tally.outstanding;
            sum.waited += weight * tally.waited;
            sum.carried += weight * tally.carried;
            sum.open_loop.offered_rps += weight * tally.open_loop.offered_rps;
            sum.open_loop.due += tally.open_loop.due;
            sum.open_loop.backlog_before += tally.open_loop.backlog_before;
            sum.open_loop.backlog += tally.open_loop.backlog;
            sum.open_loop.held += weight * tally.open_loop.held;
            sum.local.merge(&tally.local)?;
            sum.remote.merge(&tally.remote)?;
        }
        Ok(sum)
    }

    /// Round trips of local and remote operations together.
    fn latency(&self) -> Result<LatencySummary, HistogramError> {
        let mut all = self.local.clone();
        all.merge(&self.remote)?;
        Ok(all.summary())
    }

    /// `open_depth`: what all clients of an open loop may have outstanding.
    fn run_result(&self, duration_s: f64, open_depth: Option<u64>, activity: ActivityRates) -> Result<RunResult, HistogramError> {
        Ok(RunResult {
            duration_s,
            total_rps: self.local_rps + self.remote_rps,
            local_rps: self.local_rps,
            remote_rps: self.remote_rps,
            local_ops: self.local.count(),
            remote_ops: self.remote.count(),
            errors: self.errors,
            latency_ns: self.latency()?,
            open_loop: open_depth.map(|depth| OpenLoop::of_run(self, depth)),
            activity,
        })
    }
}

/// The result of a job: the JSON document. Rates are per second, latencies round trips in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of benchkv.
    pub benchkv_version: String,
    /// The topology.
    pub backend: BackendKind,
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
    pub options: Recorded,
    /// Sizes computed from them.
    pub sizes: Sizes,
    /// What the job was expected to take of the memory.
    pub memory: Memory,
    /// Who started the ranks, and where.
    pub launcher: Launcher,
    /// Where the threads of rank 0's host ran.
    pub placement: Plan,
    /// What latencies were measured with.
    pub clock: ClockSource,
    /// What it was measured on.
    pub environment: Environment,
    /// The user ended the job before its last run was complete: `runs` has those that were, and the last one as far as it came, which counts
    /// in means by its length.
    pub interrupted: bool,
    /// Operations per second: the mean over runs of the sum over ranks.
    pub total_rps: f64,
    /// Of these, on the rank that issued them.
    pub local_rps: f64,
    /// Of these, on another rank.
    pub remote_rps: f64,
    /// Local operations that ended in a measured window.
    pub local_ops: u64,
    /// Remote operations that ended in a measured window.
    pub remote_ops: u64,
    /// Operations of the whole job, warm-up and drain included: `issued = completed + errors + lost`.
    pub issued: u64,
    /// Answered by a store.
    pub completed: u64,
    /// Ended with an error.
    pub errors: u64,
    /// Never ended.
    pub lost: u64,
    /// Of the completed: gets that found no value.
    pub not_found: u64,
    /// Checks of `--verify` that failed; null when values were not checked.
    pub verify_failures: Option<u64>,
    /// The first of them, in words.
    pub first_verify_failure: Option<String>,
    /// Round trips of all operations in measured windows.
    pub latency_ns: LatencySummary,
    /// Of the local ones.
    pub local_latency_ns: LatencySummary,
    /// Of the remote ones.
    pub remote_latency_ns: LatencySummary,
    /// With `--rate`: whether it was reached; null for a closed loop.
    pub open_loop: Option<OpenLoop>,
    /// L = X W.
    pub littles_law: LittlesLaw,
    /// The Unix-socket echo measured in the same job.
    pub unix_echo: Vec<EchoBaseline>,
    /// Each measured run.
    pub runs: Vec<RunResult>,
    /// Each rank.
    pub per_rank: Vec<RankResult>,
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
    /// Length of its window, the mean over ranks.
    pub duration_s: f64,
    /// Operations per second.
    pub total_rps: f64,
    /// Of these local.
    pub local_rps: f64,
    /// Of these remote.
    pub remote_rps: f64,
    /// Local operations.
    pub local_ops: u64,
    /// Remote operations.
    pub remote_ops: u64,
    /// Operations that ended with an error.
    pub errors: u64,
    /// Round trips.
    pub latency_ns: LatencySummary,
    /// With `--rate`: whether it was reached.
    pub open_loop: Option<OpenLoop>,
    /// What daemons and connections did.
    pub activity: ActivityRates,
}

/// One rank, all runs together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankResult {
    /// The rank.
    pub rank: usize,
    /// Operations per second, mean over runs.
    pub total_rps: f64,
    /// Of these local.
    pub local_rps: f64,
    /// Of these remote.
    pub remote_rps: f64,
    /// Local operations in measured windows.
    pub local_ops: u64,
    /// Remote operations in measured windows.
    pub remote_ops: u64,
    /// Operations of the whole job.
    pub issued: u64,
    /// Answered by a store.
    pub completed: u64,
    /// Ended with an error.
    pub errors: u64,
    /// Never ended.
    pub lost: u64,
    /// Checks of `--verify` that failed; null when values were not checked.
    pub verify_failures: Option<u64>,
    /// What its daemons and connections did in measured windows.
    pub activity: ActivityRates,
    /// Its daemons.
    pub daemons: Vec<WorkerReport>,
    /// Its clients.
    pub clients: Vec<WorkerReport>,
    /// Most memory resident, shared memory it touched included.
    pub peak_rss_bytes: u64,
}

/// The reports do not fit together.
#[derive(Debug, Error)]
pub enum ReduceError {
    /// A rank's report cannot be read.
    #[error("the report of rank {rank} cannot be read: {source}")]
    Malformed {
        /// The rank.
        rank: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// A rank's histograms cannot be merged.
    #[error("a histogram of some rank cannot be merged: {0}")]
    Histogram(#[from] HistogramError),
}

/// What surrounds the measurement.
#[derive(Debug, Clone)]
pub struct Conditions {
    /// What latencies were measured with.
    pub clock: ClockSource,
    /// The machine.
    pub environment: Environment,
    /// The baseline.
    pub unix_echo: Vec<EchoResult>,
}

impl JobResult {
    /// Reduces the encoded reports of all ranks.
    ///
    /// # Errors
    /// [`ReduceError`] names the rank whose report is of no use.
    pub fn reduce(options: &Options, conditions: Conditions, parts: &[Vec<u8>]) -> Result<Self, ReduceError> {
        let decode =
            |(rank, part): (usize, &Vec<u8>)| serde_json::from_slice(part).map_err(|source| ReduceError::Malformed { rank, source });
        let mut reports: Vec<RankReport> = parts.iter().enumerate().map(decode).collect::<Result<_, _>>()?;
        let count = complete(&reports);
        reports.iter_mut().for_each(|report| report.truncate(count));
        let windows = |run: usize| reports.iter().filter_map(move |report| report.windows.get(run));
        let depth = options.workload.ranks * options.workload.clients * options.queue_depth;
        let open_depth = options.pace.map(|_| depth as u64);
        let runs = (0..count)
            .map(|run| {
                let of = |workers: fn(&RankReport) -> &[WorkerReport]| {
                    reports.iter().flat_map(workers).filter_map(move |worker| worker.windows.get(run))
                };
                let seconds = reports.iter().filter_map(|report| report.course.windows_s.get(run)).sum::<f64>() / reports.len() as f64;
                let activity = ActivityRates::new(of(|report| &report.daemons), of(|report| &report.clients), seconds);
                Tally::sum(windows(run).map(|window| (window, 1.0)))?.run_result(seconds, open_depth, activity)
            })
            .collect::<Result<Vec<RunResult>, HistogramError>>()?;
        let all = Tally::sum(reports.iter().flat_map(RankReport::weighted))?;
        let per_rank = reports.iter().map(RankReport::result).collect::<Result<_, HistogramError>>()?;
        let (failures, first_verify_failure) = judge(&reports);
        let total = |field: fn(&RankReport) -> u64| reports.iter().map(field).sum();
        let Tally { local_rps, remote_rps, .. } = all;
        let latency_ns = all.latency()?;
        let baseline = |echo: EchoResult| EchoBaseline { echo, remote_ratio: remote_rps / echo.rps.max(1e-9) };
        Ok(Self {
            schema_version: SCHEMA_VERSION,
            benchkv_version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: options.backend,
            device: device_of(&reports),
            ranks: options.workload.ranks,
            server_threads: options.server_threads,
            client_threads: options.workload.clients,
            queue_depth: options.queue_depth,
            seed: options.workload.seed,
            options: Recorded::from(options),
            sizes: options.sizes,
            memory: options.memory,
            launcher: options.launcher.clone(),
            placement: options.plan.clone(),
            clock: conditions.clock,
            environment: conditions.environment,
            interrupted: reports.iter().any(|report| report.course.is_interrupted),
            total_rps: local_rps + remote_rps,
            local_rps,
            remote_rps,
            local_ops: all.local.count(),
            remote_ops: all.remote.count(),
            issued: total(|report| report.issued),
            completed: total(|report| report.completed),
            errors: total(|report| report.errors),
            lost: total(|report| report.lost),
            not_found: total(|report| report.not_found),
            verify_failures: options.workload.verify.then_some(failures),
            first_verify_failure,
            latency_ns,
            local_latency_ns: all.local.summary(),
            remote_latency_ns: all.remote.summary(),
            open_loop: options.pace.map(|_| OpenLoop::of_job(&all, runs.iter().filter_map(|run| run.open_loop))),
            littles_law: LittlesLaw::new(all.outstanding, all.waited, all.carried),
            unix_echo: conditions.unix_echo.into_iter().map(baseline).collect(),
            runs,
            per_rank,
        })
    }

    /// Whether every operation ended and every check passed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.lost == 0 && self.verify_failures.unwrap_or(0) == 0
    }
}

/// The windows that count: all that were begun, but the last of an interrupted job only if it became as long as a run may be.
fn complete(reports: &[RankReport]) -> usize {
    let begun = reports.iter().map(|report| report.course.windows_s.len()).min().unwrap_or(0);
    let is_interrupted = reports.iter().any(|report| report.course.is_interrupted);
    let lasts = |report: &RankReport| report.course.windows_s.get(begun.wrapping_sub(1)).is_none_or(|length| *length >= SHORTEST_RUN_S);
    if is_interrupted && !reports.iter().all(lasts) { begun - 1 } else { begun }
}

/// The kind of device all threads opened: a device name is `kind:details`.
fn device_of(reports: &[RankReport]) -> String {
    let mut opened = reports.iter().flat_map(|report| &report.daemons).filter_map(|daemon| daemon.transport.as_ref());
    let kind = opened.next().and_then(|transport| transport.device.split(':').next());
    kind.unwrap_or("none").to_owned()
}

/// Counts the failures of all ranks, and adds what only shows over all of them: sequence numbers read that nobody issued.
fn judge(reports: &[RankReport]) -> (u64, Option<String>) {
    let verdicts: Vec<&RankVerdict> = reports.iter().filter_map(|report| report.verdict.as_ref()).collect();
    let issued: Vec<u32> = verdicts.iter().flat_map(|verdict| &verdict.issued).copied().collect();
    let invented: Vec<_> = verdicts.iter().flat_map(|verdict| never_issued(&verdict.highest, &issued)).collect();
    let failures = verdicts.iter().map(|verdict| verdict.failures).sum::<u64>() + invented.len() as u64;
    let first = verdicts.iter().find_map(|verdict| verdict.first.clone());
    (failures, first.or_else(|| invented.first().map(ToString::to_string)))
}

#[cfg(test)]
mod tests;
