//! The life of a zone: warming, active, ended, draining, free. The table of these states is in
//! `docs/scalerpc.md`.

use super::{Server, ServerOp};
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientId, ClientRegions};
use crate::protocol::wire::{
    EVENT_SLOT_BYTES, Event, HEADER_BYTES, ResponseHeader, Status, TRAILER_BYTES, Trailer, ZoneId,
    valid,
};

/// Part of a slice for which an ended zone waits for a response that carries *switch*: a tenth.
const EVENT_DIVISOR: u64 = 10;

/// Fraction of a slice after which a client that was sent *switch* and has not answered is asked
/// whether it rests: a half.
const ASK_DIVISOR: u64 = 2;

/// Maximum number of clients of the next group that a poll warms. A fetch of a context delays
/// everything that the NIC sends after it. So the READs of a group are spread over the responses of
/// many polls, and do not delay the responses as one burst. Clients of the current group are warmed
/// without this limit.
const WARM_PER_POLL: usize = 1;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum ZoneState {
    #[default]
    Free,
    /// READs of the announced requests are under way.
    Warming,
    /// The READs are complete, and the slice of the zone has not begun.
    Ready,
    Active,
    /// The slice of the zone is over. *switch* was not sent to the client yet; it is sent at
    /// `event_by_ns` at the latest.
    Ended {
        event_by_ns: u64,
    },
    /// *switch* was sent to the client. The client is asked at `ask_ns` whether it rests
    /// (`u64::MAX`: it was asked already), and is evicted at `evict_ns`.
    Draining {
        ask_ns: u64,
        evict_ns: u64,
    },
    /// The client did not answer, and its eviction was requested; or the server closed while READs
    /// were under way.
    Quarantined,
}

/// A zone whose client may write into it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ActiveZone {
    pub(super) zone: ZoneId,
    pub(super) client: ClientId,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Zone {
    pub(super) state: ZoneState,
    /// The client that has the zone; `None` only if the zone is free.
    pub(super) client: Option<ClientId>,
    pub(super) epoch: u64,
    /// Number of accepted requests in the zone that no worker has copied out.
    pub(super) queued: u32,
    /// Whether *activate* was sent to the client.
    pub(super) knows_activation: bool,
    /// Whether the release was taken. The zone is kept while `queued` is not 0.
    is_released: bool,
}

impl Zone {
    /// Returns whether a client has the zone for the slice of `epoch`, and the zone has not ended.
    pub(super) const fn is_of(&self, epoch: u64) -> bool {
        self.epoch == epoch
            && matches!(
                self.state,
                ZoneState::Warming | ZoneState::Ready | ZoneState::Active
            )
    }

    /// Returns whether the zone awaits the release of the epoch whose low 32 bits are `epoch`.
    pub(super) const fn awaits_release(&self, epoch: u32) -> bool {
        self.epoch as u32 == epoch
            && !self.is_released
            && matches!(
                self.state,
                ZoneState::Draining { .. } | ZoneState::Quarantined
            )
    }

    /// Returns whether the client was asked whether it rests, and has not answered by a release.
    pub(super) const fn awaits_answer(&self) -> bool {
        matches!(
            self.state,
            ZoneState::Draining {
                ask_ns: u64::MAX,
                ..
            }
        ) && !self.is_released
    }

    /// Returns whether an event is due that the client was not sent.
    pub(super) const fn owes_event(&self) -> bool {
        match self.state {
            ZoneState::Active => !self.knows_activation,
            ZoneState::Ended { .. } => true,
            _ => false,
        }
    }

    /// Returns whether it is time to send a bare event to the client, to ask it, or to evict it.
    const fn is_due(&self, now_ns: u64) -> bool {
        match self.state {
            ZoneState::Active => !self.knows_activation && self.queued == 0,
            ZoneState::Ended { event_by_ns } => self.queued == 0 || now_ns >= event_by_ns,
            ZoneState::Draining { .. } => {
                matches!(self.remind_ns(), Some(remind_ns) if now_ns >= remind_ns)
            }
            _ => false,
        }
    }

