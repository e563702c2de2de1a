//! Receive side: announced batches become messages, requests are held until answered.
//!
//! Nothing a batch says is used before it is checked against what its immediate announced and what
//! the ring can hold (T1..T4); headers and metadata are copied out once and the copy is checked.

#[cfg(test)]
#[path = "explore/rx.rs"]
mod explore;

use std::collections::VecDeque;
use std::ptr::NonNull;

use shm::cache::prefetch;

use super::held::HeldRequests;
use crate::error::ProtocolError;
use crate::ring::{Lap, RingSize, RingView};
use crate::wire::{
    FLOW_METADATA_SIZE, FlowMetadata, FlowWords, HEADER_SIZE, Header, METADATA_SPAN, ReservedNotZero, WRAP_MESSAGE_COUNT, decode_imm,
    padded,
};

/// Bytes of a cache line.
const LINE: u64 = 64;
/// Bytes of a batch that are fetched ahead of the message being parsed. Another core wrote them; one at a time they cost more than all else.
const PREFETCH_BYTES: u64 = 1024;

/// The next message of a batch.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) position: u64,
    /// Padded bytes.
    pub(super) message: u64,
    /// Where as many payload bytes as the header says are, in the ring.
    pub(super) payload_at: NonNull<u8>,
}

#[derive(Debug)]
pub(super) struct RecvRing {
    view: RingView,
    /// End of the announced batches.
    producer: u64,
    /// Everything before is delivered: start of the message being delivered.
    delivered: u64,
    /// Next byte of the batch being parsed, and its end. There is a header behind it on its lap, if not in it.
    next: u64,
    end: u64,
    /// Of both.
    lap: Lap,
    /// Messages of it not parsed; 0 between batches.
    messages_left: u32,
    /// Messages of all batches that were begun.
    messages_begun: u64,
    /// Bytes of the oldest announced batch that is not begun; 0 when there is none.
    announced: u64,
    /// Bytes of those behind it, oldest first; at most `batch_limit`.
    announced_behind: VecDeque<u64>,
    /// Their bytes are needed.
    pub(super) requests: HeldRequests,
    batches_received: u64,
    /// The peer makes no more calls (G1).
    heard_closing: bool,
    /// Batches the peer may have sent and not been told the receipt of (B1).
    batch_limit: u32,
    /// The most that the peer can know of this side; bounds what it may send.
    told: FlowWords,
}

impl RecvRing {
    /// After so many `requests`, all answered, and what was `told`.
    pub(super) const fn new(view: RingView, told: FlowWords, requests: u64, batch_limit: u32) -> Self {
        let start = told.consumer_pos;
        Self {
            lap: view.lap(start),
            messages_begun: 0,
            view,
            producer: start,
            delivered: start,
            next: start,
            end: start,
            messages_left: 0,
            announced: 0,
            announced_behind: VecDeque::new(),
            requests: HeldRequests::new(requests),
            batches_received: told.batches_received,
            heard_closing: false,
            batch_limit,
            told,
        }
    }

    #[inline]
    pub(super) const fn size(&self) -> RingSize {
        self.view.size()
    }

    /// Position of the oldest byte still needed: the oldest request not answered, or the message being delivered (S3).
    #[inline]
    pub(super) fn consumer_pos(&self) -> u64 {
        self.requests.oldest().map_or(self.delivered, |request| request.position)
    }

    /// Requests wait for an answer, or batches to be parsed.
    pub(super) fn has_work(&self) -> bool {
        !self.requests.is_empty() || self.announced != 0 || self.messages_left > 0
    }

    #[inline]
    pub(super) const fn batches_received(&self) -> u64 {
        self.batches_received
    }

    /// A batch that was begun said that the peer makes no more calls.
    #[inline]
    pub(super) const fn has_heard_closing(&self) -> bool {
        self.heard_closing
    }

    /// These words are about to be where the peer can see them.
    #[inline]
    pub(super) const fn note_told(&mut self, words: FlowWords) {
        self.told = words;
    }

    /// A receive completion arrived. Returns the bytes of its batch, to be [begun](Self::begin) or [put off](Self::put_off).
    #[inline(always)]
    pub(super) fn announce(&mut self, imm: u32) -> Result<u64, ProtocolError> {
        let span = decode_imm(imm);
        let free = self.size().bytes() - (self.producer - self.told.consumer_pos);
        // None is too few.
        if span.wrapping_sub(1) >= free {
            return Err(ProtocolError::Overrun { span, free });
        }
        if self.batches_received - self.told.batches_received >= u64::from(self.batch_limit) {
            return Err(ProtocolError::TooManyBatches { granted: self.batch_limit });
        }
        self.batches_received += 1;
        self.producer += span;
        Ok(span)
    }

    /// Whether all that was announced, less `span` bytes, is parsed.
    #[inline(always)]
    pub(super) const fn is_parsed_but(&self, span: u64) -> bool {
        self.messages_left == 0 && self.producer - self.next == span
    }

