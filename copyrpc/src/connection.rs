//! A connection: the protocol core, its memory and its queue pair, and their driver.
//!
//! User code (callbacks, drops of user data) runs only while no part of the connection is borrowed,
//! so user code may call, reply and receive.

mod batches;

use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use batches::{ACTIVITY, Batches, INLINE_MAX, LAST, Posts, RAW, READ, WINDOWED_WRITE};
use mlx5::{CompletionError, Cqe, Mr, PostError, RcQp, Read, Sge, Signal};
use mlx5_rendezvous::Peer;

pub(crate) use batches::Remote;

use crate::control::ControlMemory;
use crate::error::{CallFailure, CloseReason};
use crate::link::{Event, Held, Link, Message, Request};
use crate::queue_share::QueueShare;
use crate::raw::{RawOperations, RdmaError};
use crate::ring::{RecvBytes, RingView};
use crate::timers::{Timed, Timer, Timers};
use crate::wire::{ACTIVITY_SIZE, decode_activity};
use crate::worklist::{Listed, Listing, Worklist};

/// The outcome of a call: the reply's bytes, or why there are none.
pub type Outcome<'a> = Result<RecvBytes<'a>, CallFailure>;

/// The receiver of the events of a drain.
pub(crate) trait Receiver<U> {
    /// Whether the receiver answers or holds requests as they arrive. If so, requests are passed to
    /// [`Receiver::on_request`], otherwise they are added to the context's queue.
    const TAKES_REQUESTS: bool;

    /// Takes a request with these bytes. Must answer or hold the request before it returns.
    fn on_request(
        &mut self,
        connection: &Rc<Connection<U>>,
        request: Request,
        bytes: RecvBytes<'_>,
    );

    fn on_response(&mut self, user_data: U, outcome: Outcome<'_>);
}

/// A callback takes only the ends of calls; requests are added to the context's queue.
impl<U, F: FnMut(U, Outcome<'_>)> Receiver<U> for F {
    const TAKES_REQUESTS: bool = false;

    fn on_request(
        &mut self,
        _connection: &Rc<Connection<U>>,
        _request: Request,
        _bytes: RecvBytes<'_>,
    ) {
    }

    #[inline(always)]
    fn on_response(&mut self, user_data: U, outcome: Outcome<'_>) {
        self(user_data, outcome);
    }
}

/// Serial number that the next connection of this process gets. The token of a call holds the
/// serial number of the call's connection.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// The resources of an endpoint from the device and the context's queues, until its connection is
/// retired.
pub(crate) struct Resources {
    /// The queue pair. The field is declared before the memory that the queue pair uses, so it is
    /// dropped first.
    pub(crate) qp: RcQp,
    /// Memory that no peer can access.
    pub(crate) send_ring: Mr,
    pub(crate) recv_ring: Mr,
    pub(crate) share: QueueShare,
}

pub(crate) struct Connection<U> {
    qpn: u32,
    pub(crate) serial: u64,
    core: RefCell<Core<U>>,
    /// The receive ring of a retired connection, while the application has requests in it.
    kept_ring: RefCell<Option<Box<Mr>>>,
    /// The published record, and the destination of READs. The field is declared after the queue
    /// pair, which READs into this memory and so has to be dropped first.
    control: ControlMemory,
    pub(crate) recv_view: RingView,
    pub(crate) remote: Remote,
    /// The difference between the address of a byte in the peer's receive ring and the address of
    /// the same byte in this end's send ring.
    to_peer: u64,
    inline_limit: u64,
    pub(crate) raw: RawOperations<U>,
    listing: Listing<Self>,
    timer: Cell<Timer>,
    worklist: Rc<Worklist<Self>>,
    blueflame_batch: bool,
    handles: Cell<usize>,
    leaving: Cell<Leaving>,
    /// The peer, if this is a server's connection to a client.
    pub(crate) peer: Cell<Option<Peer>>,
}

struct Core<U> {
    /// `None` once the connection is retired: from then on the peer can write nothing.
    resources: Option<Resources>,
    link: Link<U>,
}

impl<U> fmt::Debug for Connection<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (closed, stats) = self.with_link(|link| (link.closed(), link.stats()));
        f.debug_struct("Connection")
            .field("qpn", &self.qpn)
            .field("closed", &closed)
            .field("stats", &stats)
            .finish_non_exhaustive()
    }
}

