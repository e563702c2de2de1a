//! libucp, opened at run time: the functions that this crate calls, and of each struct the fields
//! that it uses.
//!
//! Source: `ucp/api/ucp.h`, `ucp/api/ucp_def.h`, `ucs/type/status.h` of UCX 1.10 to 1.13. Every
//! struct of parameters begins with a mask of the fields that are set, and the library reads no
//! others, so a struct may end after the last used field. These structs are padded to the size in
//! the header. A test compares sizes, offsets and constants with the header (`oracle.c`).

use core::ffi::{CStr, c_char, c_uint, c_void};
use core::ptr::NonNull;
use std::sync::OnceLock;

use benchkv_harness::machine::Library;

use super::{OLDEST, UcxError};

const LIBUCP: &str = "libucp.so.0";

/// `ucs_status_t`: an enum that is packed into one byte. 0 is success, negative an error.
pub(super) type Status = i8;
pub(super) const UCS_OK: Status = 0;
pub(super) const UCS_INPROGRESS: Status = 1;
/// The lower bound of the error codes, which are negative.
pub(super) const UCS_ERR_LAST: isize = -100;

pub(super) const UCP_PARAM_FIELD_FEATURES: u64 = 1;
pub(super) const UCP_FEATURE_AM: u64 = 1 << 6;

pub(super) const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
pub(super) const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(super) const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
pub(super) const UCP_ERR_HANDLING_MODE_NONE: c_uint = 0;
pub(super) const UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;

pub(super) const UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1;
pub(super) const UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 1 << 2;
pub(super) const UCP_AM_HANDLER_PARAM_FIELD_ARG: u64 = 1 << 3;

pub(super) const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub(super) const UCP_AM_SEND_FLAG_EAGER: u32 = 1 << 1;
pub(super) const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;
pub(super) const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;

/// The type to which the library's handles point.
pub(super) enum Opaque {}
pub(super) type Handle = *mut Opaque;

/// `ucp_params_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Params {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    pub(super) unused: [u64; 8],
}

/// `ucp_worker_params_t`. If no field is set, the worker belongs to one thread.
#[repr(C)]
#[derive(Default)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) unused: [u64; 24],
}

/// `ucp_err_handler_cb_t`.
pub(super) type ErrorCallback =
    unsafe extern "C" fn(arg: *mut c_void, endpoint: Handle, status: Status);

/// `ucp_ep_params_t`.
#[repr(C)]
pub(super) struct EndpointParams {
    pub(super) field_mask: u64,
    pub(super) address: *const u8,
    pub(super) err_mode: c_uint,
    pub(super) err_handler_cb: Option<ErrorCallback>,
    pub(super) err_handler_arg: *mut c_void,
    pub(super) unused: [u64; 8],
}

/// `ucp_am_recv_callback_t`.
pub(super) type ReceiveCallback = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ReceiveParams,
) -> Status;

/// `ucp_am_recv_param_t`.
#[repr(C)]
pub(super) struct ReceiveParams {
    pub(super) recv_attr: u64,
    pub(super) reply_ep: Handle,
}

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub(super) struct HandlerParams {
    pub(super) field_mask: u64,
    pub(super) id: c_uint,
    pub(super) flags: u32,
    pub(super) cb: Option<ReceiveCallback>,
    pub(super) arg: *mut c_void,
}

/// `ucp_request_param_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct RequestParams {
    pub(super) op_attr_mask: u32,
    pub(super) flags: u32,
    pub(super) unused: [u64; 8],
}

/// Declares the functions of the library, and loads them.
macro_rules! functions {
    ($($symbol:ident ($($arg:ty),*) -> $ret:ty;)*) => {
        pub(super) struct Functions {
            $(pub(super) $symbol: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            /// Finds all functions in the library.
            ///
            /// # Errors
            /// The name of a function that the library does not have.
            fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($symbol: {
                        let name = CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()).unwrap_or_default();
                        let address: NonNull<c_void> = library.symbol(name).ok_or(stringify!($symbol))?;
                        // SAFETY: `address` is the function of this name in the library, which
                        // stays loaded, and that function has this type (`ucp/api/ucp.h`,
                        // `ucs/type/status.h`).
                        unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(address.as_ptr()) }
                    },)*
                })
            }
        }
    };
}

