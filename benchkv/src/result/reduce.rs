//! Reduces the reports of all ranks to one result.

use std::collections::BTreeSet;
use std::error::Error;

use benchkv_harness::Failure;
use benchkv_harness::clock::ClockSource;
use benchkv_harness::counters::PortCounters;
use benchkv_harness::environment::{Environment, peak_rss_bytes};
use benchkv_harness::hist::LatencyHistogram;
use serde::{Deserialize, Serialize};

use super::open_loop::OpenTally;
use super::{
    HardwareCounters, Histograms, JobResult, LittlesLaw, Measured, NO_DEVICE, OpenLoop, RankResult,
    RunResult, RunSpread, SCHEMA, SCHEMA_VERSION, SpreadOverRuns,
};
use crate::cli::SHORTEST_RUN_S;
use crate::options::Options;
use engine::activity::{ActivityRates, WorkerReport};
use engine::client::{ClientReport, Counts, RoundTrips, Window};
use engine::verify::never_issued;
use engine::workload::Workload;

/// The measurements of one rank, in the form in which the rank sends them to rank 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    rank: usize,
    #[serde(flatten)]
    fate: Counts,
    trace_failure: Option<String>,
    course: Course,
    windows: Vec<Sums>,
    verdict: Option<RankVerdict>,
    daemons: Vec<WorkerReport>,
    clients: Vec<WorkerReport>,
    peak_rss_bytes: Option<u64>,
    pattern_hash: u64,
    hardware_counters: Vec<HardwareCounters>,
}

/// The windows of a job as they happened on one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Course {
    /// Length of each window that was begun, in seconds.
    pub windows_s: Vec<f64>,
    /// CPU time of the rank's process in these windows, in seconds.
    pub cpu_s: f64,
    /// CPU time of all programs of the rank's host in these windows, in seconds; 0 if unknown.
    pub host_cpu_s: f64,
    /// Whether the user ended the job before its last window was complete.
    pub is_interrupted: bool,
    /// Whether the drain was cut while operations were outstanding.
    pub is_cut: bool,
}

/// The measurements of a window, or of several: sums over clients, ranks or runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Sums {
    local_rps: f64,
    remote_rps: f64,
    errors: u64,
    outstanding: f64,
    waited: f64,
    carried: f64,
    open_loop: OpenTally,
    local: RoundTrips,
    remote: RoundTrips,
    not_found: u64,
}

/// The failed checks of values of one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct RankVerdict {
    failures: u64,
    first: Option<String>,
    /// Number of writes that each client of this rank issued.
    issued: Vec<u32>,
    /// Highest sequence number that this rank has read from each writer of the job.
    highest: Vec<u32>,
}

impl RankReport {
    /// Returns the report of a rank that has no process of its own, and so no memory of its own.
    pub fn of_no_process(self) -> Self {
        Self {
            peak_rss_bytes: None,
            ..self
        }
    }

    /// Combines the reports of a rank's threads.
    pub fn new(
        rank: usize,
        course: Course,
        clients: Vec<ClientReport>,
        daemons: Vec<WorkerReport>,
    ) -> Self {
        let mut report = Self {
            rank,
            fate: Counts::default(),
            trace_failure: None,
            windows: vec![Sums::default(); course.windows_s.len()],
            course,
            verdict: None,
            daemons,
            clients: Vec::with_capacity(clients.len()),
            peak_rss_bytes: Some(peak_rss_bytes()),
            pattern_hash: 0,
            hardware_counters: Vec::new(),
        };
        for client in clients {
            // The rotation makes the digest depend on the order of the clients.
            report.pattern_hash = report.pattern_hash.rotate_left(1) ^ client.pattern_hash;
            report.fate.add(&client.counts);
            let left = if report.course.is_cut {
                &mut report.fate.unfinished
            } else {
                &mut report.fate.lost
            };
            *left += client.outstanding;
            let windows = report.windows.iter_mut().zip(&client.windows);
            windows.for_each(|(window, client)| window.add(client));
            report.clients.push(client.worker);
            let Some(verdict) = client.verdict else {
                continue;
            };
            let all = report.verdict.get_or_insert_default();
            all.failures += verdict.failures;
            let first = verdict.first.map(|failure| failure.to_string());
            all.first = all.first.take().or(first);
            all.issued.push(verdict.issued);
            all.highest.resize(verdict.highest.len(), 0);
            for (highest, other) in all.highest.iter_mut().zip(verdict.highest) {
                *highest = other.max(*highest);
            }
        }
        report
    }

