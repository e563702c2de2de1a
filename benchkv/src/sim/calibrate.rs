//! `benchkv sim --calibrate`: measures the CPU costs of this machine on one rank, and writes them as a file that `--cpu` reads.
//!
//! The steps of a daemon and a client are timed in one thread, so that no thread waits for another. A thread that is kept from its core
//! spoils a few of the many pieces, whose median counts. The delay between cores is found last: it is the difference of the median
//! latency of a real job, of one client and one daemon on cores of their own, and of the same job simulated.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use engine::backend::plan::Site;
use engine::backend::{BackendError, Daemon};
use engine::client::Step;
use engine::drive::cluster::{Cluster, Rank};
use engine::drive::simulated::{Cpu, Simulated, SimulationError, World};
use engine::job::Job;
use engine::phase::Phase;
use harness::file::WriteError;
use harness::hist::LatencyHistogram;
use mlx5::DeviceSpec;
use shm::dir::Dir;
use thiserror::Error;

use super::options::Named;
use super::{SimError, resolve};
use crate::cli::SimArgs;

/// Number of steps that are timed as one piece, and number of pieces.
const STEPS: usize = 64;
const PIECES: usize = 401;
/// Number of real jobs, whose median counts.
const JOBS: usize = 5;
/// The job of one client that is measured, real and simulated.
const JOB: &str = "-n 1 --server-threads 1 --client-threads 1 -d 1 --no-verify";

