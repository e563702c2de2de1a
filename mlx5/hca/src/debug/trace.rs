//! A hash over the events of a device, to compare runs. No address, key or process id is hashed.

use std::cell::Cell;

use crate::Clock;
use crate::hash::{START, fnv1a};

#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum What {
    /// A send had its effect.
    Executed,
    /// The CQE of the WQE became visible.
    Completed,
    /// A receive was filled.
    Arrived,
    Flushed,
}

/// FNV-1a over the events, in order, each with its time.
pub(crate) struct Trace {
    hash: Cell<u64>,
    clock: Clock,
}

impl Trace {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            hash: Cell::new(START),
            clock,
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.get()
    }

    /// Adds an event of WQE `wqe_index` of `qpn`, with its details `code` and `data`.
    pub(crate) fn record(&self, what: What, qpn: u32, wqe_index: u16, code: u64, data: u64) {
        let where_ = u64::from(qpn) << 32 | u64::from(wqe_index) << 8 | what as u64;
        let numbers = [self.clock.now_ns(), where_, code, data];
        self.hash
            .set(numbers.into_iter().fold(self.hash.get(), |hash, number| {
                fnv1a(hash, &number.to_le_bytes())
            }));
    }
}