impl<U> Core<U> {
    /// Takes a completion of the send queue. Returns the word that was posted with the operation.
    fn complete(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        self.resources
            .as_mut()
            .and_then(|resources| resources.qp.complete(cqe))
    }
}

/// The progress of a connection whose context is being dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// The context is not being dropped, or this end has nothing left to send.
    No,
    /// Some messages are not posted yet, or the READ after them is not.
    Begun,
    /// All messages are posted, and after them a READ. When the READ completes, all messages have
    /// arrived.
    AllPosted,
}

/// A guard that is dropped only when a callback panics while events of the connection are still to
/// be delivered; the drop lists the connection for the next drain.
struct Interrupted<'a, U>(&'a Rc<Connection<U>>);

impl<U> Drop for Interrupted<'_, U> {
    fn drop(&mut self) {
        self.0.worklist.mark_unfinished(self.0);
    }
}

/// A guard whose drop, also by the panic of a callback, sets a connection's timer again after an
/// expiry, and reports to the peer if no call waits any more.
struct Rearm<'a, U>(&'a Rc<Connection<U>>);

impl<U> Drop for Rearm<'_, U> {
    fn drop(&mut self) {
        if let Some(at_ns) = self.0.with_link(Link::next_deadline) {
            self.0.arm(at_ns);
        }
        self.0.publish_rest();
    }
}

impl<U> Timed for Connection<U> {
    fn timer(&self) -> &Cell<Timer> {
        &self.timer
    }
}

impl<U> Listed for Connection<U> {
    #[inline(always)]
    fn listing(&self) -> &Listing<Self> {
        &self.listing
    }

    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn has_request(&self) -> bool {
        self.with_link(|link| link.has_request())
    }

    fn is_timed(&self) -> bool {
        self.with_link(|link| link.is_timed())
    }

    #[inline]
    fn take_request(&self) -> Option<Held> {
        let mut link = self.link();
        if link.closed().is_some() {
            None
        } else {
            link.take_request()
        }
    }

    fn sweep(self: &Rc<Self>) -> bool {
        let (heartbeat, is_watching, is_timed) =
            self.with_link(|link| (link.beat(), link.is_watching(), link.is_timed()));
        if let Some(heartbeat) = heartbeat {
            self.control.beat(heartbeat);
        }
        if is_watching {
            self.mark_dirty();
        }
        is_timed
    }
}

impl<U> Connection<U> {
    pub(crate) fn new(
        resources: Resources,
        link: Link<U>,
        control: ControlMemory,
        recv_view: RingView,
        remote: Remote,
        worklist: Rc<Worklist<Self>>,
        blueflame_batch: bool,
    ) -> Self {
        Self {
            qpn: resources.qp.qpn(),
            serial: CONNECTIONS.fetch_add(1, Ordering::Relaxed),
            to_peer: remote
                .ring_addr
                .wrapping_sub(resources.send_ring.as_ptr().addr().get() as u64),
            inline_limit: INLINE_MAX.min(resources.qp.max_inline_data() as u64),
            raw: RawOperations::new(resources.share.raw_operations()),
            kept_ring: RefCell::new(None),
            core: RefCell::new(Core {
                resources: Some(resources),
                link,
            }),
            control,
            recv_view,
            remote,
            listing: Listing::new(),
            timer: Cell::new(Timer::NONE),
            worklist,
            blueflame_batch,
            handles: Cell::new(0),
            leaving: Cell::new(Leaving::No),
            peer: Cell::new(None),
        }
    }

