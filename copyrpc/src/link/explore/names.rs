//! The content of messages, and the names of their calls: numbers in the order in which a walk
//! through a state meets the calls.

use super::Coder;
use crate::link::calls::Calls;
use crate::link::held::HeldRequest;
use crate::ring::RingView;
use crate::wire::{
    ALIGNMENT, CallId, GIVEN_UP, Header, RESPONSE_FLAG, internal_allowance, response_capacity,
};

const REQUEST: u32 = 0;
const RESPONSE: u32 = 1;
const NOTICE: u32 = 2;

/// The id of a call that no restored state has.
const NO_CALL: CallId = CallId::new(CallId::MAX_CALLS - 1, 0);

const fn notice(id: CallId) -> Header {
    Header {
        call_id: id.to_request(),
        piggyback: GIVEN_UP,
        len: 0,
    }
}

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

/// The coder of messages during a walk through a state. Calls are named in the order in which the
/// walk meets them, so a state does not depend on their ids. Each call is met once, as a request
/// under way, a request held, or a response under way. Notices of calls that were given up are
/// coded after everything else, by the place of their call in that order.
pub(super) struct Names {
    kinds: [Kind; 2],
    /// The outstanding calls of each side, taken out of its link while a state is walked.
    pub(super) calls: [Calls<u8>; 2],
    /// Calls of each side that were met.
    met: [Vec<Met>; 2],
    /// Notices under way: the side that gave the call up, ring and position of the message, and the
    /// call.
    notices: Vec<(usize, RingView, u64, CallId)>,
}

/// A call that was met.
struct Met {
    slot: u32,
    kind: u8,
    is_waiting: bool,
    /// The response is under way.
    is_answered: bool,
    /// The request is held, and marked as given up.
    is_marked: bool,
}

impl Names {
    pub(super) fn new(kinds: [Kind; 2]) -> Self {
        Self {
            kinds,
            calls: [(); 2].map(|()| Calls::new()),
            met: [Vec::new(), Vec::new()],
            notices: Vec::new(),
        }
    }

    pub(super) fn begin(&mut self) {
        self.met.iter_mut().for_each(Vec::clear);
        self.notices.clear();
    }

    /// Ends the walk. Asserts that no call was lost, and that the news of each call that was given
    /// up is still there. After a walk that restored a state, the calls that the walk met are
    /// outstanding.
    pub(super) fn end(&mut self, coder: &mut Coder, order: [usize; 2]) {
        for caller in order {
            let (calls, met) = (&mut self.calls[caller], &self.met[caller]);
            let place = |slot| met.iter().position(|call| call.slot == slot);
            // For each call, the number of places that have the news of its early end.
            let mut found: Vec<u32> = met.iter().map(|call| u32::from(call.is_marked)).collect();
            let mut untold: Vec<u32> = calls.untold_slots().collect();
            let mut count = untold.len() as u32;
            coder.count(&mut count);
            untold.resize(count as usize, 0);
            for slot in &mut untold {
                let mut name = place(*slot).unwrap_or(0) as u32;
                coder.count(&mut name);
                *slot = name;
                found[name as usize] += 1;
            }
            for (_, ring, at, id) in self.notices.iter().filter(|(of, ..)| *of == caller) {
                // The name 0 is for a notice of a call that was answered: it has no effect.
                let is_pending = calls.pending(*id).is_some();
                let place =
                    place(id.index()).filter(|place| is_pending && !met[*place].is_answered);
                let mut name = place.map_or(0, |place| place as u32 + 1);
                coder.count(&mut name);
                if let Some(place) = name.checked_sub(1) {
                    found[place as usize] += 1;
                }
                if coder.restores() {
                    let id = name
                        .checked_sub(1)
                        .map_or(NO_CALL, |slot| CallId::new(slot, 0));
                    ring.copy_in(*at, &notice(id).encode());
                }
            }
            for (call, found) in met.iter().zip(found) {
                let expected = u32::from(!call.is_waiting && !call.is_answered);
                assert!(
                    found == expected || call.is_answered,
                    "the news that a call was given up is in one place"
                );
            }
            if coder.restores() {
                let kinds = &self.kinds;
                let restored = met.iter().map(|call| {
                    let credit = kinds[call.kind as usize].credit();
                    (call.kind, credit, call.is_waiting)
                });
                calls.restore(restored, untold.into_iter());
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
    fn call(
        &mut self,
        coder: &mut Coder,
        caller: usize,
        id: &mut CallId,
        is_answered: bool,
        mut is_marked: bool,
    ) -> u8 {
        let met = &mut self.met[caller];
        let (mut kind, mut is_waiting) = (0, false);
        if coder.restores() {
            *id = CallId::new(met.len() as u32, 0);
        } else {
            assert!(
                met.iter().all(|call| call.slot != id.index()),
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
        if is_waiting {
            assert!(coder.restores() || !is_marked, "the caller waits");
            is_marked = false;
        } else {
            coder.flag(&mut is_marked);
        }
        met.push(Met {
            slot: id.index(),
            kind: kind as u8,
            is_waiting,
            is_answered,
            is_marked,
        });
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
        let is_marked = *call_id & RESPONSE_FLAG != 0;
        let kind = self.call(coder, caller, &mut id, false, is_marked);
        let is_marked = self.met[caller].last().is_some_and(|call| call.is_marked);
        let kind = self.kinds[kind as usize];
        assert!(
            coder.restores() || *credit == kind.credit(),
            "a request claims what its call paid"
        );
        let mark = if is_marked { RESPONSE_FLAG } else { 0 };
        (*call_id, *credit) = (id.to_request() | mark, kind.credit());
        kind.len
    }

    pub(super) fn held(&mut self, coder: &mut Coder, caller: usize, held: &mut HeldRequest) {
        let mut credit = u64::from(held.internal_allowance);
        let len = self.request(coder, caller, &mut held.call_id, &mut credit);
        assert!(coder.restores() || held.len == len);
        (held.internal_allowance, held.len) = (credit as u32, len);
    }

    /// Codes the message at this position of the ring.
    pub(super) fn message(
        &mut self,
        coder: &mut Coder,
        sender: usize,
        ring: RingView,
        at: u64,
        header: &mut Header,
    ) {
        let mut what = if header.call_id & RESPONSE_FLAG != 0 {
            RESPONSE
        } else if header.piggyback == GIVEN_UP {
            NOTICE
        } else {
            REQUEST
        };
        coder.count(&mut what);
        if what == NOTICE {
            let id = CallId::from_wire(header.call_id);
            self.notices.push((sender, ring, at, id));
            *header = notice(id);
        } else if what == RESPONSE {
            let mut id = CallId::from_wire(header.call_id);
            let kind = self.call(coder, 1 - sender, &mut id, true, false);
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
