//! The two processes as an MPI launcher started them, on one host or two. Rank 0 speaks for both, except about its peer's failures.

use std::error::Error;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use harness::affinity::usable_cores;
use harness::exchange::{Exchange, MpiExchange};
use harness::report::{JsonSink, say};

use crate::cli::Cli;
use crate::options::{Options, RANKS};
use crate::{EXIT_OPTIONS, fail, rank_process};

/// How long the slower process may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Runs this process's part.
pub(crate) fn run(cli: Cli) -> ExitCode {
    let mut exchange = match MpiExchange::start() {
        Ok(exchange) => exchange,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    let (rank, size) = (exchange.rank(), exchange.size());
    if size != RANKS {
        // Every rank comes here.
        return match rank {
            0 => fail(EXIT_OPTIONS, &format!("MPI has {size} ranks; legal is {RANKS}: mpirun -n {RANKS}")),
            _ => ExitCode::from(EXIT_OPTIONS),
        };
    }
    let options = match cores(&mut exchange).and_then(|cores| Ok(Options::resolve_on(cli, cores)?)) {
        Ok(options) => options,
        Err(error) => {
            fail(EXIT_OPTIONS, &format!("rank {rank}: {error}"));
            exchange.abort(EXIT_OPTIONS);
        }
    };
    match job(&options, &mut exchange) {
        Ok(code) => code,
        Err(error) => {
            fail(1, &format!("rank {rank}: {error}"));
            exchange.abort(1);
        }
    }
}

fn job(options: &Options, exchange: &mut MpiExchange) -> Result<ExitCode, Box<dyn Error>> {
    if exchange.rank() == 0 {
        options.json.as_ref().map_or(Ok(()), JsonSink::check).map_err(|error| format!("--json: {error}"))?;
        say(&options.to_string());
    }
    rank_process(options, exchange)
}

/// The cores that the ranks of this host may use, together: launchers give each rank its own.
fn cores(exchange: &mut MpiExchange) -> Result<Vec<usize>, Box<dyn Error>> {
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let part = serde_json::to_vec(&(&host, usable_cores()?))?;
    let mut cores = Vec::new();
    for part in exchange.all_gather(&part, START_LIMIT, &|| false)? {
        let (of, usable): (String, Vec<usize>) = serde_json::from_slice(&part)?;
        if of == host {
            cores.extend(usable);
        }
    }
    cores.sort_unstable();
    cores.dedup();
    Ok(cores)
}
