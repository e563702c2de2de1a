//! Calls: how they are made and ended, and when their slots become free.

use super::{Client, ClientOp, State};
use crate::protocol::bits;
use crate::protocol::error::{CallFailure, CloseReason};
use crate::protocol::memory::Memory;
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, TRAILER_BYTES, Trailer, valid};

/// The name of a call until its completion is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallToken(pub(crate) ReqId);

/// The end of a call: the payload bytes of the response, or the reason why there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The call that has ended.
    pub call: CallToken,
    /// Payload bytes of the response, or the failure.
    pub outcome: Result<usize, CallFailure>,
}

/// The last call that used a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) sequence: u32,
    /// Bytes of the message, trailer included.
    pub(super) len: u32,
    /// Whether the call was announced or written, so that the server may have it.
    pub(super) is_offered: bool,
    pub(super) deadline_ns: u64,
    /// The outcome of the call, once it has ended.
    pub(super) outcome: Result<usize, CallFailure>,
}

impl Call {
    /// The call of a slot that was never used.
    pub(super) const NONE: Self = Self {
        sequence: 0,
        len: 0,
        is_offered: false,
        deadline_ns: 0,
        outcome: Err(CallFailure::NotSent),
    };
}

impl<M: Memory> Client<M> {
    /// Makes a call (AsyncCall of the ScaleRPC paper). In PROCESS the request is sent at once;
    /// otherwise it waits in its slot until the server fetches it. The call ends in
    /// [`poll_completion`](Self::poll_completion), no later than at its timeout if the client is
    /// polled.
    ///
    /// # Errors
    /// [`CallFailure`]; nothing was done.
    #[inline(always)]
    pub fn call(
        &mut self,
        rpc_type: u16,
        payload: &[u8],
        now_ns: u64,
        out: &mut Vec<ClientOp>,
    ) -> Result<CallToken, CallFailure> {
        if let State::Closed(_) = self.state {
            return Err(CallFailure::NotSent);
        }
        let max = self.layout.max_payload();
        if payload.len() > max {
            return Err(CallFailure::TooLarge {
                len: payload.len(),
                max,
            });
        }
        // The slot is 64 if none is free.
        let slot = self.free.trailing_zeros() as usize;
        let call = self.calls.get_mut(slot).ok_or(CallFailure::Full)?;
        self.free &= self.free - 1;
        let sequence = call.sequence.wrapping_add(1);
        let id = ReqId::of(slot, sequence);
        let len = (HEADER_BYTES + payload.len() + TRAILER_BYTES) as u32;
        let deadline_ns = now_ns.saturating_add(self.timeout_ns);
        let is_offered = matches!(self.state, State::Process { .. });
        call.sequence = sequence;
        call.len = len;
        call.is_offered = is_offered;
        call.deadline_ns = deadline_ns;
        let start = self.layout.client_slot(slot);
        let header = RequestHeader {
            rpc_type,
            req_id: id.to_wire(),
            client_slot_addr: self.responses_addr.wrapping_add(start as u64),
            client_slot_rkey: self.responses_rkey,
            payload_len: payload.len() as u32,
        };
        let trailer = Trailer {
            len: len - TRAILER_BYTES as u32,
            valid: valid(sequence),
        };
        self.memory.requests.put_message(
            start + self.layout.trailer_at(),
            &header.encode(),
            payload,
            trailer.to_word(),
        );
        self.pending |= 1 << slot;
        self.fresh |= 1 << slot;
        self.expire_ns = self.expire_ns.min(deadline_ns);
        self.stats.calls += 1;
        if is_offered {
            out.push(self.write_request(start, len));
        }
        Ok(CallToken(id))
    }

    /// Gives a call under way another deadline, in ns.
    pub(crate) fn end_at(&mut self, call: CallToken, deadline_ns: u64) {
        let waits = self.pending & !self.quarantined;
        let slot = usize::from(call.0.slot);
        if let Some(entry) = self.calls.get_mut(slot)
            && entry.sequence == call.0.sequence
            && waits >> slot & 1 != 0
        {
            entry.deadline_ns = deadline_ns;
            self.expire_ns = self.expire_ns.min(deadline_ns);
        }
    }

