//! The options of a job. A field declares an option: its flag, its help text and its name in the
//! `options` of the result. A field that clap skips is computed from other fields. An option that
//! serde skips is in another field of the result, or not in the result. Groups of options are
//! declared by the part that uses them: [`Workload`], [`PaceArgs`], [`PortOptions`],
//! [`PolicyOptions`], [`TraceArgs`]. The declaration of an option checks the range of its value;
//! [`crate::options`] checks combinations of options.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use benchkv_harness::affinity::PinPolicy;
use benchkv_harness::launch::launcher::Launch;
use benchkv_harness::range::{RangeError, decimal, range, time, whole};
use benchkv_harness::report::JsonSink;
use benchkv_harness::units;
use clap::{Args, ValueEnum};
use copyrpc_shm::wait::WaitStrategy;
use serde::{Deserialize, Serialize};

use super::sweep::Sweep;
use crate::devices::Devices;
use crate::output::OutputArgs;
use crate::pace::PaceArgs;
use crate::port::PortOptions;
use crate::trace::{TraceArgs, TraceOptions};
use crate::ucx::{PeerErrorsChoice, UcxArgs};
use engine::carrier::Feature;
use engine::policy::PolicyOptions;
use engine::topology::{Backend, Carrier};
use engine::ucx::PeerErrors;
use engine::workload::{Distribution, SHARE, Workload};

const RANKS: RangeInclusive<usize> = 1..=Launch::MAX_RANKS;
const DAEMONS: RangeInclusive<usize> = 1..=64;
const CLIENTS: RangeInclusive<usize> = 1..=256;
const DEPTHS: RangeInclusive<usize> = 1..=4096;
const RUNS: RangeInclusive<usize> = 1..=32;
const OPS: RangeInclusive<u64> = 1..=u32::MAX as u64;
/// Minimum length of a window, in seconds.
pub(crate) const SHORTEST_RUN_S: f64 = 0.01;
/// Maximum length of a window, of the warm-up and of `--report-interval`, in seconds. With `--ops`
/// it is the maximum length of the only window.
const LONGEST_RUN_S: f64 = 3600.0;
/// Minimum `--report-interval`, in seconds: the main thread checks a hundred times a second whether
/// an interval has ended.
const SHORTEST_INTERVAL_S: f64 = 0.1;
/// Maximum length of the warm-up and all runs of a verified job, in seconds. A verified value has a
/// 32-bit sequence number; a client with 7 million writes per second uses all of them in 613 s.
const MAX_VERIFIED_SECONDS: f64 = 600.0;

/// The options of a job, and the destinations of its result.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
pub struct JobArgs {
    /// Route: meta, delegation, sharded, direct
    ///
    /// meta: by ipc to the key's daemon, by flux to the daemon with the connection. delegation:
    /// through the ring of daemon 0. sharded: through the ring of the key's daemon. direct: a
    /// connection for each client and remote daemon. rc-send and ucx-am are delegation by that
    /// carrier, copyrpc-direct is direct by copyrpc.
    #[arg(help_heading = "Load", long, value_enum, hide_possible_values = true, default_value_t = BackendKind::Delegation)]
    #[serde(skip)]
    pub backend: BackendKind,

    /// Carrier of messages between ranks: copyrpc, rc-send, ucx-am
    ///
    /// It works with any --backend [default: copyrpc, or the carrier in the name of the --backend].
    #[arg(help_heading = "Load", long, value_enum, hide_possible_values = true)]
    #[serde(skip)]
    pub carrier: Option<Carrier>,

    /// Rank processes to start, 1 to 256 [default: 2]
    ///
    /// Under mpirun there are as many as it started, up to 1024.
    #[arg(help_heading = "Placement", short = 'n', long, value_name = "N", value_parser = whole(RANKS))]
    #[serde(skip)]
    pub ranks: Option<usize>,

