//! Resolves the command line to a job that can run. Every range is checked and every `auto`
//! computed before a process is started. Launcher and ranks compute the same values from the same
//! arguments, on the same machine.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::{self, PinPolicy, Plan, Threads};
use benchkv_harness::launch::device::DeviceChoice;
use benchkv_harness::range::{decimal, range, whole};
use benchkv_harness::report::{JsonSink, bytes, plural};
use clap::{ArgAction, ValueEnum};
use copyrpc_shm::wait::WaitStrategy;
use serde::Serialize;

use super::case::{Case, Kind, Length, Settings};
use super::{copy_rpc, scale_rpc};
use benchkv_harness::launch::program::RANKS;

const MAX_LOADS: usize = 8;

/// Transports of calls between two processes, in turn in one run.
///
/// Starts both processes itself and prints one table for each load: rank 0 calls, rank 1 answers.
/// Exit status: 0 done and sound, 1 failed, 2 illegal options, 3 measured, but payloads were wrong,
/// or calls executed more or less than once.
#[derive(Debug, Clone, clap::Args, Serialize)]
pub(crate) struct Options {
    /// Contestants to compare; ratios are of the first to each of the others.
    #[arg(long, value_enum, action = ArgAction::Set, value_delimiter = ',', value_name = "NAME,...", default_value = "copyrpc")]
    pub(crate) contestants: Vec<Kind>,

    /// Up to 8 numbers of clients, each 1 to 1000, or 1 to 112 with ud-send. ScaleRPC makes one
    /// group of up to 1.5 times the group size, and several groups of more clients.
    #[arg(long, action = ArgAction::Set, value_delimiter = ',', value_name = "N,...", default_value = "1")]
    #[serde(skip)]
    clients: Vec<usize>,

    /// Endpoints of copyrpc that call, of each client, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=64_usize))]
    #[serde(skip)]
    endpoints: usize,

    /// Calls that each client, or endpoint, keeps unanswered, 1 to 256; 1 to 32 with others than
    /// copyrpc.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=256_usize))]
    #[serde(skip)]
    depth: usize,

    /// Measure one client with one call at a time, too.
    #[arg(long, value_name = "BOOL", default_value_t = false, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = ArgAction::Set)]
    #[serde(skip)]
    round_trip: bool,

    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) settings: Settings,

    /// Quantity to measure: the time of each round trip, or calls per second (the clock is not read
    /// per call).
    #[arg(long, value_enum, default_value_t = Mode::Rate)]
    pub(crate) mode: Mode,

    /// Runs, 1 to 99. Each measures everything once.
    #[arg(long, alias = "rounds", value_name = "N", default_value_t = 5, value_parser = whole(1..=99_usize))]
    pub(crate) runs: usize,

    /// Length of each measurement in seconds, 0.01 to 3600.
    #[arg(long = "duration", value_name = "SECONDS", default_value_t = 1.0, value_parser = decimal(0.01..=3600.0))]
    #[serde(skip)]
    duration_s: f64,

    /// Calls of each measurement, 1 to 10^12, instead of a duration.
    #[arg(long, value_name = "N", conflicts_with = "duration_s", value_parser = whole(1..=1_000_000_000_000_u64))]
    #[serde(skip)]
    calls: Option<u64>,

    /// Load before each measurement, in seconds, 0 to 3600 [default: a quarter of --duration].
    #[arg(long = "warmup", value_name = "SECONDS", value_parser = decimal(0.0..=3600.0))]
    #[serde(skip)]
    warmup_s: Option<f64>,

    /// Action of a process that finds nothing: auto is busy if each process has a core, else yield;
    /// event sleeps, with copyrpc only.
    #[arg(long, value_enum, default_value_t = WaitChoice::Auto)]
    #[serde(skip)]
    wait: WaitChoice,

    /// Cores of the clients and the server: auto pins if each can have its own, none never pins, or
    /// a list such as 0,1.
    #[arg(long, value_name = "POLICY", default_value_t = PinPolicy::Auto)]
    #[serde(skip)]
    pin: PinPolicy,

    /// RDMA device: soft, the software device (see the help of benchkv for soft:KEY=VALUE); or
    /// hardware, by the name of the device with an optional port (mlx5_0, mlx5_0:1, rxe0,
    /// verbs:NAME for other names, relay:NAME through libibverbs), or verbs for the first mlx5
    /// device with an active port. auto takes the first mlx5 device with an active port, otherwise
    /// soft, or the device that the environment variable COPYRPC_DEVICE names; the plan and the
    /// result say which, and why.
    #[arg(long, value_name = "auto|soft[:KEY=VALUE,...]|verbs|mlx5_N[:PORT]", default_value_t = DeviceChoice::Auto)]
    #[serde(serialize_with = "benchkv_harness::as_text::serialize")]
    pub(crate) device: DeviceChoice,

    /// Also measure the ping-pong of a bare cache line between the two cores, before the runs.
    #[arg(long)]
    pub(crate) baseline: bool,

    /// Directory of the software devices' fabric [default: one of this user in /dev/shm].
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(crate) shm_dir: Option<PathBuf>,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// tables then go to standard error.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) json: Option<JsonSink>,
}

