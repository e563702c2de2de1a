//! What came out, as a table and as a document.

use std::collections::BTreeMap;
use std::fmt;

use harness::environment::Environment;
use serde::Serialize;

use crate::Job;
use crate::load::Window;

/// The figures of each round, by name.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<String, Vec<f64>>);

impl Figures {
    pub(crate) fn push(&mut self, name: &str, value: f64) {
        self.0.entry(name.to_owned()).or_default().push(value);
    }

    /// Of depth 1 and of a larger one.
    pub(crate) fn both(&mut self, name: &str, [one, deep]: [Window; 2]) {
        self.push(&format!("{name}_rtt_ns"), one.block_ns);
        self.deep(name, deep);
    }

    /// Of streaming: over the whole window, and by the median of the blocks.
    pub(crate) fn deep(&mut self, name: &str, deep: Window) {
        self.push(&format!("{name}_rate"), deep.rate);
        self.push(&format!("{name}_rate_of_blocks"), 1e9 / deep.block_ns);
    }

    fn of(&self, name: &str) -> &[f64] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// Round by round `ours` / `theirs`.
    fn ratio(&self, ours: &str, theirs: &str) -> Spread {
        Spread::of(self.of(ours).iter().zip(self.of(theirs)).map(|(ours, theirs)| ours / theirs).collect())
    }
}

/// Of some rounds.
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
        Self { median, min: at(0), max: at(count.saturating_sub(1)) }
    }
}

/// Sizes of regions in bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Regions {
    pub(crate) delegation_1: usize,
}

/// One run of the comparison of ipc and delegationrpc.
#[derive(Debug, Serialize)]
pub(crate) struct TableRow {
    protocol: &'static str,
    clients: usize,
    rate: f64,
    fairness: f64,
}

impl TableRow {
    pub(crate) fn new(protocol: &'static str, clients: usize, rates: &[f64]) -> Self {
        let Spread { min, max, .. } = Spread::of(rates.to_vec());
        Self { protocol, clients, rate: rates.iter().sum(), fairness: min / max }
    }
}

/// The result; its JSON form is this structure.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    ratios: BTreeMap<&'static str, Spread>,
    figures: BTreeMap<String, Spread>,
    table: Vec<TableRow>,
    regions: Regions,
    rounds: u32,
    cores: (usize, usize),
    environment: Environment,
}

impl Comparison {
    pub(crate) fn new(job: &Job, figures: &Figures, table: Vec<TableRow>, regions: Regions) -> Self {
        let ratios = [
            ("ipc_rtt_vs_raw_cacheline", "ipc_rtt_ns", "raw_cacheline_rtt_ns"),
            ("ipc_rtt_vs_iceoryx2", "ipc_rtt_ns", "iceoryx2_rtt_ns"),
            ("ipc_rate_depth32_vs_uds_echo", "ipc_rate", "uds_echo_rate"),
            ("ipc_idle_clients_cost", "ipc_ns_1_of_1024", "ipc_ns_1_of_1"),
            ("delegation_rate_vs_arrayqueue_of_blocks", "delegation_rate_of_blocks", "array_queue_rate_of_blocks"),
            ("flux_rate_vs_crossbeam_channel_of_blocks", "flux_rate_of_blocks", "crossbeam_channel_rate_of_blocks"),
            ("flux_rate_vs_rtrb_of_blocks", "flux_rate_of_blocks", "rtrb_rate_of_blocks"),
            ("flux_idle_nodes_cost_of_blocks", "flux_rate_of_blocks", "flux_of_8_rate_of_blocks"),
            ("delegation_rate_vs_arrayqueue", "delegation_rate", "array_queue_rate"),
            ("flux_rate_vs_crossbeam_channel", "flux_rate", "crossbeam_channel_rate"),
            ("flux_rate_vs_rtrb", "flux_rate", "rtrb_rate"),
            ("flux_idle_nodes_cost", "flux_rate", "flux_of_8_rate"),
        ];
        Self {
            ratios: ratios.into_iter().map(|(name, ours, theirs)| (name, figures.ratio(ours, theirs))).collect(),
            figures: figures.0.iter().map(|(name, values)| (name.clone(), Spread::of(values.clone()))).collect(),
            table,
            regions,
            rounds: job.rounds,
            cores: job.cores,
            environment: Environment::detect(),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, Spread { median, min, max }) in &self.ratios {
            writeln!(f, "{name:<42} {median:>8.3}  ({min:.3} to {max:.3})")?;
        }
        for (name, Spread { median, min, max }) in &self.figures {
            writeln!(f, "{name:<42} {median:>12.0}  ({min:.0} to {max:.0})")?;
        }
        for TableRow { protocol, clients, rate, fairness } in &self.table {
            writeln!(f, "{protocol:<14} {clients} clients {rate:>12.0} /s fairness {fairness:.3}")?;
        }
        Ok(())
    }
}
