//! Counters of ports: the traffic of all devices at a port, in memory that they share.

use std::sync::atomic::{AtomicU64, Ordering};

/// Indices of the counters. `XMIT` and `RCV` count data; the next index of each counts packets.
const XMIT: usize = 0;
const RCV: usize = 2;
const REQUESTS: usize = 4;

/// Counters of a port, since its memory was zeroed. Each device at the port adds to them. A device
/// on shared memory counts the payloads of both directions as packets of 4 KiB, without
/// acknowledgements. A device that sends packets counts all its packets, with their headers.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct PortCounters([AtomicU64; 7]);

impl PortCounters {
    /// Names of the counters in sysfs, separated by spaces, in the order of their indices.
    pub const NAMES: &str = "port_xmit_data port_xmit_packets port_rcv_data port_rcv_packets rx_write_requests rx_read_requests rx_atomic_requests";

    /// Returns the counter at this place in [`NAMES`](Self::NAMES): a counter of data in words of 4
    /// bytes, other counters in packets or requests. Returns 0 if there is no such place.
    #[must_use]
    pub fn get(&self, place: usize) -> u64 {
        self.0
            .get(place)
            .map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    fn add(&self, place: usize, n: u64) {
        self.0[place].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, packets: u64, bytes: u64) {
        self.add(XMIT, bytes.div_ceil(4));
        self.add(XMIT + 1, packets);
    }

    pub(crate) fn received(&self, packets: u64, bytes: u64) {
        self.add(RCV, bytes.div_ceil(4));
        self.add(RCV + 1, packets);
    }

    /// Counts a request that arrived. `kind` is 0 for a WRITE, 1 for a READ, and 2 for an atomic.
    pub(crate) fn requested(&self, kind: usize) {
        self.add(REQUESTS + kind, 1);
    }
}
