//! `benchkv sim --calibrate`: fits the costs of CPUs to two real jobs of one rank on this machine,
//! and writes them as a file that `--cpu` reads.
//!
//! The jobs have one client and one daemon, each with a core of its own. With 32 operations
//! outstanding both threads always have work, so the median latency depends on their costs: all
//! costs are the defaults times one factor, with which the simulated job has the latency of the
//! real job. With one operation outstanding the latency also contains the delay between cores,
//! which is determined last in the same way.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::usable_cores;
use benchkv_harness::hist::LatencyHistogram;
use benchkv_harness::report::Spread;
use clap::Parser;
use engine::drive::simulated::{Cpu, Simulated, World};

use super::resolve;
use crate::cli::SimArgs;

/// Number of operations outstanding in the job that always has work.
const MANY: usize = 32;
/// Maximum factor of the costs, in percent.
const MOST_PERCENT: u64 = 100_000;
/// Share by which a simulated latency may exceed the measured latency.
const FIT: f64 = 0.05;
/// Number of real jobs. The median over the jobs counts.
const JOBS: usize = 5;
/// The options of the job with one client that is measured, both in real and in virtual time.
const JOB: &str = "-n 1 --server-threads 1 --client-threads 1 --no-verify";

#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    sim: SimArgs,
}

/// Returns the arguments of the job, with `depth` operations outstanding.
fn arguments(depth: usize) -> impl Iterator<Item = String> {
    ["benchkv", "-d", &depth.to_string()]
        .map(ToOwned::to_owned)
        .into_iter()
        .chain(JOB.split(' ').map(ToOwned::to_owned))
}

/// Measures this machine, and writes its model to `file`. Returns the text of the file.
///
/// # Errors
/// A thread cannot have a core of its own, a job fails, or the file cannot be written.
pub fn calibrate(file: &Path) -> Result<String, Failure> {
    benchkv_harness::file::check(file)?;
    let cores = usable_cores()?.len();
    if cores < 2 {
        let why = format!("calibration needs two cores, and this process may use {cores}");
        return Err(format!("{why}: give it two").into());
    }
    let real_ns = |depth| -> Result<f64, Failure> {
        let jobs = (0..JOBS).map(|_| real_latency_ns(depth));
        Ok(Spread::of(jobs.collect::<Result<Vec<_>, _>>()?).median)
    };
    let text = text([real_ns(1)?, real_ns(MANY)?])?;
    benchkv_harness::file::write(file, text.as_bytes())?;
    Ok(text)
}

/// Returns the text of the file for the latencies of the real jobs, with one operation outstanding
/// and with many: `NAME=NS` in lines, and comments.
fn text([one_ns, many_ns]: [f64; 2]) -> Result<String, Failure> {
    let of_percent = |percent: u64| {
        let mut cpu = Cpu::default();
        for (_, ns) in cpu.named() {
            *ns = (*ns * percent).div_ceil(100);
        }
        cpu
    };
    let percent = least(MOST_PERCENT, |percent| {
        Ok(simulated_latency_ns(MANY, of_percent(percent))? >= many_ns)
    })?;
    let of_line = |line_ns| Cpu {
        line_ns,
        ..of_percent(percent)
    };
    let line_ns = least(one_ns as u64, |line_ns| {
        Ok(simulated_latency_ns(1, of_line(line_ns))? >= one_ns)
    })?;
    let mut cpu = of_line(line_ns);
    let simulated_ns = simulated_latency_ns(1, cpu)?;
    // The limit is above the effect of rounding: both median latencies are whole numbers of ns, and
    // a change of the delay changes the median of the simulated job by a few ns.
    let fit = if simulated_ns > one_ns * (1.0 + FIT) {
        "# NO line FITS: the other values alone take longer than the real job did; calibrate again on an idle machine.\n"
    } else {
        ""
    };
    let mut text = format!(
        "# What CPUs take, in ns: measured by `benchkv sim --calibrate`, for `benchkv sim --cpu FILE`.\n\
         # The defaults times {percent} %, from the median latency of one client and one daemon with {MANY} operations outstanding: {many_ns:.0} ns.\n\
         # line, from that latency with one operation outstanding: {one_ns:.0} ns measured, {simulated_ns:.0} ns with these values.\n\
         {fit}"
    );
    for (name, ns) in cpu.named() {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}={ns}");
    }
    Ok(text)
}