    /// RDMA device: auto, soft, or mlx5_0
    ///
    /// auto, soft (with KEY=VALUE,... after a colon), verbs, mlx5_N, mlx5_N:PORT, or a list of the
    /// last two: soft is the software device. Hardware is named by the device with an optional port
    /// (mlx5_0, mlx5_0:1, rxe0, verbs:NAME for other names, relay:NAME through libibverbs), or
    /// verbs for the first mlx5 device with an active port on each host. auto takes the first mlx5
    /// device with an active port, otherwise soft, or the device that the environment variable
    /// COPYRPC_DEVICE names; the plan and the result say which, and why. Of a list of named
    /// devices, daemon and client number K open device K modulo its length. Keys of soft: rtt_us=US
    /// (0 to 100000 [default: 0]), the time of a request and its response; jitter_us=US (the same
    /// range), the extra delay of every second operation; seed=N [default: 1]; fault=rnr:PERMILLE,
    /// fault=reorder:PERMILLE, fault=drop:OPERATION. soft:roce=ADDRESS[/BITS] is the software
    /// device with a port for packets, which connects hosts without a NIC. ADDRESS is the address
    /// of each host, or with /BITS its network; the keys of docs/between-hosts.md can follow.
    #[arg(help_heading = "Device", long, value_name = "DEVICE", default_value_t = Devices::default())]
    #[serde(skip)]
    pub device: Devices,

    /// The carrier of requests to other ranks: the device in the form in which it is typed (for
    /// `auto`, the chosen device), or the library that chooses a device.
    #[arg(skip)]
    #[serde(rename = "device")]
    pub carried_by: String,

    /// Why `auto` took the device; null if the device was named.
    #[arg(skip)]
    pub device_by_auto: Option<String>,

    /// Options of the connections' ports.
    #[command(flatten)]
    #[serde(flatten)]
    pub port: PortOptions,

