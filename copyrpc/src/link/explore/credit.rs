use super::{PeerCredit, Reservation};
use crate::link::explore::{Coder, RESTORED_AT};

impl Reservation {
    /// Changes the state as if `past` had been granted and returned before.
    pub(in crate::link) const fn skip(&mut self, past: u64) {
        self.granted += past;
        self.max_granted += past;
    }

    /// Codes the credit relative to the released credit.
    pub(in crate::link) fn code(&mut self, coder: &mut Coder) {
        let Self {
            granted,
            unused,
            max_granted,
            max,
        } = self;
        if coder.restores() {
            *max_granted = RESTORED_AT + *max;
        }
        let released = *max_granted - *max;
        let mut used = granted.wrapping_sub(*unused);
        coder.span(granted, released);
        coder.span(&mut used, released);
        *unused = *granted - used;
    }
}

impl PeerCredit {
    /// Changes the state as if `past` had been granted and spent before.
    pub(in crate::link) const fn skip(&mut self, past: u64) {
        self.granted += past;
    }

    /// Codes the credit relative to the credit that the peer released.
    pub(in crate::link) fn code(&mut self, coder: &mut Coder, released: u64) {
        let Self { granted, balance } = self;
        let mut spent = granted.wrapping_sub(*balance);
        coder.span(granted, released);
        coder.span(&mut spent, released);
        *balance = *granted - spent;
    }
}
