//! The client as a state machine. Inputs: responses and events in its memory, completions, and the
//! time. Output: operations.
//!
//! `calls` makes and ends calls, `arrivals` reads responses and events, `states` changes the state
//! from IDLE to WARMUP to PROCESS and back, `rest` lets the server reclaim the zone of an idle
//! client without a handshake.

mod arrivals;
mod calls;
mod rest;
#[cfg(test)]
#[path = "../tests/client_state.rs"]
mod state;
mod states;

use std::ops::AddAssign;

pub use calls::{CallToken, Completion};

use crate::protocol::config::{DEFAULT_TIMEOUT_NS, Layout};
use crate::protocol::error::CloseReason;
use crate::protocol::memory::Memory;
use crate::protocol::request::ClientId;
use crate::protocol::wire::{Announcement, Release, ZoneId};
use calls::Call;

/// The regions of a client. Their sizes: [`Layout::requests_bytes`],
/// [`Layout::client_responses_bytes`].
#[derive(Clone, Debug)]
pub struct ClientMemory<M> {
    /// Staging slots and the rest word, which the server READs.
    pub requests: M,
    /// Response and event slots, which the server WRITEs.
    pub responses: M,
}

/// Addresses and keys of the server's memory, and this client's number and entry there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerRegions {
    /// This client's number at the server.
    pub client: ClientId,
    /// Address of both pools.
    pub pools_addr: u64,
    /// Key of the pools.
    pub pools_rkey: u32,
    /// Address of this client's entry.
    pub entry_addr: u64,
    /// Key of the entry.
    pub entry_rkey: u32,
}

/// An operation of the client. Operations are executed in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientOp {
    /// WRITE `len` bytes from byte `from` of the requests to `addr`.
    WriteRequest {
        /// Address in the server's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// Offset in the requests.
        from: usize,
        /// Number of bytes.
        len: u32,
    },
    /// WRITE the first `len` bytes of `bytes` to `addr`.
    WriteEntry {
        /// Address in the server's memory.
        addr: u64,
        /// Key of that memory.
        rkey: u32,
        /// The bytes to write.
        bytes: [u8; Release::BYTES + Announcement::BYTES],
        /// Number of bytes.
        len: u8,
    },
}

/// The state of a client: whether, and by which operations, its requests reach the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The client has no request at the server.
    Idle,
    /// Requests are announced.
    Warmup,
    /// Requests are written straight into the pool.
    Process {
        /// Epoch of the slice.
        epoch: u64,
        /// The client's zone in the slice.
        zone: ZoneId,
    },
    /// No call is outstanding, and the server may take the zone back without an answer of this
    /// client (S26 of docs/scalerpc.md). The next poll ends the rest.
    Resting,
    /// The connection has ended.
    Closed(CloseReason),
}

/// Counters since the client was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ClientStats {
    /// Calls made.
    pub calls: u64,
    /// Requests written straight into the pool.
    pub direct: u64,
    /// Announcements of requests sent to the server.
    pub announcements: u64,
    /// Slices in which this client was in PROCESS.
    pub activations: u64,
}

impl AddAssign for ClientStats {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.direct += other.direct;
        self.announcements += other.announcements;
        self.activations += other.activations;
    }
}

/// A client of one server, for one thread.
#[derive(Clone, Debug)]
pub struct Client<M> {
    memory: ClientMemory<M>,
    layout: Layout,
    server: ServerRegions,
    responses_addr: u64,
    responses_rkey: u32,
    timeout_ns: u64,
    state: State,
    /// While the client rests, the state that it had before.
    rested: State,
    /// Epoch of the last slice that ended for this client (S11).
    closed_epoch: u64,
    announcements: u32,
    /// First byte of the zone in the server's memory, in PROCESS.
    zone_addr: u64,
    calls: Vec<Call>,
    /// Free slots. A slot that is neither free, pending nor lent belongs to a call whose end was
    /// not taken yet.
    free: u64,
    /// Slots whose responses have not arrived, including slots of calls that have ended.
    pending: u64,
    /// Pending slots whose calls have ended: only the response frees them (S14).
    quarantined: u64,
    /// The quarantined slots that were last reported to the server (S28).
    told: u64,
    /// Slots of calls made since the last poll. While the caller still has the operations of these
    /// calls, no response to them can have arrived.
    fresh: u64,
    /// Lower bound of the deadlines of calls that have not ended, in ns; 0 if the quarantine of a
    /// slot has ended.
    expire_ns: u64,
    /// Slots of the open announcement. The client writes nothing into these slots (S6).
    lent: u64,
    /// Lent slots that become free when the announcement is closed.
    lent_free: u64,
    /// Slots of the calls whose ends [`poll_completion`](Self::poll_completion) returns next.
    ended: u64,
    /// Slots of the calls that have ended since `ended` was filled, whose ends are returned after
    /// those of `ended`.
    ended_later: u64,
    stats: ClientStats,
}

