//! `shm-peers`: ipc, delegationrpc and flux beside their rivals, in turn in one run on one pair of
//! cores. `scripts/peers shm` runs it.
//!
//! In the order a run uses the files: [`meeting`] (the terms of both ranks), [`measures`] (the
//! rounds: the measurements, their order, and their process), [`crowd`] (ipc beside delegationrpc
//! with several clients), [`ours`] and [`rivals`] (the ends under the one load, `bench::load`),
//! [`result`] (tables and document).

mod crowd;
mod measures;
mod meeting;
mod ours;
mod result;
mod rivals;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use bench::load::{Failure, two_cores};
use clap::Parser;
use harness::report::{JsonSink, say};
use launch::exchange::Exchange;
use launch::launcher::Launch;
use launch::role::{Role, role};

use rivals::iceoryx::Place;

/// The shared-memory crates beside their rivals: rank 0 calls, rank 1 answers; rivals within a
/// process run in rank 0.
#[derive(Debug, Parser)]
#[command(name = "shm-peers", version)]
struct Cli {
    /// Rounds. Each makes every measurement once.
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,

    /// Milliseconds of each measurement, after a quarter as much to warm up; four times as long
    /// with several clients.
    #[arg(long, value_name = "MS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=2000))]
    milliseconds: u64,

    /// The cores of caller and answerer [default: the first two of this process].
    #[arg(long, value_name = "A,B", value_parser = parse_cores)]
    cores: Option<(usize, usize)>,

    /// Prefix of iceoryx2's files in /dev/shm, and its directory's name in the temporary directory.
    /// iceoryx2 leaves some files there.
    #[arg(long, value_name = "NAME", default_value = "copyrpc-peers-")]
    iceoryx2_prefix: String,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,
}

fn parse_cores(text: &str) -> Result<(usize, usize), &'static str> {
    let numbers = text
        .split_once(',')
        .and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()));
    numbers
        .filter(|(a, b)| a != b)
        .ok_or("use two different numbers, as in 0,1")
}

/// The parameters of a run, which both ranks know.
#[derive(Debug)]
struct Job {
    rounds: u32,
    duration: Duration,
    /// Cores of caller and answerer.
    cores: (usize, usize),
    iceoryx2: Place,
}

impl Job {
    fn new(cli: &Cli) -> Result<Self, Failure> {
        let cores = match cli.cores {
            Some(cores) => cores,
            None => two_cores()?.ok_or("two cores are needed")?,
        };
        let iceoryx2 = Place {
            prefix: cli.iceoryx2_prefix.clone(),
        };
        Ok(Self {
            rounds: cli.rounds,
            duration: Duration::from_millis(cli.milliseconds),
            cores,
            iceoryx2,
        })
    }

    /// Returns the maximum time of the whole run.
    fn time_limit(&self) -> Duration {
        // A round has fewer than 40 measurements; those with several clients are fewer than 20,
        // four times as long.
        Duration::from_secs(60) + self.duration * self.rounds * 300
    }
}

fn main() -> ExitCode {
    let ended = match role() {
        Ok(Role::Launcher) => launch(&Cli::parse()),
        Ok(Role::Rank(mut exchange)) => rank(&Cli::parse(), &mut exchange),
        Ok(Role::Baseline(peer)) => peer.serve().map_err(Into::into),
        Err(error) => Err(error),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("shm-peers: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn launch(cli: &Cli) -> Result<(), Failure> {
    let job = Job::new(cli)?;
    cli.json.as_ref().map_or(Ok(()), JsonSink::check)?;
    let args = std::env::args_os().skip(1).collect();
    Ok(Launch {
        ranks: 2,
        args,
        environment: Vec::new(),
        time_limit: job.time_limit(),
        grace: Duration::from_secs(5),
    }
    .run()?)
}

fn rank(cli: &Cli, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    let job = Job::new(cli)?;
    if exchange.rank() == 1 {
        return measures::answer(&job, exchange);
    }
    let result = measures::call(&job, exchange)?;
    match &cli.json {
        Some(JsonSink::Stdout) => say(&result.to_string()),
        _ => writeln!(std::io::stdout(), "{result}")?,
    }
    Ok(cli
        .json
        .as_ref()
        .map_or(Ok(()), |sink| sink.write(&result))?)
}
