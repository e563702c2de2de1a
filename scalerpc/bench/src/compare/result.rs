//! The results of all measurements: tables for people, one JSON document for programs.

use std::collections::BTreeMap;
use std::fmt;

use harness::clock::ClockSource;
use harness::environment::Environment;
use harness::report::{Spread, Table, bytes, nanos, plural, rate};
use serde::Serialize;

use super::contestant::{Counters, Kind};
use super::options::{Job, Load};
use super::rank::Outcome;

/// Version of the schema. It changes whenever a field is removed or changes its meaning.
const SCHEMA: &str = "scalerpc_bench.compare";
const SCHEMA_VERSION: u32 = 1;

/// All measurements, in the order of the rounds, by load and contestant.
#[derive(Debug, Default)]
pub(crate) struct Outcomes(BTreeMap<String, BTreeMap<Kind, Vec<Outcome>>>);

impl Outcomes {
    pub(crate) fn put(&mut self, load: &str, kind: Kind, outcome: Outcome) {
        self.0
            .entry(load.to_owned())
            .or_default()
            .entry(kind)
            .or_default()
            .push(outcome);
    }

    fn of(&self, load: &str, kind: Kind) -> &[Outcome] {
        self.0
            .get(load)
            .and_then(|kinds| kinds.get(&kind))
            .map_or(&[], Vec::as_slice)
    }
}

/// One contestant under one load. Spreads are over the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// Rate of all clients together.
    calls_per_s: Spread,
    /// Medians over blocks of 64 calls (round trip) or 1,024. With one call at a time it is the
    /// round trip.
    ns_per_call_of_blocks: Spread,
    /// Calls of the slowest client over those of the fastest.
    slowest_vs_fastest: Spread,
    /// Memory that the server registers, in all and divided by its clients, in bytes.
    server_registered_bytes: u64,
    server_registered_bytes_per_client: f64,
    /// Calls of all rounds, warm-up included.
    calls: u64,
    /// Calls of these that the server did not execute exactly once.
    not_executed_once: u64,
    /// Requests and replies with wrong bytes.
    bad_payloads: u64,
    /// Calls that the server refused, and that were made again.
    refused: u64,
    /// Counters of this contestant only; sums over the rounds.
    counters: Counters,
}

impl Figures {
    fn of(outcomes: &[Outcome], clients: usize) -> Self {
        let spread = |figure: fn(&Outcome) -> f64| Spread::of(outcomes.iter().map(figure));
        let sum = |count: fn(&Outcome) -> u64| outcomes.iter().map(count).sum();
        let mut counters = Counters::new();
        for (name, count) in outcomes
            .iter()
            .flat_map(|outcome| &outcome.account.counters)
        {
            *counters.entry(name.clone()).or_default() += count;
        }
        let registered = outcomes
            .last()
            .map_or(0, |outcome| outcome.account.registered_bytes);
        Self {
            calls_per_s: spread(|outcome| outcome.measured.calls_per_s),
            ns_per_call_of_blocks: spread(|outcome| outcome.measured.ns_per_call_of_blocks),
            slowest_vs_fastest: spread(|outcome| outcome.measured.slowest_vs_fastest),
            server_registered_bytes: registered,
            server_registered_bytes_per_client: registered as f64 / clients as f64,
            calls: sum(|outcome| outcome.measured.calls),
            not_executed_once: sum(|outcome| {
                outcome.measured.calls.abs_diff(outcome.account.answered)
            }),
            bad_payloads: sum(|outcome| {
                outcome.measured.bad_replies + outcome.account.bad_requests
            }),
            refused: sum(|outcome| outcome.measured.refused),
            counters,
        }
    }
}

/// The result. Its JSON form is this structure.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    schema: &'static str,
    schema_version: u32,
    /// By load and rival: ScaleRPC / the rival, over the rounds. A ratio of rates, and of round
    /// trips where the load is one call at a time.
    ratios: BTreeMap<String, BTreeMap<String, Spread>>,
    /// By load and contestant.
    figures: BTreeMap<String, BTreeMap<String, Figures>>,
    /// By contestant, the bytes that the server registers for each further client: from the load
    /// with the fewest clients to the load with the maximum, of equal depths. Empty with only one
    /// of them.
    server_registered_bytes_per_further_client: BTreeMap<String, f64>,
    job: Job,
    /// The server's device.
    device: String,
    clock: ClockSource,
    environment: Environment,
}

