//! The command line as it is typed. What it means, and whether it can be run, is decided in [`crate::options`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use harness::affinity::PinPolicy;
use harness::device::DeviceChoice;
use harness::report::JsonSink;
use harness::units;
use serde::{Deserialize, Serialize};

use crate::output::file::OutputArgs;
use crate::pace::PaceArgs;
use crate::port::PortOptions;
use crate::sim::options::WorldArgs;
use crate::trace::TraceArgs;
use crate::ucx::{PeerErrorsChoice, UcxArgs};
use engine::policy::PolicyOptions;
use engine::topology::{Routing, Transport};
use engine::workload::Distribution;

/// Distributed key-value benchmark of the copyrpc stack.
///
/// Starts the ranks itself, as processes on this host, or is started as several by mpirun or srun, and prints one table. Exit status: 0 done and sound, 1 failed, 2 illegal options,
/// 3 measured, but operations were lost or values were wrong; 130 interrupted by Ctrl-C (128 + signal), and the result is of what was measured until then.
#[derive(Debug, Clone, Parser)]
#[command(name = "benchkv", version, args_override_self = true, args_conflicts_with_subcommands = true, allow_negative_numbers = true)]
pub struct Cli {
    /// Subcommand to run instead of a job.
    #[command(subcommand)]
    pub command: Option<Command>,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub job: JobArgs,
}

/// What a job is, and where its result goes.
#[derive(Debug, Clone, Args)]
pub struct JobArgs {
    /// Which way requests take to other ranks.
    #[arg(long, value_enum, default_value_t = BackendKind::Delegation)]
    pub backend: BackendKind,

    /// What carries messages between ranks, with any --backend [default: copyrpc, or what the name of the --backend says].
    #[arg(long, value_enum)]
    pub carrier: Option<Transport>,

    /// Rank processes to start, 1 to 256 [default: 2]. Under mpirun there are as many as it started.
    #[arg(short = 'n', long, value_name = "N")]
    pub ranks: Option<usize>,

    /// RDMA device: soft, which auto takes; or hardware, by the name of the device and maybe its port (mlx5_0, mlx5_0:1, verbs:NAME for other
    /// names), or verbs for the first with an active port. Of soft: rtt_us=US (0 to 100000 [default: 0]), of a request and its response;
    /// jitter_us=US (the same), by which every second operation is late; seed=N [default: 1]; fault=rnr:PERMILLE, fault=reorder:PERMILLE,
    /// fault=drop:OPERATION.
    #[arg(long, value_name = "auto|soft[:KEY=VALUE,...]|verbs|mlx5_N[:PORT]", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub port: PortOptions,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub ucx: UcxArgs,

    /// Daemon threads of each rank, 1 to 64; each owns one shard of the rank's store.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub server_threads: usize,

    /// Client threads of each rank, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub client_threads: usize,

    /// What a client is: threads of the rank, or processes of their own, which the rank starts.
    #[arg(long, hide_short_help = true, value_enum, default_value_t = ClientKind::Threads)]
    pub clients: ClientKind,

    /// Operations each client keeps outstanding, 1 to 4096.
    #[arg(short = 'd', long, value_name = "N", default_value_t = 32)]
    pub queue_depth: usize,

    /// How load is offered.
    #[command(flatten)]
    pub pace: PaceArgs,

    /// Length of each measured run, 10ms to 1h; a number without a unit is seconds.
    #[arg(short = 't', long, value_name = "TIME", value_parser = units::seconds, default_value_t = 2.0)]
    pub duration: f64,

    /// Each client issues so many operations in all, 1 to 4294967295, in one run without a warm-up, and the job ends when all have ended.
    #[arg(long, value_name = "N", conflicts_with_all = ["duration", "runs", "warmup"])]
    pub ops: Option<u64>,

    /// Measured runs, 1 to 32; rates are their mean.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,

    /// Load before the first run, 0 to 1h, as --duration.
    #[arg(long, value_name = "TIME", value_parser = units::seconds, default_value_t = 0.5)]
    pub warmup: f64,

    /// Shared keys in the store of each rank, 1 to 67108864.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub key_range: u64,

