//! Locks that the kernel drops when their process dies: POSIX record locks, one byte each.
//!
//! POSIX locks (`F_SETLK`) and not OFD locks, because a forked child keeps an OFD lock alive after its owner's
//! death. Their price is two traps, which this file closes:
//! - closing *any* descriptor of a file drops *all* locks this process has on it. So a process opens a file
//!   exactly once (O4): a registry keyed by (device, inode) hands out the one descriptor. A file's identity is looked
//!   up through an `O_PATH` descriptor, whose closing drops nothing.
//! - `F_GETLK` does not report the locks of the asking process. So the registry remembers them; in a forked child, which has a copy of
//!   the registry and none of the locks, it forgets them.
//!
//! Code outside this crate that opens and closes the same file still drops the locks; that is why a lock that
//! is free proves a death only together with the robust word of [`crate::region`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::sys;

/// Why a byte could not be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// This or another process holds the byte.
    #[error("byte {byte} is locked by a living process (perhaps this one)")]
    Held {
        /// The byte asked for.
        byte: u64,
    },
    /// The kernel refused for another reason.
    #[error("cannot lock byte {byte}: {source}")]
    Io {
        /// The byte asked for.
        byte: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Identity of an open file: device and inode. It cannot be reused while the file is open.
pub(crate) type Key = (u64, u64);

#[derive(Debug)]
struct OpenFile {
    /// `None`: this process has the file to itself, and it is none.
    fd: Option<File>,
    key: Key,
    held: Mutex<Held>,
}

/// Bytes that the process `pid` holds; `F_GETLK` does not tell.
#[derive(Debug, Default)]
struct Held {
    pid: u32,
    bytes: BTreeSet<u64>,
}

impl OpenFile {
    /// Returns the locks that this process holds.
    fn held(&self) -> MutexGuard<'_, Held> {
        let mut held = unpoisoned(&self.held);
        let pid = std::process::id();
        if held.pid != pid {
            *held = Held { pid, bytes: BTreeSet::new() };
        }
        held
    }
}

/// Every file this process has open for locking. Opening and the last close happen under its mutex: a close
/// that overlapped another thread's open and lock would drop that lock.
static REGISTRY: Mutex<BTreeMap<Key, Weak<OpenFile>>> = Mutex::new(BTreeMap::new());

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file of which this process has exactly one descriptor, whose bytes can be locked.
///
/// Cheap to clone; the descriptor closes with the last clone. `Send + Sync`.
#[derive(Debug, Clone)]
pub struct LockFile {
    /// Dropped under the registry's mutex.
    file: ManuallyDrop<Arc<OpenFile>>,
}

impl LockFile {
    /// Takes the descriptor of a file that was just created; `WouldBlock` if another thread found and opened the file meanwhile.
    pub(crate) fn adopt(fd: File) -> io::Result<Self> {
        let key = key_of(&fd.metadata()?);
        let mut files = unpoisoned(&REGISTRY);
        if files.contains_key(&key) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self::insert(&mut files, key, fd))
    }

    /// Opens the regular file at `path` for reading and writing, or shares the descriptor
    /// this process already has of it. A symbolic link is an error (`ELOOP`), as is another kind of file.
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
            return Ok(Self { file: ManuallyDrop::new(file) });
        }
        let fd = File::options().read(true).write(true).open(sys::path_of(seen.as_raw_fd()))?;
        Ok(Self::insert(&mut files, key, fd))
    }

    /// Bytes to lock among the holders of this value and its clones, for memory that no other process has. The kernel knows nothing of them.
    pub(crate) fn of_no_file() -> Self {
        Self::of(None, (0, 0))
    }

    fn of(fd: Option<File>, key: Key) -> Self {
        Self { file: ManuallyDrop::new(Arc::new(OpenFile { fd, key, held: Mutex::default() })) }
    }

    fn insert(files: &mut BTreeMap<Key, Weak<OpenFile>>, key: Key, fd: File) -> Self {
        let inserted = Self::of(Some(fd), key);
        files.insert(key, Arc::downgrade(&inserted.file));
        inserted
    }

    /// Locks one byte for this process, without waiting. The lock ends with the returned value, with the
    /// process (`SIGKILL` included), and never with a forked child's end.
    ///
    /// Byte numbers are independent of the file's length and contents.
    ///
    /// # Errors
    /// [`LockError::Held`] when any process, this one included, holds the byte; [`LockError::Io`] otherwise.
    pub fn try_lock(&self, byte: u64) -> Result<ByteLock, LockError> {
        let mut held = self.file.held();
        if held.bytes.contains(&byte) {
            return Err(LockError::Held { byte });
        }
        if let Some(fd) = &self.file.fd {
            let mut lock = flock(libc::F_WRLCK, byte);
            // SAFETY: `lock` is a valid `flock` for the whole call.
            sys::retry(|| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &mut lock) }).map_err(|source| {
                match source.raw_os_error() {
                    Some(libc::EAGAIN | libc::EACCES) => LockError::Held { byte },
                    _ => LockError::Io { byte, source },
                }
            })?;
        }
        held.bytes.insert(byte);
        let pid = held.pid;
        drop(held);
        Ok(ByteLock { file: self.clone(), byte, pid })
    }

    /// Returns whether any process, this one included, holds the byte. When the kernel does not say, the answer is `true`: death must be
    /// proven, not presumed. About 200 ns.
    pub fn is_held(&self, byte: u64) -> bool {
        if self.file.held().bytes.contains(&byte) {
            return true;
        }
        let Some(fd) = &self.file.fd else { return false };
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
    /// There is none.
    pub(crate) fn file(&self) -> io::Result<&File> {
        self.file.fd.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Device and inode.
    pub(crate) fn key(&self) -> Key {
        self.file.key
    }
}

/// Returns what identifies the file of this metadata.
pub(crate) fn key_of(metadata: &Metadata) -> Key {
    (metadata.dev(), metadata.ino())
}

fn flock(kind: libc::c_int, byte: u64) -> libc::flock {
    // SAFETY: `flock` is plain data for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // The three lock kinds are 0, 1 and 2 on every Linux.
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // A byte beyond the signed range cannot be named to the kernel, which refuses the negative number.
    lock.l_start = byte as libc::off_t;
    lock.l_len = 1;
    lock
}

/// -1, which every system call refuses, if there is no file.
impl AsRawFd for LockFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        let mut files = unpoisoned(&REGISTRY);
        // The last one: nobody else can make another of it, except through the registry.
        if Arc::strong_count(&self.file) == 1 {
            files.remove(&self.file.key);
        }
        // SAFETY: nobody uses the field after.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}

/// One locked byte of a [`LockFile`]; dropping it unlocks the byte, except in a forked child of the process that locked it.
#[derive(Debug)]
pub struct ByteLock {
    file: LockFile,
    byte: u64,
    /// The process that holds it.
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