    /// Features of mlx5 devices that are off by default; those that the carrier has no use for are
    /// refused.
    #[arg(
        help_heading = "Device",
        long,
        hide_short_help = true,
        value_enum,
        value_name = "FEATURE,...",
        value_delimiter = ','
    )]
    #[serde(default)]
    pub mlx5: Vec<Feature>,

    /// Options of the carrier ucx-am.
    #[command(flatten)]
    #[serde(skip)]
    pub ucx: UcxArgs,

    /// Whether UCX detects dead peers; null with other carriers.
    #[arg(skip)]
    pub ucx_errors: Option<PeerErrors>,

    /// Daemon threads of each rank, 1 to 64
    ///
    /// Each owns one shard of the rank's store.
    #[arg(help_heading = "Placement", long, value_name = "N", value_parser = whole(DAEMONS), default_value_t = 1)]
    #[serde(skip)]
    pub server_threads: usize,

    /// Client threads of each rank, 1 to 256
    #[arg(help_heading = "Placement", long, value_name = "N", value_parser = whole(CLIENTS), default_value_t = 1)]
    #[serde(skip)]
    pub client_threads: usize,

    /// Outstanding operations of a client, 1 to 4096
    #[arg(help_heading = "Load", short = 'd', long, value_name = "N", value_parser = whole(DEPTHS), default_value_t = 32)]
    #[serde(skip)]
    pub queue_depth: usize,

    /// The load.
    #[command(flatten)]
    #[serde(flatten)]
    pub pace: PaceArgs,

    /// Length of each measured run, 10ms to 1h
    ///
    /// A number without a unit is seconds.
    #[arg(help_heading = "Load", short = 't', long, value_name = "TIME", value_parser = time(SHORTEST_RUN_S..=LONGEST_RUN_S), default_value_t = 2.0)]
    #[serde(rename = "duration_s")]
    pub duration: f64,

    /// Operations of each client, in place of --duration
    ///
    /// 1 to 4294967295, in one run without a warm-up; the job ends when all have ended.
    #[arg(help_heading = "Load", long, value_name = "N", value_parser = whole(OPS), conflicts_with_all = ["duration", "runs", "warmup"])]
    pub ops: Option<u64>,

    /// Measured runs, 1 to 32; rates are their mean.
    #[arg(help_heading = "Load", long, hide_short_help = true, value_name = "N", value_parser = whole(RUNS), default_value_t = 3)]
    pub runs: usize,

    /// Loads, one for each run, in this order: with depth, the number of outstanding operations of
    /// each client, up to --queue-depth; with clients, the number of clients of each rank that have
    /// operations outstanding, up to --client-threads. A sweep up and down shows whether the state
    /// of a job depends on its earlier loads.
    #[arg(help_heading = "Load", long, hide_short_help = true, value_name = "depth|clients=N,N,...", conflicts_with_all = ["runs", "ops", "rate"])]
    pub sweep: Option<Sweep>,

    /// Load before the first run, 0 to 1h, in the units of --duration.
    #[arg(help_heading = "Load", long, hide_short_help = true, value_name = "TIME", value_parser = time(0.0..=LONGEST_RUN_S), default_value_t = 0.5)]
    #[serde(rename = "warmup_s")]
    pub warmup: f64,

    /// The load's operations and values.
    #[command(flatten)]
    #[serde(flatten)]
    pub workload: Workload,

    /// A mix of YCSB: ycsb-a (half of the operations read), ycsb-b (95 %) or ycsb-c (all), with
    /// keys by zipfian:0.99. YCSB's records have 1000 bytes: --value-size 1000. Its other mixes
    /// insert, scan, or read and write in one operation, which benchkv does not support.
    #[arg(help_heading = "Load", long, hide_short_help = true, value_enum, conflicts_with_all = ["read_ratio", "distribution", "empty"])]
    #[serde(skip)]
    pub mix: Option<Mix>,

    /// Share of operations that go to another rank, 0 to 1 [default: all ranks alike, (ranks - 1) /
    /// ranks].
    #[arg(help_heading = "Load", long, hide_short_help = true, value_name = "RATIO", value_parser = decimal(SHARE))]
    #[serde(skip)]
    pub remote_ratio: Option<f64>,

    /// Bytes of each ring of a connection between ranks: a power of two, 4K to 256M, or auto. The
    /// carriers rc-send and ucx-am have none.
    #[arg(
        help_heading = "Placement",
        long,
        hide_short_help = true,
        value_name = "BYTES",
        default_value = "auto"
    )]
    #[serde(skip)]
    pub ring_size: RingChoice,

    /// Maximum expected memory of the ranks of this host together, in bytes; a job that needs more
    /// is refused [default: the host's memory, or the limit of its control group if that is less].
    #[arg(help_heading = "Placement", long, hide_short_help = true, value_name = "BYTES", value_parser = units::bytes)]
    #[serde(skip)]
    pub memory_limit: Option<u64>,

    /// Action of a thread without work: poll again (busy), yield the core (yield), or sleep until
    /// there is work (event). auto is busy if every thread has a core, else yield.
    #[arg(help_heading = "Placement", long, hide_short_help = true, value_enum, default_value_t = WaitChoice::Auto)]
    pub wait: WaitChoice,

    /// Cores of the threads: auto pins if every thread can have its own, none never pins, or a list
    /// such as 0-3,8.
    #[arg(help_heading = "Placement", long, hide_short_help = true, value_name = "POLICY", default_value_t = PinPolicy::Auto)]
    #[serde(with = "benchkv_harness::as_text")]
    pub pin: PinPolicy,

    /// Directory for shared memory [default: one of this user in /dev/shm].
    #[arg(
        help_heading = "Placement",
        long,
        hide_short_help = true,
        value_name = "DIR"
    )]
    pub shm_dir: Option<PathBuf>,

    /// Do not check the values read. The check costs a few nanoseconds per operation, and 1 in 16
    /// operations goes to private keys of the client.
    #[arg(help_heading = "Data", long, hide_short_help = true)]
    #[serde(skip)]
    pub no_verify: bool,

    /// A text that the table, the result and the report show with the job.
    #[arg(
        help_heading = "Result",
        long,
        hide_short_help = true,
        value_name = "TEXT"
    )]
    pub label: Option<String>,

    /// Also write the result as JSON to a file, or with - to standard output
    ///
    /// With - the table goes to standard error.
    #[arg(help_heading = "Result", long, value_name = "FILE")]
    #[serde(skip)]
    pub json: Option<JsonSink>,

    /// Where results go.
    #[command(flatten)]
    #[serde(skip)]
    pub output: OutputArgs,

    /// Print a line on standard error for each interval of this length while the job runs, 100ms to
    /// 1h [default: none]: the time since load began, the operations that ended in it on rank 0,
    /// their rate, and their mean time from issue to end. Other ranks print none: they would have
    /// to send their counts during the measurement.
    #[arg(help_heading = "Result", long, hide_short_help = true, value_name = "TIME", value_parser = time(SHORTEST_INTERVAL_S..=LONGEST_RUN_S))]
    #[serde(skip)]
    pub report_interval: Option<f64>,

    /// Inject a fault, for tests.
    #[arg(long, value_enum, hide = true)]
    pub fault: Option<Fault>,

    // These two groups are last, because each sets a heading of the help, which would extend to all
    // options after the group.
    /// Policies of daemons and connections.
    #[command(flatten)]
    #[serde(flatten)]
    pub policies: PolicyOptions,

    /// Time series of the daemons.
    #[command(flatten)]
    #[serde(skip)]
    pub trace: TraceArgs,

    /// Directory and interval of the time series of `--trace`; null without it.
    #[arg(skip)]
    #[serde(rename = "trace")]
    pub traced: Option<TraceOptions>,
}

