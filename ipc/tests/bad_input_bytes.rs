//! What is refused and what is survived, with messages of bytes.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../shm/tests/support/bad_input.rs"]
#[macro_use]
mod bad_input;
#[allow(dead_code, unused_imports, unused_macros, reason = "the trait is all that is needed of it")]
#[path = "../shm/tests/support/conformance/mod.rs"]
mod conformance;
mod rpc_bytes;
#[path = "../shm/tests/support/mod.rs"]
mod support;

use rpc_bytes::Bytes;

bad_input!(Bytes);