    /// Adds the counters of those ports that this rank used, from two readings of all ports of the
    /// rank's host. The readings are empty except on one rank of each host.
    pub fn add_hardware_counters(&mut self, mut before: PortCounters, mut after: PortCounters) {
        let workers = self.daemons.iter().chain(&self.clients);
        let ports: BTreeSet<&String> = workers
            .filter_map(|worker| Some(&worker.transport.as_ref()?.device))
            .collect();
        let counters = ports.into_iter().filter_map(|port| {
            let (before, after) = (before.remove(port)?, after.remove(port)?);
            Some(HardwareCounters {
                rank: self.rank,
                port: port.clone(),
                before,
                after,
            })
        });
        self.hardware_counters = counters.collect();
    }

    /// Records that the series of this rank's daemons could not be written.
    pub fn add_trace_failure(&mut self, failure: &dyn Error) {
        self.trace_failure = Some(format!("rank {}: {failure}", self.rank));
    }

    fn truncate(&mut self, count: usize) {
        self.course.windows_s.truncate(count);
        self.windows.truncate(count);
        let workers = self.daemons.iter_mut().chain(&mut self.clients);
        workers.for_each(|worker| worker.windows.truncate(count));
    }

    /// Returns the windows with their weights in a mean over all windows. The weight of a window is
    /// its share of the total length.
    fn weighted(&self) -> impl Iterator<Item = (&Sums, f64)> {
        let lengths_s = &self.course.windows_s;
        let total_s: f64 = lengths_s.iter().sum();
        let weights = lengths_s.iter().map(move |length_s| length_s / total_s);
        self.windows.iter().zip(weights)
    }

    fn result(&self) -> Result<RankResult, Failure> {
        let activity = activity_of(&[self], None);
        Ok(RankResult {
            rank: self.rank,
            measured: Sums::sum(self.weighted())?.measured(activity)?,
            pattern_hash: format!("{:016x}", self.pattern_hash),
            fate: self.fate,
            verify_failures: self.verdict.as_ref().map(|verdict| verdict.failures),
            daemons: self.daemons.clone(),
            clients: self.clients.clone(),
            peak_rss_bytes: self.peak_rss_bytes,
        })
    }
}

/// Returns the activity of the threads of `reports`, in one run or in all.
fn activity_of(reports: &[&RankReport], run: Option<usize>) -> ActivityRates {
    let seconds = seconds_of(reports, run);
    let windows = |workers: fn(&RankReport) -> &[WorkerReport]| {
        let workers = reports.iter().copied().flat_map(workers);
        workers.flat_map(move |worker| {
            let range = run.map_or(0..worker.windows.len(), |run| run..run + 1);
            worker.windows.get(range).into_iter().flatten()
        })
    };
    ActivityRates::new(
        windows(|report| &report.daemons),
        windows(|report| &report.clients),
        seconds,
    )
}

/// Returns the length of one window, or of all windows together, in seconds: the mean over ranks.
fn seconds_of(reports: &[&RankReport], run: Option<usize>) -> f64 {
    let windows_s = |report: &&RankReport| -> f64 {
        let all = &report.course.windows_s;
        match run {
            Some(run) => all.get(run).copied().unwrap_or_default(),
            None => all.iter().sum(),
        }
    };
    reports.iter().map(windows_s).sum::<f64>() / reports.len().max(1) as f64
}

impl Sums {
    /// Returns the figures of an open loop, for clients that may have `depth` operations
    /// outstanding.
    fn open_loop(&self, depth: u64) -> OpenLoop {
        OpenLoop::of_run(
            &self.open_loop,
            self.local_rps + self.remote_rps,
            self.ended(),
            self.outstanding,
            depth,
        )
    }

    fn add(&mut self, client: &Window) {
        let span_ns = client.ended_ns.saturating_sub(client.started_ns).max(1) as f64;
        let (local, remote) = (&client.local, &client.remote);
        self.local_rps += local.count() as f64 * 1e9 / span_ns;
        self.remote_rps += remote.count() as f64 * 1e9 / span_ns;
        self.errors += client.errors;
        self.outstanding += client.outstanding_ns as f64 / span_ns;
        self.not_found += client.not_found;
        let held_ns = client.open_loop.held_ns as f64;
        self.waited += (local.sum_ns() + remote.sum_ns() - held_ns) / span_ns;
        self.open_loop.add(&client.open_loop, span_ns);
        self.carried += client.carried_ns as f64 / span_ns;
        // Histograms of one process have the same bounds, so the merge does not fail.
        let merged = self.local.merge(local);
        let _ = merged.and_then(|()| self.remote.merge(remote));
    }

