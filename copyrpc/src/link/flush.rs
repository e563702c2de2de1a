//! The exit of the send ring, and the words for the peer: batches to post, and the words of the published record.

use super::Link;
use super::outgoing::CALL_SLACK;
use super::tx::{Batch, Emit};
use super::window::Hold;
use crate::wire::{FlowWords, METADATA_SPAN};

/// The destination of batches. A trait and not a closure: the code that posts the common batch is inlined for sure.
pub(crate) trait Poster<E> {
    /// Posts a batch.
    fn post(&mut self, emit: Emit) -> Result<(), E>;
}

impl<U> Link<U> {
    /// Returns the batch that a flush posts, if it is the only one and nothing prevents it. [`Link::easy_batch_posted`] has to follow,
    /// unless it cannot be posted. Otherwise nothing has changed.
    #[inline(always)]
    fn easy_batch(&mut self) -> Option<(Emit, FlowWords)> {
        if self.ending.is_some() || !self.tx.has_easy_batch() || !self.window.is_off() {
            return None;
        }
        let words = self.grant();
        self.rx.note_told(words);
        Some((self.tx.fill_easy_batch(words), words))
    }

    /// Notes that the batch of [`Link::easy_batch`] was posted, with these words.
    #[inline(always)]
    const fn easy_batch_posted(&mut self, words: FlowWords) {
        self.told_by_batch = words;
        self.tx.commit_easy_batch();
        self.note_posted();
    }

    #[inline(always)]
    const fn note_posted(&mut self) {
        self.starved |= self.tx.free() < self.tx.size().bytes() / 4;
    }

    /// Does the work of [`Link::flush_any`] if that is one batch, and nothing prevents it; then returns the current words. Otherwise, or
    /// after an error, nothing has changed.
    ///
    /// # Errors
    /// The error of `poster`.
    #[inline(always)]
    pub(crate) fn flush_easy<E>(&mut self, poster: &mut impl Poster<E>) -> Result<Option<FlowWords>, E> {
        let Some((emit, words)) = self.easy_batch() else { return Ok(None) };
        poster.post(emit)?;
        self.easy_batch_posted(words);
        Ok(Some(words))
    }

    /// Gives each batch that may be sent to `post`, oldest first: B1 and the window (W1) hold batches back. A batch counts as sent only
    /// when `post` succeeds. After an error the next flush offers everything not posted again (F2).
    ///
    /// # Errors
    /// The first error of `post`.
    #[inline(never)]
    pub(crate) fn flush_any<E>(&mut self, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        if self.ending.is_some() {
            return self.flush_closing(post);
        }
        let words = self.grant();
        self.offer_metadata_only(words);
        self.post_waiting(words, post)
    }

    pub(super) fn post_waiting<E>(&mut self, words: FlowWords, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        // Posting changes none of the words here: the bytes were in flight before.
        if self.window.begin(self.tx.unposted()) {
            return self.flush_windowed(words, post);
        }
        while let Some(batch) = self.next_to_post() {
            self.post_batch(&batch, words, false, post)?;
            if !self.tx.has_unposted() {
                break;
            }
        }
        Ok(())
    }

    fn next_to_post(&mut self) -> Option<Batch> {
        let batch = self.tx.next_batch()?;
        if !self.tx.may_post() {
            self.stats.batch_stalls += 1;
            return None;
        }
        Some(batch)
    }

    fn post_batch<E>(
        &mut self,
        batch: &Batch,
        words: FlowWords,
        signal: bool,
        post: &mut dyn FnMut(Emit) -> Result<(), E>,
    ) -> Result<(), E> {
        self.rx.note_told(words);
        post(self.tx.fill(batch, words, signal))?;
        self.tx.commit(batch);
        self.told_by_batch = words;
        self.note_posted();
        if batch.is_marker() {
            self.stats.wraps += 1;
            self.stats.bytes_sent = self.stats.bytes_sent.wrapping_sub(batch.span() - batch.bytes());
        }
        Ok(())
    }

