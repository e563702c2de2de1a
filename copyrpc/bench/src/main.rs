//! `copyrpc_bench`: copyrpc between two processes.
//!
//! In the order a run uses the files: [`cli`] and [`options`] (what to do), [`rank`] (the order of a job), [`setup`] (device and
//! endpoints), [`client`] and [`server`] (the two loops), [`pattern`] (what payloads contain), [`result`] (what came out).

mod cli;
mod client;
mod options;
mod pattern;
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
use harness::exchange::{Exchange, SocketExchange};
use harness::launcher::Launch;
use harness::report::JsonSink;
use harness::role::{Role, foreign_launcher, role};

use cli::Cli;
use options::{Options, RANKS};
use result::JobResult;

/// Exit status for options that cannot be honoured; clap uses the same for those it refuses.
const EXIT_OPTIONS: u8 = 2;
/// Exit status for a result with wrong payloads.
const EXIT_UNSOUND: u8 = 3;
/// How long the processes wait for each other's reports.
const REPORT_LIMIT: Duration = Duration::from_secs(30);
/// How long the processes may take to end by themselves when the job has failed.
const GRACE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let ended = match role() {
        Ok(Role::Launcher) => return launch(),
        Ok(Role::Rank(exchange)) => {
            let rank = exchange.rank();
            rank_process(exchange).map_err(|error| format!("rank {rank}: {error}").into())
        }
        Ok(Role::Baseline(peer)) => peer.serve().map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Err(error) => Err(error.into()),
    };
    ended.unwrap_or_else(|error: Box<dyn Error>| fail(1, &error))
}

/// Says what went wrong. A closed standard error is no reason to fail differently.
fn fail(code: u8, error: &dyn Display) -> ExitCode {
    say(&format!("copyrpc_bench: {error}"));
    ExitCode::from(code)
}

/// One write: the processes share standard error, and lines must not mix.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// The launcher: checks everything that can be checked before a process is started, then starts both with the same arguments.
fn launch() -> ExitCode {
    let options = match Options::resolve(Cli::parse()) {
        Ok(options) => options,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    if let Some((name, size)) = foreign_launcher() {
        return fail(EXIT_OPTIONS, &format!("{name} announces {size} processes, but this build has no MPI; start it alone"));
    }
    if let Err(error) = options.json.as_ref().map_or(Ok(()), JsonSink::check) {
        return fail(EXIT_OPTIONS, &format!("--json: {error}"));
    }
    say(&options.to_string());
    let args = std::env::args_os().skip(1).collect();
    match (Launch { ranks: RANKS, args, time_limit: options.time_limit(), grace: GRACE }).run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(error.exit_code(), &error),
    }
}

fn rank_process(mut exchange: SocketExchange) -> Result<ExitCode, Box<dyn Error>> {
    let options = Options::resolve(Cli::parse())?;
    let report = rank::run(&options, &mut exchange)?;
    let parts = exchange.all_gather(&serde_json::to_vec(&report)?, REPORT_LIMIT, &|| false)?;
    if exchange.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    show(&options, &JobResult::reduce(&options, &parts)?)
}

/// Table to standard output and the document where it was asked for; when that is standard output, the table makes room.
fn show(options: &Options, result: &JobResult) -> Result<ExitCode, Box<dyn Error>> {
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
