//! Requests: found in active zones, checked once, queued for the workers.

use super::zones::ActiveZone;
use super::{ReplyMode, Server, ServerOp};
use crate::protocol::config::Layout;
use crate::protocol::mapping::ClientId;
use crate::protocol::memory::Memory;
use crate::protocol::request::Request;
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, Status, Trailer, ZoneId, valid};

/// An accepted request, still in its zone, without a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Queued {
    request: Request,
    zone: ZoneId,
}

#[cfg(test)]
impl Queued {
    /// Its zone, unless that was freed with its client.
    pub(super) fn zone_if_current<M: Memory>(&self, server: &Server<M>) -> Option<ZoneId> {
        server.record_of(&self.request).map(|_| self.zone)
    }
}

impl<M: Memory> Server<M> {
    /// Accepts what arrived in the zones of the slice.
    pub(super) fn accept_active(&mut self) {
        let Layout { depth, slot_bytes, .. } = self.layout;
        let mut first = 0;
        while first < self.active_at.len() {
            let Some((nth, slot)) = self.memory.pools.find(&self.active_at[first..], slot_bytes, depth) else { return };
            self.accept_zone(first + nth, slot);
            first += nth + 1;
        }
    }

    /// Accepts what arrived in an active zone, from a slot on.
    pub(super) fn accept_zone(&mut self, nth: usize, first: usize) {
        let Layout { depth, slot_bytes, .. } = self.layout;
        let (zone, start) = (self.active[nth], self.active_at[nth]);
        for slot in first..depth {
            let trailer_at = start + slot * slot_bytes;
            let word = self.memory.pools.load(trailer_at);
            if word != 0 {
                self.accept_slot(zone, slot, trailer_at, word);
            }
        }
    }

    fn accept_slot(&mut self, ActiveZone { client, zone, .. }: ActiveZone, slot: usize, trailer_at: usize, word: u64) {
        let nth = client.index() * self.layout.depth + slot;
        let trailer = Trailer::from_word(word);
        let last = self.accepted[nth];
        if trailer.valid == valid(last) {
            self.memory.pools.exchange(trailer_at, word, 0);
            self.stats.duplicates += 1;
            return;
        }
        let id = ReqId { slot: slot as u8, sequence: last.wrapping_add(1) };
        let request = self.check(client, trailer_at, id, trailer);
        // Before the reply, after which the client may write here again (S3).
        self.memory.pools.exchange(trailer_at, word, 0);
        let Some(header) = request else {
            self.stats.garbage += 1;
            return;
        };
        let Some(record) = self.clients[client.index()].as_mut() else { return };
        self.accepted[nth] = id.sequence;
        record.requests += 1;
        record.bytes += u64::from(trailer.len);
        let RequestHeader { rpc_type, payload_len: len, .. } = header;
        let request = Request { client, generation: record.generation, id, rpc_type, len, buffer: None };
        self.dispatch.push_back(Queued { request, zone });
        self.zone_mut(zone).queued += 1;
        self.stats.accepted += 1;
    }

    /// S1, S2. The header, if everything about the message is as it must be.
    fn check(&self, client: ClientId, trailer_at: usize, id: ReqId, trailer: Trailer) -> Option<RequestHeader> {
        let len = trailer.len as usize;
        if trailer.valid != valid(id.sequence) || !(HEADER_BYTES..=self.layout.trailer_at()).contains(&len) {
            return None;
        }
        let mut bytes = [0; HEADER_BYTES];
        self.memory.pools.read(trailer_at - len, &mut bytes);
        let header = RequestHeader::decode(&bytes).ok()?;
        let regions = &self.client(client)?.regions;
        let slot_addr = regions.responses_addr.wrapping_add(self.layout.client_slot(usize::from(id.slot)) as u64);
        let is_good = header.payload_len as usize == len - HEADER_BYTES
            && header.req_id == id.to_wire()
            && header.client_slot_addr == slot_addr
            && header.client_slot_rkey == regions.responses_rkey;
        is_good.then_some(header)
    }

    /// The oldest accepted request; as much of its payload as fits is copied to `into`, which should have
    /// [`max_payload`](crate::Layout::max_payload) bytes. `None` if there is none, or no buffer for its response: one that is written makes room.
    ///
    /// Requests of types that are marked long go to the legacy lane instead; if that is full they are answered, through `out`.
    #[inline]
    pub fn take(&mut self, into: &mut [u8], now_ns: u64, out: &mut Vec<ServerOp>) -> Option<Request> {
        let needs_buffer = self.layout.reply_mode == ReplyMode::ServerWrites;
        loop {
            if needs_buffer && self.buffers.free() == 0 {
                return None;
            }
            let Queued { mut request, zone } = self.dispatch.pop_front()?;
            if self.record_of(&request).is_none() {
                // The client is gone, and its zone was freed with it.
                continue;
            }
            let (payload, len) = (request.len(), request.len().min(into.len()));
            let end = self.layout.pool_slot(zone, usize::from(request.id.slot)) + self.layout.trailer_at();
            self.memory.pools.read(end - payload, &mut into[..len]);
            self.unpin(zone);
            request.buffer = if needs_buffer { self.buffers.allocate() } else { None };
            if !self.long_types.contains(request.rpc_type) {
                return Some(request);
            }
            self.divert(request, &into[..len], now_ns, out);
        }
    }

    /// Puts a request into the legacy lane, or says that it is full.
    #[cold]
    fn divert(&mut self, request: Request, payload: &[u8], now_ns: u64, out: &mut Vec<ServerOp>) {
        self.stats.legacy += 1;
        if !self.legacy.push(request.clone(), payload) {
            // An empty payload is never too large.
            let _answered = self.reply(request, Err(Status::Busy), now_ns, out);
        }
    }

    /// The oldest request of the legacy lane; as [`take`](Self::take).
    #[inline]
    pub fn take_legacy(&mut self, into: &mut [u8]) -> Option<Request> {
        self.legacy.pop(into)
    }

    /// Accepted requests that no worker has taken.
    #[inline]
    #[must_use]
    pub fn queued(&self) -> usize {
        self.dispatch.len()
    }
}
