//! Options of the software HCA: faults, compressed sessions, data in the CQE, ports for packets.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

mod compact;
#[path = "../support/end.rs"]
mod end;
mod faults;
mod packets;
#[path = "../support/time.rs"]
mod time;
