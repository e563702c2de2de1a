//! Duration of tests with several processes.

use std::time::Duration;

/// Ends the test process, and so the test, if it hangs.
pub fn watchdog(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("watchdog: the test hangs");
        std::process::abort();
    });
}

/// Returns the factor by which the tests run longer than by default: the number in the environment variable, or 1.
pub fn scale_of(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |s| s.parse().unwrap())
}
