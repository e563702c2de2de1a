//! Whole jobs of the benchmarks: the processes, their result, and failures.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests; helpers are not covered by clippy's allow-*"
)]

mod compare;
mod jobs;
mod scale;
mod support;
