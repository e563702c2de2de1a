//! Interposed calls that only replace a path by the path of the same file in the launcher's tree.

use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{AT_FDCWD, DIR, FILE, dirent, size_t, ssize_t};

use super::next::{self, Filter, Order};
use crate::files::{fds, tree};

/// `realpath(3)`. The result for a file in the tree is the file's path in `/sys`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: the caller's arguments are valid for the C function. The path in `/sys` is shorter
    // than the path in the tree, so it fits into the buffer that has the path in the tree.
    unsafe {
        let found = named!(path, AT_FDCWD => next::realpath(path, to));
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

/// Defines functions that only replace their path and call the next function.
macro_rules! with_path {
    ($($name:ident = $next:ident($($argument:ident: $ty:ty),*) -> $result:ty, at ($dir:expr, $path:ident);)*) => {
        $(
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $name($($argument: $ty),*) -> $result {
                // SAFETY: the caller's arguments are valid for the C function.
                unsafe { named!($path, $dir => next::$next($($argument),*)) }
            }
        )*
    };
}

with_path! {
    readlink = readlink(path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t, at (AT_FDCWD, path);
    readlinkat = readlinkat(dir: c_int, path: *const c_char, to: *mut c_char, size: size_t) -> ssize_t, at (dir, path);
    chdir = chdir(path: *const c_char) -> c_int, at (AT_FDCWD, path);
    opendir = opendir(path: *const c_char) -> *mut DIR, at (AT_FDCWD, path);
    scandir = scandir(path: *const c_char, list: *mut *mut *mut dirent, filter: Filter, order: Order) -> c_int, at (AT_FDCWD, path);
    scandir64 = scandir(path: *const c_char, list: *mut *mut *mut dirent, filter: Filter, order: Order) -> c_int, at (AT_FDCWD, path);
    getxattr = getxattr(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, at (AT_FDCWD, path);
    lgetxattr = lgetxattr(path: *const c_char, name: *const c_char, to: *mut c_void, size: size_t) -> ssize_t, at (AT_FDCWD, path);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's arguments are valid for the C function, and `file` was just opened.
    unsafe {
        let file = named!(path, AT_FDCWD => next::fopen(path, mode));
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
