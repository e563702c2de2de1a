//! Receive side: announced batches become messages, requests are held until answered.
//!
//! Nothing in a batch is used before it is checked against the span in its immediate and the
//! capacity of the ring (T1..T4 of docs/copyrpc-protocol.md). Headers and metadata are copied out
//! once and the copy is checked.

#[cfg(test)]
#[path = "explore/rx.rs"]
mod explore;

use std::collections::VecDeque;
use std::ptr::NonNull;

use copyrpc_shm::cache::prefetch;

use super::held::HeldRequests;
use crate::error::ProtocolError;
use crate::ring::{Lap, RingSize, RingView};
use crate::wire::{
    FLOW_METADATA_SIZE, FlowMetadata, FlowWords, HEADER_SIZE, Header, METADATA_SPAN,
    ReservedNotZero, WRAP_MESSAGE_COUNT, decode_imm, padded,
};

const LINE: u64 = 64;
/// Number of bytes that are prefetched ahead of the message being parsed. A NIC or another CPU core
/// wrote the bytes: fetched one cache line at a time, they cost more than the rest of the parsing.
const PREFETCH_BYTES: u64 = 1024;

#[derive(Debug)]
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) position: u64,
    /// Padded size of the message in bytes.
    pub(super) message: u64,
    /// Address of the payload in the ring. The header has the length of the payload.
    pub(super) payload_at: NonNull<u8>,
}

#[derive(Debug)]
pub(super) struct RecvRing {
    view: RingView,
    /// End of the announced batches.
    producer: u64,
    /// Everything before this position is delivered. The message being delivered starts here.
    delivered: u64,
    /// Positions of the next byte of the batch being parsed, and of the end of that batch. Between
    /// the end of a batch with messages and the end of its lap there is room for a header, so a
    /// header may be read at `next` even if the batch holds none there.
    next: u64,
    end: u64,
    /// Lap of `next` and `end`, and the position of the lap's end.
    lap: Lap,
    lap_end: u64,
    /// Number of messages of the batch being parsed that are not parsed yet; 0 between batches.
    messages_left: u32,
    /// Number of messages of all batches that were begun.
    messages_begun: u64,
    /// Length of the oldest announced batch that is not begun, in bytes; 0 if there is none.
    announced: u64,
    /// Lengths of the announced batches after that batch, oldest first; at most `batch_limit`
    /// entries.
    announced_behind: VecDeque<u64>,
    pub(super) requests: HeldRequests,
    batches_received: u64,
    /// Whether a batch that was begun reported that the peer makes no more calls (G1).
    heard_closing: bool,
    /// Maximum number of the peer's batches that this end has not yet reported as received (B1).
    batch_limit: u32,
    /// The most recent words of this side that the peer can know. They bound the bytes that the
    /// peer may send.
    told: FlowWords,
}

impl RecvRing {
    /// Makes the receive side; the peer knows the words `told`.
    pub(super) const fn new(view: RingView, told: FlowWords, batch_limit: u32) -> Self {
        let start = told.consumer_pos;
        Self {
            lap: view.lap(start),
            lap_end: start + view.size().to_end(start),
            messages_begun: 0,
            view,
            producer: start,
            delivered: start,
            next: start,
            end: start,
            messages_left: 0,
            announced: 0,
            announced_behind: VecDeque::new(),
            requests: HeldRequests::new(),
            batches_received: 0,
            heard_closing: false,
            batch_limit,
            told,
        }
    }

    pub(super) const fn size(&self) -> RingSize {
        self.view.size()
    }

    /// Returns the position of the oldest byte that is still needed: the start of an unanswered
    /// request, or of the message being delivered (S3).
    #[inline]
    pub(super) fn consumer_pos(&self) -> u64 {
        if self.requests.needs_bytes() {
            self.oldest_held()
        } else {
            self.delivered
        }
    }

    #[inline(never)]
    fn oldest_held(&self) -> u64 {
        self.requests
            .oldest()
            .map_or(self.delivered, |request| request.position)
    }

