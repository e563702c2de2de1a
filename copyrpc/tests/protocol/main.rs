//! The protocol core against simulated one-sided memory: no NIC, no thread, no clock.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod closing;
mod defects;
mod endings;
mod oracle;
mod sim;
mod untrusted;
mod window;
