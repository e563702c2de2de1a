//! Clients that rest: their zones are taken back without an answer (S26 of docs/scalerpc.md).

use super::zones::ZoneState;
use super::{Server, ServerOp};
use crate::protocol::memory::Memory;
use crate::protocol::request::ClientId;
use crate::protocol::wire::{ENTRY_BYTES, REST_ANSWER_AT, RESTS, ZoneId};

impl<M: Memory> Server<M> {
    /// Asks a client that was sent *switch*, and has not released its zone, whether it rests. One
    /// question suffices: a client that is awake when its word is READ finds *switch* before it
    /// rests.
    pub(super) fn ask(
        &mut self,
        client: ClientId,
        id: ZoneId,
        now_ns: u64,
        out: &mut Vec<ServerOp>,
    ) {
        let Some(regions) = self.client(client).map(|record| record.regions) else {
            return;
        };
        // The client has at least half of the drain time for its answer, even if it is asked late.
        let answer_by_ns = now_ns.saturating_add(self.drain_ns / 2);
        if let ZoneState::Draining { ask_ns, evict_ns } = &mut self.zone_mut(id).state {
            *ask_ns = u64::MAX;
            *evict_ns = answer_by_ns.max(*evict_ns);
        }
        let addr = regions
            .requests_addr
            .wrapping_add(self.layout.rest_word() as u64);
        let into = client.index() * ENTRY_BYTES + REST_ANSWER_AT;
        out.push(ServerOp::ReadRestWord {
            client,
            addr,
            rkey: regions.requests_rkey,
            into,
        });
    }

    /// Takes the successful completion of the READ of a client's rest word. Takes the zone back if
    /// the client rests.
    ///
    /// If the client's zone awaits an answer, it is the zone for which the client was asked: a
    /// later zone becomes active only after READs that complete after this READ.
    pub fn on_rest_word(&mut self, client: ClientId) {
        let answer = self
            .memory
            .entries
            .load(client.index() * ENTRY_BYTES + REST_ANSWER_AT);
        let Some(zone) = self
            .zone_of(client)
            .filter(|zone| answer == RESTS && self.zone(*zone).awaits_answer())
        else {
            return;
        };
        let epoch = self.zone(zone).epoch;
        if let Some(record) = self.clients[client.index()].as_mut() {
            record.taken_back = Some(epoch);
        }
        self.stats.taken_back += 1;
        self.release_zone(zone);
    }

    /// Takes the release of a zone that was taken back. Returns whether this is such a release.
    pub(super) fn on_late_release(&mut self, client: ClientId, epoch: u32) -> bool {
        let Some(record) = self.clients[client.index()].as_mut() else {
            return false;
        };
        record
            .taken_back
            .take_if(|taken_back| *taken_back as u32 == epoch)
            .is_some()
    }
}
