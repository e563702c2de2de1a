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
//! - [`clients`]: a server's clients: seats with generations, their holders' deaths noticed.
//! - [`membership`]: a client's side of that: its seat, and whether there is still a server.
//! - [`cache`]: fetching ahead, and short copies.
//! - [`sessions`], [`caller`]: a server that answers through two lanes per client, and its clients: what ipc and delegationrpc share.
//! - [`plain`]: what may cross a process boundary.
//! - [`dropped`]: requests that nobody will answer, on their way to the thread that rejects them.
//! - [`sleep`]: sleeping until a peer publishes something, and waking who sleeps.
//! - [`blocking`]: waiting for a server, serving and asking, in the caller's thread.
//! - [`wait`]: what a loop does that found nothing to do.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("memfds, robust futexes, membarrier and /proc/<pid>/fd are Linux's, and the shared layouts are for 64 bits");

pub mod blocking;
pub mod cache;
pub mod caller;
pub mod clients;
pub mod clock;
pub mod dir;
pub mod dropped;
mod header;
pub mod lane;
pub mod lock;
pub mod membership;
pub mod memfd;
pub mod plain;
pub mod ready;
pub mod region;
mod robust;
pub mod sessions;
pub mod sleep;
pub mod sync;
mod sys;
pub mod wait;
