//! Clients and servers stopped and killed at every instruction.
#![cfg(all(not(loom), target_arch = "x86_64"))]
#![allow(missing_docs, reason = "a test")]

mod rpc;

shm_testing::single_step!(rpc::Ipc);
