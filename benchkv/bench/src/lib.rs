//! Loads of calls, and their checks: the code that benchmarks of single crates share beside
//! [`harness`]. It is not published.
//!
//! - [`load`]: callers and answerers under load, over any transport. [`counted`]: single operations
//!   in sequence, for callgrind.
//! - [`pattern`]: the content of requests and replies, by which a wrong one is noticed.
//! - [`held`]: the memory of the program. `program`: the frame of programs that measure two
//!   processes.
//!
//! Only [`load`] starts a thread.

pub mod counted;
pub mod held;
pub mod load;
pub mod pattern;
#[cfg(feature = "program")]
pub mod program;
