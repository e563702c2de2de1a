//! From the command line to values that can be run: every range is checked, every `auto` is computed by the rule written here, and both
//! the launcher and each rank arrive at the same values from the same arguments.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use copyrpc::ring::{MAX_RING_SIZE, MIN_RING_SIZE};
use engine::backend::BackendError;
use engine::backend::plan::Site;
use engine::job::{Job, Sizes, least_ring};
use engine::pace::{Arrivals, Pace};
use engine::topology::{Routing, Topology, Transport};
use engine::ucx::PeerErrors;
use harness::affinity::{AffinityError, PinPolicy, Plan, Threads};
use harness::device::DeviceChoice;
use harness::hosts::{Hosts, HostsError};
use harness::launcher::Launch;
use harness::report::{self, JsonSink};
use mlx5::DeviceSpec;
use serde::{Deserialize, Serialize};
use shm::dir::Dir;
use shm::sleep::POLL_SLICE;
use shm::wait::WaitStrategy;
use thiserror::Error;

use crate::cli::{ClientKind, Fault, JobArgs, RingChoice, WaitChoice};
use crate::control::MAX_DAEMONS;
use crate::launcher::Launcher;
use crate::memory::{Memory, MemoryLimit, OverLimit};
use crate::output::file::OutputFile;
use crate::policies;
use crate::port::PortOptions;
use crate::range::{RangeError, range};
use crate::trace::TraceOptions;
use engine::drain;
use engine::policy::PolicyOptions;
use engine::values::{HEAD_BYTES, VALUE_BYTES};
use engine::workload::{Distribution, PATTERN_LEN, Workload};

/// Ranks that the local launcher starts unless told.
const DEFAULT_RANKS: usize = 2;
/// Most keys of a rank's store: 1 GiB of [`Shard`] tables.
const MAX_KEYS: u64 = 1 << 26;
/// Smallest and largest ring of a connection between ranks, those of copyrpc.
const RING_BYTES: std::ops::RangeInclusive<u64> = MIN_RING_SIZE..=MAX_RING_SIZE;
/// Shortest window, in seconds.
pub const SHORTEST_RUN_S: f64 = 0.01;
/// Longest window, in seconds; with `--ops` all have it.
const LONGEST_RUN_S: f64 = 3600.0;
/// Verified runs stay below this: a client would otherwise run out of 32-bit sequence numbers (at 7 million writes per second).
const MAX_VERIFIED_SECONDS: f64 = 600.0;

/// An option cannot be honoured.
#[derive(Debug, Error)]
pub enum OptionError {
    /// A value cannot be honoured.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The cores cannot be used as asked.
    #[error("--pin: {0}")]
    Pin(#[from] AffinityError),
    /// The job would not fit.
    #[error(transparent)]
    Memory(#[from] OverLimit),
    /// The ranks' hosts cannot be found out.
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// A launcher has started another number of ranks.
    #[error("--ranks {given}: {started} were started; leave --ranks out, or have {given} started (mpirun -n {given})")]
    Ranks {
        /// What `--ranks` says.
        given: usize,
        /// How many there are.
        started: usize,
    },
    /// The software device does not connect hosts.
    #[error(
        "--device {device}: it connects the processes of one host, and the ranks are on {}: {}; name a device, such as mlx5_0, or start all \
         ranks on one host",
        .hosts.len(), .hosts.join(", ")
    )]
    SeveralHosts {
        /// The device.
        device: DeviceChoice,
        /// The hosts' names.
        hosts: Vec<String>,
    },
}

/// A job that can be run.
#[derive(Debug, Clone)]
pub struct Options {
    /// What is run.
    pub job: Job,
    /// What carries requests to other ranks, but for `ucx-am`.
    pub device: DeviceChoice,
    /// What is asked of its port.
    pub port: PortOptions,
    /// What its clients are.
    pub clients: ClientKind,
    /// Length of a measured run; with [`ops`](Job::ops) its maximum.
    pub duration: Duration,
    /// Load before the first run.
    pub warmup: Duration,
    /// What the ranks of this host will take of the memory.
    pub memory: Memory,
    /// Time series of the daemons, if they are wanted.
    pub trace: Option<TraceOptions>,
    /// What an idle thread does.
    pub wait: WaitStrategy,
    /// Who started the ranks, and where.
    pub launcher: Launcher,
    /// Where the ranks are, from which `launcher` and `plan` follow.
    pub hosts: Hosts,
    /// What `--pin` asks for.
    pub pin: PinPolicy,
    /// Where the threads of this host run.
    pub plan: Plan,
    /// Directory for shared memory; `None` is the user's own.
    pub shm_dir: Option<PathBuf>,
    /// Where the JSON document goes.
    pub json: Option<JsonSink>,
    /// Where the flat table goes.
    pub output: Option<OutputFile>,
    /// Where the percentiles go.
    pub hgrm: Option<PathBuf>,
    /// What the user calls the job.
    pub label: Option<String>,
    /// Whether rank 0 measures the Unix-socket echo first.
    pub echo: bool,
    /// What is broken on purpose.
    pub fault: Option<Fault>,
}

