//! What comes in: batches, READs of the peer's record, and silence.

use super::rx::{HeldRequest, Item};
use super::watch::Verdict;
use super::{Event, Link, Request};
use crate::error::{CallFailure, CloseReason, ProtocolError};
use crate::ring::Payload;
use crate::wire::{
    ALIGNMENT, CallId, FLOW_METADATA_SIZE, FlowWords, Header, PublishedRecord, RESPONSE_FLAG, ReservedNotZero, Status, padded,
    response_capacity,
};

impl<U> Link<U> {
    /// Whether to READ the peer's published record now (L5): a call was refused, space is low, the
    /// batch limit holds data back, or requests wait in silence (K1). After posting it, call
    /// [`Link::read_posted`]. Ends the connection when the peer did nothing for too long (K2).
    pub fn poll_read(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let verdict = if self.calls.unanswered() > 0 { self.watch.look(now_ns) } else { Verdict::Wait };
        if self.read_in_flight {
            return false;
        }
        if verdict == Verdict::Stalled {
            self.close(CloseReason::PeerStalled);
            return false;
        }
        self.wants_read() || verdict == Verdict::Probe
    }

    /// The READ has been posted; the next one waits for its completion.
    pub fn read_posted(&mut self) {
        self.stats.reads += 1;
        self.stats.probes += u64::from(!self.wants_read());
        self.read_in_flight = true;
        self.starved = false;
    }

    /// The READ completed with the peer's published record.
    pub fn on_read_done(&mut self, record: &[u8; FLOW_METADATA_SIZE]) {
        self.read_in_flight = false;
        if self.closed.is_some() {
            return;
        }
        let PublishedRecord { words, heartbeat } = match PublishedRecord::decode(record) {
            Ok(record) => record,
            Err(ReservedNotZero) => return self.close(ProtocolError::ReservedNotZero.into()),
        };
        if words == self.heard_by_read && heartbeat == self.heard_heartbeat {
            self.watch.vain_probe();
        } else {
            self.watch.news();
        }
        self.heard_heartbeat = heartbeat;
        match self.hear(words, self.heard_by_read) {
            Ok(()) => self.heard_by_read = words,
            Err(error) => self.close(error.into()),
        }
    }

    /// A receive completion with this immediate arrived. Its messages come out of [`Link::next_event`].
    pub fn on_imm(&mut self, imm: u32) {
        if self.closed.is_some() {
            return;
        }
        self.watch.news();
        self.starved = false;
        match self.rx.announce(imm) {
            Ok(()) => self.stats.batches_received += 1,
            Err(error) => self.close(error.into()),
        }
    }

    /// The next request or ended call in what arrived; `None` when all is parsed. On a closed connection it ends the pending calls, one
    /// by one.
    pub fn next_event(&mut self) -> Option<Event<U>> {
        while self.closed.is_none() {
            let step = match self.rx.next_item() {
                Ok(None) => return None,
                Ok(Some(item)) => self.take_item(item),
                Err(error) => Err(error),
            };
            match step {
                Ok(None) => {}
                Ok(event) => return event,
                Err(error) => self.close(error.into()),
            }
        }
        let reason = self.closed?;
        self.calls.take_any().map(|user_data| Event::Ended { user_data, outcome: Err(reason.into()) })
    }

    fn take_item(&mut self, item: Item) -> Result<Option<Event<U>>, ProtocolError> {
        match item {
            Item::Flow(words) => {
                self.hear(words, self.heard_by_batch)?;
                self.heard_by_batch = words;
                Ok(None)
            }
            Item::Message { header, position } => {
                self.stats.messages_received += 1;
                if header.call_id & RESPONSE_FLAG == 0 {
                    self.take_request(&header, position).map(Some)
                } else {
                    self.take_response(&header, position)
                }
            }
        }
    }

    /// The peer told its words; `floor` is what the same channel told before (F1, T5).
    fn hear(&mut self, words: FlowWords, floor: FlowWords) -> Result<(), ProtocolError> {
        self.tx.acknowledge(words, floor)?;
        self.credit.raise(self.tx.size(), words.credit, floor.credit)
    }

    fn take_request(&mut self, header: &Header, position: u64) -> Result<Event<U>, ProtocolError> {
        let ring = self.rx.size();
        let message = padded(u64::from(header.len));
        if message > ring.max_message() {
            return Err(ProtocolError::RequestTooLarge { padded: message, max: ring.max_message() });
        }
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        self.reservation.claim(ring, allowance)?;
        let payload = Payload::of_message(position, header.len);
        let number = self.rx.hold(HeldRequest { position, payload, call_id: header.call_id, internal_allowance: allowance });
        Ok(Event::Request(Request { number, payload, max_reply: response_capacity(allowance) as usize }))
    }

    fn take_response(&mut self, header: &Header, position: u64) -> Result<Option<Event<U>>, ProtocolError> {
        let status = Status::from_wire(header.piggyback).ok_or(ProtocolError::UnknownStatus(header.piggyback))?;
        let Some(answered) = self.calls.complete(CallId::from_wire(header.call_id)) else {
            self.stats.stale_responses += 1;
            return Ok(None);
        };
        let max = response_capacity(answered.internal_allowance);
        let is_too_large = u64::from(header.len) > max;
        let error = ProtocolError::ResponseTooLarge { len: header.len, max };
        let Some(user_data) = answered.user_data else {
            self.stats.late_responses += 1;
            return if is_too_large { Err(error) } else { Ok(None) };
        };
        let outcome = if is_too_large {
            self.close(error.into());
            Err(CallFailure::Closed(error.into()))
        } else {
            match status {
                Status::Ok => Ok(Payload::of_message(position, header.len)),
                Status::Dropped => Err(CallFailure::Dropped),
                Status::Refused => Err(CallFailure::Refused),
            }
        };
        Ok(Some(Event::Ended { user_data, outcome }))
    }
}
