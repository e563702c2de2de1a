//! Throughput against the number of clients, grouping off and on, in virtual time with the NIC model of the software HCA.

use std::error::Error;

/// Throughput against the number of clients, grouping off and on, in virtual time.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

pub(crate) fn run(_: &Options) -> Result<(), Box<dyn Error>> {
    Err("not there yet".into())
}