    pub(crate) const fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Borrows the core. No user code may run while the core is borrowed.
    #[inline(always)]
    pub(crate) fn link(&self) -> RefMut<'_, Link<U>> {
        RefMut::map(self.core.borrow_mut(), |core| &mut core.link)
    }

    /// Reads or changes the core. `f` must not run user code.
    #[inline(always)]
    pub(crate) fn with_link<R>(&self, f: impl FnOnce(&mut Link<U>) -> R) -> R {
        f(&mut self.core.borrow_mut().link)
    }

    #[inline]
    pub(crate) fn mark_dirty(self: &Rc<Self>) {
        self.worklist.mark_dirty(self);
    }

    /// If this connection is closed, lists it for the next drain, which releases it. Must be called
    /// after everything that can close the core.
    fn note_end(self: &Rc<Self>) {
        if self.is_closed() {
            self.worklist.mark_unfinished(self);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.with_link(|link| link.closed().is_some())
    }

    /// Delivers the events of the core after a batch arrived with this immediate: responses to the
    /// receiver, requests to the receiver or to the context's queue. The core is borrowed except
    /// while user code runs.
    #[inline(never)]
    pub(crate) fn deliver<R: Receiver<U>>(self: &Rc<Self>, imm: u32, receiver: &mut R) {
        let mut link = self.link();
        link.on_imm(imm);
        self.control.note_taken(link.batches_taken());
        self.worklist.note_arrival(self);
        let interrupted = Interrupted(self);
        loop {
            match link.next_message(R::TAKES_REQUESTS) {
                Message::Reply {
                    user_data,
                    payload,
                    payload_at,
                } => {
                    drop(link);
                    // SAFETY: the core has checked that the bytes of the payload are in the ring.
                    let bytes =
                        unsafe { self.recv_view.bytes_at(payload_at, payload.len() as u32) };
                    receiver.on_response(user_data, Ok(bytes));
                }
                Message::Request {
                    request,
                    payload_at,
                } => {
                    drop(link);
                    // SAFETY: the core has checked that the bytes of the request are in the ring.
                    let bytes = unsafe {
                        self.recv_view
                            .bytes_at(payload_at, request.payload().len() as u32)
                    };
                    receiver.on_request(self, request, bytes);
                }
                Message::Done => break,
                Message::Other => {
                    drop(link);
                    if !self.deliver_event(receiver) {
                        link = self.link();
                        break;
                    }
                }
            }
            link = self.link();
        }
        std::mem::forget(interrupted);
        if let Some(heartbeat) = link.rest() {
            self.control.beat(heartbeat);
        }
        // A reply that is written in place does not list the connection for the next flush, so this
        // is done here.
        if R::TAKES_REQUESTS && link.has_open_messages() && link.closed().is_none() {
            self.mark_dirty();
        }
    }

    /// Delivers the events that are left in the core: events of batches that arrived earlier, or of
    /// the connection's end.
    pub(crate) fn deliver_rest(self: &Rc<Self>, receiver: &mut impl Receiver<U>) {
        let interrupted = Interrupted(self);
        while self.deliver_event(receiver) {}
        std::mem::forget(interrupted);
    }

    #[inline(never)]
    fn deliver_event(self: &Rc<Self>, receiver: &mut impl Receiver<U>) -> bool {
        let event = self.link().next_event();
        match event {
            Some(Event::Requests(count)) => self.worklist.add_requests(self, count),
            Some(Event::Ended { user_data, outcome }) => {
                receiver.on_response(
                    user_data,
                    outcome.map(|payload| self.recv_view.bytes(payload)),
                );
            }
            None => {
                self.note_end();
                return false;
            }
        }
        true
    }

    /// Ends the one-sided operations of a retired connection. Its queue pair is destroyed, so no
    /// operation accesses memory any more.
    pub(crate) fn end_raw(&self, receiver: &mut impl Receiver<U>) {
        while let Some((user_data, reason)) = self.take_failed_raw() {
            receiver.on_response(user_data, Err(CallFailure::Closed(reason)));
        }
    }

    /// Ends the calls whose deadlines have passed. Returns their number. Calls made by the callback
    /// have deadlines at `now_ns` or later, so the loop ends.
    pub(crate) fn expire(self: &Rc<Self>, now_ns: u64, receiver: &mut impl Receiver<U>) -> usize {
        let _rearm = Rearm(self);
        let mut ended = 0;
        while let Some(user_data) = self.with_link(|link| link.expire(now_ns)) {
            ended += 1;
            // The next flush sends a notice of the end of the call to the peer.
            self.mark_dirty();
            receiver.on_response(user_data, Err(CallFailure::TimedOut));
        }
        ended
    }

    /// Reports to the peer if no call waits any more, after the early end of a call (K6 of
    /// docs/copyrpc-protocol.md).
    pub(crate) fn publish_rest(&self) {
        if let Some(heartbeat) = self.with_link(|link| link.rest()) {
            self.control.beat(heartbeat);
        }
    }

    /// Schedules a check of the deadlines, by a drain, once `at_ns` has passed.
    pub(crate) fn arm(self: &Rc<Self>, at_ns: u64) {
        self.worklist.timers().arm(self, at_ns);
    }

    pub(crate) fn timers(&self) -> &Timers<Self> {
        self.worklist.timers()
    }

    /// Checks whether to READ the record of an idle connection's peer, or to end the connection
    /// (K4, K5), and sets the time of the next check.
    pub(crate) fn check_idle(self: &Rc<Self>, now_ns: u64) {
        let (has_work, next_ns) =
            self.with_link(|link| (link.check_idle(now_ns), link.next_idle_check(now_ns)));
        if has_work {
            self.mark_dirty();
        }
        if let Some(next_ns) = next_ns {
            self.worklist.timers().arm_idle(self, next_ns);
        }
    }

    /// READs the peer's record with the next flush, unless a READ is under way.
    pub(crate) fn probe(self: &Rc<Self>) {
        if self.with_link(Link::want_probe) {
            self.mark_dirty();
        }
    }

    /// Takes a completion of the send queue. Returns whether there was progress. A READ of the
    /// peer's record or activity word counts as progress only if it brought new flow-control words.
    pub(crate) fn complete(
        self: &Rc<Self>,
        cqe: &Cqe<'_>,
        receiver: &mut impl Receiver<U>,
    ) -> bool {
        let user = self.core.borrow_mut().complete(cqe);
        match cqe.result() {
            Err(error) => self.fail(error),
            Ok(()) if matches!(user, Some(READ | ACTIVITY)) => {
                let read = self.control.take_read();
                let has_words = self.with_link(|link| {
                    if user == Some(READ) {
                        return link.on_read_done(&read);
                    }
                    link.on_activity_read(decode_activity(&read));
                    false
                });
                self.mark_dirty();
                self.deliver_rest(receiver);
                return has_words;
            }
            Ok(()) if user == Some(RAW) => {
                if let Some(user_data) = self.raw.end() {
                    receiver.on_response(user_data, Ok(RecvBytes::empty()));
                }
            }
            Ok(()) if user == Some(WINDOWED_WRITE) => {
                if self.with_link(Link::on_write_done) {
                    self.mark_dirty();
                }
            }
            // All messages posted before this READ have arrived, so there is nothing left to wait
            // for.
            Ok(()) if user == Some(LAST) => self.leaving.set(Leaving::No),
            // The send queue has room again. If messages wait for room, their connection is still
            // on the worklist.
            Ok(()) => {}
        }
        true
    }

    /// Begins the graceful end with the next flush. Does nothing for a connection that has ended:
    /// nothing serves it, and its context may be gone.
    pub(crate) fn close(self: &Rc<Self>) {
        if !self.is_closed() {
            self.with_link(Link::shut_down);
            self.mark_dirty();
        }
    }

    pub(crate) fn add_handle(&self) {
        self.handles.set(self.handles.get() + 1);
    }

    pub(crate) fn remove_handle(self: &Rc<Self>) {
        self.handles.set(self.handles.get() - 1);
        if self.handles.get() == 0 {
            self.close();
        }
    }

    /// Begins the graceful end, for a context that is being dropped. If nothing is outstanding in
    /// either direction, the connection ends at the peer as if this end had closed it.
    pub(crate) fn begin_leaving(self: &Rc<Self>) {
        if !self.is_closed() {
            self.close();
            self.leaving.set(Leaving::Begun);
        }
    }

    /// Posts as many of the remaining messages as there is room for, if the context is being
    /// dropped. Returns whether some messages may not have arrived at the peer yet.
    pub(crate) fn is_leaving(self: &Rc<Self>) -> bool {
        if self.leaving.get() == Leaving::No || self.is_closed() {
            return false;
        }
        // This flush also completes the end of a connection whose peer has closed it.
        self.flush(self.worklist.timers().now_ns());
        let all_told = self.with_link(|link| link.closed().is_none() && link.has_told_all());
        if self.leaving.get() == Leaving::Begun && all_told {
            let resources = &mut self.core.borrow_mut().resources;
            let posted = resources
                .as_mut()
                .map(|Resources { qp, .. }| self.post_read(qp, LAST).map(|()| qp.ring()));
            self.leaving.set(match posted {
                Some(Ok(())) => Leaving::AllPosted,
                Some(Err(PostError::QueueFull { .. })) => Leaving::Begun,
                Some(Err(_)) | None => Leaving::No,
            });
        }
        self.leaving.get() != Leaving::No && !self.is_closed()
    }

    /// Ends the connection at once. Does nothing for a connection that has ended: the worklist
    /// finds connections by queue pair number, and the number may already belong to another
    /// connection.
    pub(crate) fn abort(self: &Rc<Self>) {
        if !self.is_closed() {
            self.end(CloseReason::ClosedHere);
        }
    }

    /// Drops the user data of everything that has not ended, for a closed connection that is not
    /// polled any more.
    pub(crate) fn discard(&self) {
        while self.with_link(Link::next_event).is_some() {}
        while self.take_failed_raw().is_some() {}
    }

    pub(crate) fn fail(self: &Rc<Self>, error: CompletionError) {
        self.end(CloseReason::of(error));
    }

    /// Ends the connection for this reason, unless it has ended.
    pub(crate) fn end(self: &Rc<Self>, reason: CloseReason) {
        self.with_link(|link| link.close(reason));
        self.note_end();
    }

    /// Posts the batches that may be sent, and the READ that is due, and refreshes the published
    /// record. The connection stays on the worklist while work is left. The doorbell is rung as
    /// soon as the last batch is posted, so that the rest of the work overlaps with the transfer.
    #[inline(always)]
    pub(crate) fn flush(self: &Rc<Self>, now_ns: u64) {
        let Core { resources, link } = &mut *self.core.borrow_mut();
        let Some(Resources { qp, send_ring, .. }) = resources else {
            return;
        };
        let posted = link.flush_easy(&mut self.batches(qp, send_ring));
        if !matches!(posted, Ok(true)) || !link.is_at_rest(now_ns) {
            self.flush_rest(qp, send_ring, link, now_ns);
        }
    }

    /// Completes a flush: posts READs, further batches, and everything else that
    /// [`Link::flush_easy`] did not do.
    #[inline(never)]
    fn flush_rest(self: &Rc<Self>, qp: &mut RcQp, send_ring: &Mr, link: &mut Link<U>, now_ns: u64) {
        let outcome = if self.blueflame_batch {
            let mut batch = qp.blueflame_batch();
            let outcome = self.post_all(link, &mut batch, send_ring, now_ns);
            if batch.finish() {
                link.count_blueflame_batch();
            }
            outcome
        } else {
            self.post_all(link, qp, send_ring, now_ns)
        };
        if let Some(words) = link.publish() {
            self.control.publish(words);
        }
        qp.ring();
        // A full send queue drains by itself. Any other error means that the queue pair is broken.
        if !matches!(outcome, Ok(()) | Err(PostError::QueueFull { .. })) {
            link.close(CloseReason::Disconnected);
        }
        if !link.is_quiet() {
            self.mark_dirty();
            self.worklist.note_left(link.read_pause_ns(now_ns));
        }
        if link.ends_calls() {
            self.worklist.mark_unfinished(self);
        }
    }

    fn post_all(
        &self,
        link: &mut Link<U>,
        qp: &mut impl Posts,
        send_ring: &Mr,
        now_ns: u64,
    ) -> Result<(), PostError> {
        let mut batches = self.batches(qp, send_ring);
        link.flush_all(&mut batches)?;
        if link.poll_read(now_ns) {
            let user = if link.asks_activity() { ACTIVITY } else { READ };
            self.post_read(batches.qp, user)?;
            link.read_posted();
        }
        Ok(())
    }

    #[inline(always)]
    const fn batches<'a, Q>(&'a self, qp: &'a mut Q, send_ring: &'a Mr) -> Batches<'a, Q> {
        Batches {
            qp,
            send_ring,
            remote: &self.remote,
            to_peer: self.to_peer,
            inline_limit: self.inline_limit,
            control: &self.control,
        }
    }

    fn post_read(&self, qp: &mut impl Posts, user: u64) -> Result<(), PostError> {
        let (remote, into) = (&self.remote, self.control.read_target());
        let read = match user {
            ACTIVITY => Read {
                addr: remote.activity_addr,
                rkey: remote.activity_rkey,
                into: Sge {
                    len: ACTIVITY_SIZE,
                    ..into
                },
            },
            _ => Read {
                addr: remote.published_addr,
                rkey: remote.published_rkey,
                into,
            },
        };
        qp.post(&read, Signal::Always, user)
    }

    /// Calls `post` with the queue pair and the word that the completion will return, to post an
    /// operation that uses `memory`. The next flush rings the doorbell.
    pub(crate) fn post_raw(
        self: &Rc<Self>,
        memory: &Rc<Mr>,
        user_data: U,
        post: impl FnOnce(&mut RcQp, u64) -> Result<(), PostError>,
    ) -> Result<(), RdmaError<U>> {
        let Core { resources, link } = &mut *self.core.borrow_mut();
        let closed = link.closed();
        let (Some(Resources { qp, .. }), None) = (resources, closed) else {
            return Err(RdmaError::Closed {
                user_data,
                reason: closed.unwrap_or(CloseReason::Disconnected),
            });
        };
        self.raw.post(qp, memory, user_data, |qp| post(qp, RAW))?;
        self.mark_dirty();
        Ok(())
    }

    /// Takes a one-sided operation that ends because the connection has ended.
    fn take_failed_raw(&self) -> Option<(U, CloseReason)> {
        let reason = self.with_link(|link| link.closed())?;
        self.raw.end().map(|user_data| (user_data, reason))
    }

    /// Destroys the queue pair of a connection that has ended, and frees its other resources. The
    /// receive ring stays while the application has requests whose bytes are in it.
    pub(crate) fn retire(&self) {
        let Some(Resources {
            qp,
            send_ring,
            recv_ring,
            share,
        }) = self.core.borrow_mut().resources.take()
        else {
            return;
        };
        drop((qp, send_ring, share));
        if self.with_link(|link| link.has_taken_bytes()) {
            self.kept_ring.replace(Some(Box::new(recv_ring)));
        }
    }

    /// Releases an unanswered request of a connection that has ended.
    pub(crate) fn release(&self, request: &Request) {
        let has_others = self.with_link(|link| {
            link.release(request);
            link.has_taken_bytes()
        });
        if !has_others {
            self.kept_ring.take();
        }
    }
}
