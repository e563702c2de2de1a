//! Attributes of regions and queue pairs in commands: services, access rights, retries.

use bitflags::bitflags;

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Connected,
    /// Unreliable connection: no acknowledgements, retries or errors of the peer; SEND and WRITE
    /// only.
    Unreliable,
    /// Unreliable datagrams.
    Datagram,
}

bitflags! {
    /// The access that a region allows (`enum ibv_access_flags`). Local read is always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The local device may write the region: as the destination of READs, or as a receive's
        /// buffer.
        const LOCAL_WRITE = 1;
        /// Peers may WRITE. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may READ.
        const REMOTE_READ = 1 << 2;
        /// Peers may do atomic operations. Needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 1 << 3;
        /// The device may order its accesses to the region more freely (PCI Express relaxed
        /// ordering); then only a completion proves that bytes have arrived. The software HCA
        /// ignores this flag.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// All kinds of access that peers can be given.
    #[doc(hidden)]
    pub const REMOTE: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);

    /// Returns whether a device registers a region with this access: peers may write only if the
    /// local device may.
    #[doc(hidden)]
    #[must_use]
    pub const fn is_legal(self) -> bool {
        !self.intersects(Self::REMOTE_WRITE.union(Self::REMOTE_ATOMIC))
            || self.contains(Self::LOCAL_WRITE)
    }
}

/// Attributes of a connection (`struct ibv_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Exponent n of the acknowledgement timeout, 4.096 us x 2^n: 1..=31. The default 14 is 67 ms.
    pub timeout: u8,
    /// Number of transport retries, 0..=7.
    pub retry_count: u8,
    /// Number of retries while the peer has no receive posted, 0..=7; 7 means no limit.
    pub rnr_retry: u8,
    /// Time that a sender waits before a retry that `rnr_retry` counts, in ns. On hardware the
    /// receiver determines the time: this end sends its value to the peer, rounded up to one of the
    /// 32 times that InfiniBand has, from 10 us to 655 ms.
    pub rnr_timer_ns: u64,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer_ns: 640_000,
        }
    }
}

impl ConnectOptions {
    /// Returns the time for which an unanswered operation is retried before it fails, in ns.
    #[must_use]
    pub fn transport_timeout_ns(&self) -> u64 {
        self.ack_timeout_ns()
            .saturating_mul(u64::from(self.retry_count.min(7)) + 1)
    }

    /// Returns the time for which an acknowledgement is waited for, in ns.
    #[must_use]
    pub fn ack_timeout_ns(&self) -> u64 {
        // In the field "Local ACK Timeout", 0 means no timeout.
        if self.timeout == 0 {
            u64::MAX
        } else {
            4096 << self.timeout.min(31)
        }
    }
}

/// RNR timers in units of 10 us, indexed by their code (InfiniBand specification, "Encoding for RNR
/// NAK Timer Field").
const RNR_TIMERS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024,
    1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// Returns the RNR timer with this code, in ns. Only the lower 5 bits of the code are used.
#[must_use]
pub fn rnr_timer_ns(code: u8) -> u64 {
    u64::from(RNR_TIMERS[usize::from(code & 31)]) * 10_000
}

/// Returns the code of the shortest RNR timer that is not shorter than `ns`; the longest timer has
/// code 0.
#[must_use]
pub fn rnr_timer_code(ns: u64) -> u8 {
    (1..32).find(|&code| rnr_timer_ns(code) >= ns).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_times_are_rounded_up_to_those_there_are() {
        let wanted = [
            (0, 1),
            (10_000, 1),
            (10_001, 2),
            (640_000, 12),
            (640_001, 13),
            (491_520_000, 31),
            (491_520_001, 0),
            (u64::MAX, 0),
        ];
        for (ns, code) in wanted {
            assert_eq!(rnr_timer_code(ns), code, "{ns} ns");
        }
    }
}