    /// Returns the time at which the client is asked or evicted, in ns, unless its release is taken
    /// before.
    pub(super) const fn remind_ns(&self) -> Option<u64> {
        match self.state {
            ZoneState::Draining { ask_ns, evict_ns } if !self.is_released => {
                Some(if ask_ns < evict_ns { ask_ns } else { evict_ns })
            }
            _ => None,
        }
    }

    #[cfg(test)]
    pub(super) const fn deadline_ns(&self) -> Option<u64> {
        match self.state {
            ZoneState::Ended { event_by_ns } => Some(event_by_ns),
            _ => self.remind_ns(),
        }
    }
}

impl<M: Memory> Server<M> {
    /// Gives zones to waiting clients: of the current group for this slice, and of the next group
    /// for the next slice. READs the announced requests of these clients.
    #[inline(never)]
    pub(super) fn warm(&mut self, out: &mut Vec<ServerOp>) {
        let epoch = self.scheduler.epoch();
        if epoch == 0 || self.waiters == 0 {
            return;
        }
        let next = self.scheduler.next().map(|group| (group, epoch + 1));
        for (group, epoch) in [Some((self.scheduler.current(), epoch)), next]
            .into_iter()
            .flatten()
        {
            let len = self.groups.clients(group).len();
            let mut left = if epoch == self.scheduler.epoch() {
                len
            } else {
                WARM_PER_POLL
            };
            for nth in 0..len {
                // Begins with a different client in each slice: otherwise a lack of zones would
                // always affect the same clients.
                let client = self.groups.clients(group)[(nth + epoch as usize) % len];
                left -= usize::from(self.warm_client(client, epoch, out));
                if left == 0 {
                    break;
                }
            }
        }
    }

    /// Assigns a zone to a client that waits. Returns whether it assigned one.
    fn warm_client(&mut self, client: ClientId, epoch: u64, out: &mut Vec<ServerOp>) -> bool {
        let Some(record) = self
            .clients
            .get_mut(client.index())
            .and_then(Option::as_mut)
        else {
            return false;
        };
        let Some(announcement) = record.waiting.filter(|_| record.zone.is_none()) else {
            return false;
        };
        let Some(place) = self.pools[(epoch % 2) as usize].pop() else {
            return false;
        };
        let (regions, zone) = (record.regions, ZoneId::of(epoch, place));
        (record.waiting, record.zone) = (None, Some(zone));
        self.waiters -= 1;
        self.busy.push(zone);
        *self.zone_mut(zone) = Zone {
            state: ZoneState::Warming,
            client: Some(client),
            epoch,
            ..Zone::default()
        };
        for slot in 0..self.layout.depth {
            self.memory.pools.store(
                self.layout.pool_slot(zone, slot) + self.layout.trailer_at(),
                0,
            );
            if announcement.slots >> slot & 1 != 0 {
                let skipped = self.layout.slot_bytes - announcement.longest as usize;
                self.stats.reads += 1;
                out.push(ServerOp::Read {
                    client,
                    addr: regions
                        .requests_addr
                        .wrapping_add((self.layout.client_slot(slot) + skipped) as u64),
                    rkey: regions.requests_rkey,
                    into: self.layout.pool_slot(zone, slot) + skipped,
                    len: announcement.longest,
                    is_last: announcement.slots >> slot == 1,
                });
            }
        }
        true
    }

    /// Takes the successful completion of the last READ for a client's announcement. This
    /// completion implies the completions of the READs before. A failed READ ends the client: its
    /// queue pair is in error.
    pub fn on_reads_done(&mut self, client: ClientId, now_ns: u64) {
        let Some(id) = self.zone_of(client) else {
            return;
        };
        let epoch = self.scheduler.epoch();
        let zone = self.zone_mut(id);
        if zone.state != ZoneState::Warming {
            return;
        }
        if zone.epoch == epoch + 1 {
            zone.state = ZoneState::Ready;
            return;
        }
        let is_late = zone.epoch != epoch;
        self.begin_zone(id);
        if is_late {
            self.remove_active(id);
            self.end_zone(id, now_ns);
        }
    }

