//! From the command line to values that can be run: every range is checked, every `auto` is computed by the rule written here, and both
//! the launcher and each rank arrive at the same values from the same arguments.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use copyrpc::ring::{MAX_RING_SIZE, MIN_RING_SIZE};
use harness::affinity::{AffinityError, PinPolicy, Plan, Threads};
use harness::device::DeviceChoice;
use harness::hosts::{Hosts, HostsError};
use harness::launcher::Launch;
use harness::report::{self, JsonSink};
use mlx5::DeviceSpec;
use serde::{Deserialize, Serialize};
use shm::sleep::POLL_SLICE;
use shm::wait::WaitStrategy;
use thiserror::Error;

use crate::backend::plan::{Routing, Topology, Transport};
use crate::cli::{BackendKind, Cli, ClientKind, Fault, RingChoice, WaitChoice};
use crate::control::MAX_DAEMONS;
use crate::drain;
use crate::launcher::Launcher;
use crate::memory::{Memory, MemoryLimit, OverLimit};
use crate::message::Request;
use crate::output::OutputFile;
use crate::pace::{Arrivals, Pace};
use crate::policy::PolicyOptions;
use crate::port::PortOptions;
use crate::store::Shard;
use crate::trace::TraceOptions;
use crate::ucx::PeerErrors;
use crate::workload::{Distribution, Workload};

/// Ranks that the local launcher starts unless told.
const DEFAULT_RANKS: usize = 2;
/// Most keys of a rank's store: 1 GiB of [`Shard`] tables.
const MAX_KEYS: u64 = 1 << 26;
/// Smallest and largest ring of a connection between ranks, those of copyrpc.
const RING_BYTES: std::ops::RangeInclusive<u64> = MIN_RING_SIZE..=MAX_RING_SIZE;
/// Shortest window, in seconds.
pub const SHORTEST_RUN_S: f64 = 0.01;
/// Verified runs stay below this: a client would otherwise run out of 32-bit sequence numbers (at 7 million writes per second).
const MAX_VERIFIED_SECONDS: f64 = 600.0;

/// An option cannot be honoured.
#[derive(Debug, Error)]
pub enum OptionError {
    /// A number is outside its range.
    #[error("{flag} {given}: {why}; legal is {legal}")]
    Range {
        /// The option.
        flag: &'static str,
        /// Its value as given.
        given: String,
        /// What is wrong with it.
        why: &'static str,
        /// The legal values, or what to do.
        legal: String,
    },
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

/// Sizes computed from the options; printed before the start and recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Bytes of each ring of a connection between ranks, 0 where there are none (`rc-send`, `ucx-am`). `auto`: the power of two not below 4 x
    /// operations in flight on it x padded message.
    pub ring_bytes: u64,
    /// Requests that each end may have unanswered on a connection of `rc-send` or `ucx-am`, 0 with other backends: the power of two not below
    /// all operations of the rank's clients, 16 to 1024, and fewer where a rank's connections would have more than 32768 together. What exceeds
    /// it waits in the daemon's backlog.
    pub window: usize,
    /// Words of the delegation ring: two for each client of the rank, as [`delegationrpc::ring_depth_for`] says.
    pub ring_slots: usize,
    /// Requests in flight on a flux channel: the power of two not below the operations of all ranks, 256 to 65536. What exceeds it waits in the daemon's backlog.
    pub flux_in_flight: usize,
    /// Slots of a flux channel: four times the requests in flight, at least 1024.
    pub flux_capacity: usize,
}

impl Sizes {
    fn compute(ring: RingChoice, topology: &Topology, queue_depth: usize) -> Self {
        let in_flight = topology.clients * queue_depth;
        // A client's own connection carries what that client has in flight, any other what all clients of the rank have.
        let in_flight_per_ring = if topology.routing == Routing::Direct { queue_depth } else { in_flight };
        // The header of 12 bytes is copyrpc's; messages are padded to 32.
        let padded_message = (12 + size_of::<Request>()).next_multiple_of(32);
        let ring_bytes = match ring {
            _ if topology.is_by_message() => 0,
            RingChoice::Bytes(bytes) => bytes,
            RingChoice::Auto => ((4 * in_flight_per_ring * padded_message) as u64).next_power_of_two().max(*RING_BYTES.start()),
        };
        let window = in_flight.next_power_of_two().min(1 << (32_768 / topology.ranks).ilog2()).clamp(16, 1024);
        let flux_in_flight = (topology.ranks * in_flight).next_power_of_two().clamp(256, 65_536);
        Self {
            ring_bytes,
            window: if topology.is_by_message() { window } else { 0 },
            ring_slots: delegationrpc::ring_depth_for(topology.clients),
            flux_in_flight,
            flux_capacity: (4 * flux_in_flight).max(1024),
        }
    }
}

