//! The suite that all shared-memory RPCs of the workspace pass, with messages of bytes: every length from 8 to 128, so that some lie in
//! their lanes and some beside them.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc_bytes;

shm_testing::conformance!(rpc_bytes::Bytes);
