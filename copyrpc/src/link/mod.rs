//! An end of a connection as a pure state machine: no queue, clock, thread or system call.
//!
//! Inputs: [`try_call`](Link::try_call), [`cancel`](Link::cancel), [`respond`](Link::respond),
//! [`on_imm`](Link::on_imm), [`on_write_done`](Link::on_write_done),
//! [`on_read_done`](Link::on_read_done), [`shut_down`](Link::shut_down), [`close`](Link::close),
//! and the time. Outputs are values that a driver executes: WRITEs
//! ([`flush_all`](Link::flush_all)), a READ ([`poll_read`](Link::poll_read)), the published record
//! ([`publish`](Link::publish), [`beat`](Link::beat)), requests and ended calls
//! ([`next_event`](Link::next_event), [`expire`](Link::expire)). Requests and ended calls do not
//! borrow the link, so a callback of the driver may call and reply.
//!
//! `tx` turns messages into batches, `rx` batches into messages, `held` keeps the requests until
//! they are answered, `credit` the credit granted to the peer and by the peer, `calls` the pending
//! calls, `watch` the time since the last sign of the peer, `idle` the time since the last event,
//! `window` the batches under way, `backoff` the pause between READs, `closing` the progress of the
//! graceful end. Three files join them and make every decision that needs two of them: `outgoing`
//! (into the send ring), `flush` (out of it), `incoming` (arrivals). Invariants are cited by their
//! numbers in `docs/copyrpc-protocol.md`.

mod backoff;
mod calls;
mod closing;
mod config;
mod credit;
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
use credit::{PeerCredit, Reservation};
#[cfg(test)]
pub(crate) use explore::past;
pub(crate) use flush::Poster;
use idle::Idle;
use rx::RecvRing;
use tx::SendRing;
pub(crate) use tx::{EasyBatch, Emit};
use watch::Watch;
pub use window::Window;
use window::WindowState;

use crate::error::{CallFailure, CloseReason};
use crate::ring::{Payload, RingView};
use crate::stats::Stats;
use crate::wire::{ALIGNMENT, FlowWords, PublishedRecord, response_capacity};

/// A request that the application has and must answer once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    hold: Hold,
    payload: Payload,
    internal_allowance: u32,
    call_id: u32,
}

/// The claim of a request to its bytes in the receive ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// The bytes stay until the next arrival is taken. Before that, the request must be answered or
    /// held.
    InPlace,
    /// The bytes stay until the request is answered. The value is the request's number among the
    /// held requests, modulo 2^32.
    Held(u32),
    /// The application has copied the bytes, or does not need them. The value is the request's
    /// index among these requests.
    WithoutBytes(u32),
}

/// The identifier of a request that the application holds. The link keeps the rest of the
/// [`Request`], so that a held request takes little memory in the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// Number of the request among the held requests, modulo 2^32.
    WithBytes(u32),
    /// Index of the request among those without bytes.
    WithoutBytes(u32),
    Answered,
}

impl Request {
    /// A request that allows no reply.
    const NONE: Self = Self {
        hold: Hold::InPlace,
        payload: Payload::EMPTY,
        internal_allowance: 0,
        call_id: 0,
    };

    /// Returns the identifier of a request that is not in place any more.
    pub(crate) const fn name(&self) -> Held {
        match self.hold {
            Hold::Held(number) => Held::WithBytes(number),
            Hold::WithoutBytes(index) => Held::WithoutBytes(index),
            Hold::InPlace => Held::Answered,
        }
    }

    /// Returns whether the caller gave up the call, as far as this end knows.
    pub(crate) const fn is_given_up(&self) -> bool {
        self.call_id & held::GIVEN_UP != 0
    }

    /// Returns the place of the request's payload in the receive ring. [`Hold`] determines for how
    /// long the bytes stay.
    pub(crate) const fn payload(&self) -> Payload {
        self.payload
    }

    pub(crate) const fn max_reply(&self) -> usize {
        response_capacity(self.internal_allowance as u64) as usize
    }
}

