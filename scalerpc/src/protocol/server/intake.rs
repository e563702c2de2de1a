//! Requests: found in active zones, checked once, queued for the workers.

use super::zones::ActiveZone;
use super::{Server, ServerStats};
use crate::protocol::config::Layout;
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientRegions, Request};
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, Trailer, valid};

/// An accepted request, still in its zone, without a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Queued {
    pub(super) request: Request,
    /// Place of its zone ([`Layout::zone_place`]).
    pub(super) zone: usize,
    /// Offset of its trailer in the pools.
    trailer_at: usize,
}

impl<M: Memory> Server<M> {
    #[inline(always)]
    pub(super) fn accept_active(&mut self) {
        if let Some((nth, slot)) = self.find_request(0) {
            self.accept_zone(nth, slot);
            if nth + 1 < self.active.len() {
                self.accept_after(nth);
            }
        }
    }

    /// Accepts the requests that arrived in the active zones after number `nth`.
    #[inline(never)]
    fn accept_after(&mut self, mut nth: usize) {
        while let Some(found) = self.find_request(nth + 1) {
            nth = found.0;
            self.accept_zone(nth, found.1);
        }
    }

    /// Returns the first active zone, from number `first` on, with a request, and the request's slot.
    #[inline(always)]
    pub(super) fn find_request(&self, first: usize) -> Option<(usize, usize)> {
        let Layout {
            depth, slot_bytes, ..
        } = self.layout;
        let (nth, slot) =
            (self.memory.pools).find(self.active_at.get(first..)?, slot_bytes, depth)?;
        Some((first + nth, slot))
    }

    /// Accepts the requests that arrived in the active zone `nth`. The slots of the zone before
    /// slot `first` are empty.
    #[inline(never)]
    pub(super) fn accept_zone(&mut self, nth: usize, first: usize) {
        if self.taken == self.dispatch.len() {
            self.dispatch.clear();
            self.taken = 0;
        } else if self.taken > self.dispatch.len() / 2 {
            // Fewer requests are moved than were taken since the last time.
            self.forget_taken();
        }
        let Layout {
            depth, slot_bytes, ..
        } = self.layout;
        let (ActiveZone { zone, client }, start) = (self.active[nth], self.active_at[nth]);
        let Self {
            memory,
            clients,
            dispatch,
            layout,
            stats,
            ..
        } = self;
        let Some(record) = clients.get_mut(client.index()).and_then(Option::as_mut) else {
            return;
        };
        let zone = layout.zone_place(zone);
        let before = dispatch.len();
        memory
            .pools
            .each(start, slot_bytes, first, depth, |slot, word| {
                let trailer_at = start + slot * slot_bytes;
                let Some(last) = record.accepted.get_mut(slot) else {
                    return false;
                };
                let trailer = Trailer::from_word(word);
                let id = ReqId::of(slot, last.wrapping_add(1));
                let Some(rpc_type) = check(
                    &memory.pools,
                    layout,
                    &record.regions,
                    trailer_at,
                    id,
                    trailer,
                ) else {
                    remove(&memory.pools, stats, trailer_at, word, *last);
                    return false;
                };
                *last = id.sequence;
                let len = trailer.len - HEADER_BYTES as u32;
                let request = Request {
                    client,
                    generation: record.generation,
                    id,
                    rpc_type,
                    len,
                    buffer: None,
                };
                dispatch.push(Queued {
                    request,
                    zone,
                    trailer_at,
                });
                record.bytes += u64::from(trailer.len);
                // The message is removed before the reply, after which the client may write here
                // again (S3 of docs/scalerpc.md). Before the reply the client does not write here,
                // so nothing else is removed.
                true
            });
        let count = dispatch.len() - before;
        record.requests += count as u64;
        stats.accepted += count as u64;
        self.zones[zone].queued += count as u32;
    }

    /// Takes the oldest accepted request. Copies as much of its payload as fits to `into`, which
    /// should have [`max_payload`](crate::Layout::max_payload) bytes. Returns `None` if there is no
    /// request, or no free buffer for its response: a buffer becomes free when the WRITE of a
    /// response completes.
    pub fn take(&mut self, into: &mut [u8]) -> Option<Request> {
        let mut taken = None;
        self.take_then(into, |_, _, request| taken = Some(request.clone()));
        taken
    }

    /// Takes a request like [`take`](Self::take), and passes it to `then` with the copy of its
    /// payload. Returns whether there was one.
    #[inline(always)]
    pub(crate) fn take_then(
        &mut self,
        into: &mut [u8],
        then: impl FnOnce(&mut Self, &[u8], &Request),
    ) -> bool {
        let Some(queued) = self.dispatch.get(self.taken) else {
            return false;
        };
        let Some(buffer) = self.buffers.allocate() else {
            return false;
        };
        let len = queued.request.len as usize;
        let copied = len.min(into.len());
        let payload = &mut into[..copied];
        self.memory.pools.read(queued.trailer_at - len, payload);
        let request = Request {
            buffer: Some(buffer),
            ..queued.request.clone()
        };
        let zone = queued.zone;
        self.taken += 1;
        self.unpin(zone);
        then(self, payload, &request);
        true
    }

    /// Returns the number of accepted requests that no worker has taken.
    pub fn queued(&self) -> usize {
        self.dispatch.len() - self.taken
    }

    /// Returns the accepted requests that no worker has taken.
    pub(super) fn waiting(&self) -> &[Queued] {
        &self.dispatch[self.taken..]
    }

    /// Removes the requests that workers have taken.
    pub(super) fn forget_taken(&mut self) {
        self.dispatch.drain(..std::mem::take(&mut self.taken));
    }
}

/// Checks a message (S1, S2). Returns the request's type if everything is correct.
#[inline(always)]
fn check(
    pools: &impl Memory,
    layout: &Layout,
    regions: &ClientRegions,
    trailer_at: usize,
    id: ReqId,
    trailer: Trailer,
) -> Option<u16> {
    let len = trailer.len as usize;
    let payload_len = len.checked_sub(HEADER_BYTES)?;
    if trailer.valid != valid(id.sequence) || payload_len > layout.max_payload() {
        return None;
    }
    let expected = RequestHeader {
        rpc_type: 0,
        req_id: id.to_wire(),
        client_slot_addr: regions
            .responses_addr
            .wrapping_add(layout.client_slot(usize::from(id.slot)) as u64),
        client_slot_rkey: regions.responses_rkey,
        payload_len: payload_len as u32,
    };
    expected.type_if_equal(&pools.header(trailer_at - len)?)
}

/// Removes a message that is not a request, or was accepted before (S4), but not the first part of
/// a trailer (S1). `last` is the sequence number accepted last. Removes by an exchange, so that a
/// valid message that arrives meanwhile is not removed (S2).
#[cold]
fn remove(pools: &impl Memory, stats: &mut ServerStats, trailer_at: usize, word: u64, last: u32) {
    let trailer = Trailer::from_word(word);
    if !trailer.is_whole() {
        return;
    }
    pools.exchange(trailer_at, word, 0);
    let is_duplicate = trailer.valid == valid(last);
    let counter = if is_duplicate {
        &mut stats.duplicates
    } else {
        &mut stats.garbage
    };
    *counter += 1;
}
