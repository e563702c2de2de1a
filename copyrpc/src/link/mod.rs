//! One end of a connection as a pure state machine: no queue, clock, thread or system call.
//!
//! Inputs: [`call`](Link::call), [`reply`](Link::reply), [`on_imm`](Link::on_imm), [`on_read_done`](Link::on_read_done),
//! [`close`](Link::close). Outputs are values a driver turns into work: WRITEs ([`flush`](Link::flush)), a READ
//! ([`poll_read`](Link::poll_read)), the published record ([`publish`](Link::publish)), requests and ended calls
//! ([`next_event`](Link::next_event)). No output borrows the link, so a callback of the driver may call and reply.
//!
//! `tx` turns messages into batches, `rx` batches into messages, `credit` keeps both ledgers,
//! `calls` the pending calls; this file joins them and owns every decision that needs two of them.
//! Invariants are cited by their numbers in `docs/copyrpc-protocol.md`.

mod calls;
mod config;
mod credit;
#[cfg(test)]
mod explore;
mod rx;
mod tx;

use calls::{Calls, Pending};
pub use config::LinkConfig;
use credit::{PeerCredit, Reservation};
use rx::{HeldRequest, Item, RecvRing};
pub use tx::Emit;
use tx::SendRing;

use crate::error::{CallError, CallFailure, CloseReason, LinkConfigError, ProtocolError, ReplyError};
use crate::ring::{Payload, RingView};
use crate::stats::Stats;
use crate::wire::{
    ALIGNMENT, CallId, FLOW_METADATA_SIZE, FlowMetadata, FlowWords, Header, METADATA_SPAN, RESPONSE_FLAG, Status, internal_allowance,
    padded, response_capacity,
};

/// Ring bytes a call leaves alone. Twice what a grant leaves (64), so that under load grants to the
/// peer win over own calls and neither side starves (invariant L3).
const CALL_SLACK: u64 = 128;

/// A request with the application. Not `Clone`: it is answered once.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    number: u64,
    payload: Payload,
    max_reply: usize,
}

impl Request {
    /// Where its payload lies in the receive ring; intact until the request is answered.
    #[must_use]
    pub const fn payload(&self) -> Payload {
        self.payload
    }

    /// Most payload bytes a reply may have.
    #[must_use]
    pub const fn max_reply(&self) -> usize {
        self.max_reply
    }
}

/// What [`Link::next_event`] found.
#[derive(Debug)]
pub enum Event<U> {
    /// A request arrived. Requests come in the order they were called.
    Request(Request),
    /// A call ended.
    Ended {
        /// What [`Link::call`] was given.
        user_data: U,
        /// The reply's payload, in the receive ring until the next [`Link::next_event`]; or why there is none.
        outcome: Result<Payload, CallFailure>,
    },
}

/// One end of a connection. `U` is the caller's data per call.
#[derive(Debug)]
pub struct Link<U> {
    keepalive_ns: u64,
    tx: SendRing,
    rx: RecvRing,
    reservation: Reservation,
    credit: PeerCredit,
    calls: Calls<U>,
    closed: Option<CloseReason>,
    /// Last words posted in a batch, which decide when a metadata-only batch is worth it.
    told_by_batch: FlowWords,
    /// Words in the published record.
    published: FlowWords,
    /// Last words heard in a batch; floor of the next (T5).
    heard_by_batch: FlowWords,
    /// Last words heard by READ. A channel of its own: it runs ahead of batches not yet polled.
    heard_by_read: FlowWords,
    read_in_flight: bool,
    /// A call was refused, or little space was left after a batch, and nothing was heard since; neither a batch nor a READ.
    starved: bool,
    /// When silence began to be watched; `None` while the peer is heard or no call waits.
    silent_since_ns: Option<u64>,
    stats: Stats,
}

impl<U> Link<U> {
    /// A connection whose messages go out through the `send` ring and arrive in the `recv` ring.
    ///
    /// # Errors
    /// [`LinkConfigError`] when the rings differ or a number is out of its range.
    pub fn new(send: RingView, recv: RingView, config: &LinkConfig) -> Result<Self, LinkConfigError> {
        config.check(send.size(), recv.size())?;
        let told = FlowWords { consumer_pos: config.recv_start, credit: config.local_credit, batches_received: 0 };
        let heard = FlowWords { consumer_pos: config.send_start, credit: config.peer_credit, batches_received: 0 };
        Ok(Self {
            keepalive_ns: config.keepalive_ns,
            tx: SendRing::new(send, config.send_start, config.peer_batches),
            rx: RecvRing::new(recv, config.recv_start, config.local_batches),
            reservation: Reservation::new(config.local_credit),
            credit: PeerCredit::new(config.peer_credit),
            calls: Calls::new(),
            closed: None,
            told_by_batch: told,
            published: told,
            heard_by_batch: heard,
            heard_by_read: heard,
            read_in_flight: false,
            starved: false,
            silent_since_ns: None,
            stats: Stats::default(),
        })
    }

