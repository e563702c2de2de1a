//! The command line as it is typed: `job` has the options of a job, and `sweep` the type of the
//! option `--sweep`; `world` and `course` have the further options of a simulation.
//! [`crate::options`] checks combinations of options, and whether the job can run.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use benchkv_harness::range::time;
use benchkv_harness::report::{JsonSink, say};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use engine::topology::Carrier;

use self::course::CourseArgs;
pub(crate) use self::job::SHORTEST_RUN_S;
pub use self::job::{BackendKind, Fault, JobArgs, Mix, RingChoice, WaitChoice};
use self::world::WorldArgs;
use crate::output::with_extension;

pub mod course;
pub(crate) mod job;
pub mod sweep;
pub mod world;

/// Distributed key-value benchmark of the copyrpc stack; --help lists all options
///
/// Starts the ranks itself, as processes on this host, or is started as several processes by mpirun
/// or srun, and prints one table. Exit status: 0 done and sound, 1 failed, 2 illegal options, 3
/// measured, but operations were lost or values were wrong, 4 no operation ended in a measured run;
/// 130 interrupted by Ctrl-C (128 + signal), with a result of the measurements until then.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "benchkv",
    version,
    args_override_self = true,
    args_conflicts_with_subcommands = true,
    allow_negative_numbers = true,
    override_usage = "benchkv [OPTIONS] | benchkv <COMMAND> [OPTIONS]"
)]
pub struct Cli {
    /// Subcommand to run instead of a job.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Options of a job.
    #[command(flatten)]
    pub job: JobArgs,
}

impl From<Cli> for JobArgs {
    fn from(cli: Cli) -> Self {
        cli.job
    }
}

impl Cli {
    /// Parses the command line of this process. A request for help prints the help, and ends the
    /// process.
    ///
    /// # Errors
    /// clap's message.
    pub fn of_process() -> Result<Self, clap::Error> {
        let parsed = Self::try_of(std::env::args_os());
        let Some(answer) = parsed.as_ref().err().filter(|error| !error.use_stderr()) else {
            return parsed;
        };
        let printed = answer.print().and_then(|()| std::io::stdout().flush());
        // It is no failure if the reader has closed the output.
        let is_gone = |why: &std::io::Error| why.kind() == std::io::ErrorKind::BrokenPipe;
        if let Some(why) = printed.err().filter(|why| !is_gone(why)) {
            say(&format!(
                "benchkv: the help cannot be written to standard output: {why}"
            ));
            std::process::exit(1)
        }
        std::process::exit(answer.exit_code())
    }

    /// Parses a command line; the first of `words` is the name of the program.
    ///
    /// # Errors
    /// clap's message.
    pub fn try_of(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let mut command = command_line();
        let matches = command.try_get_matches_from_mut(words)?;
        if let Some(sim) = matches.subcommand_matches("sim") {
            let is_given = |id: &&str| sim.value_source(id) == Some(ValueSource::CommandLine);
            if let Some(id) = REAL_TIME.into_iter().find(is_given) {
                let flag = id.replace('_', "-");
                let text = format!("--{flag}: it has no meaning in virtual time; leave it out");
                return Err(command.error(ErrorKind::ArgumentConflict, text));
            }
        }
        Self::from_arg_matches(&matches)
    }
}

/// Returns the definition of the command line, with the differences between jobs in real and in
/// virtual time.
fn command_line() -> clap::Command {
    Cli::command().mut_subcommand("sim", in_virtual_time)
}

/// The options of a job that have no meaning in virtual time. `benchkv sim` does not show them in
/// its help, and refuses them.
const REAL_TIME: [&str; 12] = [
    "device",
    "mlx5",
    "port",
    "gid_index",
    "sl",
    "traffic_class",
    "mtu",
    "ucx_errors",
    "wait",
    "pin",
    "shm_dir",
    "report_interval",
];

/// Minimum and maximum length of a window in virtual time, and of the warm-up, in seconds.
const VIRTUAL_TIMES_S: std::ops::RangeInclusive<f64> = 1e-6..=60.0;

