//! Responses and events: found in memory that the server writes, checked, and processed.

use super::{Client, ClientOp, State};
use crate::protocol::bits;
use crate::protocol::error::{CallFailure, CloseReason, ProtocolError};
use crate::protocol::memory::Memory;
use crate::protocol::wire::{
    EVENT_SLOT_BYTES, EVENT_SLOTS, Event, HEADER_BYTES, ReqId, ResponseHeader, Status,
    TRAILER_BYTES, Trailer, ZoneId, valid,
};

/// The newest events that one poll found.
#[derive(Clone, Copy, Debug, Default)]
struct Events {
    activate: Option<(u64, u16)>,
    switch: Option<u64>,
    is_closed: bool,
}

impl Events {
    /// Records a close. Records any other event if its slice is later than the last slice that
    /// ended for this client (S11 of docs/scalerpc.md).
    fn add(&mut self, event: Option<Event>, closed_epoch: u64) {
        match event {
            Some(Event::Activate { epoch, zone }) if epoch > closed_epoch => {
                self.activate = Some((epoch, zone))
            }
            Some(Event::Switch { epoch }) if epoch > closed_epoch => self.switch = Some(epoch),
            Some(Event::Close) => self.is_closed = true,
            _ => {}
        }
    }
}

impl<M: Memory> Client<M> {
    /// Takes responses and events. Responses come first, so that an announcement offers only
    /// unanswered requests. The slot of activations is read after the responses and the slot of
    /// switches: an activation is posted before everything else of its slice. So a poll that finds
    /// something of a slice also finds the activation of the slice, and clears it (S12).
    #[inline(always)]
    pub(super) fn take_arrivals(&mut self, out: &mut Vec<ClientOp>) -> Result<(), ProtocolError> {
        let fresh = std::mem::take(&mut self.fresh);
        let unposted = if out.is_empty() { 0 } else { fresh };
        let mut slots = self.pending & !unposted;
        while slots != 0 {
            if !self.take_plain(slots.trailing_zeros() as usize) {
                return self.take_events(slots, out);
            }
            slots &= slots - 1;
        }
        let trailers = [self.layout.activate_slot() + EVENT_SLOT_BYTES - TRAILER_BYTES];
        self.memory
            .responses
            .find(&trailers, EVENT_SLOT_BYTES, EVENT_SLOTS)
            .map_or(Ok(()), |_| self.take_events(0, out))
    }

    /// Takes the response of a slot if it is plain ([`ResponseHeader::is_plain`]). Returns `false`
    /// if something else has arrived.
    #[inline(always)]
    fn take_plain(&mut self, slot: usize) -> bool {
        let trailer_at = self.layout.client_slot(slot) + self.layout.trailer_at();
        let trailer = Trailer::from_word(self.memory.responses.load(trailer_at));
        let sequence = self.calls[slot].sequence;
        // With another value the slot is empty, or has the response to an earlier call (S15).
        if trailer.valid != valid(sequence) {
            return true;
        }
        let (len, id) = (trailer.len as usize, ReqId::of(slot, sequence).to_wire());
        // Of a length below that of the header, the difference wraps, and is above the maximum.
        let payload_len = len.wrapping_sub(HEADER_BYTES);
        let is_plain = payload_len <= self.layout.max_payload()
            && (self.memory.responses.header(trailer_at - len))
                .is_some_and(|bytes| ResponseHeader::is_plain(&bytes, id, payload_len as u32));
        if is_plain {
            self.end_call(slot, Ok(payload_len));
        }
        is_plain
    }

    fn take_responses(&mut self, slots: u64, events: &mut Events) -> Result<(), ProtocolError> {
        bits(slots).try_for_each(|slot| self.take_response(slot, events))
    }

