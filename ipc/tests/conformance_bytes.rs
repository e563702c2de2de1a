//! The suite that all shared-memory RPCs of the workspace pass, with messages of bytes: every length from 8 to 128, so that some lie in
//! their lanes and some beside them.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../shm/tests/support/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod rpc_bytes;
#[path = "../shm/tests/support/mod.rs"]
mod support;

use rpc_bytes::Bytes;

conformance!(Bytes);
