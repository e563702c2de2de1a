//! The loads of a job that changes its load in mid-run: [`Sweep`].

use std::fmt;
use std::str::FromStr;

use benchkv_harness::as_text;
use benchkv_harness::range::{RangeError, range};
use engine::phase::Phase;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The value of `--sweep`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sweep {
    /// `depth` or `clients`.
    of: &'static str,
    values: Vec<usize>,
}

/// Maximum number of runs of a job.
const MAX_RUNS: usize = 32;

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, values) = text.split_once('=').unwrap_or_default();
        let values: Option<Vec<usize>> =
            values.split(',').map(|value| value.parse().ok()).collect();
        let of = ["depth", "clients"].into_iter().find(|of| *of == name);
        match (of, values) {
            (Some(of), Some(values)) if values.len() <= MAX_RUNS => Ok(Self { of, values }),
            _ => Err(format!(
                "use depth=N,N,... or clients=N,N,..., with up to {MAX_RUNS} numbers"
            )),
        }
    }
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = self.values.iter().map(ToString::to_string).collect();
        write!(f, "{}={}", self.of, values.join(","))
    }
}

impl Serialize for Sweep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        as_text::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Sweep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        as_text::deserialize(deserializer)
    }
}

impl Sweep {
    /// Returns the number of runs: one for each load.
    pub fn runs(&self) -> usize {
        self.values.len()
    }

    /// Returns the load of each run in words.
    pub fn loads(&self) -> impl Iterator<Item = String> {
        let values = self.values.iter();
        values.map(|value| format!("{} {value}", self.of))
    }

    /// Returns the number of clients of each rank that have operations outstanding in a run, and
    /// the maximum number of operations of each of them. The job has `clients` and `depth`.
    pub fn load(&self, run: usize, clients: usize, depth: usize) -> (usize, usize) {
        let value = self.values.get(run).copied();
        match self.of {
            "clients" => (value.unwrap_or(clients), depth),
            _ => (clients, value.unwrap_or(depth)),
        }
    }

    /// Returns the maximum number of operations that client `number` of a rank has outstanding from
    /// the beginning of a phase on; `None` if the phase changes nothing. The first load is also the
    /// load of the warm-up.
    pub fn depth_in(
        &self,
        phase: Phase,
        number: usize,
        clients: usize,
        depth: usize,
    ) -> Option<usize> {
        let run = match phase {
            Phase::WarmUp => 0,
            Phase::Window(run) => usize::from(run),
            _ => return None,
        };
        let (clients, depth) = self.load(run, clients, depth);
        Some(if number < clients { depth } else { 0 })
    }

    /// Checks the loads of a job with `clients` clients of each rank, which have up to `depth`
    /// operations outstanding.
    ///
    /// # Errors
    /// The legal values.
    pub fn check(&self, clients: usize, depth: usize) -> Result<(), RangeError> {
        let (option, most) = match self.of {
            "clients" => ("--client-threads", clients),
            _ => ("--queue-depth", depth),
        };
        if self.values.iter().all(|value| (1..=most).contains(value)) {
            return Ok(());
        }
        let why = "a number is outside the supported range";
        let legal = format!("1 to {most}, which is {option}");
        Err(range("--sweep", self, why, legal))
    }
}