    /// Takes the next call that has ended (PollCompletion of the ScaleRPC paper). Copies as much of
    /// its response's payload as fits to `into`.
    #[inline]
    pub fn poll_completion(&mut self, into: &mut [u8]) -> Option<Completion> {
        if self.ended == 0 {
            self.ended = std::mem::take(&mut self.ended_later);
        }
        // The slot is 64 if no call has ended.
        let slot = self.ended.trailing_zeros() as usize;
        let call = self.calls.get_mut(slot)?;
        self.ended &= self.ended - 1;
        let completion = Completion {
            call: CallToken(ReqId::of(slot, call.sequence)),
            outcome: call.outcome,
        };
        match completion.outcome {
            Ok(len) => {
                let at = self.layout.client_slot(slot) + self.layout.trailer_at() - len;
                let copied = len.min(into.len());
                self.memory.responses.read(at, &mut into[..copied]);
            }
            // The server has not seen the sequence number, and accepts only the number after the
            // last, so the next call of the slot uses it (S22).
            Err(_) if !call.is_offered => call.sequence = call.sequence.wrapping_sub(1),
            Err(_) => {}
        }
        // The slot of a timed-out call is free only after its response (S14 of docs/scalerpc.md).
        if self.pending >> slot & 1 == 0 {
            self.free_slot(slot);
        }
        Some(completion)
    }

    /// Takes the outcome of the call of `slot`. No response to the call will arrive after this: its
    /// response has arrived in the response slot of the same number (S13), or its request was never
    /// offered. If the call itself ended before, only the quarantine of its slot ends.
    #[inline(always)]
    pub(super) fn end_call(&mut self, slot: usize, outcome: Result<usize, CallFailure>) {
        self.pending &= !(1 << slot);
        if self.quarantined >> slot & 1 == 0 {
            self.push_ended(slot, outcome)
        } else {
            self.end_quarantine(slot)
        }
    }

    /// Takes the response to a call that has ended.
    #[cold]
    fn end_quarantine(&mut self, slot: usize) {
        self.quarantined &= !(1 << slot);
        // Makes the poll that takes this response report to the server that the slot's call is not
        // given up any more, before the next call of the slot.
        self.expire_ns = 0;
        // If the end of the slot's call was not taken yet, `poll_completion` frees the slot.
        if (self.ended | self.ended_later) >> slot & 1 == 0 {
            self.free_slot(slot);
        }
    }

    #[inline(always)]
    fn push_ended(&mut self, slot: usize, outcome: Result<usize, CallFailure>) {
        self.calls[slot].outcome = outcome;
        self.ended_later |= 1 << slot;
    }

    /// Ends the calls whose time is over, and reports to the server that they are given up. Their
    /// slots wait for the response (S14), unless the request was never offered.
    #[cold]
    pub(super) fn expire(&mut self, now_ns: u64, out: &mut Vec<ClientOp>) {
        self.expire_ns = u64::MAX;
        for slot in bits(self.pending & !self.quarantined) {
            let Call {
                deadline_ns,
                is_offered,
                ..
            } = self.calls[slot];
            if deadline_ns > now_ns {
                self.expire_ns = self.expire_ns.min(deadline_ns);
                continue;
            }
            if is_offered {
                self.quarantined |= 1 << slot;
                self.push_ended(slot, Err(CallFailure::TimedOut));
            } else {
                self.end_call(slot, Err(CallFailure::NotSent));
            }
        }
        self.tell_given_up(out);
    }

    /// Ends all calls. No slot is used again.
    pub(super) fn fail_all(&mut self, reason: CloseReason) {
        for slot in bits(std::mem::take(&mut self.pending) & !self.quarantined) {
            // A server that stops has answered every request that a handler got (S27).
            let may_have_run = self.calls[slot].is_offered && reason != CloseReason::ServerStopped;
            let failure = if may_have_run {
                CallFailure::Closed(reason)
            } else {
                CallFailure::NotSent
            };
            self.push_ended(slot, Err(failure));
        }
    }

    /// Frees a slot that holds no call and no response. A slot of the open announcement becomes
    /// free when the announcement is closed (S6).
    fn free_slot(&mut self, slot: usize) {
        if self.lent >> slot & 1 != 0 {
            return self.free_later(slot);
        }
        self.free |= 1 << slot;
    }

    #[cold]
    const fn free_later(&mut self, slot: usize) {
        self.lent_free |= 1 << slot;
    }

    /// Takes the lent slots back: the announcement is closed, so the server no longer READs them.
    pub(super) fn take_back_slots(&mut self) {
        self.lent = 0;
        self.free |= std::mem::take(&mut self.lent_free);
    }

    /// Returns the time, in ns, at which [`poll`](Self::poll) has something to do without an
    /// arrival.
    pub fn next_event_ns(&self) -> Option<u64> {
        bits(self.pending & !self.quarantined)
            .map(|slot| self.calls[slot].deadline_ns)
            .min()
    }
}
