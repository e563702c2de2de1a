//! From the command line to a job that can run. Every range is checked and every `auto` computed
//! before a process is started. Launcher and ranks compute the same values from the same arguments,
//! on the same machine.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bench::load::Failure;
use bench::program::{Fault, RANKS};
use clap::ValueEnum;
use copyrpc_shm::wait::WaitStrategy;
use harness::affinity::{self, PinPolicy, Plan, Threads};
use harness::range::{decimal, range, whole};
use harness::report::{JsonSink, bytes, plural};
use launch::device::DeviceChoice;
use serde::Serialize;

use super::contestant::{Case, Kind};
use super::scale_rpc;

/// Maximum number of loads of one run.
const MAX_LOADS: usize = 8;
/// Maximum number of calls that a client keeps unanswered: one software device keeps that many
/// datagrams of another one without loss.
const MAX_DEPTH: usize = 32;
/// Minimum payload: the name of a call.
const MIN_PAYLOAD: usize = 8;
/// Maximum payload: the room of a datagram with the header of either SEND, and of a slot of 4 KiB
/// of ScaleRPC.
const MAX_PAYLOAD: usize = 4056;

/// Round trip and rate of ScaleRPC beside copyrpc, SEND on reliable connections and SEND on
/// datagrams, in turn in one run.
///
/// Starts both processes itself and prints one table for each load. Exit status: 0 done and sound,
/// 1 failed, 2 illegal options, 3 measured, but payloads were wrong, or calls executed more or less
/// than once.
#[derive(Debug, Clone, clap::Args, Serialize)]
pub(crate) struct Options {
    /// Contestants to compare.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...", default_values_t = Kind::ALL)]
    pub(crate) contestants: Vec<Kind>,

    /// Numbers of clients for rates, 1 to 1000 each, 112 with ud-send, at most 8 of them: up to 1.5
    /// times the group size are one group of ScaleRPC, more are several.
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_values_t = [8, 64])]
    #[serde(skip)]
    clients: Vec<usize>,

    /// Calls that each client keeps unanswered for rates, 1 to 32.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole(1..=MAX_DEPTH))]
    #[serde(skip)]
    depth: usize,

    /// Bytes of a request and of its reply, 8 to 4056.
    #[arg(long = "payload", value_name = "BYTES", default_value_t = 32, value_parser = whole(MIN_PAYLOAD..=MAX_PAYLOAD))]
    payload_bytes: usize,

    /// Clients of a group of ScaleRPC, 1 to 50.
    #[arg(long = "group", value_name = "N", default_value_t = scalerpc::protocol::groups::DEFAULT_GROUP_SIZE)]
    pub(crate) group_size: u32,

    /// Rounds, 1 to 99. Each measures everything once.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole(1..=99_usize))]
    pub(crate) rounds: usize,

    /// Length of each measurement in seconds, 0.01 to 60, after a warm-up of a quarter of it.
    #[arg(long = "duration", value_name = "SECONDS", default_value_t = 0.2, value_parser = decimal(0.01..=60.0))]
    duration_s: f64,

    /// Action of a process that finds nothing: auto is busy if each process has a core, else yield.
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
    #[serde(serialize_with = "harness::as_text::serialize")]
    pub(crate) device: DeviceChoice,

    /// Directory of the software devices' fabric [default: one of this user in /dev/shm].
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(crate) shm_dir: Option<PathBuf>,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// tables then go to standard error.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) json: Option<JsonSink>,

    /// Inject a fault, for tests.
    #[arg(long, value_enum, hide = true)]
    fault: Option<Fault>,
}

/// The values of `--wait`. Clients of one-sided RPC have nothing to sleep on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WaitChoice {
    /// Busy if each process has a core of its own, else yield.
    Auto,
    /// Poll without pause.
    Busy,
    /// Yield the core.
    Yield,
}

/// A load, which every contestant gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Load {
    pub(crate) name: String,
    pub(crate) clients: usize,
    pub(crate) depth: usize,
}

impl Load {
    /// Returns whether the load is one call at a time of one client: then the time counts,
    /// otherwise the rate.
    pub(crate) const fn is_round_trip(&self) -> bool {
        self.clients * self.depth == 1
    }
}

/// A job that can be run. Its JSON form is part of the result.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Job {
    /// The options as typed; the device is the one that `auto` took.
    #[serde(flatten)]
    pub(crate) options: Options,
    pub(crate) loads: Vec<Load>,
    /// Why `auto` took the device; `None` if the device was named.
    device_by_auto: Option<String>,
    #[serde(serialize_with = "harness::as_text::serialize")]
    pub(crate) wait: WaitStrategy,
    /// The cores of the two processes.
    pub(crate) placement: Plan,
}

