//! Round trip and rate of ScaleRPC, copyrpc, SEND on a reliable connection and SEND on datagrams, by turns in one run.

use std::error::Error;

/// Round trip and rate beside copyrpc and the two baselines.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

pub(crate) fn run(_: &Options) -> Result<(), Box<dyn Error>> {
    Err("not there yet".into())
}