impl JobArgs {
    /// Returns the options as results keep them and read them back.
    ///
    /// # Errors
    /// The options cannot be encoded.
    pub fn recorded(&self) -> Result<Self, serde_json::Error> {
        serde_json::to_value(self).and_then(serde_json::from_value)
    }

    /// Checks whether verified values can number all clients and operations of a job of `ranks`
    /// ranks.
    ///
    /// # Errors
    /// The option with too large a value.
    pub fn check(&self, ranks: usize) -> Result<(), RangeError> {
        if self.no_verify {
            return Ok(());
        }
        if ranks * self.client_threads > usize::from(u16::MAX) {
            let what =
                "with --ranks it makes more clients than 16 bits can number in a verified value";
            let legal = "fewer clients, or --no-verify".to_owned();
            return Err(range("--client-threads", self.client_threads, what, legal));
        }
        let total = self.warmup + self.duration * self.runs as f64;
        if self.ops.is_none() && total > MAX_VERIFIED_SECONDS {
            let what = "with --runs and --warmup it is too long for the 32-bit sequence numbers of verified values";
            let legal = format!("{MAX_VERIFIED_SECONDS} seconds in all, or --no-verify");
            return Err(range("--duration", self.duration, what, legal));
        }
        Ok(())
    }

    /// Returns the path of requests, and their carrier.
    ///
    /// # Errors
    /// `--backend` and `--carrier` name two carriers.
    pub fn axes(&self) -> Result<(Backend, Carrier), RangeError> {
        let (backend, named) = self.backend.axes();
        match (named, self.carrier) {
            (Some(named), Some(given)) if named != given => {
                let why = "the name of this --backend says another";
                let legal = format!("no value, or --backend {backend}");
                Err(range("--carrier", given, why, legal))
            }
            (named, given) => Ok((backend, given.or(named).unwrap_or(Carrier::Copyrpc))),
        }
    }

