//! Duration of the test.

pub(crate) use copyrpc_testing::limits::watchdog;

/// Returns `MLX5_TEST_SCALE`, the factor of the test's default duration.
pub(crate) fn scale() -> u32 {
    copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE")
}
