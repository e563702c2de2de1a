//! The graceful end of a connection (G1..G5 of docs/copyrpc-protocol.md). Each end sends a mark,
//! the closing flag of a batch, which reports that this end makes no more calls. Everything
//! outstanding ends, then both ends close.

use super::{Limits, Link};
use crate::error::CloseReason;
use crate::wire::{METADATA_SPAN, Status};

/// The progress of a graceful end. The default is the state before the end begins.
#[derive(Debug, Default)]
pub(super) struct Closing {
    /// Whether a batch with the mark was posted (G1).
    is_told: bool,
    /// Whether the last READ was posted after this end was [settled](Link::is_settled).
    last_read_posted: bool,
    /// Number of batches that the peer had taken when it posted its mark; `None` until the mark has
    /// arrived.
    peer_had_taken: Option<u64>,
    /// First slot not yet searched for calls that the peer's mark refuses; `None` before the mark
    /// arrives and after the search.
    refused_from: Option<usize>,
}

impl<U> Link<U> {
    /// Begins the graceful end: this end admits no more calls, and the next flush refuses the
    /// requests that the application has not received. When the outstanding calls of both sides
    /// have ended, [`Link::closed`] returns [`CloseReason::ClosedHere`].
    pub(crate) fn shut_down(&mut self) {
        if self.closed.is_none() {
            self.begin_closing(CloseReason::ClosedHere);
        }
    }

    pub(super) fn begin_closing(&mut self, reason: CloseReason) {
        if self.ending.is_none() {
            self.tx.mark_closing();
            self.tx.close_to_calls();
            // From here on this end waits for the peer's mark, so the peer's silence is measured
            // from now.
            self.watch.news();
        }
        self.ending = Some(reason);
    }

    /// Takes a batch with the peer's mark. The peer had taken `batches_received` batches when it
    /// posted the mark.
    #[cold]
    #[inline(never)]
    pub(super) fn hear_closing(&mut self, batches_received: u64) {
        self.closing.peer_had_taken.get_or_insert(batches_received);
        self.closing.refused_from.get_or_insert(0);
        if self.ending.is_none() {
            self.begin_closing(CloseReason::ClosedByPeer);
        }
    }

    /// Ends a call that the peer's mark refuses: the peer's application never gets the request,
    /// whether the peer answers it or not (G5).
    pub(super) fn end_refused(&mut self) -> Option<U> {
        let (taken, from) = (self.closing.peer_had_taken?, self.closing.refused_from?);
        let refused = self.calls.abandon_later(taken, from);
        self.closing.refused_from = refused.as_ref().map(|(_, slot)| slot + 1);
        Some(refused?.0)
    }

    pub(crate) const fn ends_calls(&self) -> bool {
        self.closed.is_some() || self.closing.refused_from.is_some()
    }

    /// Returns whether this end posted its mark. If so, the application gets no more requests (G5).
    #[inline(always)]
    pub(super) const fn has_marked(&self) -> bool {
        self.closing.is_told
    }

    /// Returns whether a graceful end has begun here or at the peer, and is not complete.
    pub(crate) const fn is_closing(&self) -> bool {
        self.ending.is_some() && self.closed.is_none()
    }

    /// Returns whether the peer has begun a graceful end that is not complete.
    pub(crate) const fn is_closed_by_peer(&self) -> bool {
        self.is_closing() && self.rx.has_heard_closing()
    }

    pub(super) const fn owes_mark(&self) -> bool {
        self.is_closing() && !self.closing.is_told
    }

    /// Returns whether the peer has to answer this end's mark with its own.
    pub(super) const fn awaits_mark(&self) -> bool {
        self.is_closing() && self.closing.is_told && !self.rx.has_heard_closing()
    }

    pub(crate) const fn has_told_all(&self) -> bool {
        !self.tx.has_unposted() && !self.owes_mark()
    }

    /// Returns whether nothing is outstanding on either side, and this end has nothing more to send
    /// (G3).
    fn is_settled(&self) -> bool {
        self.is_closing() && self.closing.is_told && self.has_heard_all()
    }

    /// Returns whether the peer makes no more calls, and everything that this end waited for or has
    /// to send is done, except for this end's mark.
    fn has_heard_all(&self) -> bool {
        self.rx.has_heard_closing()
            && self.calls.unanswered() == 0
            && !self.rx.has_work()
            && !self.tx.has_unposted()
    }

    /// Returns whether silence of the peer has a meaning (K1): the peer owes answers, or its mark,
    /// or has not taken messages although a call of the peer waits (K6).
    pub(crate) fn is_watching(&self) -> bool {
        self.calls.unanswered() > 0
            || (self.tx.has_untaken_messages() && !self.peer_rests())
            || (self.ending.is_some() && self.awaits_mark())
    }

    /// Refuses the requests that the application has not got (G2), and begins the batch with the
    /// mark once nothing waits before it. A correct peer sends at most the requests that its credit
    /// pays for, so the loop ends.
    pub(super) fn begin_closing_flush(&mut self) {
        while let Some(name) = self.take_any_request() {
            if self
                .respond(&self.held(name), Status::Closing, &[])
                .is_err()
            {
                break;
            }
        }
        if self.owes_mark() && !self.tx.has_unposted() {
            self.offer_mark();
        }
    }

    /// Completes a flush. `posted`: the flush posted a batch. If nothing is left to post then, the
    /// mark was posted. `is_posted`: no post failed. A settled end then closes the connection if
    /// the peer has received every batch, and otherwise asks for a last READ.
    pub(super) fn end_closing_flush(&mut self, posted: bool, is_posted: bool) {
        if posted && !self.tx.has_unposted() {
            self.closing.is_told = true;
            self.limits = Limits::NONE;
        }
        if is_posted && self.is_settled() {
            if self.tx.all_received() {
                self.closed = self.ending;
                self.tx.stop();
            } else {
                self.starved = !self.closing.last_read_posted;
            }
        }
    }

    /// Begins a batch that carries only the mark, if the peer has room for it.
    fn offer_mark(&mut self) {
        let reserved = 2 * self.reservation.outstanding();
        if self.tx.in_flight() + METADATA_SPAN + reserved <= self.tx.size().bytes() {
            self.tx.append_metadata_only();
            self.stats.metadata_only += 1;
        } else {
            // Consumption by the peer makes room, so the peer's words are READ.
            self.starved = true;
        }
    }

    pub(super) fn note_last_read_posted(&mut self) {
        self.closing.last_read_posted = self.is_settled();
    }

    /// Notes that a READ completed. If the READ was posted after everything was settled, all
    /// messages posted before it have arrived, and the connection ends.
    pub(super) fn note_read_done(&mut self) {
        if self.closing.last_read_posted {
            self.closed = self.ending;
            self.tx.stop();
        }
    }

    /// Returns the reason to report when the connection fails with `reason`. If a graceful end has
    /// begun and this end has received everything, a failure of the transport only means that the
    /// peer ended first (G4): then the result is the reason of the graceful end.
    pub(super) fn final_reason(&self, reason: CloseReason) -> CloseReason {
        match (reason, self.ending) {
            (CloseReason::Disconnected | CloseReason::Transport { .. }, Some(graceful))
                if self.has_heard_all() =>
            {
                graceful
            }
            _ => reason,
        }
    }
}
