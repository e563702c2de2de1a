//! Maximum sizes.

/// Maximum WQEBBs of a send queue: the WQE index has 16 bits.
pub const MAX_SEND_WR: u32 = 1 << 15;
/// Maximum receives of a queue: its counter has 16 bits too.
pub const MAX_RECV_WR: u32 = (1 << 15) - 1;
/// Maximum buffers of a receive; more would make WQEs of more than 256 bytes.
pub const MAX_RECV_SGE: u32 = 15;
/// Maximum inline bytes of an operation: 16 + 16 + align16(4 + 220) = 256, the longest inline WRITE
/// that fits one half of a BlueFlame register.
pub const MAX_INLINE: usize = 220;
/// Maximum CQEs of a queue: the consumer counter has 24 bits.
pub const MAX_CQE: u32 = 1 << 22;
/// Half of a 512-byte BlueFlame register, which is also the longest WQE that fits it.
pub const BLUEFLAME_BYTES: usize = 256;
/// Maximum length of a message: 2^30 bytes (PRM: `log_max_msg` of every known device).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// Length of an atomic operation's operands, in bytes.
pub const ATOMIC_BYTES: u32 = 8;
/// Bytes before a datagram's payload in a receive's buffers: room for a GRH (InfiniBand
/// specification, "Global Route Header"), which is filled if the CQE has the flag for it. These
/// bytes are part of the CQE's byte count.
pub const GRH_BYTES: usize = 40;
/// Maximum length of a datagram: the largest MTU.
pub const MAX_DATAGRAM_BYTES: usize = 4096;
