//! Send side: messages become batches in the send ring, batches become WRITEs.
//!
//! The ring from `peer_consumer` to `producer`:
//! ```text
//! peer_consumer .. posted            posted .. wrap.marker   marker .. ring end   .. producer
//! with the NIC or unread at the peer  closed batch            wrap marker          open batch
//! ```
//! The closed batch and the wrap marker exist only while a wrap waits to be posted. There is never
//! a second wrap (P4 of docs/copyrpc-protocol.md), so a few fields describe everything that is not
//! posted, and appending a reply never waits for a post.

#[cfg(test)]
#[path = "explore/tx.rs"]
mod explore;

use std::ptr::NonNull;

use crate::error::ProtocolError;
use crate::ring::{Lap, RingSize, RingView};
use crate::wire::{
    ALIGNMENT, FLOW_METADATA_SIZE, FlowMetadata, FlowWords, GIVEN_UP, Header, METADATA_SPAN,
    WRAP_MESSAGE_COUNT, encode_imm, padded,
};

/// An RDMA WRITE with Immediate to post: `bytes` bytes at `offset` of the local send ring go to
/// the same offset of the peer's receive ring, with immediate `imm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Emit {
    pub(crate) offset: u64,
    /// Bytes to write; at least 32, never across the ring end.
    pub(crate) bytes: u64,
    pub(crate) imm: u32,
    /// Whether no message waits after this batch.
    pub(crate) is_last: bool,
    /// Whether the completion of the WRITE is requested. The driver reports that completion to
    /// [`Link::on_write_done`](super::Link::on_write_done).
    pub(crate) signal: bool,
}

/// The batch of all messages that wait to be posted. Its metadata is not in the ring yet.
#[derive(Debug)]
pub(crate) struct EasyBatch<'a> {
    ring: &'a SendRing,
    words: FlowWords,
}

