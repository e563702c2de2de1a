//! Bulk memory of which nothing remains after its last user: a sealed memfd that peers open through
//! `/proc/<pid>/fd/<n>`.
//!
//! Attaching needs nothing from the owner's CPU, so a peer can attach to the memory of a stopped
//! process. The memory is not bounded by the size of `/dev/shm`, cannot be truncated under a peer,
//! and vanishes with its last user. Both ends must be in one pid namespace and of one user.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

use crate::sys::{self, Mapping};

const SEALS: SealFlags = SealFlags::GROW
    .union(SealFlags::SHRINK)
    .union(SealFlags::SEAL);
/// `/proc` shows a memfd as this prefix, the memfd's name, and " (deleted)".
const NAME_PREFIX: &str = "/memfd:";

/// The location of a memfd, to be handed to peers through any channel. Plain data: 24 bytes, no
/// padding; any value is safe to [`attach`](Memfd::attach), which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct MemfdId {
    /// Random number, part of the memfd's name, so that the memfd of a reused pid or descriptor is
    /// not taken for this memfd. Never 0.
    pub token: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// The owner's process id, in the pid namespace that the owner and its peers share.
    pub pid: u32,
    /// The descriptor's number in the owner.
    pub fd: u32,
}

const _: () = assert!(size_of::<MemfdId>() == 24 && align_of::<MemfdId>() == 8);

/// Returns the number of this process's pid namespace; 0 if there is no `/proc`, and so nothing to
/// attach. Processes with different numbers cannot attach each other's memfds.
#[must_use]
pub fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// The reason why a memfd could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemfdCreateError {
    /// The size is 0, no multiple of the page size, or more than a file can have.
    #[error(
        "a memfd of {bytes} bytes is not possible: use a positive multiple of the page size, {page} bytes"
    )]
    BadSize {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of a page.
        page: usize,
    },
    /// The process may not have files of that size.
    #[error(
        "a memfd of {need} bytes is above RLIMIT_FSIZE, {limit}: raise it (ulimit -f) or ask for less"
    )]
    FileLimit {
        /// Bytes asked for.
        need: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// No address space is left for the memfd.
    #[error("no room to map {0} bytes: look at ulimit -v and vm.max_map_count, or ask for less")]
    NoAddressSpace(usize),
    /// The kernel refused a system call for another reason.
    #[error("cannot make a memfd: {call}: {source}")]
    Io {
        /// Name of the system call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The reason why a peer's memfd could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemfdAttachError {
    /// No such process or descriptor is visible.
    #[error("process {} has no descriptor {} here: it ended, or it is in another pid namespace (containers need a shared one)", .0.pid, .0.fd)]
    NotFound(MemfdId),
    /// The kernel denies this process access to the owner's descriptors.
    #[error("no permission to open descriptor {} of process {}: run both as one user, in one user namespace, and the owner dumpable", .0.fd, .0.pid)]
    Permission(MemfdId),
    /// The descriptor is not the memfd of the id.
    #[error("descriptor {} of process {} is not the memory that was announced: its owner was replaced", .0.fd, .0.pid)]
    Stale(MemfdId),
    /// The memory can be truncated while it is mapped, or its size is not the announced one.
    #[error(
        "the memory of process {pid} is not sealed, or has {found} bytes instead of {announced}: its owner is of another build"
    )]
    Unsealed {
        /// The owner's process id.
        pid: u32,
        /// Bytes announced.
        announced: u64,
        /// Bytes found.
        found: u64,
    },
    /// No address space is left for the memfd.
    #[error("no room to map {0} bytes: look at ulimit -v and vm.max_map_count")]
    NoAddressSpace(u64),
    /// The kernel refused for another reason.
    #[error("cannot map the memory of another process: {0}")]
    Io(#[source] io::Error),
}

/// The reason why pages could not be allocated or freed.
#[derive(Debug, thiserror::Error)]
pub enum MemfdRangeError {
    /// The range is empty, not on page boundaries, or beyond the end.
    #[error(
        "range {start}..{end} must be not empty, on boundaries of {page} bytes, and end at most at {len}"
    )]
    BadRange {
        /// First byte.
        start: usize,
        /// Byte after the last.
        end: usize,
        /// Bytes of a page.
        page: usize,
        /// Size of the memfd in bytes.
        len: usize,
    },
    /// Memory is short, of the host or of this process's control group.
    #[error("no memory for {bytes} more bytes: {source}")]
    NoMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused for another reason.
    #[error("cannot change the pages of a memfd: {0}")]
    Io(#[source] io::Error),
}

/// Bytes of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

/// The reason why memory for which huge pages were requested has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoHugePages {
    /// The kernel has no huge pages for shared memory.
    #[error("this kernel has no transparent huge pages, or is older than 5.14")]
    Unsupported,
    /// The kernel gave small pages.
    #[error(
        "no huge pages: set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise, and look for free memory in large pieces"
    )]
    NotGiven,
}

