//! Bad input that is refused or survived.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::bad_input!(rpc::Ipc);
