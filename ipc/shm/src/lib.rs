#![doc = include_str!("../README.md")]
//!
//! # The files
//! In the order data flows:
//! - [`dir`]: the user's directory of regions, and the removal of what the dead left there.
//! - [`lock`]: locks the kernel drops when their process dies.
//! - [`region`]: named memory that appears whole and whose owner's death is noticed (its `header`, with the `robust` word, is private).
//! - [`memfd`]: bulk memory that peers find through `/proc` and that leaves nothing behind.
//! - [`sync`]: atomics (loom's under `--cfg loom`) and the asymmetric barrier pair.
//! - [`lane`]: one producer, one consumer, lap-stamped slots.
//! - [`ready`]: polling thousands of lanes at the price of the busy ones.
//! - [`cache`]: fetching ahead, and short copies.
//! - [`plain`]: what may cross a process boundary.
//! - [`dropped`]: requests that nobody will answer, on their way to the thread that rejects them.
//! - [`sleep`]: sleeping until a peer publishes something, and waking who sleeps. [`clock`]: the time, the system's or set by hand.
//! - [`wait`]: what a loop does that found nothing to do.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("memfds, robust futexes, membarrier and /proc/<pid>/fd are Linux's, and the shared layouts are for 64 bits");

pub mod cache;
pub mod clock;
pub mod dir;
pub mod dropped;
mod header;
pub mod lane;
pub mod lock;
pub mod memfd;
pub mod plain;
pub mod ready;
pub mod region;
mod robust;
pub mod sleep;
pub mod sync;
mod sys;
pub mod wait;
