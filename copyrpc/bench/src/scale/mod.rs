//! Throughput against the number of clients, grouping off and on, in virtual time with the NIC
//! model of the software HCA.
//!
//! [`setting`]: the parameters; [`calibration`]: the cost of a missing context; [`workload`]: files
//! and accounts; [`point`]: a server and its clients in one thread; [`curve`]: the points and their
//! summary; [`result`]: the table, JSON document and plot.

mod calibration;
mod curve;
mod point;
mod result;
mod setting;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use benchkv_harness::Failure;
use benchkv_harness::file;
use benchkv_harness::machine::allow_open_files;
use benchkv_harness::report::{JsonSink, say};
use scalerpc::Grouping;

use curve::{Pair, Verdict};
use result::Document;
use setting::Setting;

use benchkv_harness::launch::program::Program;

/// Maximum number of clients of a point. Each client has a device of its own in this process.
const MOST_CLIENTS: i64 = 4096;
/// Number of descriptors for each client: the three memfds of its device, the same memfds at the
/// server, and the server's three memfds at the client.
const FILES_PER_CLIENT: u64 = 9;
/// Number of all other descriptors.
const OTHER_FILES: u64 = 64;

/// Throughput against the number of clients, grouping off and on, in virtual time.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Numbers of clients, rising, each 1 to 4096.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=MOST_CLIENTS),
        default_value = "10,20,40,60,80,120,200,300,400,500,600,800,1000")]
    clients: Vec<u32>,

    #[command(flatten)]
    setting: Setting,

    /// Also write the result as one JSON document to a file, or to standard output with -; the
    /// table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonSink>,

    /// Also write the curve as a plot to this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Options {
    /// Checks the options. Returns the maximum number of clients.
    fn check(&self) -> Result<u32, Failure> {
        let is_rising = self.clients.windows(2).all(|pair| pair[0] < pair[1]);
        let most = *self.clients.last().filter(|_| is_rising).ok_or_else(|| {
            format!(
                "--clients {:?}: legal is a rising list, such as 10,100,1000",
                self.clients
            )
        })?;
        let checked = self.setting.server(most, Grouping::On).check();
        checked.map_err(|error| format!("a point with {most} clients: {error}"))?;
        let svg = self.svg.as_deref().map_or(Ok(()), file::check);
        svg.map_err(|error| format!("--svg: {error}"))?;
        let json = self.json.as_ref().map_or(Ok(()), JsonSink::check);
        json.map_err(|error| format!("--json: {error}"))?;
        Ok(most)
    }
}

pub(crate) fn run(program: Program, options: &Options) -> Result<ExitCode, Failure> {
    let (setting, most) = (options.setting, options.check()?);
    allow_open_files(FILES_PER_CLIENT * u64::from(most) + OTHER_FILES)?;
    let mut curve: Vec<Pair> = Vec::with_capacity(options.clients.len());
    for clients in &options.clients {
        say(&format!("{clients} clients"));
        curve.push(Pair::measure(setting, *clients)?);
    }
    let verdict =
        Verdict::of(&curve).ok_or("no point has a response: measure longer (--window-us)")?;
    let document = Document::new(setting, verdict, curve);
    if let Some(path) = &options.svg {
        file::write(path, document.plot()?.as_bytes())?;
    }
    Ok(program.show(&document, options.json.as_ref(), None))
}
