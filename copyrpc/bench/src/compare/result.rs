//! The results of all measurements: tables for people, one JSON document for programs.

use std::collections::BTreeMap;
use std::fmt;

use benchkv_harness::Failure;
use benchkv_harness::clock::ClockSource;
use benchkv_harness::environment::{Environment, peak_rss_bytes};
use benchkv_harness::hist::{LatencyHistogram, LatencySummary};
use benchkv_harness::report::{Spread, Table, bytes, nanos, plural, rate};
use serde::Serialize;

use super::case::Kind;
use super::contestant::Counters;
use super::options::{Job, Load, Mode};
use super::rank::Outcome;

/// Name and version of the schema. The version changes whenever a field is removed or changes its
/// meaning.
const SCHEMA: &str = "copyrpc_bench";
const SCHEMA_VERSION: u32 = 3;

/// The outcomes by load and contestant, each list in the order of the runs.
#[derive(Debug, Default)]
pub(crate) struct Outcomes(BTreeMap<String, BTreeMap<Kind, Vec<Outcome>>>);

impl Outcomes {
    pub(crate) fn put(&mut self, load: &str, kind: Kind, outcome: Outcome) {
        let kinds = self.0.entry(load.to_owned()).or_default();
        kinds.entry(kind).or_default().push(outcome);
    }

    fn of(&self, load: &str, kind: Kind) -> &[Outcome] {
        let outcomes = self.0.get(load).and_then(|kinds| kinds.get(&kind));
        outcomes.map_or(&[], Vec::as_slice)
    }
}

/// A run of one contestant under one load.
#[derive(Debug, Serialize)]
struct Run {
    /// Number of calls that ended in the measured window, and the length of the window.
    calls: u64,
    elapsed_ns: u64,
    /// Round-trip times from before the call to its end, if the mode is latency.
    round_trip_ns: Option<LatencySummary>,
    /// Counters that only this contestant has, at both ends, warm-up included.
    client: Counters,
    server: Counters,
}

/// A contestant under one load. Spreads are over the runs.
#[derive(Debug, Serialize)]
struct Figures {
    /// Rate of all clients together.
    calls_per_s: Spread,
    /// Time of a window divided by its calls: with one call at a time the mean round trip.
    ns_per_call: Spread,
    /// Medians, over blocks of calls, of the time per call. If the load is one call at a time, a
    /// block has 64 calls, and the median is the round trip; otherwise a block has 1,024 calls.
    ns_per_call_of_blocks: Spread,
    /// Round-trip times of all runs together, and the spread of their medians, in the mode latency.
    round_trip_ns: Option<LatencySummary>,
    round_trip_p50_ns: Option<Spread>,
    /// Ratio of the calls of the slowest client to the calls of the fastest client.
    slowest_vs_fastest: Spread,
    /// Bytes that the server registers; and all bytes that it takes, on the heap and in its
    /// device's memory. Both are of the last run.
    server_registered_bytes: u64,
    server_bytes: u64,
    /// Calls of all runs, warm-up included.
    calls: u64,
    /// Differences between calls made and calls that the server executed, summed over the runs.
    not_executed_once: u64,
    /// Requests and replies with wrong bytes.
    bad_payloads: u64,
    /// Calls that the server refused, and that were made again.
    refused: u64,
    runs: Vec<Run>,
}

impl Figures {
    fn of(outcomes: &[Outcome], mode: Mode) -> Result<Self, Failure> {
        let spread = |figure: fn(&Outcome) -> f64| Spread::of(outcomes.iter().map(figure));
        let sum = |count: fn(&Outcome) -> u64| outcomes.iter().map(count).sum();
        let last = |count: fn(&Outcome) -> u64| outcomes.last().map_or(0, count);
        let is_timed = mode == Mode::Latency;
        let mut round_trips = LatencyHistogram::new();
        let mut each = outcomes.iter().map(|outcome| &outcome.measured.round_trips);
        each.try_for_each(|one| round_trips.merge(one))?;
        let p50 = |outcome: &Outcome| outcome.measured.round_trips.summary().p50 as f64;
        let of_run = |outcome: &Outcome| Run {
            calls: outcome.measured.calls,
            elapsed_ns: outcome.measured.elapsed_ns,
            round_trip_ns: is_timed.then(|| outcome.measured.round_trips.summary()),
            client: outcome.measured.counters.clone(),
            server: outcome.account.counters.clone(),
        };
        Ok(Self {
            calls_per_s: spread(|outcome| outcome.measured.calls_per_s()),
            ns_per_call: spread(|outcome| outcome.measured.ns_per_call()),
            ns_per_call_of_blocks: spread(|outcome| outcome.measured.ns_per_call_of_blocks),
            round_trip_ns: is_timed.then(|| round_trips.summary()),
            round_trip_p50_ns: is_timed.then(|| spread(p50)),
            slowest_vs_fastest: spread(|outcome| outcome.measured.slowest_vs_fastest),
            server_registered_bytes: last(|outcome| outcome.account.registered_bytes),
            server_bytes: last(|outcome| outcome.account.held_bytes),
            calls: sum(|outcome| outcome.measured.calls_made),
            not_executed_once: sum(|Outcome { measured, account }| {
                measured.calls_made.abs_diff(account.answered)
            }),
            bad_payloads: sum(|Outcome { measured, account }| {
                measured.bad_replies + account.bad_requests
            }),
            refused: sum(|outcome| outcome.measured.refused),
            runs: outcomes.iter().map(of_run).collect(),
        })
    }

