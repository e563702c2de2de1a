//! A server as the exploration of all states needs it: times that are relative, and a hash of
//! everything that affects a decision.

use std::hash::{Hash, Hasher};

use super::zones::{ActiveZone, Zone, ZoneState};
use super::{ClientRecord, Server};
use crate::protocol::request::ClientId;
use crate::protocol::tests::memory::HeapMemory;
use crate::protocol::wire::ZoneId;

impl Zone {
    fn rebase(&mut self, now_ns: u64) {
        match &mut self.state {
            ZoneState::Ended { event_by_ns } => *event_by_ns = event_by_ns.saturating_sub(now_ns),
            ZoneState::Draining { ask_ns, evict_ns } => {
                // `u64::MAX` is no time: the client was asked.
                *ask_ns = if *ask_ns == u64::MAX {
                    u64::MAX
                } else {
                    ask_ns.saturating_sub(now_ns)
                };
                *evict_ns = evict_ns.saturating_sub(now_ns);
            }
            _ => {}
        }
    }

    /// Hashes the state without the time of an eviction, which the exploration does not reach.
    fn hash_state(mut self, hasher: &mut impl Hasher) {
        if let ZoneState::Draining { evict_ns, .. } = &mut self.state {
            *evict_ns = 0;
        }
        self.hash(hasher);
    }
}

impl Server<HeapMemory> {
    /// Makes `now_ns` the time 0, and all earlier times too.
    pub(crate) fn rebase(&mut self, now_ns: u64) {
        self.scheduler.rebase(now_ns);
        self.zones.iter_mut().for_each(|zone| zone.rebase(now_ns));
        if self.remind_ns != u64::MAX {
            self.remind_ns = self.remind_ns.saturating_sub(now_ns);
        }
    }

    /// Sets the counters as if many slices had been served, and many clients admitted.
    pub(crate) fn count_from(&mut self, epoch: u64, generation: u32) {
        self.scheduler.count_from(epoch);
        self.generation = generation;
    }

    /// Sets the counters as if each slot of a client had been used `sequence` times.
    pub(crate) fn accepted_until(&mut self, client: ClientId, sequence: u32) {
        if let Some(record) = &mut self.clients[client.index()] {
            record.accepted.fill(sequence);
        }
    }

    pub(crate) fn hash_state(&self, hasher: &mut impl Hasher) {
        let Self {
            memory,
            clients,
            generation,
            groups,
            scheduler,
            pools,
            zones,
            busy,
            buffers,
            ..
        } = self;
        (
            clients,
            generation,
            groups,
            scheduler,
            pools,
            busy,
            self.waiting(),
            buffers,
        )
            .hash(hasher);
        zones.iter().for_each(|zone| zone.hash_state(hasher));
        memory
            .entries
            .words()
            .chain(memory.pools.words())
            .chain(memory.responses.words())
            .for_each(|word| word.hash(hasher));
    }

    /// Returns whether a client has announced, and has no zone.
    pub(crate) fn waits(&self, client: ClientId) -> bool {
        self.client(client).is_some_and(ClientRecord::waits)
    }

    /// Asserts the invariant of every state: places, bindings and lists agree.
    pub(crate) fn check_consistency(&self) {
        assert_eq!(
            self.waiters,
            self.clients
                .iter()
                .flatten()
                .filter(|record| record.waiting.is_some())
                .count()
        );
        assert_eq!(
            self.owed,
            self.zones.iter().filter(|zone| zone.owes_event()).count()
        );
        assert!(
            self.zones
                .iter()
                .filter_map(Zone::remind_ns)
                .all(|remind_ns| remind_ns >= self.remind_ns)
        );
        let mut queued = vec![0; 2 * self.layout.zones];
        self.waiting()
            .iter()
            .for_each(|entry| queued[entry.zone] += 1);
        for (pool, zones) in self.zones.chunks(self.layout.zones).enumerate() {
            for (zone, state) in zones.iter().enumerate() {
                let id = ZoneId {
                    pool: pool as u8,
                    zone: zone as u16,
                };
                let is_free = state.state == ZoneState::Free;
                assert_eq!(state.client.is_none(), is_free, "{id:?}");
                assert!(
                    state
                        .client
                        .is_none_or(|client| self.zone_of(client) == Some(id)),
                    "{id:?}"
                );
                assert_eq!(
                    self.busy.iter().filter(|busy| **busy == id).count(),
                    usize::from(!is_free),
                    "{id:?}"
                );
                let at = self.layout.pool_slot(id, 0) + self.layout.trailer_at();
                let is_it = |(active, active_at): (&ActiveZone, &usize)| {
                    active.zone == id && *active_at == at && state.client == Some(active.client)
                };
                let active = self
                    .active
                    .iter()
                    .zip(&self.active_at)
                    .filter(|active| is_it(*active));
                assert_eq!(
                    active.count(),
                    usize::from(state.state == ZoneState::Active),
                    "{id:?}"
                );
                assert_eq!(state.queued, queued[self.layout.zone_place(id)], "{id:?}");
            }
            let used = zones
                .iter()
                .filter(|zone| zone.state != ZoneState::Free)
                .count();
            assert_eq!(self.pools[pool].len() + used, zones.len());
        }
    }
}
