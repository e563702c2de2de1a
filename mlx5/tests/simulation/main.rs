//! Simulations in virtual time, and operations that are executed after a delay.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

mod nic_model;
mod simulated;
#[path = "../support/time.rs"]
mod time;
mod virtual_time;