    /// Bytes of a value, 8 to 64K. The rings between ranks are as large as it needs.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, default_value = "8")]
    pub value_size: u64,

    /// Give every shared key a value before clients start. Else gets find nothing until a put has come, which is cheaper.
    #[arg(long)]
    pub preload: bool,

    /// A mix of YCSB: ycsb-a (half of the operations read), ycsb-b (95 %) or ycsb-c (all), of keys chosen by zipfian:0.99, all of which have a value. YCSB's
    /// records have 1000 bytes: --value-size 1000. Its other mixes insert, scan, or read and write in one operation, which there is not here.
    #[arg(long, value_enum, conflicts_with_all = ["read_ratio", "distribution"])]
    pub mix: Option<Mix>,

    /// Share of operations that read, 0 to 1.
    #[arg(long, value_name = "RATIO", default_value_t = 0.5)]
    pub read_ratio: f64,

    /// Share of operations that go to another rank, 0 to 1 [default: all ranks alike, (ranks - 1) / ranks].
    #[arg(long, value_name = "RATIO")]
    pub remote_ratio: Option<f64>,

    /// How keys are chosen: uniform, zipfian, zipfian:THETA.
    #[arg(long, value_name = "NAME", default_value_t = Distribution::Uniform)]
    pub distribution: Distribution,

    /// Bytes of each ring of a connection between ranks: a power of two, 4K to 256M, or auto. The carriers rc-send and ucx-am have none.
    #[arg(long, hide_short_help = true, value_name = "BYTES", default_value = "auto")]
    pub ring_size: RingChoice,

    /// Maximum bytes of memory that the ranks of this host may be expected to take together; a job that needs more is refused [default: what the
    /// host has, or its control group allows if that is less].
    #[arg(long, hide_short_help = true, value_name = "BYTES", value_parser = units::bytes)]
    pub memory_limit: Option<u64>,

    /// What a thread does that finds no work: poll on (busy), give the core away (yield), or sleep until there is some (event). auto is busy where
    /// every thread has a core, else yield.
    #[arg(long, hide_short_help = true, value_enum, default_value_t = WaitChoice::Auto)]
    pub wait: WaitChoice,

    /// Cores of the threads: auto pins where every thread can have its own, none never pins, or a list such as 0-3,8.
    #[arg(long, hide_short_help = true, value_name = "POLICY", default_value_t = PinPolicy::Auto)]
    pub pin: PinPolicy,

    /// Directory for shared memory [default: one of this user in /dev/shm].
    #[arg(long, hide_short_help = true, value_name = "DIR")]
    pub shm_dir: Option<PathBuf>,

    /// Do not check the values read. The check costs some nanoseconds per operation, and 1 in 16 operations goes to keys of the client's own.
    #[arg(long, overrides_with = "verify")]
    pub no_verify: bool,

    /// The same, as it once was: --verify=false.
    #[arg(long, hide = true, value_name = "BOOL", default_value_t = true, default_missing_value = "true", num_args = 0..=1, action = clap::ArgAction::Set)]
    pub verify: bool,

    /// Words that the table, the result and the report show with the job.
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,

    /// Also write the result as one JSON document to a file, or to standard output with -; the table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonSink>,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub output: OutputArgs,

    /// Also write the percentiles of all round trips, in microseconds, as the text that HdrHistogram's plotters read.
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    pub hgrm: Option<PathBuf>,

    /// Measure no Unix-socket echo before the job, which takes half a second. The result then has nothing to be put beside.
    #[arg(long, hide_short_help = true)]
    pub no_echo: bool,

    /// Seed of the access patterns.
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Breaks something on purpose, for tests.
    #[arg(long, value_enum, hide = true)]
    pub fault: Option<Fault>,

    // These have headings of their own, which go on to what is behind them.
    /// What daemons and connections leave for later.
    #[command(flatten)]
    pub policies: PolicyOptions,

    /// Time series of the daemons.
    #[command(flatten)]
    pub trace: TraceArgs,
}

impl From<Cli> for JobArgs {
    fn from(cli: Cli) -> Self {
        cli.job
    }
}