    /// Sets the values that other options imply, in a job of `ranks` ranks: `--mix` sets the
    /// distribution and the share of reads, `--ops` sets one run without a warm-up, `--sweep` sets
    /// the number of runs, and values are verified without `--no-verify`. Without `--remote-ratio`
    /// each rank gets the same share.
    pub(crate) fn settle(&mut self, ranks: usize) {
        let workload = &mut self.workload;
        if let Some(mix) = self.mix.take() {
            workload.distribution = Distribution::Zipfian { theta: 0.99 };
            workload.read_ratio = match mix {
                Mix::YcsbA => 0.5,
                Mix::YcsbB => 0.95,
                Mix::YcsbC => 1.0,
            };
        }
        if self.ops.is_some() {
            (self.runs, self.warmup, self.duration) = (1, 0.0, LONGEST_RUN_S);
        }
        self.runs = self.sweep.as_ref().map_or(self.runs, Sweep::runs);
        workload.remote_ratio = self.remote_ratio.unwrap_or(Workload::even_ratio(ranks));
        workload.verify = !self.no_verify;
        (workload.ranks, workload.clients) = (ranks, self.client_threads);
        self.traced = self.trace.options();
    }
}

/// The values of `--backend`: the path of requests, and in some names their carrier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// Requests pass by ipc to the daemon of the key's number, by flux to the daemon that owns the
    /// connection, and by the carrier to the peer.
    Meta,
    #[default]
    /// Requests pass through one shared ring to daemon 0, and by the carrier to the peer.
    Delegation,
    /// Requests pass through a shared ring to the daemon of the key's number, and by the carrier to
    /// the daemon of that number, which owns the key.
    Sharded,
    /// Requests pass by the carrier straight to the daemon that owns the key. Each client has a
    /// connection to each remote daemon.
    Direct,
    /// `delegation` by the carrier rc-send.
    RcSend,
    /// `delegation` by the carrier ucx-am. The figures published as "ucx-am" are of `--backend
    /// direct --carrier ucx-am`.
    UcxAm,
    /// `direct` by the carrier copyrpc.
    CopyrpcDirect,
}

impl BackendKind {
    /// Returns the path of requests, and their carrier between ranks if the name has one.
    pub const fn axes(self) -> (Backend, Option<Carrier>) {
        match self {
            Self::Meta => (Backend::Meta, None),
            Self::Delegation => (Backend::Delegation, None),
            Self::Sharded => (Backend::Sharded, None),
            Self::Direct => (Backend::Direct, None),
            Self::RcSend => (Backend::Delegation, Some(Carrier::RcSend)),
            Self::UcxAm => (Backend::Delegation, Some(Carrier::UcxAm)),
            Self::CopyrpcDirect => (Backend::Direct, Some(Carrier::Copyrpc)),
        }
    }
}

/// The values of `--mix`.
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

/// The values of `--wait`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitChoice {
    /// Busy if every thread has a core of its own, else yield.
    Auto,
    /// Poll without pause.
    Busy,
    /// Yield the core.
    Yield,
    /// Sleep until there is work.
    Event,
}

/// The values of `--fault`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Rank 0 flips one bit of one value it writes.
    CorruptValue,
}

/// The values of `--ring-size`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RingChoice {
    #[default]
    /// Computed by [`engine::job::Sizes`].
    Auto,
    /// The given number of bytes.
    Bytes(u64),
}

impl WaitChoice {
    /// Returns the strategy that the option selects; `Auto` selects `auto`.
    pub(crate) const fn strategy(self, auto: WaitStrategy) -> WaitStrategy {
        match self {
            Self::Auto => auto,
            Self::Busy => WaitStrategy::Busy,
            Self::Yield => WaitStrategy::Yield,
            Self::Event => WaitStrategy::Event,
        }
    }
}

impl From<WaitStrategy> for WaitChoice {
    fn from(strategy: WaitStrategy) -> Self {
        match strategy {
            WaitStrategy::Busy => Self::Busy,
            WaitStrategy::Yield => Self::Yield,
            WaitStrategy::Event => Self::Event,
        }
    }
}

impl RingChoice {
    /// Returns the given number of bytes; `None` for `auto`.
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
            size => units::bytes(size).map(Self::Bytes).map_err(|_| {
                "use auto, or a number of bytes that is a power of two, such as 64K".to_owned()
            }),
        }
    }
}

macro_rules! named_by_value_enum {
    ($($name:ty),*) => {$(
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&engine::carrier::name_of(self))
            }
        }
    )*};
}

named_by_value_enum!(WaitChoice, Fault, PeerErrorsChoice);