    /// Queues an announced batch of so many bytes behind those before it.
    #[cold]
    #[inline(never)]
    pub(super) fn put_off(&mut self, span: u64) {
        if self.announced == 0 {
            self.announced = span;
        } else {
            self.announced_behind.push_back(span);
        }
    }

    /// The messages that are not parsed are not to be.
    pub(super) const fn stop(&mut self) {
        self.messages_begun = self.messages_parsed();
        self.messages_left = 0;
    }

    /// Messages that were parsed.
    pub(super) const fn messages_parsed(&self) -> u64 {
        self.messages_begun - self.messages_left as u64
    }

    /// Every message of the batches that were begun is parsed.
    #[inline]
    pub(super) const fn is_between_batches(&self) -> bool {
        self.messages_left == 0
    }

    /// Like [`is_between_batches`](Self::is_between_batches), and there are no more: all is delivered.
    #[inline]
    pub(super) fn is_done(&mut self) -> bool {
        let is_done = self.is_parsed_but(0);
        if is_done {
            self.delivered = self.end;
        }
        is_done
    }

    /// Bytes of the next batch that was put off, to be [begun](Self::begin). `None` when there is none. Called between batches; the last message
    /// counts as delivered.
    pub(super) fn next_put_off(&mut self) -> Result<Option<u64>, ProtocolError> {
        if self.next != self.end {
            return Err(ProtocolError::TrailingBytes { left: self.end - self.next });
        }
        self.delivered = self.end;
        let span = self.announced;
        self.announced = self.announced_behind.pop_front().unwrap_or(0);
        Ok((span != 0).then_some(span))
    }

    /// Begins the next announced batch, of so many bytes: its metadata comes before its messages. All before it is parsed.
    #[inline(always)]
    pub(super) fn begin(&mut self, span: u64) -> Result<FlowMetadata, ProtocolError> {
        // The first message, or the end, comes next, and says what is delivered.
        let start = self.end;
        // The first two lines are under way, or asked for below in no time.
        if span > 2 * LINE {
            let mut line = 2 * LINE;
            while line < span.min(PREFETCH_BYTES) {
                self.view.prefetch(start, line);
                line += LINE;
            }
        }
        let bytes = self.view.read_block::<FLOW_METADATA_SIZE>(start);
        let metadata = FlowMetadata::decode(&bytes).map_err(|ReservedNotZero| ProtocolError::ReservedNotZero)?;
        if metadata.is_closing {
            self.heard_closing = true;
        }
        let count = metadata.message_count;
        let to_end = self.size().to_end(start);
        let is_marker = count == WRAP_MESSAGE_COUNT;
        let well_placed = if is_marker { span == to_end } else { span < to_end };
        if !well_placed {
            return Err(ProtocolError::Misplaced { offset: self.size().offset(start), span });
        }
        self.end = start + span;
        if is_marker {
            self.next = self.end;
            self.lap = self.view.lap(self.end);
        } else {
            if u64::from(count) > (span - METADATA_SPAN) / padded(0) {
                return Err(ProtocolError::MessageCount { count, span });
            }
            self.next = start + METADATA_SPAN;
            self.messages_left = count;
            self.messages_begun += u64::from(count);
        }
        Ok(metadata)
    }

    /// The next message of the batch; its length is checked, its meaning is not. The one before counts as delivered. It stays the next until
    /// [`RecvRing::advance`].
    #[inline(always)]
    pub(super) fn next_message(&mut self) -> Result<Received, ProtocolError> {
        debug_assert!(self.messages_left > 0);
        let position = self.next;
        self.delivered = position;
        // SAFETY: a batch with messages ends a header or more before its lap does (P2), and `next` is in it or its end. The header is copied
        // out once: what is validated is the copy.
        let (start, header) = unsafe {
            let start = self.lap.at(position);
            (start, Header::decode(&start.cast::<[u8; HEADER_SIZE]>().read_unaligned()))
        };
        prefetch(start.addr().get() + PREFETCH_BYTES as usize);
        // Also if the batch has ended, and this is no header.
        let message = padded(u64::from(header.len));
        if message > self.end - position {
            return Err(self.too_long(header.len));
        }
        // SAFETY: the message is inside of the batch.
        let payload_at = unsafe { start.add(HEADER_SIZE) };
        Ok(Received { header, position, message, payload_at })
    }

    #[cold]
    #[inline(never)]
    fn too_long(&self, len: u32) -> ProtocolError {
        let left = self.end - self.next;
        ProtocolError::MessageTooLong { len: if left == 0 { 0 } else { len }, left }
    }

    /// Goes on behind the message of this padded length, which [`RecvRing::next_message`] gave.
    #[inline(always)]
    pub(super) const fn advance(&mut self, message: u64) {
        self.next += message;
        self.messages_left -= 1;
    }
}