impl EasyBatch<'_> {
    /// Returns the number of bytes to write: the metadata and one message at least.
    #[inline(always)]
    pub(crate) const fn bytes(&self) -> u64 {
        self.ring.next - self.ring.posted
    }

    #[inline(always)]
    pub(crate) const fn imm(&self) -> u32 {
        encode_imm(self.bytes())
    }

    #[inline(always)]
    pub(crate) const fn start(&self) -> NonNull<u8> {
        // SAFETY: no wrap waits, so the open batch starts at `posted`, and `lap` is the lap of the
        // open batch.
        unsafe { self.ring.lap.at(self.ring.posted) }
    }

    #[inline(always)]
    pub(crate) const fn words(&self) -> FlowWords {
        self.words
    }

    /// Returns the metadata, which are the first bytes of the batch. The messages after it are in
    /// the ring.
    #[inline(always)]
    pub(crate) fn metadata(&self) -> [u8; FLOW_METADATA_SIZE] {
        // An end that closes never posts an easy batch, so the closing flag is not set.
        FlowMetadata {
            words: self.words,
            message_count: self.ring.open_count,
            is_closing: false,
        }
        .encode()
    }

    /// Writes the metadata into the ring.
    pub(crate) fn write_out(&self) -> Emit {
        let SendRing { view, posted, .. } = self.ring;
        view.write_block(*posted, &self.metadata());
        Emit {
            offset: view.size().offset(*posted),
            bytes: self.bytes(),
            imm: self.imm(),
            is_last: true,
            signal: false,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    start: u64,
    /// Bytes by which the batch advances the peer's receive ring.
    span: u64,
    /// [`WRAP_MESSAGE_COUNT`] for a wrap marker.
    count: u32,
    /// Number of notices among the messages: each reports a call that its caller gave up.
    notices: u32,
}

impl Batch {
    pub(super) const fn span(&self) -> u64 {
        self.span
    }

    pub(super) const fn is_marker(&self) -> bool {
        self.count == WRAP_MESSAGE_COUNT
    }

    /// Returns whether the batch has neither calls nor replies: the peer's process may leave such a
    /// batch untaken for any time (K2).
    const fn is_idle(&self) -> bool {
        self.is_marker() || self.count == self.notices
    }

    /// Returns the number of bytes on the wire: a marker writes its metadata only.
    pub(super) const fn bytes(&self) -> u64 {
        if self.is_marker() {
            METADATA_SPAN
        } else {
            self.span
        }
    }
}

/// A wrap that waits to be posted.
#[derive(Clone, Copy, Debug)]
struct Wrap {
    /// Position of the marker; the batch before it is `posted..marker`, possibly empty.
    marker: u64,
    count: u32,
    notices: u32,
}

/// Returns the last position at which a message may end, on the lap (the pass through the ring) of
/// `position`.
const fn lap_end(ring: RingSize, position: u64) -> u64 {
    position + ring.to_end(position) - ALIGNMENT
}

#[derive(Debug)]
pub(super) struct SendRing {
    view: RingView,
    /// The lap of the open batch.
    lap: Lap,
    /// Position of the next message: after the last message of the open batch, or after the
    /// metadata of the batch that the next message opens.
    next: u64,
    /// Everything before this position was posted.
    posted: u64,
    /// Everything before this position was consumed by the peer, as far as known here: the peer may
    /// have consumed more (F1).
    peer_consumer: u64,
    wrap: Option<Wrap>,
    open_count: u32,
    /// Number of notices (see [`Batch::notices`]) among the messages of the open batch.
    open_notices: u32,
    /// Whether notices wait to be written (C5).
    awaits_notices: bool,
    /// Whether the open batch was begun without messages. Messages may have joined it since.
    is_metadata_only: bool,
    /// Whether everything unposted is one batch of messages, and a flush posts all of it: there is
    /// no wrap, no batch without messages, and nothing else that prevents it.
    is_easy: bool,
    /// Whether a window holds batches back, or this end is closing.
    is_hindered: bool,
    /// The last position of `lap` at which a message may end without a wrap (P2: no data batch
    /// touches the ring's end), or 0 after [`stop`](Self::stop).
    lap_end: u64,
    /// A call whose message ends at this position or before is admitted without a wrap and without
    /// another check of S4 (a call leaves the room that is reserved for replies). At most
    /// `lap_end`. Only a grant of credit lowers the limit of S4, and a grant updates this field.
    calls_end: u64,
    batches_sent: u64,
    /// Batches that the peer received, and whose receives it posted again, as far as known here:
    /// the peer may have received more (F1).
    batches_received: u64,
    /// Batches whose completions the peer's process took, as far as READs reported: a hint from the
    /// peer, which may be late (K2).
    batches_taken: u64,
    /// Maximum number of this end's batches that the peer has not yet reported as received (B1).
    batch_limit: u64,
    /// Number of the last metadata-only batch, counted like `batches_sent`; 0 if messages joined
    /// it.
    last_metadata_only: u64,
    /// Number of the last batch with neither calls nor replies, counted like `batches_sent`.
    last_idle: u64,
    /// Number of batches with neither calls nor replies in a row, up to `last_idle`.
    idle_run: u64,
    /// Whether this end makes no more calls (G1).
    is_closing: bool,
}

/// The place of the next message in the ring: after the last message, without a wrap.
#[derive(Debug)]
pub(super) struct Place<'a> {
    ring: &'a mut SendRing,
    at: u64,
    /// End of the message, on the same lap of the ring as `at`.
    end: u64,
    payload: &'a [u8],
}

impl Place<'_> {
    #[inline(always)]
    pub(super) const fn message(&self) -> u64 {
        self.end - self.at
    }

    /// Writes the message. The caller has checked that the peer has room for it: by S4 for a call,
    /// by the allowance for a reply (S2).
    #[inline(always)]
    pub(super) fn fill(self, call_id: u32, piggyback: u32) {
        let Self {
            ring,
            at,
            end,
            payload,
        } = self;
        let header = Header {
            call_id,
            piggyback,
            len: payload.len() as u32,
        };
        // SAFETY: `place_before` checked that the whole message is on `lap`, and the ring has not
        // changed since, because the place borrows it.
        unsafe { ring.lap.write_message(at, &header.encode(), payload) };
        ring.next = end;
        ring.open_count += 1;
        debug_assert!(ring.in_flight() <= ring.size().bytes(), "S2");
    }
}

impl SendRing {
    pub(super) const fn new(
        view: RingView,
        start: u64,
        batch_limit: u32,
        has_window: bool,
    ) -> Self {
        Self {
            view,
            lap: view.lap(start),
            next: start + METADATA_SPAN,
            posted: start,
            peer_consumer: start,
            wrap: None,
            open_count: 0,
            open_notices: 0,
            awaits_notices: false,
            is_metadata_only: false,
            is_easy: !has_window,
            is_hindered: has_window,
            lap_end: lap_end(view.size(), start),
            calls_end: 0,
            batches_sent: 0,
            batches_received: 0,
            batches_taken: 0,
            batch_limit: batch_limit as u64,
            last_metadata_only: 0,
            last_idle: 0,
            idle_run: 0,
            is_closing: false,
        }
    }

