//! The calls of the C library that this library interposes.
//!
//! A call whose descriptor or path does not belong to this library continues with the function of
//! the next library that defines the call, after one load from a table (or a comparison of the
//! path). Until then the call makes no allocation, takes no lock and calls no function of the
//! standard library, because it can come from any thread of the program, at any time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use libc::{AT_FDCWD, mode_t, size_t, ssize_t, stat as Status, statx as ExtendedStatus};

use crate::cm;
use crate::command::Call;
use crate::command::methods::Method;
use crate::files::fds::{self, File};
use crate::files::jobs::Device;
use crate::files::tree;
use crate::objects::doorbells::Registers;
use crate::options::errno::Errno;
use crate::options::log;
use crate::options::settings::{self, Settings};
use crate::system::{held, sys};
use crate::thread::poller;
use crate::thread::session::Session;

/// Path of a device file, without the index of the device at its end. The launcher's tree has the
/// file name of the first device, `uverbs0`; the directory is fixed in rdma-core.
const DEVICE_FILE: &str = "/dev/infiniband/uverbs";

const CM_FILE: &[u8] = b"/dev/infiniband/rdma_cm";

/// Protocol of the netlink sockets that list RDMA devices. With such a socket, libibverbs would
/// find only the real devices.
const NETLINK_RDMA: c_int = 20;

const RDMA_VERBS_IOCTL: c_ulong = 0xc018_1b01;

fn fail(errno: Errno) -> c_int {
    // SAFETY: `__errno_location` returns a pointer that is valid for the life of the thread, and
    // that no other thread uses.
    unsafe { *libc::__errno_location() = errno.0 };
    -1
}

/// Evaluates a call with a path, which is replaced if it leads to the launcher's tree.
macro_rules! named {
    ($path:ident, $dir:expr => $call:expr) => {{
        let in_tree = tree::find($dir, $path);
        let $path = in_tree.as_ref().map_or($path, |path| path.as_ptr());
        $call
    }};
}

/// Runs the library's part of a call. If it panics, the call fails with `EIO`.
fn ours<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    held::as_ourselves(|| catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Errno(libc::EIO))))
}

/// Like [`ours`], for a part of a call that never fails.
fn quietly(body: impl FnOnce()) {
    let _ = ours(|| {
        body();
        Ok(())
    });
}

/// Function that runs when the library is loaded, before the program has other threads.
#[cfg_attr(not(test), used, unsafe(link_section = ".init_array"))]
static START: extern "C" fn() = start;

extern "C" fn start() {
    next::find_all();
    quietly(|| {
        if settings::get().is_some() {
            fds::start();
            // SAFETY: `restart` may run in the child of a fork, because it takes none of the
            // library's locks.
            unsafe { libc::pthread_atfork(None, None, Some(restart)) };
        }
    });
}

unsafe extern "C" fn restart() {
    quietly(fds::restart);
}

/// A file in `/dev` that the library provides.
#[derive(Clone, Copy)]
enum Node {
    /// The device with this index.
    Device(usize),
    Cm,
}

impl Node {
    /// Returns `st_rdev`. The connection manager's number is one less than the first device's
    /// number.
    fn number(self, settings: &Settings) -> libc::dev_t {
        match self {
            Self::Device(index) => settings.device + index as libc::dev_t,
            Self::Cm => settings.device - 1,
        }
    }
}

/// Returns the settings and the file if the path is one of the device files in `/dev`.
///
/// # Safety
/// `path` is null or a string.
unsafe fn device(path: *const c_char) -> Option<(&'static Settings, Node)> {
    if path.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let node = match path.strip_prefix(DEVICE_FILE.as_bytes()) {
        Some([digit @ b'0'..=b'9']) => Node::Device(usize::from(digit - b'0')),
        _ if path == CM_FILE => Node::Cm,
        _ => return None,
    };
    let settings = settings::get()?;
    let is_there = !matches!(node, Node::Device(index) if index >= settings.network.len());
    is_there.then_some((settings, node))
}

