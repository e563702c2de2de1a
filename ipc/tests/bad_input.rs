//! What is refused and what is survived.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../shm/tests/support/bad_input.rs"]
#[macro_use]
mod bad_input;
#[allow(dead_code, unused_imports, unused_macros, reason = "the trait is all that is needed of it")]
#[path = "../shm/tests/support/conformance/mod.rs"]
mod conformance;
mod rpc;
#[path = "../shm/tests/support/mod.rs"]
mod support;

use rpc::Ipc;

bad_input!(Ipc);
