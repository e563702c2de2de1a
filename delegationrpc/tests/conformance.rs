//! The suite that all shared-memory RPCs of the workspace pass.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::conformance!(rpc::Delegation);