/// A mapped memfd: this process's own, made by [`create`](Self::create), or a peer's, mapped by
/// [`attach`](Self::attach).
///
/// A page takes memory only once it is [committed](Self::commit) or touched. `Send + Sync`: a
/// `Memfd` gives only an address, at which other processes may write at any time. A forked child
/// does not have the mapping.
#[derive(Debug)]
pub struct Memfd {
    map: Mapping,
    fd: Arc<File>,
    id: MemfdId,
}

impl Memfd {
    /// Makes a sealed memfd of `bytes` bytes (a multiple of the page size), all zero and none
    /// allocated.
    ///
    /// `purpose` is for people who read `/proc/<pid>/maps`. Touching a page that was not
    /// [committed](Self::commit) works too, but raises SIGBUS if memory is short then.
    ///
    /// # Errors
    /// [`MemfdCreateError`].
    pub fn create(purpose: &str, bytes: usize) -> Result<Self, MemfdCreateError> {
        let page = page_size();
        let bad_size = || MemfdCreateError::BadSize { bytes, page };
        if bytes == 0 || bytes % page != 0 {
            return Err(bad_size());
        }
        let need = bytes as u64;
        if i64::try_from(need).is_err() {
            return Err(bad_size());
        }
        if let Some(limit) = sys::file_size_limit_below(need) {
            return Err(MemfdCreateError::FileLimit { need, limit });
        }
        let refused = |call| {
            move |error| MemfdCreateError::Io {
                call,
                source: sys::explain(error),
            }
        };
        let token = sys::random_nonzero().map_err(refused("getrandom"))?;
        let fd = new_memfd(&memfd_name(purpose, token)).map_err(refused("memfd_create"))?;
        fd.set_len(need).map_err(refused("ftruncate"))?;
        fcntl_add_seals(&fd, SEALS).map_err(|error| refused("fcntl(F_ADD_SEALS)")(error.into()))?;
        let map =
            Mapping::new(&fd, bytes, true, false).map_err(|error| match error.raw_os_error() {
                Some(libc::ENOMEM) => MemfdCreateError::NoAddressSpace(bytes),
                _ => refused("mmap or madvise")(error),
            })?;
        let id = MemfdId {
            token,
            bytes: need,
            pid: std::process::id(),
            fd: fd.as_raw_fd().unsigned_abs(),
        };
        Ok(Self {
            map,
            fd: Arc::new(fd),
            id,
        })
    }

