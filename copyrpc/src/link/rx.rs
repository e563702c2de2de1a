//! Receive side: announced batches become messages, requests are held until answered.
//!
//! Nothing a batch says is used before it is checked against what its immediate announced and what
//! the ring can hold (T1..T4); headers and metadata are copied out once and the copy is checked.

#[cfg(test)]
#[path = "explore/rx.rs"]
mod explore;

use std::collections::VecDeque;

use crate::error::ProtocolError;
use crate::ring::{Payload, RingSize, RingView};
use crate::wire::{
    FLOW_METADATA_SIZE, FlowMetadata, FlowWords, Header, METADATA_SPAN, ReservedNotZero, WRAP_MESSAGE_COUNT, decode_imm, padded,
};

/// What the parser found next.
#[derive(Debug)]
pub(super) enum Item {
    /// The words of a batch, before its messages.
    Flow(FlowWords),
    /// A message with its place; its length is checked, its meaning is not.
    Message { header: Header, position: u64 },
}

/// The batch being parsed.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    next: u64,
    end: u64,
    messages_left: u32,
}

/// A request the application has not answered; its bytes are needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldRequest {
    pub(super) position: u64,
    pub(super) payload: Payload,
    pub(super) call_id: u32,
    pub(super) internal_allowance: u64,
}

#[derive(Debug)]
pub(super) struct RecvRing {
    view: RingView,
    /// End of the announced batches.
    producer: u64,
    /// Everything before is parsed and delivered.
    parsed: u64,
    /// Bytes of the announced batches not yet begun, oldest first; at most `batch_limit`.
    announced: VecDeque<u64>,
    cursor: Option<Cursor>,
    /// Requests from the oldest unanswered one on, in arrival order; `None` is answered and waits for older ones.
    requests: VecDeque<Option<HeldRequest>>,
    /// Number of the request at the front of `requests`.
    first_request: u64,
    batches_received: u64,
    /// Batches the peer may have sent and not been told the receipt of (B1).
    batch_limit: u32,
    /// The most that the peer can know of this side; bounds what it may send.
    told: FlowWords,
}

impl RecvRing {
    pub(super) const fn new(view: RingView, start: u64, batch_limit: u32) -> Self {
        Self {
            view,
            producer: start,
            parsed: start,
            announced: VecDeque::new(),
            cursor: None,
            requests: VecDeque::new(),
            first_request: 0,
            batches_received: 0,
            batch_limit,
            told: FlowWords { consumer_pos: start, credit: 0, batches_received: 0 },
        }
    }

    pub(super) const fn size(&self) -> RingSize {
        self.view.size()
    }

    /// Position of the oldest byte still needed: the oldest request not answered, or the message being delivered (S3).
    pub(super) fn consumer_pos(&self) -> u64 {
        self.requests.front().copied().flatten().map_or(self.parsed, |request| request.position)
    }

    pub(super) const fn batches_received(&self) -> u64 {
        self.batches_received
    }

    /// These words are about to be where the peer can see them.
    pub(super) const fn note_told(&mut self, words: FlowWords) {
        self.told = words;
    }

    /// A receive completion arrived.
    pub(super) fn announce(&mut self, imm: u32) -> Result<(), ProtocolError> {
        let span = decode_imm(imm);
        let free = self.size().bytes() - (self.producer - self.told.consumer_pos);
        if span == 0 || span > free {
            return Err(ProtocolError::Overrun { span, free });
        }
        if self.batches_received - self.told.batches_received >= u64::from(self.batch_limit) {
            return Err(ProtocolError::TooManyBatches { granted: self.batch_limit });
        }
        self.batches_received += 1;
        self.producer += span;
        self.announced.push_back(span);
        Ok(())
    }

    /// The next piece of the announced batches; `None` when all are parsed. Whatever the previous
    /// call returned counts as delivered.
    pub(super) fn next_item(&mut self) -> Result<Option<Item>, ProtocolError> {
        loop {
            let Some(cursor) = self.cursor else {
                return match self.announced.pop_front() {
                    Some(span) => self.begin_batch(span).map(Some),
                    None => Ok(None),
                };
            };
            self.parsed = cursor.next;
            if cursor.messages_left > 0 {
                return self.next_message(cursor).map(Some);
            }
            if cursor.next != cursor.end {
                return Err(ProtocolError::TrailingBytes { left: cursor.end - cursor.next });
            }
            self.cursor = None;
        }
    }

    fn begin_batch(&mut self, span: u64) -> Result<Item, ProtocolError> {
        let start = self.parsed;
        let bytes = self.view.copy_out::<FLOW_METADATA_SIZE>(start);
        let metadata = FlowMetadata::decode(&bytes).map_err(|ReservedNotZero| ProtocolError::ReservedNotZero)?;
        let count = metadata.message_count;
        let to_end = self.size().to_end(start);
        let is_marker = count == WRAP_MESSAGE_COUNT;
        let well_placed = if is_marker { span == to_end } else { span < to_end };
        if !well_placed {
            return Err(ProtocolError::Misplaced { offset: self.size().offset(start), span });
        }
        let end = start + span;
        self.cursor = Some(if is_marker {
            Cursor { next: end, end, messages_left: 0 }
        } else {
            if u64::from(count) > (span - METADATA_SPAN) / padded(0) {
                return Err(ProtocolError::MessageCount { count, span });
            }
            Cursor { next: start + METADATA_SPAN, end, messages_left: count }
        });
        Ok(Item::Flow(metadata.words))
    }

    fn next_message(&mut self, cursor: Cursor) -> Result<Item, ProtocolError> {
        let left = cursor.end - cursor.next;
        if left == 0 {
            return Err(ProtocolError::MessageTooLong { len: 0, left });
        }
        let header = Header::decode(&self.view.copy_out(cursor.next));
        let message = padded(u64::from(header.len));
        if message > left {
            return Err(ProtocolError::MessageTooLong { len: header.len, left });
        }
        self.cursor = Some(Cursor { next: cursor.next + message, end: cursor.end, messages_left: cursor.messages_left - 1 });
        Ok(Item::Message { header, position: cursor.next })
    }

    /// Keeps the bytes of a request until [`RecvRing::release`]. Returns the request's number.
    pub(super) fn hold(&mut self, request: HeldRequest) -> u64 {
        self.requests.push_back(Some(request));
        self.first_request + self.requests.len() as u64 - 1
    }

    fn index_of(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first_request)?).ok()
    }

    /// The request with this number, if it is not answered.
    pub(super) fn held(&self, number: u64) -> Option<HeldRequest> {
        *self.requests.get(self.index_of(number)?)?
    }

    /// The request is answered; its bytes are free once all older ones are (S3).
    pub(super) fn release(&mut self, number: u64) {
        let entry = self.index_of(number).and_then(|index| self.requests.get_mut(index));
        if let Some(entry) = entry {
            *entry = None;
        }
        while let Some(None) = self.requests.front() {
            self.requests.pop_front();
            self.first_request += 1;
        }
    }
}
