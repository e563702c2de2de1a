//! Duration of the test.

pub(crate) use shm_testing::limits::watchdog;

/// Returns `MLX5_TEST_SCALE`, the factor of the test's default duration.
pub(crate) fn scale() -> u32 {
    shm_testing::limits::scale_of("MLX5_TEST_SCALE")
}