fn open_device(settings: &'static Settings, node: Node) -> c_int {
    let opened = ours(|| {
        settings.open_fault()?;
        sys::check_copies().inspect_err(|_| {
            let what = "process_vm_readv or process_vm_writev, by which commands are read and peers reached, is forbidden: look at seccomp filters";
            log::refused(settings, format_args!("{what}"));
        })?;
        let (fd, file) = match node {
            Node::Device(index) => {
                let fd = sys::device_file()?;
                let registers = settings
                    .check_doorbells
                    .then(|| Registers::of(&fd))
                    .transpose()?;
                let inode = sys::fstat(fd.as_raw_fd())?.st_ino;
                let device = Device::open(index, |jobs, outlives| {
                    poller::spawn(jobs, outlives, settings, move || {
                        Session::new(settings, index, inode, registers)
                    })
                })?;
                (fd, File::Device(Arc::new(device)))
            }
            Node::Cm => cm::Session::open(settings)
                .map(|(session, fd)| (fd, File::Cm(Arc::new(session))))?,
        };
        fds::insert(fd.as_raw_fd(), file)?;
        Ok(fd.into_raw_fd())
    });
    opened.unwrap_or_else(|errno| {
        quietly(|| {
            let name = match node {
                Node::Device(index) => format!("{DEVICE_FILE}{index}"),
                Node::Cm => "rdma_cm".to_owned(),
            };
            log::answered(settings, format_args!("open {name}"), errno, false);
        });
        fail(errno)
    })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function. If the caller gave no mode, the
    // next `open` does not use it either.
    unsafe {
        match device(path) {
            Some((settings, node)) => open_device(settings, node),
            None => named!(path, AT_FDCWD => {
                fds::opened(path, held::opened(next::open(path, flags, mode)))
            }),
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function, as in `open`.
    unsafe {
        match device(path) {
            Some((settings, node)) => open_device(settings, node),
            None => named!(path, dir => {
                let fd = next::openat(dir, path, flags, mode);
                fds::opened(path, held::opened(fd))
            }),
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memfd_create(name: *const c_char, flags: c_uint) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function.
    held::opened(unsafe { next::memfd_create(name, flags) })
}

/// `close(3)`. The device closes with its last descriptor; or, if pages of the device are still
/// mapped, with the last mapping. If that descriptor is closed in a way that is not interposed, the
/// device closes at the next interposed call with the same descriptor number.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fds::is_held(fd) {
        return fail(Errno(libc::EBADF));
    }
    held::closing(fd);
    if fds::may_be_ours(fd) {
        quietly(|| drop(fds::remove(fd)));
    }
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe { next::close(fd) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function.
    let close = |first, last| unsafe { next::close_range(first, last, flags) };
    if first > last || flags != 0 {
        // The flags, which delay the close or unshare the table of descriptors, are useful only in
        // a child, where every descriptor may be closed. So the call is passed on unchanged.
        return close(first, last);
    }
    let mut result = 0;
    fds::each_range(first, last, |first, last| result |= close(first, last));
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe {
        if close_range(first.max(0) as c_uint, c_uint::MAX, 0) != 0 {
            next::closefrom(first);
        }
    }
}

/// Enters `new` in the table of files if `old` is a file of this library, and removes the file that
/// `new` was before. Returns `new`.
fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old && (fds::may_be_ours(old) || fds::may_be_ours(new)) {
        let _ = ours(|| {
            drop(fds::remove(new));
            fds::get(old).map_or(Ok(()), |file| fds::insert(new, file))
        });
    }
    held::opened(new)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function.
    duplicated(fd, unsafe { next::dup(fd) })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if fds::is_held(new) {
        return fail(Errno(libc::EBUSY));
    }
    // SAFETY: the caller's arguments are valid for the C function.
    duplicated(old, unsafe { next::dup2(old, new) })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if fds::is_held(new) {
        return fail(Errno(libc::EBUSY));
    }
    // SAFETY: the caller's arguments are valid for the C function.
    duplicated(old, unsafe { next::dup3(old, new, flags) })
}

/// `fcntl(2)`, which is interposed because it can duplicate a descriptor.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function. If the caller gave no argument,
    // the next `fcntl` does not use it either.
    let result = unsafe { next::fcntl(fd, command, argument) };
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        duplicated(fd, result)
    } else {
        result
    }
}

