//! `--output`: the flat form of a result in a file, as CSV. One job is one file, which a later job with the same name replaces: appending
//! would mix rows of several jobs and versions in one table.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use harness::file::WriteError;
use harness::report::JsonSink;

use crate::trace::TraceFile;

/// The option of the flat table.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct OutputArgs {
    /// Also write the result as a flat table, CSV: a row for the job, for each run and for each rank. A file of that name is replaced.
    #[arg(long, hide_short_help = true, value_name = "FILE.csv")]
    pub output: Option<OutputFile>,
}

/// The file of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile(PathBuf);

impl FromStr for OutputFile {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = PathBuf::from(text);
        let is_csv = path.extension().is_some_and(|extension| extension == "csv");
        if is_csv { Ok(Self(path)) } else { Err("the table is CSV: the name has to end in .csv") }
    }
}

impl OutputFile {
    /// Checks before a long run whether the table can be written at its end. Changes nothing.
    ///
    /// # Errors
    /// The system's reason.
    pub fn check(&self) -> Result<(), WriteError> {
        harness::file::check(&self.0)
    }

    /// Writes the table. Replaces an existing file.
    ///
    /// # Errors
    /// The system's reason; a partly written file is not left behind.
    pub fn write(&self, table: &[u8]) -> Result<(), WriteError> {
        harness::file::write(&self.0, table)
    }
}

/// Refuses files of a job if one would be written over another, by any names: `--json`, `--output`, and the series in `--trace`. Does not
/// check whether a file can be written.
///
/// # Errors
/// The two options, with their values, and the remedy.
pub fn check_apart(json: Option<&JsonSink>, output: Option<&OutputFile>, trace: Option<&Path>) -> Result<(), String> {
    let json = json.and_then(|sink| if let JsonSink::File(path) = sink { Some(path.as_path()) } else { None });
    let places = [("--json", json), ("--output", output.map(|file| file.0.as_path())), ("--trace", trace)];
    let places: Vec<(&str, &Path, PathBuf)> =
        places.into_iter().filter_map(|(flag, path)| Some((flag, path?, harness::file::location(path?).ok()?))).collect();
    let is_in = |dir: &Path, file: &Path| file.parent() == Some(dir) && TraceFile::is_named(file);
    for (number, (flag, path, place)) in places.iter().enumerate() {
        let clash = places.iter().skip(number + 1).find(|(_, _, other)| other == place || is_in(other, place));
        if let Some((other_flag, other, _)) = clash {
            return Err(format!("{flag} {} and {other_flag} {} are the same file; name two", path.display(), other.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_csv_is_refused() {
        assert_eq!("dir/x.csv".parse::<OutputFile>(), Ok(OutputFile("dir/x.csv".into())));
        for name in ["x", "x.json", ".csv", "x.csv.gz", "x.parquet", ""] {
            assert!(name.parse::<OutputFile>().unwrap_err().contains("end in .csv"), "{name}");
        }
    }
}
