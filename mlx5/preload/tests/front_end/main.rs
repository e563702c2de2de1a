//! The front end from outside: programs under `mlx5-run`, and commands written to the device file.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "../../src/abi/mod.rs"]
#[allow(dead_code, reason = "shared with the library")]
mod abi;
mod cm;
mod commands;
mod doorbells;
mod failures;
mod garbage;
mod nonsense;
mod programs;
#[path = "../../../tests/support/random.rs"]
mod random;
mod raw;
mod stopped;
mod storm;
mod support;
mod ucx;
mod verbs;
