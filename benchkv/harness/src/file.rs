//! Files written at the end of a long run: checked before the run, and replaced as a whole.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, OFlags, access, fcntl_setfl, linkat};
use thiserror::Error;

/// Maximum time to wait for a pipe's reader when the result is complete, and the interval at which
/// the pipe is opened again.
const READER_LIMIT: Duration = Duration::from_secs(2);
const READER_INTERVAL: Duration = Duration::from_millis(20);

/// The reason why a file cannot be written.
#[derive(Debug, Error)]
#[error("{} cannot be written: {source}; {}", place.display(), remedy(source))]
pub struct WriteError {
    /// The file.
    pub place: PathBuf,
    /// The system's reason.
    pub source: io::Error,
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if source.raw_os_error() == Some(libc::ENAMETOOLONG) => "give it a shorter name",
        _ if source.raw_os_error() == Some(libc::ENXIO) => {
            "start a reader of the pipe before the end of the run, or name a file"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room, or name a file elsewhere"
        }
        _ => "name a file in a directory you may write to",
    }
}

/// Checks before a long run whether `path` can be written at the end of the run. Leaves everything
/// unchanged.
///
/// # Errors
/// The system's reason.
pub fn check(path: &Path) -> Result<(), WriteError> {
    let probed = match fs::symlink_metadata(path) {
        _ if !has_name(path) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it does not end in the name of a file",
        )),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ if is_replaceable(path) => create_new(path).map(drop),
        // A pipe is not opened: its reader would take the close for the end of the result.
        _ if fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) => {
            access(path, Access::WRITE_OK).map_err(io::Error::from)
        }
        _ => OpenOptions::new().write(true).open(path).map(drop),
    };
    probed.map_err(|source| WriteError {
        place: path.to_owned(),
        source,
    })
}

/// Returns whether `path` ends in a name. [`Path::file_name`] ignores a slash or dot at the end,
/// although the system treats such a path as a directory.
fn has_name(path: &Path) -> bool {
    let path = path.as_os_str().as_encoded_bytes();
    let last = path.rsplit(|byte| *byte == b'/').next();
    !matches!(last, None | Some(b"" | b"." | b".."))
}

/// Returns the location of `path`, existing or not, with links resolved. Two paths with one
/// location are one file or directory.
///
/// # Errors
/// The system's reason. The directory of `path` has to exist.
pub fn location(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let name = path.file_name().unwrap_or_default();
            Ok(fs::canonicalize(directory(path))?.join(name))
        }
        found => found,
    }
}

/// Writes `content`. A regular file is replaced as a whole when the content is complete. Any other
/// file (a pipe, `/dev/null`) is opened and written.
///
/// # Errors
/// The system's reason; a regular file is then unchanged.
pub fn write(path: &Path, content: &[u8]) -> Result<(), WriteError> {
    let written = if is_replaceable(path) {
        replace(path, content)
    } else {
        open_existing(path).and_then(|mut file| file.write_all(content))
    };
    written.map_err(|source| WriteError {
        place: path.to_owned(),
        source,
    })
}

/// Opens a file that is not replaced. The open of a pipe without a reader would wait without limit,
/// so the reader has [`READER_LIMIT`] to open it.
fn open_existing(path: &Path) -> io::Result<File> {
    let started = Instant::now();
    let file = loop {
        let mut options = OpenOptions::new();
        let options = options.write(true).truncate(true);
        match options.custom_flags(libc::O_NONBLOCK).open(path) {
            Err(error)
                if error.raw_os_error() == Some(libc::ENXIO)
                    && started.elapsed() < READER_LIMIT =>
            {
                sleep(READER_INTERVAL)
            }
            opened => break opened?,
        }
    };
    // The descriptor blocks from here on, so that writes wait for the reader.
    fcntl_setfl(&file, OFlags::empty())?;
    Ok(file)
}

/// Returns whether `path` is absent or a regular file, so that a new file may take its name. A
/// symbolic link is not replaced: its target is opened and written.
fn is_replaceable(path: &Path) -> bool {
    match fs::symlink_metadata(path) {
        Ok(found) => found.is_file(),
        Err(_) => true,
    }
}

/// Returns the name that a file has until it is complete: its final name and a suffix. The final
/// name is cut off if both together have more than 255 bytes.
fn partial_name(path: &Path) -> PathBuf {
    const LONGEST: usize = 255;
    let end = format!(".{}.partial", std::process::id());
    let name = path.file_name().unwrap_or_default().as_bytes();
    let begin = name.get(..LONGEST - end.len()).unwrap_or(name);
    path.with_file_name(OsStr::from_bytes(&[begin, end.as_bytes()].concat()))
}

/// A new file in the directory of `path`. If the file system permits, it has no name yet, so
/// nothing remains of it if the process is killed.
struct NewFile {
    file: File,
    /// Temporary name of the file: used all the time if the file system requires a name, otherwise
    /// only while the file takes its final name. Removed on drop.
    partial: PathBuf,
}