impl Options {
    /// Checks and computes everything, for ranks that this process starts. Reads the affinity mask; changes nothing.
    ///
    /// # Errors
    /// The first option that cannot be honoured.
    pub fn resolve(cli: impl Into<JobArgs>) -> Result<Self, OptionError> {
        let cli = cli.into();
        let ranks = cli.ranks.unwrap_or(DEFAULT_RANKS);
        check_count("--ranks", ranks as u64, Launch::MAX_RANKS as u64, "a job needs a rank")?;
        Self::resolve_on(cli, &Hosts::one(ranks)?, None)
    }

    /// The same, for ranks that are started already, by an MPI launcher if its `library` is given.
    ///
    /// # Errors
    /// Likewise.
    pub fn resolve_on(cli: impl Into<JobArgs>, hosts: &Hosts, library: Option<String>) -> Result<Self, OptionError> {
        let (mut cli, ranks) = (cli.into().with_mix(), hosts.ranks());
        if let Some(given) = cli.ranks.filter(|given| *given != ranks) {
            return Err(OptionError::Ranks { given, started: ranks });
        }
        check_counts(&cli, ranks)?;
        let verify = cli.checks_values();
        if cli.ops.is_some() {
            (cli.runs, cli.warmup, cli.duration) = (1, 0.0, LONGEST_RUN_S);
        }
        let launcher = Launcher::new(library, hosts, cli.server_threads + cli.client_threads);
        check_times(&cli)?;
        check_ratios(&cli, ranks)?;
        let (routing, transport) = axes(&cli)?;
        check_values(cli.value_size)?;
        check_ring(cli.ring_size, transport, cli.value_size as usize)?;
        let pace = cli.pace.resolve()?;
        if let Some(fault) = cli.fault.filter(|_| !verify) {
            return Err(range("--fault", fault, "nothing would notice it", "only with --verify".to_owned()).into());
        }
        let ucx_errors = cli.ucx.resolve(transport, &cli.device, &cli.port, launcher.hosts.len())?;
        let device = cli.device.resolve();
        cli.port.check(&device)?;
        if ucx_errors.is_none() && device.is_soft() && launcher.hosts.len() > 1 {
            return Err(OptionError::SeveralHosts { device, hosts: launcher.hosts });
        }
        let workload = Workload {
            ranks,
            clients: cli.client_threads,
            key_range: cli.key_range,
            value_bytes: cli.value_size as usize,
            preload: cli.preload,
            read_ratio: cli.read_ratio,
            remote_ratio: cli.remote_ratio.unwrap_or((ranks - 1) as f64 / ranks as f64),
            distribution: cli.distribution,
            verify,
            seed: cli.seed,
            accesses: PATTERN_LEN,
        };
        let topology = Topology { routing, transport, ranks, daemons: cli.server_threads, clients: cli.client_threads };
        let policies = cli.policies.resolved();
        policies::check(&policies, &topology)?;
        cli.trace.check()?;
        let sizes = Sizes::compute(cli.ring_size.bytes(), &topology, cli.queue_depth, workload.value_bytes);
        let ranks_here = launcher.ranks_here.len();
        let memory = Memory::of_rank(&topology, &sizes, &workload, cli.queue_depth, cli.runs)
            .with_clients(cli.clients, &topology)
            .with_traces(cli.trace.trace.is_some(), &topology)
            .times(ranks_here);
        memory.check(MemoryLimit::new(cli.memory_limit))?;
        let threads = Threads { ranks: ranks_here, daemons: cli.server_threads, clients: cli.client_threads };
        let plan = Plan::new(&cli.pin, hosts.cores_here(cli.server_threads + cli.client_threads), threads)?;
        let wait = match cli.wait {
            WaitChoice::Busy => WaitStrategy::Busy,
            WaitChoice::Yield => WaitStrategy::Yield,
            WaitChoice::Event => WaitStrategy::Event,
            WaitChoice::Auto => WaitStrategy::auto(threads.total(), plan.usable_cores.len()),
        };
        let job = Job {
            topology,
            queue_depth: cli.queue_depth,
            ops: cli.ops,
            pace,
            runs: cli.runs,
            workload,
            sizes,
            policies,
            ucx_errors,
            corrupts_value: cli.fault.is_some(),
        };
        Ok(Self {
            job,
            device,
            port: cli.port,
            clients: cli.clients,
            duration: Duration::from_secs_f64(cli.duration),
            warmup: Duration::from_secs_f64(cli.warmup),
            memory,
            trace: cli.trace.options(),
            wait,
            launcher,
            hosts: hosts.clone(),
            pin: cli.pin,
            plan,
            shm_dir: cli.shm_dir,
            json: cli.json,
            output: cli.output.output,
            hgrm: cli.hgrm,
            label: cli.label,
            echo: !cli.no_echo,
            fault: cli.fault,
        })
    }

