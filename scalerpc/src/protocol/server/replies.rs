//! Responses: written into a buffer, with an event if one is due.

use super::{Server, ServerOp};
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientId, ClientRegions, Request};
use crate::protocol::wire::{
    Event, HEADER_BYTES, ResponseHeader, Status, TRAILER_BYTES, Trailer, valid,
};

impl<M: Memory> Server<M> {
    /// Answers a request that is not [held](Self::hold): with a payload, or with a status other
    /// than `Ok`. A payload that is larger than a slot becomes [`Status::ReplyTooLong`]. Returns
    /// `false` if the client has disconnected.
    pub fn reply(
        &mut self,
        request: &Request,
        outcome: Result<&[u8], Status>,
        now_ns: u64,
        out: &mut Vec<ServerOp>,
    ) -> bool {
        let (status, payload) = match outcome {
            Ok(payload) if payload.len() > self.layout.max_payload() => {
                (Status::ReplyTooLong, &[][..])
            }
            Ok(payload) => (Status::Ok, payload),
            Err(status) => (status, &[][..]),
        };
        self.answer(request, status, payload, || now_ns, out)
    }

    /// Ends a request that is not held; the caller then drops it. The payload must fit into a slot.
    /// Returns `false` if the client has disconnected. `clock` returns the time, in ns, which is
    /// needed only if events for clients are due.
    #[inline(always)]
    pub(crate) fn answer(
        &mut self,
        request: &Request,
        status: Status,
        payload: &[u8],
        clock: impl FnOnce() -> u64,
        out: &mut Vec<ServerOp>,
    ) -> bool {
        if self.owed > 0 {
            return self.answer_with_event(request, status, payload, clock(), out);
        }
        self.answer_with(request, status, payload, |_| None, out)
    }

    /// Ends a request like [`answer`](Self::answer), when clients are owed an event.
    #[cold]
    fn answer_with_event(
        &mut self,
        request: &Request,
        status: Status,
        payload: &[u8],
        now_ns: u64,
        out: &mut Vec<ServerOp>,
    ) -> bool {
        self.answer_with(
            request,
            status,
            payload,
            |server| server.event_for(request.client, now_ns),
            out,
        )
    }

    /// Ends a request. The response to a client that is connected carries the result of `event`.
    #[inline(always)]
    fn answer_with(
        &mut self,
        request: &Request,
        status: Status,
        payload: &[u8],
        event: impl FnOnce(&mut Self) -> Option<Event>,
        out: &mut Vec<ServerOp>,
    ) -> bool {
        let Request {
            client, id, buffer, ..
        } = *request;
        // A request that is held has no buffer: it must be resumed first.
        let Some(buffer) = buffer else { return false };
        let record = self
            .clients
            .get_mut(client.index())
            .and_then(Option::as_mut);
        let Some(record) = record.filter(|record| record.generation == request.generation) else {
            self.buffers.release(buffer);
            return false;
        };
        self.buffers.append(&mut record.responses, buffer);
        let ClientRegions {
            responses_addr,
            responses_rkey: rkey,
            ..
        } = record.regions;
        let event = event(self);
        let header = ResponseHeader {
            status,
            req_id: id.to_wire(),
            payload_len: payload.len() as u32,
            event,
        };
        // Buffer n, with 1 the first, ends at n times its length, with its trailer.
        let trailer_at = usize::from(buffer.get()) * self.layout.slot_bytes - TRAILER_BYTES;
        let len = HEADER_BYTES + payload.len();
        let trailer = Trailer {
            len: len as u32,
            valid: valid(id.sequence),
        };
        self.memory
            .responses
            .put_message(trailer_at, &header.encode(), payload, trailer.to_word());
        let at = self.layout.client_slot(usize::from(id.slot)) + self.layout.trailer_at() - len;
        out.push(ServerOp::WriteResponse {
            client,
            addr: responses_addr.wrapping_add(at as u64),
            rkey,
            from: trailer_at - len,
            len: (len + TRAILER_BYTES) as u32,
        });
        true
    }

    /// Frees the response buffer of a request that is answered much later, so that the request does
    /// not block others. The request must be [resumed](Self::resume) before it is
    /// [answered](Self::reply).
    pub fn hold(&mut self, request: &mut Request) {
        if let Some(buffer) = request.buffer.take() {
            self.buffers.release(buffer);
        }
    }

    /// Gives a request that was [held](Self::hold) a buffer for its response. Returns `false` if no
    /// buffer is free. A buffer becomes free when the WRITE of a response completes.
    pub fn resume(&mut self, request: &mut Request) -> bool {
        if request.buffer.is_none() {
            request.buffer = self.buffers.allocate();
            return request.buffer.is_some();
        }
        true
    }

    /// Frees the buffers of a client's `count` oldest responses under way, whose WRITEs have ended.
    #[inline]
    pub fn on_responses_done(&mut self, client: ClientId, count: u16) {
        if let Some(record) = self
            .clients
            .get_mut(client.index())
            .and_then(Option::as_mut)
        {
            self.buffers.release_oldest(&mut record.responses, count);
        }
    }
}
