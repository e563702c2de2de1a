//! States as bytes.

use crate::ring::RingSize;
use crate::wire::ALIGNMENT;

/// Start of restored positions and credit: far enough from 0 that words that lag behind are
/// positive.
pub(in crate::link) const RESTORED_AT: u64 = 1 << 20;

/// The conversion of a state to bytes, or of such bytes to a state. One walk through the parts of
/// the state does either, so the two directions cannot differ.
///
/// Numbers are coded relative to a base that a walk has coded before. So two states that differ
/// only in the number of laps, the credit ever granted, or the ids of calls, have the same bytes.
#[derive(Default)]
pub(in crate::link) struct Coder {
    bytes: Vec<u8>,
    at: usize,
    restores: bool,
}

impl Coder {
    pub(super) fn begin_saving(&mut self) {
        self.bytes.clear();
        self.restores = false;
    }

    pub(super) fn begin_restoring(&mut self, bytes: &[u8]) {
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        self.at = 0;
        self.restores = true;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(in crate::link) const fn restores(&self) -> bool {
        self.restores
    }

    /// Codes a number of at least `base`, in steps of `unit`.
    #[inline]
    pub(in crate::link) fn number(&mut self, value: &mut u64, base: u64, unit: u64) {
        if self.restores {
            *value = base + u64::from(self.bytes[self.at]) * unit;
            self.at += 1;
        } else {
            let steps = value.checked_sub(base).expect("a number below its base") / unit;
            self.bytes
                .push(u8::try_from(steps).expect("a number that does not stay small"));
        }
    }

    /// Codes a position or an amount of credit, of at least `base`.
    #[inline]
    pub(in crate::link) fn span(&mut self, value: &mut u64, base: u64) {
        self.number(value, base, ALIGNMENT);
    }

    /// Codes the position to which other positions are relative. Only its offset in the ring
    /// matters.
    pub(in crate::link) fn anchor(&mut self, position: &mut u64, ring: RingSize) {
        let mut offset = ring.offset(*position);
        self.span(&mut offset, 0);
        if self.restores {
            *position = RESTORED_AT + offset;
        }
    }

    #[inline]
    pub(in crate::link) fn count(&mut self, value: &mut u32) {
        let mut wide = u64::from(*value);
        self.number(&mut wide, 0, 1);
        *value = wide as u32;
    }

    #[inline]
    pub(in crate::link) fn flag(&mut self, value: &mut bool) {
        let mut wide = u32::from(*value);
        self.count(&mut wide);
        *value = wide != 0;
    }
}
