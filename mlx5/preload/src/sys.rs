//! System calls that have no use for the C library's symbol, or must not come back to us through it.

use core::mem::MaybeUninit;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::errno::Errno;

/// Bytes of the device file: what libmlx5 maps of it ends at page `9 << 8`.
const DEVICE_BYTES: libc::off_t = 64 << 20;

/// What makes it one.
const DEVICE_SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// What the last call left.
pub(crate) fn last_error() -> Errno {
    // SAFETY: a valid pointer for the life of the thread.
    Errno(unsafe { *libc::__errno_location() })
}

fn checked(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 { Err(last_error()) } else { Ok(result) }
}

/// `newfstatat(2)`.
///
/// # Safety
/// `path` is a string, and `status` a place for a `struct stat`.
pub(crate) unsafe fn fstatat(fd: RawFd, path: *const libc::c_char, status: *mut libc::stat, flags: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    checked(unsafe { libc::syscall(libc::SYS_newfstatat, fd, path, status, flags) }).map(|_| ())
}

/// `fstat(2)`.
pub(crate) fn fstat(fd: RawFd) -> Result<libc::stat, Errno> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: an empty string, and a place of that type, which is written on success.
    unsafe {
        fstatat(fd, c"".as_ptr(), status.as_mut_ptr(), libc::AT_EMPTY_PATH)?;
        Ok(status.assume_init())
    }
}

/// What stands for the device file: memory that is 0, cannot change its size, and can be mapped at any page of it, by the driver that writes
/// doorbells there as by anybody else.
pub(crate) fn device_file() -> Result<OwnedFd, Errno> {
    let name: &CStr = c"uverbs0";
    // SAFETY: a string; the new descriptor is ours alone.
    let fd = unsafe {
        OwnedFd::from_raw_fd(checked(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING).into())? as RawFd)
    };
    // SAFETY: a descriptor of ours and plain numbers.
    unsafe {
        checked(libc::ftruncate(fd.as_raw_fd(), DEVICE_BYTES).into())?;
        checked(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, DEVICE_SEALS).into())?;
    }
    Ok(fd)
}

/// Whether a descriptor is of a [`device_file`], of this process or of another.
pub(crate) fn is_device_file(fd: RawFd) -> bool {
    // SAFETY: plain numbers.
    let has_seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) } == DEVICE_SEALS;
    has_seals && fstat(fd).is_ok_and(|status| status.st_size == DEVICE_BYTES)
}

/// A pipe: the reading end, and the writing one, which does not block.
pub(crate) fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors, which are ours alone.
    unsafe {
        checked(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC).into())?;
        let pipe = (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]));
        checked(libc::fcntl(fds[1], libc::F_SETFL, libc::O_NONBLOCK).into())?;
        Ok(pipe)
    }
}

/// Writes a few bytes to a pipe, all or none.
pub(crate) fn write(fd: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    // SAFETY: the bytes are ours. Not through the C library's symbol, which is ours too.
    checked(unsafe { libc::syscall(libc::SYS_write, fd.as_raw_fd(), bytes.as_ptr(), bytes.len()) }).map(|_| ())
}

/// Whether all of a range is mapped: the kernel refuses to register memory that is not.
pub(crate) fn is_mapped(addr: u64, len: u64) -> bool {
    const PAGES_AT_ONCE: u64 = 1 << 14;
    // SAFETY: a plain number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64;
    let (mut page, end) = (addr / page_bytes, (addr + len).div_ceil(page_bytes));
    let mut resident = vec![0u8; (end - page).min(PAGES_AT_ONCE) as usize];
    while page < end {
        let pages = (end - page).min(PAGES_AT_ONCE);
        // SAFETY: only looks; room for a byte per page.
        if unsafe { libc::mincore((page * page_bytes) as *mut libc::c_void, (pages * page_bytes) as usize, resident.as_mut_ptr()) } != 0 {
            return false;
        }
        page += pages;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_file_can_be_mapped_at_any_page_and_keeps_its_size() {
        let fd = device_file().unwrap();
        let (len, protection) = (4096, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping, used within its page.
        unsafe {
            let page = libc::mmap(core::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), (6 << 8 | 3) * 4096);
            assert_ne!(page, libc::MAP_FAILED);
            page.cast::<u64>().write_volatile(7);
            assert_eq!(page.cast::<u64>().read_volatile(), 7);
            assert_eq!(libc::munmap(page, len), 0);
            assert_ne!(libc::ftruncate(fd.as_raw_fd(), 0), 0);
        }
        assert!(is_device_file(fd.as_raw_fd()) && !is_device_file(pipe().unwrap().0.as_raw_fd()));
    }

    #[test]
    fn mapped_memory_is_told_from_what_is_not() {
        let page = 4096;
        // SAFETY: a new mapping of three pages, the middle one of which is unmapped again.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(core::ptr::null_mut(), 3 * page, libc::PROT_READ, flags, -1, 0);
            assert_eq!(libc::munmap(start.byte_add(page), page), 0);
            start as u64
        };
        assert!(is_mapped(start + 1, 4095));
        assert!(!is_mapped(start + 1, 4096));
        assert!(!is_mapped(start + 4096, 1));
    }
}
