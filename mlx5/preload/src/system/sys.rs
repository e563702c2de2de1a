//! System calls. Some calls bypass the C library, because it lacks their symbol or their symbol is
//! interposed.

use core::mem::MaybeUninit;
use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use rustix::fs::{
    CWD, MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, readlinkat,
};

use crate::options::errno::Errno;
use crate::system::held::opened;

const DEVICE_NAME: &CStr = c"uverbs0";

/// Size of the device file: libmlx5's last mapping ends at page `9 << 8`.
const DEVICE_BYTES: libc::off_t = 64 << 20;

/// Seals of the device file, which identify it.
const DEVICE_SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

pub(crate) fn last_error() -> Errno {
    // SAFETY: `__errno_location` returns a pointer that is valid for the life of the thread, and
    // that no other thread uses.
    Errno(unsafe { *libc::__errno_location() })
}

pub(crate) fn checked(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 {
        Err(last_error())
    } else {
        Ok(result)
    }
}

/// Returns the path of an open directory, or of the current directory for `AT_FDCWD`.
pub(crate) fn directory(fd: RawFd) -> Result<Vec<u8>, Errno> {
    let link = if fd == libc::AT_FDCWD {
        "/proc/self/cwd".to_owned()
    } else {
        format!("/proc/self/fd/{fd}")
    };
    Ok(readlinkat(CWD, link, Vec::new())?.into_bytes())
}

/// `newfstatat(2)`.
///
/// # Safety
/// `path` is a string, and `status` a place for a `struct stat`.
pub(crate) unsafe fn fstatat(
    fd: RawFd,
    path: *const libc::c_char,
    status: *mut libc::stat,
    flags: libc::c_int,
) -> Result<(), Errno> {
    // SAFETY: guaranteed by the caller.
    checked(unsafe { libc::syscall(libc::SYS_newfstatat, fd, path, status, flags) }).map(|_| ())
}

pub(crate) fn fstat(fd: RawFd) -> Result<libc::stat, Errno> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path is an empty string, and `status` has room for a `struct stat`, which the
    // call writes if it succeeds.
    unsafe {
        fstatat(fd, c"".as_ptr(), status.as_mut_ptr(), libc::AT_EMPTY_PATH)?;
        Ok(status.assume_init())
    }
}

/// Makes the device file: zeroed memory of a fixed size that can be mapped at any page, by the
/// driver that writes doorbells and by any other code.
pub(crate) fn device_file() -> Result<OwnedFd, Errno> {
    let fd = memfd_create(DEVICE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, DEVICE_BYTES as u64)?;
    fcntl_add_seals(&fd, DEVICE_SEALS)?;
    Ok(fd)
}

/// Returns whether a descriptor is a [`device_file`], of this process or of another process.
pub(crate) fn is_device_file(fd: RawFd) -> bool {
    // SAFETY: all arguments are plain numbers.
    let has_seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) } == DEVICE_SEALS.bits() as i32;
    has_seals && fstat(fd).is_ok_and(|status| status.st_size == DEVICE_BYTES)
}

/// Returns how often this process has the [`device_file`] of this inode mapped; 0 without `/proc`.
pub(crate) fn mappings_of(inode: libc::ino_t) -> usize {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let name = format!("/memfd:{}", DEVICE_NAME.to_string_lossy());
    String::from_utf8_lossy(&maps)
        .lines()
        .filter(|line| {
            let mut fields = line.split_ascii_whitespace().skip(4);
            fields.next().and_then(|field| field.parse().ok()) == Some(inode)
                && fields.next() == Some(&name)
        })
        .count()
}

/// Makes a pipe: the reading end for the program, and the writing end, which does not block.
pub(crate) fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for two descriptors, and no other code has the new descriptors.
    unsafe {
        checked(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC).into())?;
        let pipe = (
            OwnedFd::from_raw_fd(fds[0]),
            OwnedFd::from_raw_fd(opened(fds[1])),
        );
        checked(libc::fcntl(fds[1], libc::F_SETFL, libc::O_NONBLOCK).into())?;
        Ok(pipe)
    }
}

/// Writes a few bytes to a pipe: all of the bytes, or none.
pub(crate) fn write(fd: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    Ok(rustix::io::write(fd, bytes).map(drop)?)
}

/// The HCA's use of the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    /// The HCA reads and writes the memory.
    Write,
}

