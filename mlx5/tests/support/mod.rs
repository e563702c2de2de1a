//! Shared parts of the tests with several processes.

use mlx5::QpAddress;

pub(crate) use copyrpc_testing::limits::watchdog;

/// Formats a line for another process: LID, QPN and epoch of a queue pair, address and rkey of a
/// region.
pub(crate) fn describe(qp: &QpAddress, addr: u64, rkey: u32) -> String {
    format!("{} {} {} {addr} {rkey}", qp.lid, qp.qpn, qp.epoch)
}

/// Parses the line of [`describe`].
pub(crate) fn parse(line: &str) -> (QpAddress, u64, u32) {
    let n: Vec<u64> = line
        .split_whitespace()
        .map(|w| w.parse().unwrap())
        .collect();
    (
        QpAddress::soft(n[0] as u16, n[1] as u32, n[2]),
        n[3],
        n[4] as u32,
    )
}

/// Returns `MLX5_TEST_SCALE`, the factor of the duration of the tests with several processes.
pub(crate) fn scale() -> u32 {
    copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE")
}