fn directory(path: &Path) -> &Path {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    dir.unwrap_or(Path::new("."))
}

fn create_new(path: &Path) -> io::Result<NewFile> {
    let partial = partial_name(path);
    let mut options = OpenOptions::new();
    options.write(true);
    let unnamed = options
        .clone()
        .custom_flags(libc::O_TMPFILE)
        .open(directory(path));
    let file = match unnamed {
        // Kernels and file systems that do not support the flag return one of these errors.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)
            ) =>
        {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&partial)?
        }
        opened => opened?,
    };
    Ok(NewFile { file, partial })
}

impl NewFile {
    fn rename(&self, path: &Path) -> io::Result<()> {
        if self.file.metadata()?.nlink() == 0 {
            let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, open, CWD, &self.partial, AtFlags::SYMLINK_FOLLOW)?;
        }
        fs::rename(&self.partial, path)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // The removal fails if the file has no name, or already has its final name.
        let _ = fs::remove_file(&self.partial);
    }
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = create_new(path)?;
    new.file.write_all(content)?;
    new.rename(path)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn a_full_file_system_needs_room_and_not_permission() {
        let refused = write(Path::new("/dev/full"), b"x").unwrap_err().to_string();
        assert!(
            refused.contains("No space left")
                && refused.ends_with("make room, or name a file elsewhere"),
            "{refused}"
        );
    }

    #[test]
    fn a_path_without_the_name_of_a_file_is_refused_before_the_run() {
        let dir = std::env::temp_dir();
        for path in [
            PathBuf::new(),
            dir.join("harness-new/"),
            dir.join("harness-new.csv/"),
            dir.join("."),
            dir.join(".."),
        ] {
            let refused = check(&path).unwrap_err().to_string();
            assert!(
                refused.contains("it does not end in the name of a file; name a file in"),
                "{refused}"
            );
        }
        assert!(!dir.join("harness-new").exists());
    }

    #[test]
    fn the_longest_name_can_be_written_and_a_longer_one_is_refused_before_the_run() {
        let dir = std::env::temp_dir().join(format!("harness-long-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for bytes in [235, 241, 255] {
            let path = dir.join("b".repeat(bytes));
            check(&path).unwrap();
            write(&path, b"1").unwrap();
            assert_eq!(fs::read(path).unwrap(), b"1");
        }
        let refused = check(&dir.join("b".repeat(256))).unwrap_err().to_string();
        assert!(
            refused.ends_with("File name too long (os error 36); give it a shorter name"),
            "{refused}"
        );
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 3);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_reader_of_a_pipe_sees_no_end_before_the_result() {
        let dir = std::env::temp_dir().join(format!("harness-pipe-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("pipe");
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name is a live string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // The open does not wait for a writer, so that `write` below finds this reader.
        let mut reader = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .unwrap();
        check(&path).unwrap();
        let mut polled = libc::pollfd {
            fd: reader.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        assert_eq!(
            // SAFETY: `polled` is one live entry.
            unsafe { libc::poll(&raw mut polled, 1, 0) },
            0,
            "the writer that the check was has gone"
        );
        write(&path, b"{}").unwrap();
        let mut read = String::new();
        io::Read::read_to_string(&mut reader, &mut read).unwrap();
        assert_eq!(read, "{}");
        fs::remove_dir_all(dir).unwrap();
    }

    /// Leaks the file, because a killed process drops nothing.
    #[test]
    fn a_file_that_is_not_complete_has_no_name() {
        let dir = std::env::temp_dir().join(format!("harness-partial-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("a.json");
        let names = || {
            fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect::<Vec<_>>()
        };
        let mut new = create_new(&path).unwrap();
        new.file.write_all(b"{").unwrap();
        assert!(names().is_empty(), "{:?}", names());
        std::mem::forget(new);
        for content in [b"1", b"2"] {
            write(&path, content).unwrap();
            assert_eq!(
                (names(), fs::read(&path).unwrap()),
                (vec!["a.json".into()], content.to_vec())
            );
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_has_one_location_by_whatever_links() {
        let dir = std::env::temp_dir().join(format!("harness-file-{}", std::process::id()));
        fs::create_dir_all(dir.join("sub")).unwrap();
        std::os::unix::fs::symlink(&dir, dir.join("link")).unwrap();
        let of = |name: &str| location(&dir.join(name)).unwrap();
        let missing = of("a.csv");
        assert_eq!(
            [of("sub/../a.csv"), of("link/a.csv")],
            [missing.clone(), missing.clone()]
        );
        fs::write(dir.join("a.csv"), b"").unwrap();
        std::os::unix::fs::symlink("a.csv", dir.join("b.csv")).unwrap();
        assert_eq!([of("a.csv"), of("b.csv")], [missing.clone(), missing]);
        assert_ne!(of("c.csv"), of("a.csv"));
        assert_eq!(
            location(&dir.join("none/a.csv")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        assert!(location(Path::new("harness-new")).unwrap().is_absolute());
        fs::remove_dir_all(dir).unwrap();
    }
}
