//! The binary: the role of this process, its output, and its exit status. With the feature `mpi`,
//! `mpi` is the entry of processes that an MPI launcher started.

#[cfg(feature = "mpi")]
mod mpi;

use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use benchkv::agreement::{AgreementError, agree};
use benchkv::cli::{Cli, Command, DoctorArgs, JobArgs, ReportArgs, SimArgs};
use benchkv::doctor::{Diagnosis, probe};
use benchkv::launcher::LauncherKind;
use benchkv::options::Options;
use benchkv::orchestrate::{RankError, run_rank};
use benchkv::output::{self, OutputArgs};
use benchkv::progress::Progress;
use benchkv::result::{Conditions, JobResult, csv};
use benchkv::sim;
use benchkv::trace::TraceOptions;
use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::counters::{self, PortCounters};
use benchkv_harness::environment::{Environment, cpu_seconds, peak_rss_bytes};
use benchkv_harness::file;
use benchkv_harness::launch::exchange::{Exchange, ExchangeError, SocketExchange};
use benchkv_harness::launch::hosts::Hosts;
use benchkv_harness::launch::launcher::Launch;
use benchkv_harness::launch::program::{EXIT_FAILED, EXIT_OPTIONS, EXIT_UNSOUND, Program, print};
#[cfg(not(feature = "mpi"))]
use benchkv_harness::launch::role::Foreign;
use benchkv_harness::launch::role::foreign_launcher;
use benchkv_harness::machine::{allow_open_files, available_memory};
use benchkv_harness::report::{JsonSink, bytes, rate, say, to_stdout};
use copyrpc_shm::dir::Dir;
use engine::backend::composed::Composed;

const PROGRAM: Program = Program("benchkv");
/// Exit status for a result in which no operation ended in a measured run.
const EXIT_NOTHING: u8 = 4;
/// Exit status when the user has ended the job.
const EXIT_INTERRUPTED: u8 = 130;
/// Maximum time for the slowest rank to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time that ranks wait for rank 0 to measure the baselines, and for each other's reports.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(30);
/// Maximum time for ranks to end by themselves when the job has failed, or to drain and report when
/// it is interrupted.
const GRACE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let rank = |exchange: &mut SocketExchange| rank_process(Cli::of_process(), exchange, None);
    let follows = |error: &Failure| {
        error.is::<ExchangeError>() || error.downcast_ref().is_some_and(RankError::follows)
    };
    PROGRAM.child(rank, follows).unwrap_or_else(start)
}

fn fail(code: u8, error: &dyn Display) -> ExitCode {
    PROGRAM.fail(code, error)
}

fn refuse(error: &clap::Error) -> ExitCode {
    // A closed standard error does not change the exit status.
    let _printed = error.print();
    ExitCode::from(EXIT_OPTIONS)
}

/// Runs the subcommand, starts the job of a user, or runs this process as one of several processes
/// of another launcher.
fn start() -> ExitCode {
    let parsed = Cli::of_process();
    match parsed.as_ref().ok().and_then(|cli| cli.command.as_ref()) {
        Some(Command::Doctor(args)) => return doctor(args),
        Some(Command::Report(args)) => return report(args),
        Some(Command::Sim(args)) => return simulate(args),
        None => {}
    }
    match foreign_launcher() {
        None => parsed.map_or_else(|error| refuse(&error), launch),
        #[cfg(feature = "mpi")]
        Some(_) => mpi::run(parsed),
        #[cfg(not(feature = "mpi"))]
        Some(launcher) => {
            let ranks = match launcher {
                Foreign::Sized { size, .. } => format!(", with --ranks {size}"),
                Foreign::Unsized { .. } => String::new(),
            };
            let how = "build it with --features mpi, or start it alone";
            let text = format!("{launcher}, but this build has no MPI: {how}{ranks}");
            fail(EXIT_OPTIONS, &text)
        }
    }
}

/// Examines this machine. A missing item is a finding, not a failure.
fn doctor(args: &DoctorArgs) -> ExitCode {
    let diagnosis = Diagnosis::of(&probe::probe(args.shm_dir.as_deref()));
    PROGRAM.show(&diagnosis, args.json.as_ref(), None)
}

fn report(args: &ReportArgs) -> ExitCode {
    benchkv::report::run(args)
        .map_or_else(|error| fail(EXIT_OPTIONS, &error), |()| ExitCode::SUCCESS)
}