    pub(super) const fn size(&self) -> RingSize {
        self.view.size()
    }

    /// Returns the end of the written bytes: from here the next message takes its own bytes, and 32
    /// if it opens a batch.
    #[inline(always)]
    const fn producer(&self) -> u64 {
        if self.open_count == 0 && !self.is_metadata_only {
            self.next - METADATA_SPAN
        } else {
            self.next
        }
    }

    pub(super) const fn in_flight(&self) -> u64 {
        self.producer() - self.peer_consumer
    }

    pub(super) const fn free(&self) -> u64 {
        self.size().bytes() - self.in_flight()
    }

    /// Returns the same as [`free`](Self::free), from fewer fields. Everything must be posted.
    #[inline(always)]
    pub(super) const fn free_after_posted(&self) -> u64 {
        self.size().bytes() - (self.posted - self.peer_consumer)
    }

    pub(super) const fn has_unposted(&self) -> bool {
        self.producer() != self.posted
    }

    /// Returns the number of bytes that are not posted, including the bytes that a wrap skips.
    pub(super) const fn unposted(&self) -> u64 {
        self.producer() - self.posted
    }

    /// Sets the closing flag of each later batch after which no message waits.
    pub(super) const fn mark_closing(&mut self) {
        self.is_closing = true;
        self.hinder();
    }

    const fn hinder(&mut self) {
        self.is_hindered = true;
        self.is_easy = false;
    }

    pub(super) const fn note_ease(&mut self) {
        self.is_easy = self.wrap.is_none()
            && !self.is_metadata_only
            && !self.is_hindered
            && !self.awaits_notices
            && self.open_notices == 0;
    }

    pub(super) const fn awaits_notices(&self) -> bool {
        self.awaits_notices
    }

    /// Sets whether notices wait to be written: if so, the next flush writes them.
    pub(super) const fn await_notices(&mut self, awaits_notices: bool) {
        self.awaits_notices = awaits_notices;
        self.note_ease();
    }

    pub(super) const fn all_received(&self) -> bool {
        self.batches_received == self.batches_sent
    }

    pub(super) const fn batches_received(&self) -> u64 {
        self.batches_received
    }

    pub(super) const fn unposted_messages(&self) -> u64 {
        let before_marker = match self.wrap {
            Some(wrap) if self.posted < wrap.marker => wrap.count,
            _ => 0,
        };
        before_marker as u64 + self.open_count as u64
    }

    pub(super) const fn posted(&self) -> u64 {
        self.posted
    }

    pub(super) const fn batches_sent(&self) -> u64 {
        self.batches_sent
    }

    /// Returns whether the batch limit permits one more batch (B1).
    pub(super) const fn may_post(&self) -> bool {
        self.batches_sent - self.batches_received < self.batch_limit
    }

    pub(super) const fn metadata_only_in_flight(&self) -> bool {
        self.last_metadata_only > self.batches_received
    }

    /// Returns whether the peer's process has not taken all posted calls and replies, as far as
    /// known here. Batches after the last call or reply do not count: the peer may leave them
    /// untaken for any time.
    #[inline]
    pub(super) fn has_untaken_messages(&self) -> bool {
        let taken = self.batches_taken.max(self.batches_received);
        let idle = if self.last_idle == self.batches_sent {
            self.idle_run
        } else {
            0
        };
        taken + idle < self.batches_sent
    }

    /// Takes the number of batches that the peer's process took, modulo 2^32. Returns whether the
    /// number is higher than before. An impossible number is ignored.
    pub(super) fn note_taken(&mut self, batches: u32) -> bool {
        let untaken = u64::from((self.batches_sent as u32).wrapping_sub(batches));
        let taken = self.batches_sent.saturating_sub(untaken);
        let is_more =
            taken > self.batches_taken && untaken <= self.batches_sent - self.batches_received;
        if is_more {
            self.batches_taken = taken;
        }
        is_more
    }