/// The result of [`Link::next_event`].
#[derive(Debug)]
pub(crate) enum Event<U> {
    /// Number of requests that arrived, at least one; [`Link::take_request`] returns them.
    Requests(usize),
    Ended {
        user_data: U,
        /// The reply's payload, in the receive ring until the next [`Link::next_event`]; or the
        /// reason why there is none.
        outcome: Result<Payload, CallFailure>,
    },
}

/// The result of [`Link::next_message`].
#[derive(Debug)]
pub(crate) enum Message<U> {
    /// The reply that a call waits for.
    Reply {
        user_data: U,
        /// The payload, in the receive ring until the next message is taken.
        payload: Payload,
        payload_at: NonNull<u8>,
    },
    Request {
        request: Request,
        payload_at: NonNull<u8>,
    },
    /// All messages that arrived are parsed.
    Done,
    /// Any other event: [`Link::next_event`] returns it.
    Other,
}

/// Limits up to which a call that is made, or a request that arrives, needs no further check: the
/// limits of the ring size, or 0 once no request may reach the application any more (G5).
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Maximum length of a padded message (L1).
    message: u64,
    /// Maximum internal allowance (L2).
    internal_allowance: u64,
}

impl Limits {
    const NONE: Self = Self {
        message: 0,
        internal_allowance: 0,
    };

    #[inline(always)]
    const fn allow(&self, message: u64, internal_allowance: u64) -> bool {
        message <= self.message && internal_allowance <= self.internal_allowance
    }
}

/// The flow-control words of which a change can make an end send a batch without messages (L4).
#[derive(Clone, Copy, Debug)]
struct News {
    consumer_pos: u64,
    credit: u64,
}

/// Returns the heartbeat of an end that waits for no call, and whose calls have spent `credit`.
#[inline(always)]
const fn rest_after(credit: u64) -> u32 {
    (credit / ALIGNMENT) as u32 | PublishedRecord::RESTS
}

/// An end of a connection. `U` is the caller's data per call.
#[derive(Debug)]
pub(crate) struct Link<U> {
    limits: Limits,
    tx: SendRing,
    rx: RecvRing,
    reservation: Reservation,
    credit: PeerCredit,
    calls: Calls<U>,
    closed: Option<CloseReason>,
    /// Reason why no more calls are admitted: the connection has ended with this reason, or will
    /// end with it when all requests are answered.
    ending: Option<CloseReason>,
    closing: Closing,
    /// Words of the last batch sent. Their difference to the current words decides whether to send
    /// a metadata-only batch.
    told_by_batch: News,
    /// Whether the published record has older words than the last batch. Otherwise the record has
    /// the words that were sent last.
    is_unpublished: bool,
    /// Words of the last batch received; the minimum of the words of the next batch (T5).
    heard_by_batch: FlowWords,
    /// Words taken from the last READ. READs are a channel of their own, which runs ahead of
    /// batches that are not polled yet.
    heard_by_read: FlowWords,
    /// Words of the last READ as they arrived. If READs may mix bytes of several moments, each word
    /// counts up to the smaller of its values in the last two READs (F3).
    last_read: FlowWords,
    reads_whole_words: bool,
    read_in_flight: bool,
    /// Whether the READ in flight was posted only because time passed, and not for flow control.
    read_is_probe: bool,
    /// Whether this end needs words of the peer, which a READ brings: since the last batch arrived
    /// and the last READ was posted, a call was refused, a batch left little space, or the window
    /// held back a batch.
    starved: bool,
    backoff: Backoff,
    window: WindowState,
    watch: Watch,
    idle: Idle,
    /// Word of the published record that changes while this side owes the peer something (K3).
    heartbeat: u32,
    heard_heartbeat: u32,
    /// Whether the peer was found to have done nothing for too long while a READ was in flight.
    is_suspicious: bool,
    /// Whether the READ that is wanted or in flight reads the activity word of the peer's context,
    /// which shows whether a handler runs there (K7).
    asks_activity: bool,
    heard_activity: u64,
    /// Counters. [`Link::stats`] computes some of them from positions and from other counters; the
    /// value kept here is then at most a correction, added modulo 2^64.
    stats: Stats,
}

