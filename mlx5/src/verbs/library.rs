//! libibverbs and libmlx5, opened at run time: the functions this crate calls.
//!
//! Only exported functions are loaded, each in the version whose types are declared in
//! [`abi`](super::abi). The inline functions of the headers use tables of function pointers in the
//! libraries' structs. On mlx5 this crate needs none of these tables, because it posts, polls and
//! arms by itself; a relay uses the table of [`ibv_context`](super::abi::ibv_context).
//!
//! libmlx5 must be the file that libibverbs loads as its provider, so that both use the same
//! objects. The provider's name is a link to that file, and the loader identifies files, not names.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::NonNull;
use std::sync::OnceLock;

use super::abi::*;
use crate::error::verbs::VerbsError;

const LIBIBVERBS: &str = "libibverbs.so.1";
const LIBMLX5: &str = "libmlx5.so.1";

/// A loaded library. It is never unloaded: its objects, and threads inside it, may outlive any
/// handle.
struct Library {
    name: &'static str,
    handle: NonNull<c_void>,
}

impl Library {
    fn open(name: &'static str) -> Result<Self, VerbsError> {
        let file = std::ffi::CString::new(name).unwrap_or_default();
        // SAFETY: `file` is a C string. Loading runs the library's initializers, which register
        // providers and print nothing.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        NonNull::new(handle)
            .map(|handle| Self { name, handle })
            .ok_or_else(|| VerbsError::NotInstalled {
                library: name,
                reason: reason(),
            })
    }

    /// Returns the address of `symbol` in `version`, both NUL-terminated.
    fn symbol(
        &self,
        symbol: &'static str,
        version: &'static str,
    ) -> Result<NonNull<c_void>, VerbsError> {
        let c_string = |s: &'static str| {
            CStr::from_bytes_with_nul(s.as_bytes())
                .unwrap_or_default()
                .as_ptr()
        };
        // SAFETY: both are C strings, and the handle is never closed.
        let address = unsafe { find(self.handle.as_ptr(), c_string(symbol), c_string(version)) };
        let without_nul = |s: &'static str| s.trim_end_matches('\0');
        NonNull::new(address).ok_or(VerbsError::TooOld {
            library: self.name,
            symbol: without_nul(symbol),
            version: without_nul(version),
        })
    }
}

#[cfg(target_env = "gnu")]
unsafe fn find(handle: *mut c_void, symbol: *const c_char, version: *const c_char) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::dlvsym(handle, symbol, version) }
}

/// Finds a symbol on systems without symbol versions, where each symbol exists once.
#[cfg(not(target_env = "gnu"))]
unsafe fn find(handle: *mut c_void, symbol: *const c_char, _version: *const c_char) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::dlsym(handle, symbol) }
}

fn reason() -> String {
    // SAFETY: the call returns null, or a C string that is valid until the next call of this
    // thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: `text` is a C string, and no later call of this thread has invalidated it.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($symbol:ident @ $version:literal ($($arg:ty),*) -> $ret:ty;)* }) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $symbol: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $table {
            fn load(name: &'static str) -> Result<Self, VerbsError> {
                let library = Library::open(name)?;
                Ok(Self {
                    $($symbol: {
                        let address = library.symbol(concat!(stringify!($symbol), "\0"), concat!($version, "\0"))?;
                        // SAFETY: the function of this name and version has this type
                        // (`infiniband/verbs.h`, `infiniband/mlx5dv.h`).
                        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(address.as_ptr()) }
                    },)*
                })
            }
        }
    };
}

