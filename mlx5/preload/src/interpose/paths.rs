//! Calls that only need the path of a file in the launcher's tree.

use core::mem::transmute;
use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{AT_FDCWD, DIR, FILE, dirent, size_t, ssize_t};

use super::{
    CHDIR, FOPEN, Failed, GETXATTR, LGETXATTR, OPENDIR, READLINK, READLINKAT, REALPATH, SCANDIR,
    fail,
};
use crate::files::{fds, tree};
use crate::options::errno::Errno;

/// `realpath(3)`, which names a file in the tree by its path of `/sys`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: the caller's arguments. The path of `/sys` is shorter than that in the tree, for
    // which there was room.
    unsafe {
        let found = named!(path, AT_FDCWD => next!(REALPATH as fn(*const c_char, *mut c_char) -> *mut c_char, (path, to)));
        if let Some(name) = if found.is_null() {
            None
        } else {
            tree::name(CStr::from_ptr(found))
        } {
            libc::strcpy(found, name.as_ptr());
        }
        found
    }
}

/// Functions that only pass a path on.
macro_rules! with_path {
    ($($name:ident = $next:ident($($argument:ident: $ty:ty),*) -> $result:ty, at ($dir:expr, $path:ident);)*) => {
        $(
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $name($($argument: $ty),*) -> $result {
                // SAFETY: the caller's arguments.
                unsafe { named!($path, $dir => next!($next as fn($($ty),*) -> $result, ($($argument),*))) }
            }
        )*
    };
}

/// The arguments of `scandir(3)`: whether an entry is wanted, and the order of two.
type Filter = Option<unsafe extern "C" fn(*const dirent) -> c_int>;
type Order = Option<unsafe extern "C" fn(*mut *const dirent, *mut *const dirent) -> c_int>;

with_path! {
    readlink = READLINK(path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t, at (AT_FDCWD, path);
    readlinkat = READLINKAT(dir: c_int, path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t, at (dir, path);
    chdir = CHDIR(path: *const c_char) -> c_int, at (AT_FDCWD, path);
    opendir = OPENDIR(path: *const c_char) -> *mut DIR, at (AT_FDCWD, path);
    scandir = SCANDIR(path: *const c_char, list: *mut *mut *mut dirent, filter: Filter, order: Order) -> c_int, at (AT_FDCWD, path);
    scandir64 = SCANDIR(path: *const c_char, list: *mut *mut *mut dirent, filter: Filter, order: Order) -> c_int, at (AT_FDCWD, path);
    getxattr = GETXATTR(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, at (AT_FDCWD, path);
    lgetxattr = LGETXATTR(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, at (AT_FDCWD, path);
}

/// `fopen(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's arguments, and a file that was just opened.
    unsafe {
        let file = named!(path, AT_FDCWD => next!(FOPEN as fn(*const c_char, *const c_char) -> *mut FILE, (path, mode)));
        if !file.is_null() {
            fds::opened(path, libc::fileno(file));
        }
        file
    }
}

other_names! {
    fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE => fopen(path, mode);
    __readlink_chk(path: *const c_char, to: *mut c_char, size: size_t, _room: size_t) -> ssize_t => readlink(path, to, size);
    __readlinkat_chk(dir: c_int, path: *const c_char, to: *mut c_char, size: size_t, _room: size_t) -> ssize_t => {
        readlinkat(dir, path, to, size)
    };
    __realpath_chk(path: *const c_char, to: *mut c_char, _room: size_t) -> *mut c_char => realpath(path, to);
    canonicalize_file_name(path: *const c_char) -> *mut c_char => realpath(path, core::ptr::null_mut());
}