unsafe extern "C-unwind" {
    /// `poll(2)`. A thread that is cancelled in this call unwinds.
    fn poll(files: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
}

/// Carries out a command of the connection manager. The command that reads an event waits for an
/// event, even after another thread has closed the descriptor: a kernel keeps the file until the
/// system call ends.
fn write_to_cm(fd: c_int, session: &cm::Session, bytes: u64, count: size_t) -> ssize_t {
    // SAFETY: all arguments are plain numbers.
    let blocks = unsafe { libc::fcntl(fd, libc::F_GETFL) } & libc::O_NONBLOCK == 0;
    loop {
        match ours(|| session.execute(bytes, count, fds::cm)) {
            Ok(true) => return count as ssize_t,
            Ok(false) if !blocks => return fail(Errno(libc::EAGAIN)) as ssize_t,
            Err(errno) => return fail(errno) as ssize_t,
            Ok(false) => {}
        }
        let mut readable = libc::pollfd {
            fd: session.readable(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer is to one entry, and the count is 1.
        if unsafe { poll(&raw mut readable, 1, -1) } < 0 {
            return -1;
        }
    }
}

/// `write(3)`, which takes the commands to the device and to the connection manager.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn write(fd: c_int, bytes: *const c_void, count: size_t) -> ssize_t {
    if fds::may_be_ours(fd) && !bytes.is_null() {
        let done = match ours(|| Ok(fds::get(fd))) {
            Ok(Some(File::Device(device))) => ours(move || {
                let call = Call::read(bytes as u64, count)?;
                // SAFETY: a driver's command to the device file points to memory that the driver
                // keeps until the object that uses this memory is destroyed.
                unsafe { device.execute(call) }.map(Some)
            }),
            Ok(Some(File::Cm(session))) => {
                let written = write_to_cm(fd, &session, bytes as u64, count);
                // The drop of the last reference closes the connection manager's sockets. They are
                // held: only code of the library may close them.
                held::as_ourselves(|| drop(session));
                return written;
            }
            Ok(Some(other)) => {
                held::as_ourselves(|| drop(other));
                Ok(None)
            }
            // In the child of a fork the device belongs to the parent, whose thread does not exist
            // here. So a command to this device fails with `EIO`.
            Ok(None) => ours(|| {
                let is_of_parent = fds::is_child() && sys::is_device_file(fd);
                Errno(libc::EIO).when(is_of_parent).map(|()| None)
            }),
            Err(errno) => Err(errno),
        };
        match done {
            Ok(Some(())) => return count as ssize_t,
            Ok(None) => {}
            Err(errno) => return fail(errno) as ssize_t,
        }
    }
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe { next::write(fd, bytes, count) }
}

/// `read(3)`, which reads events and counters. A thread that is cancelled in this call unwinds.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn read(fd: c_int, bytes: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the caller's arguments are valid for the C function.
    let read_next = |count| unsafe { next::read(fd, bytes, count) };
    if !fds::may_be_ours(fd) {
        return read_next(count);
    }
    match ours(|| Ok(fds::get(fd))) {
        Ok(Some(File::Channel(channel))) if count >= channel.event_bytes() && !bytes.is_null() => {
            let event_bytes = channel.event_bytes();
            // If the thread is cancelled inside the next library's `read`, it unwinds through this
            // function, which must then have no values to drop. So this thread holds no reference
            // to the channel during that call.
            held::as_ourselves(|| drop(channel));
            loop {
                let n = read_next(event_bytes);
                // SAFETY: the next `read` wrote `n` bytes to the buffer, or none if it failed.
                let event =
                    unsafe { core::slice::from_raw_parts(bytes.cast::<u8>(), n.max(0) as usize) };
                let is_for_program =
                    || Ok(fds::channel(fd).is_none_or(|channel| channel.received(event)));
                if event.len() < event_bytes || ours(is_for_program) != Ok(false) {
                    return n;
                }
            }
        }
        Ok(Some(File::Counter(counter))) => {
            held::as_ourselves(|| counter.show(fd));
            read_next(count)
        }
        // A device cannot be read, and a read of a channel needs room for a whole event.
        Ok(Some(_)) => fail(Errno(libc::EINVAL)) as ssize_t,
        _ => read_next(count),
    }
}

/// `ioctl(3)`: the device has only write() commands. Like a kernel without the called method, the
/// device [refuses](Method::refusal). libibverbs then writes the command, if the method has a
/// command; otherwise libibverbs reports to the program that this device does not support the
/// method. A kernel without any methods answers `ENOTTY`, after which libibverbs writes the command
/// too. But for a method without a command, `ENOTTY` reaches the program, which does not expect it.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if fds::may_be_ours(fd) {
        let refused = ours(|| {
            let (Some(File::Device(_)), Some(settings)) = (fds::get(fd), settings::get()) else {
                return Ok(None);
            };
            if request != RDMA_VERBS_IOCTL {
                log::refused(settings, format_args!("ioctl {request:#x} refused: ENOTTY"));
                return Ok(Some(Errno(libc::ENOTTY)));
            }
            // The argument starts with `struct ib_uverbs_ioctl_hdr`: length, object, method.
            let mut header = [0; 6];
            sys::copy_in(argument as u64, &mut header)?;
            let [_, _, a, b, c, d] = header;
            let (object, method) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
            let method = Method { object, method };
            log::answered(
                settings,
                format_args!("ioctl {method}"),
                method.refusal(),
                method.falls_back(),
            );
            Ok(Some(method.refusal()))
        });
        match refused {
            Ok(None) => {}
            Ok(Some(errno)) | Err(errno) => return fail(errno),
        }
    }
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe { next::ioctl(fd, request, argument) }
}

