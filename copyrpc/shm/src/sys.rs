//! The few system calls that `std` does not offer, each wrapped once.

use std::ffi::{CString, c_int};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::io::retry_on_intr;
use rustix::mm::{MprotectFlags, mprotect, munmap};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

/// Turns a result of -1 into the error in `errno`. Repeats the call while a signal interrupts it.
pub(crate) fn retry(mut call: impl FnMut() -> c_int) -> io::Result<c_int> {
    loop {
        match call() {
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Err(io::Error::last_os_error()),
            done => return Ok(done),
        }
    }
}

/// Opens a path with `O_PATH`, and with `flags`: the descriptor refers to the file, and cannot read
/// or write it. Closing the descriptor drops no lock of this process on the file.
///
/// Does not use `std`, which takes `O_PATH` for an access mode where the C library is musl, and
/// opens the file itself. Calls the function of the C library, so that a preloaded library can
/// interpose the function.
pub(crate) fn open_path(path: &Path, flags: c_int) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is NUL-terminated and outlives the call.
    let fd =
        retry(|| unsafe { libc::open(path.as_ptr(), libc::O_PATH | libc::O_CLOEXEC | flags) })?;
    // SAFETY: the call just returned this descriptor and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Returns the path that reaches the file behind a descriptor, and no other inode.
pub(crate) fn path_of(fd: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{fd}"))
}

pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the bytes that an unprivileged process can still allocate in the file system of `fd`.
pub(crate) fn free_bytes(fd: impl AsFd) -> u64 {
    rustix::fs::fstatvfs(fd).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Returns the number of bytes in huge pages of the mapping that contains `addr`
/// (`/proc/self/smaps`); 0 if the number is not known.
pub(crate) fn huge_bytes_around(addr: usize) -> usize {
    let contains = |line: &str| {
        let (start, rest) = line.split_once('-')?;
        let end = rest.split(' ').next()?;
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        Some((number(start)?..number(end)?).contains(&addr))
    };
    let find = || {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut lines = smaps
            .lines()
            .skip_while(|line| contains(line) != Some(true));
        let field = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
        field
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<usize>()
            .ok()
            .map(|kib| kib << 10)
    };
    find().unwrap_or(0)
}

/// Returns `RLIMIT_FSIZE` if it forbids a file of `need` bytes. This is checked before the file is
/// made, because the kernel answers a file that outgrows the limit with SIGXFSZ, whose default
/// action ends the process.
pub(crate) fn file_size_limit_below(need: u64) -> Option<u64> {
    getrlimit(Resource::Fsize)
        .current
        .filter(|limit| *limit < need)
}

/// Returns the error of a system call, with a remedy if no descriptor was left.
pub(crate) fn explain(error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(libc::EMFILE) {
        return error;
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    io::Error::new(
        error.kind(),
        format!(
            "this process has as many open files as it may, {limit}; raise that number (ulimit -n)"
        ),
    )
}

pub(crate) fn random_nonzero() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // The kernel returns up to 256 bytes in one call, so all 8 are filled.
    retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
    Ok(u64::from_ne_bytes(bytes) | 1)
}

/// A shared mapping of a whole file, or zeroed memory of this process; not inherited by a forked
/// child.
///
/// The child of a `fork` would otherwise keep the memory alive, and could write into the rings of
/// its parent.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Unmapped on drop, unless this is a forked child.
    map: ManuallyDrop<Arc<MmapRaw>>,
    base: NonNull<u8>,
    /// The process that has the mapping. In a forked child the range is free for other uses.
    pid: u32,
}

// SAFETY: the mapping is plain memory that belongs to no thread; the code that dereferences its
// pointer is responsible for its accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out nothing but an address and a length.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`. Reserves swap space for them if `is_reserved`.
    pub(crate) fn new(
        fd: &impl AsRawFd,
        len: usize,
        writable: bool,
        is_reserved: bool,
    ) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        options.len(len);
        if !is_reserved {
            options.no_reserve_swap();
        }
        let map = if writable {
            options.map_raw(fd.as_raw_fd())
        } else {
            options.map_raw_read_only(fd.as_raw_fd())
        }?;
        Self::of(map)
    }

    /// Maps `len` zeroed bytes of no file. Pages take memory once they are used.
    pub(crate) fn of_no_file(len: usize) -> io::Result<Self> {
        Self::of(
            MmapOptions::new()
                .len(len)
                .no_reserve_swap()
                .map_anon()?
                .into(),
        )
    }

    fn of(map: MmapRaw) -> io::Result<Self> {
        map.advise(Advice::DontFork)?;
        let base = NonNull::new(map.as_mut_ptr())
            .ok_or_else(|| io::Error::other("the kernel mapped at address zero"))?;
        Ok(Self {
            map: ManuallyDrop::new(Arc::new(map)),
            base,
            pid: std::process::id(),
        })
    }

    /// Makes another handle of the same memory, which is unmapped with the last handle.
    pub(crate) fn share(&self) -> Self {
        Self {
            map: self.map.clone(),
            base: self.base,
            pid: self.pid,
        }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns whether this process made the mapping: a forked child did not.
    pub(crate) fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Makes the first `bytes` bytes read-only; does nothing if they are not whole pages.
    pub(crate) fn protect_front(&self, bytes: usize) -> io::Result<()> {
        if bytes % page_size() != 0 || bytes > self.len() {
            return Ok(());
        }
        // SAFETY: the range lies inside this mapping, and the caller holds no `&mut` into it.
        unsafe { mprotect(self.base.as_ptr().cast(), bytes, MprotectFlags::READ) }
            .map_err(Into::into)
    }

    /// Unmaps all pages except the first, which stays mapped until the process ends.
    pub(crate) fn leak_first_page(self) {
        let keep = page_size().min(self.len());
        if self.len() > keep && self.is_here() {
            // SAFETY: the range is the tail of this mapping, and `self` is consumed.
            let _ = unsafe { munmap(self.base.as_ptr().add(keep).cast(), self.len() - keep) };
        }
        std::mem::forget(self);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: the field is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_descriptors_is_told_which_limit_to_raise() {
        let text = explain(io::Error::from_raw_os_error(libc::EMFILE)).to_string();
        assert!(
            text.contains("open files") && text.contains("ulimit -n"),
            "{text}"
        );
        assert_eq!(
            explain(io::Error::from_raw_os_error(libc::EACCES)).raw_os_error(),
            Some(libc::EACCES)
        );
    }
}
