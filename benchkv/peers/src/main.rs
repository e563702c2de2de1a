//! `shm-peers`: ipc, delegationrpc and flux beside their rivals, by turns in one run on one pair of cores.
//!
//! In the order a run uses the files: [`measures`] (what is measured, in which order, by which of the two processes), [`load`] (the one
//! loop of callers and the one of answerers), [`ours`] and [`rivals`] (the ends that are put below it), [`result`] (what came out).

mod load;
mod measures;
mod ours;
mod result;
mod rivals;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use harness::affinity::usable_cores;
use harness::exchange::Exchange;
use harness::launcher::Launch;
use harness::report::{JsonSink, say};
use harness::role::{Role, role};

use load::Failure;

/// The shared-memory crates beside their rivals: rank 0 calls, rank 1 answers; rivals within a process run in rank 0.
#[derive(Debug, Parser)]
#[command(name = "shm-peers", version)]
struct Cli {
    /// Rounds, each of them every measurement once.
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,

    /// Milliseconds of each measurement, after a quarter as much to warm up.
    #[arg(long, value_name = "MS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    milliseconds: u64,

    /// The cores of caller and answerer [default: the first two of this process].
    #[arg(long, value_name = "A,B", value_parser = parse_cores)]
    cores: Option<(usize, usize)>,

    /// Also write the result as one JSON document to a file, or to standard output with -; the table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,
}

fn parse_cores(text: &str) -> Result<(usize, usize), &'static str> {
    let numbers = text.split_once(',').and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()));
    numbers.filter(|(a, b)| a != b).ok_or("use two different numbers, as in 0,1")
}

/// What there is to do, as both ranks know it.
#[derive(Debug)]
struct Job {
    rounds: u32,
    duration: Duration,
    cores: (usize, usize),
}

/// How long the whole run may take at most.
fn time_limit(job: &Job) -> Duration {
    // A round has fewer than 100 measurements.
    Duration::from_secs(60) + job.duration * job.rounds * 200
}

fn main() -> ExitCode {
    let ended = match role() {
        Ok(Role::Launcher) => launch(&Cli::parse()),
        Ok(Role::Rank(mut exchange)) => rank(&Cli::parse(), &mut exchange),
        Ok(Role::Baseline(peer)) => peer.serve().map_err(Into::into),
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("shm-peers: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn job(cli: &Cli) -> Result<Job, Failure> {
    let cores = match (cli.cores, usable_cores()?.as_slice()) {
        (Some(cores), _) => cores,
        (None, [a, b, ..]) => (*a, *b),
        (None, _) => return Err("two cores are needed".into()),
    };
    Ok(Job { rounds: cli.rounds, duration: Duration::from_millis(cli.milliseconds), cores })
}

fn launch(cli: &Cli) -> Result<(), Failure> {
    let job = job(cli)?;
    cli.json.as_ref().map_or(Ok(()), JsonSink::check)?;
    let args = std::env::args_os().skip(1).collect();
    Ok(Launch { ranks: 2, args, time_limit: time_limit(&job), grace: Duration::from_secs(5) }.run()?)
}

fn rank(cli: &Cli, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    let job = job(cli)?;
    if exchange.rank() == 1 {
        return measures::answer(&job, exchange);
    }
    let result = measures::call(&job, exchange)?;
    match &cli.json {
        Some(JsonSink::Stdout) => say(&result.to_string()),
        _ => writeln!(std::io::stdout(), "{result}")?,
    }
    Ok(cli.json.as_ref().map_or(Ok(()), |sink| sink.write(&result))?)
}