/// `socket(3)`. The netlink sockets that list RDMA devices are refused, so that libibverbs finds
/// the devices in the launcher's tree. The HCA's socket for packets is marked as held: the program
/// must not close it.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA && settings::get().is_some() {
        return fail(Errno(libc::EPROTONOSUPPORT));
    }
    // SAFETY: all arguments are plain numbers.
    held::opened(unsafe { next::socket(domain, kind, protocol) })
}

/// Gives `status` the values of the device file: a character device.
fn as_device(status: &mut Status, settings: &Settings, node: Node) {
    status.st_mode = libc::S_IFCHR | 0o600;
    status.st_rdev = node.number(settings);
    status.st_size = 0;
}

fn result(done: Result<(), Errno>) -> c_int {
    done.map_or_else(fail, |()| 0)
}

/// `fstatat(3)`. Older C libraries have no symbols for this function and similar functions, so all
/// of these are system calls here.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fstatat(
    dir: c_int,
    path: *const c_char,
    status: *mut Status,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe {
        match device(path) {
            Some((settings, node)) => {
                status.write(core::mem::zeroed());
                as_device(&mut *status, settings, node);
                0
            }
            None => named!(path, dir => result(sys::fstatat(dir, path, status, flags))),
        }
    }
}

/// `statx(2)`, by which coreutils and the standard library of Rust ask for the status of a path.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    status: *mut ExtendedStatus,
) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function. The structures hold numbers, for
    // which zero is a valid value.
    unsafe {
        let Some((settings, node)) = device(path) else {
            return named!(path, dir => {
                next::statx(dir, path, flags, mask, status)
            });
        };
        let (mut plain, mut extended): (Status, ExtendedStatus) = core::mem::zeroed();
        as_device(&mut plain, settings, node);
        extended.stx_mask = libc::STATX_TYPE | libc::STATX_MODE;
        extended.stx_mode = plain.st_mode as u16;
        (extended.stx_rdev_major, extended.stx_rdev_minor) =
            (libc::major(plain.st_rdev), libc::minor(plain.st_rdev));
        status.write(extended);
        0
    }
}