fn simulate(args: &SimArgs) -> ExitCode {
    if let Some(file) = &args.calibrate {
        let written =
            sim::calibrate::calibrate(file).and_then(|model| Ok(to_stdout(model.as_bytes())?));
        return written.map_or_else(|error| fail(EXIT_FAILED, &error), |()| ExitCode::SUCCESS);
    }
    let options = sim::resolve(args).and_then(|options| {
        check_output(&options)?;
        Ok(options)
    });
    let options = match options {
        Ok(options) => options,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    say(&options.to_string());
    warn_of_memory(&options);
    // The memory of each rank's device takes three open files.
    if let Err(few) = allow_open_files(3 * options.job.topology.ranks as u64 + 64) {
        say(&few.to_string());
    }
    match sim::run(args, &options) {
        Ok(result) => {
            let (ended, seconds) = (result.fate.completed, cpu_seconds());
            let summary = result.simulation.as_ref().map(|done| &done.summary);
            let turns = summary.map_or(0, |summary| summary.turns) as f64 / seconds;
            let broken = summary.map_or(&[][..], |summary| &summary.violations);
            say(&format!(
                "simulated {ended} operations in {seconds:.1} s of CPU time: {}, {} turns; {} of memory at most",
                rate(ended as f64 / seconds),
                rate(turns),
                bytes(peak_rss_bytes())
            ));
            let shown = show(&options, &result);
            broken
                .iter()
                .fold(shown, |_, rule| fail(EXIT_UNSOUND, rule))
        }
        Err(error) => fail(EXIT_FAILED, &error),
    }
}

/// Checks everything that can be checked before a process is started, then starts the ranks.
fn launch(cli: Cli) -> ExitCode {
    let options = match Options::resolve(cli) {
        Ok(options) => options,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    let checked = check_output(&options)
        .and_then(|()| check_library(&options))
        .and_then(|()| check_device(&options))
        .and_then(|()| sweep(&options));
    if let Err(error) = checked {
        return fail(EXIT_OPTIONS, &error);
    }
    say(&options.to_string());
    warn_of_memory(&options);
    let args = std::env::args_os().skip(1).collect();
    let launch = Launch {
        ranks: options.job.workload.ranks,
        args,
        environment: environment(&options),
        time_limit: options.time_limit(),
        grace: GRACE,
    };
    match launch.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Killed ranks leave files, which are removed here. If that fails, the next job removes
            // them, so the error is ignored.
            let _ = Dir::open(options.asked.shm_dir.as_deref()).and_then(|dir| dir.sweep());
            fail(error.exit_code(), &error)
        }
    }
}

fn environment(options: &Options) -> Vec<(&'static str, &'static str)> {
    let library = options.job.topology.carrier.traits().library;
    let variable = library.map(|library| library.variable).into_iter();
    variable
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .collect()
}

fn check_output(options: &Options) -> Result<(), String> {
    let JobArgs {
        json,
        output: OutputArgs { output },
        traced,
        ..
    } = &options.asked;
    let named =
        |flag, checked: Result<(), Failure>| checked.map_err(|error| format!("{flag}: {error}"));
    named("--json", json.iter().try_for_each(JsonSink::check))?;
    named(
        "--output",
        output.iter().try_for_each(|file| Ok(file::check(file)?)),
    )?;
    let trace_dir = traced.as_ref().map(|trace| trace.dir.as_path());
    output::check_apart(json.as_ref(), output.as_deref(), trace_dir)?;
    named("--trace", traced.iter().try_for_each(TraceOptions::check))
}

fn check_library(options: &Options) -> Result<(), String> {
    let library = options.job.topology.carrier.traits().library;
    library.map_or(Ok(()), |library| (library.load)())
}

fn check_device(options: &Options) -> Result<(), String> {
    let (topology, device) = (options.job.topology, &options.asked.device);
    if topology.ranks == 1 || topology.carrier.traits().library.is_some() {
        return Ok(());
    }
    let checked = device.exist();
    checked.map_err(|error| format!("--device {device}: {error}"))
}

/// Removes the files of killed jobs on this host, and checks whether files can be made in their
/// directory.
fn sweep(options: &Options) -> Result<(), String> {
    let swept = Dir::open(options.asked.shm_dir.as_deref()).and_then(|dir| {
        let removed = dir.sweep()?;
        Ok((dir, removed))
    });
    let (dir, removed) = swept.map_err(|error| format!("--shm-dir: {error}"))?;
    if removed > 0 {
        say(&format!(
            "removed {removed} shared-memory regions of dead processes"
        ));
    }
    let made = file::check(&dir.path().join("benchkv"));
    made.map_err(|error| {
        format!(
            "--shm-dir {}: no file can be made in it: {}; name another",
            dir.path().display(),
            error.source
        )
    })
}

