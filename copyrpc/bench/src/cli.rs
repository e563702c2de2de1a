//! The command line as typed. [`crate::options`] checks it and computes every `auto`.

use std::path::PathBuf;
use std::time::Duration;

use bench::program::Fault;
use clap::{Parser, ValueEnum};
use copyrpc::{Context, PollError};
use harness::affinity::PinPolicy;
use harness::range::{decimal, whole};
use harness::report::JsonSink;
use harness::window::WindowChoice;
use launch::device::DeviceChoice;
use serde::{Deserialize, Serialize};

/// Receives of the largest shared receive queue, on software and mlx5 devices alike.
pub(crate) const MAX_SRQ_SIZE: u32 = (1 << 15) - 1;

/// copyrpc between two processes: round-trip times or calls per second.
///
/// Starts both processes itself and prints one table. Rank 0 calls, rank 1 answers. Exit status: 0
/// measured and correct, 1 failed, 2 illegal options, 3 measured, but payloads were wrong.
#[derive(Debug, Clone, Parser)]
#[command(name = "copyrpc_bench", version, args_override_self = true)]
pub(crate) struct Cli {
    /// Quantity to measure: the time of each round trip, or calls per second (the clock is not read
    /// per call).
    #[arg(long, value_enum, default_value_t = Mode::Rate)]
    pub(crate) mode: Mode,

    /// Endpoints that call, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=64_usize))]
    pub(crate) endpoints: usize,

    /// Idle endpoints connected in addition, 0 to 4096.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=4096_usize))]
    pub(crate) connected: usize,

    /// Calls each endpoint keeps outstanding, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=256_usize))]
    pub(crate) depth: usize,

    /// Bytes of a request, from 0; at most an eighth of the ring less 12.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: usize,

    /// Bytes of a reply, from 0; at most 3/16 of the ring less 44.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) reply: usize,

    /// Length of each measured run in seconds, 0.01 to 3600.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = decimal(0.01..=3600.0))]
    pub(crate) duration: f64,

    /// Calls of each measured run, 1 to 10^12, instead of a duration.
    #[arg(long, value_name = "N", conflicts_with = "duration", value_parser = whole(1..=1_000_000_000_000_u64))]
    pub(crate) calls: Option<u64>,

    /// Load before the first run, in seconds, 0 to 3600.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.2, value_parser = decimal(0.0..=3600.0))]
    pub(crate) warmup: f64,

    /// Measured runs, 1 to 32.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole(1..=32_usize))]
    pub(crate) runs: usize,

    /// Behaviour of a process that finds no work: auto is busy if each process has a core of its
    /// own, else yield.
    #[arg(long, value_enum, default_value_t = Wait::Auto)]
    pub(crate) wait: Wait,

    /// Cores of the caller and the answerer: auto pins if each can have its own, none never pins,
    /// or a list such as 0,1.
    #[arg(long, value_name = "POLICY", default_value_t = PinPolicy::Auto)]
    pub(crate) pin: PinPolicy,

    /// RDMA device: soft, the software device (see the help of benchkv for soft:KEY=VALUE); or
    /// hardware, by the name of the device with an optional port (mlx5_0, mlx5_0:1, rxe0,
    /// verbs:NAME for other names, relay:NAME through libibverbs), or verbs for the first mlx5
    /// device with an active port. auto takes the first mlx5 device with an active port, otherwise
    /// soft, or the device that the environment variable COPYRPC_DEVICE names; the plan and the
    /// result say which, and why.
    #[arg(long, value_name = "auto|soft[:KEY=VALUE,...]|verbs|mlx5_N[:PORT]", default_value_t = DeviceChoice::Auto)]
    pub(crate) device: DeviceChoice,

    /// Bytes of each ring: a power of two, 4096 to 268435456 [default: by the messages and the
    /// depth].
    #[arg(long, value_name = "BYTES")]
    pub(crate) ring_size: Option<u64>,

    /// Batches each endpoint may have in flight [default: that of copyrpc, or fewer if the receives
    /// of a device are not enough].
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SRQ_SIZE))]
    pub(crate) batches: Option<u32>,

    /// Small batches of each endpoint under way before the next ones gather, 1 to 256, and the time
    /// for which a batch is under way: until its WRITE completes, or until the peer reports that it
    /// was taken. Or off.
    #[arg(
        long,
        value_name = "off|completion:N|consumption:N",
        default_value = "off"
    )]
    pub(crate) window: WindowChoice,

    /// Receives of the shared receive queue, 1 to 32767 [default: that of copyrpc, or more for the
    /// endpoints].
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SRQ_SIZE))]
    pub(crate) srq_size: Option<u32>,

    /// Entries of each completion queue, 1 to 4194304 [default: by the receives].
    #[arg(long, value_name = "N", value_parser = whole(1..=4_194_304_u32))]
    pub(crate) cq_size: Option<u32>,

    /// Check every payload in both processes; the pattern and the check cost each side some tens of
    /// instructions per 32 bytes.
    #[arg(long, value_name = "BOOL", default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    pub(crate) verify: bool,

    /// Also measure the ping-pong of a bare cache line between the two cores, before the runs.
    #[arg(long)]
    pub(crate) baseline: bool,

    /// Directory where software devices meet [default: a directory of this user in /dev/shm].
    #[arg(long, value_name = "DIR")]
    pub(crate) shm_dir: Option<PathBuf>,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<JsonSink>,

    /// Breaks something on purpose, for tests.
    #[arg(long, value_enum, hide = true)]
    pub(crate) fault: Option<Fault>,
}

/// The quantity to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// The time of each round trip.
    Latency,
    /// Calls per second.
    Rate,
}

/// Behaviour of a process that finds no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wait {
    /// Busy if each process has a core of its own, else yield.
    Auto,
    /// Poll without pause.
    Busy,
    /// Yield the core.
    Yield,
    /// Sleep until there is something to do.
    Event,
}

/// Longest sleep, so that the end of a job is noticed.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

impl Wait {
    /// Waits after a poll that found nothing.
    #[inline(always)]
    pub(crate) fn idle(self, context: &Context<u32>) -> Result<(), PollError> {
        match self {
            Self::Auto | Self::Busy => {}
            Self::Yield => std::thread::yield_now(),
            Self::Event => _ = context.wait(Some(LONGEST_SLEEP))?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_run_needs_no_argument_and_verifies() {
        let cli = Cli::try_parse_from(["copyrpc_bench"]).unwrap();
        assert!(cli.verify && cli.warmup + cli.runs as f64 * cli.duration < 10.0);
        assert!(
            !Cli::try_parse_from(["copyrpc_bench", "--verify=false"])
                .unwrap()
                .verify
        );
    }

    #[test]
    fn what_is_no_number_or_name_is_refused() {
        for args in [
            ["--ring-size", "big"],
            ["--depth", "-1"],
            ["--wait", "sleep"],
            ["--device", "eth0"],
            ["--mode", "both"],
            ["--window", "completion"],
        ] {
            assert_eq!(
                Cli::try_parse_from(["copyrpc_bench"].into_iter().chain(args))
                    .unwrap_err()
                    .exit_code(),
                2,
                "{args:?}"
            );
        }
        assert!(Cli::try_parse_from(["copyrpc_bench", "--calls", "5", "--duration", "1"]).is_err());
    }
}
