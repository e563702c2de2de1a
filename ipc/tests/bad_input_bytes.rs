//! Bad input that is refused or survived, with messages of bytes.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc_bytes;

shm_testing::bad_input!(rpc_bytes::Bytes);
