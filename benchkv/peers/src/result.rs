//! The result, as a table and as a document.

use std::collections::BTreeMap;
use std::fmt;

use bench::load::Rate;
use harness::environment::Environment;
use serde::Serialize;

use crate::Job;

/// The figures of each round, by name.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<String, Vec<f64>>);

impl Figures {
    pub(crate) fn put(&mut self, name: &str, value: f64) {
        self.0.entry(name.to_owned()).or_default().push(value);
    }

    /// Adds a measurement: at depth 1 a round trip; at others the rate, over the whole window and
    /// by the median of the blocks.
    pub(crate) fn push(&mut self, name: &str, depth: u32, window: Rate) {
        if depth == 1 {
            self.put(&format!("{name}_rtt_ns"), window.block_ns);
        } else {
            self.put(&format!("{name}_rate"), window.rate);
            self.put(&format!("{name}_rate_of_blocks"), 1e9 / window.block_ns);
        }
    }

    fn of(&self, name: &str) -> &[f64] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the spread of `ours` / `theirs` over the rounds.
    fn ratio(&self, ours: &str, theirs: &str) -> Spread {
        Spread::of(
            self.of(ours)
                .iter()
                .zip(self.of(theirs))
                .map(|(ours, theirs)| ours / theirs)
                .collect(),
        )
    }
}

/// The spread of values over rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let count = values.len();
        let median = (at(count.saturating_sub(1) / 2) + at(count / 2)) / 2.0;
        Self {
            median,
            min: at(0),
            max: at(count.saturating_sub(1)),
        }
    }
}

/// The results of each round of the crowds, by set and number of clients.
#[derive(Debug, Default)]
pub(crate) struct Crowds(BTreeMap<&'static str, BTreeMap<usize, CrowdFigures>>);

#[derive(Debug, Default)]
struct CrowdFigures {
    /// Rates of all clients together.
    rates: Vec<f64>,
    fairness: Vec<f64>,
    region_bytes: u64,
}

impl Crowds {
    pub(crate) fn push(
        &mut self,
        set: &'static str,
        clients: usize,
        rates: &[f64],
        region_bytes: u64,
    ) {
        let figures = self.0.entry(set).or_default().entry(clients).or_default();
        let Spread { min, max, .. } = Spread::of(rates.to_vec());
        figures.rates.push(rates.iter().sum());
        figures.fairness.push(min / max);
        figures.region_bytes = region_bytes;
    }

    fn results(&self) -> BTreeMap<&'static str, CrowdResult> {
        let result = |by_clients: &BTreeMap<usize, CrowdFigures>| {
            let single = by_clients.get(&1).map_or(&[][..], |one| &one.rates);
            let least_of_round = |(round, single): (usize, &f64)| {
                let rates = by_clients
                    .values()
                    .filter_map(|figures| figures.rates.get(round));
                rates.fold(f64::INFINITY, |least, rate| least.min(rate / single))
            };
            let clients = by_clients.iter().map(|(clients, figures)| {
                let CrowdFigures {
                    rates,
                    fairness,
                    region_bytes,
                } = figures;
                let row = Crowd {
                    rate: Spread::of(rates.clone()),
                    fairness: Spread::of(fairness.clone()),
                    region_bytes: *region_bytes,
                };
                (*clients, row)
            });
            CrowdResult {
                least_vs_1_client: Spread::of(
                    single.iter().enumerate().map(least_of_round).collect(),
                ),
                clients: clients.collect(),
            }
        };
        self.0
            .iter()
            .map(|(set, by_clients)| (*set, result(by_clients)))
            .collect()
    }
}

/// The result of one set of crowds.
#[derive(Debug, Serialize)]
struct CrowdResult {
    /// The minimum rate, over the numbers of clients, relative to the rate of the one client of the
    /// same round.
    least_vs_1_client: Spread,
    clients: BTreeMap<usize, Crowd>,
}

#[derive(Debug, Serialize)]
struct Crowd {
    /// Calls per second of all clients together.
    rate: Spread,
    /// Rate of the slowest client relative to that of the fastest.
    fairness: Spread,
    region_bytes: u64,
}