    /// The device to open; software devices meet in `shm_dir`.
    #[must_use]
    pub fn device_spec(&self, shm_dir: &Path) -> DeviceSpec {
        self.port.on(self.device.spec(Some(shm_dir)))
    }

    /// Where `rank` is, its daemons in process `process`: opens the shared-memory directory.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the directory's reason.
    pub fn site(&self, rank: usize, process: u32) -> Result<Site, BackendError> {
        let dir = Dir::open(self.shm_dir.as_deref()).map_err(|e| BackendError::setup("the shared-memory directory", e))?;
        Ok(Site { rank, process, device: self.device_spec(dir.path()), dir })
    }

    /// What carries requests to other ranks, as it can be asked for; UCX chooses by itself.
    fn carried_by(&self) -> String {
        self.job.topology.transport.traits().library.map_or_else(|| self.device.to_string(), |library| library.name.to_owned())
    }

    /// How long the job may take: what it measures, and ample time to set up and tear down on a loaded machine.
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.warmup + self.duration * self.job.runs as u32 + Duration::from_secs(60) + drain::LONGEST + self.longest_hold()
    }

    /// Maximum time for which a policy holds requests back: until the last of a daemon's connections may send its first.
    #[must_use]
    pub fn longest_hold(&self) -> Duration {
        let stagger = Duration::from_secs_f64(self.job.policies.initial_stagger_us.unwrap_or(0.0) / 1e6);
        stagger * self.job.workload.ranks as u32
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Job { workload, sizes, topology, queue_depth, .. } = &self.job;
        writeln!(
            f,
            "backend {}, carrier {}, {} device, {} x ({} + {}), depth {}",
            topology.routing,
            topology.transport,
            self.carried_by(),
            report::plural(workload.ranks, "rank"),
            report::plural(topology.daemons, "daemon"),
            report::plural(workload.clients, "client"),
            queue_depth
        )?;
        writeln!(
            f,
            "keys {} per rank ({}){}, values of {} B, {}, {:.0} % reads, {:.0} % remote, seed {}, verify {}",
            workload.store_keys(),
            report::bytes(workload.store_bytes()),
            if workload.preload { ", preloaded" } else { "" },
            workload.value_bytes,
            workload.distribution,
            workload.read_ratio * 100.0,
            workload.remote_ratio * 100.0,
            workload.seed,
            if workload.verify { "on" } else { "off" }
        )?;
        let connection = match sizes.window {
            0 => format!("ring {}", report::bytes(sizes.ring_bytes)),
            window => format!("window {window} requests"),
        };
        writeln!(
            f,
            "{connection}, delegation ring {} slots, flux {} in flight, wait {}",
            sizes.ring_slots, sizes.flux_in_flight, self.wait
        )?;
        let is_hardware = matches!(self.device, DeviceChoice::Verbs { .. });
        if self.wait == WaitStrategy::Event && (is_hardware || topology.transport.traits().library.is_some()) {
            writeln!(f, "threads with connections sleep for {POLL_SLICE:?} at most: what other ranks send does not wake them")?;
        }
        if self.port != PortOptions::default() {
            writeln!(f, "port: {}", self.port)?;
        }
        if let Some(errors) = self.job.ucx_errors {
            writeln!(f, "errors of UCX's endpoints: {errors}")?;
        }
        if self.job.policies != PolicyOptions::default() {
            writeln!(f, "policies: {}", self.job.policies)?;
        }
        if let Some(trace) = &self.trace {
            writeln!(f, "traces to {}, a sample every {} rounds", trace.dir.display(), trace.interval)?;
        }
        if self.clients == ClientKind::Processes {
            writeln!(f, "each client is a process of its own")?;
        }
        if let Some(Pace { rate, arrivals }) = self.job.pace {
            writeln!(f, "open loop: {} of all clients together, {arrivals} arrivals", report::rate(rate))?;
        }
        writeln!(f, "{}", self.memory)?;
        writeln!(f, "{}\n{}", self.launcher, self.plan)?;
        let (warmup, runs, duration) = (self.warmup, self.job.runs, self.duration);
        match self.job.ops {
            Some(ops) => write!(f, "{} of each client", report::plural(ops as usize, "operation")),
            None => write!(f, "warm-up {warmup:?}, {} of {duration:?}", report::plural(runs, "run")),
        }
    }
}

