//! The client as a state machine: responses and events found in its memory, completions, and the time go in; operations come out.
//!
//! `calls` makes and ends calls, `arrivals` reads what came, `states` goes from IDLE to WARMUP to PROCESS and back, `fetch` READs responses
//! where the server does not WRITE them.

mod arrivals;
mod calls;
mod fetch;
#[cfg(test)]
mod state;
mod states;

use std::collections::VecDeque;

pub use calls::{CallHandle, Completion, Permit};

use crate::protocol::config::{DEFAULT_TIMEOUT_NS, Layout, ReplyMode};
use crate::protocol::error::CloseReason;
use crate::protocol::mapping::ClientId;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{Announcement, Release, ZoneId};
use calls::Call;

/// Time between looks at a response that the client READs, in ns, by default.
pub const DEFAULT_READ_INTERVAL_NS: u64 = 2_000;

/// The regions of a client. Their sizes: [`Layout::requests_bytes`], [`Layout::client_responses_bytes`].
#[derive(Clone, Debug)]
pub struct ClientMemory<M> {
    /// Staging slots; the server READs.
    pub requests: M,
    /// Response and event slots; the server WRITEs.
    pub responses: M,
}

/// Where the server's memory is, and this client's own as the server knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerRegions {
    /// This client's number there.
    pub client: ClientId,
    /// Address of both pools.
    pub pools_addr: u64,
    /// Key of them.
    pub pools_rkey: u32,
    /// Address of this client's entry.
    pub entry_addr: u64,
    /// Key of it.
    pub entry_rkey: u32,
    /// Address of this client's part of the area that clients READ; 0 if the server WRITEs.
    pub responses_addr: u64,
    /// Key of it.
    pub responses_rkey: u32,
}

/// What the client wants done, in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientOp {
    /// WRITE `len` bytes from byte `from` of the requests to `addr`.
    WriteRequest {
        /// Where in the server's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
        /// Offset in the requests.
        from: usize,
        /// Bytes.
        len: u32,
    },
    /// WRITE the first `len` of these bytes to `addr`.
    WriteEntry {
        /// Where in the server's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
        /// What.
        bytes: [u8; Release::BYTES + Announcement::BYTES],
        /// How many of them.
        len: u8,
    },
    /// READ `len` bytes at `addr` to byte `into` of the responses; then [`Client::on_read_done`].
    Read {
        /// Where in the server's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
        /// Offset in the responses.
        into: usize,
        /// Bytes.
        len: u32,
        /// For the completion.
        slot: u8,
    },
}

/// Where a client is in the server's round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing is asked of the server.
    Idle,
    /// Requests are announced.
    Warmup,
    /// Requests are written straight into the pool.
    Process {
        /// The slice.
        epoch: u64,
        /// The client's zone in it.
        zone: ZoneId,
    },
    /// The connection has ended.
    Closed(CloseReason),
}

/// What was done since the client was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ClientStats {
    /// Calls made.
    pub calls: u64,
    /// Requests written straight into the pool.
    pub direct: u64,
    /// Announcements.
    pub announcements: u64,
    /// Slices that this client was in PROCESS for.
    pub activations: u64,
}

/// A client of one server, of one thread.
#[derive(Clone, Debug)]
pub struct Client<M> {
    memory: ClientMemory<M>,
    layout: Layout,
    server: ServerRegions,
    requests_addr: u64,
    responses_addr: u64,
    responses_rkey: u32,
    timeout_ns: u64,
    read_interval_ns: u64,
    next_read_ns: u64,
    state: State,
    /// Epoch of the last slice that ended for this client (S11).
    closed_epoch: u64,
    announcements: u32,
    /// First byte of the zone in the server's memory, in PROCESS.
    zone_addr: u64,
    calls: Vec<Call>,
    /// Slots that can be used. Those that are neither free, pending nor lent hold a response.
    free: u64,
    /// Slots whose responses have not come, those of calls that have ended included.
    pending: u64,
    /// Those of them whose calls have ended: only the response frees them (S14).
    quarantined: u64,
    /// Slots of calls made since the last poll: as long as what they gave to post was not taken, there is nothing to look at.
    fresh: u64,
    /// No call's time is over before.
    expire_ns: u64,
    /// Slots of the announcement that is open: not written (S6).
    lent: u64,
    /// Those of them that are free but for that.
    lent_free: u64,
    /// Calls that have ended, in that order.
    ended: VecDeque<Completion>,
    stats: ClientStats,
}

impl<M: Memory> Client<M> {
    /// A client that was admitted. The regions must be all zeros, and as large as `layout`, which is the server's, says: smaller ones lose
    /// messages. `requests_addr`, `responses_addr` and `responses_rkey` are what the server was told.
    #[must_use]
    pub fn new(
        layout: Layout,
        memory: ClientMemory<M>,
        server: ServerRegions,
        requests_addr: u64,
        responses_addr: u64,
        responses_rkey: u32,
    ) -> Self {
        Self {
            memory,
            server,
            requests_addr,
            responses_addr,
            responses_rkey,
            timeout_ns: DEFAULT_TIMEOUT_NS,
            read_interval_ns: DEFAULT_READ_INTERVAL_NS,
            next_read_ns: 0,
            state: State::Idle,
            closed_epoch: 0,
            announcements: 0,
            zone_addr: 0,
            calls: vec![Call::default(); layout.depth],
            // 1 to 64 slots.
            free: u64::MAX >> (64 - layout.depth.clamp(1, 64)),
            pending: 0,
            quarantined: 0,
            fresh: 0,
            expire_ns: u64::MAX,
            lent: 0,
            lent_free: 0,
            ended: VecDeque::with_capacity(layout.depth),
            stats: ClientStats::default(),
            layout,
        }
    }

    /// How long calls may take, in ns, from now on. Default 5 s.
    pub const fn set_timeout_ns(&mut self, timeout_ns: u64) {
        self.timeout_ns = timeout_ns;
    }

    /// One bounded step: takes what arrived, ends calls whose time is over, announces what waits. Operations are appended to `out`.
    pub fn poll(&mut self, now_ns: u64, out: &mut VecDeque<ClientOp>) {
        if matches!(self.state, State::Closed(_)) {
            return;
        }
        match self.take_arrivals(out) {
            Ok(()) => {}
            Err(error) => return self.close(CloseReason::Protocol(error)),
        }
        if now_ns >= self.expire_ns {
            self.expire(now_ns);
        }
        if self.state == State::Idle && self.pending != 0 {
            self.announce(None, out);
        }
        if self.layout.reply_mode == ReplyMode::ClientReads {
            self.fetch(now_ns, out);
        }
    }

    /// Ends the connection and all its calls. The queue pair must be gone, or in error, before the regions are.
    pub fn close(&mut self, reason: CloseReason) {
        if !matches!(self.state, State::Closed(_)) {
            self.state = State::Closed(reason);
            self.fail_all(reason);
        }
    }

    /// Where it is in the server's round.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Calls that can be made now.
    #[must_use]
    pub const fn free_slots(&self) -> usize {
        self.free.count_ones() as usize
    }

    /// Whether a call has not ended, or its end was not taken.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.ended.is_empty() || self.pending & !self.quarantined != 0
    }

    /// How long calls may take, in ns.
    #[must_use]
    pub const fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }

    /// Where everything lies.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The regions.
    #[must_use]
    pub const fn memory(&self) -> &ClientMemory<M> {
        &self.memory
    }

    /// What was done.
    #[must_use]
    pub const fn stats(&self) -> &ClientStats {
        &self.stats
    }
}

/// The numbers of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}