    /// Flushes a batch that the window applies to: it waits for a place, or takes one (W1).
    #[inline(never)]
    fn flush_windowed<E>(&mut self, words: FlowWords, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        if let Some(hold) = self.window.hold(self.tx.batches_received()) {
            // As after a refused call, the peer's words would help (L5).
            self.starved |= hold == Hold::PeersWord;
            self.stats.window_stalls += 1;
            return Ok(());
        }
        while let Some(batch) = self.next_to_post() {
            // A batch that a wrap divided takes one place, with its last part (W2).
            let takes_place = batch.span() == self.tx.unposted();
            self.post_batch(&batch, words, takes_place && self.window.needs_completions(), post)?;
            if takes_place {
                self.window.posted(self.tx.batches_sent());
            }
        }
        Ok(())
    }

    /// Begins a batch without messages if the peer should hear enough news and no data will carry it: 1/8 ring consumed or 1/16 ring
    /// granted, one such batch in flight (L4).
    #[inline]
    fn offer_metadata_only(&mut self, words: FlowWords) {
        if self.tx.has_unposted() || self.tx.metadata_only_in_flight() || !self.tx.may_post() {
            return;
        }
        let ring = self.tx.size().bytes();
        let news =
            words.consumer_pos - self.told_by_batch.consumer_pos >= ring / 8 || words.credit - self.told_by_batch.credit >= ring / 16;
        let reserved = 2 * self.reservation.outstanding();
        if news && self.tx.in_flight() + METADATA_SPAN + reserved <= ring {
            self.tx.append_metadata_only();
            self.stats.metadata_only += 1;
        }
    }

    /// Grants as much as possible. Returns the current words of this side.
    #[inline(always)]
    pub(super) fn grant(&mut self) -> FlowWords {
        let may_have_granted = self.reservation.top_up(self.tx.size(), self.tx.in_flight());
        if may_have_granted && self.ending.is_none() {
            self.tx.open_to_calls(2 * self.reservation.outstanding() + CALL_SLACK);
        }
        self.current_words()
    }

    #[inline(always)]
    fn current_words(&self) -> FlowWords {
        FlowWords { consumer_pos: self.rx.consumer_pos(), credit: self.reservation.granted(), batches_received: self.rx.batches_received() }
    }

    /// Returns the words to store in the published record, if they changed. Call it after every round of arrivals, replies and flushes,
    /// and only when the receive queue has been refilled: the peer may send as many batches as it is told were received (B1).
    pub(crate) fn publish(&mut self) -> Option<FlowWords> {
        if self.closed.is_some() {
            return None;
        }
        let words = self.current_words();
        if words == self.published {
            return None;
        }
        self.published = words;
        self.rx.note_told(words);
        Some(words)
    }

    /// Notes that these words, which [`Link::flush_easy`] returned, are stored in the published record, instead of calling
    /// [`Link::publish`].
    #[inline(always)]
    pub(crate) const fn note_published(&mut self, words: FlowWords) {
        self.published = words;
    }

    /// Returns whether, after [`Link::flush_easy`] posted a batch, no flush has anything to do, nor [`Link::poll_read`] at this time.
    #[inline(always)]
    pub(crate) const fn is_at_rest(&self, now_ns: u64) -> bool {
        !self.watch.is_new_time(now_ns) && !self.idle.probe_is_due && !self.starved
    }
}

#[cfg(test)]
impl<U> Link<U> {
    /// Calls [`Link::flush_easy`], or [`Link::flush_any`].
    ///
    /// # Errors
    /// The first error of `post`.
    pub(crate) fn flush<E>(&mut self, post: impl FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        let mut post = FromFn(post);
        match self.flush_easy(&mut post)? {
            Some(_words) => Ok(()),
            None => self.flush_any(&mut post.0),
        }
    }
}

/// Makes a [`Poster`] of a closure.
#[cfg(test)]
struct FromFn<F>(F);

#[cfg(test)]
impl<E, F: FnMut(Emit) -> Result<(), E>> Poster<E> for FromFn<F> {
    fn post(&mut self, emit: Emit) -> Result<(), E> {
        (self.0)(emit)
    }
}
