//! The server as a state machine. Inputs: entries and messages in its memory, completions, and the
//! time. Output: operations.
//!
//! [`Server::poll`] does everything but the work of the workers, which take requests by
//! [`Server::take`] and answer them by [`Server::reply`]. `entries` takes releases and
//! announcements, `zones` assigns, activates, ends and frees zones, `rests` takes back the zones of
//! resting clients, `intake` accepts requests from active zones. `leaving` ends the server.

mod entries;
mod intake;
mod leaving;
mod replies;
mod rests;
#[cfg(test)]
#[path = "../tests/server_state.rs"]
mod state;
mod zones;

use copyrpc_calls::OptionError;

use crate::protocol::buffers::{Buffers, Chain};
use crate::protocol::config::{Layout, ServerConfig};
use crate::protocol::groups::GroupManager;
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientId, ClientRegions, Request};
use crate::protocol::scheduler::{Scheduler, Turn};
use crate::protocol::slices::SliceLength;
use crate::protocol::wire::{Announcement, HEADER_BYTES, TRAILER_BYTES, ZoneId};
use intake::Queued;
use mlx5_rendezvous::Peer;
use zones::{ActiveZone, Zone, ZoneState};

/// Maximum number of entries that a poll checks in addition to the entries of the current and the
/// next group (S19 of docs/scalerpc.md).
const SWEEP: usize = 64;

/// The regions of a server. Their sizes: [`ServerConfig::entries_bytes`], [`Layout::pools_bytes`],
/// [`ServerConfig::responses_bytes`].
#[derive(Clone, Debug)]
pub struct ServerMemory<M> {
    /// Endpoint entries, which clients WRITE.
    pub entries: M,
    /// Both pools, which clients WRITE.
    pub pools: M,
    /// Response buffers.
    pub responses: M,
}

/// An operation for the queue pair of `client`. The operations of one client are executed in the
/// order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServerOp {
    /// READ `len` bytes at `addr` to byte `into` of the pools. After its completion, if `is_last`,
    /// call [`Server::on_reads_done`].
    Read {
        /// The client whose queue pair is used.
        client: ClientId,
        /// Address in the client's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// Offset in the pools.
        into: usize,
        /// Number of bytes.
        len: u32,
        /// Whether this READ is the last of its announcement.
        is_last: bool,
    },
    /// WRITE `len` bytes from byte `from` of the responses to `addr`. After its completion call
    /// [`Server::on_responses_done`].
    WriteResponse {
        /// The client whose queue pair is used.
        client: ClientId,
        /// Address in the client's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// Offset in the responses.
        from: usize,
        /// Number of bytes.
        len: u32,
    },
    /// WRITE `bytes` to `addr`.
    WriteEvent {
        /// The client whose queue pair is used.
        client: ClientId,
        /// Address in the client's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// The bytes of the event.
        bytes: [u8; HEADER_BYTES + TRAILER_BYTES],
    },
    /// READ the 8 bytes at `addr`, the client's rest word, to byte `into` of the entries. After its
    /// completion call [`Server::on_rest_word`].
    ReadRestWord {
        /// The client whose queue pair is used.
        client: ClientId,
        /// Address in the client's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// Offset in the entries.
        into: usize,
    },
    /// The client did not release its zone: destroy its queue pair, then call [`Server::leave`].
    Evict {
        /// The client.
        client: ClientId,
    },
}

impl ServerOp {
    /// Returns the client whose queue pair is used.
    pub const fn client(&self) -> ClientId {
        match self {
            Self::Read { client, .. }
            | Self::WriteResponse { client, .. }
            | Self::WriteEvent { client, .. }
            | Self::ReadRestWord { client, .. }
            | Self::Evict { client } => *client,
        }
    }
}