fn check_count(flag: &'static str, given: u64, limit: u64, need: &'static str) -> Result<(), RangeError> {
    match given {
        0 => Err(range(flag, given, need, format!("1 to {limit}"))),
        _ if given > limit => Err(range(flag, given, "more than is supported", format!("1 to {limit}"))),
        _ => Ok(()),
    }
}

fn check_counts(cli: &JobArgs, ranks: usize) -> Result<(), RangeError> {
    let counts = [
        ("--server-threads", cli.server_threads as u64, MAX_DAEMONS as u64, "a rank needs a daemon to hold its keys"),
        ("--client-threads", cli.client_threads as u64, 256, "a rank needs a client to make requests"),
        ("--queue-depth", cli.queue_depth as u64, 4096, "a client needs an operation outstanding"),
        ("--runs", cli.runs as u64, 32, "a result needs a run"),
        ("--key-range", cli.key_range, MAX_KEYS, "a store needs a key"),
        ("--ops", cli.ops.unwrap_or(1), u32::MAX.into(), "a client needs an operation to issue"),
    ];
    for (flag, given, limit, need) in counts {
        check_count(flag, given, limit, need)?;
    }
    let clients = ranks * cli.client_threads;
    if cli.checks_values() && clients > usize::from(u16::MAX) {
        let what = "with --ranks it makes more clients than 16 bits can number in a verified value";
        return Err(range("--client-threads", cli.client_threads, what, "fewer clients, or --no-verify".to_owned()));
    }
    Ok(())
}

fn check_times(cli: &JobArgs) -> Result<(), RangeError> {
    for (flag, given, least) in [("--duration", cli.duration, SHORTEST_RUN_S), ("--warmup", cli.warmup, 0.0)] {
        if !(least..=LONGEST_RUN_S).contains(&given) {
            return Err(range(flag, given, "outside what is supported", format!("{least} to {LONGEST_RUN_S} seconds")));
        }
    }
    let total = cli.warmup + cli.duration * cli.runs as f64;
    if cli.checks_values() && cli.ops.is_none() && total > MAX_VERIFIED_SECONDS {
        let what = "with --runs and --warmup it is too long for the 32-bit sequence numbers of --verify";
        return Err(range("--duration", cli.duration, what, format!("{MAX_VERIFIED_SECONDS} seconds in all, or --no-verify")));
    }
    Ok(())
}

