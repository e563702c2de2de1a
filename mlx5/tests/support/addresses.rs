//! Addresses of queue pairs and regions as lines of text, which processes of a test exchange.

use mlx5::QpAddress;

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