    /// Makes a zone active after its READs, and accepts the requests that they returned.
    fn begin_zone(&mut self, zone: ZoneId) {
        let Some(client) = self.zone(zone).client else {
            return;
        };
        self.zone_mut(zone).state = ZoneState::Active;
        self.owed += 1;
        self.active.push(ActiveZone { zone, client });
        self.active_at
            .push(self.layout.pool_slot(zone, 0) + self.layout.trailer_at());
        if let Some((nth, slot)) = self.find_request(self.active.len() - 1) {
            self.accept_zone(nth, slot);
        }
    }

    fn remove_active(&mut self, zone: ZoneId) {
        if let Some(nth) = self.active.iter().position(|active| active.zone == zone) {
            self.active.remove(nth);
            self.active_at.remove(nth);
        }
    }

    /// Does the context switch: the scheduler has begun a slice. Does not wait for clients that
    /// have not released their zones, nor for READs that are under way (S18).
    pub(super) fn switch(&mut self, now_ns: u64) {
        self.stats.slices += 1;
        let epoch = self.scheduler.epoch();
        while let Some(active) = self.active.pop() {
            self.end_zone(active.zone, now_ns);
        }
        self.active_at.clear();
        for nth in 0..self.busy.len() {
            let id = self.busy[nth];
            if self.zone(id).state == ZoneState::Ready && self.zone(id).epoch == epoch {
                self.begin_zone(id);
            }
        }
    }

    /// Ends the slice of an active zone. The caller takes the zone off the list of active zones.
    fn end_zone(&mut self, zone: ZoneId, now_ns: u64) {
        let event_by_ns = now_ns.saturating_add(self.slice_ns / EVENT_DIVISOR);
        let owed = self.zone(zone).owes_event();
        self.zone_mut(zone).state = ZoneState::Ended { event_by_ns };
        self.owed += usize::from(!owed);
    }

    /// Returns the event that a response to the client carries, if any, and counts it as sent.
    pub(super) fn event_for(&mut self, client: ClientId, now_ns: u64) -> Option<Event> {
        let id = self.zone_of(client)?;
        let ask_ns = now_ns.saturating_add((self.slice_ns / ASK_DIVISOR).min(self.drain_ns / 2));
        let evict_ns = now_ns.saturating_add(self.drain_ns);
        let zone = self.zone_mut(id);
        let epoch = zone.epoch;
        match zone.state {
            ZoneState::Active if !zone.knows_activation => {
                zone.knows_activation = true;
                self.owed -= 1;
                Some(Event::Activate {
                    epoch,
                    zone: id.zone,
                })
            }
            ZoneState::Ended { .. } => {
                zone.state = ZoneState::Draining { ask_ns, evict_ns };
                self.owed -= 1;
                self.remind_ns = self.remind_ns.min(ask_ns);
                Some(Event::Switch { epoch })
            }
            _ => None,
        }
    }

