//! Several processes, each with contexts that call those of all others: under load, stopped, killed
//! and started again.
//!
//! A test is the launcher of a [`job::Job`]; the processes re-execute this binary and run
//! [`worker::process`]. What a call and its reply are follows from who calls whom and how often
//! before ([`plan`]), so that every byte of both is checked at both ends.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod all_to_all;
mod job;
mod killed;
mod plan;
mod stopped;
#[path = "../support/mod.rs"]
mod support;
mod worker;