/// The quantity to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// The time of each round trip.
    Latency,
    /// Calls per second.
    Rate,
}

/// The values of `--wait`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WaitChoice {
    /// Busy if each process has a core of its own, else yield.
    Auto,
    /// Poll without pause.
    Busy,
    /// Yield the core.
    Yield,
    /// Sleep until there is something to do.
    Event,
}

/// A load, which every contestant gets: each of the clients has `endpoints` endpoints, which keep
/// `depth` calls unanswered each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Load {
    pub(crate) name: String,
    pub(crate) clients: usize,
    pub(crate) endpoints: usize,
    pub(crate) depth: usize,
}

impl Load {
    fn new(clients: usize, endpoints: usize, depth: usize) -> Self {
        let mut load = Self {
            name: format!("rate_{}x{depth}", clients * endpoints),
            clients,
            endpoints,
            depth,
        };
        if load.is_round_trip() {
            "round_trip".clone_into(&mut load.name);
        }
        load
    }

    /// Returns whether the load is one call at a time of one client. The result of such a load is
    /// the time of a call; the result of any other load is the rate.
    pub(crate) const fn is_round_trip(&self) -> bool {
        self.clients * self.endpoints * self.depth == 1
    }
}

/// A job that can be run. Its JSON form is part of the result.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Job {
    /// The options as typed, except that the device is the device that `auto` took.
    #[serde(flatten)]
    pub(crate) options: Options,
    pub(crate) loads: Vec<Load>,
    pub(crate) length: Length,
    warmup_s: f64,
    /// The reason for which `auto` took the device; `None` if the user gave the device.
    device_by_auto: Option<String>,
    #[serde(serialize_with = "benchkv_harness::as_text::serialize")]
    pub(crate) wait: WaitStrategy,
    pub(crate) placement: Plan,
}

impl Job {
    /// Checks and computes everything. Changes nothing.
    pub(crate) fn resolve(options: &Options) -> Result<Self, Failure> {
        let loads = loads(options)?;
        let mut kinds = options.contestants.iter();
        let are_copyrpc = kinds.all(|kind| *kind == Kind::Copyrpc);
        let only = "--contestants copyrpc".to_owned();
        if options.endpoints > 1 && !are_copyrpc {
            let why = "others than copyrpc have no endpoints";
            return Err(range("--endpoints", options.endpoints, why, only).into());
        }
        if options.wait == WaitChoice::Event && !are_copyrpc {
            let why = "others than copyrpc have nothing to sleep on";
            return Err(range("--wait", "event", why, format!("yield, or {only}")).into());
        }
        if let Some(fault) = options.settings.fault.filter(|_| !options.settings.verify) {
            let legal = "only with --verify".to_owned();
            return Err(range(
                "--fault",
                format!("{fault:?}"),
                "nothing would notice it",
                legal,
            )
            .into());
        }
        let threads = Threads {
            ranks: RANKS,
            daemons: 0,
            clients: 1,
        };
        let placement = affinity::usable_cores()
            .and_then(|cores| Plan::new(&options.pin, cores, threads))
            .map_err(|error| format!("--pin: {error}"))?;
        let wait = match options.wait {
            WaitChoice::Busy => WaitStrategy::Busy,
            WaitChoice::Yield => WaitStrategy::Yield,
            WaitChoice::Event => WaitStrategy::Event,
            WaitChoice::Auto => WaitStrategy::auto(RANKS, placement.usable_cores.len()),
        };
        let (device, device_by_auto) = options.device.clone().resolve()?;
        Ok(Self {
            loads,
            length: options
                .calls
                .map_or(Length::Seconds(options.duration_s), Length::Calls),
            warmup_s: options.warmup_s.unwrap_or(options.duration_s / 4.0),
            device_by_auto,
            wait,
            placement,
            options: Options {
                device,
                ..options.clone()
            },
        })
    }

    pub(crate) const fn case(&self, kind: Kind, load: &Load) -> Case {
        case(&self.options, kind, load)
    }

    pub(crate) fn warmup(&self) -> Duration {
        Duration::from_secs_f64(self.warmup_s)
    }

    /// Returns the measurements in their order. Each run has every measurement once; the contestant
    /// that comes first changes from run to run.
    pub(crate) fn measurements(&self) -> impl Iterator<Item = (&Load, Kind)> {
        let count = self.options.contestants.len();
        (0..self.options.runs).flat_map(move |run| {
            let of_load = move |load| {
                (0..count).filter_map(move |nth| {
                    Some((load, *self.options.contestants.get((run + nth) % count)?))
                })
            };
            self.loads.iter().flat_map(of_load)
        })
    }