/// Counters since the server was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ServerStats {
    /// Requests accepted.
    pub accepted: u64,
    /// Requests offered again after they had been accepted, and dropped (S4).
    pub duplicates: u64,
    /// Messages and entries that failed a check, and were removed (S2).
    pub garbage: u64,
    /// Slices begun.
    pub slices: u64,
    /// READs of announced requests.
    pub reads: u64,
    /// Events that no response carried.
    pub bare_events: u64,
    /// Zones taken back from clients that rest.
    pub taken_back: u64,
    /// Clients evicted.
    pub evictions: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClientRecord {
    regions: ClientRegions,
    /// A number that distinguishes this client from earlier clients of the same entry.
    generation: u32,
    /// Last accepted sequence number of each slot (S4).
    accepted: Vec<u32>,
    /// Announcement of the requests that wait at the client.
    waiting: Option<Announcement>,
    /// The client's zone. [`Zone::client`] of that zone is this client (S8).
    zone: Option<ZoneId>,
    /// Counters since the groups were formed, for the priority.
    requests: u64,
    bytes: u64,
    responses: Chain,
    /// Epoch of the zone that was taken back from the client while it rested. The client still
    /// releases the zone when it wakes.
    taken_back: Option<u64>,
    /// Whether the end of the server was reported to the client.
    is_dismissed: bool,
    /// Name of the client, if the owner set one.
    peer: Option<Peer>,
}

impl ClientRecord {
    /// Returns whether the client has announced requests and has no zone.
    const fn waits(&self) -> bool {
        self.waiting.is_some() && self.zone.is_none()
    }

    /// Returns the priority P = T/S: requests over their mean size, in thousandths.
    fn priority(&self) -> u64 {
        let priority = u128::from(self.requests) * u128::from(self.requests) * 1000
            / u128::from(self.bytes.max(1));
        u64::try_from(priority).unwrap_or(u64::MAX)
    }
}

/// A server of one thread.
#[derive(Clone, Debug)]
pub struct Server<M> {
    memory: ServerMemory<M>,
    layout: Layout,
    slice_ns: u64,
    drain_ns: u64,
    /// Numbers that no client has. The number freed last is assigned first: its entry is cached.
    free_ids: Vec<u16>,
    clients: Vec<Option<ClientRecord>>,
    /// Number of clients with a `waiting` announcement. At 0, no search for them is needed.
    waiters: usize,
    generation: u32,
    /// Number of clients that have disconnected.
    left: u64,
    groups: GroupManager,
    scheduler: Scheduler,
    slices: SliceLength,
    /// The free zones of each pool. The zone freed last is given out first.
    pools: [Vec<u16>; 2],
    /// The zones of both pools, by [`Layout::zone_place`].
    zones: Vec<Zone>,
    /// Zones that are not free, in no order.
    busy: Vec<ZoneId>,
    /// Busy zones that are active.
    active: Vec<ActiveZone>,
    /// For each active zone, the offset of the first slot's trailer in the pools.
    active_at: Vec<usize>,
    /// Number of busy zones that owe their clients an event. At 0, no search for them is needed.
    owed: usize,
    /// Earliest time at which a client that did not release its zone is asked whether it rests, or
    /// evicted, in ns.
    remind_ns: u64,
    /// Accepted requests, the oldest first. Workers have taken the first `taken` of them. An index
    /// costs fewer instructions than the front of a `VecDeque`, which may wrap.
    dispatch: Vec<Queued>,
    taken: usize,
    buffers: Buffers,
    /// The next entry to check.
    sweep: usize,
    stats: ServerStats,
}

