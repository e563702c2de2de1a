//! Servers and clients in a few lines.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

use delegationrpc::ipc::AskError;
use delegationrpc::{CallFailed, Client, ConnectError, Server, SessionEnd};

shm_testing::facade!(Server<u64, u64>, Client<u64, u64, ()>);