functions! {
    Verbs {
        ibv_get_device_list @ "IBVERBS_1.1" (*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list @ "IBVERBS_1.1" (*mut *mut ibv_device) -> ();
        ibv_get_device_guid @ "IBVERBS_1.1" (*mut ibv_device) -> u64;
        ibv_open_device @ "IBVERBS_1.1" (*mut ibv_device) -> *mut ibv_context;
        ibv_close_device @ "IBVERBS_1.1" (*mut ibv_context) -> c_int;
        ibv_query_device @ "IBVERBS_1.1" (*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port @ "IBVERBS_1.1" (*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        _ibv_query_gid_ex @ "IBVERBS_1.11" (*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        ibv_alloc_pd @ "IBVERBS_1.1" (*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd @ "IBVERBS_1.1" (*mut ibv_pd) -> c_int;
        ibv_reg_mr_iova2 @ "IBVERBS_1.8" (*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        ibv_dereg_mr @ "IBVERBS_1.1" (*mut ibv_mr) -> c_int;
        ibv_create_comp_channel @ "IBVERBS_1.0" (*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel @ "IBVERBS_1.0" (*mut ibv_comp_channel) -> c_int;
        ibv_get_cq_event @ "IBVERBS_1.1" (*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events @ "IBVERBS_1.1" (*mut ibv_cq, u32) -> ();
        ibv_get_async_event @ "IBVERBS_1.1" (*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event @ "IBVERBS_1.1" (*mut ibv_async_event) -> ();
        ibv_create_cq @ "IBVERBS_1.1" (*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_create_qp @ "IBVERBS_1.1" (*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_destroy_cq @ "IBVERBS_1.1" (*mut ibv_cq) -> c_int;
        ibv_create_srq @ "IBVERBS_1.1" (*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_destroy_srq @ "IBVERBS_1.1" (*mut ibv_srq) -> c_int;
        ibv_modify_qp @ "IBVERBS_1.1" (*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp @ "IBVERBS_1.1" (*mut ibv_qp) -> c_int;
        ibv_create_ah @ "IBVERBS_1.1" (*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah @ "IBVERBS_1.1" (*mut ibv_ah) -> c_int;
    }
}

functions! {
    Mlx5 {
        mlx5dv_is_supported @ "MLX5_1.8" (*mut ibv_device) -> bool;
        mlx5dv_query_device @ "MLX5_1.0" (*mut ibv_context, *mut mlx5dv_context) -> c_int;
        mlx5dv_create_cq @ "MLX5_1.1" (*mut ibv_context, *mut ibv_cq_init_attr_ex, *mut mlx5dv_cq_init_attr) -> *mut ibv_cq;
        mlx5dv_create_qp @ "MLX5_1.3" (*mut ibv_context, *mut ibv_qp_init_attr_ex, *mut mlx5dv_qp_init_attr) -> *mut ibv_qp;
        mlx5dv_init_obj @ "MLX5_1.2" (*mut mlx5dv_obj, u64) -> c_int;
    }
}

pub(crate) struct Api {
    pub(crate) verbs: Verbs,
    pub(crate) mlx5: Mlx5,
}

impl Api {
    fn load(libibverbs: &'static str, libmlx5: &'static str) -> Result<Self, VerbsError> {
        Ok(Self {
            verbs: Verbs::load(libibverbs)?,
            mlx5: Mlx5::load(libmlx5)?,
        })
    }

    /// Returns the file name of libmlx5, which contains its version, for messages.
    pub(crate) fn library_file(&self) -> String {
        // SAFETY: the struct holds numbers and pointers, for which zero is a valid value.
        let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
        // SAFETY: any address may be passed, and the answer is written to a local variable.
        let found =
            unsafe { libc::dladdr(self.mlx5.mlx5dv_init_obj as *const c_void, &raw mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return LIBMLX5.to_owned();
        }
        // SAFETY: `dli_fname` is a C string that lives as long as the library, which is never
        // unloaded.
        let path = unsafe { CStr::from_ptr(info.dli_fname) }
            .to_string_lossy()
            .into_owned();
        let real = std::fs::canonicalize(&path)
            .ok()
            .and_then(|real| Some(real.file_name()?.to_string_lossy().into_owned()));
        real.unwrap_or(path)
    }

    /// Returns the functions of both libraries, loaded once in a process. A failed load is tried
    /// again at the next call.
    pub(crate) fn get() -> Result<&'static Self, VerbsError> {
        static API: OnceLock<Api> = OnceLock::new();
        match API.get() {
            Some(api) => Ok(api),
            None => {
                let api = Self::load(LIBIBVERBS, LIBMLX5)?;
                Ok(API.get_or_init(|| api))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_says_which_package_has_it() {
        for (libibverbs, libmlx5, missing) in [
            ("libnowhere.so.1", "libc.so.6", "libnowhere.so.1"),
            ("libc.so.6", "libnowhere.so.2", "libc.so.6"),
        ] {
            let Err(error) = Api::load(libibverbs, libmlx5) else {
                panic!("loaded")
            };
            let text = error.to_string();
            assert!(
                text.starts_with(missing)
                    && text.contains("apt-get install libibverbs1 ibverbs-providers"),
                "{text}"
            );
        }
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn a_library_without_a_function_or_its_version_is_too_old() {
        let library = Library::open("libc.so.6").unwrap();
        assert!(
            library.symbol("getpid\0", "GLIBC_2.2.5\0").is_ok() || !cfg!(target_arch = "x86_64")
        );
        for (symbol, version) in [
            ("ibv_open_device\0", "IBVERBS_1.1\0"),
            ("getpid\0", "GLIBC_999\0"),
        ] {
            let error = library.symbol(symbol, version).unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(
                    error,
                    VerbsError::TooOld {
                        library: "libc.so.6",
                        ..
                    }
                ),
                "{error:?}"
            );
            assert!(
                text.contains("rdma-core 33") && text.contains(version.trim_end_matches('\0')),
                "{text}"
            );
        }
    }
}
