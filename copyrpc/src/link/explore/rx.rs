use super::{HeldRequest, RecvRing};
use crate::link::explore::Coder;
use crate::ring::{Payload, RingView};
use crate::wire::FlowWords;

impl RecvRing {
    /// Every field that decides what happens next; positions relative to `position`, counts of batches to `batches`, both of which the
    /// sender knows. `code_request` codes a request by the id of its call and what it may ask for, and restores its length.
    ///
    /// Answered requests that wait for older ones are left out: when the oldest is answered they go with it, so they decide nothing.
    pub(in crate::link) fn code(
        &mut self,
        coder: &mut Coder,
        position: u64,
        batches: u64,
        mut code_request: impl FnMut(&mut Coder, &mut u32, &mut u64) -> u32,
    ) {
        let Self { view: _, producer, parsed, announced, cursor, requests, first_request, batches_received, batch_limit: _, told: _ } = self;
        assert!(*producer == *parsed && announced.is_empty() && cursor.is_none(), "between two polls all is parsed");
        coder.span(parsed, position);
        *producer = *parsed;
        coder.number(batches_received, batches, 1);
        let mut held = requests.iter().flatten().count() as u32;
        coder.count(&mut held);
        if coder.restores() {
            *first_request = 0;
            requests.clear();
            for _ in 0..held {
                let mut request = HeldRequest { position, payload: Payload::of_message(0, 0), call_id: 0, internal_allowance: 0 };
                coder.span(&mut request.position, position);
                let len = code_request(coder, &mut request.call_id, &mut request.internal_allowance);
                request.payload = Payload::of_message(request.position, len);
                requests.push_back(Some(request));
            }
        } else {
            for request in requests.iter_mut().flatten() {
                coder.span(&mut request.position, position);
                code_request(coder, &mut request.call_id, &mut request.internal_allowance);
            }
        }
    }

    /// The requests not answered, by number.
    pub(in crate::link) fn unanswered(&self) -> impl Iterator<Item = (u64, HeldRequest)> {
        let numbered = self.requests.iter().zip(self.first_request..);
        numbered.filter_map(|(request, number)| request.map(|request| (number, request)))
    }

    pub(in crate::link) const fn parsed(&self) -> u64 {
        self.parsed
    }

    pub(in crate::link) const fn told(&self) -> FlowWords {
        self.told
    }

    pub(in crate::link) const fn view(&self) -> &RingView {
        &self.view
    }
}