/// `faccessat(3)`: by this call and similar calls, programs check whether they may open the device.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn faccessat(
    dir: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments are valid for the C function.
    unsafe {
        match device(path) {
            Some((settings, _)) => result(settings.open_fault()),
            None => named!(path, dir => {
                next::faccessat(dir, path, mode, flags)
            }),
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fstat(fd: c_int, status: *mut Status) -> c_int {
    // SAFETY: `status` is the caller's, valid for `fstat`, and the path is an empty string.
    let done = unsafe { sys::fstatat(fd, c"".as_ptr(), status, libc::AT_EMPTY_PATH) };
    if done.is_ok() && fds::may_be_ours(fd) {
        quietly(|| {
            let node = match fds::get(fd) {
                Some(File::Device(device)) => Node::Device(device.index),
                Some(File::Cm(_)) => Node::Cm,
                _ => return,
            };
            if let Some(settings) = settings::get() {
                // SAFETY: the system call has just written a `struct stat` to the caller's buffer.
                as_device(unsafe { &mut *status }, settings, node);
            }
        });
    }
    result(done)
}

/// Other names of the functions above: for large files (all files on 64-bit systems), for fortified
/// programs, and in C libraries before 2.33. The functions of old C libraries take the version of
/// the structure; 64-bit systems have only one version.
macro_rules! other_names {
    ($($name:ident($($argument:ident: $ty:ty),*) $(-> $result:ty)? => $call:expr;)*) => {
        $(
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $name($($argument: $ty),*) -> other_names!(@ $($result)?) {
                // SAFETY: the caller's arguments are valid for the C function.
                unsafe { $call }
            }
        )*
    };
    (@) => { c_int };
    (@ $result:ty) => { $result };
}

other_names! {
    open64(path: *const c_char, flags: c_int, mode: mode_t) => open(path, flags, mode);
    __open_2(path: *const c_char, flags: c_int) => open(path, flags, 0);
    __open64_2(path: *const c_char, flags: c_int) => open(path, flags, 0);
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) => openat(dir, path, flags, 0);
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) => openat(dir, path, flags, 0);
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) => openat(dir, path, flags, mode);
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) => fcntl(fd, command, argument);
    access(path: *const c_char, mode: c_int) => faccessat(AT_FDCWD, path, mode, 0);
    eaccess(path: *const c_char, mode: c_int) => faccessat(AT_FDCWD, path, mode, libc::AT_EACCESS);
    euidaccess(path: *const c_char, mode: c_int) => faccessat(AT_FDCWD, path, mode, libc::AT_EACCESS);
    stat(path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, 0);
    stat64(path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, 0);
    lstat(path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, libc::AT_SYMLINK_NOFOLLOW);
    lstat64(path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, libc::AT_SYMLINK_NOFOLLOW);
    fstat64(fd: c_int, status: *mut Status) => fstat(fd, status);
    fstatat64(dir: c_int, path: *const c_char, status: *mut Status, flags: c_int) => fstatat(dir, path, status, flags);
    __xstat(_version: c_int, path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, 0);
    __xstat64(_version: c_int, path: *const c_char, status: *mut Status) => fstatat(AT_FDCWD, path, status, 0);
    __lxstat(_version: c_int, path: *const c_char, status: *mut Status) => lstat(path, status);
    __lxstat64(_version: c_int, path: *const c_char, status: *mut Status) => lstat(path, status);
    __fxstatat(_version: c_int, dir: c_int, path: *const c_char, status: *mut Status, flags: c_int) => fstatat(dir, path, status, flags);
    __fxstatat64(_version: c_int, dir: c_int, path: *const c_char, status: *mut Status, flags: c_int) => fstatat(dir, path, status, flags);
    __fxstat(_version: c_int, fd: c_int, status: *mut Status) => fstat(fd, status);
    __fxstat64(_version: c_int, fd: c_int, status: *mut Status) => fstat(fd, status);
}

mod next;
mod paths;
mod sanitizers;
