//! The models of a simulation, as typed and as recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::str::FromStr;

use clap::Args;
use engine::drive::simulated::{Cpu, Summary};
use mlx5::NicParameters;
use serde::{Deserialize, Serialize};

/// The members of a simulated result in addition to the members of a real result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimulationRecord {
    /// Costs of CPUs, in ns.
    pub cpu: BTreeMap<String, u64>,
    /// Costs of NICs, in ns, except for `contexts`, which is a number, and `byte`, which is in ps.
    pub nic: BTreeMap<String, u64>,
    /// The options of the changes in mid-run.
    pub course: Vec<String>,
    /// Counters of the simulation.
    #[serde(flatten)]
    pub summary: Summary,
}

/// Options of the models of `benchkv sim`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Models")]
pub struct WorldArgs {
    /// Costs of CPUs, as KEY=NS,...: a round of a daemon that finds nothing (round), a poll that a
    /// policy adds to a round (poll), a message that a round moves (message), a completion
    /// (completion), a WRITE or SEND posted (write), a step of a client that finds nothing
    /// (client), an operation that a client issues or that ends (operation), the time until a
    /// polling core sees the stores of another core (line), the wait for the memory of other cores
    /// in a turn that finds messages (stall); and in percent, at most 100, by how much a turn may
    /// take longer or shorter at random (noise). Or a FILE with such values, one per line, as
    /// --calibrate writes it; a path with a = needs a / (./a=b).
    #[arg(
        long,
        value_name = "KEY=NS,...|FILE",
        default_value = "",
        hide_default_value = true
    )]
    pub cpu: CpuModel,

    /// Costs of NICs, as KEY=NUMBER,...: in ns, doorbell, send (per message), link (one way),
    /// receive (per WRITE with immediate or SEND that arrives: its inverse is the maximum rate of a
    /// receiver; 0: none), unordered (the same if the receives are an unordered list), queue
    /// (minimum time between two receives from the same queue), miss (fetch of a context), jitter
    /// (maximum); in ps, byte; contexts (queue pairs whose context a NIC holds).
    #[arg(
        long,
        value_name = "KEY=NUMBER,...",
        default_value = "",
        hide_default_value = true
    )]
    pub nic: NicChoice,

    /// Have the devices check properties that a NIC does not check, and hash all their actions.
    #[arg(long)]
    pub strict: bool,
}

/// Maximum size of the file of a model, in bytes.
const MODEL_BYTES: u64 = 64 << 10;

/// The value of `--cpu`.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuModel(pub Cpu);

/// The value of `--nic`.
#[derive(Debug, Clone, Copy, Default)]
pub struct NicChoice(pub NicParameters);

/// The values of a model by the names that are typed and recorded.
pub trait Named {
    /// Returns each name with a reference to its value.
    fn named(&mut self) -> Vec<(&'static str, &mut u64)>;

    /// Returns all values by their names, in the form in which they are recorded.
    fn record(mut self) -> BTreeMap<String, u64>
    where
        Self: Sized,
    {
        let values = self.named().into_iter();
        values
            .map(|(name, value)| (name.to_owned(), *value))
            .collect()
    }
}

impl Named for Cpu {
    fn named(&mut self) -> Vec<(&'static str, &mut u64)> {
        Cpu::named(self).into()
    }
}

/// [`NicParameters`], with the number of contexts as a `u64`.
#[derive(Debug, Clone, Copy)]
pub struct Nic {
    parameters: NicParameters,
    contexts: u64,
}

impl From<NicParameters> for Nic {
    fn from(parameters: NicParameters) -> Self {
        Self {
            contexts: parameters.context_entries as u64,
            parameters,
        }
    }
}

impl From<Nic> for NicParameters {
    fn from(nic: Nic) -> Self {
        Self {
            context_entries: usize::try_from(nic.contexts).unwrap_or(usize::MAX),
            ..nic.parameters
        }
    }
}

impl Named for Nic {
    fn named(&mut self) -> Vec<(&'static str, &mut u64)> {
        let Self {
            parameters,
            contexts,
        } = self;
        vec![
            ("doorbell", &mut parameters.doorbell_ns),
            ("send", &mut parameters.send_ns),
            ("byte", &mut parameters.byte_ps),
            ("link", &mut parameters.link_ns),
            ("receive", &mut parameters.receive_ns),
            ("unordered", &mut parameters.unordered_receive_ns),
            ("queue", &mut parameters.queue_receive_ns),
            ("contexts", contexts),
            ("miss", &mut parameters.context_miss_ns),
            ("jitter", &mut parameters.jitter_ns),
        ]
    }
}

/// Sets the values that are given in `text`, which has the form `KEY=NUMBER,...`.
fn set(model: &mut impl Named, text: &str) -> Result<(), String> {
    const MAX: u64 = 1_000_000_000;
    let mut values = model.named();
    let known: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
    let known = known.join(", ");
    let mut seen = BTreeSet::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("{part}: use KEY=NUMBER, with commas between them"))?;
        let number = value.parse().ok().filter(|number| *number <= MAX);
        let number = number.ok_or_else(|| format!("{part}: a number from 0 to {MAX} is legal"))?;
        if !seen.insert(key) {
            return Err(format!("{part}: {key} is given twice"));
        }
        let place = values.iter_mut().find(|(name, _)| *name == key);
        let (_, place) = place.ok_or_else(|| format!("{key} is unknown; known are {known}"))?;
        **place = number;
    }
    Ok(())
}

impl FromStr for CpuModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut cpu = Cpu::default();
        if text.is_empty() || text.contains('=') && !text.contains('/') {
            set(&mut cpu, text)?;
        } else {
            let mut model = String::new();
            let read = File::open(text)
                .and_then(|file| file.take(MODEL_BYTES + 1).read_to_string(&mut model));
            read.map_err(|error| format!("the file {text}: {error}"))?;
            if model.len() as u64 > MODEL_BYTES {
                return Err(format!(
                    "the file {text}: no model has more than {MODEL_BYTES} bytes"
                ));
            }
            let lines = model.lines().map(str::trim);
            let lines: Vec<_> = lines.filter(|line| !line.starts_with('#')).collect();
            set(&mut cpu, &lines.join(",")).map_err(|error| format!("the file {text}: {error}"))?;
        }
        Ok(Self(cpu))
    }
}

impl FromStr for NicChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut nic = Nic::from(NicParameters::default());
        set(&mut nic, text)?;
        Ok(Self(nic.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_read_from_any_file_of_its_size_and_no_key_is_given_twice() {
        let path = std::env::temp_dir().join(format!("benchkv-round=1-{}", std::process::id()));
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().parse::<CpuModel>()
        };
        assert_eq!(
            of("# a comment\nround=7\n\n poll=8\n")
                .map(|CpuModel(cpu)| (cpu.round_ns, cpu.poll_ns)),
            Ok((7, 8))
        );
        assert!(
            of("round=7\nround=8\n")
                .unwrap_err()
                .ends_with("round=8: round is given twice")
        );
        assert!(
            of(&"#\n".repeat(40_000))
                .unwrap_err()
                .ends_with("no model has more than 65536 bytes")
        );
        std::fs::remove_file(&path).unwrap();
        assert!(
            "/dev/zero"
                .parse::<CpuModel>()
                .unwrap_err()
                .contains("more than 65536 bytes")
        );
        assert_eq!(
            "queue=1,queue=2".parse::<NicChoice>().unwrap_err(),
            "queue=2: queue is given twice"
        );
    }
}
