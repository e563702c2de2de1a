//! What comes in: batches, READs of the peer's record, and silence.

use super::held::HeldRequest;
use super::watch::Verdict;
use super::{Event, Link, Request};
use crate::error::{CallFailure, CloseReason, ProtocolError};
use crate::ring::Payload;
use crate::wire::{
    ALIGNMENT, CallId, FLOW_METADATA_SIZE, FlowWords, Header, PublishedRecord, RESPONSE_FLAG, Status, padded, response_capacity,
};

impl<U> Link<U> {
    /// Whether to READ the peer's published record now (L5): a call was refused, space is low, the
    /// batch limit holds data back, or requests wait in silence (K1). After READs in vain a wanted one comes at one of the next 65 calls.
    /// After posting it, call [`Link::read_posted`]. Ends the connection when the peer did nothing for too long (K2).
    pub fn poll_read(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let verdict = if self.is_watching() { self.watch.look(now_ns) } else { Verdict::Wait };
        // Also while a READ is in flight: a starved caller may have one at every look.
        if verdict == Verdict::Stalled {
            self.close(CloseReason::PeerStalled);
            return false;
        }
        if self.read_in_flight {
            return false;
        }
        verdict == Verdict::Probe
            || self.idle.probe_is_due
            || (self.wants_read() && self.backoff.ends_at_this_poll(self.rx.batches_received()))
    }

    /// The READ has been posted; the next one waits for its completion.
    pub fn read_posted(&mut self) {
        self.stats.reads += 1;
        self.read_is_probe = !self.wants_read();
        self.stats.probes += u64::from(self.read_is_probe);
        self.idle.probe_is_due = false;
        self.read_in_flight = true;
        self.note_last_read_posted();
        self.starved = false;
    }

    /// The READ completed with the peer's published record.
    pub fn on_read_done(&mut self, record: &[u8; FLOW_METADATA_SIZE]) {
        self.read_in_flight = false;
        if self.closed.is_some() {
            return;
        }
        let PublishedRecord { words, heartbeat, batches_taken } = PublishedRecord::decode(record);
        let mut is_news = words != self.heard_by_read || heartbeat != self.heard_heartbeat;
        self.heard_heartbeat = heartbeat;
        match self.hear(words, self.heard_by_read) {
            Ok(()) => {
                self.heard_by_read = words;
                is_news |= self.tx.note_taken(batches_taken);
            }
            Err(error) => self.close(error.into()),
        }
        if is_news {
            self.watch.news();
            self.backoff.news();
        } else {
            self.watch.vain_probe();
            if !self.read_is_probe {
                self.backoff.vain_read();
            }
        }
        if self.ending.is_some() {
            self.note_read_done();
        }
    }

    /// The WRITE of a batch with [`Emit::signal`](super::Emit::signal) completed; they do in the order they were posted. Whether
    /// something waits that a flush may post now.
    pub fn on_write_done(&mut self) -> bool {
        self.window.completed()
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

    /// The next requests or ended call in what arrived; `None` when all is parsed. On a closed connection it ends the pending calls, one
    /// by one.
    #[inline(always)]
    pub fn next_event(&mut self) -> Option<Event<U>> {
        loop {
            if self.rx.is_between_batches() || self.closed.is_some() {
                if self.rx.is_done() || !self.begin_batch() {
                    return self.end_any();
                }
                continue;
            }
            match self.take_messages() {
                Ok(None) => {}
                Ok(event) => return event,
                Err(error) => self.close(error.into()),
            }
        }
    }

    /// Takes the words of the next batch, if one was announced. Whether to go on.
    #[inline(never)]
    fn begin_batch(&mut self) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let heard = match self.rx.begin_batch() {
            Ok(None) => return false,
            Ok(Some(words)) => self.hear(words, self.heard_by_batch).map(|()| self.heard_by_batch = words),
            Err(error) => Err(error),
        };
        if let Err(error) = heard {
            self.close(error.into());
        }
        if self.rx.has_heard_closing() && self.ending.is_none() {
            self.begin_closing(CloseReason::ClosedByPeer);
        }
        true
    }