/// Adapts the options of a job to `benchkv sim`: only the options that have a meaning in virtual
/// time are shown, with the ranges, defaults and carriers of a simulation.
fn in_virtual_time(command: clap::Command) -> clap::Command {
    let hidden = REAL_TIME.into_iter().fold(command, |command, id| {
        command.mut_arg(id, |arg| arg.hide(true))
    });
    let of_s = |arg: clap::Arg, help: &'static str, default: &'static str| {
        let arg = arg.help(help).long_help(help).default_value(default);
        arg.value_parser(time(VIRTUAL_TIMES_S))
    };
    let duration = "Length of each measured run, 1us to 60s; a number without a unit is seconds";
    let warmup = "Load before the first run, 1us to 60s, in the units of --duration";
    let ranks = "Ranks, 1 to 256 [default: 2]";
    let is_simulated = |carrier: Carrier| carrier.traits().library.is_none();
    let carriers = values_of(is_simulated);
    let backends = values_of(|backend: BackendKind| backend.axes().1.is_none_or(is_simulated));
    // Jobs in virtual time are short by default: their results do not vary from run to run.
    hidden
        .mut_arg("duration", |arg| of_s(arg, duration, "2ms"))
        .mut_arg("warmup", |arg| of_s(arg, warmup, "500us"))
        .mut_arg("runs", |arg| arg.default_value("1"))
        .mut_arg("ranks", |arg| arg.help(ranks).long_help(ranks))
        .mut_arg("carrier", |arg| arg.value_parser(carriers))
        .mut_arg("backend", |arg| arg.value_parser(backends))
}

fn values_of<T: ValueEnum + Send + Sync + 'static>(
    is_legal: impl Fn(T) -> bool,
) -> impl TypedValueParser<Value = T> {
    let values = T::value_variants().iter();
    let legal = values.filter(|value| is_legal((*value).clone()));
    PossibleValuesParser::new(legal.filter_map(ValueEnum::to_possible_value))
        .try_map(|name| T::from_str(&name, false))
}

/// The subcommands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Check this machine: what benchkv can use, what is missing, how to install it
    ///
    /// Missing things do not change the exit status.
    Doctor(DoctorArgs),
    /// Run a job in virtual time, on models of CPUs and NICs
    ///
    /// All ranks are in one process. Equal options and seeds give equal results on every machine,
    /// except for the record of the machine.
    Sim(Box<SimArgs>),
    /// Print the results of jobs side by side, and draw them
    ///
    /// It needs no network and no other file.
    Report(ReportArgs),
}

/// Options of `benchkv sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    /// The simulated world.
    #[command(flatten)]
    pub world: WorldArgs,

    /// The course of the simulation.
    #[command(flatten)]
    pub course: CourseArgs,

    /// Measure for several seconds two jobs of one rank on this machine, and write the model of its
    /// CPUs to FILE, for --cpu: the costs with which the simulated jobs have the same latencies. Two
    /// cores have to be free meanwhile.
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,

    /// Options of the job that is simulated.
    #[command(flatten)]
    pub job: JobArgs,
}

/// Options of `benchkv doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Also write the checks as one JSON document to a file, or to standard output with -; the text
    /// then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonSink>,

    /// Directory for shared memory, as in the options of a job.
    #[arg(long, value_name = "DIR")]
    pub shm_dir: Option<PathBuf>,
}

/// Options of `benchkv report`.
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Results, as `benchkv --json FILE` writes them. Results with the same options are repeats of
    /// one measurement.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Also write a chart, or with .csv the points of the chart. With several variants of the
    /// settings, each has a line: of latencies, the 99th percentile. With one variant, each
    /// percentile of latencies has a line. May be given twice.
    #[arg(short, long, value_name = "FILE.svg|FILE.csv", value_parser = with_extension(&["svg", "csv"]))]
    pub output: Vec<PathBuf>,

    /// The chart that --output writes.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = ChartKind::LatencyByRate)]
    pub chart: ChartKind,

    /// Only check whether the files can be read, and are of jobs that were not interrupted; print
    /// no report.
    #[arg(long)]
    pub check: bool,
}

/// A chart of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ChartKind {
    /// Round trips by throughput; by the offered rate, if all results are of --rate.
    LatencyByRate,
    /// Round trips by the size of a value.
    LatencyBySize,
    /// Bytes of values per second by the size of a value.
    BandwidthBySize,
    /// Throughput by commit, in the order of first measurements.
    RateByCommit,
}

#[cfg(test)]
mod tests {
    use benchkv_harness::launch::device::{DeviceChoice, SoftDevice};

    use super::*;
    use crate::options::Options;