/// A job that can be run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The topology.
    pub backend: BackendKind,
    /// What carries requests to other ranks, but for `ucx-am`.
    pub device: DeviceChoice,
    /// What is asked of its port.
    pub port: PortOptions,
    /// Whether UCX notices dead peers; `None` with other backends than `ucx-am`.
    pub ucx_errors: Option<PeerErrors>,
    /// Daemon threads per rank.
    pub server_threads: usize,
    /// What its clients are.
    pub clients: ClientKind,
    /// Operations each client keeps outstanding.
    pub queue_depth: usize,
    /// The open loop; `None`: closed.
    pub pace: Option<Pace>,
    /// Length of a measured run.
    pub duration: Duration,
    /// Measured runs.
    pub runs: usize,
    /// Load before the first run.
    pub warmup: Duration,
    /// Ranks, clients per rank, keys, ratios, seed, verification.
    pub workload: Workload,
    /// Computed sizes.
    pub sizes: Sizes,
    /// What the ranks of this host will take of the memory.
    pub memory: Memory,
    /// What daemons and connections leave for later.
    pub policies: PolicyOptions,
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
    pub fn resolve(cli: Cli) -> Result<Self, OptionError> {
        let ranks = cli.ranks.unwrap_or(DEFAULT_RANKS);
        check_count("--ranks", ranks as u64, Launch::MAX_RANKS as u64, "a job needs a rank")?;
        Self::resolve_on(cli, &Hosts::one(ranks)?, None)
    }

    /// The same, for ranks that are started already, by an MPI launcher if its `library` is given.
    ///
    /// # Errors
    /// Likewise.
    pub fn resolve_on(cli: Cli, hosts: &Hosts, library: Option<String>) -> Result<Self, OptionError> {
        let ranks = hosts.ranks();
        if let Some(given) = cli.ranks.filter(|given| *given != ranks) {
            return Err(OptionError::Ranks { given, started: ranks });
        }
        check_counts(&cli, ranks)?;
        let launcher = Launcher::new(library, hosts, cli.server_threads + cli.client_threads);
        check_times(&cli)?;
        check_ratios(&cli, ranks)?;
        check_ring(cli.ring_size, cli.backend.transport())?;
        let pace = cli.pace.resolve()?;
        if let Some(fault) = cli.fault.filter(|_| !cli.verify) {
            return Err(range("--fault", fault, "nothing would notice it", "only with --verify".to_owned()));
        }
        let ucx_errors = cli.ucx.resolve(&cli, launcher.hosts.len())?;
        let device = cli.device.resolve();
        cli.port.check(&device)?;
        if ucx_errors.is_none() && device.is_soft() && launcher.hosts.len() > 1 {
            return Err(OptionError::SeveralHosts { device, hosts: launcher.hosts });
        }
        let workload = Workload {
            ranks,
            clients: cli.client_threads,
            key_range: cli.key_range,
            read_ratio: cli.read_ratio,
            remote_ratio: cli.remote_ratio.unwrap_or((ranks - 1) as f64 / ranks as f64),
            distribution: cli.distribution,
            verify: cli.verify,
            seed: cli.seed,
        };
        let topology = Topology::new(cli.backend, ranks, cli.server_threads, cli.client_threads);
        cli.policies.check(cli.backend, ranks)?;
        cli.trace.check()?;
        let sizes = Sizes::compute(cli.ring_size, &topology, cli.queue_depth);
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
        Ok(Self {
            device,
            port: cli.port,
            ucx_errors,
            backend: cli.backend,
            server_threads: cli.server_threads,
            clients: cli.clients,
            queue_depth: cli.queue_depth,
            pace,
            duration: Duration::from_secs_f64(cli.duration),
            runs: cli.runs,
            warmup: Duration::from_secs_f64(cli.warmup),
            workload,
            sizes,
            memory,
            policies: cli.policies,
            trace: cli.trace.options(),
            wait,
            launcher,
            hosts: hosts.clone(),
            pin: cli.pin,
            plan,
            shm_dir: cli.shm_dir,
            json: cli.json,
            output: cli.output.output,
            echo: !cli.no_echo,
            fault: cli.fault,
        })
    }

    /// The threads of the job and the connections between them.
    #[must_use]
    pub const fn topology(&self) -> Topology {
        Topology::new(self.backend, self.workload.ranks, self.server_threads, self.workload.clients)
    }

    /// The device to open; software devices meet in `shm_dir`.
    #[must_use]
    pub fn device_spec(&self, shm_dir: &Path) -> DeviceSpec {
        self.port.on(self.device.spec(Some(shm_dir)))
    }

    /// What carries requests to other ranks, as it can be asked for; UCX chooses by itself.
    fn carried_by(&self) -> String {
        if self.backend.transport() == Transport::UcxAm { "ucx".to_owned() } else { self.device.to_string() }
    }

    /// How long the job may take: what it measures, and ample time to set up and tear down on a loaded machine.
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.warmup + self.duration * self.runs as u32 + Duration::from_secs(60) + drain::LONGEST + self.longest_hold()
    }

    /// Maximum time for which a policy holds requests back: until the last of a daemon's connections may send its first.
    #[must_use]
    pub fn longest_hold(&self) -> Duration {
        let stagger = Duration::from_secs_f64(self.policies.initial_stagger_us.unwrap_or(0.0) / 1e6);
        stagger * self.workload.ranks as u32
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, sizes, .. } = self;
        writeln!(
            f,
            "backend {}, {} device, {} x ({} + {}), depth {}",
            self.backend,
            self.carried_by(),
            report::plural(workload.ranks, "rank"),
            report::plural(self.server_threads, "daemon"),
            report::plural(workload.clients, "client"),
            self.queue_depth
        )?;
        writeln!(
            f,
            "keys {} per rank ({}), {}, {:.0} % reads, {:.0} % remote, seed {}, verify {}",
            workload.store_keys(),
            report::bytes(workload.store_keys() * Shard::BYTES_PER_KEY as u64),
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
        if self.wait == WaitStrategy::Event && (is_hardware || self.backend == BackendKind::UcxAm) {
            writeln!(f, "threads with connections sleep for {POLL_SLICE:?} at most: what other ranks send does not wake them")?;
        }
        if self.port != PortOptions::default() {
            writeln!(f, "port: {}", self.port)?;
        }
        if let Some(errors) = self.ucx_errors {
            writeln!(f, "errors of UCX's endpoints: {errors}")?;
        }
        if self.policies != PolicyOptions::default() {
            writeln!(f, "policies: {}", self.policies)?;
        }
        if let Some(trace) = &self.trace {
            writeln!(f, "traces to {}, a sample every {} rounds", trace.dir.display(), trace.interval)?;
        }
        if self.clients == ClientKind::Processes {
            writeln!(f, "each client is a process of its own")?;
        }
        if let Some(Pace { rate, arrivals }) = self.pace {
            writeln!(f, "open loop: {} of all clients together, {arrivals} arrivals", report::rate(rate))?;
        }
        writeln!(f, "{}", self.memory)?;
        writeln!(f, "{}\n{}", self.launcher, self.plan)?;
        let (warmup, runs, duration) = (self.warmup, self.runs, self.duration);
        write!(f, "warm-up {warmup:?}, {} of {duration:?}", report::plural(runs, "run"))
    }
}

