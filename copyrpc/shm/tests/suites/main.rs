//! Regions, locks, memfds, sleep and barriers from outside.
#![cfg(not(loom))]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod barrier;
mod no_futex_waitv;
mod region_life;
mod region_rules;

/// The other side of the tests of `region_life`. Without a role, this test checks nothing.
#[test]
fn helper_process() {
    region_life::play();
}
