//! Options of the software device, as named on a command line: `soft:KEY=VALUE,...`.

use std::fmt;
use std::str::FromStr;

use mlx5::{Faults, Timing};

/// Maximum of the times in the options, in us.
const MAX_US: f64 = 100_000.0;
const DEFAULT_SEED: u64 = 1;
/// Number of operations in a thousand that jitter delays.
const JITTER_PERMILLE: u16 = 500;

const KEYS: &str = "known are rtt_us, jitter_us, seed and fault; or soft:roce=ADDRESS[/BITS] with its own keys, for several hosts";
const NO_RATE: &str = "the rate of a receiver needs a model of its NIC, which all processes would have to share; there is none";

/// The timing and the faults of the software device, the same for all devices of a job.
///
/// The clock of the device is the system's clock, which all processes share. So the device cannot
/// model anything that depends on other devices, such as the rate of a receiver, or a link that
/// several connections share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SoftDevice {
    /// Time of a request and its response together, in ns. Each of the two is executed half of this
    /// time after its doorbell, in the next poll of the device that posted it. 0: both are executed
    /// in their doorbells.
    pub rtt_ns: u64,
    /// The faults. Jitter delays half of the operations, which are chosen at random.
    pub faults: Faults,
}

impl Default for SoftDevice {
    fn default() -> Self {
        Self {
            rtt_ns: 0,
            faults: Faults {
                seed: DEFAULT_SEED,
                ..Faults::default()
            },
        }
    }
}

impl SoftDevice {
    /// Returns the time at which operations are executed.
    pub const fn timing(&self) -> Timing {
        match self.rtt_ns.div_ceil(2) {
            0 => Timing::Immediate,
            ns => Timing::Delay { ns },
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let faults = &mut self.faults;
        match key {
            "rtt_us" => self.rtt_ns = nanos(value)?,
            "jitter_us" => {
                faults.delay_ns = nanos(value)?;
                faults.delay_permille = JITTER_PERMILLE * u16::from(faults.delay_ns > 0);
            }
            "seed" => {
                let seed = value.parse();
                faults.seed =
                    seed.map_err(|_| "a seed is a number from 0 to 18446744073709551615")?;
            }
            "fault" => set_fault(faults, value)?,
            "rx_wimm_per_s" => return Err(NO_RATE.to_owned()),
            _ => return Err(KEYS.to_owned()),
        }
        Ok(())
    }
}

fn set_fault(faults: &mut Faults, fault: &str) -> Result<(), String> {
    let permille = |number: &str| match number.parse() {
        Ok(permille @ 0..=1000) => Ok(permille),
        _ => Err("it happens 0 to 1000 times in a thousand".to_owned()),
    };
    match fault.split_once(':') {
        Some(("rnr", number)) => faults.rnr_permille = permille(number)?,
        Some(("reorder", number)) => faults.reorder_permille = permille(number)?,
        Some(("drop", number)) => {
            let operation = number.parse();
            faults.drop_peers_after =
                Some(operation.map_err(|_| "an operation is a number, from 0")?);
        }
        _ => return Err("use rnr:PERMILLE, reorder:PERMILLE or drop:OPERATION".into()),
    }
    Ok(())
}

fn nanos(us: &str) -> Result<u64, String> {
    match us.parse::<f64>() {
        Ok(us) if (0.0..=MAX_US).contains(&us) => Ok((us * 1000.0).round() as u64),
        _ => Err(format!("it takes 0 to {MAX_US} us")),
    }
}

/// Parses the text after `soft:`.
impl FromStr for SoftDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut device, mut seen) = (Self::default(), Vec::new());
        for part in text.split(',') {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not of the form KEY=VALUE"))?;
            // Each kind of fault may be given once.
            let name = if key == "fault" {
                value.split(':').next().unwrap_or(value)
            } else {
                key
            };
            if seen.contains(&(key, name)) {
                return Err(format!("{part}: {name} is given twice"));
            }
            seen.push((key, name));
            device
                .set(key, value)
                .map_err(|why| format!("{part}: {why}"))?;
        }
        Ok(device)
    }
}

