//! Locks that the kernel drops when their process dies: POSIX record locks, one byte each.
//!
//! The locks are POSIX locks (`F_SETLK`). OFD locks are not used, because a forked child keeps them
//! alive after its parent's death. POSIX locks have two traps, which this file closes:
//! - Closing *any* descriptor of a file drops *all* locks that the process has on the file. So a
//!   process opens a file exactly once (O4 of `docs/shm-protocols.md`): a registry, keyed by device
//!   and inode, returns the one descriptor. The identity of a file is read through an `O_PATH`
//!   descriptor, whose close drops no lock.
//! - `F_GETLK` does not report the locks of the calling process. So the registry records them. A
//!   forked child has a copy of the registry and none of the locks; it clears the record.
//!
//! Code outside this crate that opens and closes the same file still drops the locks. So a free
//! lock proves a death only together with the robust word of [`crate::region`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::sys;

/// The reason why a byte could not be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// A living process, maybe this process, holds the byte.
    #[error("byte {byte} is locked by a living process (perhaps this one)")]
    Held {
        /// The byte.
        byte: u64,
    },
    /// The kernel refused for another reason.
    #[error("cannot lock byte {byte}: {source}")]
    Io {
        /// The byte.
        byte: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The identity of an open file: device and inode. The system uses it for no other file before the
/// last descriptor of the file is closed.
pub(crate) type Key = (u64, u64);

#[derive(Debug)]
struct OpenFile {
    /// `None` for an in-memory directory: there is no file, and no other process to exclude.
    fd: Option<File>,
    key: Key,
    held: Mutex<Held>,
}

/// The bytes that the process `pid` holds, which `F_GETLK` does not report.
#[derive(Debug, Default)]
struct Held {
    pid: u32,
    bytes: BTreeSet<u64>,
}

impl OpenFile {
    /// Returns the record of the bytes that this process holds; a forked child clears its copy.
    fn held(&self) -> MutexGuard<'_, Held> {
        let mut held = unpoisoned(&self.held);
        let pid = std::process::id();
        if held.pid != pid {
            *held = Held {
                pid,
                bytes: BTreeSet::new(),
            };
        }
        held
    }
}

/// The files that this process has open for locking. The mutex is held during each open and each
/// last close: a close that overlaps another thread's open and lock would drop that lock.
static REGISTRY: Mutex<BTreeMap<Key, Weak<OpenFile>>> = Mutex::new(BTreeMap::new());

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file whose bytes can be locked. This process has exactly one descriptor of it, which is closed
/// with the last clone. Cheap to clone; `Send + Sync`.
#[derive(Debug, Clone)]
pub struct LockFile {
    /// Dropped under the registry's mutex.
    file: ManuallyDrop<Arc<OpenFile>>,
}