    /// Returns the counters of both ends over all runs, as text.
    fn counters(&self) -> String {
        let mut sums = BTreeMap::<&str, [u64; 2]>::new();
        for run in &self.runs {
            for (end, counters) in [&run.client, &run.server].into_iter().enumerate() {
                for (name, count) in counters {
                    sums.entry(name).or_default()[end] += count;
                }
            }
        }
        let counters = sums.iter();
        let counters =
            counters.map(|(name, [client, server])| format!("{name} {client} + {server}"));
        counters.collect::<Vec<_>>().join(", ")
    }
}

/// The result. Its JSON form is this structure.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    schema: &'static str,
    schema_version: u32,
    /// Spread, over the runs, of the first contestant's value divided by the rival's, by load and
    /// rival. The values are round trips where the load is one call at a time, and otherwise rates.
    ratios: BTreeMap<String, BTreeMap<String, Spread>>,
    /// Figures by load and contestant.
    figures: BTreeMap<String, BTreeMap<String, Figures>>,
    /// For each contestant, the bytes that the server registers, and all bytes that it takes, for
    /// each further client. Calculated from the loads with the fewest and the most clients; the
    /// load of one call at a time does not count. Empty if only one load counts.
    server_registered_bytes_per_further_client: BTreeMap<String, f64>,
    server_bytes_per_further_client: BTreeMap<String, f64>,
    /// Round trip of a bare cache line between the processes' cores, if it was asked for.
    raw_cacheline_ns: Option<f64>,
    job: Job,
    device: String,
    clock: ClockSource,
    /// Peak resident memory of the clients' process.
    peak_rss_bytes: u64,
    environment: Environment,
}

impl Comparison {
    pub(crate) fn new(
        job: &Job,
        outcomes: &Outcomes,
        raw_cacheline_ns: Option<f64>,
        clock: ClockSource,
    ) -> Result<Self, Failure> {
        let (mut ratios, mut figures) = (BTreeMap::new(), BTreeMap::new());
        for load in &job.loads {
            let measure: fn(&Outcome) -> f64 = match load.is_round_trip() {
                true => |outcome| outcome.measured.ns_per_call_of_blocks,
                false => |outcome| outcome.measured.calls_per_s(),
            };
            let (mut of_rivals, mut of_load) = (BTreeMap::new(), BTreeMap::new());
            let mut ours: Option<&[Outcome]> = None;
            for &kind in &job.options.contestants {
                let theirs = outcomes.of(&load.name, kind);
                of_load.insert(kind.to_string(), Figures::of(theirs, job.options.mode)?);
                if let Some(ours) = ours {
                    let ratios = ours.iter().zip(theirs);
                    let ratios = ratios.map(|(ours, theirs)| measure(ours) / measure(theirs));
                    of_rivals.insert(kind.to_string(), Spread::of(ratios));
                }
                ours.get_or_insert(theirs);
            }
            ratios.insert(load.name.clone(), of_rivals);
            figures.insert(load.name.clone(), of_load);
        }
        let mut all = outcomes.0.values().flat_map(BTreeMap::values).flatten();
        let device = all.next().map(|outcome| outcome.account.device.clone());
        let further = |bytes| further_clients(job, &figures, bytes);
        Ok(Self {
            schema: SCHEMA,
            schema_version: SCHEMA_VERSION,
            ratios,
            server_registered_bytes_per_further_client: further(|figures| {
                figures.server_registered_bytes
            }),
            server_bytes_per_further_client: further(|figures| figures.server_bytes),
            figures,
            raw_cacheline_ns,
            job: job.clone(),
            device: device.unwrap_or_default(),
            clock,
            peak_rss_bytes: peak_rss_bytes(),
            environment: Environment::detect(),
        })
    }

