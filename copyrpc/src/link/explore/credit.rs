use super::{PeerCredit, Reservation};
use crate::link::explore::{Coder, RESTORED_AT};

impl Reservation {
    /// Relative to what was released.
    pub(in crate::link) fn code(&mut self, coder: &mut Coder) {
        let Self { granted, used, released } = self;
        if coder.restores() {
            *released = RESTORED_AT;
        }
        coder.span(granted, *released);
        coder.span(used, *released);
    }

    pub(in crate::link) const fn released(&self) -> u64 {
        self.released
    }
}

impl PeerCredit {
    /// Relative to what the peer released.
    pub(in crate::link) fn code(&mut self, coder: &mut Coder, released: u64) {
        let Self { granted, spent } = self;
        coder.span(granted, released);
        coder.span(spent, released);
    }
}