/// Why there is no model.
#[derive(Debug, Error)]
pub enum CalibrateError {
    /// The job to measure cannot be run.
    #[error(transparent)]
    Job(#[from] SimError),
    /// A daemon or client failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The simulation of the job failed.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// This program could not be started again for a real job.
    #[error("cannot start a job: {0}")]
    Start(#[from] std::io::Error),
    /// A real job has no result.
    #[error("the job `{command}` has no result: {said}")]
    NoResult {
        /// Its command line.
        command: String,
        /// Output of the job.
        said: String,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    sim: SimArgs,
}

/// Returns the options of the job, for virtual time.
fn job() -> Result<Job, SimError> {
    let args = Args::try_parse_from(std::iter::once("benchkv").chain(JOB.split(' '))).unwrap_or_else(|error| unreachable!("{error}"));
    Ok(resolve(&args.sim)?.job)
}

/// Measures this machine, and writes its model to `file`. Returns the text of the file.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(file: &Path) -> Result<String, CalibrateError> {
    harness::file::check(file)?;
    let job = job()?;
    let cpu = steps(&job)?;
    let real_ns = median((0..JOBS).map(|_| real_latency_ns()).collect::<Result<_, _>>()?);
    let line_ns = (real_ns - simulated_latency_ns(&job, cpu)?).max(0.0) / 2.0;
    let cpu = Cpu { line_ns: line_ns.round() as u64, ..cpu };
    let text = text(cpu, real_ns);
    harness::file::write(file, text.as_bytes())?;
    Ok(text)
}

/// Returns the text of the file: `NAME=NS` in lines, and comments.
fn text(cpu: Cpu, real_ns: f64) -> String {
    let mut text = format!(
        "# What CPUs take, in ns: measured by `benchkv sim --calibrate`, for `benchkv sim --cpu FILE`.\n\
         # Measured: round, message, client, operation; line, from a median latency of {real_ns:.0} ns of one client and one daemon.\n\
         # One rank shows nothing of poll, completion and write: these are the defaults, times what round and message are of theirs.\n"
    );
    for (name, ns) in cpu.clone().named() {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}={ns}");
    }
    text
}

/// Measures the costs of the steps of a daemon and its client, in one thread.
fn steps(job: &Job) -> Result<Cpu, CalibrateError> {
    let dir = Dir::in_memory(shm::clock::Clock::default());
    let site = |rank| Ok(Site { rank, process: 0, dir: dir.clone(), device: DeviceSpec::from("soft") });
    let mut cluster = Cluster::new(job, site)?;
    let Some(Rank { daemons, clients }) = cluster.ranks.first_mut() else { return Ok(Cpu::default()) };
    let (Some(daemon), Some(client)) = (daemons.first_mut(), clients.first_mut()) else { return Ok(Cpu::default()) };
    let began = Instant::now();
    let now_ns = || began.elapsed().as_nanos() as u64;
    let phase = Phase::Window(0);
    let mut costs: [Vec<f64>; 4] = Default::default();
    for _ in 0..PIECES {
        let (mut of_client, mut of_daemon, mut of_clock, mut moved) = (0, 0, 0, [0; 2]);
        for _ in 0..STEPS {
            let begin = now_ns();
            if let Step::Busy(operations) = client.step(phase, now_ns)? {
                moved[0] += operations;
            }
            let between = now_ns();
            moved[1] += daemon.step(now_ns)?.moved;
            let end = now_ns();
            of_clock += now_ns() - end;
            of_client += between - begin;
            of_daemon += end - between;
        }
        // Now there is an answer for the client, so only the daemon finds nothing.
        let begin = now_ns();
        (0..STEPS).try_for_each(|_| daemon.step(now_ns).map(drop))?;
        let empty_daemon = now_ns() - begin;
        client.step(phase, now_ns)?;
        let begin = now_ns();
        (0..STEPS).try_for_each(|_| client.step(phase, now_ns).map(drop))?;
        let empty_client = now_ns() - begin;
        daemon.step(now_ns)?;
        let of = |ns: u64, count: usize| ns as f64 / count.max(1) as f64;
        let [round, step, clock] = [empty_daemon, empty_client, of_clock].map(|ns| of(ns, STEPS));
        let (busy_client, busy_daemon) = (of(of_client, STEPS) - clock - step, of(of_daemon, STEPS) - clock - round);
        let [of_step, of_round] = moved.map(|moved| moved as f64 / STEPS as f64);
        costs.iter_mut().zip([round, step, busy_client / of_step, busy_daemon / of_round]).for_each(|(all, ns)| all.push(ns));
    }
    let [round, client, operation, message] = costs.map(median);
    let whole = |ns: f64| (ns.round() as u64).max(1);
    let default = Cpu::default();
    let factor = (round + message) / (default.round_ns + default.message_ns) as f64;
    let scaled = |ns: u64| whole(ns as f64 * factor);
    Ok(Cpu {
        round_ns: whole(round),
        poll_ns: scaled(default.poll_ns),
        message_ns: whole(message),
        completion_ns: scaled(default.completion_ns),
        write_ns: scaled(default.write_ns),
        client_ns: whole(client),
        operation_ns: whole(operation),
        line_ns: 0,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Returns the median latency of the job, run in real time in processes of its own, in ns.
fn real_latency_ns() -> Result<f64, CalibrateError> {
    let args = JOB.split(' ').chain("-t 0.2 --warmup 0.05 --wait busy --json -".split(' '));
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).stdin(Stdio::null());
    let done = command.output()?;
    let document: Option<serde_json::Value> = serde_json::from_slice(&done.stdout).ok();
    let median = document.and_then(|document| document["latency_ns"]["p50"].as_f64()).filter(|_| done.status.success());
    median.ok_or_else(|| CalibrateError::NoResult {
        command: format!("{command:?}"),
        said: String::from_utf8_lossy(&done.stderr).trim_end().to_owned(),
    })
}

/// Returns the median latency of the job in virtual time, in ns.
fn simulated_latency_ns(job: &Job, cpu: Cpu) -> Result<f64, CalibrateError> {
    let world = World { cpu, ..World::default() };
    let (ranks, _) = Simulated::new(job, &world)?.run(Duration::from_micros(100), Duration::from_millis(1), 1)?;
    let mut all = LatencyHistogram::new();
    for window in ranks.iter().flat_map(|rank| &rank.clients).flat_map(|client| &client.windows) {
        for kind in [&window.local.gets, &window.local.puts] {
            // All histograms cover the same range.
            let _ = all.merge(kind);
        }
    }
    Ok(all.value_at(0.5) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts no durations: machines under load run these tests.
    #[test]
    fn every_step_takes_time_and_the_file_is_read_as_it_was_written() {
        let mut cpu = Cpu { line_ns: 77, ..steps(&job().unwrap()).unwrap() };
        assert!(cpu.named().iter().all(|(_, ns)| **ns > 0), "{cpu:?}");
        let file = std::env::temp_dir().join(format!("benchkv-cpu-{}", std::process::id()));
        harness::file::write(&file, text(cpu, 1.0).as_bytes()).unwrap();
        let read = file.display().to_string().parse::<super::super::options::CpuModel>();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(read.unwrap().0, cpu);
        assert!("no-such-file".parse::<super::super::options::CpuModel>().unwrap_err().contains("no-such-file"));
    }

    #[test]
    fn a_slower_line_is_a_longer_round_trip() {
        let job = job().unwrap();
        let [near, far] = [0, 1000].map(|line_ns| simulated_latency_ns(&job, Cpu { line_ns, ..Cpu::default() }).unwrap());
        assert!((far - near - 2000.0).abs() < 150.0, "{near} ns, {far} ns");
    }
}
