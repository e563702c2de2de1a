//! The two processes as started by an MPI launcher, on one host or two. Rank 0 reports for both,
//! except its peer's failures.

use std::process::ExitCode;
use std::time::Duration;

use bench::load::Failure;
use bench::program::{EXIT_OPTIONS, RANKS};
use harness::report::{JsonSink, say};
use launch::exchange::{Exchange, MpiExchange};
use launch::hosts::Hosts;

use crate::cli::Cli;
use crate::options::Options;
use crate::{PROGRAM, rank_process};

/// Maximum time for the slower process to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Runs this process's part.
pub(crate) fn run(cli: Cli) -> ExitCode {
    let mut exchange = match MpiExchange::start() {
        Ok(exchange) => exchange,
        Err(error) => return PROGRAM.fail(EXIT_OPTIONS, &error),
    };
    let (rank, size) = (exchange.rank(), exchange.size());
    if size != RANKS {
        // Every rank comes here.
        return match rank {
            0 => PROGRAM.fail(
                EXIT_OPTIONS,
                &format!("MPI has {size} ranks; legal is {RANKS}: mpirun -n {RANKS}"),
            ),
            _ => ExitCode::from(EXIT_OPTIONS),
        };
    }
    // Each process has one thread.
    let hosts = Hosts::gather(&mut exchange, START_LIMIT);
    let options = match hosts.and_then(|hosts| Options::resolve_on(cli, hosts.cores_here(1, &[]))) {
        Ok(options) => options,
        Err(error) => {
            PROGRAM.fail(EXIT_OPTIONS, &format!("rank {rank}: {error}"));
            exchange.abort(EXIT_OPTIONS);
        }
    };
    match job(&options, &mut exchange) {
        Ok(code) => code,
        Err(error) => {
            PROGRAM.fail(1, &format!("rank {rank}: {error}"));
            exchange.abort(1);
        }
    }
}

fn job(options: &Options, exchange: &mut MpiExchange) -> Result<ExitCode, Failure> {
    if exchange.rank() == 0 {
        options
            .json
            .as_ref()
            .map_or(Ok(()), JsonSink::check)
            .map_err(|error| format!("--json: {error}"))?;
        say(&options.to_string());
    }
    rank_process(options, exchange)
}
