//! The protocol core against simulated one-sided memory: no NIC, no thread, no clock.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

use std::io::Write;

mod closing;
mod defects;
mod endings;
mod garbage;
mod oracle;
mod reads;
mod sim;
mod untrusted;
mod window;

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Returns the factor by which the random tests run longer.
fn scale() -> u64 {
    env_number("COPYRPC_TEST_SCALE").unwrap_or(1)
}

/// Writes a line to standard error. The output of `println` is not shown for a test that passes.
fn say(line: &str) {
    std::io::stderr()
        .write_all(format!("{line}\n").as_bytes())
        .unwrap();
}
