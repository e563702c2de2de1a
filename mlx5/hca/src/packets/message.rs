//! Numbers of packets that both ends of a connection compute.

/// Maximum READs and atomics of a connection that are not answered, and number of atomics whose
/// results a responder remembers.
pub(crate) const MAX_RD_ATOMIC: usize = 16;

/// Maximum time, in ns, for which a responder waits for a further message to acknowledge with one
/// that does not ask for an ACK: far below the time after which its requester sends it again.
pub(crate) const ACK_DELAY_NS: u64 = 500_000;

/// Syndrome by which a software HCA tells another that a queue pair is gone or failed: a NAK with a
/// reserved code. Others say nothing then, and are found dead by their silence.
pub(crate) const GONE: u8 = 3 << 5 | 31;

/// Returns the number of packets of a message of `len` bytes.
pub(crate) const fn packets(len: u32, mtu: u32) -> u32 {
    // A message of no bytes has one packet.
    if len == 0 { 1 } else { len.div_ceil(mtu) }
}