    /// Sends the events that no response will carry in time. Asks clients that do not answer
    /// whether they rest, and evicts the clients that do not rest: only the end of its queue pair
    /// frees such a client's zone (S10).
    #[inline(never)]
    pub(super) fn send_events(&mut self, now_ns: u64, out: &mut Vec<ServerOp>) {
        let is_any_reminded = now_ns >= self.remind_ns;
        let mut first = 0;
        while let Some(nth) = self.busy[first..]
            .iter()
            .position(|zone| self.zone(*zone).is_due(now_ns))
        {
            let id = self.busy[first + nth];
            first += nth + 1;
            let Some(client) = self.zone(id).client else {
                continue;
            };
            if let ZoneState::Draining { ask_ns, .. } = self.zone(id).state {
                // The client's release may have arrived without being found: a poll checks only
                // some entries (S19), and a server that did other work has not polled for long.
                self.take_entry(client);
                if !self.zone(id).is_due(now_ns) {
                    // The place of a freed zone in the list now holds the next zone.
                    first -= usize::from(self.zone(id).state == ZoneState::Free);
                    continue;
                }
                if now_ns >= ask_ns {
                    self.ask(client, id, now_ns, out);
                    continue;
                }
                self.zone_mut(id).state = ZoneState::Quarantined;
                self.stats.evictions += 1;
                out.push(ServerOp::Evict { client });
            } else {
                self.write_event(client, now_ns, out);
            }
        }
        if is_any_reminded {
            self.remind_ns = self
                .busy
                .iter()
                .filter_map(|zone| self.zone(*zone).remind_ns())
                .min()
                .unwrap_or(u64::MAX);
        }
    }

    fn write_event(&mut self, client: ClientId, now_ns: u64, out: &mut Vec<ServerOp>) {
        let Some(event) = self.event_for(client, now_ns) else {
            return;
        };
        let Some(regions) = self.client(client).map(|record| record.regions) else {
            return;
        };
        self.stats.bare_events += 1;
        out.push(self.bare_event(client, regions, event));
    }

    /// Returns the WRITE of an event into the client's slot for events.
    pub(super) fn bare_event(
        &self,
        client: ClientId,
        regions: ClientRegions,
        event: Event,
    ) -> ServerOp {
        let (slot, epoch) = match event {
            Event::Activate { epoch, .. } => (self.layout.activate_slot(), epoch),
            Event::Switch { epoch } => (self.layout.switch_slot(), epoch),
            Event::Close => (self.layout.close_slot(), 0),
        };
        let header = ResponseHeader {
            status: Status::Ok,
            req_id: 0,
            payload_len: 0,
            event: Some(event),
        };
        let mut bytes = [0; HEADER_BYTES + TRAILER_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        let trailer = Trailer {
            len: HEADER_BYTES as u32,
            valid: valid(epoch as u32),
        };
        bytes[HEADER_BYTES..].copy_from_slice(&trailer.to_word().to_le_bytes());
        let addr = regions
            .responses_addr
            .wrapping_add((slot + EVENT_SLOT_BYTES - bytes.len()) as u64);
        ServerOp::WriteEvent {
            client,
            addr,
            rkey: regions.responses_rkey,
            bytes,
        }
    }

    /// Takes a release: the client writes nothing more into the zone.
    pub(super) fn release_zone(&mut self, zone: ZoneId) {
        self.zone_mut(zone).is_released = true;
        self.free_if_unused(self.layout.zone_place(zone));
    }

    /// Subtracts one accepted request from the count of the zone at `place`: the request was copied
    /// out of the zone. Frees the zone if it is released and the count is 0.
    pub(super) fn unpin(&mut self, place: usize) {
        self.zones[place].queued -= 1;
        self.free_if_unused(place);
    }

    fn free_if_unused(&mut self, place: usize) {
        let Zone {
            is_released,
            queued,
            epoch,
            ..
        } = self.zones[place];
        if is_released && queued == 0 {
            self.free_zone(ZoneId::of(epoch, (place % self.layout.zones) as u16));
        }
    }

    /// Frees a zone that no client writes into (S8).
    pub(super) fn free_zone(&mut self, id: ZoneId) {
        if let Some(record) = self
            .zone(id)
            .client
            .and_then(|client| self.clients[client.index()].as_mut())
        {
            record.zone = None;
        }
        self.owed -= usize::from(self.zone(id).owes_event());
        if self.zone(id).state == ZoneState::Active {
            self.remove_active(id);
        }
        *self.zone_mut(id) = Zone::default();
        self.busy.retain(|busy| *busy != id);
        self.pools[usize::from(id.pool)].push(id.zone);
    }
}
