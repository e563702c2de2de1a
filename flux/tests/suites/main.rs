//! flux from outside.
#![cfg(not(loom))]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test says what failed by panicking"
)]

mod calls;
mod simulated;
mod storm;
