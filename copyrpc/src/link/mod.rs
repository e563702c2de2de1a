//! One end of a connection as a pure state machine: no queue, clock, thread or system call.
//!
//! Inputs: [`call`](Link::call), [`cancel`](Link::cancel), [`reply`](Link::reply), [`on_imm`](Link::on_imm),
//! [`on_write_done`](Link::on_write_done), [`on_read_done`](Link::on_read_done), [`shut_down`](Link::shut_down), [`close`](Link::close), and the time. Outputs are values a driver turns into work: WRITEs ([`flush`](Link::flush)), a READ
//! ([`poll_read`](Link::poll_read)), the published record ([`publish`](Link::publish), [`beat`](Link::beat)), requests and ended calls
//! ([`next_event`](Link::next_event), [`expire`](Link::expire)). No output borrows the link, so a callback of the driver may call and reply.
//!
//! `tx` turns messages into batches, `rx` batches into messages, `credit` keeps both ledgers,
//! `calls` the pending calls, `deadlines` their times, `watch` the time since the peer was heard, `idle` the time since anything happened,
//! `window` the batches under way, `backoff` the READs, `closing` the graceful end. Three files join them and own every decision that needs
//! two of them: `outgoing` what goes into the send ring, `flush` what leaves it, `incoming` what arrives.
//! Invariants are cited by their numbers in `docs/copyrpc-protocol.md`.

mod backoff;
mod calls;
mod closing;
mod config;
mod credit;
mod deadlines;
#[cfg(test)]
mod explore;
mod flush;
mod held;
mod idle;
mod incoming;
mod outgoing;
mod rx;
mod tx;
mod watch;
mod window;

use std::ptr::NonNull;

use backoff::Backoff;
pub(crate) use calls::CallKey;
use calls::Calls;
use closing::Closing;
pub(crate) use config::LinkConfig;
pub(crate) use config::Past;
#[cfg(test)]
pub(crate) use config::Traffic;
use credit::{PeerCredit, Reservation};
pub(crate) use deadlines::Deadlines;
pub(crate) use flush::Poster;
use idle::Idle;
use rx::RecvRing;
pub(crate) use tx::Emit;
use tx::SendRing;
use watch::Watch;
pub use window::Window;
use window::WindowState;

use crate::error::{CallFailure, CloseReason, LinkConfigError};
use crate::ring::{Payload, RingView};
use crate::stats::Stats;
use crate::wire::{FlowWords, response_capacity};

/// A request with the application. Not `Clone`: it is answered once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Of those that are held, or [`IN_PLACE`].
    number: u64,
    payload: Payload,
    /// Bytes.
    internal_allowance: u32,
    call_id: u32,
}

/// Number of a request that is answered, or held, before anything else is taken of what arrived.
const IN_PLACE: u64 = u64::MAX;

impl Request {
    /// The same request, for one who answers it in the owner's place.
    #[inline(always)]
    pub(crate) const fn stand_in(&self) -> Self {
        let Self { number, payload, internal_allowance, call_id } = *self;
        Self { number, payload, internal_allowance, call_id }
    }

    /// Where its payload lies in the receive ring; intact until the request is answered.
    #[must_use]
    pub(crate) const fn payload(&self) -> Payload {
        self.payload
    }

    /// Most payload bytes a reply may have.
    #[must_use]
    pub(crate) const fn max_reply(&self) -> usize {
        response_capacity(self.internal_allowance as u64) as usize
    }
}

/// What [`Link::next_event`] found.
#[derive(Debug)]
pub(crate) enum Event<U> {
    /// So many requests arrived, at least one: [`Link::take_request`] has as many more.
    Requests(usize),
    /// A call ended.
    Ended {
        /// What [`Link::call`] was given.
        user_data: U,
        /// The reply's payload, in the receive ring until the next [`Link::next_event`]; or why there is none.
        outcome: Result<Payload, CallFailure>,
    },
}

/// What [`Link::next_message`] found.
#[derive(Debug)]
pub(crate) enum Message<U> {
    /// The reply that a call waits for.
    Reply {
        /// What [`Link::call`] was given.
        user_data: U,
        /// In the receive ring until the next message is taken.
        payload: Payload,
        /// Where that is.
        payload_at: NonNull<u8>,
    },
    /// A request.
    Request {
        /// Not answered.
        request: Request,
        /// Where its payload is in the receive ring.
        payload_at: NonNull<u8>,
    },
    /// All is parsed.
    Done,
    /// Something else: [`Link::next_event`] knows.
    Other,
}

