//! From the command line to values that can be run: every range is checked, every default is
//! computed by the rule written here, and both the launcher and each rank arrive at the same values
//! from the same arguments.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bench::load::Failure;
use bench::program::{Fault, RANKS};
use copyrpc::ring::{DEFAULT_RING_SIZE, RingSize};
use copyrpc::{DEFAULT_SRQ_SIZE, EndpointConfig};
use harness::affinity::{self, Plan, Threads};
use harness::range::{RangeError, range};
use harness::report::{self, JsonSink};
use harness::window::WindowChoice;
use launch::device::DeviceChoice;
use serde::{Deserialize, Serialize};

use crate::cli::{Cli, MAX_SRQ_SIZE, Mode, Wait};

/// Length of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Length {
    /// A duration.
    Seconds(f64),
    /// A number of calls.
    Calls(u64),
}

/// The job of the caller and the answerer, with all parameters. Recorded in the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) mode: Mode,
    /// Endpoints that call.
    pub(crate) endpoints: usize,
    /// Idle endpoints in addition.
    pub(crate) connected: usize,
    /// Calls each active endpoint keeps outstanding.
    pub(crate) depth: usize,
    pub(crate) payload_bytes: usize,
    pub(crate) reply_bytes: usize,
    pub(crate) length: Length,
    pub(crate) warmup_s: f64,
    pub(crate) runs: usize,
    /// By default the power of two not below four times what one endpoint has outstanding, nor
    /// below what one message needs; from 64 KiB up to 1 MiB where messages allow it.
    pub(crate) ring_bytes: u64,
    /// Batches in flight of each endpoint. By default copyrpc's default, or as many as the largest
    /// shared receive queue has for all.
    pub(crate) batches: u32,
    /// Of each endpoint, in both processes.
    pub(crate) window: WindowChoice,
    /// By default copyrpc's default, or the receives that the endpoints need.
    pub(crate) srq_size: u32,
    /// `None`: copyrpc's rule.
    pub(crate) cq_size: Option<u32>,
    pub(crate) wait: Wait,
    pub(crate) verify: bool,
    pub(crate) fault: Option<Fault>,
}

impl Job {
    /// Endpoints of each process.
    pub(crate) const fn all_endpoints(&self) -> usize {
        self.endpoints + self.connected
    }

    pub(crate) fn endpoint_config(&self) -> EndpointConfig {
        EndpointConfig {
            ring_size: self.ring_bytes,
            batches_in_flight: self.batches,
            raw_operations: 0,
            window: self.window.window(),
            ..EndpointConfig::default()
        }
    }
}

/// A job that can be run.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) job: Job,
    pub(crate) device: DeviceChoice,
    /// Why `auto` took the device; `None` if the device was named.
    pub(crate) device_by_auto: Option<String>,
    pub(crate) shm_dir: Option<PathBuf>,
    /// Where the two processes run.
    pub(crate) plan: Plan,
    /// Measure the bare cache line too.
    pub(crate) baseline: bool,
    pub(crate) json: Option<JsonSink>,
}

impl Options {
    /// Checks and computes everything, for processes that share this one's affinity mask. Changes
    /// nothing.
    pub(crate) fn resolve(cli: Cli) -> Result<Self, Failure> {
        Self::resolve_on(
            cli,
            affinity::usable_cores().map_err(|error| format!("--pin: {error}"))?,
        )
    }

