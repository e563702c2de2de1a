//! `shm-peers`: measures ipc, delegationrpc, flux and comparable crates, in turn in one run on one
//! pair of cores. `scripts/peers shm` runs it.
//!
//! In the order a run uses the files: [`measures`] (the rounds), [`ours`], [`iceoryx`] and
//! [`queues`] (the ends under the one load, `benchkv_harness::load`), [`result`] (the figures).

mod iceoryx;
mod measures;
mod ours;
mod queues;
mod result;

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::launch::exchange::{Exchange, SocketExchange};
use benchkv_harness::launch::program::{EXIT_FAILED, Program};
use benchkv_harness::load::two_cores;
use benchkv_harness::report::JsonSink;
use clap::Parser;

use iceoryx::Place;

const PROGRAM: Program = Program("shm-peers");

/// The shared-memory crates and comparable crates: rank 0 calls, rank 1 answers; crates that work
/// within a process run in rank 0.
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

    fn time_limit(&self) -> Duration {
        // A round has fewer than 40 measurements. Fewer than 20 of these have several clients, and
        // take four times as long.
        Duration::from_secs(60) + self.duration * self.rounds * 300
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, cores, .. } = self;
        write!(f, "{rounds} rounds on cores {} and {}", cores.0, cores.1)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let job = match Job::new(&cli) {
        Ok(job) => job,
        Err(error) => return PROGRAM.fail(EXIT_FAILED, &error),
    };
    let rank = |exchange: &mut SocketExchange| {
        if exchange.rank() == 1 {
            return measures::answer(&job, exchange).map(|()| ExitCode::SUCCESS);
        }
        let figures = measures::call(&job, exchange)?;
        Ok(PROGRAM.show(&figures, cli.json.as_ref(), None))
    };
    let child = PROGRAM.child(rank, |_| false);
    child.unwrap_or_else(|| PROGRAM.launch(&job, cli.json.as_ref(), job.time_limit()))
}