/// Formats the device as it is typed, without defaults.
impl fmt::Display for SoftDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults = &self.faults;
        let us = |ns: u64| (ns > 0).then_some(ns as f64 / 1000.0);
        let parts = [
            us(self.rtt_ns).map(|us| format!("rtt_us={us}")),
            us(faults.delay_ns).map(|us| format!("jitter_us={us}")),
            (faults.seed != DEFAULT_SEED).then(|| format!("seed={}", faults.seed)),
            (faults.rnr_permille > 0).then(|| format!("fault=rnr:{}", faults.rnr_permille)),
            (faults.reorder_permille > 0)
                .then(|| format!("fault=reorder:{}", faults.reorder_permille)),
            faults
                .drop_peers_after
                .map(|operation| format!("fault=drop:{operation}")),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let colon = if parts.is_empty() { "" } else { ":" };
        write!(f, "soft{colon}{}", parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_parses_back() {
        for (text, device) in [
            (
                "rtt_us=6",
                SoftDevice {
                    rtt_ns: 6_000,
                    ..SoftDevice::default()
                },
            ),
            (
                "rtt_us=0.001,jitter_us=2.5,seed=0",
                SoftDevice {
                    rtt_ns: 1,
                    faults: Faults {
                        delay_permille: 500,
                        delay_ns: 2_500,
                        ..Faults::default()
                    },
                },
            ),
            (
                "rtt_us=100000",
                SoftDevice {
                    rtt_ns: 100_000_000,
                    ..SoftDevice::default()
                },
            ),
            (
                "fault=rnr:5,fault=reorder:1000,fault=drop:0",
                SoftDevice {
                    rtt_ns: 0,
                    faults: Faults {
                        seed: 1,
                        rnr_permille: 5,
                        reorder_permille: 1000,
                        drop_peers_after: Some(0),
                        ..Faults::default()
                    },
                },
            ),
        ] {
            assert_eq!(device.to_string(), format!("soft:{text}"));
            assert_eq!(text.parse(), Ok(device));
        }
        // Other forms of the same options.
        for (text, printed) in [
            ("fault=drop:3,rtt_us=2.0", "soft:rtt_us=2,fault=drop:3"),
            ("rtt_us=0,seed=1,fault=rnr:0", "soft"),
        ] {
            assert_eq!(text.parse::<SoftDevice>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn an_error_names_the_part_that_is_wrong_and_what_is_legal() {
        for (text, parts) in [
            ("", ["\"\"", "KEY=VALUE"]),
            ("rtt_us", ["\"rtt_us\"", "KEY=VALUE"]),
            ("rtt_us=6,", ["\"\"", "KEY=VALUE"]),
            ("rtt_us=six", ["rtt_us=six: ", "0 to 100000 us"]),
            ("rtt_us=-1", ["rtt_us=-1: ", "0 to 100000 us"]),
            ("rtt_us=NaN", ["rtt_us=NaN: ", "0 to 100000 us"]),
            (
                "seed=1,jitter_us=100001",
                ["jitter_us=100001: ", "0 to 100000 us"],
            ),
            ("seed=-1", ["seed=-1: ", "0 to 18446744073709551615"]),
            (
                "rtt=6",
                ["rtt=6: ", "known are rtt_us, jitter_us, seed and fault"],
            ),
            (
                "rx_wimm_per_s=1900000",
                ["rx_wimm_per_s=1900000: ", "model of its NIC"],
            ),
            ("fault=rnr", ["fault=rnr: ", "rnr:PERMILLE"]),
            ("fault=rnr:1001", ["fault=rnr:1001: ", "0 to 1000 times"]),
            ("fault=drop:x", ["fault=drop:x: ", "a number, from 0"]),
            ("fault=fire:1", ["fault=fire:1: ", "reorder:PERMILLE"]),
            ("rtt_us=1,rtt_us=2", ["rtt_us=2: ", "rtt_us is given twice"]),
            (
                "fault=rnr:1,fault=rnr:2",
                ["fault=rnr:2: ", "rnr is given twice"],
            ),
        ] {
            let refused = text.parse::<SoftDevice>().unwrap_err();
            assert!(
                parts.iter().all(|part| refused.contains(part)),
                "{text}: {refused}"
            );
        }
    }

    #[test]
    fn options_are_those_of_the_device() {
        assert!(matches!(SoftDevice::default().timing(), Timing::Immediate));
        assert_eq!(
            SoftDevice::default().faults,
            Faults {
                seed: 1,
                ..Faults::default()
            }
        );
        let device: SoftDevice =
            "rtt_us=6,jitter_us=2,seed=9,fault=rnr:10,fault=reorder:20,fault=drop:30"
                .parse()
                .unwrap();
        assert!(matches!(device.timing(), Timing::Delay { ns: 3_000 }));
        let expected = Faults {
            seed: 9,
            delay_permille: 500,
            delay_ns: 2_000,
            rnr_permille: 10,
            reorder_permille: 20,
            drop_peers_after: Some(30),
            ..Faults::default()
        };
        assert_eq!(device.faults, expected);
    }
}
