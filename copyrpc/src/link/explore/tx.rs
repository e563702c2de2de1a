use super::{SendRing, Wrap};
use crate::link::explore::Coder;
use crate::ring::RingView;
use crate::wire::METADATA_SPAN;

impl SendRing {
    /// Changes the state as if `batches` had been sent, and taken by the peer, before.
    pub(in crate::link) const fn skip(&mut self, batches: u64) {
        self.batches_sent = batches;
        self.batches_received = batches;
        self.batches_taken = batches;
    }

    /// Codes every field that affects the future. Positions are relative to `peer_consumer`, counts
    /// of batches to `batches_received`.
    pub(in crate::link) fn code(&mut self, coder: &mut Coder) {
        let ring = self.size();
        let mut producer = self.producer();
        let Self {
            view: _,
            lap: _,
            next: _,
            posted,
            peer_consumer,
            wrap,
            open_count,
            open_notices,
            awaits_notices: _,
            is_metadata_only: _,
            is_easy: _,
            is_hindered: _,
            lap_end: _,
            calls_end: _,
            batches_sent,
            batches_received,
            batches_taken: _,
            batch_limit: _,
            last_metadata_only,
            last_idle: _,
            idle_run: _,
            is_closing: _,
        } = self;
        // The number of notices only decides whether the peer may leave a batch untaken for any
        // time (K2), and an exploration has no time.
        *open_notices = 0;
        coder.anchor(peer_consumer, ring);
        coder.span(posted, *peer_consumer);
        coder.span(&mut producer, *peer_consumer);
        let mut wraps = wrap.is_some();
        coder.flag(&mut wraps);
        if wraps {
            let Wrap {
                marker,
                count,
                notices,
            } = wrap.get_or_insert(Wrap {
                marker: 0,
                count: 0,
                notices: 0,
            });
            *notices = 0;
            coder.span(marker, *peer_consumer);
            coder.count(count);
        } else {
            *wrap = None;
        }
        coder.count(open_count);
        if coder.restores() {
            *batches_received = 0;
        }
        coder.number(batches_sent, *batches_received, 1);
        // The only effect of `last_metadata_only` is whether it is above `batches_received`.
        let mut unreceived = (*last_metadata_only).max(*batches_received);
        coder.number(&mut unreceived, *batches_received, 1);
        *last_metadata_only = unreceived;
        let is_open = producer != self.open_start();
        assert!(
            coder.restores() || is_open == (self.open_count > 0 || self.is_metadata_only),
            "{self:?}"
        );
        // A batch with messages is posted in the same way, whether it began without messages or
        // not.
        self.is_metadata_only = is_open && self.open_count == 0;
        self.note_ease();
        self.next = if is_open {
            producer
        } else {
            producer + METADATA_SPAN
        };
        self.lap = self.view.lap(producer);
        let lap_end = super::lap_end(self.size(), producer);
        assert!(coder.restores() || self.lap_end == lap_end, "{self:?}");
        self.lap_end = lap_end;
        // Whether a call is admitted does not depend on `calls_end`, so it is not coded.
        self.close_to_calls();
    }

    fn open_start(&self) -> u64 {
        self.wrap.map_or(self.posted, |wrap| {
            wrap.marker + self.size().to_end(wrap.marker)
        })
    }

    /// Returns the start of the messages of each batch that is not posted, and their number.
    pub(in crate::link) fn unposted_parts(&self) -> [(u64, u32); 2] {
        let closed = self
            .wrap
            .map_or((self.posted, 0), |wrap| (self.posted, wrap.count));
        let closed_is_posted = self.wrap.is_some_and(|wrap| wrap.marker == self.posted);
        let open = (self.open_start() + METADATA_SPAN, self.open_count);
        [
            (
                closed.0 + METADATA_SPAN,
                if closed_is_posted { 0 } else { closed.1 },
            ),
            open,
        ]
    }

    pub(in crate::link) const fn view(&self) -> &RingView {
        &self.view
    }

    /// Returns three positions: consumed as far as this end knows, posted, and written.
    pub(in crate::link) const fn positions(&self) -> [u64; 3] {
        [self.peer_consumer, self.posted, self.producer()]
    }
}
