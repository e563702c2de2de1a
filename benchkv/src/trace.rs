//! The activity of a daemon, sampled over time: `--trace`, and the files that it writes.
//!
//! Each daemon has a file `rank-R-daemon-D.csv`: a line with the names of the columns, then a line
//! for each [`Sample`] with the requests by endpoint. Only this module and its tests know the
//! format. The [`recorder`](engine::trace::recorder) takes the samples while the job runs, and
//! writes no file; files are written when all daemons have ended.

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

/// Returns the header line: the names of the fields of a [`Sample`], with units, and
/// `outstanding_R` for each endpoint to a rank R of `endpoints`.
fn columns(endpoints: &[usize]) -> String {
    let mut out = csv::Writer::from_writer(Vec::new());
    // Writing to memory does not fail.
    let _ = out.serialize(Sample::default());
    let text = String::from_utf8(out.into_inner().unwrap_or_default()).unwrap_or_default();
    let names = text.lines().next().unwrap_or_default().to_owned();
    let of_endpoints = endpoints.iter().map(|rank| format!(",outstanding_{rank}"));
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

/// Returns the file of a daemon's series in `dir`.
pub fn file_of(dir: &Path, rank: usize, daemon: usize) -> PathBuf {
    dir.join(format!("rank-{rank}-daemon-{daemon}.csv"))
}

/// Returns the rank and the number of the daemon whose series has this name; `None` for any other
/// name.
pub fn daemon_of(file: &Path) -> Option<(usize, usize)> {
    let name = file.file_name()?.to_str()?;
    let numbers = name.strip_prefix("rank-")?.strip_suffix(".csv")?;
    let (rank, daemon) = numbers.split_once("-daemon-")?;
    Some((rank.parse().ok()?, daemon.parse().ok()?))
}

/// Writes a series.
///
/// # Errors
/// The system's reason; a part of the file may remain.
pub fn write(file: &Path, series: &Series) -> Result<(), Failure> {
    let write = || -> csv::Result<()> {
        let mut out = csv::WriterBuilder::new()
            .has_headers(false)
            .from_path(file)?;
        out.write_record(columns(&series.endpoints).split(','))?;
        series.rows().try_for_each(|row| out.serialize(row))?;
        Ok(out.flush()?)
    };
    write().map_err(|why| failed(file, &why.into()))
}

fn failed(path: &Path, why: &io::Error) -> Failure {
    format!("{}: {why}", path.display()).into()
}

impl TraceOptions {
    /// Checks before a long run whether files can be created in the directory, or the directory
    /// itself. Leaves everything unchanged.
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
        let is_occupied = || -> io::Result<bool> {
            for entry in fs::read_dir(there)? {
                if daemon_of(&entry?.path()).is_some() {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        if there == self.dir && is_occupied().map_err(failed)? {
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
            .try_for_each(|(daemon, series)| write(&file_of(&self.dir, rank, daemon), series))
    }
}

#[cfg(test)]
mod tests;