impl Job {
    /// Checks and computes everything. Changes nothing.
    pub(crate) fn resolve(options: &Options) -> Result<Self, Failure> {
        let Options {
            contestants,
            clients,
            depth,
            ..
        } = options;
        if !(1..=MAX_LOADS).contains(&clients.len()) {
            return Err(range(
                "--clients",
                clients.len(),
                "another number of loads",
                format!("1 to {MAX_LOADS} numbers of clients"),
            )
            .into());
        }
        let mut loads = vec![Load {
            name: "round_trip".to_owned(),
            clients: 1,
            depth: 1,
        }];
        for &clients in clients {
            for kind in contestants {
                if !(1..=kind.max_clients()).contains(&clients) {
                    let legal = format!("1 to {} with {kind}", kind.max_clients());
                    return Err(
                        range("--clients", clients, "outside what is supported", legal).into(),
                    );
                }
            }
            loads.push(Load {
                name: format!("rate_{clients}x{depth}"),
                clients,
                depth: *depth,
            });
        }
        let twice = first_twice(contestants).map(|twice| ("--contestants", twice.to_string()));
        if let Some((flag, given)) =
            twice.or_else(|| first_twice(clients).map(|twice| ("--clients", twice.to_string())))
        {
            return Err(range(flag, given, "it is there twice", "each once".to_owned()).into());
        }
        let pin = |cores| {
            Plan::new(
                &options.pin,
                cores,
                Threads {
                    ranks: RANKS,
                    daemons: 0,
                    clients: 1,
                },
            )
        };
        let placement = affinity::usable_cores()
            .and_then(pin)
            .map_err(|error| format!("--pin: {error}"))?;
        let wait = match options.wait {
            WaitChoice::Busy => WaitStrategy::Busy,
            WaitChoice::Yield => WaitStrategy::Yield,
            WaitChoice::Auto => WaitStrategy::auto(RANKS, placement.usable_cores.len()),
        };
        let (device, device_by_auto) = options.device.clone().resolve()?;
        let job = Self {
            options: Options {
                device,
                ..options.clone()
            },
            loads,
            device_by_auto,
            wait,
            placement,
        };
        // Checks the group size.
        let check = |load| scale_rpc::config(&job.case(Kind::Scalerpc, load)).check();
        job.loads
            .iter()
            .try_for_each(check)
            .map_err(|error| format!("scalerpc: {error}"))?;
        Ok(job)
    }

    pub(crate) const fn case(&self, kind: Kind, load: &Load) -> Case {
        let Options {
            payload_bytes,
            group_size,
            fault,
            ..
        } = self.options;
        Case {
            kind,
            clients: load.clients,
            depth: load.depth,
            payload_bytes,
            group_size,
            fault,
        }
    }

    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.options.duration_s)
    }

    /// Returns the measurements in their order: each once in each round, and each contestant first
    /// in some rounds.
    pub(crate) fn measurements(&self) -> impl Iterator<Item = (&Load, Kind)> {
        let count = self.options.contestants.len();
        (0..self.options.rounds).flat_map(move |round| {
            let of_load = move |load| {
                (0..count).filter_map(move |nth| {
                    Some((load, *self.options.contestants.get((round + nth) % count)?))
                })
            };
            self.loads.iter().flat_map(of_load)
        })
    }

    /// Returns the maximum time of the job: its measurements, and ample time to set up and tear
    /// down on a loaded machine.
    pub(crate) fn time_limit(&self) -> Duration {
        let each = self.duration() * 5 / 4 + Duration::from_secs(5);
        each * (self.options.rounds * self.loads.len() * self.options.contestants.len()) as u32
            + Duration::from_secs(60)
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let contestants: Vec<String> = self
            .options
            .contestants
            .iter()
            .map(Kind::to_string)
            .collect();
        let (rounds, loads) = (
            plural(self.options.rounds, "round"),
            plural(self.loads.len(), "load"),
        );
        writeln!(
            f,
            "{} in turn, {rounds} of {loads}, {} s each",
            contestants.join(", "),
            self.options.duration_s
        )?;
        let payload = bytes(self.options.payload_bytes as u64);
        writeln!(
            f,
            "requests and replies of {payload}, groups of {}, {} device, wait {}",
            self.options.group_size, self.options.device, self.wait
        )?;
        if let Some(why) = &self.device_by_auto {
            writeln!(f, "--device auto is {}: {why}", self.options.device)?;
        }
        write!(f, "{}", self.placement)
    }
}

fn first_twice<T: PartialEq>(items: &[T]) -> Option<&T> {
    items
        .iter()
        .enumerate()
        .find(|(at, item)| items.iter().take(*at).any(|other| other == *item))
        .map(|(_, item)| item)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn resolve(args: &str) -> Result<Job, Failure> {
        Job::resolve(
            &Cli::try_parse_from(std::iter::once("compare").chain(args.split_whitespace()))?
                .options,
        )
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_legal_ones() {
        for (args, legal) in [
            ("--clients 0", "1 to 1000 with scalerpc"),
            ("--clients 8,113", "1 to 112 with ud-send"),
            (
                "--contestants copyrpc --clients 8,1001",
                "1 to 1000 with copyrpc",
            ),
            ("--clients 1,2,3,4,5,6,7,8,9", "1 to 8 numbers"),
            ("--clients 8,8", "each once"),
            ("--contestants copyrpc,copyrpc", "each once"),
            ("--depth 0", "1 to 32"),
            ("--depth 33", "1 to 32"),
            ("--payload 7", "8 to 4056"),
            ("--payload 4057", "8 to 4056"),
            ("--group 0", "1..=50"),
            ("--group 51", "1..=50"),
            ("--rounds 0", "1 to 99"),
            ("--duration 0", "0.01 to 60"),
            ("--duration nan", "0.01 to 60"),
            ("--pin 0,60000", "usable are"),
        ] {
            let message = resolve(args).unwrap_err().to_string();
            assert!(message.contains(legal), "{args}: {message}");
        }
    }

    #[test]
    fn each_round_has_everything_once_and_begins_with_another_contestant() {
        let job =
            resolve("--contestants scalerpc,copyrpc --clients 4 --rounds 3 --depth 2").unwrap();
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