    fn parse(args: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace()))
    }

    fn resolve(args: &str) -> Options {
        Options::resolve(parse(args).unwrap()).unwrap()
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// clap takes its help from the comments of items, which are also written for rustdoc.
    #[test]
    fn help_has_no_links_of_rustdoc() {
        let mut command = Cli::command();
        command.build();
        let helps = command
            .get_subcommands()
            .cloned()
            .chain([command.clone()])
            .map(|mut command| command.render_long_help().to_string());
        for help in helps {
            assert!(!help.contains("[`") && !help.contains("::"), "{help}");
        }
    }

    #[test]
    fn help_shows_no_default_that_is_nothing() {
        for command in Cli::command().get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            assert!(!help.contains("[default: \"\"]"), "{help}");
        }
    }

    /// Every option that the help of `benchkv sim` shows needs a line with a legal value in
    /// `legal`.
    #[test]
    fn every_option_in_the_help_of_sim_is_obeyed_in_virtual_time_and_the_others_are_refused() {
        let legal = [
            "--cpu round=1",
            "--nic link=1",
            "--strict",
            "--backend meta",
            "--carrier rc-send",
            "--ranks 3",
            "--server-threads 2",
            "--client-threads 2",
            "--queue-depth 1",
            "--rate 1000",
            "--arrivals poisson --rate 1000",
            "--duration 1us",
            "--duration 60s",
            "--ops 5",
            "--runs 2",
            "--warmup 1us",
            "--warmup 60s",
            "--key-range 10",
            "--value-size 100",
            "--read-ratio 1",
            "--distribution zipfian",
            "--empty",
            "--seed 3",
            "--mix ycsb-a",
            "--remote-ratio 1",
            "--ring-size 64K",
            "--memory-limit 8G",
            "--no-verify",
            "--label x",
            "--json -",
            "--output x.csv",
            "--hold 10us",
            "--poll-budget 2",
            "--coalesce-rtt-us 1",
            "--flush-every 2",
            "--batch-window completion:1",
            "--batches-in-flight 8",
            "--policies-from 1ms --hold 10us",
            "--policies-until 1ms --batch-window completion:1",
            "--pause 1@1ms+1ms",
            "--sweep depth=1,2,1",
            "--trace .",
            "--trace-interval 9 --trace .",
        ];
        let sim = |args: &str| {
            Cli::try_of(
                ["benchkv", "sim"]
                    .into_iter()
                    .chain(args.split_whitespace()),
            )
        };
        let mut command = command_line();
        for arg in command
            .get_arguments()
            .chain(command.find_subcommand("sim").unwrap().get_arguments())
        {
            assert!(
                arg.get_help_heading().is_some() || arg.is_hide_set(),
                "{arg} is under no heading"
            );
        }
        command.build();
        for arg in command
            .find_subcommand("sim")
            .unwrap()
            .get_arguments()
            .filter(|arg| !["help", "calibrate"].contains(&arg.get_id().as_str()))
        {
            let flag = format!("--{}", arg.get_long().unwrap());
            let mut shown = legal
                .iter()
                .filter(|args| args.split(' ').next() == Some(&flag))
                .peekable();
            assert!(
                shown.peek().is_some() || arg.is_hide_set(),
                "{flag} needs a line in this test"
            );
            for args in shown {
                let Some(Command::Sim(sim)) = sim(args).unwrap().command else {
                    panic!("{args}")
                };
                crate::sim::resolve(&sim).unwrap();
            }
            if REAL_TIME.contains(&arg.get_id().as_str()) {
                let values = [
                    "",
                    "1",
                    "auto",
                    "threads",
                    "256",
                    "100ms",
                    "/dev/shm",
                    "cqe-compression",
                ];
                let refused = values
                    .iter()
                    .filter_map(|value| sim(&format!("{flag} {value}")).err())
                    .map(|error| error.to_string());
                assert!(
                    arg.is_hide_set()
                        && refused
                            .into_iter()
                            .any(|text| text.contains("no meaning in virtual time")),
                    "{flag}"
                );
            }
        }
        let help = command
            .find_subcommand_mut("sim")
            .unwrap()
            .render_long_help()
            .to_string();
        assert!(
            !["1h", "mpirun"].iter().any(|word| help.contains(word)),
            "{help}"
        );
    }

    #[test]
    fn the_short_help_leaves_out_what_few_need() {
        let [short, long] = [
            command_line().render_help(),
            command_line().render_long_help(),
        ]
        .map(|help| help.to_string());
        for (flag, is_short) in [
            ("--backend", true),
            ("--duration", true),
            ("--ops", true),
            ("--traffic-class", false),
            ("--flush-every", false),
        ] {
            assert_eq!(
                (short.contains(flag), long.contains(flag)),
                (is_short, true),
                "{flag}"
            );
        }
        assert!(short.lines().count() <= 33, "one screen: {short}");
    }

    #[test]
    fn a_run_needs_no_argument() {
        let cli = parse("").unwrap();
        assert_eq!(
            (cli.job.backend, cli.job.ranks, cli.job.no_verify),
            (BackendKind::Delegation, None, false)
        );
        assert!(
            cli.job.warmup + cli.job.runs as f64 * cli.job.duration < 10.0,
            "the default run has to end within 15 s with its set-up"
        );
    }

    #[test]
    fn short_options_and_units_mean_the_same_as_long_ones() {
        let cli =
            parse("-n 4 -d 8 -t 500ms --warmup 20ms --ring-size 64K --memory-limit 2G").unwrap();
        assert_eq!(
            (
                cli.job.ranks,
                cli.job.queue_depth,
                cli.job.ring_size,
                cli.job.memory_limit
            ),
            (Some(4), 8, RingChoice::Bytes(65_536), Some(2 << 30))
        );
        assert!((cli.job.duration - 0.5).abs() < 1e-12 && (cli.job.warmup - 0.02).abs() < 1e-12);
        let long = parse("--ranks 4 --queue-depth 8 --duration 0.5 --warmup 0.02 --ring-size 65536 --memory-limit 2147483648").unwrap();
        assert_eq!(
            (
                long.job.ranks,
                long.job.queue_depth,
                long.job.ring_size,
                long.job.memory_limit
            ),
            (cli.job.ranks, 8, cli.job.ring_size, cli.job.memory_limit)
        );
        assert!(
            (long.job.duration - cli.job.duration).abs() < 1e-12
                && (long.job.warmup - cli.job.warmup).abs() < 1e-12
        );
    }

    #[test]
    fn a_number_of_operations_and_a_length_of_time_exclude_each_other() {
        assert_eq!(parse("--ops 7").unwrap().job.ops, Some(7));
        for time in ["--duration 1", "--runs 2", "--warmup 0"] {
            assert_eq!(
                parse(&format!("--ops 7 {time}")).unwrap_err().exit_code(),
                2
            );
        }
    }

    #[test]
    fn a_mix_is_a_shorthand_and_excludes_what_it_stands_for() {
        for (mix, reads) in [("ycsb-a", 0.5), ("b", 0.95), ("ycsb-c", 1.0)] {
            let workload = resolve(&format!("--mix {mix} --value-size 1000"))
                .job
                .workload;
            let same = resolve(&format!(
                "--read-ratio {reads} --distribution zipfian --value-size 1000"
            ))
            .job
            .workload;
            assert_eq!(format!("{workload:?}"), format!("{same:?}"), "{mix}");
        }
        for args in [
            "--mix ycsb-a --read-ratio 1",
            "--mix c --distribution uniform",
            "--mix ycsb-e",
        ] {
            assert_eq!(parse(args).unwrap_err().exit_code(), 2, "{args}");
        }
    }

    #[test]
    fn devices_are_named_as_they_are_printed() {
        let verbs = |name: Option<&str>, port| DeviceChoice::Verbs {
            name: name.map(str::to_owned),
            port,
            relay: false,
        };
        let relayed = |name: &str, port| DeviceChoice::Verbs {
            name: Some(name.to_owned()),
            port,
            relay: true,
        };
        for (text, device) in [
            ("auto", DeviceChoice::Auto),
            ("soft", DeviceChoice::Soft(SoftDevice::default())),
            (
                "soft:rtt_us=6",
                DeviceChoice::Soft(SoftDevice {
                    rtt_ns: 6000,
                    ..SoftDevice::default()
                }),
            ),
            ("verbs", verbs(None, None)),
            ("mlx5_0", verbs(Some("mlx5_0"), None)),
            ("mlx5_1:2", verbs(Some("mlx5_1"), Some(2))),
            ("rxe0", verbs(Some("rxe0"), None)),
            ("bnxt_re1:2", verbs(Some("bnxt_re1"), Some(2))),
            ("verbs:rocep3s0f1", verbs(Some("rocep3s0f1"), None)),
            ("verbs:ibp1s0:1", verbs(Some("ibp1s0"), Some(1))),
            ("relay:mlx5_0", relayed("mlx5_0", None)),
            ("relay:rxe0:1", relayed("rxe0", Some(1))),
        ] {
            assert_eq!(
                parse(&format!("--device {text}")).unwrap().job.device,
                device.clone().into()
            );
            assert_eq!(device.to_string(), text);
        }
        for text in [
            "mlx5",
            "mlx5_0:",
            "mlx5_0:one",
            "verbs:",
            "relay",
            "relay:",
            "mlx5_0:0",
            "mlx5_0:256",
        ] {
            assert_eq!(
                parse(&format!("--device {text}")).unwrap_err().exit_code(),
                2,
                "{text}"
            );
        }
    }

    /// The parsers of the standard library report what is wrong with a text, but not what is legal.
    #[test]
    fn what_is_no_number_is_refused_with_the_legal_ones() {
        for (args, says) in [
            (
                "--seed -1",
                "use a whole number from 0 to 18446744073709551615",
            ),
            (
                "--seed 18446744073709551616",
                "use a whole number from 0 to 18446744073709551615",
            ),
            ("--ranks two", "use a whole number from 1 to 256"),
            (
                "--read-ratio 0,5",
                "use a number from 0 to 1; a point begins its decimals",
            ),
            ("--rate 1,000", "use a number from 1 to 1000000000"),
            ("--coalesce-rtt-us x", "use a number from 0.1 to 1000000"),
            (
                "--batch-window completion",
                "use off, completion:N or consumption:N with N from 1 to 256",
            ),
            (
                "--trace-interval 1e3 --trace .",
                "use a whole number from 1 to 1000000000",
            ),
            ("--traffic-class 256", "use a whole number from 0 to 255"),
        ] {
            let message = parse(args).unwrap_err().to_string();
            assert!(message.contains(says), "{args}: {message}");
        }
        let mut command = Cli::command();
        command.build();
        let mut refused = 0;
        for (sub, flags) in [
            (None, &command),
            (Some("sim"), command.find_subcommand("sim").unwrap()),
        ] {
            let valued = flags
                .get_arguments()
                .filter(|arg| arg.get_action().takes_values());
            for flag in valued.filter_map(|arg| arg.get_long()) {
                for value in [
                    "",
                    "x",
                    "-1",
                    "0,5",
                    "99999999999999999999999999",
                    "NaN",
                    " 5",
                ] {
                    let words = ["benchkv"]
                        .into_iter()
                        .chain(sub)
                        .map(str::to_owned)
                        .chain([format!("--{flag}={value}")]);
                    let Err(error) = Cli::try_of(words) else {
                        continue;
                    };
                    let message = error.to_string();
                    let foreign = [
                        "invalid digit",
                        "invalid float",
                        "empty string",
                        "too large to fit",
                        "is not in ",
                    ];
                    assert!(
                        !foreign.iter().any(|part| message.contains(part)),
                        "{message}"
                    );
                    refused += 1;
                }
            }
        }
        assert!(refused > 200, "{refused}");
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        for (args, known) in [
            (
                "--backend tcp",
                "meta, delegation, sharded, direct, rc-send, ucx-am, copyrpc-direct",
            ),
            ("--wait sleep", "auto, busy, yield, event"),
            (
                "--device eth0",
                "auto, soft[:KEY=VALUE,...], soft:roce=ADDRESS[/BITS], verbs, mlx5_N[:PORT]",
            ),
            (
                "--device soft:rtt=6",
                "rtt=6: known are rtt_us, jitter_us, seed and fault",
            ),
        ] {
            let message = parse(args).unwrap_err().to_string();
            assert!(message.contains(known), "{message}");
        }
        for args in [
            "--arrivals poisson",
            "--rate 1000 --arrivals bursts",
            "--rate fast",
            "--distribution zipf",
            "--pin 0..3",
            "--ring-size big",
            "--ring-size 4KB",
            "--value-size 1KB",
            "--duration soon",
            "--warmup 1day",
            "--report-interval often",
            "--ranks two",
            "--ranks -1",
            "--nonsense",
        ] {
            assert_eq!(parse(args).unwrap_err().exit_code(), 2, "{args}");
        }
    }
}
