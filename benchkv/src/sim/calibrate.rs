//! `benchkv sim --calibrate`: measures the CPU costs of this machine on one rank, and writes them
//! as a file that `--cpu` reads.
//!
//! A daemon and a client on cores of their own take turns, and each step is timed. No step waits
//! for the other thread, and each step finds the data of the other thread in the cache of the other
//! core, as in a job. Turns of one message and of many messages separate the cost of a message from
//! the cost of a turn. If a thread is kept from its core, this falsifies only a few steps, and the
//! median over the steps counts. The delay between cores is determined last: with this delay the
//! simulated job has the median latency of a real job.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::pin_current_thread;
use benchkv_harness::clock::Clock;
use benchkv_harness::hist::LatencyHistogram;
use benchkv_harness::report::Spread;
use clap::Parser;
use engine::backend::composed::Composed;
use engine::backend::{BackendError, Daemon, Endpoints, Workers};
use engine::client::{Client, Step};
use engine::drive::simulated::{Cpu, Simulated, World};
use engine::job::Job;
use engine::phase::Phase;

use super::resolve;
use crate::cli::{Cli, SimArgs};
use crate::options::Options;

/// Number of turns of each of the two threads.
const TURNS: usize = 4001;
/// Time that a thread waits for its turn, in ns, above which the turn is not counted. In such a
/// wait the other thread was kept from its core, and other programs used the caches.
const LONG_NS: u64 = 30_000;
/// Maximum number of turns that are not counted. After this number the measurement ends with the
/// turns that were counted.
const MOST_SPOILT: usize = 4 * TURNS;
/// Number of steps without work after each step with work. These steps are timed together.
const EMPTY: usize = 16;
/// Operations outstanding where turns move many messages.
const MANY: usize = 32;
/// Share by which the simulated latency may exceed the measured latency.
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

/// Returns the job with one operation outstanding, for virtual time.
fn job() -> Result<Job, Failure> {
    let args = Args::try_parse_from(arguments(1)).unwrap_or_else(|error| unreachable!("{error}"));
    Ok(resolve(&args.sim)?.job)
}

/// Measures this machine, and writes its model to `file`. Returns the text of the file.
///
/// # Errors
/// A thread cannot have a core of its own, a job fails, or the file cannot be written.
pub fn calibrate(file: &Path) -> Result<String, Failure> {
    benchkv_harness::file::check(file)?;
    let job = job()?;
    let cpu = steps()?;
    let real = (0..JOBS).map(|_| real_latency_ns());
    let real_ns = Spread::of(real.collect::<Result<Vec<_>, _>>()?).median;
    let line_ns = line_ns(&job, cpu, real_ns)?;
    let cpu = Cpu { line_ns, ..cpu };
    let text = text(cpu, real_ns, simulated_latency_ns(&job, cpu)?);
    benchkv_harness::file::write(file, text.as_bytes())?;
    Ok(text)
}

/// Returns the text of the file: `NAME=NS` in lines, and comments.
fn text(cpu: Cpu, real_ns: f64, simulated_ns: f64) -> String {
    // The limit is above the effect of rounding: both median latencies are whole numbers of ns, and
    // a change of the delay changes the median of the simulated job by a few ns.
    let fit = if simulated_ns > real_ns * (1.0 + FIT) {
        "# NO line FITS: the other values alone take longer than the real job did; calibrate again on an idle machine.\n"
    } else {
        ""
    };
    let mut text = format!(
        "# What CPUs take, in ns: measured by `benchkv sim --calibrate`, for `benchkv sim --cpu FILE`.\n\
         # Measured: round, message, client, operation, stall; line, from the median latency of one client and one daemon.\n\
         # That latency: {real_ns:.0} ns measured, {simulated_ns:.0} ns with these values.\n\
         {fit}\
         # One rank shows nothing of poll, completion and write: these are the defaults, times what round and message are of theirs.\n"
    );
    for (name, ns) in cpu.clone().named() {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}={ns}");
    }
    text
}

/// Medians over the turns of a thread: number of messages or operations, and durations in ns.
#[derive(Debug)]
struct Timed {
    /// Duration of a step that finds messages.
    busy_ns: f64,
    /// Duration of a step that finds nothing.
    empty_ns: f64,
    moved: f64,
}

/// Measures the costs of the steps of a daemon and its client.
fn steps() -> Result<Cpu, Failure> {
    let [[one_client, one_daemon], [many_client, many_daemon]] = [turns(1)?, turns(MANY)?];
    // Returns the cost of a message, and the cost of a turn with messages that neither an empty
    // turn nor the messages explain.
    let of = |one: &Timed, many: &Timed| {
        let each = (many.busy_ns - one.busy_ns) / (many.moved - one.moved).max(1.0);
        (each, one.busy_ns - one.empty_ns - each * one.moved)
    };
    let ((operation, stall_of_client), (message, stall_of_daemon)) =
        (of(&one_client, &many_client), of(&one_daemon, &many_daemon));
    let whole = |ns: f64| (ns.round() as u64).max(1);
    let (round, default) = (one_daemon.empty_ns, Cpu::default());
    let factor = (round + message) / (default.round_ns + default.message_ns) as f64;
    let scaled = |ns: u64| whole(ns as f64 * factor);
    Ok(Cpu {
        round_ns: whole(round),
        poll_ns: scaled(default.poll_ns),
        message_ns: whole(message),
        completion_ns: scaled(default.completion_ns),
        write_ns: scaled(default.write_ns),
        client_ns: whole(one_client.empty_ns),
        operation_ns: whole(operation),
        line_ns: 0,
        stall_ns: whole(f64::midpoint(stall_of_client, stall_of_daemon)),
        noise: 0,
    })
}

