//! What was measured: each rank's report, reduced over all ranks to one result, shown as a table and written as JSON.

use harness::affinity::Plan;
use harness::clock::ClockSource;
use harness::echo::EchoResult;
use harness::environment::{Environment, peak_rss_bytes};
use harness::hist::{HistogramError, LatencyHistogram, LatencySummary};
use harness::report::{Table, bytes, nanos, plural, rate};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cli::BackendKind;
use crate::client::{ClientReport, Window};
use crate::launcher::Launcher;
use crate::options::{Options, Recorded, Sizes};
use crate::verify::never_issued;

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
    windows: Vec<Tally>,
    verdict: Option<RankVerdict>,
    daemons: Vec<DaemonReport>,
    peak_rss_bytes: u64,
}

/// What was measured in a window, or in several: sums over clients, ranks or runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Tally {
    local_rps: f64,
    remote_rps: f64,
    errors: u64,
    outstanding: f64,
    local: LatencyHistogram,
    remote: LatencyHistogram,
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

/// How a daemon spent its time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonReport {
    /// Rounds over all phases.
    pub loops: u64,
    /// Of these: rounds that found nothing to do.
    pub empty_loops: u64,
    /// Its connections to other ranks, if it has any.
    pub transport: Option<TransportReport>,
}

/// What a daemon's connections to other ranks did, from their set-up to their end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// The device that was really opened, for example `soft:lid=3`.
    pub device: String,
    /// How its peers are reached.
    pub reached_by: String,
    /// RDMA WRITEs with immediate posted.
    pub writes: u64,
    /// Messages in them.
    pub messages: u64,
    /// READs of a peer's published record.
    pub reads: u64,
    /// Calls that had to wait for ring space or credit.
    pub waits: u64,
    /// Most requests that waited at a time, for ring space or credit, or for room on the way to another daemon.
    pub backlog_peak: u64,
}

