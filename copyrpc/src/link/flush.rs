//! The way of batches out of the send ring, and the words for the peer's READs.

use super::outgoing::CALL_SLACK;
use super::tx::{Batch, EasyBatch, Emit};
use super::{Link, News};
use crate::wire::{FlowWords, METADATA_SPAN};

/// The destination of batches. A closure is a poster that gets only batches whose metadata is in
/// the ring.
pub(crate) trait Poster {
    type Error;

    /// Posts a batch that is in the ring.
    fn post(&mut self, emit: Emit) -> Result<(), Self::Error>;

    /// Posts a batch whose metadata is not in the ring.
    fn post_easy(&mut self, batch: &EasyBatch<'_>) -> Result<(), Self::Error> {
        self.post(batch.write_out())
    }
}

impl<E, F: FnMut(Emit) -> Result<(), E>> Poster for F {
    type Error = E;

    fn post(&mut self, emit: Emit) -> Result<(), E> {
        self(emit)
    }
}

impl<U> Link<U> {
    /// Does the work of [`Link::flush_all`] and of [`Link::publish`] if the work is to post one
    /// batch, and nothing prevents it. Returns `false` if it did nothing. After an error, no batch
    /// counts as sent, but credit may have been granted, and the words count as reported.
    ///
    /// # Errors
    /// The error of `poster`.
    #[inline(always)]
    pub(crate) fn flush_easy<P: Poster>(&mut self, poster: &mut P) -> Result<bool, P::Error> {
        if !self.tx.has_easy_batch() {
            return Ok(false);
        }
        self.grant_while_open();
        let words = self.current_words();
        self.tell_by_batch(words);
        if let Err(error) = poster.post_easy(&self.tx.easy_batch(words)) {
            self.is_unpublished = true;
            return Err(error);
        }
        self.tx.commit_easy_batch();
        self.note_posted(self.tx.free_after_posted());
        Ok(true)
    }

    #[inline(always)]
    const fn tell_by_batch(&mut self, words: FlowWords) {
        self.rx.note_told(words);
        self.told_by_batch = News {
            consumer_pos: words.consumer_pos,
            credit: words.credit,
        };
    }

    #[inline(always)]
    const fn note_posted(&mut self, free: u64) {
        if free < self.tx.size().bytes() / 4 {
            self.starved = true;
        }
    }

    /// Gives each batch that may be sent to `poster`, oldest first: the batch limit (B1 of
    /// docs/copyrpc-protocol.md) and the window (W1) hold batches back. A batch counts as sent only
    /// when the post succeeds. After an error the next flush offers again what was not posted (F2).
    ///
    /// # Errors
    /// The first error of `poster`.
    #[inline(never)]
    pub(crate) fn flush_all<P: Poster>(&mut self, poster: &mut P) -> Result<(), P::Error> {
        if self.closed.is_some() {
            return Ok(());
        }
        let is_closing = self.ending.is_some();
        if is_closing {
            self.begin_closing_flush();
        }
        if self.tx.awaits_notices() {
            self.write_notices();
        }
        let words = self.grant();
        if !is_closing {
            self.offer_metadata_only(words);
        }
        let sent = self.tx.batches_sent();
        let outcome = self.post_waiting(words, poster);
        if is_closing {
            self.end_closing_flush(self.tx.batches_sent() > sent, outcome.is_ok());
        }
        outcome
    }

    fn post_waiting<P: Poster>(
        &mut self,
        words: FlowWords,
        poster: &mut P,
    ) -> Result<(), P::Error> {
        // While the connection ends, the window delays nothing (W3).
        let is_windowed = self.window.begin(self.tx.unposted()) && self.ending.is_none();
        if is_windowed && self.window.is_full(self.tx.batches_received()) {
            // The peer's words would open the window, so they are READ, as after a refused call
            // (L5).
            self.starved |= !self.window.is_by_completion;
            self.stats.window_stalls += 1;
            return Ok(());
        }
        // Posting changes none of the words, because they depend on the appended bytes, not on the
        // posted bytes. So all batches get the same words.
        while let Some(batch) = self.tx.next_batch() {
            if !self.tx.may_post() {
                self.stats.batch_stalls += 1;
                break;
            }
            // A batch that a wrap divided counts once in the window, with its last part (W2).
            let takes_place = is_windowed && batch.span() == self.tx.unposted();
            let signal = takes_place && self.window.is_by_completion;
            self.post_batch(&batch, words, signal, poster)?;
            if takes_place {
                self.window.posted(self.tx.batches_sent());
            }
        }
        Ok(())
    }

