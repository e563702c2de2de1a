//! The activity of a daemon, sampled over time: `--trace`, and the files that it writes.
//!
//! Each daemon has a file `rank-R-daemon-D.csv`: a line with the names of the columns, then a line
//! for each [`Sample`] with the requests by endpoint. Only this module knows the format. The
//! [`recorder`](engine::trace::recorder) takes the samples while the job runs, and writes no file;
//! files are written when all daemons have ended.

use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use benchkv_harness::Failure;
use benchkv_harness::range::whole;
use clap::Args;
use engine::trace::{Sample, Series};
use serde::{Deserialize, Serialize};

/// Legal intervals between samples, in rounds with work.
const INTERVALS: RangeInclusive<u64> = 1..=1_000_000_000;

/// A line of a file: the sample, and its requests by endpoint.
#[derive(Deserialize)]
struct Row(Sample, #[serde(default)] Vec<u32>);

/// Beginning of the name of an endpoint's column; the rank at its other end follows.
const ENDPOINT: &str = "outstanding_";

/// Returns the header line: the names of the fields of a [`Sample`], with units, and the names of
/// the columns of endpoints to the ranks `endpoints`.
fn columns(endpoints: &[usize]) -> String {
    let mut out = csv::Writer::from_writer(Vec::new());
    // Writing to memory does not fail.
    let _ = out.serialize(Sample::default());
    let text = String::from_utf8(out.into_inner().unwrap_or_default()).unwrap_or_default();
    let names = text.lines().next().unwrap_or_default().to_owned();
    let of_endpoints = endpoints.iter().map(|rank| format!(",{ENDPOINT}{rank}"));
    of_endpoints.fold(names, |names, name| names + &name)
}

/// The command-line flags.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Result")]
pub struct TraceArgs {
    /// Directory for a time series of each daemon, rank-R-daemon-D.csv; created if missing. It must
    /// not hold the series of another job.
    #[arg(long, hide_short_help = true, value_name = "DIR")]
    pub trace: Option<PathBuf>,

    /// Rounds with work of a daemon between two samples, 1 to 1000000000; the interval grows where
    /// a series would not fit into memory. An idle daemon is sampled every millisecond.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(INTERVALS), default_value_t = 64, requires = "trace")]
    pub trace_interval: u64,
}

/// The directory of the series, and the interval of their samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceOptions {
    /// The directory.
    pub dir: PathBuf,
    /// Rounds with work between two samples.
    pub interval: u64,
}

impl TraceArgs {
    /// Returns the options, if a trace is wanted.
    pub fn options(&self) -> Option<TraceOptions> {
        let (dir, interval) = (self.trace.clone()?, self.trace_interval);
        Some(TraceOptions { dir, interval })
    }
}

/// A file with the time series of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TraceFile {
    /// The rank.
    pub rank: usize,
    /// Number of the daemon in the rank.
    pub daemon: usize,
    /// The file.
    pub path: PathBuf,
}

impl TraceFile {
    /// Returns the file of a daemon's series in `dir`.
    pub fn new(dir: &Path, rank: usize, daemon: usize) -> Self {
        Self {
            rank,
            daemon,
            path: dir.join(format!("rank-{rank}-daemon-{daemon}.csv")),
        }
    }

    /// Returns the files in `dir`, by rank and daemon.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn all_in(dir: &Path) -> Result<Vec<Self>, Failure> {
        let failed = |why| failed(dir, &why);
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            files.extend(Self::named(&path).map(|(rank, daemon)| Self { rank, daemon, path }));
        }
        files.sort();
        Ok(files)
    }

    /// Returns whether `path` has the name of a series.
    pub(crate) fn is_named(path: &Path) -> bool {
        Self::named(path).is_some()
    }

    fn named(path: &Path) -> Option<(usize, usize)> {
        let name = path.file_name()?.to_str()?;
        let numbers = name.strip_prefix("rank-")?.strip_suffix(".csv")?;
        let (rank, daemon) = numbers.split_once("-daemon-")?;
        Some((rank.parse().ok()?, daemon.parse().ok()?))
    }

    /// Writes a series.
    ///
    /// # Errors
    /// The system's reason; a part of the file may remain.
    pub fn write(&self, series: &Series) -> Result<(), Failure> {
        let write = || -> csv::Result<()> {
            let mut out = csv::WriterBuilder::new()
                .has_headers(false)
                .from_path(&self.path)?;
            out.write_record(columns(&series.endpoints).split(','))?;
            series.rows().try_for_each(|row| out.serialize(row))?;
            Ok(out.flush()?)
        };
        write().map_err(|why| failed(&self.path, &why.into()))
    }

    /// Reads the series back.
    ///
    /// # Errors
    /// The system's reason, or the line and the field that is not a value.
    pub fn read(&self) -> Result<Series, Failure> {
        let read = || -> csv::Result<Series> {
            let mut lines = csv::Reader::from_path(&self.path)?;
            let names = lines.headers()?.iter();
            let endpoints = names.filter_map(|name| name.strip_prefix(ENDPOINT)?.parse().ok());
            let mut series = Series {
                endpoints: endpoints.collect(),
                ..Series::default()
            };
            for line in lines.records() {
                let Row(sample, by_endpoint) = line?.deserialize(None)?;
                series.samples.push(sample);
                series.by_endpoint.extend(by_endpoint);
            }
            Ok(series)
        };
        read().map_err(|why| failed(&self.path, &why.into()))
    }
}

fn failed(path: &Path, why: &io::Error) -> Failure {
    format!("{}: {why}", path.display()).into()
}

impl TraceOptions {
    /// Checks before a long run whether files can be created in the directory, or the directory
    /// itself. Changes nothing.
    ///
    /// # Errors
    /// Files cannot be created, or the directory already has the series of a job.
    pub fn check(&self) -> Result<(), Failure> {
        let failed = |why| failed(&self.dir, &why);
        let mut dirs = self.dir.ancestors();
        let there = dirs.find(|dir| dir.exists()).unwrap_or(Path::new("."));
        let probe = there.join(format!(".benchkv-{}", std::process::id()));
        File::create_new(&probe)
            .and_then(|_| fs::remove_file(&probe))
            .map_err(failed)?;
        if there == self.dir && !TraceFile::all_in(there)?.is_empty() {
            let dir = self.dir.display();
            return Err(format!(
                "{dir} has the traces of another job: name another directory, or remove them"
            )
            .into());
        }
        Ok(())
    }

    /// Creates the directory if it is missing, and writes the series of a rank's daemons, in their
    /// order.
    ///
    /// # Errors
    /// The error of the first file that could not be written.
    pub fn write<'a>(
        &self,
        rank: usize,
        series: impl Iterator<Item = &'a Series>,
    ) -> Result<(), Failure> {
        fs::create_dir_all(&self.dir).map_err(|why| failed(&self.dir, &why))?;
        series
            .enumerate()
            .try_for_each(|(daemon, series)| TraceFile::new(&self.dir, rank, daemon).write(series))
    }
}

#[cfg(test)]
mod tests;