functions! {
    ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint) -> ();
    ucp_init_version(c_uint, c_uint, *const Params, *const c_void, *mut Handle) -> Status;
    ucp_cleanup(Handle) -> ();
    ucp_worker_create(Handle, *const WorkerParams, *mut Handle) -> Status;
    ucp_worker_destroy(Handle) -> ();
    ucp_worker_get_address(Handle, *mut *mut u8, *mut usize) -> Status;
    ucp_worker_release_address(Handle, *mut u8) -> ();
    ucp_worker_set_am_recv_handler(Handle, *const HandlerParams) -> Status;
    ucp_worker_progress(Handle) -> c_uint;
    ucp_ep_create(Handle, *const EndpointParams, *mut Handle) -> Status;
    ucp_ep_flush_nbx(Handle, *const RequestParams) -> *mut c_void;
    ucp_ep_close_nbx(Handle, *const RequestParams) -> *mut c_void;
    ucp_ep_print_info(Handle, *mut libc::FILE) -> ();
    ucp_am_send_nbx(Handle, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParams) -> *mut c_void;
    ucp_request_check_status(*mut c_void) -> Status;
    ucp_request_free(*mut c_void) -> ();
    ucs_status_string(Status) -> *const c_char;
}

pub(super) struct Api {
    pub(super) functions: Functions,
    version: [u32; 3],
    file: String,
}

impl Api {
    /// Returns the process's library. The first call loads the library.
    pub(super) fn get() -> Result<&'static Self, UcxError> {
        static API: OnceLock<Api> = OnceLock::new();
        match API.get() {
            Some(api) => Ok(api),
            None => {
                let api = Self::load(LIBUCP)?;
                Ok(API.get_or_init(|| api))
            }
        }
    }

    fn load(name: &str) -> Result<Self, UcxError> {
        let library = Library::load(name).map_err(|reason| UcxError::NotInstalled { reason })?;
        let file = library.file_name();
        let functions = Functions::load(&library).map_err(|symbol| UcxError::TooOld {
            version: file.clone(),
            lacks: format!(", which has no {symbol}"),
        })?;
        let mut major = 0;
        let mut minor = 0;
        let mut release = 0;
        // SAFETY: `major`, `minor` and `release` are live during the call, which writes a number to
        // each.
        unsafe { (functions.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut release) };
        if (major, minor) < OLDEST {
            return Err(UcxError::TooOld {
                version: format!("{major}.{minor}.{release}"),
                lacks: String::new(),
            });
        }
        Ok(Self {
            functions,
            version: [major, minor, release],
            file,
        })
    }

    pub(super) fn version(&self) -> String {
        let [major, minor, release] = self.version;
        format!("{major}.{minor}.{release}")
    }

    pub(super) fn describe(&self) -> String {
        format!("UCX {} ({})", self.version(), self.file)
    }

    pub(super) fn text(&self, status: Status) -> String {
        // SAFETY: the function takes any status, and returns null or a constant string of the
        // library, which stays loaded.
        let text = unsafe {
            let text = (self.functions.ucs_status_string)(status);
            text.as_ref().map(|text| CStr::from_ptr(text))
        };
        text.map_or_else(
            || format!("status {status}"),
            |text| text.to_string_lossy().into_owned(),
        )
    }

    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), UcxError> {
        if status == UCS_OK {
            return Ok(());
        }
        let status = self.text(status);
        Err(UcxError::Call { call, status })
    }
}

/// The return value of a function that may have started an operation (`ucs_status_ptr_t`).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Started {
    Done,
    /// The operation is under way. The caller has to free the request of the operation.
    Going(NonNull<c_void>),
    Failed(Status),
}

impl Started {
    /// Decodes a return value as `UCS_PTR_IS_ERR` does: the last hundred addresses are errors.
    /// Every other address is a request, even one in the upper half of the addresses.
    pub(super) fn of(pointer: *mut c_void) -> Self {
        match NonNull::new(pointer) {
            None => Self::Done,
            Some(_) if pointer.addr() >= UCS_ERR_LAST as usize => {
                Self::Failed(pointer.addr() as Status)
            }
            Some(request) => Self::Going(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_says_which_package_has_it() {
        let text = Api::load("libnowhere.so.0")
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("libnowhere.so.0") && text.contains("apt-get install libucx0"),
            "{text}"
        );
    }

    #[test]
    fn another_library_lacks_a_function_and_is_too_old() {
        let text = Api::load("libc.so.6").map(drop).unwrap_err().to_string();
        assert!(
            text.contains("UCX 1.10 or later") && text.contains("has no ucp_get_version"),
            "{text}"
        );
    }

    #[test]
    fn only_the_last_hundred_addresses_are_errors() {
        let at = |address: usize| core::ptr::without_provenance_mut::<c_void>(address);
        assert_eq!(Started::of(at(0)), Started::Done);
        for error in [-1, -25, -80, -100_isize] {
            assert_eq!(
                Started::of(at(error as usize)),
                Started::Failed(error as Status)
            );
        }
        for request in [
            16,
            0x7fff_ffff_f000,
            1 << 63,
            (-101_isize) as usize,
            (-4096_isize) as usize,
        ] {
            assert!(
                matches!(Started::of(at(request)), Started::Going(_)),
                "{request:#x}"
            );
        }
    }
}
