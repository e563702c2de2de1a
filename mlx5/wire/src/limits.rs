//! The largest of everything.

/// WQEBBs of a send queue: the WQE index has 16 bits.
pub const MAX_SEND_WR: u32 = 1 << 15;
/// Receives of a queue, whose counter has 16 bits too.
pub const MAX_RECV_WR: u32 = (1 << 15) - 1;
/// Buffers of a receive; more would make WQEs of more than 256 bytes.
pub const MAX_RECV_SGE: u32 = 15;
/// Inline bytes of an operation: 16 + 16 + align16(4 + 220) = 256, the longest inline WRITE that fits one half of a BlueFlame register.
pub const MAX_INLINE: usize = 220;
/// CQEs of a queue, whose consumer counter has 24 bits.
pub const MAX_CQE: u32 = 1 << 22;
/// Half of a 512-byte BlueFlame register, also the longest WQE that fits it.
pub const BLUEFLAME_BYTES: usize = 256;
/// Longest message: 2^30 bytes (PRM: `log_max_msg` of every known device).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// Bytes of an atomic operation's operands.
pub const ATOMIC_BYTES: u32 = 8;
/// Bytes at the start of a receive's buffers that a datagram's payload follows: room for a GRH (InfiniBand specification, "Global Route
/// Header"), filled if the CQE says so. They are part of the CQE's byte count.
pub const GRH_BYTES: usize = 40;
/// Longest datagram: the largest MTU.
pub const MAX_DATAGRAM_BYTES: usize = 4096;
