//! How long the test runs.

#[path = "../../../../ipc/shm/tests/support/limits.rs"]
mod limits;

pub(crate) use limits::watchdog;

/// `MLX5_TEST_SCALE`: how much longer than by default.
pub(crate) fn scale() -> u32 {
    limits::scale_of("MLX5_TEST_SCALE")
}
