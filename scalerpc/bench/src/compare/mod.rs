//! Round trip and rate of ScaleRPC, copyrpc, SEND on reliable connections and SEND on datagrams, in turn in one run.
//!
//! In the order a run uses the files: [`options`] (the job), [`rank`] (the order of a job), [`contestant`] (the interface),
//! [`scale_rpc`], [`copy_rpc`] and [`send`] (its implementations), [`load`] (the one loop), [`result`] (tables and document).

mod contestant;
mod copy_rpc;
mod load;
mod options;
mod rank;
mod result;
mod scale_rpc;
mod send;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use bench::load::Failure;
use harness::clock::Clock;
use harness::report::{JsonSink, say};
use launch::exchange::Exchange;
use launch::launcher::Launch;
use launch::role::{Role, foreign_launcher, role};

pub(crate) use options::Options;
use options::{Job, OptionError, RANKS};
use result::{Comparison, Outcomes};

/// Exit status for options that cannot be honoured; clap uses the same for options that it refuses.
const EXIT_OPTIONS: u8 = 2;
/// Exit status for a result that is not sound.
const EXIT_UNSOUND: u8 = 3;
/// Maximum time for the processes to end by themselves when the job has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the launcher, or one of the processes that it started.
pub(crate) fn run(options: &Options) -> ExitCode {
    let job = match Job::resolve(options) {
        Ok(job) => job,
        Err(error) => return fail(EXIT_OPTIONS, &error.to_string()),
    };
    let ended = match role() {
        Ok(Role::Launcher) => return launch(&job),
        Ok(Role::Rank(mut exchange)) => {
            let rank = exchange.rank();
            rank_process(&job, &mut exchange).map_err(|error| format!("rank {rank}: {error}"))
        }
        Ok(Role::Baseline(_)) => Err("it starts no baselines".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    ended.unwrap_or_else(|error| fail(1, &error))
}

/// Prints an error. Returns the exit code.
fn fail(code: u8, error: &str) -> ExitCode {
    say(&format!("scalerpc_bench: {error}"));
    ExitCode::from(code)
}

/// Checks everything that can be checked before a process is started, then starts both processes with the same arguments.
fn launch(job: &Job) -> ExitCode {
    if let Some(launcher) = foreign_launcher() {
        return fail(EXIT_OPTIONS, &format!("{launcher}, but this program starts its own: start it alone"));
    }
    if let Err(error) = job.json.as_ref().map_or(Ok(()), JsonSink::check) {
        return fail(EXIT_OPTIONS, &OptionError::from(error).to_string());
    }
    say(&job.to_string());
    let args = std::env::args_os().skip(1).collect();
    match (Launch { ranks: RANKS, args, environment: Vec::new(), time_limit: job.time_limit(), grace: GRACE }).run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(error.exit_code(), &error.to_string()),
    }
}

fn rank_process(job: &Job, exchange: &mut dyn Exchange) -> Result<ExitCode, Failure> {
    if exchange.rank() != 0 {
        rank::serve_all(job, exchange)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (clock, mut outcomes) = (Clock::detect(), Outcomes::default());
    rank::call_all(job, exchange, clock, |load, kind, outcome| outcomes.put(load, kind, outcome))?;
    let result = Comparison::new(job, &outcomes, clock.source());
    match &job.json {
        Some(JsonSink::Stdout) => say(&result.to_string()),
        _ => writeln!(std::io::stdout(), "{result}")?,
    }
    job.json.as_ref().map_or(Ok(()), |sink| sink.write(&result))?;
    match result.defect() {
        None => Ok(ExitCode::SUCCESS),
        Some(defect) => Ok(fail(EXIT_UNSOUND, &format!("the result is unsound: {defect}"))),
    }
}