impl<M: Memory> Client<M> {
    /// Makes a client that was admitted. `layout` is the server's. The regions must be all zeros,
    /// and as large as `layout` requires: smaller regions lose messages. `responses_addr` and
    /// `responses_rkey` are the values that the client has sent to the server.
    pub fn new(
        layout: Layout,
        memory: ClientMemory<M>,
        server: ServerRegions,
        responses_addr: u64,
        responses_rkey: u32,
    ) -> Self {
        Self {
            memory,
            server,
            responses_addr,
            responses_rkey,
            timeout_ns: DEFAULT_TIMEOUT_NS,
            state: State::Idle,
            rested: State::Idle,
            closed_epoch: 0,
            announcements: 0,
            zone_addr: 0,
            calls: vec![Call::NONE; layout.depth],
            // There are 1 to 64 slots, so the shift is 0 to 63.
            free: u64::MAX >> (64 - layout.depth.clamp(1, 64)),
            pending: 0,
            quarantined: 0,
            told: 0,
            fresh: 0,
            expire_ns: u64::MAX,
            lent: 0,
            lent_free: 0,
            ended: 0,
            ended_later: 0,
            stats: ClientStats::default(),
            layout,
        }
    }

    /// Sets the timeout of later calls, in ns. Default 5 s.
    pub const fn set_timeout_ns(&mut self, timeout_ns: u64) {
        self.timeout_ns = timeout_ns;
    }

    /// Does one bounded step: takes responses and events, ends calls whose time is over, announces
    /// waiting requests. Appends operations to `out`.
    #[inline(always)]
    pub fn poll(&mut self, now_ns: u64, out: &mut Vec<ClientOp>) {
        if matches!(self.state, State::Closed(_) | State::Resting) && !self.wake(out) {
            return;
        }
        match self.take_arrivals(out) {
            Ok(()) => {}
            Err(error) => return self.close(CloseReason::Protocol(error)),
        }
        if now_ns >= self.expire_ns {
            self.expire(now_ns, out);
        }
        if self.state == State::Idle && self.pending != 0 {
            self.announce(None, out);
        }
    }

    /// Returns whether calls wait for the next [`poll`](Self::poll), to be announced or sent.
    pub(crate) fn has_news(&self) -> bool {
        matches!(self.state, State::Idle | State::Resting) && self.pending != 0
    }

    /// Ends the connection and all its calls. The queue pair must be gone, or in error, before the
    /// regions are dropped.
    pub fn close(&mut self, reason: CloseReason) {
        if !matches!(self.state, State::Closed(_)) {
            self.state = State::Closed(reason);
            self.fail_all(reason);
        }
    }

    /// Returns the client's state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// Returns the number of calls that can be made now.
    pub const fn free_slots(&self) -> usize {
        self.free.count_ones() as usize
    }

    /// Returns whether a call has not ended, or its end was not taken.
    pub fn is_busy(&self) -> bool {
        self.ended | self.ended_later | self.pending & !self.quarantined != 0
    }

    /// Returns the number of calls that ran out of time and whose responses are missing. Each keeps
    /// its slot until its response arrives (S14).
    pub const fn given_up_calls(&self) -> usize {
        self.quarantined.count_ones() as usize
    }

    /// Returns whether a slot becomes free only by a message of the server: because it waits for a
    /// response (even to a call whose time ended), or for the end of an announcement (S6). The
    /// owner of a client that waits in this way probes the server (S20).
    pub(crate) const fn awaits_server(&self) -> bool {
        self.pending | self.lent != 0
    }

    #[cfg(test)]
    pub(crate) const fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }

    /// Returns the memory layout.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the regions.
    pub const fn memory(&self) -> &ClientMemory<M> {
        &self.memory
    }

    /// Returns the counters.
    pub const fn stats(&self) -> &ClientStats {
        &self.stats
    }
}