    /// Sends a request with room for a response of `response_allowance` payload bytes. Nothing
    /// leaves before [`Link::flush`]. A refused call leaves no trace but the wish to READ.
    ///
    /// # Errors
    /// [`CallError`], with `user_data`. `RingFull` and `InsufficientCredit` pass with time.
    pub fn call(&mut self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<(), CallError<U>> {
        if let Some(reason) = self.closed {
            return Err(CallError::Closed { user_data, reason });
        }
        let ring = self.tx.size();
        let message = padded(payload.len() as u64);
        if message > ring.max_message() {
            return Err(CallError::PayloadTooLarge { user_data, len: payload.len(), max: ring.max_payload() as usize });
        }
        let allowance = internal_allowance(response_allowance as u64);
        if allowance > ring.max_internal_allowance() {
            return Err(CallError::AllowanceTooLarge { user_data, len: response_allowance, max: ring.max_response_allowance() as usize });
        }
        if self.credit.balance() < allowance || self.calls.is_full() {
            self.starved = true;
            self.stats.insufficient_credit += 1;
            return Err(CallError::InsufficientCredit(user_data));
        }
        // S4: decided for the whole span, wrap included, before anything is written.
        let place = self.tx.place(message);
        let reserved = 2 * self.reservation.outstanding() + CALL_SLACK;
        if self.tx.in_flight() + place.span() + reserved > ring.bytes() {
            self.starved = true;
            self.stats.ring_full += 1;
            return Err(CallError::RingFull(user_data));
        }
        if self.calls.outstanding() == 0 {
            self.silent_since_ns = None;
        }
        self.credit.spend(allowance);
        let id = self.calls.insert(Pending { user_data, internal_allowance: allowance });
        let header = Header { call_id: id.to_request(), piggyback: (allowance / ALIGNMENT) as u32, len: payload.len() as u32 };
        self.tx.append(place, &header, payload);
        self.stats.calls += 1;
        Ok(())
    }

    /// Answers a request; in any order, at any time. Never fails for want of ring space (S2).
    ///
    /// # Errors
    /// [`ReplyError`]; a payload above [`Request::max_reply`] gives the request back.
    pub fn reply(&mut self, request: Request, payload: &[u8]) -> Result<(), ReplyError<Request>> {
        self.respond(request, Status::Ok, payload)
    }

    /// Answers a request with [`CallFailure::Refused`].
    ///
    /// # Errors
    /// [`ReplyError`] when the connection has ended.
    pub fn refuse(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(request, Status::Refused, &[])
    }

    /// Answers a request that its handler dropped with [`CallFailure::Dropped`].
    ///
    /// # Errors
    /// [`ReplyError`] when the connection has ended.
    pub fn abandon(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(request, Status::Dropped, &[])
    }

    fn respond(&mut self, request: Request, status: Status, payload: &[u8]) -> Result<(), ReplyError<Request>> {
        if let Some(reason) = self.closed {
            return Err(ReplyError::Closed(reason));
        }
        let entry = match self.rx.held(request.number) {
            Some(entry) if entry.payload == request.payload => entry,
            _ => return Err(ReplyError::Foreign(request)),
        };
        let message = padded(payload.len() as u64);
        if message + METADATA_SPAN > entry.internal_allowance {
            return Err(ReplyError::TooLarge { len: payload.len(), max: request.max_reply, request });
        }
        let header =
            Header { call_id: CallId::from_wire(entry.call_id).to_response(), piggyback: status as u32, len: payload.len() as u32 };
        self.tx.append(self.tx.place(message), &header, payload);
        self.reservation.release(entry.internal_allowance);
        self.rx.release(request.number);
        self.stats.replies += 1;
        Ok(())
    }

    /// Hands each batch that may go to `post`, oldest first. A batch counts as sent only when
    /// `post` succeeds; after an error everything not posted is offered again by the next flush
    /// (F2).
    ///
    /// # Errors
    /// The first error of `post`.
    pub fn flush<E>(&mut self, mut post: impl FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        if self.closed.is_some() {
            return Ok(());
        }
        self.offer_metadata_only();
        while let Some(batch) = self.tx.next_batch() {
            if !self.tx.may_post() {
                self.stats.batch_stalls += 1;
                break;
            }
            let words = self.current_words();
            self.rx.note_told(words);
            post(self.tx.fill(&batch, words))?;
            self.tx.commit(&batch);
            self.told_by_batch = words;
            self.starved |= self.tx.free() < self.tx.size().bytes() / 4;
            self.stats.batches_sent += 1;
            self.stats.messages_sent += u64::from(batch.messages());
            self.stats.bytes_sent += batch.bytes();
            self.stats.wraps += u64::from(batch.is_marker());
        }
        Ok(())
    }

    /// Begins a batch without messages when the peer should hear enough news and no data will
    /// carry it: 1/8 ring consumed or 1/16 ring granted, one such batch in flight (L4).
    fn offer_metadata_only(&mut self) {
        if self.tx.has_unposted() || self.tx.metadata_only_in_flight() || !self.tx.may_post() {
            return;
        }
        let words = self.current_words();
        let ring = self.tx.size().bytes();
        let news =
            words.consumer_pos - self.told_by_batch.consumer_pos >= ring / 8 || words.credit - self.told_by_batch.credit >= ring / 16;
        let reserved = 2 * self.reservation.outstanding();
        if news && self.tx.in_flight() + METADATA_SPAN + reserved <= ring {
            self.tx.append_metadata_only();
            self.stats.metadata_only += 1;
        }
    }

    /// Grants what can be granted and says where this side stands.
    fn current_words(&mut self) -> FlowWords {
        self.reservation.top_up(self.tx.size(), self.tx.in_flight());
        FlowWords { consumer_pos: self.rx.consumer_pos(), credit: self.reservation.granted(), batches_received: self.rx.batches_received() }
    }

    /// The words to store in the published record, if they changed. Call it after every round of
    /// arrivals, replies and flushes, and only when the receive queue has been refilled: the peer
    /// may send as many batches as it is told were received (B1).
    pub fn publish(&mut self) -> Option<FlowWords> {
        if self.closed.is_some() {
            return None;
        }
        let words = self.current_words();
        if words == self.published {
            return None;
        }
        self.published = words;
        self.rx.note_told(words);
        Some(words)
    }

    /// Whether to READ the peer's published record now (L5): a call was refused, space is low, the
    /// batch limit holds data back, or calls wait in silence. After posting it, call
    /// [`Link::read_posted`].
    pub fn poll_read(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() || self.read_in_flight {
            return false;
        }
        self.wants_read() || self.is_silent(now_ns)
    }

    fn wants_read(&self) -> bool {
        self.starved || (self.tx.has_unposted() && !self.tx.may_post())
    }

    fn is_silent(&mut self, now_ns: u64) -> bool {
        if self.calls.outstanding() == 0 {
            return false;
        }
        let since = *self.silent_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since) >= self.keepalive_ns
    }