    /// The same, for processes that may use these cores.
    pub(crate) fn resolve_on(cli: Cli, usable_cores: Vec<usize>) -> Result<Self, Failure> {
        let length = cli
            .calls
            .map_or(Length::Seconds(cli.duration), Length::Calls);
        let ring = ring_size(&cli)?;
        let (batches, srq_size) = queue_sizes(&cli)?;
        if let Some(fault) = cli.fault.filter(|_| !cli.verify) {
            return Err(range(
                "--fault",
                format!("{fault:?}"),
                "nothing would notice it",
                "only with --verify".to_owned(),
            )
            .into());
        }
        let plan = Plan::new(
            &cli.pin,
            usable_cores,
            Threads {
                ranks: RANKS,
                daemons: 0,
                clients: 1,
            },
        );
        let plan = plan.map_err(|error| format!("--pin: {error}"))?;
        let wait = match cli.wait {
            Wait::Auto if plan.usable_cores.len() >= RANKS => Wait::Busy,
            Wait::Auto => Wait::Yield,
            wait => wait,
        };
        let job = Job {
            mode: cli.mode,
            endpoints: cli.endpoints,
            connected: cli.connected,
            depth: cli.depth,
            payload_bytes: cli.payload,
            reply_bytes: cli.reply,
            length,
            warmup_s: cli.warmup,
            runs: cli.runs,
            ring_bytes: ring.bytes(),
            batches,
            window: cli.window,
            srq_size,
            cq_size: cli.cq_size,
            wait,
            verify: cli.verify,
            fault: cli.fault,
        };
        let (device, device_by_auto) = cli.device.resolve()?;
        Ok(Self {
            job,
            device,
            device_by_auto,
            shm_dir: cli.shm_dir,
            plan,
            baseline: cli.baseline,
            json: cli.json,
        })
    }

    /// Returns the time limit of the job: the measured time, and ample time to set up and tear down
    /// on a loaded machine.
    pub(crate) fn time_limit(&self) -> Duration {
        let measured = match self.job.length {
            Length::Seconds(seconds) => seconds * self.job.runs as f64,
            // Ten thousand calls a second would be slow even for two processes on one core.
            Length::Calls(calls) => calls as f64 * self.job.runs as f64 / 1e4,
        };
        Duration::from_secs_f64(self.job.warmup_s + measured) + Duration::from_secs(60)
    }
}

/// The plan of a run, printed before it starts.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = &self.job;
        let mode = if job.mode == Mode::Latency {
            "round-trip times"
        } else {
            "calls per second"
        };
        let active = report::plural(job.endpoints, "endpoint");
        writeln!(
            f,
            "{mode}: {active} x depth {}, {} idle, {} device",
            job.depth, job.connected, self.device
        )?;
        if let Some(why) = &self.device_by_auto {
            writeln!(f, "--device auto is {}: {why}", self.device)?;
        }
        let verify = if job.verify { "on" } else { "off" };
        writeln!(
            f,
            "request {} B, reply {} B, verify {verify}, wait {:?}",
            job.payload_bytes, job.reply_bytes, job.wait
        )?;
        let ring = report::bytes(job.ring_bytes);
        let Job {
            batches,
            window,
            srq_size,
            ..
        } = job;
        writeln!(
            f,
            "ring {ring}, {batches} batches in flight, window {window}, SRQ {srq_size}"
        )?;
        writeln!(f, "{}", self.plan)?;
        let length = match job.length {
            Length::Seconds(seconds) => format!("{seconds} s"),
            Length::Calls(calls) => format!("{calls} calls"),
        };
        write!(
            f,
            "warm-up {} s, {} of {length}",
            job.warmup_s,
            report::plural(job.runs, "run")
        )
    }
}

/// Returns the ring size: as given, or by the rule of [`Job::ring_bytes`]. The messages must fit.
fn ring_size(cli: &Cli) -> Result<RingSize, RangeError> {
    let sizes = || (12..=28).filter_map(|power| RingSize::for_connection(1 << power));
    let fits = |ring: &RingSize| {
        ring.max_payload() >= cli.payload as u64
            && ring.max_response_allowance() >= cli.reply as u64
    };
    let ring = match cli.ring_size {
        Some(bytes) => RingSize::for_connection(bytes).ok_or_else(|| {
            range(
                "--ring-size",
                bytes,
                "not usable",
                "a power of two from 4096 to 268435456".to_owned(),
            )
        })?,
        None => {
            let padded = (12 + cli.payload.max(cli.reply)).next_multiple_of(32) as u64;
            let wanted = (4 * padded * cli.depth as u64).clamp(64 << 10, DEFAULT_RING_SIZE);
            // The largest there is, for the error below.
            sizes()
                .find(|ring| ring.bytes() >= wanted && fits(ring))
                .or_else(|| sizes().next_back())
                .map_or_else(
                    || {
                        Err(range(
                            "--ring-size",
                            "auto",
                            "no size is usable",
                            "none".to_owned(),
                        ))
                    },
                    Ok,
                )?
        }
    };
    let limits = [
        ("--payload", cli.payload, ring.max_payload()),
        ("--reply", cli.reply, ring.max_response_allowance()),
    ];
    match limits
        .into_iter()
        .find(|(_, given, most)| *given as u64 > *most)
    {
        Some((flag, given, most)) => {
            let legal = format!("0 to {most} with rings of {} bytes", ring.bytes());
            Err(range(flag, given, "more than a ring can take", legal))
        }
        None => Ok(ring),
    }
}

