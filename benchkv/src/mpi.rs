//! A rank as an MPI launcher started it.
//!
//! A rank that fails ends the job: MPI ends the others. That a rank was killed is noticed by the launcher, which ends the rest, and by its
//! peers; that the launcher was killed, by the MPI library in each rank.

use std::process::ExitCode;

use benchkv::cli::Cli;
use harness::exchange::{Exchange, MpiExchange, mpi_library};

use crate::{EXIT_OPTIONS, fail, rank_process};

/// Runs this process's part.
pub(crate) fn run(cli: Cli) -> ExitCode {
    let mut exchange = match MpiExchange::start() {
        Ok(exchange) => exchange,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    let rank = exchange.rank();
    match rank_process(cli, &mut exchange, Some(mpi_library())) {
        Ok(code) => code,
        Err(error) => {
            fail(1, &format!("rank {rank}: {error}"));
            exchange.abort(1);
        }
    }
}