impl<M: Memory> Server<M> {
    /// Makes a server without clients. The regions must be all zeros, and as large as
    /// [`ServerMemory`] requires: smaller regions lose messages.
    ///
    /// # Errors
    /// [`OptionError`]: a number is outside its range.
    pub fn new(config: &ServerConfig, memory: ServerMemory<M>) -> Result<Self, OptionError> {
        let layout = config.layout()?;
        let clients = config.max_clients as usize;
        let free_zones: Vec<_> = (0..layout.zones as u16).rev().collect();
        Ok(Self {
            memory,
            slice_ns: config.slice_ns,
            drain_ns: config.drain_ns,
            free_ids: (0..config.max_clients as u16).rev().collect(),
            clients: vec![None; clients],
            waiters: 0,
            generation: 0,
            left: 0,
            groups: GroupManager::new(config.clients_per_group()),
            scheduler: Scheduler::new(config.slice_ns),
            slices: SliceLength::new(config.slice_ns, config.max_rotation_ns),
            pools: [free_zones.clone(), free_zones],
            zones: vec![Zone::default(); 2 * layout.zones],
            busy: Vec::with_capacity(2 * layout.zones),
            active: Vec::with_capacity(2 * layout.zones),
            active_at: Vec::with_capacity(2 * layout.zones),
            owed: 0,
            remind_ns: u64::MAX,
            dispatch: Vec::with_capacity(2 * layout.zones * layout.depth),
            taken: 0,
            buffers: Buffers::new(config.response_buffers as u16),
            sweep: 0,
            stats: ServerStats::default(),
            layout,
        })
    }

    /// Admits a client whose queue pair is connected. Clears its entry, and everything that may
    /// remain of an earlier client. Returns `None` if all entries are in use.
    pub fn join(&mut self, regions: ClientRegions) -> Option<ClientId> {
        let client = ClientId(self.free_ids.pop()?);
        self.clear_entry(client);
        self.generation = self.generation.wrapping_add(1);
        let record = ClientRecord {
            regions,
            generation: self.generation,
            accepted: vec![0; self.layout.depth],
            waiting: None,
            zone: None,
            requests: 0,
            bytes: 0,
            responses: Chain::EMPTY,
            taken_back: None,
            is_dismissed: false,
            peer: None,
        };
        self.clients[client.index()] = Some(record);
        self.groups.join(client);
        // A split changes the number of no existing group, so the scheduler's numbers stay valid.
        Some(client)
    }

    /// Removes a client whose queue pair is gone: none of its operations is under way, and it can
    /// no longer write anything. A worker may still answer requests of this client; the answers are
    /// dropped.
    pub fn leave(&mut self, client: ClientId) {
        let Some(mut record) = self.clients.get_mut(client.index()).and_then(Option::take) else {
            return;
        };
        self.buffers.release_oldest(&mut record.responses, u16::MAX);
        self.waiters -= usize::from(record.waiting.is_some());
        // The zone is freed, so requests that wait in it do not run.
        self.forget_taken();
        self.dispatch
            .retain(|queued| queued.request.client != client);
        if let Some(zone) = record.zone {
            self.free_zone(zone);
        }
        let current = self.groups.leave(client, self.scheduler.current());
        // The group of a client that was warmed for the next slice gets that slice.
        let epoch = self.scheduler.epoch() + 1;
        let warmed = self
            .busy
            .iter()
            .find(|zone| self.zone(**zone).is_of(epoch))
            .and_then(|zone| self.zone(*zone).client);
        self.scheduler.renumber(
            current,
            warmed.and_then(|client| self.groups.group_of(client)),
        );
        self.free_ids.push(client.0);
        self.left += 1;
    }

    pub(crate) fn set_peer(&mut self, client: ClientId, peer: Peer) {
        if let Some(record) = &mut self.clients[client.index()] {
            record.peer = Some(peer);
        }
    }

    pub(crate) fn peer(&self, client: ClientId) -> Option<Peer> {
        self.client(client)?.peer
    }

    pub(crate) const fn left(&self) -> u64 {
        self.left
    }

    /// Returns whether the client of a request is connected.
    pub(crate) fn is_here(&self, request: &Request) -> bool {
        self.client(request.client)
            .is_some_and(|record| record.generation == request.generation)
    }

    /// Does one bounded step (S19). Appends operations to `out`.
    #[inline(always)]
    pub fn poll(&mut self, now_ns: u64, out: &mut Vec<ServerOp>) {
        if !self.have_all_zones() {
            self.take_entries();
        }
        self.accept_active();
        if self.waiters > 0 || self.scheduler.next().is_some() {
            self.schedule(now_ns);
            self.warm(out);
        }
        if self.owed > 0 || now_ns >= self.remind_ns {
            self.send_events(now_ns, out);
        }
    }

