//! The file of `--output`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use harness::file::{self, WriteError};

/// The option of the flat table.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct OutputArgs {
    /// Also write the result as a flat table: a row for the job, for each run and for each rank. The name ends in .csv, or in .parquet where
    /// benchkv is built with the feature parquet; a file of that name is replaced.
    #[arg(long, value_name = "FILE.csv|FILE.parquet")]
    pub output: Option<OutputFile>,
}

/// The file of the table, and its format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile {
    path: PathBuf,
    pub(super) format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Csv,
    #[cfg(feature = "parquet")]
    Parquet,
}

impl FromStr for OutputFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = PathBuf::from(text);
        let format = match path.extension().and_then(|extension| extension.to_str()) {
            Some("csv") => Format::Csv,
            #[cfg(feature = "parquet")]
            Some("parquet") => Format::Parquet,
            #[cfg(not(feature = "parquet"))]
            Some("parquet") => {
                return Err(
                    "this build writes no Parquet: build benchkv with --features parquet, or name a file that ends in .csv".to_owned()
                );
            }
            _ => return Err("the name says the format: it has to end in .csv or .parquet".to_owned()),
        };
        Ok(Self { path, format })
    }
}

impl OutputFile {
    /// Checks before a long run whether the table can be written at its end. Changes nothing.
    ///
    /// # Errors
    /// The system's reason.
    pub fn check(&self) -> Result<(), WriteError> {
        file::check(&self.path)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}