    /// Returns the maximum time of the job: measurements, and ample time to set up and tear down.
    pub(crate) fn time_limit(&self) -> Duration {
        let measured_s = match self.length {
            Length::Seconds(seconds) => seconds,
            // Even two processes on one core make more than ten thousand calls a second.
            Length::Calls(calls) => calls as f64 / 1e4,
        };
        let each = Duration::from_secs_f64(self.warmup_s + measured_s) + Duration::from_secs(5);
        let measurements = self.options.runs * self.loads.len() * self.options.contestants.len();
        each * measurements as u32 + Duration::from_secs(60)
    }
}

const fn case(options: &Options, kind: Kind, load: &Load) -> Case {
    Case {
        kind,
        clients: load.clients,
        endpoints: load.endpoints,
        depth: load.depth,
        settings: options.settings,
    }
}

/// Returns the loads. Checks that every contestant supports each of them.
fn loads(options: &Options) -> Result<Vec<Load>, Failure> {
    let Options {
        contestants,
        clients,
        endpoints,
        depth,
        ..
    } = options;
    if !(1..=MAX_LOADS).contains(&clients.len()) {
        let why = "another number of loads";
        let legal = format!("1 to {MAX_LOADS} numbers of clients");
        return Err(range("--clients", clients.len(), why, legal).into());
    }
    let twice = [
        ("--contestants", first_twice(contestants)),
        ("--clients", first_twice(clients)),
    ];
    for (flag, given) in twice {
        let error = |given| range(flag, given, "it is there twice", "each once".to_owned());
        given.map_or(Ok(()), |given| Err(error(given)))?;
    }
    let load = |clients: &usize| Load::new(*clients, *endpoints, *depth);
    let mut loads: Vec<Load> = clients.iter().map(load).collect();
    if options.round_trip && !loads.iter().any(Load::is_round_trip) {
        loads.insert(0, Load::new(1, 1, 1));
    }
    for load in &loads {
        for &kind in contestants {
            can_bear(&case(options, kind, load))?;
        }
    }
    Ok(loads)
}

/// Checks that the contestant can do the measurement.
fn can_bear(case: &Case) -> Result<(), Failure> {
    let kind = case.kind;
    let within = |flag, given: usize, legal: RangeInclusive<usize>| {
        let values = format!("{} to {} with {kind}", legal.start(), legal.end());
        let error = || range(flag, given, "outside what is supported", values);
        legal.contains(&given).then_some(()).ok_or_else(error)
    };
    within("--clients", case.clients, 1..=kind.max_clients())?;
    within("--depth", case.depth, 1..=kind.max_depth())?;
    within("--payload", case.settings.payload_bytes, kind.payloads())?;
    within("--reply", case.settings.reply_bytes(), kind.payloads())?;
    match kind {
        Kind::Copyrpc => Ok(copy_rpc::endpoint_config(case).map(drop)?),
        Kind::Scalerpc | Kind::ScalerpcOff => {
            let checked = scale_rpc::config(case).check();
            checked.map_err(|error| format!("{kind}: {error}").into())
        }
        Kind::RcSend | Kind::UdSend => Ok(()),
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options {
            contestants,
            settings,
            device,
            ..
        } = &self.options;
        let contestants: Vec<String> = contestants.iter().map(Kind::to_string).collect();
        let runs = plural(self.options.runs, "run");
        let loads = plural(self.loads.len(), "load");
        let length = match self.length {
            Length::Seconds(seconds) => format!("{seconds} s"),
            Length::Calls(calls) => format!("{calls} calls"),
        };
        let contestants = contestants.join(", ");
        writeln!(
            f,
            "{contestants} in turn, {runs} of {loads}, {length} each after {} s",
            self.warmup_s
        )?;
        let requests = bytes(settings.payload_bytes as u64);
        let replies = bytes(settings.reply_bytes() as u64);
        let Settings {
            verify,
            window,
            group_size,
            ..
        } = settings;
        writeln!(
            f,
            "requests of {requests}, replies of {replies}, verify {verify}, window {window}, groups of {group_size}, {device} device, wait {}",
            self.wait
        )?;
        if let Some(why) = &self.device_by_auto {
            writeln!(f, "--device auto is {device}: {why}")?;
        }
        write!(f, "{}", self.placement)
    }
}