    /// Decides which group has the slice. Changes nothing if no client waits and no group was
    /// chosen.
    #[inline(never)]
    fn schedule(&mut self, now_ns: u64) {
        let epoch = self.scheduler.epoch();
        let is_vacant = !self.busy.iter().any(|zone| self.zone(*zone).is_of(epoch));
        let Self {
            scheduler,
            groups,
            clients,
            ..
        } = self;
        let record = |client: ClientId| clients.get(client.index()).and_then(Option::as_ref);
        let waits = |client: ClientId| record(client).is_some_and(ClientRecord::waits);
        let priority = |client: ClientId| record(client).map_or(0, ClientRecord::priority);
        let turn = scheduler.step(now_ns, groups, waits, priority, is_vacant);
        // If the current group was split from another group, the clients of that group may still
        // have all zones of the slice's pool. Then the current group has the next slice too, if the
        // next pool has free zones.
        let [current, next] =
            [epoch, epoch + 1].map(|epoch| self.pools[(epoch % 2) as usize].len());
        if turn == Turn::Same && scheduler.next().is_none() && current == 0 && next > 0 {
            scheduler.repeat(groups, waits);
        }
        if turn == Turn::Switched {
            self.switch(now_ns);
        }
        if self.scheduler.take_regrouped() {
            // The measurements from here on decide the next regrouping.
            self.clients
                .iter_mut()
                .flatten()
                .for_each(|record| (record.requests, record.bytes) = (0, 0));
            self.slices
                .on_rotation(now_ns, self.stats.accepted, self.groups.count());
            self.scheduler.set_length(self.slices.ns());
        }
    }

    /// Returns the time, in ns, at which [`poll`](Self::poll) has something to do without an
    /// arrival. A poll is bounded, so work may remain for the next poll: before the caller sleeps,
    /// it must have polled until there was nothing to do.
    #[cfg(test)]
    pub fn next_event_ns(&self) -> Option<u64> {
        let slice_end = self.scheduler.next().map(|_| self.scheduler.slice_end_ns());
        self.busy
            .iter()
            .filter_map(|zone| self.zone(*zone).deadline_ns())
            .chain(slice_end)
            .min()
    }

    /// Makes slices end at multiples of their length in global time, which is this clock's time
    /// plus `offset_ns`; `None` ends that.
    pub const fn synchronise(&mut self, offset_ns: Option<i64>) {
        self.scheduler.synchronise(offset_ns);
    }

    /// Returns the layout of the memory.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the regions.
    pub const fn memory(&self) -> &ServerMemory<M> {
        &self.memory
    }

    /// Returns the groups.
    pub const fn groups(&self) -> &GroupManager {
        &self.groups
    }

    /// Returns the scheduler of the slices.
    pub const fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the number of free zones, of both pools.
    pub fn free_zones(&self) -> usize {
        self.pools[0].len() + self.pools[1].len()
    }

    /// Returns the number of free response buffers.
    pub fn free_buffers(&self) -> usize {
        self.buffers.free()
    }

    /// Returns the number of zones in quarantine.
    pub fn quarantined(&self) -> usize {
        self.zones
            .iter()
            .filter(|zone| zone.state == ZoneState::Quarantined)
            .count()
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &ServerStats {
        &self.stats
    }

    fn client(&self, client: ClientId) -> Option<&ClientRecord> {
        self.clients.get(client.index())?.as_ref()
    }

    /// Returns the zone that a client has, or that is being prepared for it.
    pub(crate) fn zone_of(&self, client: ClientId) -> Option<ZoneId> {
        self.client(client)?.zone
    }

    fn zone(&self, zone: ZoneId) -> &Zone {
        &self.zones[self.layout.zone_place(zone)]
    }

    fn zone_mut(&mut self, zone: ZoneId) -> &mut Zone {
        &mut self.zones[self.layout.zone_place(zone)]
    }
}