    /// Returns the reason why the result is worthless, if it is worthless.
    pub(crate) fn defect(&self) -> Option<String> {
        let figures = || self.figures.values().flat_map(BTreeMap::values);
        let not_once = figures()
            .map(|figures| figures.not_executed_once)
            .sum::<u64>();
        let bad = figures().map(|figures| figures.bad_payloads).sum::<u64>();
        match (bad, not_once) {
            (0, 0) => None,
            (0, calls) => Some(format!("{calls} calls were not executed exactly once")),
            (bad, _) => Some(format!("{bad} payloads were not the right ones")),
        }
    }

    fn table(&self, load: &Load) -> Option<Table> {
        let (figures, ratios) = (self.figures.get(&load.name)?, self.ratios.get(&load.name)?);
        let contestants = &self.job.options.contestants;
        let ratio = format!("{} / it", contestants.first()?);
        let mut header = vec![
            "",
            "calls/s",
            "min",
            "max",
            "a call, mean",
            "median",
            &ratio,
        ];
        header.extend(["slowest / fastest client", "server registers", "takes"]);
        let is_timed = self.job.options.mode == Mode::Latency;
        let times = ["round trip min", "p50", "p99", "p99.9", "max"];
        header.extend(times.into_iter().filter(|_| is_timed));
        let mut table = Table::new(header);
        for kind in contestants.iter().map(Kind::to_string) {
            let figures = figures.get(&kind)?;
            let Spread { median, min, max } = figures.calls_per_s;
            let ratio = ratios
                .get(&kind)
                .map_or_else(String::new, |ratio| format!("{:.2}", ratio.median));
            let mut row = vec![kind, rate(median), rate(min), rate(max)];
            let times = [figures.ns_per_call, figures.ns_per_call_of_blocks];
            row.extend(times.map(|ns| nanos(ns.median)));
            row.extend([ratio, format!("{:.2}", figures.slowest_vs_fastest.median)]);
            row.extend([figures.server_registered_bytes, figures.server_bytes].map(bytes));
            if let Some(times) = figures.round_trip_ns {
                let times = [times.min, times.p50, times.p99, times.p999, times.max];
                row.extend(times.map(|ns| nanos(ns as f64)));
            }
            table.row(row);
        }
        Some(table)
    }
}

