//! The functions that this library overrides, as the next libraries define them.

use core::mem::transmute;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

use libc::{DIR, FILE, dirent, mode_t, size_t, ssize_t, statx as ExtendedStatus};

use super::fail;
use crate::options::errno::Errno;

struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    fn address(&self) -> *mut c_void {
        let address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            self.find()
        } else {
            address
        }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: the name is a string.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(address, Ordering::Relaxed);
        address
    }
}

pub(super) fn find_all() {
    ALL.iter().for_each(|next| _ = next.find());
}

/// The result of a function that failed: -1 or null.
trait Failed {
    const FAILED: Self;
}

impl Failed for c_int {
    const FAILED: Self = -1;
}

impl Failed for ssize_t {
    const FAILED: Self = -1;
}

impl<T> Failed for *mut T {
    const FAILED: Self = core::ptr::null_mut();
}

/// Callbacks of `scandir(3)`: a `Filter` returns whether an entry is wanted, an `Order` compares
/// two entries.
pub(super) type Filter = Option<unsafe extern "C" fn(*const dirent) -> c_int>;
pub(super) type Order =
    Option<unsafe extern "C" fn(*mut *const dirent, *mut *const dirent) -> c_int>;

/// Declares the functions. A function fails with `ENOSYS` if no library has it. An argument after a
/// semicolon is variadic: the function ignores the argument if the caller did not pass it.
macro_rules! next_functions {
    ($($next:ident = $text:literal $name:ident($($argument:ident: $ty:ty),* $(; $more:ident: $more_ty:ty)?) -> $result:ty;)*) => {
        $(static $next: Next = Next::new($text);)*
        static ALL: &[&Next] = &[$(&$next),*];
        $(
            /// # Safety
            /// The arguments are valid for the C function of this name.
            #[inline(always)]
            pub(super) unsafe fn $name($($argument: $ty,)* $($more: $more_ty)?) -> $result {
                type Function = next_functions!(@ $($ty),* $(; $more_ty)? => $result);
                // SAFETY: the address is null, which is `None`, or the address of the C function of
                // that name, which has the declared type.
                match unsafe { transmute::<*mut c_void, Option<Function>>($next.address()) } {
                    // SAFETY: the caller guarantees that the arguments are valid for this function.
                    Some(function) => unsafe { function($($argument,)* $($more)?) },
                    None => {
                        fail(Errno(libc::ENOSYS));
                        <$result as Failed>::FAILED
                    }
                }
            }
        )*
    };
    (@ $($ty:ty),* => $result:ty) => { unsafe extern "C-unwind" fn($($ty),*) -> $result };
    (@ $($ty:ty),*; $more:ty => $result:ty) => { unsafe extern "C-unwind" fn($($ty,)* ...) -> $result };
}

next_functions! {
    OPEN = c"open" open(path: *const c_char, flags: c_int; mode: mode_t) -> c_int;
    OPENAT = c"openat" openat(dir: c_int, path: *const c_char, flags: c_int; mode: mode_t) -> c_int;
    MEMFD_CREATE = c"memfd_create" memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    CLOSE = c"close" close(fd: c_int) -> c_int;
    CLOSE_RANGE = c"close_range" close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    CLOSEFROM = c"closefrom" closefrom(first: c_int) -> c_int;
    DUP = c"dup" dup(fd: c_int) -> c_int;
    DUP2 = c"dup2" dup2(old: c_int, new: c_int) -> c_int;
    DUP3 = c"dup3" dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    FCNTL = c"fcntl" fcntl(fd: c_int, command: c_int; argument: c_ulong) -> c_int;
    READ = c"read" read(fd: c_int, bytes: *mut c_void, count: size_t) -> ssize_t;
    WRITE = c"write" write(fd: c_int, bytes: *const c_void, count: size_t) -> ssize_t;
    IOCTL = c"ioctl" ioctl(fd: c_int, request: c_ulong; argument: *mut c_void) -> c_int;
    SOCKET = c"socket" socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    FACCESSAT = c"faccessat" faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int;
    STATX = c"statx" statx(dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, status: *mut ExtendedStatus) -> c_int;
    READLINK = c"readlink" readlink(path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t;
    READLINKAT = c"readlinkat" readlinkat(dir: c_int, path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t;
    REALPATH = c"realpath" realpath(path: *const c_char, to: *mut c_char) -> *mut c_char;
    CHDIR = c"chdir" chdir(path: *const c_char) -> c_int;
    OPENDIR = c"opendir" opendir(path: *const c_char) -> *mut DIR;
    SCANDIR = c"scandir" scandir(path: *const c_char, list: *mut *mut *mut dirent, filter: Filter, order: Order) -> c_int;
    FOPEN = c"fopen" fopen(path: *const c_char, mode: *const c_char) -> *mut FILE;
    GETXATTR = c"getxattr" getxattr(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t;
    LGETXATTR = c"lgetxattr" lgetxattr(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t;
}
