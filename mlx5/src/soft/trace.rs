//! A hash over everything a device completed, to tell whether two runs are the same.

use std::cell::Cell;

/// What is hashed: no address, no key, no process.
pub(crate) struct Event {
    pub(crate) now_ns: u64,
    pub(crate) qpn: u32,
    pub(crate) wqe_index: u16,
    pub(crate) opcode: u8,
    pub(crate) syndrome: u8,
}

/// FNV-1a over the events, in order.
pub(crate) struct Trace(Cell<u64>);

impl Trace {
    pub(crate) fn new() -> Self {
        Self(Cell::new(0xcbf2_9ce4_8422_2325))
    }

    pub(crate) fn hash(&self) -> u64 {
        self.0.get()
    }

    pub(crate) fn record(&self, event: &Event) {
        let what = u64::from(event.qpn) << 32 | u64::from(event.wqe_index) << 16 | u64::from(event.opcode) << 8 | u64::from(event.syndrome);
        for word in [event.now_ns, what] {
            for byte in word.to_le_bytes() {
                self.0.set((self.0.get() ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
            }
        }
    }
}
