//! The result of the two processes' reports: a table for people, one JSON document for programs.

use std::fmt;

use bench::load::Failure;
use harness::affinity::Plan;
use harness::clock::ClockSource;
use harness::environment::Environment;
use harness::hist::{LatencyHistogram, LatencySummary};
use harness::report::{Spread, Table, nanos, rate};
use launch::pingpong::PingPongResult;
use serde::Serialize;

use crate::cli::Mode;
use crate::options::{Job, Options};
use crate::rank::RankReport;
use crate::setup::Counts;

const MISMATCH: &str = "the two processes report different things";

/// One run.
#[derive(Debug, Clone, Serialize)]
struct Run {
    calls: u64,
    elapsed_ns: u64,
    calls_per_s: f64,
    /// Round-trip times from before the call to its callback; in latency mode.
    round_trip_ns: Option<LatencySummary>,
    caller: Counts,
    answerer: Counts,
    caller_messages_per_write: f64,
    answerer_messages_per_write: f64,
}

/// The result. Its JSON form is this structure; spreads are over the runs.
#[derive(Debug, Serialize)]
pub(crate) struct JobResult {
    calls_per_s: Spread,
    /// Time of a run divided by its calls: with one call outstanding, the mean round trip.
    ns_per_call: Spread,
    /// In rate mode, the median of the same over blocks of 64 polls of all runs: blocks in which a
    /// process lost its core do not count.
    ns_per_call_of_blocks: Option<f64>,
    /// Round-trip times of all runs together, from before the call to its callback; in latency
    /// mode.
    round_trip_ns: Option<LatencySummary>,
    round_trip_p50_ns: Option<Spread>,
    caller_messages_per_write: Spread,
    answerer_messages_per_write: Spread,
    /// The ping-pong of a bare cache line, if it was asked for.
    raw_cacheline: Option<PingPongResult>,
    bad_payloads: u64,
    runs: Vec<Run>,
    job: Job,
    devices: Vec<String>,
    /// Why `auto` took the device.
    device_by_auto: Option<String>,
    placement: Plan,
    clock: ClockSource,
    peak_rss_bytes: Vec<u64>,
    environment: Environment,
}

impl JobResult {
    /// Brings the processes' reports together.
    pub(crate) fn reduce(options: &Options, parts: &[Vec<u8>]) -> Result<Self, Failure> {
        let reports = parts
            .iter()
            .map(|part| serde_json::from_slice(part))
            .collect::<Result<Vec<RankReport>, _>>()?;
        let [caller, answerer] = &reports[..] else {
            return Err(MISMATCH.into());
        };
        let measured = caller.caller.as_ref().ok_or(MISMATCH)?;
        let counts = caller.counts.iter().zip(&answerer.counts);
        let runs: Vec<Run> = measured
            .windows
            .iter()
            .zip(&measured.latencies)
            .zip(counts)
            .map(
                |((&(calls, elapsed_ns), latencies), (&caller, &answerer))| Run {
                    calls,
                    elapsed_ns,
                    calls_per_s: calls as f64 * 1e9 / elapsed_ns.max(1) as f64,
                    round_trip_ns: (options.job.mode == Mode::Latency).then(|| latencies.summary()),
                    caller,
                    answerer,
                    caller_messages_per_write: caller.messages_per_write(),
                    answerer_messages_per_write: answerer.messages_per_write(),
                },
            )
            .collect();
        if runs.len() != options.job.runs {
            return Err(MISMATCH.into());
        }
        let mut all = LatencyHistogram::new();
        measured
            .latencies
            .iter()
            .try_for_each(|latencies| all.merge(latencies))?;
        let medians: Vec<f64> = runs
            .iter()
            .filter_map(|run| Some(run.round_trip_ns?.p50 as f64))
            .collect();
        let spread = |value: fn(&Run) -> f64| Spread::of(runs.iter().map(value));
        Ok(Self {
            calls_per_s: spread(|run| run.calls_per_s),
            ns_per_call: spread(|run| run.elapsed_ns as f64 / run.calls.max(1) as f64),
            ns_per_call_of_blocks: (options.job.mode == Mode::Rate)
                .then(|| all.summary().p50 as f64 / 1e3),
            round_trip_ns: (options.job.mode == Mode::Latency).then(|| all.summary()),
            round_trip_p50_ns: (!medians.is_empty()).then(|| Spread::of(medians)),
            caller_messages_per_write: spread(|run| run.caller_messages_per_write),
            answerer_messages_per_write: spread(|run| run.answerer_messages_per_write),
            raw_cacheline: measured.raw_cacheline,
            bad_payloads: reports.iter().map(|report| report.bad_payloads).sum(),
            runs,
            job: options.job.clone(),
            devices: reports.iter().map(|report| report.device.clone()).collect(),
            device_by_auto: options.device_by_auto.clone(),
            placement: options.plan.clone(),
            clock: measured.clock,
            peak_rss_bytes: reports.iter().map(|report| report.peak_rss_bytes).collect(),
            environment: Environment::detect(),
        })
    }