/// The number of the thread that has the turn.
struct Baton(AtomicU8);

const CLIENT: u8 = 0;
const DAEMON: u8 = 1;
const NOBODY: u8 = 2;

impl Baton {
    /// Waits for a turn. Returns `false` if the other thread has ended.
    fn wait(&self, own: u8) -> bool {
        for looks in 0_u64.. {
            match self.0.load(Ordering::Acquire) {
                NOBODY => return false,
                whose if whose == own => return true,
                // The thread that has the turn may need this core on a loaded machine.
                _ if looks % 10_000 == 9_999 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        false
    }

    /// Passes the turn to the other thread, unless a thread has ended.
    fn pass(&self, own: u8) {
        let _ = self.0.compare_exchange(
            own,
            CLIENT + DAEMON - own,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
}

/// A thread's mark of its end: the drop sets it, even in a panic, so that the other thread does not
/// wait for a turn.
struct Leaves<'a>(&'a Baton);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.0.store(NOBODY, Ordering::Release);
    }
}

/// Lets a client with `depth` operations outstanding and its daemon take turns. Returns the medians
/// over the turns of the client, and over the turns of the daemon.
fn turns(depth: usize) -> Result<[Timed; 2], Failure> {
    let asked =
        Cli::try_parse_from(arguments(depth)).unwrap_or_else(|error| unreachable!("{error}"));
    let options = Options::resolve(asked)?;
    let cores = benchkv_harness::affinity::usable_cores()?;
    let [of_daemon, of_client, ..] = cores[..] else {
        return Err(format!(
            "calibration needs two cores, and this process may use {}: give it two",
            cores.len()
        )
        .into());
    };
    let backend = Composed::new(&options.job, options.site(0)?)?;
    let (baton, clock) = (Baton(AtomicU8::new(DAEMON)), Clock::detect());
    let now_ns = || clock.now_ns();
    let daemon = || {
        let _leaves = Leaves(&baton);
        pin_current_thread(of_daemon)?;
        let mut daemon = backend.open_daemon(0)?;
        daemon.connect(&[])?;
        while !daemon.settle()? {}
        baton.pass(DAEMON);
        take_turns(&baton, DAEMON, now_ns, || Ok(daemon.step(now_ns)?.moved))
    };
    let client = || {
        let _leaves = Leaves(&baton);
        pin_current_thread(of_client)?;
        if !baton.wait(CLIENT) {
            return Ok(Timed::of(Vec::new()));
        }
        let mut client = Client::new(options.job.client(0, 0), backend.open_client(0)?);
        take_turns(&baton, CLIENT, now_ns, || {
            match client.step(Phase::Window(0), now_ns)? {
                Step::Busy(operations) => Ok(operations),
                Step::Idle | Step::Drained => Ok(0),
            }
        })
    };
    let (of_client, of_daemon) = std::thread::scope(|scope| {
        let other = scope.spawn(daemon);
        // The client also runs on a thread of its own, so that the affinity of the calling thread
        // does not change.
        let client = scope.spawn(client).join();
        (client, other.join())
    });
    // A panic of a thread is a defect, and is continued in this thread.
    let [of_client, of_daemon] = [of_client, of_daemon]
        .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    // The daemon's failure is the cause where both end early.
    let of_daemon: Timed = of_daemon?;
    Ok([of_client?, of_daemon])
}

/// Takes turns until [`TURNS`] turns are counted, [`MOST_SPOILT`] turns are not, or the other
/// thread ends.
fn take_turns(
    baton: &Baton,
    own: u8,
    now_ns: impl Fn() -> u64,
    mut step: impl FnMut() -> Result<usize, BackendError>,
) -> Result<Timed, Failure> {
    let mut timed = Vec::with_capacity(TURNS);
    let mut spoilt = 0;
    let mut passed_ns = now_ns();
    while timed.len() < TURNS && spoilt < MOST_SPOILT && baton.wait(own) {
        let begin = now_ns();
        let is_spoilt = begin - passed_ns > LONG_NS;
        let moved = step()?;
        let end = now_ns();
        let clock_ns = now_ns() - end;
        for _ in 0..EMPTY {
            step()?;
        }
        let empty_ns = now_ns() - end - clock_ns;
        let busy_ns = (end - begin).saturating_sub(clock_ns);
        let turn = [
            busy_ns as f64,
            empty_ns.saturating_sub(clock_ns) as f64 / EMPTY as f64,
            moved as f64,
        ];
        passed_ns = now_ns();
        baton.pass(own);
        if is_spoilt {
            spoilt += 1;
        } else {
            timed.push(turn);
        }
    }
    Ok(Timed::of(timed))
}

impl Timed {
    fn of(turns: Vec<[f64; 3]>) -> Self {
        let [busy_ns, empty_ns, moved] =
            [0, 1, 2].map(|what| Spread::of(turns.iter().map(|turn| turn[what])).median);
        Self {
            busy_ns,
            empty_ns,
            moved,
        }
    }
}

/// Returns the delay between cores with which the simulated job has the median latency of the real
/// one, in ns.
fn line_ns(job: &Job, cpu: Cpu, real_ns: f64) -> Result<u64, Failure> {
    let (mut enough, mut short) = (real_ns as u64, 0);
    // A longer delay makes the latency longer, or does not change it if the delay passes while a
    // thread is busy. So the delay is found by bisection.
    while short + 1 < enough {
        let line_ns = u64::midpoint(short, enough);
        let is_short = simulated_latency_ns(job, Cpu { line_ns, ..cpu })? < real_ns;
        *(if is_short { &mut short } else { &mut enough }) = line_ns;
    }
    Ok(enough)
}

/// Returns the median latency of the job, run in real time in processes of its own, in ns.
fn real_latency_ns() -> Result<f64, Failure> {
    let more = "-t 0.2 --warmup 0.05 --wait busy --json -".split(' ');
    let args = arguments(1).skip(1).chain(more.map(ToOwned::to_owned));
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
fn simulated_latency_ns(job: &Job, cpu: Cpu) -> Result<f64, Failure> {
    let world = World {
        cpu,
        ..World::default()
    };
    let (warmup, window) = (Duration::from_micros(100), Duration::from_millis(1));
    let (ranks, _) = Simulated::new(job, &world)?.run(warmup, window, 1)?;
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

    /// The test asserts no durations, because tests run on machines under load. On a machine with
    /// one core it asserts that the lack of a second core is reported.
    #[test]
    fn every_step_takes_time_and_the_file_is_read_as_it_was_written() {
        let mut cpu = Cpu {
            line_ns: 77,
            ..Cpu::default()
        };
        if benchkv_harness::affinity::usable_cores().unwrap().len() == 1 {
            assert!(
                steps()
                    .unwrap_err()
                    .to_string()
                    .contains("this process may use 1: give it two")
            );
        } else {
            cpu = Cpu {
                line_ns: 77,
                ..steps().unwrap()
            };
            let mut costs = cpu.named().into_iter().filter(|(name, _)| *name != "noise");
            assert!(costs.all(|(_, ns)| *ns > 0));
        }
        let file = std::env::temp_dir().join(format!("benchkv-cpu-{}", std::process::id()));
        benchkv_harness::file::write(&file, text(cpu, 1.0, 1.0).as_bytes()).unwrap();
        let read = file
            .display()
            .to_string()
            .parse::<crate::cli::world::CpuModel>();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(read.unwrap().0, cpu);
        assert!(
            "no-such-file"
                .parse::<crate::cli::world::CpuModel>()
                .unwrap_err()
                .contains("no-such-file")
        );
    }

    /// A delay that passes while a thread is busy does not add to the latency.
    #[test]
    fn the_delay_is_found_with_which_the_simulation_has_the_latency() {
        let job = job().unwrap();
        let cpu = Cpu {
            stall_ns: 50,
            ..Cpu::default()
        };
        for line in [40, 200, 900] {
            let latency_ns = simulated_latency_ns(
                &job,
                Cpu {
                    line_ns: line,
                    ..cpu
                },
            )
            .unwrap();
            let found = line_ns(&job, cpu, latency_ns).unwrap();
            assert_eq!(
                simulated_latency_ns(
                    &job,
                    Cpu {
                        line_ns: found,
                        ..cpu
                    }
                )
                .unwrap(),
                latency_ns,
                "{line} ns, found {found} ns"
            );
        }
    }

    /// No delay fits a real job that took less time than the steps alone.
    #[test]
    fn a_model_without_the_latency_of_the_real_job_says_so() {
        let (job, cpu) = (job().unwrap(), Cpu::default());
        let of = |real_ns: f64| {
            let cpu = Cpu {
                line_ns: line_ns(&job, cpu, real_ns).unwrap(),
                ..cpu
            };
            text(cpu, real_ns, simulated_latency_ns(&job, cpu).unwrap())
        };
        let (short, fits) = (of(5.0), of(simulated_latency_ns(&job, cpu).unwrap()));
        assert!(
            short.contains("5 ns measured")
                && short.contains("NO line FITS")
                && short.contains("line=1\n"),
            "{short}"
        );
        assert!(!fits.contains("NO line FITS"), "{fits}");
    }

    #[test]
    fn a_slower_line_is_a_longer_round_trip() {
        let job = job().unwrap();
        let [near, far] = [0, 1000].map(|line_ns| {
            simulated_latency_ns(
                &job,
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