impl Cli {
    /// The command line of this process; what is illegal ends it with clap's message.
    #[must_use]
    pub fn of_process() -> Self {
        Self::try_of(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    /// Likewise, of these words.
    ///
    /// # Errors
    /// clap's message.
    pub fn try_of(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Self, clap::Error> {
        // Jobs in virtual time are short by default: nothing in them varies from run to run.
        let defaults = [("duration", "2ms"), ("warmup", "500us"), ("runs", "1")];
        let simulated = |command: clap::Command| {
            defaults.into_iter().fold(command, |command, (id, value)| command.mut_arg(id, |arg| arg.default_value(value)))
        };
        Self::from_arg_matches(&Self::command().mut_subcommand("sim", simulated).try_get_matches_from(words)?)
    }
}

impl JobArgs {
    /// Whether the values read are to be checked.
    #[must_use]
    pub const fn checks_values(&self) -> bool {
        self.verify && !self.no_verify
    }
}

/// What benchkv does instead of running a job.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Says what this machine has of what a job can use, what is missing, and how to get it. The exit status is 0 whatever is missing.
    Doctor(DoctorArgs),
    /// Runs a job in virtual time: the ranks, in one process, on models of their CPUs and NICs. The same options and seed give the same
    /// result, on every machine.
    Sim(Box<SimArgs>),
    /// Makes one HTML page, with plots, out of the results of one or many jobs. It needs no network and no other file.
    Report(ReportArgs),
}

/// Options of `benchkv sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub world: WorldArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub job: JobArgs,
}

/// Options of `benchkv doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Also write the checks as one JSON document to a file, or to standard output with -; the text then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonSink>,

    /// Directory for shared memory, as jobs would be given it.
    #[arg(long, value_name = "DIR")]
    pub shm_dir: Option<PathBuf>,
}

/// Options of `benchkv report`.
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Results, as `benchkv --json FILE` writes them. Those with the same options are taken together, as repeats.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// The page to write; one that exists is replaced. - writes it to standard output.
    #[arg(short, long, value_name = "FILE.html|-", default_value = "report.html")]
    pub output: PathBuf,

    /// Also draw what daemons did over time, from the directory that `benchkv --trace DIR` wrote.
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,

    /// Only find out whether the files can be read, and are of jobs that were not interrupted; no page is written.
    #[arg(long)]
    pub check: bool,
}

impl ReportArgs {
    /// The file that becomes the page; `None`: there is none, or it goes to standard output.
    #[must_use]
    pub fn page(&self) -> Option<&Path> {
        (!self.check && self.output != Path::new("-")).then_some(&self.output)
    }
}

/// What `--backend` asks for: which way requests take, and by some names what carries them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// Client to daemon by ipc, by flux to the daemon that owns the connection, by the carrier to the peer.
    Meta,
    /// Client to daemon 0 through one shared ring, by the carrier to the peer.
    Delegation,
    /// Client to the daemon of the key's number through its ring, by the carrier to the daemon of that number, which owns the key.
    Sharded,
    /// Client by the carrier to the daemon that owns the key: a connection for each client and remote daemon.
    Direct,
    /// delegation by the carrier rc-send.
    RcSend,
    /// delegation by the carrier ucx-am.
    UcxAm,
    /// direct by the carrier copyrpc.
    CopyrpcDirect,
    /// direct by the carrier ucx-am.
    Ucx,
}

impl BackendKind {
    /// Which way requests take, and what carries them between ranks if the name says it.
    #[must_use]
    pub const fn axes(self) -> (Routing, Option<Transport>) {
        match self {
            Self::Meta => (Routing::Meta, None),
            Self::Delegation => (Routing::Delegation, None),
            Self::Sharded => (Routing::Sharded, None),
            Self::Direct => (Routing::Direct, None),
            Self::RcSend => (Routing::Delegation, Some(Transport::RcSend)),
            Self::UcxAm => (Routing::Delegation, Some(Transport::UcxAm)),
            Self::CopyrpcDirect => (Routing::Direct, Some(Transport::Copyrpc)),
            Self::Ucx => (Routing::Direct, Some(Transport::UcxAm)),
        }
    }
}

/// What `--mix` stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mix {
    /// Session store: half reads, half writes.
    #[value(alias = "a")]
    YcsbA,
    /// Photo tags: 95 % reads.
    #[value(alias = "b")]
    YcsbB,
    /// User profiles: reads alone.
    #[value(alias = "c")]
    YcsbC,
}

