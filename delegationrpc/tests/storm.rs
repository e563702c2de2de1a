//! Clients and servers killed and stopped at random moments.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

#[path = "../../ipc/shm/tests/support/caller.rs"]
mod caller;
#[allow(dead_code, unused_imports, unused_macros, reason = "the trait is all that is needed of it")]
#[path = "../../ipc/shm/tests/support/conformance/mod.rs"]
mod conformance;
mod rpc;
#[path = "../../ipc/shm/tests/support/storm.rs"]
#[macro_use]
mod storm;
#[path = "../../ipc/shm/tests/support/mod.rs"]
mod support;

use rpc::Delegation;

storm!(Delegation);
