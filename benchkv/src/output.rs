//! `--output`: the flat form of a result in a file, as CSV. Each job writes one file, and a later
//! job with the same file name replaces the file: appending would mix rows of several jobs and
//! versions in one table.

use std::path::{Path, PathBuf};

use benchkv_harness::report::JsonSink;
use clap::Args;

use crate::trace::daemon_of;

/// The option of the flat table.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct OutputArgs {
    /// Also write the result as a flat table, CSV: a row for the job, for each run and for each
    /// rank. A file of that name is replaced.
    #[arg(help_heading = "Result", long, hide_short_help = true, value_name = "FILE.csv", value_parser = with_extension(&["csv"]))]
    pub output: Option<PathBuf>,
}

/// Returns a parser of file names that end in one of `extensions`. The extension shows the format
/// of the file.
pub(crate) fn with_extension(
    extensions: &'static [&'static str],
) -> impl Fn(&str) -> Result<PathBuf, String> + Clone {
    move |text| {
        let path = PathBuf::from(text);
        let found = path.extension();
        let is_legal = extensions
            .iter()
            .any(|legal| found == Some((*legal).as_ref()));
        is_legal
            .then_some(path)
            .ok_or_else(|| format!("the name has to end in .{}", extensions.join(" or .")))
    }
}

/// Refuses files of a job if one of them would overwrite another, even under a different name: the
/// files of `--json` and `--output`, and the series in `--trace`. Does not check whether a file can
/// be written.
///
/// # Errors
/// The two options, with their values, and the remedy.
pub fn check_apart(
    json: Option<&JsonSink>,
    output: Option<&Path>,
    trace: Option<&Path>,
) -> Result<(), String> {
    let json = json.and_then(|sink| {
        if let JsonSink::File(path) = sink {
            Some(path.as_path())
        } else {
            None
        }
    });
    let places = [("--json", json), ("--output", output), ("--trace", trace)];
    let places: Vec<(&str, &Path, PathBuf)> = places
        .into_iter()
        .filter_map(|(flag, path)| {
            Some((flag, path?, benchkv_harness::file::location(path?).ok()?))
        })
        .collect();
    let is_in = |dir: &Path, file: &Path| file.parent() == Some(dir) && daemon_of(file).is_some();
    for (number, (flag, path, place)) in places.iter().enumerate() {
        let clash = places
            .iter()
            .skip(number + 1)
            .find(|(_, _, other)| other == place || is_in(other, place));
        if let Some((other_flag, other, _)) = clash {
            return Err(format!(
                "{flag} {} and {other_flag} {} are the same file; name two",
                path.display(),
                other.display()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_csv_is_refused() {
        assert_eq!(
            with_extension(&["csv"])("dir/x.csv"),
            Ok("dir/x.csv".into())
        );
        for name in ["x", "x.json", ".csv", "x.csv.gz", "x.parquet", ""] {
            assert!(
                with_extension(&["csv"])(name)
                    .unwrap_err()
                    .contains("end in .csv"),
                "{name}"
            );
        }
    }
}
