//! The descriptors that this library opened for the program.
//!
//! The interposed calls run for every descriptor of the program, so the first check is one load
//! from a table. The files of the library are in a map, which a lock protects. An entry of the map
//! is trusted only while its descriptor still refers to the same file, because a program may close
//! the descriptor in ways that are not interposed. The entry is trusted only in the process that
//! made it, because the child of a fork has the files but not the threads.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cm::Session;
use crate::files::channel::Channel;
use crate::files::counters::Counter;
use crate::files::jobs::Device;
use crate::options::errno::Errno;
use crate::system::held::{self, MAX_FD};

static OURS: [AtomicBool; MAX_FD] = [const { AtomicBool::new(false) }; MAX_FD];

/// Returns whether a descriptor is held: the program does not know it, and must not close it. The
/// held descriptors of a process are not held in its children.
pub(crate) fn is_held(fd: c_int) -> bool {
    held::is_held(fd) && files().is_some()
}

/// Calls `each` with the parts of `first..=last` between held descriptors, and forgets the
/// library's own files in that range.
pub(crate) fn each_range(first: u32, last: u32, mut each: impl FnMut(u32, u32)) {
    let mut start = first;
    for fd in first..last.saturating_add(1).min(MAX_FD as u32) {
        if is_held(fd as c_int) {
            if start < fd {
                each(start, fd - 1);
            }
            start = fd + 1;
        } else if may_be_ours(fd as c_int) {
            held::as_ourselves(|| drop(remove(fd as c_int)));
        }
    }
    if start <= last {
        each(start, last);
    }
}

/// A file that this library opened for the program.
#[derive(Clone, Debug)]
pub(crate) enum File {
    Device(Arc<Device>),
    Cm(Arc<Session>),
    /// The reading end of a channel of events.
    Channel(Arc<Channel>),
    Counter(Arc<Counter>),
}

/// Device and inode of a file in the map. The file's descriptor must still refer to them.
type Identity = (libc::dev_t, libc::ino_t);

#[derive(Debug)]
struct Files {
    process: u32,
    by_fd: Mutex<HashMap<RawFd, (Identity, File)>>,
}

/// The map of this process's files. In the child of a fork the map is replaced and never freed,
/// because a thread that the child lacks may hold the map's lock.
static FILES: AtomicPtr<Files> = AtomicPtr::new(core::ptr::null_mut());

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Returns whether this process was forked from a process that may have had files of the library.
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed) || files().is_none()
}

/// Runs in the child of a fork, which has its parent's descriptors but an empty map of files. The
/// table still marks the descriptors, so calls on them are checked.
pub(crate) fn restart() {
    IS_CHILD.store(true, Ordering::Relaxed);
    held::release_all();
    start();
}

pub(crate) fn start() {
    let files = Box::new(Files {
        process: std::process::id(),
        by_fd: Mutex::default(),
    });
    FILES.store(Box::into_raw(files), Ordering::Release);
}

/// Returns the map of files. Returns `None` if no launcher started the program, or if the process
/// is the child of a vfork, which shares the memory of its parent but not the descriptors.
fn files() -> Option<MutexGuard<'static, HashMap<RawFd, (Identity, File)>>> {
    // SAFETY: the pointer is null, or comes from `Box::into_raw` and is never freed.
    let files = unsafe { FILES.load(Ordering::Acquire).as_ref() }?;
    (files.process == std::process::id())
        .then(|| files.by_fd.lock().unwrap_or_else(PoisonError::into_inner))
}

fn identity(fd: RawFd) -> Option<Identity> {
    let status = crate::system::sys::fstat(fd).ok()?;
    Some((status.st_dev, status.st_ino))
}

/// Returns whether the descriptor may be a file of the library. Other descriptors get no further
/// check.
pub(crate) fn may_be_ours(fd: c_int) -> bool {
    OURS.get(fd as usize)
        .is_some_and(|ours| ours.load(Ordering::Relaxed))
}

pub(crate) fn get(fd: c_int) -> Option<File> {
    let mut files = files()?;
    let (entered, file) = files.get(&fd)?;
    if identity(fd) == Some(*entered) {
        return Some(file.clone());
    }
    let gone = forget(&mut files, fd);
    drop(files);
    // The drop is outside the lock: closing a context waits for its thread, which takes the lock.
    drop(gone);
    None
}

/// Returns all sessions with the connection manager.
pub(crate) fn sessions() -> Vec<Arc<Session>> {
    let files = files();
    let all = files.iter().flat_map(|files| files.values());
    all.filter_map(|(_, file)| match file {
        File::Cm(session) => Some(Arc::clone(session)),
        _ => None,
    })
    .collect()
}

pub(crate) fn cm(fd: c_int) -> Option<Arc<Session>> {
    match get(fd)? {
        File::Cm(session) => Some(session),
        _ => None,
    }
}

pub(crate) fn channel(fd: c_int) -> Option<Arc<Channel>> {
    match get(fd)? {
        File::Channel(channel) => Some(channel),
        _ => None,
    }
}

/// Enters a file under its descriptor.
///
/// # Errors
/// `EMFILE`: the descriptor's number is too large for the table.
pub(crate) fn insert(fd: RawFd, file: File) -> Result<(), Errno> {
    let (Some(ours), Some(identity), Some(mut files)) =
        (OURS.get(fd as usize), identity(fd), files())
    else {
        return Err(Errno(libc::EMFILE));
    };
    held::hand_over(fd);
    let old = files.insert(fd, (identity, file));
    ours.store(true, Ordering::Relaxed);
    drop(files);
    drop(old);
    Ok(())
}

/// Enters a descriptor that the program has just opened by this path, if the file is a counter's.
/// Returns the descriptor.
///
/// # Safety
/// `path` is null or a string.
pub(crate) unsafe fn opened(path: *const c_char, fd: c_int) -> c_int {
    if fd >= 0 && !path.is_null() {
        // SAFETY: guaranteed by the caller.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        held::as_ourselves(|| {
            if let Some(counter) = Counter::of(fd, path) {
                counter.show(fd);
                let _ = insert(fd, File::Counter(Arc::new(counter)));
            }
        });
    }
    fd
}

/// Removes a file before its descriptor is closed.
pub(crate) fn remove(fd: c_int) -> Option<File> {
    forget(&mut *files()?, fd)
}

fn forget(files: &mut HashMap<RawFd, (Identity, File)>, fd: RawFd) -> Option<File> {
    if let Some(ours) = OURS.get(fd as usize) {
        ours.store(false, Ordering::Relaxed);
    }
    files.remove(&fd).map(|(_, file)| file)
}