    /// Adds up several sums: counts and histograms as they are, rates and means multiplied by their
    /// weights. The sums of ranks have the weight 1, because ranks measure at the same time.
    fn sum<'a>(tallies: impl Iterator<Item = (&'a Self, f64)>) -> Result<Self, Failure> {
        let mut sum = Self::default();
        for (tally, weight) in tallies {
            sum.local_rps += weight * tally.local_rps;
            sum.remote_rps += weight * tally.remote_rps;
            sum.errors += tally.errors;
            sum.not_found += tally.not_found;
            sum.outstanding += weight * tally.outstanding;
            sum.waited += weight * tally.waited;
            sum.carried += weight * tally.carried;
            sum.open_loop.add_tally(&tally.open_loop, weight);
            sum.local.merge(&tally.local)?;
            sum.remote.merge(&tally.remote)?;
        }
        Ok(sum)
    }

    /// Returns the number of operations that ended with an answer.
    fn ended(&self) -> u64 {
        self.local.count() + self.remote.count()
    }

    fn measured(&self, activity: ActivityRates) -> Result<Measured, Failure> {
        let both = |one: &LatencyHistogram, other: &LatencyHistogram| {
            let mut all = one.clone();
            all.merge(other).map(|()| all)
        };
        let (local, remote) = (&self.local, &self.remote);
        let histograms_ns = Histograms {
            local: both(&local.gets, &local.puts)?,
            remote: both(&remote.gets, &remote.puts)?,
            get: both(&local.gets, &remote.gets)?,
            put: both(&local.puts, &remote.puts)?,
        };
        Ok(Measured {
            total_rps: self.local_rps + self.remote_rps,
            local_rps: self.local_rps,
            remote_rps: self.remote_rps,
            local_ops: local.count(),
            remote_ops: remote.count(),
            not_found_ops: self.not_found,
            latency_ns: both(&histograms_ns.local, &histograms_ns.remote)?.summary(),
            local_latency_ns: histograms_ns.local.summary(),
            remote_latency_ns: histograms_ns.remote.summary(),
            get_latency_ns: histograms_ns.get.summary(),
            put_latency_ns: histograms_ns.put.summary(),
            histograms_ns,
            activity,
        })
    }
}

impl SpreadOverRuns {
    fn of(runs: &[RunResult]) -> Self {
        let of = |figure: fn(&Measured) -> f64| {
            let figures = runs.iter().map(|run| figure(&run.measured));
            RunSpread::of(&figures.collect::<Vec<_>>())
        };
        Self {
            total_rps: of(|run| run.total_rps),
            local_rps: of(|run| run.local_rps),
            remote_rps: of(|run| run.remote_rps),
            p50_ns: of(|run| run.latency_ns.p50 as f64),
            p99_ns: of(|run| run.latency_ns.p99 as f64),
        }
    }
}

/// The conditions of the measurement.
#[derive(Debug, Clone)]
pub struct Conditions {
    /// The clock of the latencies.
    pub clock: ClockSource,
    /// The machine.
    pub environment: Environment,
}

impl JobResult {
    /// Reduces the encoded reports of all ranks.
    ///
    /// # Errors
    /// A rank whose report is malformed, or histograms that cannot be merged.
    pub fn reduce(
        options: &Options,
        conditions: Conditions,
        parts: &[Vec<u8>],
    ) -> Result<Self, Failure> {
        let decode = |(rank, part): (usize, &Vec<u8>)| {
            serde_json::from_slice(part)
                .map_err(|why| format!("the report of rank {rank} cannot be read: {why}"))
        };
        let mut reports = parts
            .iter()
            .enumerate()
            .map(decode)
            .collect::<Result<Vec<RankReport>, _>>()?;
        let count = complete(&reports);
        reports.iter_mut().for_each(|report| report.truncate(count));
        let all_reports: Vec<&RankReport> = reports.iter().collect();
        let Workload { ranks, clients, .. } = options.job.workload;
        let depth = (ranks * clients * options.job.queue_depth) as u64;
        let run_result = |run| {
            let windows = reports.iter().filter_map(|report| report.windows.get(run));
            let sums = Sums::sum(windows.map(|window| (window, 1.0)))?;
            Ok(RunResult {
                duration_s: seconds_of(&all_reports, Some(run)),
                measured: sums.measured(activity_of(&all_reports, Some(run)))?,
                errors: sums.errors,
                open_loop: options.job.pace.map(|_| sums.open_loop(depth)),
            })
        };
        let runs: Vec<RunResult> = (0..count).map(run_result).collect::<Result<_, Failure>>()?;
        let all = Sums::sum(reports.iter().flat_map(RankReport::weighted))?;
        let littles_law = LittlesLaw::new(all.outstanding, all.waited, all.carried);
        let open_loop = options.job.pace.map(|_| {
            all.open_loop(depth)
                .of_job(runs.iter().filter_map(|run| run.open_loop))
        });
        let measured = all.measured(activity_of(&all_reports, None))?;
        let measured_ops = measured.local_ops + measured.remote_ops;
        let per_rank = reports.iter().map(RankReport::result);
        let (failures, first_verify_failure) = judge(&reports);
        let mut fate = Counts::default();
        reports.iter().for_each(|report| fate.add(&report.fate));
        let counters = reports.iter().flat_map(|report| &report.hardware_counters);
        let counters: Vec<HardwareCounters> = counters.cloned().collect();
        Ok(Self {
            schema: SCHEMA.to_owned(),
            schema_version: SCHEMA_VERSION,
            benchkv_version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: options.job.topology.backend,
            carrier: options.job.topology.carrier,
            device: device_of(&reports),
            ranks,
            server_threads: options.job.topology.daemons,
            client_threads: clients,
            queue_depth: options.job.queue_depth,
            seed: options.job.workload.seed,
            options: options.asked.recorded()?,
            sizes: options.job.sizes,
            memory: options.memory,
            launcher: options.launcher.clone(),
            placement: options.plan.clone(),
            clock: conditions.clock,
            simulation: None,
            environment: conditions.environment,
            interrupted: reports.iter().any(|report| report.course.is_interrupted),
            measured,
            over_runs: SpreadOverRuns::of(&runs),
            fate,
            verify_failures: options.job.workload.verify.then_some(failures),
            first_verify_failure,
            trace_failure: reports
                .iter()
                .find_map(|report| report.trace_failure.clone()),
            open_loop,
            cpu_ns_per_op: cpu_per_op(&reports, measured_ops),
            other_cores: other_cores(&reports, &options.launcher.ranks_here),
            littles_law,
            hardware_counters: (!counters.is_empty()).then_some(counters),
            runs,
            per_rank: per_rank.collect::<Result<_, Failure>>()?,
        })
    }
}

