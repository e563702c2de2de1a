//! One end of a connection as a pure state machine: no queue, clock, thread or system call.
//!
//! Inputs: [`call`](Link::call), [`cancel`](Link::cancel), [`reply`](Link::reply), [`on_imm`](Link::on_imm),
//! [`on_write_done`](Link::on_write_done), [`on_read_done`](Link::on_read_done), [`shut_down`](Link::shut_down), [`close`](Link::close), and the time. Outputs are values a driver turns into work: WRITEs ([`flush`](Link::flush)), a READ
//! ([`poll_read`](Link::poll_read)), the published record ([`publish`](Link::publish), [`beat`](Link::beat)), requests and ended calls
//! ([`next_event`](Link::next_event), [`expire`](Link::expire)). No output borrows the link, so a callback of the driver may call and reply.
//!
//! `tx` turns messages into batches, `rx` batches into messages, `credit` keeps both ledgers,
//! `calls` the pending calls, `deadlines` their times, `watch` the time since the peer was heard, `idle` the time since anything happened,
//! `window` the batches under way, `backoff` the READs, `closing` the graceful end. This file and `incoming` join them
//! and own every decision that needs two of them: this one what goes out, that one what comes in.
//! Invariants are cited by their numbers in `docs/copyrpc-protocol.md`.

mod backoff;
mod calls;
mod closing;
mod config;
mod credit;
mod deadlines;
#[cfg(test)]
mod explore;
mod held;
mod idle;
mod incoming;
mod rx;
mod tx;
mod watch;
mod window;

use backoff::Backoff;
pub(crate) use calls::CallKey;
use calls::{Calls, NEVER};
use closing::Closing;
pub(crate) use config::LinkConfig;
pub(crate) use config::Past;
#[cfg(test)]
pub(crate) use config::Traffic;
use credit::{PeerCredit, Reservation};
pub(crate) use deadlines::Deadlines;
use held::HeldRequest;
use idle::Idle;
use rx::RecvRing;
pub(crate) use tx::Emit;
use tx::{Batch, SendRing};
use watch::Watch;
pub use window::Window;
use window::{Hold, WindowState};

use crate::error::{CallError, CallFailure, CloseReason, LinkConfigError, ReplyError};
use crate::ring::{Payload, RingView};
use crate::stats::Stats;
use crate::wire::{ALIGNMENT, CallId, FlowWords, Header, METADATA_SPAN, Status, internal_allowance, padded, response_capacity};

/// Ring bytes a call leaves alone. Twice what a grant leaves (64), so that under load grants to the
/// peer win over own calls and neither side starves (invariant L3).
const CALL_SLACK: u64 = 128;

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
    },
    /// A request.
    Request(Request),
    /// All is parsed.
    Done,
    /// Something else: [`Link::next_event`] knows.
    Other,
}

/// Where batches are posted. A trait and no closure: what posts the one that mostly comes is inlined for sure.
pub(crate) trait Poster<E> {
    /// Posts a batch.
    fn post(&mut self, emit: Emit) -> Result<(), E>;
}