    /// Returns the number of ring bytes that a message of `message` padded bytes takes: its own
    /// bytes, the metadata of the batch that it opens, and the bytes that a wrap skips.
    pub(super) const fn span_of(&self, message: u64) -> u64 {
        let producer = self.producer();
        if self.fits_lap(message) {
            self.next + message - producer
        } else {
            self.size().to_end(producer) + METADATA_SPAN + message
        }
    }

    #[inline(always)]
    const fn fits_lap(&self, message: u64) -> bool {
        self.next + message <= self.lap_end
    }

    /// Returns a place for a message with this payload, if the message ends at `limit` or before.
    /// `limit` must be at most the end of the lap.
    #[inline(always)]
    fn place_before<'a>(&'a mut self, limit: u64, payload: &'a [u8]) -> Option<Place<'a>> {
        debug_assert!(limit <= self.lap_end, "P2");
        let at = self.next;
        let end = at + padded(payload.len() as u64);
        if end <= limit {
            Some(Place {
                ring: self,
                at,
                end,
                payload,
            })
        } else {
            None
        }
    }

    /// Returns the place of a message, unless it has to wrap.
    #[inline(always)]
    pub(super) fn place<'a>(&'a mut self, payload: &'a [u8]) -> Option<Place<'a>> {
        self.place_before(self.lap_end, payload)
    }

    /// Returns the place of a call's message, or `None` if S4 has to be checked or the message has
    /// to wrap.
    #[inline(always)]
    pub(super) fn place_of_call<'a>(&'a mut self, payload: &'a [u8]) -> Option<Place<'a>> {
        self.place_before(self.calls_end, payload)
    }

    /// Admits further calls without another check of S4 (the room that calls leave), as long as
    /// `reserved` bytes of the ring stay free.
    #[inline(always)]
    pub(super) fn open_to_calls(&mut self, reserved: u64) {
        debug_assert!(reserved < self.size().bytes(), "R1");
        self.calls_end = self
            .lap_end
            .min(self.peer_consumer + self.size().bytes() - reserved);
    }

    /// Makes the next call check S4 (the room that calls leave).
    pub(super) const fn close_to_calls(&mut self) {
        self.calls_end = 0;
    }

    /// Makes every message fail the check for room, so that no message is written any more.
    pub(super) const fn stop(&mut self) {
        self.lap_end = 0;
        self.close_to_calls();
        self.hinder();
    }

    /// Wraps if a message of `message` padded bytes needs a wrap. The caller has checked that the
    /// peer has room for the whole span of the message.
    #[inline(always)]
    pub(super) fn make_place(&mut self, message: u64) {
        if !self.fits_lap(message) {
            self.begin_wrap();
        }
    }

