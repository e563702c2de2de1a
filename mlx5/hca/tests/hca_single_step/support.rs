//! Duration of the test.

pub(crate) use shm_testing::limits::watchdog;

/// `MLX5_TEST_SCALE`: how much longer than by default.
pub(crate) fn scale() -> u32 {
    shm_testing::limits::scale_of("MLX5_TEST_SCALE")
}
