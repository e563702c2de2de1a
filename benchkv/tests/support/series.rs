//! Finds and reads the time series that `--trace` writes. The program itself reads none.

use std::path::{Path, PathBuf};

use benchkv_harness::Failure;
use engine::trace::{Sample, Series};
use serde::Deserialize;

use super::daemon_of;

/// A line of a file: the sample, and its requests by endpoint.
#[derive(Deserialize)]
struct Row(Sample, #[serde(default)] Vec<u32>);

/// Returns the series in `file`.
///
/// # Errors
/// The file, with the system's reason, or with the line and the field that is not a value.
pub(crate) fn read(file: &Path) -> Result<Series, Failure> {
    let read = || -> csv::Result<Series> {
        let mut lines = csv::Reader::from_path(file)?;
        let names = lines.headers()?.iter();
        let endpoints = names.filter_map(|name| name.strip_prefix("outstanding_")?.parse().ok());
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
    read().map_err(|why| format!("{}: {why}", file.display()).into())
}

/// Returns the ranks and daemons of the series in `dir`, and their files, in the order of ranks and
/// daemons.
pub(crate) fn files_in(dir: &Path) -> Vec<((usize, usize), PathBuf)> {
    let entries = std::fs::read_dir(dir).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths
        .filter_map(|path| Some((daemon_of(&path)?, path)))
        .collect();
    files.sort();
    files
}