    pub(super) fn has_work(&self) -> bool {
        !self.requests.is_empty() || self.announced != 0 || self.messages_left > 0
    }

    pub(super) const fn batches_received(&self) -> u64 {
        self.batches_received
    }

    /// Returns whether the peer has announced, in a batch that this end has begun to parse, that the
    /// peer makes no more calls.
    pub(super) const fn has_heard_closing(&self) -> bool {
        self.heard_closing
    }

    /// Notes that these words are about to be visible to the peer.
    pub(super) const fn note_told(&mut self, words: FlowWords) {
        self.told = words;
    }

    #[inline(always)]
    pub(super) const fn told(&self) -> FlowWords {
        self.told
    }

    /// Takes a receive completion. Returns the length of its batch in bytes. The caller must then
    /// [begin](Self::begin) or [postpone](Self::put_off) the batch.
    #[inline(always)]
    pub(super) fn announce(&mut self, imm: u32) -> Result<u64, ProtocolError> {
        let span = decode_imm(imm);
        let free = self.size().bytes() - (self.producer - self.told.consumer_pos);
        // A span of 0 becomes `u64::MAX`, and is refused as well.
        if span.wrapping_sub(1) >= free {
            return Err(ProtocolError::Overrun { span, free });
        }
        if self.batches_received - self.told.batches_received >= u64::from(self.batch_limit) {
            return Err(ProtocolError::TooManyBatches {
                granted: self.batch_limit,
            });
        }
        self.batches_received += 1;
        self.producer += span;
        Ok(span)
    }

    /// Returns whether everything that was announced, except for the last `span` bytes, is parsed.
    #[inline(always)]
    pub(super) const fn is_parsed_but(&self, span: u64) -> bool {
        self.messages_left == 0 && self.producer - self.next == span
    }

    /// Queues an announced batch of `span` bytes after the batches before it.
    #[cold]
    #[inline(never)]
    pub(super) fn put_off(&mut self, span: u64) {
        if self.announced == 0 {
            self.announced = span;
        } else {
            self.announced_behind.push_back(span);
        }
    }

    /// Drops the messages that are not parsed.
    pub(super) const fn stop(&mut self) {
        self.messages_begun = self.messages_parsed();
        self.messages_left = 0;
    }

    pub(super) const fn messages_parsed(&self) -> u64 {
        self.messages_begun - self.messages_left as u64
    }

    /// Returns whether every message of the batches that were begun is parsed.
    pub(super) const fn is_between_batches(&self) -> bool {
        self.messages_left == 0
    }

    /// Returns whether every announced byte is parsed. If so, everything that arrived counts as
    /// delivered.
    #[inline]
    pub(super) fn is_done(&mut self) -> bool {
        let is_done = self.is_parsed_but(0);
        if is_done {
            self.delivered = self.end;
        }
        is_done
    }

    /// Returns the length in bytes of the next postponed batch, which the caller must
    /// [begin](Self::begin); `None` if there is none. May be called only between batches. Counts
    /// the last message as delivered.
    pub(super) fn next_put_off(&mut self) -> Result<Option<u64>, ProtocolError> {
        if self.next != self.end {
            return Err(ProtocolError::TrailingBytes {
                left: self.end - self.next,
            });
        }
        self.delivered = self.end;
        let span = self.announced;
        self.announced = self.announced_behind.pop_front().unwrap_or(0);
        Ok((span != 0).then_some(span))
    }