    /// Takes the responses of `slots`, then bare events. Processes these, and the events that the
    /// responses carried.
    #[cold]
    #[inline(never)]
    fn take_events(&mut self, slots: u64, out: &mut Vec<ClientOp>) -> Result<(), ProtocolError> {
        let mut events = Events::default();
        self.take_responses(slots, &mut events)?;
        for start in [
            self.layout.switch_slot(),
            self.layout.activate_slot(),
            self.layout.close_slot(),
        ] {
            self.take_bare_event(start, &mut events)?;
        }
        if events.is_closed {
            // All responses that will ever arrive have arrived (S27). Some of them may have arrived
            // after the slots were read, so the slots are read again.
            self.take_responses(self.pending, &mut events)?;
            self.close(CloseReason::ServerStopped);
            return Ok(());
        }
        if let Some((epoch, zone)) = events.activate {
            if usize::from(zone) >= self.layout.zones {
                return Err(ProtocolError::Zone(zone));
            }
            if self.state != State::Warmup {
                return Err(ProtocolError::Event);
            }
            // After the slice the server may have taken the zone back (S26), so the client must not
            // write into the zone.
            if events.switch != Some(epoch) {
                self.activate(epoch, ZoneId::of(epoch, zone), out);
            }
        }
        let Some(epoch) = events.switch else {
            return Ok(());
        };
        match self.state {
            State::Warmup => self.switch(epoch, out),
            State::Process { epoch: current, .. } if epoch == current => self.switch(epoch, out),
            _ => return Err(ProtocolError::Event),
        }
        Ok(())
    }

    /// Takes the response of a slot, if it has arrived, whether it is plain or not.
    fn take_response(&mut self, slot: usize, events: &mut Events) -> Result<(), ProtocolError> {
        let trailer_at = self.layout.client_slot(slot) + self.layout.trailer_at();
        let trailer = Trailer::from_word(self.memory.responses.load(trailer_at));
        let id = ReqId::of(slot, self.calls[slot].sequence);
        if trailer.valid != valid(id.sequence) {
            return Ok(());
        }
        let len = trailer.len as usize;
        let bytes = (HEADER_BYTES..=self.layout.trailer_at())
            .contains(&len)
            .then(|| self.memory.responses.header(trailer_at - len));
        let Some(bytes) = bytes.flatten() else {
            return Err(ProtocolError::Length(trailer.len));
        };
        let header = ResponseHeader::decode(&bytes).ok_or(ProtocolError::Malformed)?;
        if header.req_id != id.to_wire() {
            return Err(ProtocolError::ReqId(header.req_id));
        }
        if header.payload_len as usize != len - HEADER_BYTES {
            return Err(ProtocolError::Length(header.payload_len));
        }
        events.add(header.event, self.closed_epoch);
        let outcome = match header.status {
            Status::Ok => Ok(header.payload_len as usize),
            Status::UnknownType => Err(CallFailure::UnknownType),
            Status::Refused => Err(CallFailure::Refused),
            Status::ReplyTooLong => Err(CallFailure::ReplyTooLong { len: None }),
            Status::Dropped => Err(CallFailure::Dropped),
        };
        self.end_call(slot, outcome);
        Ok(())
    }

    fn take_bare_event(&mut self, start: usize, events: &mut Events) -> Result<(), ProtocolError> {
        let trailer_at = start + EVENT_SLOT_BYTES - TRAILER_BYTES;
        let word = self.memory.responses.load(trailer_at);
        if word == 0 {
            return Ok(());
        }
        self.memory.responses.store(trailer_at, 0);
        let trailer = Trailer::from_word(word);
        if trailer.len as usize != HEADER_BYTES {
            return Err(ProtocolError::Length(trailer.len));
        }
        let bytes = self.memory.responses.header(trailer_at - HEADER_BYTES);
        let header = bytes
            .and_then(|bytes| ResponseHeader::decode(&bytes))
            .ok_or(ProtocolError::Malformed)?;
        let epoch = match header.event {
            Some(Event::Activate { epoch, .. } | Event::Switch { epoch }) => epoch,
            Some(Event::Close) => 0,
            None => return Err(ProtocolError::Malformed),
        };
        if header.req_id != 0 || trailer.valid != valid(epoch as u32) {
            return Err(ProtocolError::Malformed);
        }
        events.add(header.event, self.closed_epoch);
        Ok(())
    }
}
