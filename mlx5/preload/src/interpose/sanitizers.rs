//! Options of the sanitizers' shared runtimes, in a program that is built with a sanitizer. A
//! runtime calls these functions before the program begins; a program may define its own instead.

use std::ffi::c_char;

/// Allows that this library comes before AddressSanitizer's runtime.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}

/// Suppresses reports about this library, which is not built with ThreadSanitizer: the runtime does
/// not see how the library's threads synchronize.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __tsan_default_suppressions() -> *const c_char {
    c"race:libmlx5_preload.so".as_ptr()
}