/// Runs one rank of any launcher; `library` is the name of the MPI library. If the ranks refuse to
/// run, rank 0 prints the reason. Otherwise rank 0 also measures the baselines before the job, and
/// shows the result after it.
fn rank_process(
    parsed: Result<Cli, clap::Error>,
    exchange: &mut dyn Exchange,
    library: Option<String>,
) -> Result<ExitCode, Failure> {
    let rank = exchange.rank();
    let hosts = Hosts::gather(exchange, START_LIMIT)?;
    let legal = parsed.map_err(|error| {
        let text = error.to_string();
        text.trim_start_matches("error: ").trim_end().to_owned()
    });
    let resolved = legal.and_then(|cli| {
        Options::resolve_on(cli, &hosts, library).map_err(|error| error.to_string())
    });
    let options = match agree(
        exchange,
        resolved.and_then(|options| prepare(options, rank)),
    ) {
        Ok(options) => options,
        Err(AgreementError::Refused(why)) => {
            if rank == 0 {
                fail(EXIT_OPTIONS, &why);
            }
            // A launcher may end rank 0 as soon as another rank has failed, so all ranks wait until
            // rank 0 has printed the refusal.
            exchange.barrier(EXCHANGE_LIMIT, &|| false)?;
            return Ok(ExitCode::from(EXIT_OPTIONS));
        }
        Err(AgreementError::Exchange(error)) => return Err(error.into()),
    };
    announce(&options, rank);
    let is_first_here = options.launcher.local_rank(rank) == Some(0);
    if let Some(few) = allow_open_files(options.job.topology.open_files())
        .err()
        .filter(|_| is_first_here)
    {
        say(&format!("rank {rank}: {few}"));
    }
    let never = || false;
    let clock = Clock::detect();
    exchange.barrier(EXCHANGE_LIMIT, &never)?;
    let backend = Composed::new(&options.job, options.site(rank)?)?;
    let look = || {
        if is_first_here {
            counters::read(Path::new(counters::SYSFS))
        } else {
            PortCounters::new()
        }
    };
    let before = look();
    let (warmup, duration) = (options.warmup(), options.duration());
    // With --ops the duration is not known.
    let progress = if rank == 0 && options.job.ops.is_none() {
        Progress::on_terminal(warmup, options.job.runs, duration)
    } else {
        Progress::hidden()
    };
    let mut report = run_rank(&options, &backend, exchange, clock, &progress)?;
    drop(progress);
    report.add_hardware_counters(before, look());
    let parts = exchange.gather(&serde_json::to_vec(&report)?, EXCHANGE_LIMIT, &never)?;
    if rank != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let conditions = Conditions {
        clock: clock.source(),
        environment: Environment::detect(),
    };
    let result = JobResult::reduce(&options, conditions, &parts)?;
    if result.runs.is_empty() {
        return Ok(fail(
            EXIT_INTERRUPTED,
            &"interrupted before anything was measured: there is no result",
        ));
    }
    Ok(show(&options, &result))
}

/// Prepares a rank that MPI started, as the local launcher prepares the ranks that it starts.
fn prepare(options: Options, rank: usize) -> Result<Options, String> {
    if options.launcher.kind == LauncherKind::Mpi {
        if rank == 0 {
            check_output(&options)?;
        }
        check_library(&options)?;
        if options.launcher.local_rank(rank) == Some(0) {
            sweep(&options)?;
        }
    }
    Ok(options)
}

/// Prints the plan of this host, on the first rank of each host. Does nothing under the local
/// launcher, which has printed the plan already.
fn announce(options: &Options, rank: usize) {
    let Options { launcher, plan, .. } = options;
    if launcher.kind == LauncherKind::Mpi && launcher.local_rank(rank) == Some(0) {
        say(&if rank == 0 {
            options.to_string()
        } else {
            format!("rank {rank}: {launcher}\n{plan}")
        });
        warn_of_memory(options);
    }
}

fn warn_of_memory(options: &Options) {
    available_memory()
        .and_then(|available| options.memory.warning(available))
        .iter()
        .for_each(|warning| say(warning));
}

/// Writes the result to each requested destination, and prints the defects of the result. Returns
/// the exit status of the worst defect. An interrupted job has a status of its own.
fn show(options: &Options, result: &JobResult) -> ExitCode {
    let mut unwritten = print(result, options.asked.json.as_ref());
    let write = |file: &Path| Ok::<(), Failure>(file::write(file, &csv(result)?)?);
    let table = options.asked.output.output.as_deref().map_or(Ok(()), write);
    unwritten.extend(table.err().map(|error| format!("--output: {error}")));
    unwritten.extend(
        result
            .trace_failure
            .as_ref()
            .map(|failure| format!("--trace: {failure}")),
    );
    let (lost, failures) = (result.fate.lost, result.verify_failures.unwrap_or(0));
    let unissued = result.unissued();
    let unsound = (!result.is_sound()).then(|| {
        let not_issued = if unissued > 0 {
            format!(", {unissued} operations not issued")
        } else {
            String::new()
        };
        format!(
            "the result is unsound: {lost} operations lost, {failures} verify failures{not_issued}"
        )
    });
    let nothing = (result.measured_ops() == 0)
        .then(|| "nothing was measured: no operation ended in a run; measure for longer (--duration), or ask for more (--rate)".to_owned());
    let wrongs = unsound.map(|wrong| (EXIT_UNSOUND, wrong)).into_iter();
    let wrongs = wrongs
        .chain(unwritten.into_iter().map(|wrong| (EXIT_FAILED, wrong)))
        .chain(nothing.map(|wrong| (EXIT_NOTHING, wrong)));
    let worst = PROGRAM.fail_all(wrongs);
    if result.interrupted {
        ExitCode::from(EXIT_INTERRUPTED)
    } else {
        worst
    }
}
