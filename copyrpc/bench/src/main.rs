//! `copyrpc_bench`: copyrpc between two processes.
//!
//! In the order a run uses the files: [`cli`] and [`options`] (the job), [`rank`] (the order of a job), [`setup`] (device and endpoints),
//! [`client`] and [`server`] (the two loops), [`result`] (the output). With the feature `mpi`, `mpi` is the entry point of processes that
//! an MPI launcher started.

mod cli;
mod client;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod rank;
mod result;
mod server;
mod setup;

use std::error::Error;
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use harness::report::{JsonSink, say};
use launch::exchange::Exchange;
use launch::launcher::Launch;
use launch::role::{Role, foreign_launcher, role};

use cli::Cli;
use options::{Options, RANKS};
use result::JobResult;

/// The reason why a process ended early. It is only printed.
type Failure = Box<dyn Error + Send + Sync>;

/// Exit status for options that cannot be honoured; clap uses the same for options that it refuses.
const EXIT_OPTIONS: u8 = 2;
/// Exit status for a result with wrong payloads.
const EXIT_UNSOUND: u8 = 3;
/// Maximum time that the processes wait for each other's reports.
const REPORT_LIMIT: Duration = Duration::from_secs(30);
/// Maximum time for the processes to end by themselves when the job has failed.
const GRACE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let ended = match role() {
        Ok(Role::Launcher) => return start(),
        Ok(Role::Rank(mut exchange)) => Options::resolve(Cli::parse())
            .and_then(|options| rank_process(&options, &mut exchange))
            .map_err(|error| format!("rank {}: {error}", exchange.rank()).into()),
        Ok(Role::Baseline(peer)) => peer.serve().map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Err(error) => Err(error.into()),
    };
    ended.unwrap_or_else(|error: Failure| fail(1, &error))
}

/// Reports an error on standard error. A closed standard error does not change the exit status.
fn fail(code: u8, error: &dyn Display) -> ExitCode {
    say(&format!("copyrpc_bench: {error}"));
    ExitCode::from(code)
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
            fail(EXIT_OPTIONS, &format!("{launcher}, but this build has no MPI: start it alone, or build it with --features mpi"))
        }
    }
}

/// The launcher: checks everything that can be checked before a process is started, then starts both with the same arguments.
fn launch(cli: Cli) -> ExitCode {
    let options = match Options::resolve(cli) {
        Ok(options) => options,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    if let Err(error) = options.json.as_ref().map_or(Ok(()), JsonSink::check) {
        return fail(EXIT_OPTIONS, &format!("--json: {error}"));
    }
    say(&options.to_string());
    let args = std::env::args_os().skip(1).collect();
    match (Launch { ranks: RANKS, args, environment: Vec::new(), time_limit: options.time_limit(), grace: GRACE }).run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(error.exit_code(), &error),
    }
}

/// One of the two processes, however it was started.
fn rank_process(options: &Options, exchange: &mut dyn Exchange) -> Result<ExitCode, Failure> {
    let report = rank::run(options, exchange)?;
    let parts = exchange.all_gather(&serde_json::to_vec(&report)?, REPORT_LIMIT, &|| false)?;
    if exchange.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    show(options, &JobResult::reduce(options, &parts)?)
}

/// Table to standard output and the document where it was asked for; when that is standard output, the table makes room.
fn show(options: &Options, result: &JobResult) -> Result<ExitCode, Failure> {
    match &options.json {
        Some(JsonSink::Stdout) => say(&result.to_string()),
        _ => writeln!(std::io::stdout(), "{result}")?,
    }
    if let Some(sink) = &options.json {
        sink.write(result)?;
    }
    match result.bad_payloads() {
        0 => Ok(ExitCode::SUCCESS),
        bad => Ok(fail(EXIT_UNSOUND, &format!("the result is unsound: {bad} payloads were not the right ones"))),
    }
}