impl Comparison {
    pub(crate) fn new(job: &Job, outcomes: &Outcomes, clock: ClockSource) -> Self {
        let (mut ratios, mut figures) = (BTreeMap::new(), BTreeMap::new());
        for load in &job.loads {
            let measure: fn(&Outcome) -> f64 = match load.is_round_trip() {
                true => |outcome| outcome.measured.ns_per_call_of_blocks,
                false => |outcome| outcome.measured.calls_per_s,
            };
            let ours = outcomes.of(&load.name, Kind::Scalerpc);
            let (mut of_rivals, mut of_load) = (BTreeMap::new(), BTreeMap::new());
            for &kind in &job.options.contestants {
                let theirs = outcomes.of(&load.name, kind);
                of_load.insert(kind.to_string(), Figures::of(theirs, load.clients));
                if kind != Kind::Scalerpc && !ours.is_empty() {
                    let ratios = ours
                        .iter()
                        .zip(theirs)
                        .map(|(ours, theirs)| measure(ours) / measure(theirs));
                    of_rivals.insert(kind.to_string(), Spread::of(ratios));
                }
            }
            ratios.insert(load.name.clone(), of_rivals);
            figures.insert(load.name.clone(), of_load);
        }
        let mut all = outcomes.0.values().flat_map(BTreeMap::values).flatten();
        let device = all
            .next()
            .map(|outcome| outcome.account.device.clone())
            .unwrap_or_default();
        Self {
            schema: SCHEMA,
            schema_version: SCHEMA_VERSION,
            ratios,
            server_registered_bytes_per_further_client: further_clients(job, &figures),
            figures,
            job: job.clone(),
            device,
            clock,
            environment: Environment::detect(),
        }
    }

    /// Returns the reason why the result is worthless, if there is one.
    pub(crate) fn defect(&self) -> Option<String> {
        let sum = |count: fn(&Figures) -> u64| {
            self.figures
                .values()
                .flat_map(BTreeMap::values)
                .map(count)
                .sum::<u64>()
        };
        match (
            sum(|figures| figures.bad_payloads),
            sum(|figures| figures.not_executed_once),
        ) {
            (0, 0) => None,
            (0, calls) => Some(format!("{calls} calls were not executed exactly once")),
            (bad, _) => Some(format!("{bad} payloads were not the right ones")),
        }
    }

    fn table(&self, load: &str, is_round_trip: bool) -> Option<Table> {
        let (figures, ratios) = (self.figures.get(load)?, self.ratios.get(load)?);
        let header = [
            "",
            "min",
            "max",
            "scalerpc / it",
            "slowest / fastest client",
            "server memory",
            "a client",
        ];
        let (first, rest) = header.split_first()?;
        let what = if is_round_trip {
            "round trip"
        } else {
            "calls/s"
        };
        let mut table = Table::new(
            [*first, what]
                .iter()
                .chain(rest)
                .chain(&["groups", "slices", "fetched"])
                .copied(),
        );
        for kind in &self.job.options.contestants {
            let figures = figures.get(&kind.to_string())?;
            let (spread, show): (_, fn(f64) -> String) = match is_round_trip {
                true => (figures.ns_per_call_of_blocks, nanos),
                false => (figures.calls_per_s, rate),
            };
            let ratio = ratios
                .get(&kind.to_string())
                .map_or_else(String::new, |ratio| format!("{:.2}", ratio.median));
            let mut row = vec![
                kind.to_string(),
                show(spread.median),
                show(spread.min),
                show(spread.max),
                ratio,
            ];
            row.push(format!("{:.2}", figures.slowest_vs_fastest.median));
            row.extend([
                bytes(figures.server_registered_bytes),
                bytes(figures.server_registered_bytes_per_client as u64),
            ]);
            // The counters of one round.
            let count = |name: &str| {
                figures
                    .counters
                    .get(name)
                    .map(|count| (count / self.job.options.rounds as u64).to_string())
            };
            row.extend(
                ["groups", "slices", "fetched"]
                    .into_iter()
                    .filter_map(count),
            );
            table.row(row);
        }
        Some(table)
    }
}

