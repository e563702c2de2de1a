//! Clients and servers stopped and killed at every instruction.
#![cfg(all(not(loom), target_arch = "x86_64"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

#[path = "../../ipc/shm/tests/support/caller.rs"]
mod caller;
#[allow(dead_code, unused_imports, unused_macros, reason = "the trait is all that is needed of it")]
#[path = "../../ipc/shm/tests/support/conformance/mod.rs"]
mod conformance;
mod rpc;
#[path = "../../ipc/shm/tests/support/single_step/mod.rs"]
#[macro_use]
mod single_step;
#[path = "../../ipc/shm/tests/support/mod.rs"]
mod support;
#[path = "../../ipc/shm/tests/support/tracee.rs"]
mod tracee;

use rpc::Delegation;

single_step!(Delegation);