fn check_ratios(cli: &JobArgs, ranks: usize) -> Result<(), RangeError> {
    for (flag, given) in [("--read-ratio", Some(cli.read_ratio)), ("--remote-ratio", cli.remote_ratio)] {
        if let Some(given) = given.filter(|given| !(0.0..=1.0).contains(given)) {
            return Err(range(flag, given, "a share lies between none and all", "0 to 1".to_owned()));
        }
    }
    match cli.remote_ratio {
        Some(given) if given > 0.0 && ranks == 1 => {
            Err(range("--remote-ratio", given, "one rank has no other to talk to", "0, or --ranks of 2 and more".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Which way requests take, and what carries them.
fn axes(cli: &JobArgs) -> Result<(Routing, Transport), RangeError> {
    let (routing, named) = cli.backend.axes();
    match (named, cli.carrier) {
        (Some(named), Some(given)) if named != given => {
            Err(range("--carrier", given, "the name of this --backend says another", format!("none, or --backend {routing}")))
        }
        (named, given) => Ok((routing, given.or(named).unwrap_or(Transport::Copyrpc))),
    }
}

fn check_values(given: u64) -> Result<(), RangeError> {
    let (least, most) = (*VALUE_BYTES.start() as u64, *VALUE_BYTES.end() as u64);
    match given {
        _ if given < least => {
            Err(range("--value-size", given, "too small for its writer, sequence and hash", format!("{least} to {most} bytes")))
        }
        _ if given > most => Err(range("--value-size", given, "more than is supported", format!("{least} to {most} bytes"))),
        _ => Ok(()),
    }
}

fn check_ring(ring: RingChoice, transport: Transport, value_bytes: usize) -> Result<(), RangeError> {
    let RingChoice::Bytes(given) = ring else { return Ok(()) };
    let least = least_ring(value_bytes).max(*RING_BYTES.start());
    let legal = format!("auto, or a power of two from {least} to {}", RING_BYTES.end());
    match given {
        _ if transport.traits().is_by_message => {
            Err(range("--ring-size", given, "messages of this --carrier are not written into rings", "none; leave it out".to_owned()))
        }
        _ if given < *RING_BYTES.start() => Err(range("--ring-size", given, "too small to hold a batch", legal)),
        _ if given < least => Err(range("--ring-size", given, "too small for a message with a value of --value-size", legal)),
        _ if given > *RING_BYTES.end() => Err(range("--ring-size", given, "more than is supported", legal)),
        _ if !given.is_power_of_two() => Err(range("--ring-size", given, "not a power of two", legal)),
        _ => Ok(()),
    }
}

/// What was asked for, as recorded in a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    /// What the user called the job.
    pub label: Option<String>,
    /// What carried requests to other ranks, as it can be asked for.
    pub device: String,
    /// What was asked of its port; null where nothing was.
    #[serde(flatten)]
    pub port: PortOptions,
    /// Whether UCX noticed dead peers; null with other carriers than `ucx-am`.
    pub ucx_errors: Option<PeerErrors>,
    /// Operations that each client was to issue in all; null where time was the measure.
    pub ops: Option<u64>,
    /// Seconds of a measured run; with `ops` its maximum.
    pub duration_s: f64,
    /// Seconds of load before the first.
    pub warmup_s: f64,
    /// Measured runs.
    pub runs: usize,
    /// Shared keys of each rank.
    pub key_range: u64,
    /// Bytes of a value.
    #[serde(default = "eight")]
    pub value_size: usize,
    /// Whether every shared key had a value before the first access.
    #[serde(default)]
    pub preload: bool,
    /// Share of shared accesses that read.
    pub read_ratio: f64,
    /// Share of accesses that go to another rank.
    pub remote_ratio: f64,
    /// How keys were chosen.
    pub distribution: Distribution,
    /// Whether values were checked.
    pub verify: bool,
    /// What clients were.
    pub clients: ClientKind,
    /// What daemons and connections left for later.
    #[serde(flatten)]
    pub policies: PolicyOptions,
    /// Where time series of the daemons went, if they were wanted.
    pub trace: Option<TraceOptions>,
    /// Operations per second that all clients together were to start; null for a closed loop.
    pub rate: Option<f64>,
    /// How their starts were to be spread; null for a closed loop.
    pub arrivals: Option<Arrivals>,
    /// What an idle thread did: `busy`, `yield`.
    pub wait: String,
    /// What `--pin` asked for.
    pub pin: String,
    /// Directory for shared memory, if one was named.
    pub shm_dir: Option<PathBuf>,
    /// What was broken on purpose.
    pub fault: Option<Fault>,
}

/// Size of the values of results that do not say it.
const fn eight() -> usize {
    HEAD_BYTES
}

impl From<&Options> for Recorded {
    fn from(options: &Options) -> Self {
        let job = &options.job;
        let workload = &job.workload;
        Self {
            label: options.label.clone(),
            device: options.carried_by(),
            port: options.port,
            ucx_errors: job.ucx_errors,
            policies: job.policies.clone(),
            trace: options.trace.clone(),
            ops: job.ops,
            duration_s: options.duration.as_secs_f64(),
            warmup_s: options.warmup.as_secs_f64(),
            runs: job.runs,
            key_range: workload.key_range,
            value_size: workload.value_bytes,
            preload: workload.preload,
            read_ratio: workload.read_ratio,
            remote_ratio: workload.remote_ratio,
            distribution: workload.distribution,
            verify: workload.verify,
            clients: options.clients,
            rate: job.pace.map(|pace| pace.rate),
            arrivals: job.pace.map(|pace| pace.arrivals),
            wait: options.wait.to_string(),
            pin: options.pin.to_string(),
            shm_dir: options.shm_dir.clone(),
            fault: options.fault,
        }
    }
}

#[cfg(test)]
mod tests;
