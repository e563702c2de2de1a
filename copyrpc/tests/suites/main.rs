//! The tests that share a process: the public interface on the software HCA, or on the device that
//! `MLX5_TEST_DEVICE` names (`context`, `facade`, `processes`). `leavers` and `no_allocation` have
//! processes of their own: the first forks, and counts what its process has; the second counts what
//! its process allocates.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod context;
mod endings;
mod facade;
#[path = "../support/local.rs"]
mod local;
mod many;
mod processes;
mod service;
mod service_async;
mod services;
mod stalls;
#[path = "../support/mod.rs"]
mod support;
mod window;
