//! Shared memory between processes of one user on one host, and its protection against their
//! deaths: regions that appear whole and whose owner's death is detected, sealed memfds for bulk
//! memory, lock-free lanes, ready bits, a futex to sleep on one thing or on many at once, and the
//! wait strategy of loops that find nothing to do. With ready bits, polling thousands of lanes
//! costs no more than polling the few lanes that are busy. A driver that runs all peers in one
//! thread, by a clock of its own, has regions without files (`Dir::in_memory`) and wakers in place
//! of the futex (`sleep::rest`). `mlx5`, `ipc`, `delegationrpc` and `flux` are built on it.
//! Invariants, by number: `docs/shm-protocols.md`.
//!
//! ```rust
//! use copyrpc_shm::dir::Dir;
//! use copyrpc_shm::region::{OwnerState, Region};
//!
//! # let path = std::env::temp_dir().join(format!("shm-doc-{}", std::process::id()));
//! # std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path)?;
//! let dir = Dir::open(Some(&path))?; // or `None`: /dev/shm/copyrpc-<uid>
//! let owner = Region::create(&dir, "example", 0x4558_414d, 4096, |view| assert_eq!(view.len(), 4096))?;
//!
//! // Any process of this user; a living owner is proven by locks that the kernel drops when it dies.
//! let peer = Region::open(&dir, "example", 0x4558_414d, 4096)?;
//! assert_eq!(peer.owner_state(), OwnerState::Alive);
//! drop(owner);
//! assert_eq!(peer.owner_state(), OwnerState::Closed);
//! # drop(peer);
//! # std::fs::remove_dir(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The files
//! In the order data flows:
//! - [`dir`]: the user's directory of regions, and the removal of dead regions.
//! - [`lock`]: locks the kernel drops when their process dies.
//! - [`region`]: named memory that appears whole and whose owner's death is detected (its `header`,
//!   with the `robust` word, is private).
//! - [`memfd`]: bulk memory that peers find through `/proc` and of which nothing remains.
//! - [`sync`]: atomics (loom's under `--cfg loom`) and the asymmetric barrier pair.
//! - [`lane`]: messages from one producer to one consumer.
//! - [`ready`]: polling thousands of lanes at the price of the busy lanes.
//! - [`cache`]: fetching ahead, and short copies.
//! - [`plain`]: payloads that may cross a process boundary.
//! - [`dropped`]: requests that were dropped without an answer, on their way to the thread that
//!   rejects them.
//! - [`sleep`]: sleeping until a peer publishes something, and waking sleepers. [`clock`]: the
//!   time, the system's or set by hand.
//! - [`wait`]: the waiting of a loop that found nothing to do.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "memfds, robust futexes, membarrier and /proc/<pid>/fd are Linux's, and the shared layouts are for 64 bits"
);

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
pub mod threads;
pub mod wait;

/// Checks that `?` makes a `Box<dyn Error + Send + Sync>` of every error.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::dir::DirError>();
        check::<crate::lock::LockError>();
        check::<crate::memfd::MemfdAttachError>();
        check::<crate::memfd::MemfdCreateError>();
        check::<crate::memfd::MemfdRangeError>();
        check::<crate::memfd::NoHugePages>();
        check::<crate::region::CreateError>();
        check::<crate::region::OpenError>();
    }
}
