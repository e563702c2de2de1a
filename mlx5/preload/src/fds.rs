//! Which descriptors are ours.
//!
//! The calls that are interposed run for every descriptor of the program, so the first question is one load from a table. What a descriptor of
//! ours is, is behind a lock, and is believed only as long as the number still names the same file (a program may close it by ways that are
//! not interposed) and the process is the one that opened it (the child of a fork has the files, but not the threads).

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::channel::Channel;
use crate::context::Context;
use crate::errno::Errno;

/// Descriptors at or above this are never ours.
const MAX_FD: usize = 1 << 16;

static OURS: [AtomicBool; MAX_FD] = [const { AtomicBool::new(false) }; MAX_FD];

/// A file of ours.
#[derive(Clone, Debug)]
pub(crate) enum File {
    /// The device, opened.
    Device(Arc<Context>),
    /// The reading end of a completion channel.
    Channel(Arc<Channel>),
}

/// What a number must name to be the file that was entered.
type Identity = (libc::dev_t, libc::ino_t);

#[derive(Debug)]
struct Files {
    process: libc::pid_t,
    by_fd: Mutex<HashMap<RawFd, (Identity, File)>>,
}

/// Those of this process. Replaced, never freed, in the child of a fork: the lock in it may be held by a thread that the child does not have.
static FILES: AtomicPtr<Files> = AtomicPtr::new(core::ptr::null_mut());

/// Makes the table of this process; also in the child of a fork, which starts with none of its parent's files. That they may be ours stays: what
/// looks like a device, and is not in the table, is the parent's.
pub(crate) extern "C" fn start() {
    let files = Box::new(Files { process: process(), by_fd: Mutex::default() });
    FILES.store(Box::into_raw(files), Ordering::Release);
}

fn process() -> libc::pid_t {
    // SAFETY: no arguments.
    unsafe { libc::getpid() }
}

/// `None` also in the child of a vfork, which shares this memory but not the descriptors.
fn files() -> Option<MutexGuard<'static, HashMap<RawFd, (Identity, File)>>> {
    // SAFETY: null, or of `Box::into_raw` and never freed.
    let files = unsafe { FILES.load(Ordering::Acquire).as_ref() }?;
    (files.process == process()).then(|| files.by_fd.lock().unwrap_or_else(PoisonError::into_inner))
}

fn identity(fd: RawFd) -> Option<Identity> {
    let status = crate::sys::fstat(fd).ok()?;
    Some((status.st_dev, status.st_ino))
}

/// Whether the descriptor may be ours: all that is asked for others.
#[inline]
pub(crate) fn may_be_ours(fd: c_int) -> bool {
    OURS.get(fd as usize).is_some_and(|ours| ours.load(Ordering::Relaxed))
}

/// The file of a descriptor.
pub(crate) fn get(fd: c_int) -> Option<File> {
    let mut files = files()?;
    let (entered, file) = files.get(&fd)?;
    if identity(fd) == Some(*entered) {
        return Some(file.clone());
    }
    let gone = forget(&mut files, fd);
    drop(files);
    // Closing a context waits for its thread, which takes the lock.
    drop(gone);
    None
}

/// The channel of a descriptor.
pub(crate) fn channel(fd: c_int) -> Option<Arc<Channel>> {
    match get(fd)? {
        File::Channel(channel) => Some(channel),
        File::Device(_) => None,
    }
}

/// Enters a file.
///
/// # Errors
/// `EMFILE`: the number is too large for the table.
pub(crate) fn insert(fd: RawFd, file: File) -> Result<(), Errno> {
    let (Some(ours), Some(identity), Some(mut files)) = (OURS.get(fd as usize), identity(fd), files()) else {
        return Err(Errno(libc::EMFILE));
    };
    let old = files.insert(fd, (identity, file));
    ours.store(true, Ordering::Relaxed);
    drop(files);
    drop(old);
    Ok(())
}

/// Takes a file out, before its descriptor is closed.
pub(crate) fn remove(fd: c_int) -> Option<File> {
    let mut files = files()?;
    forget(&mut files, fd)
}

fn forget(files: &mut HashMap<RawFd, (Identity, File)>, fd: RawFd) -> Option<File> {
    if let Some(ours) = OURS.get(fd as usize) {
        ours.store(false, Ordering::Relaxed);
    }
    files.remove(&fd).map(|(_, file)| file)
}