    /// Number of payloads that arrived with wrong bytes.
    pub(crate) const fn bad_payloads(&self) -> u64 {
        self.bad_payloads
    }

    fn round_trip_cells(summary: Option<LatencySummary>) -> impl Iterator<Item = String> {
        let Some(LatencySummary {
            min,
            p50,
            p99,
            p999,
            max,
            ..
        }) = summary
        else {
            return Vec::new().into_iter();
        };
        [min, p50, p99, p999, max]
            .map(|ns| nanos(ns as f64))
            .to_vec()
            .into_iter()
    }
}

impl fmt::Display for JobResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_times = self.round_trip_ns.is_some();
        let mut header = vec!["", "calls", "calls/s", "ns/call"];
        header.extend(
            ["rtt min", "p50", "p99", "p99.9", "max"]
                .iter()
                .filter(|_| has_times),
        );
        header.extend([
            "msg/WRITE out",
            "back",
            "READs",
            "metadata only",
            "batch stalls",
            "window stalls",
            "RNR",
        ]);
        let mut table = Table::new(header);
        for (index, run) in self.runs.iter().enumerate() {
            let both = |value: fn(&Counts) -> u64| {
                format!("{} + {}", value(&run.caller), value(&run.answerer))
            };
            let mut row = vec![
                format!("run {index}"),
                run.calls.to_string(),
                rate(run.calls_per_s),
            ];
            row.push(format!(
                "{:.1}",
                run.elapsed_ns as f64 / run.calls.max(1) as f64
            ));
            row.extend(Self::round_trip_cells(run.round_trip_ns));
            row.push(format!("{:.2}", run.caller_messages_per_write));
            row.push(format!("{:.2}", run.answerer_messages_per_write));
            row.extend([
                both(|c| c.reads),
                both(|c| c.metadata_only),
                both(|c| c.batch_stalls),
                both(|c| c.window_stalls),
            ]);
            let naks = |counts: &Counts| {
                counts
                    .rnr_naks
                    .map_or_else(|| "?".to_owned(), |naks| naks.to_string())
            };
            row.push(format!("{} + {}", naks(&run.caller), naks(&run.answerer)));
            table.row(row);
        }
        let mut row = vec![
            "median".to_owned(),
            String::new(),
            rate(self.calls_per_s.median),
            format!("{:.1}", self.ns_per_call.median),
        ];
        row.extend(Self::round_trip_cells(self.round_trip_ns));
        row.push(format!("{:.2}", self.caller_messages_per_write.median));
        row.push(format!("{:.2}", self.answerer_messages_per_write.median));
        table.row(row);
        write!(f, "{table}")?;
        if has_times {
            writeln!(
                f,
                "Round-trip times are from before the call to its callback; those of the last row are of all runs together."
            )?;
        }
        if let Some(ns) = self.ns_per_call_of_blocks {
            writeln!(f, "Median of blocks of 64 polls: {ns:.1} ns/call.")?;
        }
        if let Some(raw) = self.raw_cacheline {
            let place = if raw.pinned {
                "between the two cores"
            } else {
                "between two processes that are not pinned"
            };
            writeln!(
                f,
                "A bare cache line there and back {place}: {} (median).",
                nanos(raw.latency_ns.p50 as f64)
            )?;
        }
        writeln!(f, "{}; {}.", self.devices.join(" | "), self.clock)?;
        let Environment {
            kernel,
            cpu_model,
            git_commit,
            build_profile,
            ..
        } = &self.environment;
        write!(
            f,
            "{cpu_model}, {kernel}; commit {git_commit}, {build_profile} build"
        )
    }
}
