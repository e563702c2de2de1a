//! A hash over everything a device did, to tell whether two runs are the same. No address, no key, no process is in it.

use std::cell::Cell;

use super::Clock;
use crate::wire::{CQE_BYTES, CqeOpcode};

/// FNV-1a over the events, in order, each with its time.
pub(crate) struct Trace {
    hash: Cell<u64>,
    clock: Clock,
}

/// Start value and prime of 64-bit FNV-1a (draft-eastlake-fnv).
const START: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// Goes on with the hash of earlier bytes.
pub(crate) fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// The hash of numbers, in order.
pub(crate) fn hash_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(START, |hash, number| fnv1a(hash, &number.to_le_bytes()))
}

impl Trace {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { hash: Cell::new(START), clock }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.get()
    }

    fn record(&self, what: u64, bytes: &[u8]) {
        let hash = fnv1a(self.hash.get(), &self.clock.now_ns().to_le_bytes());
        self.hash.set(fnv1a(fnv1a(hash, &what.to_le_bytes()), bytes));
    }

    /// WQE `wqe_index` of `qpn` had its effect.
    pub(crate) fn executed(&self, qpn: u32, wqe_index: u16, opcode: u8) {
        self.record(1 << 63 | u64::from(qpn) << 32 | u64::from(wqe_index) << 16 | u64::from(opcode), &[]);
    }

    /// A CQE became visible in `cqn`; of it the second half, where no received byte is.
    pub(crate) fn completed(&self, cqn: u32, opcode: CqeOpcode, cqe: &[u8; CQE_BYTES]) {
        self.record(u64::from(cqn) << 8 | opcode as u64, &cqe[CQE_BYTES / 2..]);
    }
}