/// Returns the batches in flight and the receives, by the rules at [`Job`].
fn queue_sizes(cli: &Cli) -> Result<(u32, u32), RangeError> {
    let all = (cli.endpoints + cli.connected) as u32;
    let receives = cli.srq_size.unwrap_or(MAX_SRQ_SIZE);
    let max = receives * 2 / 3 / all;
    let batches = cli
        .batches
        .unwrap_or(EndpointConfig::default().batches_in_flight.min(max).max(1));
    if batches > max {
        let legal = format!("1 to {max} for {all} endpoints and {receives} receives");
        return Err(range(
            "--batches",
            batches,
            "the shared receive queue cannot hold them",
            legal,
        ));
    }
    Ok((
        batches,
        cli.srq_size
            .unwrap_or((batches * all * 3).div_ceil(2).max(DEFAULT_SRQ_SIZE)),
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn resolve(args: &str) -> Result<Options, Failure> {
        Options::resolve(Cli::try_parse_from(
            std::iter::once("copyrpc_bench").chain(args.split_whitespace()),
        )?)
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_legal_ones() {
        for (args, legal) in [
            ("--endpoints 0", "1 to 64"),
            ("--endpoints 65", "1 to 64"),
            ("--connected 5000", "0 to 4096"),
            ("--depth 0", "1 to 256"),
            ("--depth 257", "1 to 256"),
            ("--runs 0", "1 to 32"),
            ("--duration 0", "0.01 to 3600"),
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
        ] {
            let message = resolve(args).unwrap_err().to_string();
            assert!(message.contains(legal), "{args}: {message}");
        }
    }

    #[test]
    fn a_window_of_no_batch_or_of_too_many_is_no_window() {
        for args in ["--window completion:0", "--window consumption:257"] {
            let refused = Cli::try_parse_from(format!("copyrpc_bench {args}").split(' '))
                .unwrap_err()
                .to_string();
            assert!(refused.contains("from 1 to 256"), "{refused}");
        }
    }

    #[test]
    fn the_window_is_that_of_the_endpoints() {
        let job = |args: &str| resolve(args).unwrap().job;
        let exempt_bytes = copyrpc::Window::DEFAULT_EXEMPT_BYTES;
        assert_eq!(job("").endpoint_config().window, copyrpc::Window::Off);
        assert_eq!(
            job("--window consumption:3").endpoint_config().window,
            copyrpc::Window::Consumption {
                batches: 3,
                exempt_bytes
            }
        );
        let many = job("--window completion:256 --endpoints 64");
        assert_eq!(
            many.endpoint_config().window,
            copyrpc::Window::Completion {
                batches: 256,
                exempt_bytes
            }
        );
    }

    #[test]
    fn automatic_sizes_follow_from_the_load() {
        let job = |args: &str| resolve(args).unwrap().job;
        assert_eq!(job("").ring_bytes, 64 << 10);
        assert_eq!(job("--depth 256 --payload 1024").ring_bytes, 1 << 20);
        assert_eq!(job("--payload 1000000").ring_bytes, 8 << 20);
        let many = job("--connected 1023");
        assert_eq!((many.all_endpoints(), many.batches), (1024, 21));
        assert!(many.srq_size >= 1024 * 21 * 3 / 2, "{many:?}");
    }
}