/// What messages may have, in bytes, to be taken without another look: as much as the size of the rings allows, and nothing once no request
/// is to reach the application any more (G5).
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// L1.
    message: u64,
    /// L2.
    internal_allowance: u64,
}

impl Limits {
    const NONE: Self = Self { message: 0, internal_allowance: 0 };

    /// L1, L2.
    #[inline(always)]
    const fn allow(&self, message: u64, internal_allowance: u64) -> bool {
        message <= self.message && internal_allowance <= self.internal_allowance
    }
}

/// One end of a connection. `U` is the caller's data per call.
#[derive(Debug)]
pub(crate) struct Link<U> {
    limits: Limits,
    tx: SendRing,
    rx: RecvRing,
    reservation: Reservation,
    credit: PeerCredit,
    calls: Calls<U>,
    closed: Option<CloseReason>,
    /// Why no more calls are taken: the connection has ended, or will with this reason when all is done.
    ending: Option<CloseReason>,
    closing: Closing,
    /// Last words posted in a batch, which decide when a metadata-only batch is worth it.
    told_by_batch: FlowWords,
    /// Words in the published record.
    published: FlowWords,
    /// Last words heard in a batch; floor of the next (T5).
    heard_by_batch: FlowWords,
    /// Last words heard by READ. A channel of its own: it runs ahead of batches not yet polled.
    heard_by_read: FlowWords,
    read_in_flight: bool,
    /// Nothing here waited for that READ but the clock.
    read_is_probe: bool,
    /// A call was refused, or little space was left after a batch, or the window held something back that the peer's word releases; and
    /// nothing was heard since, neither a batch nor a READ.
    starved: bool,
    backoff: Backoff,
    window: WindowState,
    watch: Watch,
    idle: Idle,
    /// In the published record: changes while this side owes the peer something (K3).
    heartbeat: u32,
    /// Last heartbeat heard by READ.
    heard_heartbeat: u32,
    /// What positions and other counters tell is not counted again, see [`Link::stats`]: of those, here is what is to be added, modulo 2^64.
    stats: Stats,
}

impl<U> Link<U> {
    /// A connection whose messages go out through the `send` ring and arrive in the `recv` ring.
    ///
    /// # Errors
    /// [`LinkConfigError`] when the rings differ or a number is out of its range.
    pub(crate) fn new(send: RingView, recv: RingView, config: &LinkConfig) -> Result<Self, LinkConfigError> {
        Self::with_past(send, recv, config, &Past::default())
    }

    /// Like [`Link::new`], with that much behind it. For tests.
    ///
    /// # Errors
    /// Like [`Link::new`].
    #[doc(hidden)]
    pub(crate) fn with_past(send: RingView, recv: RingView, config: &LinkConfig, past: &Past) -> Result<Self, LinkConfigError> {
        config.check(send.size(), recv.size())?;
        let Past { sent, received, slots, generation, heartbeat } = *past;
        let reservation = Reservation::new(received.credit, config.local_credit);
        let credit = PeerCredit::new(sent.credit, config.peer_credit);
        let told = FlowWords { consumer_pos: config.recv_start, credit: reservation.granted(), batches_received: received.batches };
        let heard = FlowWords { consumer_pos: config.send_start, credit: credit.granted(), batches_received: sent.batches };
        Ok(Self {
            limits: Limits { message: send.size().max_message(), internal_allowance: send.size().max_internal_allowance() },
            tx: SendRing::new(send, config.send_start, sent.batches, config.peer_batches),
            rx: RecvRing::new(recv, told, received.requests, config.local_batches),
            reservation,
            credit,
            calls: Calls::new(slots, generation),
            closed: None,
            ending: None,
            closing: Closing::default(),
            told_by_batch: told,
            published: told,
            heard_by_batch: heard,
            heard_by_read: heard,
            read_in_flight: false,
            read_is_probe: false,
            starved: false,
            backoff: Backoff::new(received.batches),
            window: WindowState::new(config.window),
            watch: Watch::new(config.keepalive_ns, config.stall_ns),
            idle: Idle::new(config.idle_keepalive_ns, config.idle_timeout_ns),
            heartbeat,
            heard_heartbeat: heartbeat,
            stats: Stats {
                batches_sent: sent.batches.wrapping_neg(),
                bytes_sent: config.send_start.wrapping_neg(),
                batches_received: received.batches.wrapping_neg(),
                ..Stats::default()
            },
        })
    }