    /// Maps the memfd with this `id`, of this or another process, running or stopped. The mapping
    /// is read-only unless `writable`: a store to a read-only mapping raises SIGSEGV.
    ///
    /// `id` may come from an untrusted place: token, seals and size are checked before anything is
    /// mapped.
    ///
    /// # Errors
    /// [`MemfdAttachError`].
    pub fn attach(id: &MemfdId, writable: bool) -> Result<Self, MemfdAttachError> {
        let MemfdId {
            pid,
            fd: number,
            bytes,
            ..
        } = *id;
        // The file is examined through `O_PATH` first: if it is one of this process's locked files
        // by now, opening and closing it would drop the locks, see `crate::lock`.
        let path = sys::open_path(Path::new(&format!("/proc/{pid}/fd/{number}")), 0);
        let path = path.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => MemfdAttachError::NotFound(*id),
            Some(libc::EACCES | libc::EPERM) => MemfdAttachError::Permission(*id),
            _ => MemfdAttachError::Io(sys::explain(error)),
        })?;
        if !is_memfd_of(&path, id.token).map_err(MemfdAttachError::Io)? {
            return Err(MemfdAttachError::Stale(*id));
        }
        let fd = File::options()
            .read(true)
            .write(writable)
            .open(sys::path_of(path.as_raw_fd()));
        let fd = fd.map_err(|error| MemfdAttachError::Io(sys::explain(error)))?;
        let is_sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SEALS));
        let found = fd.metadata().map_err(MemfdAttachError::Io)?.len();
        if !is_sealed || found != bytes || found == 0 {
            return Err(MemfdAttachError::Unsealed {
                pid,
                announced: bytes,
                found,
            });
        }
        let no_room = || MemfdAttachError::NoAddressSpace(bytes);
        let len = usize::try_from(bytes).map_err(|_| no_room())?;
        let map = Mapping::new(&fd, len, writable, false).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ENOMEM) => no_room(),
                _ => MemfdAttachError::Io(error),
            }
        })?;
        Ok(Self {
            map,
            fd: Arc::new(fd),
            id: *id,
        })
    }

    /// Makes another handle of the same mapping and descriptor; both are released when the last
    /// handle is dropped. For peers in the same process.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            map: self.map.share(),
            fd: Arc::clone(&self.fd),
            id: self.id,
        }
    }

    /// Returns the id that peers need to attach. Valid as long as the owner's `Memfd` exists.
    #[must_use]
    pub fn id(&self) -> MemfdId {
        self.id
    }

    /// Returns the first byte, page aligned.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.map.base()
    }

    /// Returns the size in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a length in bytes, not a collection; never 0"
    )]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Allocates the pages of `range`, so that touching them cannot fail later. Pages that exist
    /// keep their contents.
    ///
    /// # Errors
    /// [`MemfdRangeError`]; on [`MemfdRangeError::NoMemory`] nothing new stays allocated.
    pub fn commit(&self, range: Range<usize>) -> Result<(), MemfdRangeError> {
        self.allocate(FallocateFlags::empty(), range)
    }

    /// Allocates the pages of `range` as [`commit`](Self::commit) does, and as 2 MiB pages if the
    /// system allows it; both ends must be multiples of [`HUGE_PAGE`]. If not all of the range is
    /// in such pages, returns the reason; the memory is allocated in both cases.
    ///
    /// # Errors
    /// [`MemfdRangeError`].
    pub fn commit_huge(&self, range: Range<usize>) -> Result<Option<NoHugePages>, MemfdRangeError> {
        let Range { start, end } = range;
        if start >= end || end > self.len() || start % HUGE_PAGE != 0 || end % HUGE_PAGE != 0 {
            return Err(MemfdRangeError::BadRange {
                start,
                end,
                page: HUGE_PAGE,
                len: self.len(),
            });
        }
        // A kernel that gives huge pages maps a memfd at a multiple of their size, so at another
        // address there are none.
        let why = if self.base().addr().get() % HUGE_PAGE == 0 {
            self.populate_huge(start, end - start)
        } else {
            Some(NoHugePages::NotGiven)
        };
        // Allocates the pages that were not populated; fails if there is no memory for them.
        self.commit(start..end)?;
        Ok(why)
    }

    fn populate_huge(&self, start: usize, bytes: usize) -> Option<NoHugePages> {
        // SAFETY: the caller has checked that the range lies inside the mapping.
        let addr = unsafe { self.base().add(start) };
        let advise = |advice| {
            // SAFETY: the range lies inside this mapping, as above, and neither advice changes its
            // contents.
            retry_on_intr(|| unsafe { madvise(addr.as_ptr().cast(), bytes, advice) })
        };
        if advise(Advice::LinuxHugepage).is_err() {
            return Some(NoHugePages::Unsupported);
        }
        // The kernel may count neighbouring memory of the same advice too: its huge pages are
        // subtracted.
        let before = sys::huge_bytes_around(addr.addr().get());
        if advise(Advice::LinuxPopulateWrite).is_err() {
            return Some(NoHugePages::Unsupported);
        }
        let given = sys::huge_bytes_around(addr.addr().get()).saturating_sub(before);
        (given < bytes).then_some(NoHugePages::NotGiven)
    }

    /// Gives the pages of `range` back to the system; they read as zero and are not committed any
    /// more, for every process.
    ///
    /// # Errors
    /// [`MemfdRangeError`].
    pub fn release(&self, range: Range<usize>) -> Result<(), MemfdRangeError> {
        self.allocate(
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            range,
        )
    }

    fn allocate(&self, mode: FallocateFlags, range: Range<usize>) -> Result<(), MemfdRangeError> {
        let Range { start, end } = range;
        let (page, len) = (page_size(), self.len());
        if start >= end || end > len || start % page != 0 || end % page != 0 {
            return Err(MemfdRangeError::BadRange {
                start,
                end,
                page,
                len,
            });
        }
        let bytes = end - start;
        retry_on_intr(|| fallocate(&*self.fd, mode, start as u64, bytes as u64)).map_err(|error| {
            match error {
                Errno::NOSPC | Errno::NOMEM => MemfdRangeError::NoMemory {
                    bytes,
                    source: error.into(),
                },
                error => MemfdRangeError::Io(error.into()),
            }
        })
    }
}

fn memfd_name(purpose: &str, token: u64) -> String {
    let purpose: String = purpose
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(32)
        .collect();
    format!("copyrpc-{purpose}-{token:016x}")
}

/// Makes a memfd by the function of the C library and not by a system call, so that a preloaded
/// library can interpose the function.
fn new_memfd(name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the name is NUL-terminated and outlives the call.
    let fd = sys::retry(|| unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the call just returned this descriptor and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Returns whether the file is a memfd whose name has this token. The name with which a memfd was
/// made cannot be changed, so it identifies the memfd that the peer announced.
fn is_memfd_of(fd: &File, token: u64) -> io::Result<bool> {
    let target = std::fs::read_link(sys::path_of(fd.as_raw_fd()))?;
    let name = target
        .to_str()
        .and_then(|target| target.strip_prefix(NAME_PREFIX));
    let name = name.and_then(|name| name.strip_suffix(" (deleted)"));
    Ok(name.is_some_and(|name| {
        name.starts_with("copyrpc-") && name.ends_with(&format!("-{token:016x}"))
    }))
}
