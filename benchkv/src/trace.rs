//! The activity of a daemon, sampled over time: `--trace`, and the files it writes.
//!
//! A file for each daemon, `rank-R-daemon-D.csv`: the line of [`COLUMNS`], then a line for each [`Sample`]. Only this module knows the format.
//! The [`recorder`](engine::trace::recorder) takes the samples while the job runs, and writes nothing; files are written when all daemons have ended.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use engine::trace::Sample;
use harness::range::{RangeError, within};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The header line: names with units, in the order of the fields of [`Sample`].
pub const COLUMNS: [&str; 14] = [
    "time_ns",
    "run",
    "loops",
    "cqes",
    "moved",
    "messages",
    "writes",
    "window_stalls",
    "outstanding",
    "backlog",
    "held",
    "hold_ns",
    "poll_budget",
    "rtt_ns",
];

/// Maximum interval between samples, in rounds.
const MAX_INTERVAL: u64 = 1_000_000_000;
/// Index of the only column that may be empty.
const RUN: usize = 1;

/// The values of a sample, in the order of [`COLUMNS`].
fn fields(sample: &Sample) -> [Option<u64>; COLUMNS.len()] {
    let Sample { time_ns, run, loops, cqes, moved, messages, writes, window_stalls, .. } = *sample;
    let Sample { outstanding, backlog, held, hold_ns, poll_budget, rtt_ns, .. } = *sample;
    let head = [time_ns, 0, loops, cqes, moved, messages, writes, window_stalls];
    let tail = [outstanding, backlog, held, hold_ns, poll_budget, rtt_ns];
    let mut fields = [None; COLUMNS.len()];
    fields.iter_mut().zip(head.into_iter().chain(tail)).for_each(|(field, value)| *field = Some(value));
    fields[RUN] = run.map(u64::from);
    fields
}

/// The inverse of [`fields`]; a missing value becomes 0.
fn from_fields(fields: [Option<u64>; COLUMNS.len()]) -> Sample {
    let run = fields[RUN].map(|run| run as u16);
    let [time_ns, _, loops, cqes, moved, messages, writes, window_stalls, rest @ ..] = fields.map(Option::unwrap_or_default);
    let [outstanding, backlog, held, hold_ns, poll_budget, rtt_ns] = rest;
    Sample { time_ns, run, loops, cqes, moved, messages, writes, window_stalls, outstanding, backlog, held, hold_ns, poll_budget, rtt_ns }
}

/// The command-line flags.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Traces")]
pub struct TraceArgs {
    /// Directory for a time series of each daemon, rank-R-daemon-D.csv; created if missing. It must not hold the series of another job.
    #[arg(long, hide_short_help = true, value_name = "DIR")]
    pub trace: Option<PathBuf>,

    /// Rounds with work of a daemon between two samples, 1 to 1000000000; the interval grows where a series would not fit into memory. An
    /// idle daemon is sampled every millisecond.
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 64, requires = "trace")]
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
    /// Checks the range of the interval. [`TraceOptions::check`] checks the directory.
    ///
    /// # Errors
    /// The legal range.
    pub fn check(&self) -> Result<(), RangeError> {
        within("--trace-interval", self.trace_interval, 1..=MAX_INTERVAL, "outside the supported range", " rounds")
    }

    /// Returns the options, if a trace is wanted.
    #[must_use]
    pub fn options(&self) -> Option<TraceOptions> {
        self.trace.clone().map(|dir| TraceOptions { dir, interval: self.trace_interval })
    }
}

/// Why a trace cannot be written or read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The directory has series of another job, which would be taken for those of this one.
    #[error("{} has the traces of another job: name another directory, or remove them", dir.display())]
    Occupied {
        /// The directory.
        dir: PathBuf,
    },
    /// The file is not a trace, or a trace of another version.
    #[error("{} is not a trace of this version: line 1 is {found:?}, not {:?}", path.display(), COLUMNS.join(","))]
    Header {
        /// The file.
        path: PathBuf,
        /// Its first line.
        found: String,
    },
    /// A line has too few or too many fields.
    #[error("{}, line {line}: {found} fields, not {}", path.display(), COLUMNS.len())]
    Fields {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Number of fields in the line.
        found: usize,
    },
    /// A field is not a value of its column.
    #[error("{}, line {line}, column {column}: {found:?} is not a number from 0 to {most}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// The field's text.
        found: String,
        /// The largest legal value.
        most: u64,
    },
}

/// A file with the time series of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TraceFile {
    /// The rank.
    pub rank: usize,
    /// Its daemon.
    pub daemon: usize,
    /// The file.
    pub path: PathBuf,
}