    /// Opens a batch that carries only metadata. At the end of the ring, the batch is a wrap
    /// marker. Nothing else may wait to be posted.
    pub(super) fn append_metadata_only(&mut self) {
        debug_assert!(!self.has_unposted());
        self.last_metadata_only = self.batches_sent + 1;
        if self.size().to_end(self.posted) == METADATA_SPAN {
            self.begin_wrap();
        } else {
            self.is_metadata_only = true;
            self.note_ease();
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn begin_wrap(&mut self) {
        debug_assert!(self.wrap.is_none(), "P4");
        let marker = self.producer();
        self.wrap = Some(Wrap {
            marker,
            count: self.open_count,
            notices: self.open_notices,
        });
        let start = marker + self.size().to_end(marker);
        self.lap = self.view.lap(start);
        self.lap_end = lap_end(self.size(), start);
        self.open_batch(start);
        self.close_to_calls();
    }

    /// Makes the next message open a batch at `start`.
    const fn open_batch(&mut self, start: u64) {
        self.next = start + METADATA_SPAN;
        self.open_count = 0;
        self.open_notices = 0;
        self.is_metadata_only = false;
        self.note_ease();
    }

    /// Writes a notice, which reports that the call with this id was given up. The caller has
    /// checked that the peer has room for the whole span of the message.
    pub(super) fn append_notice(&mut self, call_id: u32) {
        self.make_place(padded(0));
        // Every lap has room for the smallest message, so there is a place.
        if let Some(place) = self.place(&[]) {
            place.fill(call_id, GIVEN_UP);
            self.open_notices += 1;
            self.note_ease();
        }
    }

    #[inline(always)]
    pub(super) const fn has_open_messages(&self) -> bool {
        self.open_count != 0
    }

    /// Returns whether everything that is not posted is one batch of messages that can be posted as
    /// it is.
    #[inline(always)]
    pub(super) const fn has_easy_batch(&self) -> bool {
        self.is_easy && self.open_count != 0 && self.may_post()
    }

    #[inline(always)]
    pub(super) const fn easy_batch(&self, words: FlowWords) -> EasyBatch<'_> {
        EasyBatch { ring: self, words }
    }

    /// Like [`commit`](Self::commit), for an easy batch.
    #[inline(always)]
    pub(super) const fn commit_easy_batch(&mut self) {
        self.posted = self.next;
        self.batches_sent += 1;
        self.next += METADATA_SPAN;
        self.open_count = 0;
    }

    #[inline]
    pub(super) fn next_batch(&self) -> Option<Batch> {
        let start = self.posted;
        match self.wrap {
            Some(wrap) if start < wrap.marker => Some(Batch {
                start,
                span: wrap.marker - start,
                count: wrap.count,
                notices: wrap.notices,
            }),
            Some(_) => Some(Batch {
                start,
                span: self.size().to_end(start),
                count: WRAP_MESSAGE_COUNT,
                notices: 0,
            }),
            None if self.has_unposted() => Some(Batch {
                start,
                span: self.unposted(),
                count: self.open_count,
                notices: self.open_notices,
            }),
            None => None,
        }
    }

    /// Writes the metadata of a batch; may be repeated until the batch is posted.
    #[inline]
    pub(super) fn fill(&self, batch: &Batch, words: FlowWords, signal: bool) -> Emit {
        // An end that closes appends no further calls, but earlier calls may wait behind this
        // batch, so only the last batch has the closing flag (G1).
        let is_last = batch.start + batch.span == self.producer();
        let is_closing = self.is_closing && is_last;
        let metadata = FlowMetadata {
            words,
            message_count: batch.count,
            is_closing,
        };
        self.view.write_block(batch.start, &metadata.encode());
        Emit {
            offset: self.size().offset(batch.start),
            bytes: batch.bytes(),
            imm: encode_imm(batch.span),
            is_last,
            signal,
        }
    }

    /// Notes that the batch has been posted. A failed post moves no position (F2).
    #[inline]
    pub(super) fn commit(&mut self, batch: &Batch) {
        self.posted += batch.span;
        self.batches_sent += 1;
        if batch.is_idle() {
            let is_next = self.last_idle + 1 == self.batches_sent;
            self.idle_run = if is_next { self.idle_run + 1 } else { 1 };
            self.last_idle = self.batches_sent;
        }
        if self.last_metadata_only == self.batches_sent && batch.count > 0 && !batch.is_marker() {
            // Messages have joined the batch.
            self.last_metadata_only = 0;
        }
        if batch.is_marker() {
            self.wrap = None;
        } else if self.wrap.is_none() {
            self.open_batch(self.posted);
        }
    }

    /// Takes the peer's words if they report that the peer received and consumed everything that
    /// was posted, the common case of one batch at a time. Returns whether they do. No word of the
    /// peer can be larger, so earlier words need no check.
    #[inline(always)]
    pub(super) const fn acknowledge_all(&mut self, told: FlowWords) -> bool {
        let has_all =
            told.consumer_pos == self.posted && told.batches_received == self.batches_sent;
        if has_all {
            self.peer_consumer = told.consumer_pos;
            self.batches_received = told.batches_received;
        }
        has_all
    }

    /// Checks and takes the peer's consumer position and its count of received batches. `floor` has
    /// the peer's earlier words of the same channel (T5: words do not go backwards).
    pub(super) fn acknowledge(
        &mut self,
        told: FlowWords,
        floor: FlowWords,
    ) -> Result<(), ProtocolError> {
        let position = told.consumer_pos;
        if position < floor.consumer_pos || position > self.posted || position % ALIGNMENT != 0 {
            return Err(ProtocolError::ConsumerPosition {
                told: position,
                floor: floor.consumer_pos,
                ceiling: self.posted,
            });
        }
        let received = told.batches_received;
        if received < floor.batches_received || received > self.batches_sent {
            return Err(ProtocolError::BatchesReceived {
                told: received,
                floor: floor.batches_received,
                ceiling: self.batches_sent,
            });
        }
        self.peer_consumer = self.peer_consumer.max(position);
        self.batches_received = self.batches_received.max(received);
        Ok(())
    }
}
