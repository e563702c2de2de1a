//! One connection: the protocol core, its memory and its queue pair, and how they are driven.
//!
//! User code (callbacks, drops of user data) runs only while nothing here is borrowed, so it may call, reply and receive.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::{CompletionError, Cqe, Inline, Mr, PostError, RcQp, Read, Signal, WriteImm};

use crate::control::ControlMemory;
use crate::error::{CallFailure, CloseReason};
use crate::link::{Emit, Event, Link, Request};
use crate::queue_share::QueueShare;
use crate::ring::{RecvBytes, RingView};
use crate::timers::{Timer, Timers};

/// Inline bytes of the largest WQE (four WQEBBs) that is inline alone.
const INLINE_MAX: u64 = 220;
/// Inline bytes of a WQE of that size that also has an SGE for the rest.
const HYBRID_INLINE: u64 = 204;

/// How a call ended: the reply's bytes, or why there are none.
pub type Outcome<'a> = Result<RecvBytes<'a>, CallFailure>;

/// What a WQE was, in the word that comes back with its completion.
const WRITE: u64 = 0;
const READ: u64 = 1;

/// Numbers the connections of this process, so that a call's token names its own.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// Connections and requests that wait for the owner's attention, now or at a time. Shared by the context and its connections.
#[derive(Debug)]
pub(crate) struct Worklist<U> {
    /// Connections with something to flush, READ or publish. Each once.
    dirty: RefCell<Vec<Rc<Connection<U>>>>,
    /// Connections that are closed, or whose callback panicked: the next drain goes on with them. Each once.
    unfinished: RefCell<Vec<Rc<Connection<U>>>>,
    /// Connections whose requests are next for the application, and how many of them: in the order of arrival, over all connections.
    requests: RefCell<VecDeque<(Rc<Connection<U>>, usize)>>,
    timers: Timers<U>,
}

impl<U> Worklist<U> {
    pub(crate) fn new() -> Self {
        Self { dirty: RefCell::default(), unfinished: RefCell::default(), requests: RefCell::default(), timers: Timers::start() }
    }

    pub(crate) const fn timers(&self) -> &Timers<U> {
        &self.timers
    }

    /// The oldest request of a connection that has not ended.
    #[inline]
    pub(crate) fn next_request(&self) -> Option<(Rc<Connection<U>>, Request)> {
        let mut requests = self.requests.borrow_mut();
        while let Some((connection, left)) = requests.front_mut() {
            let next = if *left == 0 { None } else { connection.take_request() };
            if let Some(request) = next {
                *left -= 1;
                return Some((Rc::clone(connection), request));
            }
            // All were taken, or it has ended. Its drop finds nothing borrowed.
            let done = requests.pop_front();
            drop(requests);
            drop(done);
            requests = self.requests.borrow_mut();
        }
        None
    }

    #[inline]
    fn add_requests(&self, connection: &Rc<Connection<U>>, count: usize) {
        if count > 0 {
            self.requests.borrow_mut().push_back((Rc::clone(connection), count));
        }
    }

    /// Swaps the dirty connections with an empty vector.
    pub(crate) fn swap_dirty(&self, batch: &mut Vec<Rc<Connection<U>>>) {
        std::mem::swap(&mut *self.dirty.borrow_mut(), batch);
    }

    /// A connection that a drain has to go on with. It stays listed until [`Worklist::finish`].
    pub(crate) fn unfinished(&self) -> Option<Rc<Connection<U>>> {
        self.unfinished.borrow().last().cloned()
    }

    pub(crate) fn finish(&self, connection: &Connection<U>) {
        self.unfinished.borrow_mut().retain(|other| other.qpn != connection.qpn);
        connection.is_unfinished.set(false);
    }

    /// There is nothing to flush of a connection that was retired: its share of the queues must not wait for a flush.
    pub(crate) fn forget_dirty(&self, connection: &Connection<U>) {
        if connection.is_dirty.replace(false) {
            self.dirty.borrow_mut().retain(|other| other.qpn != connection.qpn);
        }
    }

    pub(crate) fn clear(&self) {
        let connections = (self.dirty.take(), self.unfinished.take());
        let requests = self.requests.take();
        drop((connections, requests));
    }
}

/// Where the peer is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) ring_addr: u64,
    pub(crate) ring_rkey: u32,
    pub(crate) published_addr: u64,
    pub(crate) published_rkey: u32,
}

/// The registered memory of one endpoint.
#[derive(Debug)]
pub(crate) struct Memory {
    /// No peer can reach it.
    pub(crate) send_ring: Mr,
    pub(crate) recv_ring: Mr,
    pub(crate) control: ControlMemory,
}