fn further_clients(
    job: &Job,
    figures: &BTreeMap<String, BTreeMap<String, Figures>>,
) -> BTreeMap<String, f64> {
    let rates = || job.loads.iter().filter(|load| !load.is_round_trip());
    let clients = |load: &&Load| load.clients;
    let (Some(few), Some(many)) = (rates().min_by_key(clients), rates().max_by_key(clients)) else {
        return BTreeMap::new();
    };
    let further = (many.clients - few.clients) as f64;
    let bytes_of = |load: &Load, kind: &str| {
        Some(figures.get(&load.name)?.get(kind)?.server_registered_bytes as f64)
    };
    let kinds = job
        .options
        .contestants
        .iter()
        .map(Kind::to_string)
        .filter(|_| further > 0.0);
    kinds
        .filter_map(|kind| {
            Some((
                (bytes_of(many, &kind)? - bytes_of(few, &kind)?) / further,
                kind,
            ))
        })
        .map(|(bytes, kind)| (kind, bytes))
        .collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for load in &self.job.loads {
            let clients = plural(load.clients, "client");
            match load.is_round_trip() {
                true => writeln!(f, "{clients}, one call at a time")?,
                false => writeln!(
                    f,
                    "{clients}, {} calls unanswered each, groups of {}",
                    load.depth, self.job.options.group_size
                )?,
            }
            self.table(&load.name, load.is_round_trip())
                .map_or(Ok(()), |table| writeln!(f, "{table}"))?;
        }
        for kind in &self.job.options.contestants {
            writeln!(f, "{kind:<14} {}", kind.what())?;
        }
        let further = &self.server_registered_bytes_per_further_client;
        if !further.is_empty() {
            let each: Vec<String> = further
                .iter()
                .map(|(kind, count)| format!("{kind} {}", bytes(*count as u64)))
                .collect();
            writeln!(
                f,
                "One client more has the server register: {}.",
                each.join(", ")
            )?;
        }
        let rounds = plural(self.job.options.rounds, "round");
        writeln!(
            f,
            "Medians of {rounds}; server memory is what it registers. {}; {}.",
            self.device, self.clock
        )?;
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::load::Measured;
    use super::super::options::Options;
    use super::super::rank::Account;
    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn job() -> Job {
        let args = "compare --rounds 2 --depth 2 --clients 3,5 --contestants scalerpc,copyrpc";
        Job::resolve(
            &Cli::try_parse_from(args.split_whitespace())
                .unwrap()
                .options,
        )
        .unwrap()
    }

    /// Makes one round: 100 calls at this rate, `answered` of which the server executed.
    fn outcome(calls_per_s: f64, answered: u64, registered_bytes: u64) -> Outcome {
        let ns_per_call_of_blocks = 1e9 / calls_per_s;
        let measured = Measured {
            calls_per_s,
            ns_per_call_of_blocks,
            slowest_vs_fastest: 1.0,
            calls: 100,
            bad_replies: 0,
            refused: 0,
        };
        let counters = Counters::from([("slices".to_owned(), 4)]);
        Outcome {
            measured,
            account: Account {
                device: "a device".to_owned(),
                answered,
                bad_requests: 0,
                registered_bytes,
                counters,
            },
        }
    }

    /// Makes outcomes of ScaleRPC at rates 2 and 9, copyrpc at 4 and 3. Memory grows by ten bytes a
    /// client.
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
    fn ratios_are_those_of_each_round_and_memory_that_of_a_client_more() {
        let job = job();
        let result = Comparison::new(&job, &outcomes(&job, 100), ClockSource::Monotonic);
        assert_eq!(result.defect(), None);
        let ratio = |load: &str| result.ratios[load]["copyrpc"];
        // Rates are ScaleRPC's over the rival's, and so are times.
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
        assert_eq!(result.figures["rate_5x2"]["scalerpc"].counters["slices"], 8);
        let text = result.to_string();
        assert!(
            text.contains("One client more has the server register: copyrpc 10 B, scalerpc 10 B."),
            "{text}"
        );
    }

    #[test]
    fn a_call_that_was_executed_twice_or_not_at_all_spoils_the_result() {
        let job = job();
        for answered in [99, 101] {
            let result = Comparison::new(&job, &outcomes(&job, answered), ClockSource::Monotonic);
            assert_eq!(
                result.defect().as_deref(),
                Some("12 calls were not executed exactly once")
            );
        }
    }
}