impl TraceFile {
    /// Returns the file of a daemon's series in `dir`.
    #[must_use]
    pub fn new(dir: &Path, rank: usize, daemon: usize) -> Self {
        Self { rank, daemon, path: dir.join(format!("rank-{rank}-daemon-{daemon}.csv")) }
    }

    /// Returns the files in `dir`, by rank and daemon.
    ///
    /// # Errors
    /// [`TraceError::Io`] if it cannot be listed.
    pub fn all_in(dir: &Path) -> Result<Vec<Self>, TraceError> {
        let failed = |source| TraceError::Io { path: dir.to_owned(), source };
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
        let (rank, daemon) = path.file_name()?.to_str()?.strip_prefix("rank-")?.strip_suffix(".csv")?.split_once("-daemon-")?;
        Some((rank.parse().ok()?, daemon.parse().ok()?))
    }

    /// Writes a series.
    ///
    /// # Errors
    /// [`TraceError::Io`]; a part of the file may be left.
    pub fn write(&self, samples: &[Sample]) -> Result<(), TraceError> {
        let write = || {
            let mut out = BufWriter::new(File::create(&self.path)?);
            writeln!(out, "{}", COLUMNS.join(","))?;
            for sample in samples {
                for (at, field) in fields(sample).into_iter().enumerate() {
                    let comma = if at == 0 { "" } else { "," };
                    match field {
                        Some(value) => write!(out, "{comma}{value}")?,
                        None => write!(out, "{comma}")?,
                    }
                }
                writeln!(out)?;
            }
            out.flush()
        };
        write().map_err(|source| self.failed(source))
    }

    /// Reads the series back. The file may have any content, and nothing in it is trusted.
    ///
    /// # Errors
    /// [`TraceError`] names the file, the line and the column.
    pub fn read(&self) -> Result<Vec<Sample>, TraceError> {
        let mut lines = BufReader::new(File::open(&self.path).map_err(|source| self.failed(source))?).lines();
        let header = lines.next().transpose().map_err(|source| self.failed(source))?.unwrap_or_default();
        if !header.split(',').eq(COLUMNS) {
            return Err(TraceError::Header { path: self.path.clone(), found: header.chars().take(200).collect() });
        }
        let parse = |(at, line): (usize, io::Result<String>)| self.parse(at + 2, &line.map_err(|source| self.failed(source))?);
        lines.enumerate().map(parse).collect()
    }

    fn parse(&self, line: usize, text: &str) -> Result<Sample, TraceError> {
        let found = text.split(',').count();
        if found != COLUMNS.len() {
            return Err(TraceError::Fields { path: self.path.clone(), line, found });
        }
        let mut fields = [None; COLUMNS.len()];
        for (at, ((field, column), text)) in fields.iter_mut().zip(COLUMNS).zip(text.split(',')).enumerate() {
            let most = if at == RUN { u64::from(u16::MAX) } else { u64::MAX };
            *field = match text.parse::<u64>() {
                Ok(value) if value <= most => Some(value),
                Err(_) if at == RUN && text.is_empty() => None,
                _ => {
                    let found = text.chars().take(40).collect();
                    return Err(TraceError::Value { path: self.path.clone(), line, column, found, most });
                }
            };
        }
        Ok(from_fields(fields))
    }

    fn failed(&self, source: io::Error) -> TraceError {
        TraceError::Io { path: self.path.clone(), source }
    }
}

impl TraceOptions {
    /// Checks before a long run whether files can be created in the directory, or the directory itself. Changes nothing.
    ///
    /// # Errors
    /// [`TraceError`] if they cannot, or if there are series already.
    pub fn check(&self) -> Result<(), TraceError> {
        let failed = |source| TraceError::Io { path: self.dir.clone(), source };
        let there = self.dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
        let probe = there.join(format!(".benchkv-{}", std::process::id()));
        File::create_new(&probe).and_then(|_| fs::remove_file(&probe)).map_err(failed)?;
        if there == self.dir && !TraceFile::all_in(there)?.is_empty() {
            return Err(TraceError::Occupied { dir: self.dir.clone() });
        }
        Ok(())
    }

    /// Creates the directory if it is missing, and writes the series of a rank's daemons, in their order.
    ///
    /// # Errors
    /// The error of the first file that could not be written.
    pub fn write<'a>(&self, rank: usize, series: impl Iterator<Item = &'a [Sample]>) -> Result<(), TraceError> {
        fs::create_dir_all(&self.dir).map_err(|source| TraceError::Io { path: self.dir.clone(), source })?;
        series.enumerate().try_for_each(|(daemon, samples)| TraceFile::new(&self.dir, rank, daemon).write(samples))
    }
}

#[cfg(test)]
mod tests;
