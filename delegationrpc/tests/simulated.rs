//! Many peers in one thread, in virtual time. One test: it counts the descriptors of the process.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::simulated!(rpc::Delegation);