impl RankReport {
    /// Puts the reports of a rank's threads together.
    #[must_use]
    pub fn new(rank: usize, options: &Options, clients: Vec<ClientReport>, daemons: Vec<DaemonReport>) -> Self {
        let mut report = Self {
            rank,
            issued: 0,
            completed: 0,
            errors: 0,
            lost: 0,
            not_found: 0,
            windows: vec![Tally::default(); options.runs],
            verdict: None,
            daemons,
            peak_rss_bytes: peak_rss_bytes(),
        };
        for client in clients {
            report.issued += client.counts.issued;
            report.completed += client.counts.completed;
            report.errors += client.counts.errors;
            report.not_found += client.counts.not_found;
            report.lost += client.lost;
            report.windows.iter_mut().zip(&client.windows).for_each(|(window, client)| window.add(client));
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

    fn result(&self, per_run: f64) -> Result<RankResult, HistogramError> {
        let all = Tally::sum(self.windows.iter())?;
        Ok(RankResult {
            rank: self.rank,
            total_rps: (all.local_rps + all.remote_rps) * per_run,
            local_rps: all.local_rps * per_run,
            remote_rps: all.remote_rps * per_run,
            local_ops: all.local.count(),
            remote_ops: all.remote.count(),
            issued: self.issued,
            completed: self.completed,
            errors: self.errors,
            lost: self.lost,
            verify_failures: self.verdict.as_ref().map(|verdict| verdict.failures),
            daemons: self.daemons.clone(),
            peak_rss_bytes: self.peak_rss_bytes,
        })
    }
}

impl Tally {
    fn add(&mut self, client: &Window) {
        let span_ns = client.ended_ns.saturating_sub(client.started_ns).max(1) as f64;
        self.local_rps += client.local.count() as f64 * 1e9 / span_ns;
        self.remote_rps += client.remote.count() as f64 * 1e9 / span_ns;
        self.errors += client.errors;
        self.outstanding += client.outstanding_ns as f64 / span_ns;
        // Histograms of one process have the same bounds.
        let _ = self.local.merge(&client.local).and_then(|()| self.remote.merge(&client.remote));
    }

    fn sum<'a>(tallies: impl Iterator<Item = &'a Self>) -> Result<Self, HistogramError> {
        let mut sum = Self::default();
        for tally in tallies {
            sum.local_rps += tally.local_rps;
            sum.remote_rps += tally.remote_rps;
            sum.errors += tally.errors;
            sum.outstanding += tally.outstanding;
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

    fn run_result(&self) -> Result<RunResult, HistogramError> {
        Ok(RunResult {
            total_rps: self.local_rps + self.remote_rps,
            local_rps: self.local_rps,
            remote_rps: self.remote_rps,
            local_ops: self.local.count(),
            remote_ops: self.remote.count(),
            errors: self.errors,
            latency_ns: self.latency()?,
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
    /// Who started the ranks, and where.
    pub launcher: Launcher,
    /// Where the threads of rank 0's host ran.
    pub placement: Plan,
    /// What latencies were measured with.
    pub clock: ClockSource,
    /// What it was measured on.
    pub environment: Environment,
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
    /// L = X W.
    pub littles_law: LittlesLaw,
    /// The Unix-socket echo measured in the same job.
    pub unix_echo: Vec<EchoBaseline>,
    /// Each measured run.
    pub runs: Vec<RunResult>,
    /// Each rank.
    pub per_rank: Vec<RankResult>,
}

/// Little's law: what a closed loop measures must satisfy it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LittlesLaw {
    /// Operations outstanding, integrated over time.
    pub outstanding: f64,
    /// Operations per second times mean latency.
    pub throughput_times_latency: f64,
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
    /// Its daemons.
    pub daemons: Vec<DaemonReport>,
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
        let reports: Vec<RankReport> = parts.iter().enumerate().map(decode).collect::<Result<_, _>>()?;
        let windows = |run: usize| reports.iter().filter_map(move |report| report.windows.get(run));
        let runs = (0..options.runs).map(|run| Tally::sum(windows(run))?.run_result()).collect::<Result<_, HistogramError>>()?;
        let all = Tally::sum((0..options.runs).flat_map(windows))?;
        let per_run = 1.0 / options.runs as f64;
        let per_rank = reports.iter().map(|report| report.result(per_run)).collect::<Result<_, HistogramError>>()?;
        let (failures, first_verify_failure) = judge(&reports);
        let total = |field: fn(&RankReport) -> u64| reports.iter().map(field).sum();
        let (local_rps, remote_rps) = (all.local_rps * per_run, all.remote_rps * per_run);
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
            launcher: options.launcher.clone(),
            placement: options.plan.clone(),
            clock: conditions.clock,
            environment: conditions.environment,
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
            littles_law: LittlesLaw {
                outstanding: all.outstanding * per_run,
                throughput_times_latency: (local_rps + remote_rps) * latency_ns.mean / 1e9,
            },
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

/// The kind of device all daemons opened: a device name is `kind:details`.
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

/// The table a person reads.
impl std::fmt::Display for JobResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ranks, daemons) = (plural(self.ranks, "rank"), plural(self.server_threads, "daemon"));
        let (clients, runs) = (plural(self.client_threads, "client"), plural(self.options.runs, "run"));
        write!(f, "benchkv {}: {ranks} x ({daemons} + {clients}), depth {}, ", self.backend, self.queue_depth)?;
        writeln!(f, "{} device, {runs} of {} s", self.device, self.options.duration_s)?;
        writeln!(f, "\n{}", self.rank_table())?;
        writeln!(f, "{}", self.latency_table())?;
        if let Some(transport) = self.transport_line() {
            writeln!(f, "{transport}")?;
        }
        let law = self.littles_law;
        writeln!(f, "Little's law: {:.1} outstanding, throughput x latency {:.1}", law.outstanding, law.throughput_times_latency)?;
        for EchoBaseline { echo, remote_ratio } in &self.unix_echo {
            let (rps, p50) = (rate(echo.rps), nanos(echo.latency_ns.p50 as f64));
            writeln!(f, "Unix-socket echo, depth {}: {rps}, p50 {p50}; remote operations are {remote_ratio:.1} x that", echo.depth)?;
        }
        let (environment, commit) = (&self.environment, &self.environment.git_commit);
        writeln!(f, "{}, {} cores, {}", environment.cpu_model, environment.cores_online, environment.kernel)?;
        write!(f, "{} build of commit {commit}, wait {}, clock {}", environment.build_profile, self.options.wait, self.clock)?;
        if let Some(failure) = &self.first_verify_failure {
            write!(f, "\nfirst verify failure: {failure}")?;
        }
        Ok(())
    }
}

impl JobResult {
    fn rank_table(&self) -> Table {
        let mut table =
            Table::new(["rank", "local", "remote", "total", "issued", "errors", "lost", "verify failures", "empty loops", "memory"]);
        let failures = |failures: Option<u64>| failures.map_or_else(|| "off".to_owned(), |count| count.to_string());
        for rank in &self.per_rank {
            let (loops, empty) =
                rank.daemons.iter().fold((0, 0), |(loops, empty), daemon| (loops + daemon.loops, empty + daemon.empty_loops));
            table.row([
                rank.rank.to_string(),
                rate(rank.local_rps),
                rate(rank.remote_rps),
                rate(rank.total_rps),
                rank.issued.to_string(),
                rank.errors.to_string(),
                rank.lost.to_string(),
                failures(rank.verify_failures),
                format!("{:.0} %", 100.0 * empty as f64 / loops.max(1) as f64),
                bytes(rank.peak_rss_bytes),
            ]);
        }
        let rates = [rate(self.local_rps), rate(self.remote_rps), rate(self.total_rps)];
        let counts = [self.issued.to_string(), self.errors.to_string(), self.lost.to_string(), failures(self.verify_failures)];
        table.row(["all".to_owned()].into_iter().chain(rates).chain(counts));
        table
    }

    /// One line about the connections between ranks, all daemons together.
    fn transport_line(&self) -> Option<String> {
        let all = || self.per_rank.iter().flat_map(|rank| &rank.daemons).filter_map(|daemon| daemon.transport.as_ref());
        let (sum, first) = (|field: fn(&TransportReport) -> u64| all().map(field).sum::<u64>(), all().next()?);
        let (writes, messages) = (sum(|t| t.writes), sum(|t| t.messages));
        let per_write = messages as f64 / writes.max(1) as f64;
        let peak = all().map(|t| t.backlog_peak).max().unwrap_or(0);
        let (waits, reads, reached_by) = (sum(|t| t.waits), sum(|t| t.reads), &first.reached_by);
        Some(format!("{writes} WRITEs of {per_write:.1} messages, {waits} waits, backlog peak {peak}, {reads} READs; {reached_by}"))
    }

    fn latency_table(&self) -> Table {
        let mut table = Table::new(["round trip", "operations", "mean", "p50", "p99", "p99.9", "max"]);
        let kinds = [("local", &self.local_latency_ns), ("remote", &self.remote_latency_ns), ("all", &self.latency_ns)];
        for (kind, summary) in kinds.into_iter().filter(|(_, summary)| summary.count > 0) {
            let times = [summary.mean, summary.p50 as f64, summary.p99 as f64, summary.p999 as f64, summary.max as f64];
            table.row([kind.to_owned(), summary.count.to_string()].into_iter().chain(times.map(nanos)));
        }
        table
    }
}

#[cfg(test)]
mod tests;