impl JobArgs {
    /// The same with what `--mix` stands for in its place.
    #[must_use]
    pub fn with_mix(self) -> Self {
        let read_ratio = match self.mix {
            None => return self,
            Some(Mix::YcsbA) => 0.5,
            Some(Mix::YcsbB) => 0.95,
            Some(Mix::YcsbC) => 1.0,
        };
        Self { mix: None, read_ratio, distribution: Distribution::Zipfian { theta: 0.99 }, preload: true, ..self }
    }
}

/// What `--clients` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientKind {
    /// Threads of the rank process.
    Threads,
    /// Children of the rank process.
    Processes,
}

/// What `--wait` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WaitChoice {
    /// Busy where every thread has a core of its own, else yield.
    Auto,
    /// Poll without pause.
    Busy,
    /// Give the core away.
    Yield,
    /// Sleep until there is something to do.
    Event,
}

/// What `--fault` breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Rank 0 flips one bit of one value it writes.
    CorruptValue,
}

/// What `--ring-size` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingChoice {
    /// By the rule of [`engine::job::Sizes`].
    Auto,
    /// This many bytes.
    Bytes(u64),
}

impl RingChoice {
    /// The bytes, if they are given.
    #[must_use]
    pub const fn bytes(self) -> Option<u64> {
        match self {
            Self::Auto => None,
            Self::Bytes(bytes) => Some(bytes),
        }
    }
}

impl std::str::FromStr for RingChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            size => units::bytes(size)
                .map(Self::Bytes)
                .map_err(|_| "use auto, or a number of bytes that is a power of two, such as 64K".to_owned()),
        }
    }
}

macro_rules! named_by_value_enum {
    ($($name:ty),*) => {$(
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&engine::transport::name_of(self))
            }
        }
    )*};
}

named_by_value_enum!(ClientKind, WaitChoice, Fault, PeerErrorsChoice);

#[cfg(test)]
mod tests {
    use harness::device::SoftDevice;

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

    /// What clap takes from the comments of items is written for rustdoc, too.
    #[test]
    fn help_has_no_links_of_rustdoc() {
        let mut command = Cli::command();
        command.build();
        let helps = command.get_subcommands().cloned().chain([command.clone()]).map(|mut command| command.render_long_help().to_string());
        for help in helps {
            assert!(!help.contains("[`") && !help.contains("::"), "{help}");
        }
    }

    #[test]
    fn the_short_help_leaves_out_what_few_need() {
        let [short, long] = [Cli::command().render_help(), Cli::command().render_long_help()].map(|help| help.to_string());
        for (flag, is_short) in
            [("--backend", true), ("--duration", true), ("--ops", true), ("--traffic-class", false), ("--flush-every", false)]
        {
            assert_eq!((short.contains(flag), long.contains(flag)), (is_short, true), "{flag}");
        }
        assert!(!["--verify", "--batch-hold-us", "--adaptive-budget"].iter().any(|alias| long.contains(alias)), "aliases");
        let (_, traces) = long.split_once("\nTraces:\n").unwrap();
        assert!(traces.contains("--trace-interval") && !traces.contains("--json"), "what is no trace is not under that heading: {traces}");
    }

    #[test]
    fn a_run_needs_no_argument() {
        let cli = parse("").unwrap();
        assert_eq!((cli.job.backend, cli.job.ranks, cli.job.verify), (BackendKind::Delegation, None, true));
        assert!(cli.job.warmup + cli.job.runs as f64 * cli.job.duration < 10.0, "the default run has to end within 15 s with its set-up");
    }

