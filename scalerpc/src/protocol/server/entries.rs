//! Endpoint entries: takes releases and announcements from memory that clients write.

use super::{SWEEP, Server};
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientId, Request};
use crate::protocol::wire::{
    Announcement, ENTRY_BYTES, HEADER_BYTES, Release, TRAILER_BYTES, Trailer, valid,
};

impl<M: Memory> Server<M> {
    /// Checks the entries of the current and the next group, and the next [`SWEEP`] entries of all
    /// clients (S19 of docs/scalerpc.md).
    #[inline(never)]
    pub(super) fn take_entries(&mut self) {
        // With at most `SWEEP` clients, the sweep below checks all clients.
        if self.clients.len() > SWEEP {
            for group in [Some(self.scheduler.current()), self.scheduler.next()]
                .into_iter()
                .flatten()
            {
                let mut first = 0;
                while let Some(nth) = self.groups.clients(group)[first..]
                    .iter()
                    .position(|client| self.is_written(*client))
                {
                    self.take_entry(self.groups.clients(group)[first + nth]);
                    first += nth + 1;
                }
            }
        }
        let end = self.clients.len().min(self.sweep + SWEEP);
        let trailers = [Release::TRAILER_AT, Announcement::TRAILER_AT];
        let halves = trailers.map(|trailer_at| self.sweep * ENTRY_BYTES + trailer_at);
        let mut first = 0;
        while let Some((nth, written)) =
            self.memory
                .entries
                .find(&halves[first..], ENTRY_BYTES, end - self.sweep)
        {
            for client in (self.sweep + written..end).map(|client| ClientId(client as u16)) {
                if self.is_written(client) {
                    self.take_entry(client);
                }
            }
            first += nth + 1;
        }
        self.sweep = if end == self.clients.len() { 0 } else { end };
    }

    /// Returns whether the last poll ended a round in which all entries were checked, or no entry
    /// needs a check. A caller that sleeps between polls sleeps only after such a poll: otherwise
    /// the entry of a waiting client may stay unchecked during many sleeps.
    pub fn has_checked_all(&self) -> bool {
        self.sweep == 0 || self.have_all_zones()
    }

    /// Returns whether all clients have active zones: then they write nothing into their entries.
    pub(super) fn have_all_zones(&self) -> bool {
        self.active.len() + self.free_ids.len() == self.clients.len()
    }

    /// Returns whether the call of a request was given up, according to the client's word (S28).
    pub(crate) fn is_given_up(&self, request: &Request) -> bool {
        let at = request.client.index() * ENTRY_BYTES + Announcement::AT;
        self.memory
            .entries
            .load(at)
            .checked_shr(request.id.slot.into())
            .unwrap_or(0)
            & 1
            != 0
    }

    pub(super) fn clear_entry(&mut self, client: ClientId) {
        let entry = client.index() * ENTRY_BYTES;
        self.memory.entries.store(entry + Announcement::AT, 0);
        self.memory.entries.store(entry + Release::TRAILER_AT, 0);
        self.memory
            .entries
            .store(entry + Announcement::TRAILER_AT, 0);
    }

    #[inline]
    fn is_written(&self, client: ClientId) -> bool {
        let entry = client.index() * ENTRY_BYTES;
        self.memory.entries.load(entry + Release::TRAILER_AT)
            | self.memory.entries.load(entry + Announcement::TRAILER_AT)
            != 0
    }

    pub(super) fn take_entry(&mut self, client: ClientId) {
        if self.client(client).is_none() {
            return;
        }
        let entry = client.index() * ENTRY_BYTES;
        // In a WRITE of both halves the announcement is last: if it has arrived, so has the
        // release.
        let announced_at = entry + Announcement::TRAILER_AT;
        let announced = self.memory.entries.load(announced_at);
        let at = entry + Release::TRAILER_AT;
        let word = self.memory.entries.load(at);
        if word != 0 {
            let mut body = [0; Release::TRAILER_AT];
            self.memory.entries.read(entry, &mut body);
            self.memory.entries.exchange(at, word, 0);
            self.on_release(client, Release::decode(&body), Trailer::from_word(word));
        }
        if announced != 0 {
            let mut body = [0; Announcement::BODY_BYTES];
            self.memory
                .entries
                .read(entry + Announcement::AT, &mut body);
            self.memory.entries.exchange(announced_at, announced, 0);
            let trailer = Trailer::from_word(announced);
            self.on_announcement(client, Announcement::decode(&body), trailer);
        }
    }

    fn on_release(&mut self, client: ClientId, release: Release, trailer: Trailer) {
        let zone = self
            .zone_of(client)
            .filter(|zone| self.zone(*zone).awaits_release(release.epoch));
        let is_good =
            trailer == Release::trailer(release.epoch) && release.client == u32::from(client.0);
        match zone {
            Some(zone) if is_good => self.release_zone(zone),
            None if is_good && self.on_late_release(client, release.epoch) => {}
            _ => self.stats.garbage += 1,
        }
    }

    fn on_announcement(
        &mut self,
        client: ClientId,
        announcement: Option<Announcement>,
        trailer: Trailer,
    ) {
        let (depth, slot_bytes) = (self.layout.depth, self.layout.slot_bytes);
        let Some(record) = self.clients[client.index()].as_mut() else {
            return;
        };
        let is_good = |announcement: &Announcement| {
            trailer
                == Trailer {
                    len: Announcement::BODY_BYTES as u32,
                    valid: valid(announcement.number),
                }
                && announcement.client == u32::from(client.0)
                && announcement.slots != 0
                && announcement.slots.checked_shr(depth as u32).unwrap_or(0) == 0
                && (HEADER_BYTES + TRAILER_BYTES..=slot_bytes)
                    .contains(&(announcement.longest as usize))
        };
        match announcement.filter(is_good) {
            // If an announcement is taken and not closed, no correct client sends another (S7).
            Some(announcement) if record.waiting.is_none() => {
                record.waiting = Some(announcement);
                self.waiters += 1;
            }
            _ => self.stats.garbage += 1,
        }
    }
}