/// Returns the first item that occurs twice, as text.
fn first_twice<T: PartialEq + ToString>(items: &[T]) -> Option<String> {
    let mut all = items.iter().enumerate();
    let twice = all.find(|(at, item)| items.iter().take(*at).any(|other| other == *item));
    twice.map(|(_, item)| item.to_string())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::CopyrpcBench;

    fn resolve(args: &str) -> Result<Job, Failure> {
        let args = std::iter::once("copyrpc_bench").chain(args.split_whitespace());
        Job::resolve(&CopyrpcBench::try_parse_from(args)?.options)
    }

    const ALL: &str = "--contestants scalerpc,scalerpc-off,copyrpc,rc-send,ud-send";

    #[test]
    fn the_definition_is_consistent() {
        CopyrpcBench::command().debug_assert();
    }

    #[test]
    fn a_run_needs_no_argument_and_verifies() {
        let job = resolve("").unwrap();
        assert!(job.options.settings.verify && job.time_limit() < Duration::from_secs(100));
        assert!(
            !resolve("--verify=false").unwrap().options.settings.verify,
            "{job:?}"
        );
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_legal_ones() {
        for (args, legal) in [
            ("--endpoints 0", "1 to 64"),
            ("--endpoints 65", "1 to 64"),
            ("--connected 5000", "0 to 4096"),
            ("--depth 0", "1 to 256"),
            ("--depth 257", "1 to 256"),
            ("--runs 0", "1 to 99"),
            ("--duration 0", "0.01 to 3600"),
            ("--duration nan", "0.01 to 3600"),
            ("--warmup=-1", "0 to 3600"),
            ("--calls 0", "1 to 1000000000000"),
            ("--ring-size 5000", "a power of two from 4096"),
            ("--ring-size 4096 --payload 501", "0 to 500"),
            ("--ring-size 4096 --reply 725", "0 to 724"),
            ("--payload 99999999", "0 to 33554420"),
            ("--batches 0", "1 to"),
            ("--batches 683 --srq-size 1024", "1 to 682"),
            ("--srq-size 40000", "1 to 32767"),
            ("--cq-size 5000000", "1 to 4194304"),
            ("--verify=false --fault corrupt-reply", "only with --verify"),
            ("--pin 0,60000", "usable are"),
            ("--clients 8,1001", "1 to 1000 with copyrpc"),
            ("--clients 1,2,3,4,5,6,7,8,9", "1 to 8 numbers"),
            ("--clients 8,8", "each once"),
            ("--contestants copyrpc,copyrpc", "each once"),
        ] {
            let message = resolve(args).unwrap_err().to_string();
            assert!(message.contains(legal), "{args}: {message}");
        }
        for (args, legal) in [
            ("--clients 0", "1 to 1000 with scalerpc"),
            ("--clients 8,113", "1 to 112 with ud-send"),
            ("--depth 33", "1 to 32"),
            ("--payload 7", "8 to 4056"),
            ("--payload 4057", "8 to 4056"),
            ("--reply 7", "8 to 4056"),
            ("--group 0", "1..=50"),
            ("--group 51", "1..=50"),
            ("--endpoints 2", "--contestants copyrpc"),
            ("--wait event", "yield"),
        ] {
            let message = resolve(&format!("{ALL} {args}")).unwrap_err().to_string();
            assert!(message.contains(legal), "{args}: {message}");
        }
    }

    #[test]
    fn what_is_no_number_or_name_is_refused() {
        for args in [
            "--ring-size big",
            "--depth=-1",
            "--wait sleep",
            "--device eth0",
            "--mode both",
            "--window completion",
            "--contestants erpc",
            "--calls 5 --duration 1",
        ] {
            let args = std::iter::once("copyrpc_bench").chain(args.split_whitespace());
            let refused = CopyrpcBench::try_parse_from(args).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{refused}");
        }
    }

    #[test]
    fn a_window_of_no_batch_or_of_too_many_is_no_window() {
        for args in ["--window completion:0", "--window consumption:257"] {
            let refused = resolve(args).unwrap_err().to_string();
            assert!(refused.contains("from 1 to 256"), "{refused}");
        }
    }

    #[test]
    fn each_run_has_everything_once_and_begins_with_another_contestant() {
        let job =
            resolve("--contestants scalerpc,copyrpc --clients 4 --rounds 3 --depth 2 --round-trip")
                .unwrap();
        let order: Vec<_> = job
            .measurements()
            .map(|(load, kind)| (load.name.as_str(), kind))
            .collect();
        let (ours, theirs) = (Kind::Scalerpc, Kind::Copyrpc);
        let of_even = [
            ("round_trip", ours),
            ("round_trip", theirs),
            ("rate_4x2", ours),
            ("rate_4x2", theirs),
        ];
        let of_odd = [
            ("round_trip", theirs),
            ("round_trip", ours),
            ("rate_4x2", theirs),
            ("rate_4x2", ours),
        ];
        assert_eq!(order, [of_even, of_odd, of_even].concat());
    }
}