    #[test]
    fn short_options_and_units_mean_the_same_as_long_ones() {
        let cli = parse("-n 4 -d 8 -t 500ms --warmup 20ms --ring-size 64K --memory-limit 2G").unwrap();
        assert_eq!(
            (cli.job.ranks, cli.job.queue_depth, cli.job.ring_size, cli.job.memory_limit),
            (Some(4), 8, RingChoice::Bytes(65_536), Some(2 << 30))
        );
        assert!((cli.job.duration - 0.5).abs() < 1e-12 && (cli.job.warmup - 0.02).abs() < 1e-12);
        let long = parse("--ranks 4 --queue-depth 8 --duration 0.5 --warmup 0.02 --ring-size 65536 --memory-limit 2147483648").unwrap();
        assert_eq!(
            (long.job.ranks, long.job.queue_depth, long.job.ring_size, long.job.memory_limit),
            (cli.job.ranks, 8, cli.job.ring_size, cli.job.memory_limit)
        );
        assert!((long.job.duration - cli.job.duration).abs() < 1e-12 && (long.job.warmup - cli.job.warmup).abs() < 1e-12);
    }

    #[test]
    fn a_number_of_operations_and_a_length_of_time_exclude_each_other() {
        assert_eq!(parse("--ops 7").unwrap().job.ops, Some(7));
        for time in ["--duration 1", "--runs 2", "--warmup 0"] {
            assert_eq!(parse(&format!("--ops 7 {time}")).unwrap_err().exit_code(), 2);
        }
    }

    #[test]
    fn a_mix_is_a_shorthand_and_excludes_what_it_stands_for() {
        for (mix, reads) in [("ycsb-a", 0.5), ("b", 0.95), ("ycsb-c", 1.0)] {
            let workload = resolve(&format!("--mix {mix} --value-size 1000")).job.workload;
            let same = resolve(&format!("--read-ratio {reads} --distribution zipfian --preload --value-size 1000")).job.workload;
            assert_eq!(format!("{workload:?}"), format!("{same:?}"), "{mix}");
        }
        for args in ["--mix ycsb-a --read-ratio 1", "--mix c --distribution uniform", "--mix ycsb-e"] {
            assert_eq!(parse(args).unwrap_err().exit_code(), 2, "{args}");
        }
    }

    #[test]
    fn verify_is_a_flag_that_can_be_turned_off() {
        let verifies = |args: &str| resolve(args).job.workload.verify;
        assert_eq!(["", "--no-verify", "--verify=false", "--no-verify --verify"].map(verifies), [true, false, false, true]);
        assert_eq!(["--verify=false --no-verify", "--verify --no-verify"].map(verifies), [false, false]);
        assert!(parse("--verify --json -").unwrap().job.json.is_some() && !parse("--verify false --json -").unwrap().job.verify);
    }

    #[test]
    fn devices_are_named_as_they_are_printed() {
        let verbs = |name: Option<&str>, port| DeviceChoice::Verbs { name: name.map(str::to_owned), port };
        for (text, device) in [
            ("auto", DeviceChoice::Auto),
            ("soft", DeviceChoice::Soft(SoftDevice::default())),
            ("soft:rtt_us=6", DeviceChoice::Soft(SoftDevice { rtt_ns: 6000, ..SoftDevice::default() })),
            ("verbs", verbs(None, None)),
            ("mlx5_0", verbs(Some("mlx5_0"), None)),
            ("mlx5_1:2", verbs(Some("mlx5_1"), Some(2))),
            ("verbs:rocep3s0f1", verbs(Some("rocep3s0f1"), None)),
            ("verbs:ibp1s0:1", verbs(Some("ibp1s0"), Some(1))),
        ] {
            assert_eq!(parse(&format!("--device {text}")).unwrap().job.device, device);
            assert_eq!(device.to_string(), text);
        }
        for text in ["mlx5", "mlx5_0:", "mlx5_0:one", "verbs:", "mlx5_0:0", "mlx5_0:256"] {
            assert_eq!(parse(&format!("--device {text}")).unwrap_err().exit_code(), 2, "{text}");
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        for (args, known) in [
            ("--backend tcp", "meta, delegation, sharded, direct, rc-send, ucx-am, copyrpc-direct, ucx"),
            ("--wait sleep", "auto, busy, yield, event"),
            ("--clients fibres", "threads, processes"),
            ("--device eth0", "auto, soft[:KEY=VALUE,...], verbs, mlx5_N[:PORT]"),
            ("--device soft:rtt=6", "rtt=6: known are rtt_us, jitter_us, seed and fault"),
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
            "--ranks two",
            "--ranks -1",
            "--nonsense",
        ] {
            assert_eq!(parse(args).unwrap_err().exit_code(), 2, "{args}");
        }
    }
}
