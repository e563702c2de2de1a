//! What is refused and what is survived.
#![cfg(not(loom))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::bad_input!(rpc::Delegation);