    /// On a closed connection, a call that ends with it.
    #[inline]
    fn end_any(&mut self) -> Option<Event<U>> {
        let reason = self.closed?;
        self.calls.take_any().map(|user_data| Event::Ended { user_data, outcome: Err(reason.into()) })
    }

    /// Takes requests up to the next response, or that response. What cannot be taken behind requests is found by the next call.
    #[inline(always)]
    fn take_messages(&mut self) -> Result<Option<Event<U>>, ProtocolError> {
        let mut requests = 0;
        let outcome = loop {
            let (header, position) = match self.rx.next_message() {
                Ok(next) => next,
                Err(error) => break Err(error),
            };
            if header.call_id & RESPONSE_FLAG != 0 {
                if requests > 0 {
                    break Ok(None);
                }
                self.rx.advance(&header);
                self.stats.messages_received += 1;
                return self.take_response(&header, position);
            }
            if let Err(error) = self.take_in_request(&header, position) {
                break Err(error);
            }
            self.rx.advance(&header);
            requests += 1;
            if self.rx.is_between_batches() {
                break Ok(None);
            }
        };
        self.stats.messages_received += requests as u64;
        if requests > 0 { Ok(Some(Event::Requests(requests))) } else { outcome }
    }

    /// The peer told its words; `floor` is what the same channel told before (F1, T5).
    fn hear(&mut self, words: FlowWords, floor: FlowWords) -> Result<(), ProtocolError> {
        self.tx.acknowledge(words, floor)?;
        self.credit.raise(self.tx.size(), words.credit, floor.credit)
    }

    #[inline(always)]
    fn take_in_request(&mut self, header: &Header, position: u64) -> Result<(), ProtocolError> {
        let ring = self.rx.size();
        let message = padded(u64::from(header.len));
        if message > ring.max_message() {
            return Err(ProtocolError::RequestTooLarge { padded: message, max: ring.max_message() });
        }
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        self.reservation.claim(ring, allowance)?;
        // An allowance is at most 3/16 of the largest ring.
        let internal_allowance = allowance as u32;
        self.rx.requests.push(HeldRequest { position, call_id: header.call_id, len: header.len, internal_allowance });
        Ok(())
    }

    /// The next request that arrived, in the order of the calls. As many come as [`Event::Requests`] said.
    #[inline]
    pub fn take_request(&mut self) -> Option<Request> {
        let (number, held) = self.rx.requests.take()?;
        Some(Request { number, payload: Payload::of_message(held.position, held.len), internal_allowance: held.internal_allowance })
    }

    #[inline(always)]
    fn take_response(&mut self, header: &Header, position: u64) -> Result<Option<Event<U>>, ProtocolError> {
        let status = Status::from_wire(header.piggyback).ok_or(ProtocolError::UnknownStatus(header.piggyback))?;
        let Some(answered) = self.calls.complete(CallId::from_wire(header.call_id)) else {
            self.stats.stale_responses += 1;
            return Ok(None);
        };
        let max = response_capacity(answered.internal_allowance);
        match answered.user_data {
            Some(user_data) if status == Status::Ok && u64::from(header.len) <= max => {
                Ok(Some(Event::Ended { user_data, outcome: Ok(Payload::of_message(position, header.len)) }))
            }
            user_data => self.take_other_response(user_data, status, header.len, max),
        }
    }

    /// A response without payload, late, or longer than its call allowed (T7), which ends that call with the connection.
    #[cold]
    #[inline(never)]
    fn take_other_response(&mut self, user_data: Option<U>, status: Status, len: u32, max: u64) -> Result<Option<Event<U>>, ProtocolError> {
        let error = ProtocolError::ResponseTooLarge { len, max };
        let is_too_large = u64::from(len) > max;
        let Some(user_data) = user_data else {
            self.stats.late_responses += 1;
            return if is_too_large { Err(error) } else { Ok(None) };
        };
        let failure = match status {
            Status::Dropped if !is_too_large => CallFailure::Dropped,
            Status::Refused if !is_too_large => CallFailure::Refused,
            Status::Closing if !is_too_large => CallFailure::Closed(CloseReason::ClosedByPeer),
            // A payload that fits is not for this function.
            _ => {
                self.close(error.into());
                CallFailure::Closed(error.into())
            }
        };
        Ok(Some(Event::Ended { user_data, outcome: Err(failure) }))
    }
}