/// Returns the least number up to `most` for which `is_enough` holds, or `most`. A larger cost makes
/// a latency longer, or does not change it if the cost passes while the other thread is busy. So the
/// number is found by bisection.
fn least(most: u64, is_enough: impl Fn(u64) -> Result<bool, Failure>) -> Result<u64, Failure> {
    let (mut enough, mut short) = (most, 0);
    while short + 1 < enough {
        let middle = u64::midpoint(short, enough);
        *(if is_enough(middle)? {
            &mut enough
        } else {
            &mut short
        }) = middle;
    }
    Ok(enough)
}

/// Returns the median latency of the job, run in real time in processes of its own, in ns.
fn real_latency_ns(depth: usize) -> Result<f64, Failure> {
    let more = "-t 0.2 --warmup 0.05 --wait busy --json -".split(' ');
    let args = arguments(depth).skip(1).chain(more.map(ToOwned::to_owned));
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).stdin(Stdio::null());
    let done = command.output()?;
    let document: Option<serde_json::Value> = serde_json::from_slice(&done.stdout).ok();
    let median = document.and_then(|document| document["latency_ns"]["p50"].as_f64());
    let median = median.filter(|_| done.status.success());
    let said = String::from_utf8_lossy(&done.stderr);
    median.ok_or_else(|| format!("the job `{command:?}` has no result: {}", said.trim_end()).into())
}

/// Returns the median latency of the job in virtual time, in ns.
fn simulated_latency_ns(depth: usize, cpu: Cpu) -> Result<f64, Failure> {
    let asked = Args::try_parse_from(arguments(depth));
    let job = resolve(&asked.unwrap_or_else(|error| unreachable!("{error}")).sim)?.job;
    let world = World {
        cpu,
        ..World::default()
    };
    let (warmup, window) = (Duration::from_micros(100), Duration::from_millis(1));
    let (ranks, _) = Simulated::new(&job, &world)?.run(warmup, window, 1)?;
    let mut all = LatencyHistogram::new();
    let clients = ranks.iter().flat_map(|rank| &rank.clients);
    for window in clients.flat_map(|client| &client.windows) {
        // All histograms cover the same range, so the merge does not fail.
        let _ = all.merge(&window.local.gets);
        let _ = all.merge(&window.local.puts);
    }
    Ok(all.value_at(0.5) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::world::CpuModel;

    /// Returns the median latencies that jobs with these costs have, with one operation outstanding
    /// and with many.
    fn latencies(cpu: Cpu) -> [f64; 2] {
        [1, MANY].map(|depth| simulated_latency_ns(depth, cpu).unwrap())
    }

    /// Returns the model in a file that contains `text`.
    fn read(text: &str) -> Cpu {
        let file = std::env::temp_dir().join(format!("benchkv-cpu-{}", std::process::id()));
        benchkv_harness::file::write(&file, text.as_bytes()).unwrap();
        let read = file.display().to_string().parse::<CpuModel>();
        std::fs::remove_file(&file).unwrap();
        read.unwrap().0
    }

    /// A delay that passes while a thread is busy does not add to the latency, so the delays need
    /// not be the same.
    #[test]
    fn the_costs_are_found_with_which_the_simulation_has_the_latencies() {
        for (factor, line_ns) in [(1, 40), (2, 200), (3, 900)] {
            let mut cpu = Cpu::default();
            for (_, ns) in cpu.named() {
                *ns *= factor;
            }
            cpu.line_ns = line_ns;
            let real = latencies(cpu);
            let text = text(real).unwrap();
            let found = latencies(read(&text));
            for (found, real) in found.into_iter().zip(real) {
                assert!(
                    (found / real - 1.0).abs() < FIT,
                    "{found} ns, {real} ns: {text}"
                );
            }
            assert!(!text.contains("NO line FITS"), "{text}");
        }
    }

    /// No delay fits a real job that took less time than the steps alone.
    #[test]
    fn a_model_without_the_latency_of_the_real_job_says_so() {
        let [_, many_ns] = latencies(Cpu::default());
        let text = text([5.0, many_ns]).unwrap();
        assert!(
            text.contains("5 ns measured")
                && text.contains("NO line FITS")
                && text.contains("line=1\n"),
            "{text}"
        );
    }

    #[test]
    fn a_slower_line_is_a_longer_round_trip() {
        let [near, far] = [0, 1000].map(|line_ns| {
            simulated_latency_ns(
                1,
                Cpu {
                    line_ns,
                    ..Cpu::default()
                },
            )
            .unwrap()
        });
        assert!((far - near - 2000.0).abs() < 150.0, "{near} ns, {far} ns");
    }
}
