//! The operations of this program, done by libibverbs and libmlx5 instead of this crate: the loops
//! of `loops.c`, on a device of `mlx5-run`.

use std::ffi::{CString, c_char, c_int};

use crate::driver::Library;

/// An operation of this crate and its counterpart.
pub(crate) struct Versus {
    pub(crate) ours: &'static str,
    /// Name in `loops.c`.
    pub(crate) theirs: &'static str,
    pub(crate) apis: &'static str,
}

const POST: &str = "ibv_wr_*,ibv_post_send";
const POLL: &str = "ibv_poll_cq,ibv_start_poll";

const fn versus(ours: &'static str, theirs: &'static str, apis: &'static str) -> Versus {
    Versus { ours, theirs, apis }
}

pub(crate) const VERSUS: [Versus; 16] = [
    versus("post_inline28", "post_inline28", POST),
    versus("post_inline28_any", "post_inline28", POST),
    versus("post_batch8_inline28", "post_batch8_inline28", POST),
    versus("post_batch8_inline28_any", "post_batch8_inline28", POST),
    versus("post_sge1024", "post_sge1024", POST),
    versus("post_inline220", "post_inline220", POST),
    versus("post_inline220_any", "post_inline220", POST),
    versus("post_send_inline28", "post_send_inline28", POST),
    versus("post_receive_rq", "post_receive_rq", "ibv_post_recv"),
    versus("post_receive8_rq", "post_receive8_rq", "ibv_post_recv"),
    versus("post_receive_srq", "post_receive_srq", "ibv_post_srq_recv"),
    versus(
        "post_receive8_srq",
        "post_receive8_srq",
        "ibv_post_srq_recv",
    ),
    versus("poll_send", "poll_send", POLL),
    versus("poll_receive_rq", "poll_receive_rq", POLL),
    versus("poll_receive_srq", "poll_receive_srq", POLL),
    versus("poll_empty", "poll_empty", POLL),
];

/// Calls the C function `run` once for each number in `counts`: the call does operation `name` this
/// number of times, by the functions `api`. With `single_threaded`, a thread domain declares that
/// the queues of the operation belong to one thread.
pub(crate) fn run(name: &str, api: &str, single_threaded: bool, counts: impl Iterator<Item = u32>) {
    let library = Library::load("benches/instructions/loops.c").unwrap_or_else(|e| panic!("{e}"));
    type Run = unsafe extern "C" fn(*const c_char, *const c_char, c_int, u32) -> c_int;
    // SAFETY: the function `run` of `loops.c` has this type.
    let run: Run = unsafe { std::mem::transmute(library.symbol("run")) };
    let (name, api) = (CString::new(name).unwrap(), CString::new(api).unwrap());
    for n in counts {
        // SAFETY: both strings are NUL-terminated and outlive the call.
        let result = unsafe { run(name.as_ptr(), api.as_ptr(), single_threaded.into(), n) };
        assert_eq!(result, 0, "no such operation: {name:?}");
    }
}
