//! Requests: found in active zones, checked once, queued for the workers.

use std::collections::VecDeque;

use super::zones::ZoneState;
use super::{ReplyMode, Server, ServerOp};
use crate::protocol::config::Layout;
use crate::protocol::mapping::ClientId;
use crate::protocol::memory::Memory;
use crate::protocol::request::Request;
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, Status, Trailer, ZoneId, valid};

/// An accepted request, still in its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Queued {
    client: ClientId,
    generation: u32,
    zone: ZoneId,
    id: ReqId,
    rpc_type: u16,
    len: usize,
}

#[cfg(test)]
impl Queued {
    /// Its zone, unless that was freed with its client.
    pub(super) fn zone_if_current<M: Memory>(&self, server: &Server<M>) -> Option<ZoneId> {
        server.client(self.client).filter(|record| record.generation == self.generation).map(|_| self.zone)
    }
}

impl<M: Memory> Server<M> {
    /// Accepts what arrived in the zones of the slice.
    pub(super) fn accept_active(&mut self) {
        let mut first = 0;
        while let Some((nth, slot)) = self.next_arrived(first) {
            self.accept_slots(self.busy[nth], Some(slot));
            first = nth + 1;
        }
    }

    /// The first active zone in `busy`, from place `first` on, that holds something, and the first slot of it that does.
    fn next_arrived(&self, first: usize) -> Option<(usize, usize)> {
        self.busy.iter().enumerate().skip(first).find_map(|(nth, zone)| {
            let slot = if self.zone(*zone).state == ZoneState::Active { self.arrived(*zone, 0) } else { None };
            slot.map(|slot| (nth, slot))
        })
    }

    /// The first slot of a zone, from `slot` on, that holds something.
    fn arrived(&self, zone: ZoneId, slot: usize) -> Option<usize> {
        let Layout { depth, slot_bytes, .. } = self.layout;
        let nth = self.memory.pools.find(self.layout.pool_slot(zone, slot) + self.layout.trailer_at(), slot_bytes, depth - slot)?;
        Some(slot + nth)
    }

    /// Accepts what arrived in a zone.
    pub(super) fn accept_zone(&mut self, zone: ZoneId) {
        self.accept_slots(zone, self.arrived(zone, 0));
    }

    /// The same; `next` is the first slot that holds something.
    fn accept_slots(&mut self, zone: ZoneId, mut next: Option<usize>) {
        let Some(client) = self.mapping.client(zone) else { return };
        while let Some(slot) = next {
            self.accept_slot(client, zone, slot);
            next = self.arrived(zone, slot + 1);
        }
    }

    fn accept_slot(&mut self, client: ClientId, zone: ZoneId, slot: usize) {
        let start = self.layout.pool_slot(zone, slot);
        let trailer_at = start + self.layout.trailer_at();
        let word = self.memory.pools.load(trailer_at);
        let nth = client.index() * self.layout.depth + slot;
        let trailer = Trailer::from_word(word);
        let last = self.accepted[nth];
        if trailer.valid == valid(last) {
            self.memory.pools.exchange(trailer_at, word, 0);
            self.stats.duplicates += 1;
            return;
        }
        let id = ReqId { slot: slot as u8, sequence: last.wrapping_add(1) };
        let request = self.check(client, start, id, trailer);
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
        let (generation, len) = (record.generation, header.payload_len as usize);
        self.dispatch.push_back(Queued { client, generation, zone, id, rpc_type: header.rpc_type, len });
        self.zone_mut(zone).queued += 1;
        self.stats.accepted += 1;
    }

    /// S1, S2. The header, if everything about the message is as it must be.
    fn check(&self, client: ClientId, start: usize, id: ReqId, trailer: Trailer) -> Option<RequestHeader> {
        let len = trailer.len as usize;
        if trailer.valid != valid(id.sequence) || !(HEADER_BYTES..=self.layout.trailer_at()).contains(&len) {
            return None;
        }
        let mut bytes = [0; HEADER_BYTES];
        self.memory.pools.read(start + self.layout.trailer_at() - len, &mut bytes);
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
    pub fn take(&mut self, into: &mut [u8], now_ns: u64, out: &mut VecDeque<ServerOp>) -> Option<Request> {
        for _ in 0..self.dispatch.len() {
            let needs_buffer = self.layout.reply_mode == ReplyMode::ServerWrites;
            if needs_buffer && self.buffers.free() == 0 {
                return None;
            }
            let queued = self.dispatch.pop_front()?;
            let is_current = self.client(queued.client).is_some_and(|record| record.generation == queued.generation);
            if !is_current {
                // The client is gone, and its zone was freed with it.
                continue;
            }
            let len = queued.len.min(into.len());
            let end = self.layout.pool_slot(queued.zone, usize::from(queued.id.slot)) + self.layout.trailer_at();
            self.memory.pools.read(end - queued.len, &mut into[..len]);
            self.unpin(queued.zone);
            let Queued { client, generation, id, rpc_type, len: payload, .. } = queued;
            let buffer = if needs_buffer { self.buffers.allocate() } else { None };
            let request = Request { client, generation, id, rpc_type, len: payload, buffer };
            if !self.long_types.contains(rpc_type) {
                return Some(request);
            }
            self.stats.legacy += 1;
            if !self.legacy.push(request.clone(), &into[..len]) {
                // An empty payload is never too large.
                let _answered = self.reply(request, Err(Status::Busy), now_ns, out);
            }
        }
        None
    }

    /// The oldest request of the legacy lane; as [`take`](Self::take).
    pub fn take_legacy(&mut self, into: &mut [u8]) -> Option<Request> {
        self.legacy.pop(into)
    }

    /// Accepted requests that no worker has taken.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.dispatch.len()
    }
}
