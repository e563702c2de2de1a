//! Throughput against the number of clients, grouping off and on, in virtual time with the NIC
//! model of the software HCA.
//!
//! [`calibration`]: the cost of a missing context; [`workload`]: files and accounts; [`point`]: a
//! server and its clients in one thread; [`curve`]: the points and their summary; [`result`]: the
//! table, JSON document and plot.

mod calibration;
mod curve;
mod point;
mod result;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use harness::Failure;
use harness::file;
use harness::machine::allow_open_files;
use harness::report::{JsonSink, say};
use scalerpc::Grouping;

use calibration::PUBLISHED;
use curve::{Pair, Setting, Verdict};
use point::Load;
use result::Document;
use workload::Workload;

use launch::program::Program;

/// Maximum number of clients of a point: each is a device of its own in this process.
const MOST_CLIENTS: i64 = 4096;
/// Descriptors of a client: its device's three memfds, the same at the server, and the server's at
/// the client.
const FILES_PER_CLIENT: u64 = 9;
/// Descriptors of everything else.
const OTHER_FILES: u64 = 64;

/// Throughput against the number of clients, grouping off and on, in virtual time.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Numbers of clients, rising, each 1 to 4096.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=MOST_CLIENTS),
        default_value = "10,20,40,60,80,120,200,300,400,500,600,800,1000")]
    clients: Vec<u32>,

    /// Calls that each client keeps outstanding, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,

    /// The requests of clients. Rates of smallbank are transactions.
    #[arg(long, value_enum, default_value_t = Workload::Echo)]
    workload: Workload,

    /// Payload bytes of a request of echo, 8 to 65496.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..=65_496))]
    request_bytes: u32,

    /// Payload bytes of a response of echo, 8 to 65496.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..=65_496))]
    response_bytes: u32,

    /// Clients of a group, 1 to 50.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=50))]
    group_size: u32,

    /// Length of a time slice in us, 1 to 1000000.
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    slice_us: u64,

    /// Maximum length of a rotation with longer slices, in us, 0 to 1000000: slices become longer
    /// where that gets more done; 0 keeps their length.
    #[arg(long, value_name = "US", default_value_t = 25_000, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    max_rotation_us: u64,

    /// Queue pair contexts that a NIC holds, 1 to 65536. A ConnectX-3 is said to hold 400.
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    cache: u32,

    /// Cost of a context that the NIC does not hold, in ns, 0 to 1000000 [default: by calibration
    /// on a published point].
    #[arg(long, value_name = "NS", value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    miss_ns: Option<u64>,

    /// CPU time of the server for a request, in ns, 1 to 1000000: 50 ns stands for 10 threads that
    /// take 500 ns each.
    #[arg(long, value_name = "NS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    server_ns: u64,

    /// Maximum random delay of each message on its way, in ns, 0 to 1000000.
    #[arg(long, value_name = "NS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    jitter_ns: u64,

    /// Seed of the random numbers: equal options give equal results.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Virtual time that is measured at each point, in us, 100 to 10000000. Half as much passes
    /// before, and with several groups five of the longest rotations, in which slices reach their
    /// final length.
    #[arg(long, value_name = "US", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    window_us: u64,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,

    /// Also write the curve as a plot to this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Options {
    /// Returns the setting of the curve, and its maximum number of clients.
    fn resolve(&self) -> Result<(Setting, u32), Failure> {
        let most = match self.clients.last() {
            Some(most) if self.clients.windows(2).all(|pair| pair[0] < pair[1]) => *most,
            _ => {
                return Err(format!(
                    "--clients {:?}: legal is a rising list, such as 10,100,1000",
                    self.clients
                )
                .into());
            }
        };
        let echo = (self.request_bytes as usize, self.response_bytes as usize);
        let (request_bytes, response_bytes) = self.workload.bytes(self.depth).unwrap_or(echo);
        let setting = Setting {
            context_entries: self.cache as usize,
            context_miss_ns: self.miss_ns.unwrap_or_else(|| PUBLISHED.miss_ns()),
            jitter_ns: self.jitter_ns,
            seed: self.seed,
            depth: self.depth,
            group_size: self.group_size,
            slice_ns: self.slice_us * 1000,
            max_rotation_ns: self.max_rotation_us * 1000,
            load: Load {
                workload: self.workload,
                request_bytes,
                response_bytes,
                server_request_ns: self.server_ns,
                server_step_ns: 100,
                client_call_ns: 100,
                window_ns: self.window_us * 1000,
            },
        };
        let server = setting.server(most, Grouping::On);
        server
            .check()
            .map_err(|error| format!("a point with {most} clients: {error}"))?;
        self.svg
            .as_deref()
            .map_or(Ok(()), file::check)
            .map_err(|error| format!("--svg: {error}"))?;
        self.json
            .as_ref()
            .map_or(Ok(()), JsonSink::check)
            .map_err(|error| format!("--json: {error}"))?;
        Ok((setting, most))
    }
}

pub(crate) fn run(program: Program, options: &Options) -> Result<ExitCode, Failure> {
    let (setting, most) = options.resolve()?;
    allow_open_files(FILES_PER_CLIENT * u64::from(most) + OTHER_FILES)?;
    let mut curve: Vec<Pair> = Vec::with_capacity(options.clients.len());
    for clients in &options.clients {
        say(&format!("{clients} clients"));
        curve.push(setting.pair(*clients)?);
    }
    let verdict =
        Verdict::of(&curve).ok_or("no point has a response: measure longer (--window-us)")?;
    let document = Document::new(setting, verdict, curve);
    if let Some(path) = &options.svg {
        file::write(path, document.plot()?.as_bytes())?;
    }
    program.show(&document, options.json.as_ref(), None)
}