/// Returns the core time of the ranks in their windows, divided by the number of operations that
/// ended in these windows, in ns; `None` if it is unknown.
fn cpu_per_op(reports: &[RankReport], operations: u64) -> Option<f64> {
    let cpu_s: f64 = reports.iter().map(|report| report.course.cpu_s).sum();
    (operations > 0 && cpu_s > 0.0).then(|| cpu_s * 1e9 / operations as f64)
}

/// Returns the mean number of cores that other programs used on the host of rank 0 in the windows;
/// `None` if it is unknown. `here` are the ranks on this host.
fn other_cores(reports: &[RankReport], here: &[usize]) -> Option<f64> {
    let Course {
        windows_s,
        host_cpu_s,
        ..
    } = &reports.first()?.course;
    let here = here.iter().filter_map(|rank| reports.get(*rank));
    let own_s: f64 = here.map(|report| report.course.cpu_s).sum();
    let window_s: f64 = windows_s.iter().sum();
    let is_known = window_s >= 1.0 && *host_cpu_s > 0.0;
    is_known.then(|| ((host_cpu_s - own_s) / window_s).max(0.0))
}

/// Returns the number of windows that count. The last window of an interrupted job counts only if
/// it has the minimum length of a run on every rank; all others that began count.
fn complete(reports: &[RankReport]) -> usize {
    let lengths = reports.iter().map(|report| &report.course.windows_s);
    let begun = lengths.clone().map(Vec::len).min().unwrap_or(0);
    let is_interrupted = reports.iter().any(|report| report.course.is_interrupted);
    let mut last = lengths.filter_map(|lengths| lengths.get(begun.wrapping_sub(1)));
    if is_interrupted && last.any(|length_s| *length_s < SHORTEST_RUN_S) {
        begun - 1
    } else {
        begun
    }
}

/// Returns the name of the device of the first daemon with connections, up to its colon: without a
/// port or options.
fn device_of(reports: &[RankReport]) -> String {
    let mut opened = reports
        .iter()
        .flat_map(|report| &report.daemons)
        .filter_map(|daemon| daemon.transport.as_ref());
    let kind = opened
        .next()
        .and_then(|transport| transport.device.split(':').next());
    kind.unwrap_or(NO_DEVICE).to_owned()
}

/// Returns the number of failed checks of all ranks, and the first failure. Includes the failures
/// that only a comparison of all ranks shows: sequence numbers that were read and never issued.
fn judge(reports: &[RankReport]) -> (u64, Option<String>) {
    let verdicts = || reports.iter().filter_map(|report| report.verdict.as_ref());
    let issued = verdicts().flat_map(|verdict| &verdict.issued);
    let issued: Vec<u32> = issued.copied().collect();
    let invented = verdicts().flat_map(|verdict| never_issued(&verdict.highest, &issued));
    let invented: Vec<String> = invented.collect();
    let failures = verdicts().map(|verdict| verdict.failures).sum::<u64>();
    let first = verdicts().find_map(|verdict| verdict.first.clone());
    let first = first.or_else(|| invented.first().cloned());
    (failures + invented.len() as u64, first)
}