/// The result; its JSON form is this structure.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    ratios: BTreeMap<&'static str, Spread>,
    figures: BTreeMap<String, Spread>,
    crowds: BTreeMap<&'static str, CrowdResult>,
    region_bytes: BTreeMap<&'static str, usize>,
    rounds: u32,
    cores: (usize, usize),
    environment: Environment,
}

/// Ratios: ours over theirs. `of_blocks` is the median of the blocks, on both sides, for
/// measurements between threads: a moment without a core would make one window many times slower.
const RATIOS: [(&str, &str, &str); 12] = [
    (
        "ipc_rtt_vs_raw_cacheline",
        "ipc_rtt_ns",
        "raw_cacheline_rtt_ns",
    ),
    ("ipc_rtt_vs_iceoryx2", "ipc_rtt_ns", "iceoryx2_rtt_ns"),
    ("ipc_rate_depth32_vs_uds_echo", "ipc_rate", "uds_echo_rate"),
    (
        "ipc_idle_clients_cost",
        "ipc_1_of_1024_rtt_ns",
        "ipc_1_of_1_rtt_ns",
    ),
    (
        "delegation_rate_vs_arrayqueue",
        "delegation_rate_of_blocks",
        "array_queue_rate_of_blocks",
    ),
    (
        "flux_rate_vs_crossbeam_channel",
        "flux_rate_of_blocks",
        "crossbeam_channel_rate_of_blocks",
    ),
    (
        "flux_rate_vs_rtrb",
        "flux_rate_of_blocks",
        "rtrb_rate_of_blocks",
    ),
    // These are times, so `theirs` is the network without idle nodes.
    (
        "flux_idle_nodes_cost",
        "flux_rate_of_blocks",
        "flux_of_8_rate_of_blocks",
    ),
    (
        "delegation_rate_vs_arrayqueue_of_windows",
        "delegation_rate",
        "array_queue_rate",
    ),
    (
        "flux_rate_vs_crossbeam_channel_of_windows",
        "flux_rate",
        "crossbeam_channel_rate",
    ),
    ("flux_rate_vs_rtrb_of_windows", "flux_rate", "rtrb_rate"),
    (
        "flux_idle_nodes_cost_of_windows",
        "flux_rate",
        "flux_of_8_rate",
    ),
];

impl Comparison {
    pub(crate) fn new(
        job: &Job,
        figures: &Figures,
        crowds: &Crowds,
        region_bytes: BTreeMap<&'static str, usize>,
    ) -> Self {
        Self {
            ratios: RATIOS
                .into_iter()
                .map(|(name, ours, theirs)| (name, figures.ratio(ours, theirs)))
                .collect(),
            figures: figures
                .0
                .iter()
                .map(|(name, values)| (name.clone(), Spread::of(values.clone())))
                .collect(),
            crowds: crowds.results(),
            region_bytes,
            rounds: job.rounds,
            cores: job.cores,
            environment: Environment::detect(),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, Spread { median, min, max }) in &self.ratios {
            writeln!(f, "{name:<42} {median:>12.3}  ({min:.3} to {max:.3})")?;
        }
        for (name, Spread { median, min, max }) in &self.figures {
            writeln!(f, "{name:<42} {median:>12.0}  ({min:.0} to {max:.0})")?;
        }
        for (
            set,
            CrowdResult {
                least_vs_1_client,
                clients,
            },
        ) in &self.crowds
        {
            writeln!(
                f,
                "{:<42} {:>12.3}",
                format!("{set}, least / 1 client"),
                least_vs_1_client.median
            )?;
            for (
                clients,
                Crowd {
                    rate,
                    fairness,
                    region_bytes,
                },
            ) in clients
            {
                let name = format!("{set}, {clients} clients");
                writeln!(
                    f,
                    "{name:<42} {:>12.0}  fairness {:.3}, region {region_bytes} B",
                    rate.median, fairness.median
                )?;
            }
        }
        for (name, bytes) in &self.region_bytes {
            writeln!(f, "{name:<42} {bytes:>12} B")?;
        }
        Ok(())
    }
}