/// What the size of the rings allows, in bytes.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// L1.
    message: u64,
    /// L2.
    internal_allowance: u64,
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

    /// As [`Link::new`], with that much behind it. For tests.
    ///
    /// # Errors
    /// As [`Link::new`].
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
            stats: Stats::default(),
        })
    }

    /// Sends a request with room for a response of `response_allowance` payload bytes. Nothing
    /// leaves before [`Link::flush`]. A refused call leaves no trace but the wish to READ.
    ///
    /// # Errors
    /// [`CallError`], with `user_data`. `RingFull` and `InsufficientCredit` pass with time.
    pub(crate) fn call(&mut self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallKey, CallError<U>> {
        self.call_until(payload, user_data, response_allowance, NEVER)
    }

    /// As [`Link::call`], but once `deadline_ns` has passed, in the clock of [`Link::expire`], the call ends there. `u64::MAX` is no
    /// deadline.
    ///
    /// # Errors
    /// As [`Link::call`].
    #[inline(never)]
    pub(crate) fn call_until(
        &mut self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
        deadline_ns: u64,
    ) -> Result<CallKey, CallError<U>> {
        if let Err(refusal) = self.make_call_room(payload.len(), response_allowance) {
            return Err(refusal.map_user_data(|()| user_data));
        }
        let allowance = internal_allowance(response_allowance as u64);
        self.place_call(payload, user_data, allowance, deadline_ns).map_err(CallError::InsufficientCredit)
    }

    /// A call without a deadline, if room for it is known; else, and nothing has changed, its user data comes back: [`Link::call`] decides.
    #[inline(always)]
    pub(crate) fn try_call(&mut self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallKey, U> {
        let (message, allowance) = (padded(payload.len() as u64), internal_allowance(response_allowance as u64));
        if self.tx.has_call_room(message) && self.may_call(message, allowance) {
            self.place_call(payload, user_data, allowance, NEVER)
        } else {
            Err(user_data)
        }
    }

    /// Appends a call that is admitted (S4). Without a slot for it nothing has changed.
    #[inline(always)]
    fn place_call(&mut self, payload: &[u8], user_data: U, allowance: u64, deadline_ns: u64) -> Result<CallKey, U> {
        let key = self.calls.insert(user_data, allowance, deadline_ns)?;
        if self.calls.unanswered() == 1 {
            self.watch.news();
        }
        self.credit.spend(allowance);
        let header = Header { call_id: key.id().to_request(), piggyback: (allowance / ALIGNMENT) as u32, len: payload.len() as u32 };
        self.tx.append(&header, payload);
        self.stats.calls += 1;
        Ok(key)
    }

    /// L1, L2, and the credit for it.
    #[inline(always)]
    const fn may_call(&self, message: u64, allowance: u64) -> bool {
        message <= self.limits.message && allowance <= self.limits.internal_allowance && allowance <= self.credit.balance()
    }

    /// Decides whether a call is taken; wraps if its message has to, and finds it a slot.
    #[cold]
    #[inline(never)]
    fn make_call_room(&mut self, len: usize, response_allowance: usize) -> Result<(), CallError<()>> {
        let user_data = ();
        if let Some(reason) = self.ending {
            return Err(CallError::Closed { user_data, reason });
        }
        let ring = self.tx.size();
        let message = padded(len as u64);
        if message > ring.max_message() {
            return Err(CallError::PayloadTooLarge { user_data, len, max: ring.max_payload() as usize });
        }
        let allowance = internal_allowance(response_allowance as u64);
        if allowance > ring.max_internal_allowance() {
            return Err(CallError::AllowanceTooLarge { user_data, len: response_allowance, max: ring.max_response_allowance() as usize });
        }
        if !self.may_call(message, allowance) || !self.calls.make_room() {
            self.starved = true;
            self.stats.insufficient_credit += 1;
            return Err(CallError::InsufficientCredit(user_data));
        }
        // S4: decided for the whole span, wrap included, before anything is written.
        let reserved = 2 * self.reservation.outstanding() + CALL_SLACK;
        if self.tx.in_flight() + self.tx.span_of(message) + reserved > ring.bytes() {
            self.starved = true;
            self.stats.ring_full += 1;
            return Err(CallError::RingFull(user_data));
        }
        self.tx.make_place(message);
        self.tx.open_to_calls(reserved);
        Ok(())
    }

    /// Ends a call at once: its user data comes back here and not through [`Link::next_event`]. `None` when the call has ended already.
    /// The peer is not told; its response will be dropped (C3).
    pub(crate) fn cancel(&mut self, call: CallKey) -> Option<U> {
        let user_data = self.calls.abandon(call)?;
        self.stats.cancelled += 1;
        Some(user_data)
    }

    /// Ends one call whose deadline is before `now_ns`, with [`CallFailure::DeadlineExceeded`] (C4). Repeat it until `None`.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Option<U> {
        if self.closed.is_some() {
            return None;
        }
        let user_data = self.calls.expire(now_ns)?;
        self.stats.deadlines_exceeded += 1;
        Some(user_data)
    }

    /// The earliest deadline of the calls that have not ended.
    pub(crate) fn next_deadline(&mut self) -> Option<u64> {
        if self.closed.is_some() { None } else { self.calls.next_deadline() }
    }

    /// Answers a request in place, if nothing stands in the way; else nothing has changed, and [`Link::respond`] knows what to do.
    #[inline(always)]
    pub(crate) fn reply_in_place(&mut self, request: &Request, payload: &[u8]) -> bool {
        // A link that is closed has no room.
        let (message, allowance) = (padded(payload.len() as u64), u64::from(request.internal_allowance));
        let is_easy = request.number == IN_PLACE && message + METADATA_SPAN <= allowance && self.tx.fits_lap(message);
        if is_easy {
            self.append_response(request, Status::Ok, payload);
        }
        is_easy
    }

    #[inline(always)]
    fn append_response(&mut self, request: &Request, status: Status, payload: &[u8]) {
        let header =
            Header { call_id: CallId::from_wire(request.call_id).to_response(), piggyback: status as u32, len: payload.len() as u32 };
        self.tx.append(&header, payload);
        self.reservation.release(u64::from(request.internal_allowance));
        self.stats.replies += 1;
    }

    /// Answers a request whose owner keeps it, and does so once all the same.
    #[inline]
    pub(crate) fn respond(&mut self, request: &Request, status: Status, payload: &[u8]) -> Result<(), ReplyError<()>> {
        if let Some(reason) = self.closed {
            return Err(ReplyError::Closed(reason));
        }
        let is_held = request.number != IN_PLACE;
        if is_held && self.rx.requests.get(request.number).is_none_or(|held| held.position != request.payload.message()) {
            return Err(ReplyError::Foreign(()));
        }
        let message = padded(payload.len() as u64);
        let allowance = u64::from(request.internal_allowance);
        if message + METADATA_SPAN > allowance {
            return Err(ReplyError::TooLarge { len: payload.len(), max: request.max_reply(), request: () });
        }
        self.tx.make_place(message);
        self.append_response(request, status, payload);
        if is_held {
            self.rx.requests.answer(request.number);
        }
        Ok(())
    }

    /// Holds a request that is to be answered later than in place.
    #[must_use]
    pub(crate) fn hold(&mut self, request: &Request) -> Request {
        let Request { payload, internal_allowance, call_id, .. } = *request;
        let held = HeldRequest { position: payload.message(), call_id, len: payload.len() as u32, internal_allowance };
        Request { number: self.rx.requests.push_taken(held), payload, internal_allowance, call_id }
    }

    /// The batch that a flush posts, where it is the only one and nothing stands in the way; to be followed by
    /// [`Link::easy_batch_posted`], unless it cannot be posted. Else nothing has changed.
    #[inline(always)]
    fn easy_batch(&mut self) -> Option<(Emit, FlowWords)> {
        if self.ending.is_some() || !self.tx.has_easy_batch() || self.window.begin(self.tx.unposted()) {
            return None;
        }
        let words = self.grant();
        self.rx.note_told(words);
        Some((self.tx.fill_easy_batch(words), words))
    }

    /// The batch of [`Link::easy_batch`] was posted, with these words.
    #[inline(always)]
    fn easy_batch_posted(&mut self, words: FlowWords) {
        self.told_by_batch = words;
        self.stats.batches_sent += 1;
        self.stats.messages_sent += u64::from(self.tx.open_count());
        self.stats.bytes_sent += self.tx.unposted();
        self.tx.commit_easy_batch();
        self.note_posted();
    }

    #[inline(always)]
    fn note_posted(&mut self) {
        self.starved |= self.tx.free() < self.tx.size().bytes() / 4;
    }

    /// Hands each batch that may go to `poster`, oldest first: B1 and the window (W1) hold batches back. A batch counts as sent only when
    /// it succeeds; after an error everything not posted is offered again by the next flush (F2). What it returns is for
    /// [`Link::publish_after`].
    ///
    /// # Errors
    /// The first error of `poster`.
    #[inline(always)]
    pub(crate) fn flush_to<E>(&mut self, poster: &mut impl Poster<E>) -> Result<Option<FlowWords>, E> {
        let Some((emit, words)) = self.easy_batch() else { return self.flush_any(&mut |emit| poster.post(emit)).map(|()| None) };
        poster.post(emit)?;
        self.easy_batch_posted(words);
        Ok(Some(words))
    }

    #[inline(never)]
    fn flush_any<E>(&mut self, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        if self.ending.is_some() {
            return self.flush_closing(post);
        }
        let words = self.grant();
        self.offer_metadata_only(words);
        self.post_waiting(words, post)
    }

    fn post_waiting<E>(&mut self, words: FlowWords, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        // What is posted here changes none of the words: it was in flight before.
        if self.window.begin(self.tx.unposted()) {
            return self.flush_windowed(words, post);
        }
        while let Some(batch) = self.next_to_post() {
            self.post_batch(&batch, words, false, post)?;
            if !self.tx.has_unposted() {
                break;
            }
        }
        Ok(())
    }

    fn next_to_post(&mut self) -> Option<Batch> {
        let batch = self.tx.next_batch()?;
        if !self.tx.may_post() {
            self.stats.batch_stalls += 1;
            return None;
        }
        Some(batch)
    }

    fn post_batch<E>(
        &mut self,
        batch: &Batch,
        words: FlowWords,
        signal: bool,
        post: &mut dyn FnMut(Emit) -> Result<(), E>,
    ) -> Result<(), E> {
        self.rx.note_told(words);
        post(self.tx.fill(batch, words, signal))?;
        self.tx.commit(batch);
        self.told_by_batch = words;
        self.note_posted();
        self.stats.batches_sent += 1;
        self.stats.messages_sent += u64::from(batch.messages());
        self.stats.bytes_sent += batch.bytes();
        self.stats.wraps += u64::from(batch.is_marker());
        Ok(())
    }

    /// The flush of what the window applies to: it waits for a place, or takes one (W1).
    #[inline(never)]
    fn flush_windowed<E>(&mut self, words: FlowWords, post: &mut dyn FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        if let Some(hold) = self.window.hold(self.tx.batches_received()) {
            // Like a refused call: the peer's word would help (L5).
            self.starved |= hold == Hold::PeersWord;
            self.stats.window_stalls += 1;
            return Ok(());
        }
        while let Some(batch) = self.next_to_post() {
            // What a wrap cut in parts takes one place, with its last part (W2).
            let takes_place = batch.span() == self.tx.unposted();
            self.post_batch(&batch, words, takes_place && self.window.needs_completions(), post)?;
            if takes_place {
                self.window.posted(self.tx.batches_sent());
            }
        }
        Ok(())
    }

    /// Begins a batch without messages when the peer should hear enough news and no data will
    /// carry it: 1/8 ring consumed or 1/16 ring granted, one such batch in flight (L4).
    #[inline]
    fn offer_metadata_only(&mut self, words: FlowWords) {
        if self.tx.has_unposted() || self.tx.metadata_only_in_flight() || !self.tx.may_post() {
            return;
        }
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
    #[inline(always)]
    fn grant(&mut self) -> FlowWords {
        let may_have_granted = self.reservation.top_up(self.tx.size(), self.tx.in_flight());
        if may_have_granted && self.ending.is_none() {
            self.tx.open_to_calls(2 * self.reservation.outstanding() + CALL_SLACK);
        }
        self.current_words()
    }

    #[inline(always)]
    fn current_words(&self) -> FlowWords {
        FlowWords { consumer_pos: self.rx.consumer_pos(), credit: self.reservation.granted(), batches_received: self.rx.batches_received() }
    }

    /// The words to store in the published record, if they changed. Call it after every round of
    /// arrivals, replies and flushes, and only when the receive queue has been refilled: the peer
    /// may send as many batches as it is told were received (B1).
    pub(crate) fn publish(&mut self) -> Option<FlowWords> {
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

    /// As [`Link::publish`], with nothing in between, after a flush that returned `told`: the words as they are, if it knows them.
    #[inline(always)]
    pub(crate) fn publish_after(&mut self, told: Option<FlowWords>) -> Option<FlowWords> {
        match told {
            Some(words) if self.closed.is_none() => {
                self.published = words;
                told
            }
            _ => self.publish(),
        }
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

    /// Counters since the connection was made.
    #[must_use]
    pub(crate) const fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// What tests drive a link by.
#[cfg(test)]
impl<U> Link<U> {
    /// Answers a request; in any order, at any time. Never fails for want of ring space (S2).
    ///
    /// # Errors
    /// [`ReplyError`]; a payload above [`Request::max_reply`] gives the request back.
    pub(crate) fn reply(&mut self, request: Request, payload: &[u8]) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Ok, payload).map_err(|error| error.map_request(|()| request))
    }

    /// Answers a request with [`CallFailure::Refused`].
    ///
    /// # Errors
    /// [`ReplyError`] when the connection has ended.
    pub(crate) fn refuse(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Refused, &[]).map_err(|error| error.map_request(|()| request))
    }

    /// Answers a request that its handler dropped with [`CallFailure::Dropped`].
    ///
    /// # Errors
    /// [`ReplyError`] when the connection has ended.
    pub(crate) fn abandon(&mut self, request: Request) -> Result<(), ReplyError<Request>> {
        self.respond(&request, Status::Dropped, &[]).map_err(|error| error.map_request(|()| request))
    }

    /// As [`Link::flush_to`], to a closure.
    ///
    /// # Errors
    /// The first error of `post`.
    pub(crate) fn flush<E>(&mut self, post: impl FnMut(Emit) -> Result<(), E>) -> Result<(), E> {
        self.flush_to(&mut FromFn(post)).map(|_words| ())
    }
}

/// A [`Poster`] of a closure.
#[cfg(test)]
struct FromFn<F>(F);

#[cfg(test)]
impl<E, F: FnMut(Emit) -> Result<(), E>> Poster<E> for FromFn<F> {
    fn post(&mut self, emit: Emit) -> Result<(), E> {
        (self.0)(emit)
    }
}