    /// Begins the next announced batch, of `span` bytes. Returns the metadata at its start.
    /// Everything before the batch must be parsed.
    #[inline(always)]
    pub(super) fn begin(&mut self, span: u64) -> Result<FlowMetadata, ProtocolError> {
        // `delivered` is not moved here: the first message of the batch, or its end, moves it.
        let start = self.end;
        // The first two cache lines are left out: the prefetches of the batch before have requested
        // them, or the reads below request them at once.
        if span > 2 * LINE {
            let mut line = 2 * LINE;
            while line < span.min(PREFETCH_BYTES) {
                self.view.prefetch(start, line);
                line += LINE;
            }
        }
        // SAFETY: positions of batches are multiples of 32, so a block of 32 bytes at the start is
        // on its lap: no data batch ends at the end of a lap (P2), and a marker leads to the next
        // lap. The metadata is copied out once: the copy is validated.
        let bytes = unsafe {
            self.lap
                .at(start)
                .cast::<[u8; FLOW_METADATA_SIZE]>()
                .read_unaligned()
        };
        let metadata = FlowMetadata::decode(&bytes)
            .map_err(|ReservedNotZero| ProtocolError::ReservedNotZero)?;
        let count = metadata.message_count;
        // A marker has a higher count than any batch, and is handled here, too.
        if u64::from(count) > (span - METADATA_SPAN) / padded(0) || span >= self.lap_end - start {
            self.begin_marker(count, span)?;
            return Ok(metadata);
        }
        self.end = start + span;
        self.next = start + METADATA_SPAN;
        self.messages_left = count;
        self.messages_begun += u64::from(count);
        Ok(metadata)
    }

    /// Begins a wrap marker, or refuses the batch: its count or its span is not legal for messages.
    #[cold]
    #[inline(never)]
    fn begin_marker(&mut self, count: u32, span: u64) -> Result<(), ProtocolError> {
        let start = self.end;
        let is_marker = count == WRAP_MESSAGE_COUNT;
        let to_end = self.lap_end - start;
        let well_placed = if is_marker {
            span == to_end
        } else {
            span < to_end
        };
        if !well_placed {
            return Err(ProtocolError::Misplaced {
                offset: self.size().offset(start),
                span,
            });
        }
        if !is_marker {
            return Err(ProtocolError::MessageCount { count, span });
        }
        self.end = self.lap_end;
        self.next = self.end;
        self.lap = self.view.lap(self.end);
        self.lap_end += self.size().bytes();
        Ok(())
    }

    /// Notes that a batch that was begun reports that the peer makes no more calls.
    pub(super) const fn note_closing(&mut self) {
        self.heard_closing = true;
    }

    /// Returns the next message of the batch; its length is checked, its meaning is not. The
    /// previous message counts as delivered. The message stays the next message until
    /// [`RecvRing::advance`].
    #[inline(always)]
    pub(super) fn next_message(&mut self) -> Result<Received, ProtocolError> {
        debug_assert!(self.messages_left > 0);
        let position = self.next;
        self.delivered = position;
        // SAFETY: a batch with messages ends a header or more before its lap does (P2), and `next`
        // is inside this batch or its end, so the header is on the lap. It is copied out once: the
        // copy is validated.
        let (start, header) = unsafe {
            let start = self.lap.at(position);
            (
                start,
                Header::decode(&start.cast::<[u8; HEADER_SIZE]>().read_unaligned()),
            )
        };
        prefetch(start.addr().get() + PREFETCH_BYTES as usize);
        // If the batch has ended, these bytes are not a header, and the check fails as well.
        let message = padded(u64::from(header.len));
        if message > self.end - position {
            return Err(self.too_long(header.len));
        }
        // SAFETY: the message, which is at least a header, is inside the batch, and so inside the
        // ring.
        let payload_at = unsafe { start.add(HEADER_SIZE) };
        Ok(Received {
            header,
            position,
            message,
            payload_at,
        })
    }

    #[cold]
    #[inline(never)]
    fn too_long(&self, len: u32) -> ProtocolError {
        let left = self.end - self.next;
        ProtocolError::MessageTooLong {
            len: if left == 0 { 0 } else { len },
            left,
        }
    }

    /// Advances past the message of this padded length, which [`RecvRing::next_message`] returned.
    #[inline(always)]
    pub(super) const fn advance(&mut self, message: u64) {
        self.next += message;
        self.messages_left -= 1;
    }
}
