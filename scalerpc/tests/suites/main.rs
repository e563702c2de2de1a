//! Servers and clients in one process.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod async_client;
mod bad_input;
mod clients;
mod clocks;
mod service;
#[path = "../support/mod.rs"]
mod support;
