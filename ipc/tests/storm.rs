//! Clients and servers killed and stopped at random moments.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::storm!(rpc::Ipc);
