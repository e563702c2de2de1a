//! Maximum sizes.

/// Maximum number of WQEBBs of a send queue: the largest power of two at which 16-bit counters
/// distinguish a full queue from an empty one.
pub const MAX_SEND_WR: u32 = 1 << 15;
/// Maximum number of receives of a queue. The counters limit it to 2^15 WQEs too, and one WQE of a
/// linked list is never posted.
pub const MAX_RECV_WR: u32 = (1 << 15) - 1;
/// Maximum number of buffers of a receive; more buffers would make WQEs of more than 256 bytes.
pub const MAX_RECV_SGE: u32 = 15;
/// Maximum number of inline bytes of an operation: 16 + 16 + align16(4 + 220) = 256, the longest
/// inline WRITE that fits one half of a BlueFlame register.
pub const MAX_INLINE: usize = 220;
/// Maximum number of CQEs of a queue, so small that the 24-bit consumer counter allows signed
/// differences.
pub const MAX_CQE: u32 = 1 << 22;
/// Length of half a BlueFlame register of 512 bytes, and so of the longest WQE that fits.
pub const BLUEFLAME_BYTES: usize = 256;
/// Maximum length of a message: 2^30 bytes (PRM: `log_max_msg` of every known device).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// Length of an atomic operation's operands, in bytes.
pub const ATOMIC_BYTES: u32 = 8;
/// Length in bytes of the space before a datagram's payload in a receive's buffers. It has room for
/// a GRH (InfiniBand specification, "Global Route Header"), which is filled in if the CQE has the
/// flag for it. The CQE's byte count includes this length.
pub const GRH_BYTES: usize = 40;
/// Maximum length of a datagram: the largest MTU.
pub const MAX_DATAGRAM_BYTES: usize = 4096;