impl LockFile {
    /// Registers the descriptor of a file that was just created. Fails with `WouldBlock` if another
    /// thread has opened the file meanwhile.
    pub(crate) fn adopt(fd: File) -> io::Result<Self> {
        let key = key_of(&fd.metadata()?);
        let mut files = unpoisoned(&REGISTRY);
        if files.contains_key(&key) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self::insert(&mut files, key, fd))
    }

    /// Opens the regular file at `path` for reading and writing, or shares this process's
    /// descriptor of it. A symbolic link is an error (`ELOOP`), as is any other kind of file
    /// (`EINVAL`).
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let seen = sys::open_path(path, libc::O_NOFOLLOW)?;
        let metadata = seen.metadata()?;
        match metadata.file_type() {
            kind if kind.is_file() => {}
            kind if kind.is_symlink() => return Err(io::Error::from_raw_os_error(libc::ELOOP)),
            _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
        let key = key_of(&metadata);
        let mut files = unpoisoned(&REGISTRY);
        if let Some(file) = files.get(&key).and_then(Weak::upgrade) {
            return Ok(Self {
                file: ManuallyDrop::new(file),
            });
        }
        let fd = File::options()
            .read(true)
            .write(true)
            .open(sys::path_of(seen.as_raw_fd()))?;
        Ok(Self::insert(&mut files, key, fd))
    }

    /// Makes a file without a descriptor, for memory that no other process has. Its locks exclude
    /// only the holders of this value and its clones.
    pub(crate) fn of_no_file() -> Self {
        Self::of(None, (0, 0))
    }

    fn of(fd: Option<File>, key: Key) -> Self {
        Self {
            file: ManuallyDrop::new(Arc::new(OpenFile {
                fd,
                key,
                held: Mutex::default(),
            })),
        }
    }

    fn insert(files: &mut BTreeMap<Key, Weak<OpenFile>>, key: Key, fd: File) -> Self {
        let inserted = Self::of(Some(fd), key);
        files.insert(key, Arc::downgrade(&inserted.file));
        inserted
    }

    /// Locks one byte for this process, without waiting. The lock ends with the returned value or
    /// with the process (also by `SIGKILL`). A forked child neither has the lock nor keeps it
    /// alive.
    ///
    /// Byte numbers are independent of the file's length and contents.
    ///
    /// # Errors
    /// [`LockError::Held`] if a process, maybe this process, holds the byte; otherwise
    /// [`LockError::Io`].
    pub fn try_lock(&self, byte: u64) -> Result<ByteLock, LockError> {
        let mut held = self.file.held();
        if held.bytes.contains(&byte) {
            return Err(LockError::Held { byte });
        }
        if let Some(fd) = &self.file.fd {
            let mut lock = flock(libc::F_WRLCK, byte);
            // SAFETY: `lock` is a valid `flock` for the whole call.
            sys::retry(|| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &mut lock) })
                .map_err(|source| match source.raw_os_error() {
                    Some(libc::EAGAIN | libc::EACCES) => LockError::Held { byte },
                    _ => LockError::Io { byte, source },
                })?;
        }
        held.bytes.insert(byte);
        let pid = held.pid;
        drop(held);
        Ok(ByteLock {
            file: self.clone(),
            byte,
            pid,
        })
    }

    /// Returns whether a process, maybe this process, holds the byte. Returns `true` if the kernel
    /// does not answer: a death must be proven. Takes about 200 ns.
    pub fn is_held(&self, byte: u64) -> bool {
        if self.file.held().bytes.contains(&byte) {
            return true;
        }
        let Some(fd) = &self.file.fd else {
            return false;
        };
        let mut lock = flock(libc::F_WRLCK, byte);
        // SAFETY: `lock` is a valid `flock` for the whole call, which writes the answer into it.
        match sys::retry(|| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLK, &mut lock) }) {
            Ok(_) => i32::from(lock.l_type) != libc::F_UNLCK,
            Err(_) => true,
        }
    }

    /// Returns the file.
    ///
    /// # Errors
    /// The directory is in memory: there is no file.
    pub(crate) fn file(&self) -> io::Result<&File> {
        self.file
            .fd
            .as_ref()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(crate) fn key(&self) -> Key {
        self.file.key
    }
}

pub(crate) fn key_of(metadata: &Metadata) -> Key {
    (metadata.dev(), metadata.ino())
}

fn flock(kind: libc::c_int, byte: u64) -> libc::flock {
    // SAFETY: `flock` is plain data for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // The lock kinds are numbers below 10 on every Linux, so they fit.
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // A byte beyond the signed range becomes a negative number, which the kernel refuses.
    lock.l_start = byte as libc::off_t;
    lock.l_len = 1;
    lock
}

/// Without a file the descriptor is -1, which every system call refuses.
impl AsRawFd for LockFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        let mut files = unpoisoned(&REGISTRY);
        // With a count of 1, this is the last clone: only the registry, which is locked, could make
        // another.
        if Arc::strong_count(&self.file) == 1 {
            files.remove(&self.file.key);
        }
        // SAFETY: the field is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}

/// A locked byte of a [`LockFile`]. The drop unlocks the byte, except in a forked child of the
/// process that locked it.
#[derive(Debug)]
pub struct ByteLock {
    file: LockFile,
    byte: u64,
    /// The process that holds the byte.
    pid: u32,
}

impl ByteLock {
    /// Returns the byte's number.
    pub fn byte(&self) -> u64 {
        self.byte
    }
}

impl Drop for ByteLock {
    fn drop(&mut self) {
        let mut held = self.file.file.held();
        if held.pid != self.pid {
            return;
        }
        if let Some(fd) = &self.file.file.fd {
            let mut lock = flock(libc::F_UNLCK, self.byte);
            // SAFETY: `lock` is a valid `flock` for the whole call.
            let _ = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &mut lock) };
        }
        held.bytes.remove(&self.byte);
    }
}
