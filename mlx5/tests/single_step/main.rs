//! Processes that are single-stepped, and stopped or killed in the middle of a doorbell.
#![cfg(target_arch = "x86_64")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod quarantine;
mod requester;

#[path = "../support/addresses.rs"]
mod addresses;
#[path = "../support/fabric.rs"]
mod fabric;
#[path = "../support/stepped.rs"]
mod stepped;
#[path = "../support/time.rs"]
mod time;

/// Runs the process that the tests stop and kill. It is not a test of its own.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn stepped_process() {
    stepped::run_process();
}
