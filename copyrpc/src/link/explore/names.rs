//! The content of messages, and the names of their calls: numbers in the order in which a walk
//! through a state meets the calls.

use super::Coder;
use crate::link::calls::Calls;
use crate::link::held::HeldRequest;
use crate::wire::{
    ALIGNMENT, CallId, Header, RESPONSE_FLAG, internal_allowance, response_capacity,
};

/// The lengths of a call's request and response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) len: u32,
    /// Maximum bytes of the call's response.
    pub(super) allowance: usize,
}

impl Kind {
    fn credit(&self) -> u64 {
        internal_allowance(self.allowance as u64)
    }
}

/// Codes messages while a state is walked. Calls are named in the order in which the walk meets
/// them, so a state does not depend on their ids. Each call is met once, as a request under way, a
/// request held, or a response under way.
pub(super) struct Names {
    kinds: [Kind; 2],
    /// The outstanding calls of each side, taken out of its link while a state is walked.
    pub(super) calls: [Calls<u8>; 2],
    /// Calls of each side that were met: slot, kind, and whether the caller waits.
    met: [Vec<(u32, u8, bool)>; 2],
}

impl Names {
    pub(super) fn new(kinds: [Kind; 2]) -> Self {
        Self {
            kinds,
            calls: [(); 2].map(|()| Calls::new()),
            met: [Vec::new(), Vec::new()],
        }
    }

    pub(super) fn begin(&mut self) {
        self.met.iter_mut().for_each(Vec::clear);
    }

    /// Ends the walk and asserts that no call was lost. After a walk that restored a state, the
    /// calls that the walk met are outstanding.
    pub(super) fn end(&mut self, restores: bool) {
        for (calls, met) in self.calls.iter_mut().zip(&self.met) {
            if restores {
                let kinds = &self.kinds;
                calls.restore(met.iter().map(|&(_, kind, is_waiting)| {
                    (kind, kinds[kind as usize].credit(), is_waiting)
                }));
            } else {
                assert_eq!(
                    calls.unanswered(),
                    met.len(),
                    "each outstanding call is in one place"
                );
            }
        }
    }

    /// Codes the call of `caller` that has this id. Returns its kind.
    fn call(&mut self, coder: &mut Coder, caller: usize, id: &mut CallId) -> u8 {
        let met = &mut self.met[caller];
        let (mut kind, mut is_waiting) = (0, false);
        if coder.restores() {
            *id = CallId::new(met.len() as u32, 0);
        } else {
            assert!(
                met.iter().all(|&(index, ..)| index != id.index()),
                "a call is in two places"
            );
            let (credit, waits) = self.calls[caller]
                .pending(*id)
                .expect("a call that is not outstanding");
            is_waiting = waits;
            kind = self
                .kinds
                .iter()
                .position(|kind| kind.credit() == credit)
                .expect("a credit that no call paid") as u32;
        }
        coder.count(&mut kind);
        coder.flag(&mut is_waiting);
        met.push((id.index(), kind as u8, is_waiting));
        kind as u8
    }

    /// Codes a request that `caller` made, by id and credit. Returns its length.
    fn request(
        &mut self,
        coder: &mut Coder,
        caller: usize,
        call_id: &mut u32,
        credit: &mut u64,
    ) -> u32 {
        let mut id = CallId::from_wire(*call_id);
        let kind = self.call(coder, caller, &mut id);
        let kind = self.kinds[kind as usize];
        assert!(
            coder.restores() || *credit == kind.credit(),
            "a request claims what its call paid"
        );
        (*call_id, *credit) = (id.to_request(), kind.credit());
        kind.len
    }

    pub(super) fn held(&mut self, coder: &mut Coder, caller: usize, held: &mut HeldRequest) {
        let mut credit = u64::from(held.internal_allowance);
        let len = self.request(coder, caller, &mut held.call_id, &mut credit);
        assert!(coder.restores() || held.len == len);
        (held.internal_allowance, held.len) = (credit as u32, len);
    }

    pub(super) fn message(&mut self, coder: &mut Coder, sender: usize, header: &mut Header) {
        let mut is_response = header.call_id & RESPONSE_FLAG != 0;
        coder.flag(&mut is_response);
        if is_response {
            let mut id = CallId::from_wire(header.call_id);
            let kind = self.call(coder, 1 - sender, &mut id);
            let mut is_long = header.len > 0;
            coder.flag(&mut is_long);
            let len = if is_long {
                response_capacity(self.kinds[kind as usize].credit()) as u32
            } else {
                0
            };
            assert!(coder.restores() || (header.len == len && header.piggyback == 0));
            *header = Header {
                call_id: id.to_response(),
                piggyback: 0,
                len,
            };
        } else {
            let mut credit = u64::from(header.piggyback) * ALIGNMENT;
            let len = self.request(coder, sender, &mut header.call_id, &mut credit);
            assert!(coder.restores() || header.len == len);
            (header.len, header.piggyback) = (len, (credit / ALIGNMENT) as u32);
        }
    }
}
