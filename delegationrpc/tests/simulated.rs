//! Many peers in one thread, in virtual time. One test: it counts the descriptors of the process.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

#[allow(dead_code, unused_imports, unused_macros, reason = "the trait is all that is needed of it")]
#[path = "../../ipc/shm/tests/support/conformance/mod.rs"]
mod conformance;
#[path = "../../ipc/shm/tests/support/one_thread.rs"]
mod one_thread;
mod rpc;
#[path = "../../ipc/shm/tests/support/simulated.rs"]
#[macro_use]
mod simulated;
#[path = "../../ipc/shm/tests/support/mod.rs"]
mod support;

use rpc::Delegation;

simulated!(Delegation);
