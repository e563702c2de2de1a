//! `copyrpc_bench`: copyrpc between two processes.
//!
//! In the order a run uses the files: [`cli`] and [`options`] (the job), [`rank`] (the order of a
//! job), [`setup`] (device and endpoints), [`client`] and [`server`] (the two loops), [`result`]
//! (the output). With the feature `mpi`, `mpi` is the entry point of processes that an MPI launcher
//! started.

mod cli;
mod client;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod rank;
mod result;
mod server;
mod setup;

use std::process::ExitCode;
use std::time::Duration;

use bench::load::Failure;
use bench::program::{EXIT_OPTIONS, Program};
use clap::Parser;
use launch::exchange::Exchange;
use launch::role::{Role, foreign_launcher, role};

use cli::Cli;
use options::Options;
use result::JobResult;

const PROGRAM: Program = Program("copyrpc_bench");
/// Maximum time that the processes wait for each other's reports.
const REPORT_LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let ended = match role() {
        Ok(Role::Launcher) => return start(),
        Ok(Role::Rank(mut exchange)) => Options::resolve(Cli::parse())
            .and_then(|options| rank_process(&options, &mut exchange))
            .map_err(|error| format!("rank {}: {error}", exchange.rank()).into()),
        Ok(Role::Baseline(peer)) => peer.serve().map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Err(error) => Err(error),
    };
    ended.unwrap_or_else(|error: Failure| PROGRAM.fail(1, &error))
}

/// Started by a user, or as one of several processes by a launcher of another kind.
fn start() -> ExitCode {
    let cli = Cli::parse();
    match foreign_launcher() {
        None => launch(cli),
        #[cfg(feature = "mpi")]
        Some(_) => mpi::run(cli),
        #[cfg(not(feature = "mpi"))]
        Some(launcher) => {
            PROGRAM.fail(EXIT_OPTIONS, &format!("{launcher}, but this build has no MPI: start it alone, or build it with --features mpi"))
        }
    }
}

/// The launcher: checks everything that can be checked before a process is started.
fn launch(cli: Cli) -> ExitCode {
    match Options::resolve(cli) {
        Ok(options) => PROGRAM.launch(&options, options.json.as_ref(), options.time_limit()),
        Err(error) => PROGRAM.fail(EXIT_OPTIONS, &error),
    }
}

/// One of the two processes, however it was started.
fn rank_process(options: &Options, exchange: &mut dyn Exchange) -> Result<ExitCode, Failure> {
    let report = rank::run(options, exchange)?;
    let parts = exchange.all_gather(&serde_json::to_vec(&report)?, REPORT_LIMIT, &|| false)?;
    if exchange.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let result = JobResult::reduce(options, &parts)?;
    let bad = result.bad_payloads();
    PROGRAM.show(
        &result,
        options.json.as_ref(),
        (bad > 0).then(|| format!("{bad} payloads were not the right ones")),
    )
}
