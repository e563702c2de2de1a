//! A region's file before it has its name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, linkat};

use crate::dir::Dir;
use crate::header::{self, HEADER_BYTES, OWNER_BYTE, TEMPORARY_PREFIX};
use crate::lock::{ByteLock, LockError, LockFile};
use crate::region::CreateError;
use crate::sys;

/// Maximum number of temporary names to try: an attempt fails if a thread that sweeps the directory
/// has opened the file meanwhile.
const TEMPORARY_ATTEMPTS: usize = 16;

/// An empty file that has not got a region's name yet, with the owner's lock taken.
#[derive(Debug)]
pub(super) struct Fresh {
    pub(super) file: LockFile,
    pub(super) lock: ByteLock,
    pub(super) temporary: Temporary,
}

/// The name that a file has until it gets its own, where the file system has no `O_TMPFILE`. The
/// drop removes the temporary name.
#[derive(Debug)]
pub(super) struct Temporary(Option<(Dir, String)>);

impl Fresh {
    pub(super) fn new(dir: &Dir) -> io::Result<Self> {
        match rw().custom_flags(libc::O_TMPFILE).open(dir.at(".")) {
            Ok(fd) => {
                let (file, lock) = locked(fd)?;
                Ok(Self {
                    file,
                    lock,
                    temporary: Temporary(None),
                })
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
                Self::with_temporary_name(dir)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a file with a temporary name, for file systems without `O_TMPFILE`. If the maker dies
    /// after it has written the mark, a sweep removes the file. The mark is written after the lock
    /// is taken, so that no process takes the file of a living maker. The file of a maker that is
    /// killed before the mark stays, empty, because nothing shows its owner.
    pub(super) fn with_temporary_name(dir: &Dir) -> io::Result<Self> {
        for _ in 0..TEMPORARY_ATTEMPTS {
            let name = format!("{TEMPORARY_PREFIX}{:016x}", sys::random_nonzero()?);
            let fd = rw().create_new(true).open(dir.at(&name))?;
            let temporary = Temporary(Some((dir.clone(), name)));
            match locked(fd) {
                Ok((file, lock)) => {
                    header::mark_temporary(&file);
                    return Ok(Self {
                        file,
                        lock,
                        temporary,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }
}

/// Returns options to read and write a file. A file made with these options has mode 0600.
fn rw() -> OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    options
}

fn locked(fd: File) -> io::Result<(LockFile, ByteLock)> {
    let file = LockFile::adopt(fd)?;
    match file.try_lock(OWNER_BYTE) {
        Ok(lock) => Ok((file, lock)),
        Err(LockError::Held { .. }) => Err(io::ErrorKind::WouldBlock.into()),
        Err(LockError::Io { source, .. }) => Err(source),
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some((dir, name)) = &self.0 {
            let _ = fs::remove_file(dir.at(name));
        }
    }
}

/// Gives `file` the name `to`; `AlreadyExists` if that is taken.
pub(super) fn link(file: &LockFile, to: PathBuf) -> io::Result<()> {
    linkat(
        CWD,
        sys::path_of(file.as_raw_fd()),
        CWD,
        to,
        AtFlags::SYMLINK_FOLLOW,
    )
    .map_err(Into::into)
}

/// Allocates the header and `user_bytes` bytes and returns their sum. Does not use `ftruncate`,
/// which would succeed beyond the end of a full tmpfs: a process that touched the memory later
/// would get SIGBUS.
pub(super) fn allocate(
    file: &LockFile,
    user_bytes: usize,
    path: &Path,
) -> Result<usize, CreateError> {
    let path = || path.to_owned();
    let refused = |source| CreateError::Io {
        path: path(),
        source,
    };
    let file = file.file().map_err(refused)?;
    let no_space = |need| CreateError::NoSpace {
        path: path(),
        need,
        have: sys::free_bytes(file),
    };
    let need = (HEADER_BYTES as u64).saturating_add(user_bytes as u64);
    let (Ok(file_bytes), Ok(length)) = (usize::try_from(need), libc::off_t::try_from(need)) else {
        return Err(no_space(need));
    };
    if let Some(limit) = sys::file_size_limit_below(need) {
        return Err(CreateError::FileLimit {
            path: path(),
            need,
            limit,
        });
    }
    loop {
        // SAFETY: `posix_fallocate` takes no pointer, and the file is open.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
            0 => return Ok(file_bytes),
            libc::EINTR => {}
            libc::ENOSPC | libc::EFBIG => return Err(no_space(need)),
            code => return Err(refused(io::Error::from_raw_os_error(code))),
        }
    }
}
