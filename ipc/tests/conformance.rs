//! The suite that all shared-memory RPCs of the workspace pass.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../shm/tests/support/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod rpc;
#[path = "../shm/tests/support/mod.rs"]
mod support;

use rpc::Ipc;

conformance!(Ipc);