    /// The READ has been posted; the next one waits for its completion.
    pub const fn read_posted(&mut self) {
        self.read_in_flight = true;
        self.starved = false;
        self.stats.reads += 1;
    }

    /// The READ completed with the peer's published record.
    pub fn on_read_done(&mut self, record: &[u8; FLOW_METADATA_SIZE]) {
        self.read_in_flight = false;
        self.silent_since_ns = None;
        if self.closed.is_some() {
            return;
        }
        let words = match FlowMetadata::decode(record) {
            Ok(metadata) if metadata.message_count == 0 => metadata.words,
            _ => return self.close(ProtocolError::ReservedNotZero.into()),
        };
        match self.hear(words, self.heard_by_read) {
            Ok(()) => self.heard_by_read = words,
            Err(error) => self.close(error.into()),
        }
    }

    /// A receive completion with this immediate arrived. Its messages come out of [`Link::next_event`].
    pub fn on_imm(&mut self, imm: u32) {
        if self.closed.is_some() {
            return;
        }
        self.silent_since_ns = None;
        self.starved = false;
        match self.rx.announce(imm) {
            Ok(()) => self.stats.batches_received += 1,
            Err(error) => self.close(error.into()),
        }
    }

    /// The next request or ended call in what arrived; `None` when all is parsed. On a closed connection it ends the pending calls, one
    /// by one.
    pub fn next_event(&mut self) -> Option<Event<U>> {
        while self.closed.is_none() {
            let step = match self.rx.next_item() {
                Ok(None) => return None,
                Ok(Some(item)) => self.take_item(item),
                Err(error) => Err(error),
            };
            match step {
                Ok(None) => {}
                Ok(event) => return event,
                Err(error) => self.close(error.into()),
            }
        }
        let reason = self.closed?;
        self.calls.take_any().map(|pending| Event::Ended { user_data: pending.user_data, outcome: Err(reason.into()) })
    }