fn check_count(flag: &'static str, given: u64, limit: u64, need: &'static str) -> Result<(), OptionError> {
    match given {
        0 => Err(range(flag, given, need, format!("1 to {limit}"))),
        _ if given > limit => Err(range(flag, given, "more than is supported", format!("1 to {limit}"))),
        _ => Ok(()),
    }
}

fn check_counts(cli: &Cli, ranks: usize) -> Result<(), OptionError> {
    let counts = [
        ("--server-threads", cli.server_threads as u64, MAX_DAEMONS as u64, "a rank needs a daemon to hold its keys"),
        ("--client-threads", cli.client_threads as u64, 256, "a rank needs a client to make requests"),
        ("--queue-depth", cli.queue_depth as u64, 4096, "a client needs an operation outstanding"),
        ("--runs", cli.runs as u64, 32, "a result needs a run"),
        ("--key-range", cli.key_range, MAX_KEYS, "a store needs a key"),
    ];
    for (flag, given, limit, need) in counts {
        check_count(flag, given, limit, need)?;
    }
    let clients = ranks * cli.client_threads;
    if cli.verify && clients > usize::from(u16::MAX) {
        let what = "with --ranks it makes more clients than 16 bits can number in a verified value";
        return Err(range("--client-threads", cli.client_threads, what, "fewer clients, or --verify=false".to_owned()));
    }
    Ok(())
}

