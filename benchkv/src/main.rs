//! The binary: what this process is, what is printed, which exit status.

use std::error::Error;
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use benchkv::backend::composed::Composed;
use benchkv::cli::Cli;
use benchkv::message::{Request, Response};
use benchkv::options::Options;
use benchkv::orchestrate::run_rank;
use benchkv::result::{Conditions, JobResult};
use clap::Parser;
use harness::clock::Clock;
use harness::echo::{self, Echo, EchoError, EchoResult};
use harness::environment::Environment;
use harness::exchange::{Exchange, SocketExchange};
use harness::launcher::Launch;
use harness::report::{JsonSink, say};
use harness::role::{Role, foreign_launcher, role};
use shm::dir::Dir;

/// Exit status for options that cannot be honoured; clap uses the same for those it refuses.
const EXIT_OPTIONS: u8 = 2;
/// Exit status for a result with lost operations or wrong values.
const EXIT_UNSOUND: u8 = 3;
/// How long each echo baseline is measured.
const ECHO_DURATION: Duration = Duration::from_millis(250);
/// How long ranks wait for rank 0 to measure the baselines, and for each other's reports.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(30);
/// How long ranks may take to end by themselves when the job has failed.
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
    say(&format!("benchkv: {error}"));
    ExitCode::from(code)
}

/// The launcher: checks everything that can be checked before a process is started, then starts the ranks with the same arguments.
fn launch() -> ExitCode {
    let options = match Options::resolve(Cli::parse()) {
        Ok(options) => options,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    if let Some((name, size)) = foreign_launcher() {
        return fail(
            EXIT_OPTIONS,
            &format!("{name} announces {size} processes, but this build has no MPI; start it alone, with --ranks {size}"),
        );
    }
    if let Err(error) = options.json.as_ref().map_or(Ok(()), JsonSink::check) {
        return fail(EXIT_OPTIONS, &format!("--json: {error}"));
    }
    // What a killed job left behind is removed here, by the next one.
    match Dir::open(options.shm_dir.as_deref()).and_then(|dir| dir.sweep()) {
        Ok(0) => {}
        Ok(count) => say(&format!("removed {count} shared-memory regions of dead processes")),
        Err(error) => return fail(EXIT_OPTIONS, &format!("--shm-dir: {error}")),
    }
    say(&options.to_string());
    let args = std::env::args_os().skip(1).collect();
    let launch = Launch { ranks: options.workload.ranks, args, time_limit: options.time_limit(), grace: GRACE };
    match launch.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(error.exit_code(), &error),
    }
}

/// One rank. Rank 0 measures the baselines first and shows the result at the end.
fn rank_process(mut exchange: SocketExchange) -> Result<ExitCode, Box<dyn Error>> {
    let options = Options::resolve(Cli::parse())?;
    let never = || false;
    let clock = Clock::detect();
    let unix_echo = if exchange.rank() == 0 { baselines(&options, &clock)? } else { Vec::new() };
    exchange.barrier(EXCHANGE_LIMIT, &never)?;
    let backend = Composed::new(&options, exchange.rank())?;
    let report = run_rank(&options, &backend, &mut exchange, clock)?;
    let parts = exchange.all_gather(&serde_json::to_vec(&report)?, EXCHANGE_LIMIT, &never)?;
    if exchange.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let conditions = Conditions { clock: clock.source(), environment: Environment::detect(), unix_echo };
    show(&options, &JobResult::reduce(&options, conditions, &parts)?)
}

/// The Unix-socket echo one at a time, and as deep as the job where the socket allows it.
fn baselines(options: &Options, clock: &Clock) -> Result<Vec<EchoResult>, EchoError> {
    let mut depths = vec![1, options.queue_depth.min(echo::MAX_DEPTH)];
    depths.dedup();
    let (request_bytes, reply_bytes) = (size_of::<Request>(), size_of::<Response>());
    depths.into_iter().map(|depth| Echo { depth, request_bytes, reply_bytes, duration: ECHO_DURATION }.measure(clock)).collect()
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
    if result.is_sound() {
        return Ok(ExitCode::SUCCESS);
    }
    let failures = result.verify_failures.unwrap_or(0);
    Ok(fail(EXIT_UNSOUND, &format!("the result is unsound: {} operations lost, {failures} verify failures", result.lost)))
}