    /// Flow control waits for what a READ would tell (L5).
    fn wants_read(&self) -> bool {
        self.starved || (self.tx.has_unposted() && !self.tx.may_post())
    }

    /// Ends the connection; the first reason stays. All pending calls come out of [`Link::next_event`] as failed.
    pub(crate) fn close(&mut self, reason: CloseReason) {
        if self.closed.is_none() {
            let reason = self.final_reason(reason);
            self.closed = Some(reason);
            self.ending = Some(reason);
            self.tx.stop();
            self.rx.stop();
        }
    }

    /// Why the connection ended, once it has.
    #[must_use]
    pub(crate) const fn closed(&self) -> Option<CloseReason> {
        self.closed
    }

    /// Something waits to be posted.
    #[inline(always)]
    pub(crate) const fn has_unposted(&self) -> bool {
        self.tx.has_unposted()
    }

    fn is_indebted(&self) -> bool {
        self.rx.has_work() || self.tx.has_unposted() || self.owes_mark()
    }

    /// A new heartbeat for the published record, if this side owes the peer anything: requests it has not answered, arrivals it has not
    /// parsed, batches it has not posted (K3). Called every few milliseconds.
    pub(crate) fn beat(&mut self) -> Option<u32> {
        if self.closed.is_some() || !self.is_indebted() {
            return None;
        }
        self.heartbeat = self.heartbeat.wrapping_add(1);
        Some(self.heartbeat)
    }

    /// Nothing to flush and no READ wanted: until the next input only [`Link::poll_read`]'s
    /// keep-alive can ask for work.
    #[must_use]
    pub(crate) fn is_quiet(&self) -> bool {
        let may_flush = self.tx.has_unposted() && !self.window.awaits_completion();
        self.closed.is_some() || !(may_flush || self.wants_read())
    }

    /// Calls that wait for their end.
    #[must_use]
    pub(crate) const fn outstanding_calls(&self) -> usize {
        self.calls.waiting()
    }

    /// Requests the peer has not answered: calls that wait, and calls that were cancelled or ran out of time.
    #[must_use]
    pub(crate) fn unanswered_requests(&self) -> usize {
        self.calls.unanswered()
    }

    /// Receive completions taken since the connection was made, modulo 2^32, for the published record (K2).
    #[must_use]
    #[inline]
    pub(crate) const fn batches_taken(&self) -> u32 {
        self.rx.batches_received() as u32
    }

    /// The application has requests that it has not answered.
    pub(crate) const fn has_taken_requests(&self) -> bool {
        self.rx.requests.has_taken()
    }

    /// A request of a connection that has ended is with the application no more.
    pub(crate) fn let_go(&mut self, request: &Request) {
        if self.closed.is_some() && self.rx.requests.get(request.number).is_some() {
            self.rx.requests.answer(request.number);
        }
    }

    /// Either side waits for the other, so [`Link::beat`] and [`Link::poll_read`] must be called every few milliseconds.
    #[must_use]
    pub(crate) fn is_timed(&self) -> bool {
        self.closed.is_none() && (self.is_watching() || self.is_indebted())
    }

    /// Bytes written and, as far as known, not consumed by the peer.
    #[must_use]
    pub(crate) const fn in_flight(&self) -> u64 {
        self.tx.in_flight()
    }

    /// Response credit in bytes that calls can spend now.
    #[must_use]
    pub(crate) const fn credit_balance(&self) -> u64 {
        self.credit.balance()
    }

    /// Response bytes granted to the peer and not written yet: R of the invariants.
    #[must_use]
    pub(crate) const fn reserved(&self) -> u64 {
        self.reservation.outstanding()
    }

    /// Response bytes that calls of this end have paid for, and those that replies of this end have given back.
    #[must_use]
    pub(crate) const fn credit_used(&self) -> (u64, u64) {
        (self.credit.spent(), self.reservation.released())
    }

    /// Counters since the connection was made.
    #[must_use]
    pub(crate) const fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.batches_sent = stats.batches_sent.wrapping_add(self.tx.batches_sent());
        stats.bytes_sent = stats.bytes_sent.wrapping_add(self.tx.posted());
        stats.messages_sent = (stats.calls + stats.replies).wrapping_sub(self.tx.unposted_messages());
        stats.batches_received = stats.batches_received.wrapping_add(self.rx.batches_received());
        stats.messages_received = self.rx.messages_parsed();
        stats
    }
}
