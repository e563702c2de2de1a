//! The options of an open loop.

use clap::Args;
use engine::pace::{Arrivals, Pace};

use harness::range::{RangeError, range};
use serde::{Deserialize, Serialize};

/// Least and most operations per second of a job.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e9;

/// How load is offered.
#[derive(Debug, Clone, Copy, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct PaceArgs {
    /// Open loop: operations per second of all clients of the job together, 1 to 1e9, which start at their times whatever became of those
    /// before; latencies count from there. --queue-depth still bounds what a client has outstanding [default: closed loop, each as fast
    /// as it can].
    #[arg(long, value_name = "OPS_PER_SECOND")]
    pub rate: Option<f64>,

    /// When operations of --rate start: even gives each client its turn at equal distances, poisson draws the distances at random by the
    /// seed [default: even].
    #[arg(long, value_enum, requires = "rate")]
    pub arrivals: Option<Arrivals>,
}

impl PaceArgs {
    /// The open loop that is asked for, if any; what is left out gets its default.
    ///
    /// # Errors
    /// [`RangeError`].
    pub fn resolve(&mut self) -> Result<Option<Pace>, RangeError> {
        let legal = || format!("{} to {:e} operations per second", RATES.start(), RATES.end());
        match self.rate {
            Some(rate) if !RATES.contains(&rate) => {
                let (flag, why) = ("--rate", "no rate that clients could be asked for");
                Err(range(flag, rate, why, legal()))
            }
            None => Ok(None),
            Some(rate) => Ok(Some(Pace { rate, arrivals: *self.arrivals.get_or_insert(Arrivals::Even) })),
        }
    }
}
