//! The binding, all ends in one thread, in any time and on any device: see `support`. The protocol
//! itself is tested in `protocol`, processes in `processes`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod callbacks;
mod calls;
mod closing;
mod deaths;
mod garbage;
mod lifetimes;
mod limits;
mod paths;
mod requests;
mod serving;
#[path = "../support/mod.rs"]
mod support;
mod windows;
