//! `--output`: the flat form of a result in a file, as CSV or Parquet. One job is one file, which a later job with the same name
//! replaces: appending would mix rows of several jobs and versions in one table.

use std::path::{Path, PathBuf};

use harness::file::WriteError;
use harness::report::JsonSink;
use thiserror::Error;

use self::file::{Format, OutputFile};
use crate::result::{JobResult, Value, rows};
use crate::trace::TraceFile;

pub mod file;
#[cfg(feature = "parquet")]
mod parquet;

/// The table cannot be written.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] WriteError),
    /// The table cannot be encoded in this format.
    #[error("the result cannot be encoded: {0}")]
    Encode(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl OutputError {
    fn encode(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Encode(Box::new(error))
    }
}

/// Writes the table of `result`. Replaces an existing file.
///
/// # Errors
/// The system's reason; a partly written file is not left behind.
pub fn write(file: &OutputFile, result: &JobResult) -> Result<(), OutputError> {
    let content = match file.format {
        Format::Csv => csv(result)?,
        #[cfg(feature = "parquet")]
        Format::Parquet => parquet::encode(result).map_err(OutputError::encode)?,
    };
    Ok(harness::file::write(file.path(), &content)?)
}

/// Refuses files of a job if one would be written over another, by any names: `--json`, `--output`, `--hgrm`, and the series in
/// `--trace`. Does not check whether a file can be written.
///
/// # Errors
/// The two options, with their values, and the remedy.
pub fn check_apart(json: Option<&JsonSink>, output: Option<&OutputFile>, hgrm: Option<&Path>, trace: Option<&Path>) -> Result<(), String> {
    let json = json.and_then(|sink| if let JsonSink::File(path) = sink { Some(path.as_path()) } else { None });
    let places = [("--json", json), ("--output", output.map(OutputFile::path)), ("--hgrm", hgrm), ("--trace", trace)];
    let places: Vec<(&str, &Path, PathBuf)> =
        places.into_iter().filter_map(|(flag, path)| Some((flag, path?, harness::file::location(path?).ok()?))).collect();
    let is_in = |dir: &Path, file: &Path| file.parent() == Some(dir) && TraceFile::is_named(file);
    for (number, (flag, path, place)) in places.iter().enumerate() {
        let clash = places.iter().skip(number + 1).find(|(_, _, other)| other == place || is_in(other, place));
        if let Some((other_flag, other, _)) = clash {
            let (path, other) = (path.display(), other.display());
            return Err(format!("{flag} {path} and {other_flag} {other} are in each other's place; give each a name of its own"));
        }
    }
    Ok(())
}

/// Encodes the table as CSV by RFC 4180, with a header. A cell without a value is empty. Numbers read back unchanged.
fn csv(result: &JobResult) -> Result<Vec<u8>, OutputError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let rows = rows(result);
    let header = rows.first().into_iter().flatten().map(|cell| cell.column.as_bytes());
    writer.write_record(header).map_err(OutputError::encode)?;
    for row in rows {
        let texts = row.into_iter().map(|cell| match cell.value {
            Value::Text(text) => text,
            Value::Count(count) => count.map(|count| count.to_string()),
            Value::Number(number) => number.map(|number| number.to_string()),
        });
        writer.write_record(texts.map(Option::unwrap_or_default)).map_err(OutputError::encode)?;
    }
    writer.into_inner().map_err(|error| OutputError::encode(error.into_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_the_format_and_others_are_refused_with_what_to_do() {
        assert_eq!("dir/x.csv".parse::<OutputFile>().unwrap().path(), Path::new("dir/x.csv"));
        for name in ["x", "x.json", ".csv", "x.csv.gz", ""] {
            let error = name.parse::<OutputFile>().unwrap_err();
            assert!(error.contains(".csv or .parquet"), "{name}: {error}");
        }
        let parquet = "x.parquet".parse::<OutputFile>();
        if cfg!(feature = "parquet") {
            assert!(parquet.is_ok());
        } else {
            assert!(parquet.unwrap_err().contains("--features parquet"));
        }
    }
}
