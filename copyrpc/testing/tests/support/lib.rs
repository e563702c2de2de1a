//! The part that tests of several crates share: processes that are started, stopped, killed and
//! single-stepped. It is not published. Its own tests are the suites that every RPC through shared
//! memory of this workspace passes (`tests/rpcs`).
//!
//! - `limits`: watchdogs, the scale of tests, and addresses that no other test listens at.
//! - `executor`: a plain loop for futures.
//! - `methods`: a service, and the calls of its clients, for every RPC of bytes.
//! - `helpers`: scratch directories, and processes that execute the test binary again in a role.
//! - `strangers`: an attack on the address of a server.
//! - `tracee`: a process that is single-stepped from one of its markers to the next.
//! - `one_thread`: many peers in one thread, in virtual time.
#![allow(missing_docs, missing_debug_implementations, reason = "tests use it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "helper processes talk to their test through it"
)]

pub mod executor;
pub mod helpers;
pub mod limits;
pub mod methods;
pub mod one_thread;
pub mod strangers;
pub mod tracee;
