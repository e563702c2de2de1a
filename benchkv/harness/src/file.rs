//! Files written at the end of a long run: looked at before it, and replaced as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A file cannot be written.
#[derive(Debug, Error)]
#[error("{} cannot be written: {source}; name a file in a directory you may write to", place.display())]
pub struct WriteError {
    /// The file.
    pub place: PathBuf,
    /// The system's reason.
    pub source: io::Error,
}

/// Finds out before a long run whether `path` can be written at its end. Changes nothing.
///
/// # Errors
/// The system's reason.
pub fn check(path: &Path) -> Result<(), WriteError> {
    let probed = if is_replaceable(path) {
        let partial = partial_name(path);
        create_new(&partial).and_then(|_| fs::remove_file(&partial))
    } else {
        OpenOptions::new().write(true).open(path).map(drop)
    };
    probed.map_err(|source| WriteError { place: path.to_owned(), source })
}

/// Writes `content`. A regular file is replaced as a whole when the content is complete; anything else (a pipe, `/dev/null`) is written to.
///
/// # Errors
/// The system's reason; a partly written file is not left behind.
pub fn write(path: &Path, content: &[u8]) -> Result<(), WriteError> {
    let written = if is_replaceable(path) {
        replace(path, content)
    } else {
        OpenOptions::new().write(true).truncate(true).open(path).and_then(|mut file| file.write_all(content))
    };
    written.map_err(|source| WriteError { place: path.to_owned(), source })
}

/// Whether `path` is absent or a regular file, so that a new file may take its name. A symbolic link counts as what it points to and
/// is written through, not replaced.
fn is_replaceable(path: &Path) -> bool {
    match fs::symlink_metadata(path) {
        Ok(found) => found.is_file(),
        Err(_) => true,
    }
}

fn partial_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    path.with_file_name(name)
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let partial = partial_name(path);
    let outcome = create_new(&partial).and_then(|mut file| file.write_all(content)).and_then(|()| fs::rename(&partial, path));
    if outcome.is_err() {
        // The first error is the one to report; the leftover may not even exist.
        let _ = fs::remove_file(&partial);
    }
    outcome
}
