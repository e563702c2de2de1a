//! The terms on which the two ranks measure: names, barriers, and the load that both sets of
//! measurements share.

use std::time::Duration;

use bench::load::Failure;
use ipc::Dir;
use launch::exchange::Exchange;

/// Maximum unanswered calls of a client of ipc and delegationrpc, and their number while it
/// streams.
pub(crate) const DEPTH: u32 = 32;
/// Number of calls that are verified before a measurement.
pub(crate) const CHECKED: u64 = 10_000;
/// Maximum time that the ranks wait for each other.
pub(crate) const MEET_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn meet(exchange: &mut dyn Exchange) -> Result<(), Failure> {
    Ok(exchange.barrier(MEET_LIMIT, &|| false)?)
}

/// Names of this run, which contain rank 1's process.
pub(crate) struct Names {
    pub(crate) dir: Dir,
    run: String,
}

impl Names {
    pub(crate) fn agree(exchange: &mut dyn Exchange) -> Result<Self, Failure> {
        let parts = exchange.all_gather(
            std::process::id().to_string().as_bytes(),
            MEET_LIMIT,
            &|| false,
        )?;
        let run = parts
            .get(1)
            .map(|part| String::from_utf8_lossy(part).into_owned())
            .unwrap_or_default();
        let dir = Dir::open(None)?;
        dir.sweep()?;
        Ok(Self { dir, run })
    }

    pub(crate) fn of(&self, what: &str) -> String {
        format!("peers-{}-{what}", self.run)
    }
}