/// Returns whether the whole range can be used for `what_for`. Populates the pages of the range, as
/// the kernel does when it pins registered memory; the kernel refuses memory that it cannot pin.
pub(crate) fn is_there(addr: u64, len: u64, what_for: Use) -> bool {
    let page_bytes = rustix::param::page_size() as u64;
    let start = addr / page_bytes * page_bytes;
    let end = (addr + len).next_multiple_of(page_bytes);
    let advice = if what_for == Use::Write {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    // SAFETY: the call populates the pages that an access would populate, and changes no contents.
    // For 0 pages it only shows whether the kernel knows the advice (Linux 5.14).
    let populate =
        |len| unsafe { libc::madvise(start as *mut libc::c_void, len as usize, advice) } == 0;
    populate(end - start)
        || (!populate(0) && is_mapped(start / page_bytes, end / page_bytes, page_bytes))
}

/// Returns whether all of these pages are mapped.
fn is_mapped(mut page: u64, end: u64, page_bytes: u64) -> bool {
    const PAGES_AT_ONCE: u64 = 1 << 14;
    let mut resident = vec![0u8; (end - page).min(PAGES_AT_ONCE) as usize];
    while page < end {
        let pages = (end - page).min(PAGES_AT_ONCE);
        // SAFETY: the call only reads the state of pages; `resident` has room for a byte per page.
        if unsafe {
            libc::mincore(
                (page * page_bytes) as *mut libc::c_void,
                (pages * page_bytes) as usize,
                resident.as_mut_ptr(),
            )
        } != 0
        {
            return false;
        }
        page += pages;
    }
    true
}

/// Checks that the system lets a process copy by `process_vm_readv(2)` and `process_vm_writev(2)`.
///
/// # Errors
/// `EPERM`: a filter of a container refuses one of the two calls, whatever error the filter
/// returns.
pub(crate) fn check_copies() -> Result<(), Errno> {
    let mut byte = [0];
    let at = (&raw mut byte).addr() as u64;
    copy_in(at, &mut [0])
        .and_then(|()| copy_out(&[0], at))
        .map_err(|_| Errno(libc::EPERM))
}

/// Copies from an address that the program gave, as the kernel does.
///
/// # Errors
/// `EFAULT`: the memory cannot be read.
pub(crate) fn copy_in(from: u64, to: &mut [u8]) -> Result<(), Errno> {
    copy(to.as_mut_ptr(), to.len(), from, |own, other| {
        // SAFETY: the kernel checks the program's range; the library's own range is the slice.
        unsafe { libc::process_vm_readv(libc::getpid(), own, 1, other, 1, 0) }
    })
}

/// Copies to an address that the program gave, as the kernel does.
///
/// # Errors
/// `EFAULT`: the memory cannot be written.
pub(crate) fn copy_out(from: &[u8], to: u64) -> Result<(), Errno> {
    copy(from.as_ptr().cast_mut(), from.len(), to, |own, other| {
        // SAFETY: the kernel checks the program's range; the library's own range is the slice,
        // which is only read.
        unsafe { libc::process_vm_writev(libc::getpid(), own, 1, other, 1, 0) }
    })
}

/// Copies within this process by a cross-process call, which checks the program's memory.
fn copy(
    own: *mut u8,
    len: usize,
    of_program: u64,
    call: impl FnOnce(*const libc::iovec, *const libc::iovec) -> libc::ssize_t,
) -> Result<(), Errno> {
    let range = |at: *mut libc::c_void| libc::iovec {
        iov_base: at,
        iov_len: len,
    };
    let (own, other) = (range(own.cast()), range(of_program as *mut _));
    let copied = call(&raw const own, &raw const other);
    Errno(libc::EFAULT).when(copied != len as libc::ssize_t)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_device_file_can_be_mapped_at_any_page_and_keeps_its_size() {
        let fd = device_file().unwrap();
        let (len, protection) = (4096, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the call makes a new mapping, which is used only within its page.
        unsafe {
            let page = libc::mmap(
                core::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                (6 << 8 | 3) * 4096,
            );
            assert_ne!(page, libc::MAP_FAILED);
            page.cast::<u64>().write_volatile(7);
            assert_eq!(page.cast::<u64>().read_volatile(), 7);
            let inode = fstat(fd.as_raw_fd()).unwrap().st_ino;
            assert_eq!((mappings_of(inode), mappings_of(inode + 1)), (1, 0));
            assert_eq!(libc::munmap(page, len), 0);
            assert_eq!(mappings_of(inode), 0);
            assert_ne!(libc::ftruncate(fd.as_raw_fd(), 0), 0);
        }
        assert!(is_device_file(fd.as_raw_fd()) && !is_device_file(pipe().unwrap().0.as_raw_fd()));
    }

    /// Makes a range of three pages: a writable page, an unmapped one, and a read-only one.
    fn pages() -> u64 {
        let page = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the call makes a new mapping; only its own pages are unmapped or protected.
        unsafe {
            let start = libc::mmap(
                core::ptr::null_mut(),
                3 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            assert_eq!(libc::munmap(start.byte_add(page), page), 0);
            assert_eq!(
                libc::mprotect(start.byte_add(2 * page), page, libc::PROT_READ),
                0
            );
            start as u64
        }
    }

    #[test]
    fn memory_is_there_if_the_hca_may_do_with_it_what_it_is_to_do() {
        let start = pages();
        assert!(is_there(start + 1, 4095, Use::Write));
        assert!(!is_there(start + 1, 4096, Use::Write) && !is_there(start + 1, 4096, Use::Read));
        assert!(!is_there(start + 4096, 1, Use::Read));
        assert!(is_there(start + 8192, 4096, Use::Read));
        assert!(!is_there(start + 8192, 1, Use::Write));
        let (first, after) = (start / 4096, start / 4096 + 1);
        assert!(is_mapped(first, after, 4096) && !is_mapped(first, after + 1, 4096));
    }

    #[test]
    fn copies_of_what_is_not_there_fail() {
        const FAULT: Result<(), Errno> = Err(Errno(libc::EFAULT));
        let start = pages();
        assert_eq!(copy_out(&[1, 2, 3], start + 4093), Ok(()));
        assert_eq!(copy_out(&[4, 5, 6, 7], start + 4093), FAULT);
        assert_eq!(copy_out(&[1], start + 8192), FAULT);
        let mut bytes = [9; 4];
        assert_eq!((copy_in(start + 8192, &mut bytes), bytes), (Ok(()), [0; 4]));
        assert_eq!(copy_in(start + 4093, &mut bytes), FAULT);
        assert_eq!(copy_in(1, &mut bytes), FAULT);
    }
}