fn check_times(cli: &Cli) -> Result<(), OptionError> {
    for (flag, given, least) in [("--duration", cli.duration, SHORTEST_RUN_S), ("--warmup", cli.warmup, 0.0)] {
        if !(least..=3600.0).contains(&given) {
            return Err(range(flag, given, "outside what is supported", format!("{least} to 3600 seconds")));
        }
    }
    let total = cli.warmup + cli.duration * cli.runs as f64;
    if cli.verify && total > MAX_VERIFIED_SECONDS {
        let what = "with --runs and --warmup it is too long for the 32-bit sequence numbers of --verify";
        return Err(range("--duration", cli.duration, what, format!("{MAX_VERIFIED_SECONDS} seconds in all, or --verify=false")));
    }
    Ok(())
}

fn check_ratios(cli: &Cli, ranks: usize) -> Result<(), OptionError> {
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

fn check_ring(ring: RingChoice, transport: Transport) -> Result<(), OptionError> {
    let RingChoice::Bytes(given) = ring else { return Ok(()) };
    let legal = format!("auto, or a power of two from {} to {}", RING_BYTES.start(), RING_BYTES.end());
    match given {
        _ if transport != Transport::Copyrpc => {
            Err(range("--ring-size", given, "messages of this --backend are not written into rings", "none; leave it out".to_owned()))
        }
        _ if given < *RING_BYTES.start() => Err(range("--ring-size", given, "too small to hold a batch", legal)),
        _ if given > *RING_BYTES.end() => Err(range("--ring-size", given, "more than is supported", legal)),
        _ if !given.is_power_of_two() => Err(range("--ring-size", given, "not a power of two", legal)),
        _ => Ok(()),
    }
}

pub(crate) fn range(flag: &'static str, given: impl ToString, why: &'static str, legal: String) -> OptionError {
    OptionError::Range { flag, given: given.to_string(), why, legal }
}

/// What was asked for, as recorded in a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    /// What carried requests to other ranks, as it can be asked for.
    pub device: String,
    /// What was asked of its port; null where nothing was.
    #[serde(flatten)]
    pub port: PortOptions,
    /// Whether UCX noticed dead peers; null with other backends than `ucx-am`.
    pub ucx_errors: Option<PeerErrors>,
    /// Seconds of a measured run.
    pub duration_s: f64,
    /// Seconds of load before the first.
    pub warmup_s: f64,
    /// Measured runs.
    pub runs: usize,
    /// Shared keys of each rank.
    pub key_range: u64,
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

impl From<&Options> for Recorded {
    fn from(options: &Options) -> Self {
        let workload = &options.workload;
        Self {
            device: options.carried_by(),
            port: options.port,
            ucx_errors: options.ucx_errors,
            policies: options.policies.clone(),
            trace: options.trace.clone(),
            duration_s: options.duration.as_secs_f64(),
            warmup_s: options.warmup.as_secs_f64(),
            runs: options.runs,
            key_range: workload.key_range,
            read_ratio: workload.read_ratio,
            remote_ratio: workload.remote_ratio,
            distribution: workload.distribution,
            verify: workload.verify,
            clients: options.clients,
            rate: options.pace.map(|pace| pace.rate),
            arrivals: options.pace.map(|pace| pace.arrivals),
            wait: options.wait.to_string(),
            pin: options.pin.to_string(),
            shm_dir: options.shm_dir.clone(),
            fault: options.fault,
        }
    }
}

#[cfg(test)]
mod tests;