    fn post_batch<P: Poster>(
        &mut self,
        batch: &Batch,
        words: FlowWords,
        signal: bool,
        poster: &mut P,
    ) -> Result<(), P::Error> {
        self.tell_by_batch(words);
        self.is_unpublished = true;
        poster.post(self.tx.fill(batch, words, signal))?;
        self.tx.commit(batch);
        self.note_posted(self.tx.free());
        if batch.is_marker() {
            self.stats.wraps += 1;
            self.stats.bytes_sent = self
                .stats
                .bytes_sent
                .wrapping_sub(batch.span() - batch.bytes());
        }
        Ok(())
    }

    /// Begins a batch without messages if there is enough news for the peer, 1/8 ring consumed or
    /// 1/16 ring granted, and no waiting batch will carry it. At most one such batch is in flight
    /// (L4).
    #[inline]
    fn offer_metadata_only(&mut self, words: FlowWords) {
        if self.tx.has_unposted() || self.tx.metadata_only_in_flight() || !self.tx.may_post() {
            return;
        }
        let ring = self.tx.size().bytes();
        let news = words.consumer_pos - self.told_by_batch.consumer_pos >= ring / 8
            || words.credit - self.told_by_batch.credit >= ring / 16;
        let reserved = 2 * self.reservation.outstanding();
        if news && self.tx.in_flight() + METADATA_SPAN + reserved <= ring {
            self.tx.append_metadata_only();
            self.stats.metadata_only += 1;
        }
    }

    /// Grants the peer as much credit as possible. Returns the current words of this side.
    pub(super) fn grant(&mut self) -> FlowWords {
        if self.ending.is_none() {
            self.grant_while_open();
        } else {
            self.reservation.top_up(self.tx.size(), self.tx.in_flight());
        }
        self.current_words()
    }

    /// Grants the peer as much credit as possible, at an end that may make calls.
    #[inline(always)]
    fn grant_while_open(&mut self) {
        let ring = self.tx.size();
        if self.reservation.is_short() {
            if self.reservation.fill_up(ring, self.tx.in_flight()) {
                self.tx
                    .open_to_calls(2 * ring.max_reservation() + CALL_SLACK);
            } else {
                self.grant_in_part();
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn grant_in_part(&mut self) {
        self.reservation.top_up(self.tx.size(), self.tx.in_flight());
        self.tx
            .open_to_calls(2 * self.reservation.outstanding() + CALL_SLACK);
    }

    #[inline(always)]
    fn current_words(&self) -> FlowWords {
        FlowWords {
            consumer_pos: self.rx.consumer_pos(),
            credit: self.reservation.granted(),
            batches_received: self.rx.batches_received(),
        }
    }

    /// Returns the words to store in the published record, if they changed. Call it after every
    /// round of arrivals, replies and flushes, and only when the receive queue has been refilled:
    /// these words allow the peer to send further batches (B1).
    pub(crate) fn publish(&mut self) -> Option<FlowWords> {
        if self.closed.is_some() {
            return None;
        }
        let words = self.current_words();
        if !self.is_unpublished && words == self.rx.told() {
            return None;
        }
        self.is_unpublished = false;
        self.rx.note_told(words);
        Some(words)
    }

    /// Returns whether, after [`Link::flush_easy`] posted a batch, neither a flush nor
    /// [`Link::poll_read`] has anything to do at this time.
    #[inline(always)]
    pub(crate) const fn is_at_rest(&self, now_ns: u64) -> bool {
        !self.watch.is_new_time(now_ns) && !self.idle.probe_is_due && !self.starved
    }

    pub(crate) const fn count_blueflame_batch(&mut self) {
        self.stats.blueflame_batches += 1;
    }
}

#[cfg(test)]
impl<U> Link<U> {
    /// Flushes as a driver does: [`Link::flush_easy`], or [`Link::flush_all`].
    ///
    /// # Errors
    /// The first error of `poster`.
    pub(crate) fn flush<P: Poster>(&mut self, mut poster: P) -> Result<(), P::Error> {
        if self.flush_easy(&mut poster)? {
            // Unlike the driver's poster, a closure does not publish the words.
            self.is_unpublished = true;
            return Ok(());
        }
        self.flush_all(&mut poster)
    }
}