impl<U> Link<U> {
    /// Makes a connection that sends its messages from the `send` ring and receives in the `recv`
    /// ring.
    pub(crate) fn new(send: RingView, recv: RingView, config: &LinkConfig) -> Self {
        debug_assert!(config.is_covered(send.size(), recv.size()), "{config:?}");
        let reservation = Reservation::new(recv.size(), config.local_credit);
        let credit = PeerCredit::new(config.peer_credit);
        let told = FlowWords {
            consumer_pos: config.recv_start,
            credit: reservation.granted(),
            batches_received: 0,
        };
        let heard = FlowWords {
            consumer_pos: config.send_start,
            credit: credit.granted(),
            batches_received: 0,
        };
        Self {
            limits: Limits {
                message: send.size().max_message(),
                internal_allowance: send.size().max_internal_allowance(),
            },
            tx: SendRing::new(
                send,
                config.send_start,
                config.peer_batches,
                config.window != Window::Off,
            ),
            rx: RecvRing::new(recv, told, config.local_batches),
            reservation,
            credit,
            calls: Calls::new(),
            closed: None,
            ending: None,
            closing: Closing::default(),
            told_by_batch: News {
                consumer_pos: told.consumer_pos,
                credit: told.credit,
            },
            is_unpublished: false,
            heard_by_batch: heard,
            heard_by_read: heard,
            last_read: heard,
            reads_whole_words: config.reads_whole_words,
            read_in_flight: false,
            read_is_probe: false,
            starved: false,
            backoff: Backoff::new(),
            window: WindowState::new(config.window),
            watch: Watch::new(config.keepalive_ns, config.stall_ns),
            idle: Idle::new(config.idle_keepalive_ns, config.idle_timeout_ns),
            heartbeat: 0,
            heard_heartbeat: 0,
            is_suspicious: false,
            asks_activity: false,
            heard_activity: 0,
            stats: Stats {
                bytes_sent: config.send_start.wrapping_neg(),
                ..Stats::default()
            },
        }
    }

    /// Returns whether flow control waits for words that a READ would bring (L5).
    fn wants_read(&self) -> bool {
        self.starved || (self.tx.has_unposted() && !self.tx.may_post())
    }

    /// Ends the connection; the first reason stays. [`Link::next_event`] returns all pending calls
    /// as failed.
    pub(crate) fn close(&mut self, reason: CloseReason) {
        if self.closed.is_none() {
            let reason = self.final_reason(reason);
            self.closed = Some(reason);
            self.ending = Some(reason);
            self.tx.stop();
            self.rx.stop();
        }
    }

    pub(crate) const fn closed(&self) -> Option<CloseReason> {
        self.closed
    }

    /// Returns whether the open batch, which is after any wrap that waits, has messages.
    #[inline(always)]
    pub(crate) const fn has_open_messages(&self) -> bool {
        self.tx.has_open_messages()
    }

    fn is_indebted(&self) -> bool {
        self.rx.has_work() || self.tx.has_unposted() || self.owes_mark()
    }

    /// Returns a new heartbeat for the published record, if this side owes the peer anything:
    /// requests it has not answered, arrivals it has not parsed, batches or a closing mark it has
    /// not posted (K3). The driver calls this about every 10 ms.
    pub(crate) fn beat(&mut self) -> Option<u32> {
        if self.closed.is_some() || !self.is_indebted() {
            return None;
        }
        self.heartbeat = self.heartbeat.wrapping_add(1) & !PublishedRecord::RESTS;
        Some(self.heartbeat)
    }

    /// See [`Endpoint::suspend_window`](crate::Endpoint::suspend_window).
    pub(crate) fn suspend_window(&mut self, is_suspended: bool) {
        self.window.suspend(is_suspended);
    }

    /// Returns the heartbeat that reports to the peer that no call of this end waits, if this end
    /// gave up calls (K6). Must be called whenever a call has ended.
    #[inline(always)]
    pub(crate) const fn rest(&self) -> Option<u32> {
        if self.calls.unanswered() > 0 && self.calls.waiting() == 0 {
            Some(rest_after(self.credit.spent()))
        } else {
            None
        }
    }