    fn take_item(&mut self, item: Item) -> Result<Option<Event<U>>, ProtocolError> {
        match item {
            Item::Flow(words) => {
                self.hear(words, self.heard_by_batch)?;
                self.heard_by_batch = words;
                Ok(None)
            }
            Item::Message { header, position } => {
                self.stats.messages_received += 1;
                if header.call_id & RESPONSE_FLAG == 0 {
                    self.take_request(&header, position).map(Some)
                } else {
                    self.take_response(&header, position)
                }
            }
        }
    }

    /// The peer told its words; `floor` is what the same channel told before (F1, T5).
    fn hear(&mut self, words: FlowWords, floor: FlowWords) -> Result<(), ProtocolError> {
        self.tx.acknowledge(words, floor)?;
        self.credit.raise(self.tx.size(), words.credit, floor.credit)
    }

    fn take_request(&mut self, header: &Header, position: u64) -> Result<Event<U>, ProtocolError> {
        let ring = self.rx.size();
        let message = padded(u64::from(header.len));
        if message > ring.max_message() {
            return Err(ProtocolError::RequestTooLarge { padded: message, max: ring.max_message() });
        }
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        self.reservation.claim(ring, allowance)?;
        let payload = Payload::of_message(position, header.len);
        let number = self.rx.hold(HeldRequest { position, payload, call_id: header.call_id, internal_allowance: allowance });
        Ok(Event::Request(Request { number, payload, max_reply: response_capacity(allowance) as usize }))
    }

    fn take_response(&mut self, header: &Header, position: u64) -> Result<Option<Event<U>>, ProtocolError> {
        let status = Status::from_wire(header.piggyback).ok_or(ProtocolError::UnknownStatus(header.piggyback))?;
        let Some(pending) = self.calls.complete(CallId::from_wire(header.call_id)) else {
            self.stats.stale_responses += 1;
            return Ok(None);
        };
        let max = response_capacity(pending.internal_allowance);
        let outcome = if u64::from(header.len) > max {
            let error = ProtocolError::ResponseTooLarge { len: header.len, max };
            self.close(error.into());
            Err(CallFailure::Closed(error.into()))
        } else {
            match status {
                Status::Ok => Ok(Payload::of_message(position, header.len)),
                Status::Dropped => Err(CallFailure::Dropped),
                Status::Refused => Err(CallFailure::Refused),
            }
        };
        Ok(Some(Event::Ended { user_data: pending.user_data, outcome }))
    }

    /// Ends the connection; the first reason stays. All pending calls come out of [`Link::next_event`] as failed.
    pub fn close(&mut self, reason: CloseReason) {
        self.closed.get_or_insert(reason);
    }

    /// Why the connection ended, once it has.
    #[must_use]
    pub const fn closed(&self) -> Option<CloseReason> {
        self.closed
    }

    /// Nothing to flush and no READ wanted: until the next input only [`Link::poll_read`]'s
    /// keep-alive can ask for work.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.closed.is_some() || !(self.tx.has_unposted() || self.wants_read())
    }

    /// Calls that wait for their end.
    #[must_use]
    pub const fn outstanding_calls(&self) -> usize {
        self.calls.outstanding()
    }

    /// Bytes written and, as far as known, not consumed by the peer.
    #[must_use]
    pub const fn in_flight(&self) -> u64 {
        self.tx.in_flight()
    }

    /// Response credit in bytes that calls can spend now.
    #[must_use]
    pub const fn credit_balance(&self) -> u64 {
        self.credit.balance()
    }

    /// Response bytes granted to the peer and not written yet: R of the invariants.
    #[must_use]
    pub const fn reserved(&self) -> u64 {
        self.reservation.outstanding()
    }

    /// Counters since the connection was made.
    #[must_use]
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }
}
