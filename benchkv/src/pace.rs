//! The options of an open loop.

use clap::Args;
use engine::pace::{Arrivals, Pace};

use benchkv_harness::range::decimal;
use serde::{Deserialize, Serialize};

/// Minimum and maximum operations per second of a job.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e9;

/// The options of an open loop.
#[derive(Debug, Clone, Copy, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct PaceArgs {
    /// Operations per second of the job [default: closed loop]
    ///
    /// Open loop: all clients of the job together, 1 to 1e9. Each operation has a start time,
    /// independent of earlier operations, from which its latency counts. --queue-depth still bounds
    /// the outstanding operations of a client. In a closed loop each client is as fast as it can.
    #[arg(help_heading = "Load", long, value_name = "RATE", value_parser = decimal(RATES))]
    pub rate: Option<f64>,

    /// Start times of the operations of --rate: even gives each client its turn at equal intervals,
    /// poisson draws the intervals at random by the seed [default: even].
    #[arg(
        help_heading = "Load",
        long,
        hide_short_help = true,
        value_enum,
        requires = "rate"
    )]
    pub arrivals: Option<Arrivals>,
}

impl PaceArgs {
    /// Returns the open loop, with the default of `--arrivals` if it is not given; `None` if there is
    /// no `--rate`.
    pub fn resolve(&mut self) -> Option<Pace> {
        self.rate.map(|rate| Pace {
            rate,
            arrivals: *self.arrivals.get_or_insert(Arrivals::Even),
        })
    }
}