    /// Returns whether no call of the peer waits for the requests that have arrived, according to
    /// the peer's last heartbeat (K6).
    pub(super) const fn peer_rests(&self) -> bool {
        self.heard_heartbeat == rest_after(self.reservation.claimed())
    }

    /// Returns whether there is nothing to flush and no READ wanted: until the next input only the
    /// keep-alive of [`Link::poll_read`] can ask for work.
    pub(crate) fn is_quiet(&self) -> bool {
        let may_flush = self.tx.has_unposted() && !self.window.awaits_completion();
        self.closed.is_some() || !(may_flush || self.wants_read())
    }

    /// Returns the time that is left of the pause before a READ that is wanted and delayed, in ns.
    /// A poll after that time posts the READ, and so do enough polls before (L5). The driver's
    /// thread must not sleep longer, because no event wakes it for the READ.
    pub(crate) fn read_pause_ns(&self, now_ns: u64) -> Option<u64> {
        (self.closed.is_none() && !self.read_in_flight && self.wants_read())
            .then(|| self.backoff.rest_ns(now_ns))
    }

    pub(crate) const fn outstanding_calls(&self) -> usize {
        self.calls.waiting()
    }

    /// Returns the number of requests that the peer has not answered: those of calls that wait, and
    /// those of calls that were cancelled, ran out of time, or were refused by the peer's mark.
    pub(crate) fn unanswered_requests(&self) -> usize {
        self.calls.unanswered()
    }

    /// Returns the number of receive completions taken since the connection was made, modulo 2^32,
    /// for the published record (K2).
    pub(crate) const fn batches_taken(&self) -> u32 {
        self.rx.batches_received() as u32
    }

    /// Returns whether the application has requests that it has not answered, and whose bytes it
    /// did not release.
    pub(crate) const fn has_taken_bytes(&self) -> bool {
        self.rx.requests.has_taken_bytes()
    }

    #[inline(always)]
    pub(crate) fn held(&self, name: Held) -> Request {
        match name {
            Held::WithBytes(number) => self.rx.requests.get(number),
            Held::WithoutBytes(index) => self.rx.requests.get_released(index),
            Held::Answered => Request::NONE,
        }
    }

    pub(crate) fn release_bytes(&mut self, request: &mut Request) {
        self.rx.requests.release_bytes(request);
    }

    /// Releases an unanswered request of a connection that has ended.
    pub(crate) fn release(&mut self, request: &Request) {
        self.rx.requests.answer(request.hold);
    }

    /// Returns whether either side waits for the other, so that [`Link::beat`] and
    /// [`Link::poll_read`] must be called about every 10 ms.
    pub(crate) fn is_timed(&self) -> bool {
        self.closed.is_none() && (self.is_watching() || self.is_indebted())
    }

    /// Returns the credit, in response bytes, that calls of this end have used, and the credit that
    /// replies of this end have returned.
    pub(crate) const fn credit_used(&self) -> (u64, u64) {
        (self.credit.spent(), self.reservation.released())
    }

    pub(crate) const fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.batches_sent = stats.batches_sent.wrapping_add(self.tx.batches_sent());
        stats.bytes_sent = stats.bytes_sent.wrapping_add(self.tx.posted());
        stats.messages_sent =
            (stats.calls + stats.replies + stats.notices).wrapping_sub(self.tx.unposted_messages());
        stats.batches_received = stats
            .batches_received
            .wrapping_add(self.rx.batches_received());
        stats.messages_received = self.rx.messages_parsed();
        stats
    }
}

/// The numbers that tests compare with the invariants.
#[cfg(test)]
impl<U> Link<U> {
    /// Returns the number of bytes written and, as far as known, not consumed by the peer.
    pub(crate) const fn in_flight(&self) -> u64 {
        self.tx.in_flight()
    }

    pub(crate) const fn credit_balance(&self) -> u64 {
        self.credit.balance()
    }

    /// Returns the response bytes granted to the peer and not written yet: R of the invariants.
    pub(crate) const fn reserved(&self) -> u64 {
        self.reservation.outstanding()
    }
}