fn further_clients(
    job: &Job,
    figures: &BTreeMap<String, BTreeMap<String, Figures>>,
    bytes: fn(&Figures) -> u64,
) -> BTreeMap<String, f64> {
    let rates = || job.loads.iter().filter(|load| !load.is_round_trip());
    let clients = |load: &&Load| load.clients;
    let (Some(few), Some(many)) = (rates().min_by_key(clients), rates().max_by_key(clients)) else {
        return BTreeMap::new();
    };
    let further = (many.clients - few.clients) as f64;
    let bytes_of =
        |load: &Load, kind: &str| Some(bytes(figures.get(&load.name)?.get(kind)?) as f64);
    let kinds = job.options.contestants.iter().map(Kind::to_string);
    let of_kind = |kind: String| {
        let bytes = (bytes_of(many, &kind)? - bytes_of(few, &kind)?) / further;
        Some((kind, bytes))
    };
    kinds
        .filter(|_| further > 0.0)
        .filter_map(of_kind)
        .collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for load in &self.job.loads {
            let clients = plural(load.clients * load.endpoints, "client");
            let (depth, group) = (load.depth, self.job.options.settings.group_size);
            match load.is_round_trip() {
                true => writeln!(f, "{clients}, one call at a time")?,
                false => writeln!(
                    f,
                    "{clients}, {depth} calls unanswered each, groups of {group}"
                )?,
            }
            self.table(load)
                .map_or(Ok(()), |table| writeln!(f, "{table}"))?;
            for (kind, figures) in self.figures.get(&load.name).into_iter().flatten() {
                let counters = figures.counters();
                if !counters.is_empty() {
                    writeln!(f, "{kind}, client + server: {counters}")?;
                }
            }
        }
        for kind in &self.job.options.contestants {
            writeln!(f, "{kind:<14} {}", kind.what())?;
        }
        let registered = &self.server_registered_bytes_per_further_client;
        for (kind, registered) in registered {
            let held = self.server_bytes_per_further_client.get(kind);
            let [registered, held] =
                [*registered, held.copied().unwrap_or(0.0)].map(|of| bytes(of as u64));
            writeln!(
                f,
                "{kind}: one client more has the server register {registered}, and take {held} in all."
            )?;
        }
        if let Some(raw_ns) = self.raw_cacheline_ns {
            let place = if self.job.placement.pinned.is_empty() {
                "between two threads that are not pinned"
            } else {
                "between the two cores"
            };
            let time = nanos(raw_ns);
            writeln!(
                f,
                "A bare cache line there and back {place}: {time} (median)."
            )?;
        }
        let runs = plural(self.job.options.runs, "run");
        writeln!(
            f,
            "Medians of {runs}; of a call, mean of a run and median of its blocks of calls. {}; {}.",
            self.device, self.clock
        )?;
        let Environment {
            kernel, cpu_model, ..
        } = &self.environment;
        let commit = &self.environment.git_commit;
        let profile = &self.environment.build_profile;
        write!(f, "{cpu_model}, {kernel}; commit {commit}, {profile} build")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::load::Measured;
    use super::super::rank::Account;
    use super::*;
    use crate::CopyrpcBench;

    fn job() -> Job {
        let args =
            "bench --runs 2 --depth 2 --clients 3,5 --contestants scalerpc,copyrpc --round-trip";
        let cli = CopyrpcBench::try_parse_from(args.split_whitespace());
        Job::resolve(&cli.unwrap().options).unwrap()
    }

    /// Makes a run: 100 s at this rate, and 100 calls made, of which the server executed
    /// `answered`.
    fn outcome(calls_per_s: f64, answered: u64, registered_bytes: u64) -> Outcome {
        let measured = Measured {
            calls: 100 * calls_per_s as u64,
            elapsed_ns: 100_000_000_000,
            ns_per_call_of_blocks: 1e9 / calls_per_s,
            round_trips: LatencyHistogram::new(),
            slowest_vs_fastest: 1.0,
            calls_made: 100,
            bad_replies: 0,
            refused: 0,
            counters: Counters::from([("slices".to_owned(), 1)]),
        };
        let counters = Counters::from([("slices".to_owned(), 4)]);
        Outcome {
            measured,
            account: Account {
                device: "a device".to_owned(),
                answered,
                bad_requests: 0,
                registered_bytes,
                held_bytes: 3 * registered_bytes,
                counters,
            },
        }
    }

    /// Makes the outcomes of two runs: ScaleRPC's rates are 2 and 9, copyrpc's are 4 and 3. The
    /// server registers ten bytes for each further client.
    fn outcomes(job: &Job, answered: u64) -> Outcomes {
        let mut outcomes = Outcomes::default();
        for load in &job.loads {
            for (kind, rates) in [(Kind::Scalerpc, [2.0, 9.0]), (Kind::Copyrpc, [4.0, 3.0])] {
                for rate in rates {
                    outcomes.put(
                        &load.name,
                        kind,
                        outcome(rate, answered, 50 + 10 * load.clients as u64),
                    );
                }
            }
        }
        outcomes
    }

    #[test]
    fn ratios_are_those_of_each_run_and_memory_that_of_a_client_more() {
        let job = job();
        let result =
            Comparison::new(&job, &outcomes(&job, 100), None, ClockSource::Monotonic).unwrap();
        assert_eq!(result.defect(), None);
        let ratio = |load: &str| result.ratios[load]["copyrpc"];
        // A ratio, of rates and of times alike, is ScaleRPC's figure divided by the rival's.
        assert_eq!(
            ratio("rate_3x2"),
            Spread {
                median: 1.75,
                min: 0.5,
                max: 3.0
            }
        );
        assert!(
            (ratio("round_trip").max - 2.0).abs() < 1e-9
                && (ratio("round_trip").min - 1.0 / 3.0).abs() < 1e-9
        );
        assert_eq!(
            result.server_registered_bytes_per_further_client["copyrpc"],
            10.0
        );
        let text = result.to_string();
        for line in [
            "scalerpc, client + server: slices 2 + 8",
            "copyrpc: one client more has the server register 10 B, and take 30 B in all.",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn a_call_that_was_executed_twice_or_not_at_all_spoils_the_result() {
        let job = job();
        for answered in [99, 101] {
            let result = Comparison::new(
                &job,
                &outcomes(&job, answered),
                None,
                ClockSource::Monotonic,
            )
            .unwrap();
            assert_eq!(
                result.defect().as_deref(),
                Some("12 calls were not executed exactly once")
            );
        }
    }
}