#[derive(Debug)]
pub(crate) struct Connection<U> {
    qpn: u32,
    serial: u64,
    /// `None` once retired: then the peer can write nothing any more. Declared before the memory it uses.
    qp: RefCell<Option<RcQp>>,
    link: RefCell<Link<U>>,
    memory: Memory,
    recv_view: RingView,
    remote: Remote,
    inline_limit: u64,
    is_dirty: Cell<bool>,
    is_unfinished: Cell<bool>,
    timer: Cell<Timer>,
    worklist: Rc<Worklist<U>>,
    /// Given back to the context when the connection is dropped.
    _share: QueueShare,
}

/// Dropped when a callback panics, with the rest of its connection's events not handed out.
struct Interrupted<'a, U>(&'a Rc<Connection<U>>);

impl<U> Drop for Interrupted<'_, U> {
    fn drop(&mut self) {
        self.0.mark_unfinished();
    }
}

/// Sets a connection's timer again after an expiry, also one ended by a panic of a callback.
struct Rearm<'a, U>(&'a Rc<Connection<U>>);

impl<U> Drop for Rearm<'_, U> {
    fn drop(&mut self) {
        if let Some(at_ns) = self.0.with_link(Link::next_deadline) {
            self.0.arm(at_ns);
        }
    }
}

impl<U> Connection<U> {
    pub(crate) fn new(
        qp: RcQp,
        link: Link<U>,
        memory: Memory,
        recv_view: RingView,
        remote: Remote,
        worklist: Rc<Worklist<U>>,
        share: QueueShare,
    ) -> Self {
        Self {
            qpn: qp.qpn(),
            serial: CONNECTIONS.fetch_add(1, Ordering::Relaxed),
            inline_limit: INLINE_MAX.min(qp.max_inline_data() as u64),
            qp: RefCell::new(Some(qp)),
            link: RefCell::new(link),
            memory,
            recv_view,
            remote,
            is_dirty: Cell::new(false),
            is_unfinished: Cell::new(false),
            timer: Cell::new(Timer::NONE),
            worklist,
            _share: share,
        }
    }

    pub(crate) const fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Different from that of every other connection of this process.
    pub(crate) const fn serial(&self) -> u64 {
        self.serial
    }

    pub(crate) const fn recv_view(&self) -> &RingView {
        &self.recv_view
    }

    /// Reads or changes the core. `f` runs no user code.
    #[inline(always)]
    pub(crate) fn with_link<R>(&self, f: impl FnOnce(&mut Link<U>) -> R) -> R {
        f(&mut self.link.borrow_mut())
    }

    /// Has the next flush look at this connection.
    #[inline]
    pub(crate) fn mark_dirty(self: &Rc<Self>) {
        if !self.is_dirty.get() {
            self.list_dirty();
        }
    }

    #[inline(never)]
    fn list_dirty(self: &Rc<Self>) {
        self.is_dirty.set(true);
        self.worklist.dirty.borrow_mut().push(Rc::clone(self));
    }

    fn mark_unfinished(self: &Rc<Self>) {
        if !self.is_unfinished.replace(true) {
            self.worklist.unfinished.borrow_mut().push(Rc::clone(self));
        }
    }

