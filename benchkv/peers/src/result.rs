//! The figures of all rounds, as a table and as a document.

use std::collections::BTreeMap;
use std::fmt;

use benchkv_harness::environment::Environment;
use benchkv_harness::load::Rate;
use benchkv_harness::report::Spread;
use serde::Serialize;

/// The result; its JSON form is this structure.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// The figures of each round, by name.
    rounds: BTreeMap<String, Vec<f64>>,
    /// The round-trip times of a bare cache line, in ns, just before and just after the measurement
    /// of each of these figures. A virtual machine's cores move, so their distance changes.
    lines: BTreeMap<String, Vec<[f64; 2]>>,
    #[serde(skip)]
    line_ns: f64,
    environment: Environment,
}

impl Figures {
    pub(crate) fn new() -> Self {
        Self {
            rounds: BTreeMap::new(),
            lines: BTreeMap::new(),
            line_ns: f64::NAN,
            environment: Environment::detect(),
        }
    }

    pub(crate) fn put(&mut self, name: &str, value: f64) {
        self.rounds.entry(name.to_owned()).or_default().push(value);
        let lines = self.lines.entry(name.to_owned()).or_default();
        lines.push([self.line_ns, f64::NAN]);
    }

    /// Notes the round-trip time of a bare cache line, which was measured now: after the figures
    /// that were added since the last note, and before the next ones.
    pub(crate) fn note_line(&mut self, line_ns: f64) {
        for [_, after] in self.lines.values_mut().filter_map(|lines| lines.last_mut()) {
            if after.is_nan() {
                *after = line_ns;
            }
        }
        self.line_ns = line_ns;
    }

    /// Adds a measurement. At depth 1 the figure is the time of a round trip. At other depths there
    /// are two rates: over the whole window, and by the median of the blocks, which a moment
    /// without a core does not change.
    pub(crate) fn push(&mut self, name: &str, depth: u32, window: Rate) {
        if depth == 1 {
            self.put(&format!("{name}_rtt_ns"), window.block_ns);
        } else {
            self.put(&format!("{name}_rate"), window.rate);
            self.put(&format!("{name}_rate_of_blocks"), 1e9 / window.block_ns);
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, values) in &self.rounds {
            let Spread { median, min, max } = Spread::of(values.iter().copied());
            writeln!(f, "{name:<42} {median:>12.3}  ({min:.3} to {max:.3})")?;
        }
        Ok(())
    }
}
