//! The directory that holds the named regions of one user, or of one process.

mod memory;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Access, AtFlags, FlockOperation, accessat, flock};
use rustix::io::{Errno, retry_on_intr};

use crate::clock::Clock;
use crate::header::{self, Standing};
use crate::lock::{self, LockFile};
use crate::sys;
pub(crate) use memory::{Memory, Parts};

/// Longest region name in bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// Maximum number of attempts to lock the directory for the removal of a dead region.
const LOCK_ATTEMPTS: usize = 256;

/// The reason why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirError {
    /// The directory does not exist. Only the default directory is created: a mistyped path must
    /// not become a second, empty directory.
    #[error("shared-memory directory {} does not exist: create it, or leave the option out", .0.display())]
    Missing(PathBuf),
    /// The path names a file that is not a directory, or a symbolic link.
    #[error("{} is not a directory, or is a symbolic link: name the directory itself", .0.display())]
    NotADirectory(PathBuf),
    /// Another user owns the directory and could replace its files.
    #[error("shared-memory directory {} belongs to user {owner}, not to {user}: use a directory of your own, or run as that user", path.display())]
    ForeignOwner {
        /// The directory.
        path: PathBuf,
        /// User id of the directory's owner.
        owner: u32,
        /// The effective user id of this process.
        user: u32,
    },
    /// The group or others may write to the directory.
    #[error("shared-memory directory {} has mode {mode:04o}, others may write to it: chmod 0700", path.display())]
    OpenToOthers {
        /// The directory.
        path: PathBuf,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// This process may not make files in the directory.
    #[error("shared-memory directory {} is not writable: {source}", path.display())]
    NotWritable {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Any other refusal of the kernel.
    #[error("cannot use shared-memory directory {}: {source}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// An open directory of regions. Cheap to clone, `Send + Sync`.
#[derive(Debug, Clone)]
pub struct Dir {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    place: Place,
    clock: Clock,
}

#[derive(Debug)]
enum Place {
    Files(File),
    Memory(Memory),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// The name is free: there was no file, or its owner was dead and the file was removed, by this
    /// or another process.
    Gone,
    /// The owner of the file lives, or is not proven dead.
    Alive,
    /// The file is not a region of this crate, version and user: it is never touched.
    Foreign,
    /// Another process, maybe a stopped one, is removing a file in this directory.
    Busy,
}

impl Dir {
    /// Opens `path`, or the user's default `/dev/shm/copyrpc-<uid>`, created with mode 0700.
    ///
    /// The directory must belong to the effective user and be writable by no other user. A `tmpfs`
    /// is the right place: on a disk, files of owners that died in a power failure cannot be
    /// distinguished from files of living owners and must be removed by hand.
    ///
    /// # Errors
    /// [`DirError`], with the path and a remedy.
    pub fn open(path: Option<&Path>) -> Result<Self, DirError> {
        let user = sys::user();
        let path = match path {
            // The path has no slashes at its end: with them, a symbolic link would be followed.
            Some(path) => path.components().collect(),
            None => default_path(user)?,
        };
        let io_error = |source| DirError::Io {
            path: path.clone(),
            source,
        };
        // The path is opened with `O_PATH`, so that an error can report the owner of a directory
        // that this user may not read.
        let opened = sys::open_path(&path, libc::O_DIRECTORY | libc::O_NOFOLLOW);
        let fd = opened.map_err(|source| match source.raw_os_error() {
            Some(libc::ENOENT) => DirError::Missing(path.clone()),
            Some(libc::ENOTDIR | libc::ELOOP) => DirError::NotADirectory(path.clone()),
            _ => io_error(source),
        })?;
        let metadata = fd.metadata().map_err(io_error)?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        if owner != user {
            return Err(DirError::ForeignOwner { path, owner, user });
        }
        if mode & 0o022 != 0 {
            return Err(DirError::OpenToOthers { path, mode });
        }
        // `accessat` checks the real user id: the user who starts a set-uid program needs the
        // access too.
        accessat(
            &fd,
            ".",
            Access::WRITE_OK | Access::EXEC_OK,
            AtFlags::empty(),
        )
        .map_err(|error| DirError::NotWritable {
            path: path.clone(),
            source: error.into(),
        })?;
        Ok(Self::new(path, Place::Files(fd), Clock::default()))
    }

    /// Makes an empty directory of this process alone. Its regions are memory that no other process
    /// can open; they take no file, no descriptor and no lock of the kernel, and are freed with
    /// their last user. The users of a region use `clock` for the deadlines of their calls.
    #[must_use]
    pub fn in_memory(clock: Clock) -> Self {
        Self::new(
            PathBuf::from("(memory)"),
            Place::Memory(Memory::default()),
            clock,
        )
    }

    fn new(path: PathBuf, place: Place, clock: Clock) -> Self {
        Self {
            inner: Arc::new(Inner { path, place, clock }),
        }
    }

    /// Returns the clock that the users of the directory's regions use for their deadlines.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    pub(crate) fn memory(&self) -> Option<&Memory> {
        match &self.inner.place {
            Place::Files(_) => None,
            Place::Memory(memory) => Some(memory),
        }
    }

    /// Returns the path with which the directory was opened. A directory in memory has no path: the
    /// result is then a fixed text for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Removes the regions whose owner is proven dead. Returns their number. Files without a header
    /// of this crate, files of other users, and regions whose owner is not proven dead stay. Safe
    /// against any number of processes doing the same.
    ///
    /// # Errors
    /// The directory cannot be listed. A file that cannot be examined is skipped.
    pub fn sweep(&self) -> Result<usize, DirError> {
        if self.memory().is_some() {
            return Ok(0);
        }
        let io_error = |source| DirError::Io {
            path: self.inner.path.clone(),
            source,
        };
        let entries = fs::read_dir(self.at(".")).map_err(io_error)?;
        let mut removed = 0;
        for entry in entries {
            let name = entry.map_err(io_error)?.file_name();
            let Some(name) = name.to_str() else { continue };
            removed += usize::from(matches!(self.remove_dead(name), Ok(Removal::Gone)));
        }
        Ok(removed)
    }

    /// Returns a path of `name` in the opened directory, valid also after that directory was
    /// renamed or replaced. For a directory in memory, no file is at the path.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        match &self.inner.place {
            Place::Files(fd) => sys::path_of(fd.as_raw_fd()).join(name),
            Place::Memory(_) => PathBuf::new(),
        }
    }

    /// Removes the region `name`, or the file of that temporary name, if its owner is proven dead.
    ///
    /// The file of a dead owner never has a living owner again: its lock is taken only once, before
    /// the file gets its name. But after one process has removed the file, a new region may take
    /// the name, and a second process that found the same dead owner must not unlink that region.
    /// So removals exclude each other, and check that the name still has the same file.
    pub(crate) fn remove_dead(&self, name: &str) -> io::Result<Removal> {
        let file = match LockFile::open(&self.at(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Removal::Gone),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::EINVAL)) => {
                return Ok(Removal::Foreign);
            }
            Err(error) => return Err(error),
        };
        let standing = if header::is_temporary(name) {
            header::standing_of_temporary
        } else {
            header::standing
        };
        match standing(&file)? {
            Standing::Foreign => return Ok(Removal::Foreign),
            Standing::Alive => return Ok(Removal::Alive),
            Standing::Dead => {}
        }
        let Some(_removing) = self.lock_removals()? else {
            return Ok(Removal::Busy);
        };
        self.unlink_if_same(name, &file)?;
        Ok(Removal::Gone)
    }

    pub(crate) fn unlink_if_same(&self, name: &str, file: &LockFile) -> io::Result<()> {
        let found = fs::symlink_metadata(self.at(name))
            .map(|metadata| lock::key_of(&metadata) == file.key());
        match found.and_then(|is_same| {
            if is_same {
                fs::remove_file(self.at(name))
            } else {
                Ok(())
            }
        }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Returns the lock that serialises removals; `None` after [`LOCK_ATTEMPTS`] attempts, since
    /// the process that holds it may be stopped.
    pub(crate) fn lock_removals(&self) -> io::Result<Option<File>> {
        // Each call opens its own descriptor, because the lock belongs to the open file and threads
        // share `self`.
        let fd = File::open(self.at("."))?;
        for _ in 0..LOCK_ATTEMPTS {
            match retry_on_intr(|| flock(&fd, FlockOperation::NonBlockingLockExclusive)) {
                Ok(()) => return Ok(Some(fd)),
                Err(Errno::WOULDBLOCK) => std::thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

fn default_path(user: u32) -> Result<PathBuf, DirError> {
    let path = PathBuf::from(format!("/dev/shm/copyrpc-{user}"));
    let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
        .create(&path);
    match made {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(DirError::NotWritable { path, source })
        }
        _ => Ok(path),
    }
}
