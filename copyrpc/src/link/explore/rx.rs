use super::RecvRing;
use crate::link::explore::Coder;
use crate::link::held::HeldRequest;
use crate::ring::RingView;
use crate::wire::FlowWords;

impl RecvRing {
    /// Changes the state as if these words had been reported, and `requests` answered, before.
    pub(in crate::link) const fn skip(&mut self, told: FlowWords, requests: u64) {
        self.told = told;
        self.batches_received = told.batches_received;
        self.requests.skip(requests);
    }

    /// Codes every field that affects the future. Positions are relative to `position`, counts of
    /// batches to `batches`, both of which the sender knows. `code_request` codes a request by the
    /// id of its call.
    ///
    /// Answered requests that wait for older requests are omitted: they become free with the
    /// oldest, so they have no effect.
    pub(in crate::link) fn code(
        &mut self,
        coder: &mut Coder,
        position: u64,
        batches: u64,
        mut code_request: impl FnMut(&mut Coder, &mut HeldRequest),
    ) {
        let Self {
            view,
            producer,
            delivered,
            next,
            end,
            lap,
            lap_end,
            messages_left,
            messages_begun: _,
            announced,
            announced_behind,
            requests,
            batches_received,
            batch_limit: _,
            told: _,
            heard_closing: _,
        } = self;
        assert!(
            *producer == *delivered && *producer == *next && *producer == *end,
            "between two polls all is parsed"
        );
        assert!(
            *messages_left == 0 && *announced == 0 && announced_behind.is_empty(),
            "between two polls all is parsed"
        );
        coder.span(producer, position);
        (*delivered, *next, *end) = (*producer, *producer, *producer);
        *lap = view.lap(*producer);
        *lap_end = *producer + view.size().to_end(*producer);
        coder.number(batches_received, batches, 1);
        let mut held = requests.unanswered().count() as u32;
        coder.count(&mut held);
        let mut code = |coder: &mut Coder, request: &mut HeldRequest| {
            coder.span(&mut request.position, position);
            code_request(coder, request);
        };
        if coder.restores() {
            requests.restore((0..held).map(|_| {
                let mut request = HeldRequest::default();
                code(coder, &mut request);
                request
            }));
        } else {
            requests
                .unanswered()
                .for_each(|(_, mut request)| code(coder, &mut request));
        }
    }

    pub(in crate::link) const fn parsed(&self) -> u64 {
        self.delivered
    }

    pub(in crate::link) const fn view(&self) -> &RingView {
        &self.view
    }
}