    /// Has the next drain part with this connection if it is closed. Called after whatever can close the core.
    fn note_end(self: &Rc<Self>) {
        if self.is_closed() {
            self.mark_unfinished();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.with_link(|link| link.closed().is_some())
    }

    /// `None` once the connection has ended.
    #[inline]
    fn take_request(&self) -> Option<Request> {
        self.with_link(|link| if link.closed().is_some() { None } else { link.take_request() })
    }

    /// A batch arrived. Ends calls and queues requests.
    pub(crate) fn arrive(self: &Rc<Self>, imm: u32, on_response: &mut impl FnMut(U, Outcome<'_>)) {
        self.with_link(|link| link.on_imm(imm));
        self.mark_dirty();
        self.deliver(on_response);
    }

    /// Hands out what the core has: responses to the callback, requests to the queue.
    #[inline]
    pub(crate) fn deliver(self: &Rc<Self>, on_response: &mut impl FnMut(U, Outcome<'_>)) {
        let interrupted = Interrupted(self);
        let mut requests = 0;
        while let Some(event) = self.with_link(|link| link.next_event()) {
            match event {
                Event::Request => requests += 1,
                Event::Ended { user_data, outcome } => {
                    // What arrived before can be received in the callback.
                    self.worklist.add_requests(self, std::mem::take(&mut requests));
                    on_response(user_data, outcome.map(|payload| self.recv_view.bytes(payload)));
                }
            }
        }
        self.worklist.add_requests(self, requests);
        std::mem::forget(interrupted);
        self.note_end();
    }

    /// Ends the calls whose deadlines have passed. Returns how many. Calls made by the callback have theirs after `now_ns`, so it ends.
    pub(crate) fn expire(self: &Rc<Self>, now_ns: u64, on_response: &mut impl FnMut(U, Outcome<'_>)) -> usize {
        let _rearm = Rearm(self);
        let mut ended = 0;
        while let Some(user_data) = self.with_link(|link| link.expire(now_ns)) {
            ended += 1;
            on_response(user_data, Err(CallFailure::DeadlineExceeded));
        }
        ended
    }

    /// Has a drain look at the deadlines once `at_ns` has passed.
    pub(crate) fn arm(self: &Rc<Self>, at_ns: u64) {
        self.worklist.timers.arm(self, at_ns);
    }

    pub(crate) const fn timer(&self) -> &Cell<Timer> {
        &self.timer
    }

    pub(crate) fn timers(&self) -> &Timers<U> {
        &self.worklist.timers
    }

    /// Has a connection whose peer should be heard looked at, and tells the peer that this end lives (K1, K3).
    pub(crate) fn sweep(self: &Rc<Self>) {
        let (heartbeat, is_watching) = self.with_link(|link| (link.beat(), link.unanswered_requests() > 0));
        if let Some(heartbeat) = heartbeat {
            self.memory.control.beat(heartbeat);
        }
        if is_watching {
            self.mark_dirty();
        }
    }

    /// A completion of the send queue.
    pub(crate) fn complete(self: &Rc<Self>, cqe: &Cqe<'_>, on_response: &mut impl FnMut(U, Outcome<'_>)) {
        let user = self.qp.borrow_mut().as_mut().and_then(|qp| qp.complete(cqe));
        match cqe.result() {
            Err(error) => self.fail(error),
            Ok(()) if user == Some(READ) => {
                let record = self.memory.control.take_read();
                self.with_link(|link| link.on_read_done(&record));
                self.mark_dirty();
                self.deliver(on_response);
            }
            // Room in the send queue: what waited for it is still on the worklist.
            Ok(()) => {}
        }
    }

    /// The device reported an error: the connection ends.
    pub(crate) fn fail(self: &Rc<Self>, error: CompletionError) {
        self.with_link(|link| link.close(CloseReason::of(error)));
        self.note_end();
    }

    /// Posts what may go, READs where starved, refreshes the published record, rings once. Stays on the worklist while work is left.
    pub(crate) fn serve(self: &Rc<Self>, now_ns: u64) {
        self.is_dirty.set(false);
        let mut qp = self.qp.borrow_mut();
        let Some(qp) = qp.as_mut() else { return };
        let mut link = self.link.borrow_mut();
        let mut outcome = link.flush(|emit| self.post_batch(qp, emit));
        if outcome.is_ok() && link.poll_read(now_ns) {
            outcome = self.post_read(qp);
            if outcome.is_ok() {
                link.read_posted();
            }
        }
        if let Some(words) = link.publish() {
            self.memory.control.publish(words);
        }
        qp.ring();
        // A full send queue drains by itself. Any other error means that the queue pair is broken; its completion tells the reason, if
        // one comes.
        if !matches!(outcome, Ok(()) | Err(PostError::QueueFull { .. })) {
            link.close(CloseReason::Disconnected);
        }
        let is_quiet = link.is_quiet();
        drop(link);
        if !is_quiet {
            self.mark_dirty();
        }
        self.note_end();
    }

    fn post_batch(&self, qp: &mut RcQp, emit: Emit) -> Result<(), PostError> {
        let inline = if emit.bytes <= self.inline_limit {
            emit.bytes
        } else if self.inline_limit >= HYBRID_INLINE {
            HYBRID_INLINE
        } else {
            0
        };
        // SAFETY: `flush` emits ranges inside the ring, and nothing writes the send ring while the slice lives: only this link does.
        let head = unsafe {
            let start = self.memory.send_ring.as_ptr().add(emit.offset as usize);
            std::slice::from_raw_parts(start.as_ptr(), inline as usize)
        };
        let rest = mlx5::Sge {
            addr: self.memory.send_ring.addr() + emit.offset + inline,
            len: (emit.bytes - inline) as u32,
            lkey: self.memory.send_ring.lkey(),
        };
        let write = WriteImm {
            addr: self.remote.ring_addr + emit.offset,
            rkey: self.remote.ring_rkey,
            imm: emit.imm,
            payload: (Inline(head), rest),
        };
        qp.post(&write, Signal::Reclaim, WRITE)
    }

    fn post_read(&self, qp: &mut RcQp) -> Result<(), PostError> {
        let read = Read { addr: self.remote.published_addr, rkey: self.remote.published_rkey, into: self.memory.control.read_target() };
        qp.post(&read, Signal::Always, READ)
    }

    /// Takes the connection off the device. Its memory stays while handles to its requests live.
    pub(crate) fn retire(&self) {
        self.qp.take();
    }
}
