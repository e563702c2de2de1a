//! The work of a context: lists of its connections that need service.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use mlx5::Device;

use crate::link::Held;
use crate::timers::{Timed, Timers};

pub(crate) trait Listed: Timed + Sized {
    fn listing(&self) -> &Listing<Self>;

    /// Returns a number that no other connection of the context has.
    fn qpn(&self) -> u32;

    fn has_request(&self) -> bool;

    fn is_timed(&self) -> bool;

    /// Takes the connection's oldest request that waits to be received; `None` if none waits, or
    /// the connection has ended.
    fn take_request(&self) -> Option<Held>;

    /// Changes the heartbeat that the peer READs, if this end owes the peer something (K3 of
    /// docs/copyrpc-protocol.md). Lists the connection for the next flush, if the peer owes this
    /// end something (K1). Returns whether either side waits for the other.
    fn sweep(self: &Rc<Self>) -> bool;
}

/// Connections and requests that need the owner's attention, now or later. Shared by the context
/// and its connections.
pub(crate) struct Worklist<C> {
    /// Head of the list of connections that the next flush visits, each once; [`Listing`] has the
    /// links.
    first: Cell<Option<Rc<C>>>,
    has_listed: Cell<bool>,
    /// Whether a flush since [`Worklist::forget_counts`] found a connection that counts polls until
    /// its next READ (L5), and so needs the next flush.
    counts_polls: Cell<bool>,
    /// Shortest time, in ns, until a connection that is still listed after a flush has to be
    /// served, if nothing arrives.
    rest_ns: Cell<Option<u64>>,
    /// Connections that are closed, on which calls are to be ended, or whose callback panicked: the
    /// next drain continues them. Each connection is in the list once.
    unfinished: RefCell<Vec<Rc<C>>>,
    has_unfinished: Cell<bool>,
    /// Each entry is a connection and the number of its requests that wait to be received. The
    /// entries are in the order of arrival over all connections.
    requests: RefCell<VecDeque<(Rc<C>, usize)>>,
    /// Connections that sweeps check, each once: connections listed since the last sweep, and
    /// connections on which a side waits for the other.
    swept: RefCell<BTreeMap<u32, Rc<C>>>,
    timers: Timers<C>,
}

impl<C: Listed> Worklist<C> {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            first: Cell::new(None),
            has_listed: Cell::new(false),
            counts_polls: Cell::new(false),
            rest_ns: Cell::new(None),
            unfinished: RefCell::default(),
            has_unfinished: Cell::new(false),
            requests: RefCell::default(),
            swept: RefCell::default(),
            timers: Timers::start(device),
        }
    }

    pub(crate) const fn timers(&self) -> &Timers<C> {
        &self.timers
    }

    /// Takes the oldest request of a connection that has not ended.
    #[inline]
    pub(crate) fn next_request(&self) -> Option<(Rc<C>, Held)> {
        loop {
            let mut requests = self.requests.borrow_mut();
            let (connection, left) = requests.front_mut()?;
            if *left > 0 {
                if let Some(name) = connection.take_request() {
                    *left -= 1;
                    return Some((Rc::clone(connection), name));
                }
            }
            drop(requests);
            self.leave_first();
        }
    }

    /// Removes the first entry of the requests: all its requests were taken, or its connection has
    /// ended.
    #[inline(never)]
    fn leave_first(&self) {
        let done = self.requests.borrow_mut().pop_front();
        // The drop runs while nothing is borrowed.
        drop(done);
    }

    #[inline]
    pub(crate) fn add_requests(&self, connection: &Rc<C>, count: usize) {
        if count > 0 {
            self.requests
                .borrow_mut()
                .push_back((Rc::clone(connection), count));
        }
    }

    /// Returns whether there is an entry of requests. All requests of the entry may be taken
    /// already.
    #[inline(always)]
    pub(crate) fn has_entries(&self) -> bool {
        !self.requests.borrow().is_empty()
    }

    pub(crate) fn has_requests(&self) -> bool {
        // An entry without further requests stays until `next_request` removes it, so each entry is
        // checked.
        self.requests
            .borrow()
            .iter()
            .any(|(connection, left)| *left > 0 && connection.has_request())
    }

    pub(crate) fn has_unfinished(&self) -> bool {
        self.has_unfinished.get()
    }

    /// Returns whether a connection is listed for the next flush.
    #[inline(always)]
    pub(crate) fn has_listed(&self) -> bool {
        self.has_listed.get()
    }

    /// Returns whether a flush since [`Worklist::forget_counts`] found a connection that counts
    /// polls until its next READ (L5).
    pub(crate) fn counts_polls(&self) -> bool {
        self.counts_polls.get()
    }

    /// Notes that a connection is still listed after a flush; `pause_ns` is the time until its next
    /// READ, if it counts polls until then.
    pub(crate) fn note_left(&self, pause_ns: Option<u64>) {
        self.counts_polls
            .set(self.counts_polls.get() || pause_ns.is_some());
        let rest_ns = pause_ns.unwrap_or(0);
        self.rest_ns.set(Some(
            self.rest_ns
                .get()
                .map_or(rest_ns, |other| other.min(rest_ns)),
        ));
    }

    /// Returns the shortest time until a connection has to be served, over all calls of
    /// [`Worklist::note_left`] since [`Worklist::forget_counts`]; `None` without such a call.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.rest_ns.get().map(Duration::from_nanos)
    }

    pub(crate) fn forget_counts(&self) {
        self.counts_polls.set(false);
        self.rest_ns.set(None);
    }

    #[inline(never)]
    fn list_again(&self, connection: &Rc<C>) {
        self.list(connection);
    }

    #[inline(always)]
    fn list(&self, connection: &Rc<C>) {
        let listing = connection.listing();
        debug_assert!(!listing.is_listed.get(), "each once");
        listing.is_listed.set(true);
        // A connection that is not listed has no next: there is nothing to drop.
        std::mem::forget(
            listing
                .next
                .replace(self.first.replace(Some(Rc::clone(connection)))),
        );
        self.has_listed.set(true);
        // Every event that makes one side wait for the other lists the connection, so this is the
        // place to add the connection to the swept ones.
        if !listing.is_swept.get() {
            self.list_swept(connection);
        }
    }

    #[cold]
    #[inline(never)]
    fn list_swept(&self, connection: &Rc<C>) {
        connection.listing().is_swept.set(true);
        self.swept
            .borrow_mut()
            .insert(connection.qpn(), Rc::clone(connection));
    }

    /// Sweeps the connections in use. The idle connections are not visited.
    pub(crate) fn sweep(&self) {
        // `swept` is borrowed during the sweeps. A sweep may list its own connection, which is in
        // `swept` already, so nothing is added. Each connection has another owner until it is
        // retired, so `retain` frees none.
        self.swept.borrow_mut().retain(|_, connection| {
            let listing = connection.listing();
            let stays = connection.sweep() || listing.is_listed.get();
            listing.is_swept.set(stays);
            stays
        });
    }

    pub(crate) fn has_timed(&self) -> bool {
        self.swept
            .borrow()
            .values()
            .any(|connection| connection.is_timed())
    }

    /// Calls `serve` for each listed connection that is dirty or that the last flush skipped, and
    /// takes the connection off the list. The other connections stay listed for the next flush. One
    /// connection is the common case, and its code has no loop.
    #[inline(always)]
    pub(crate) fn flush(&self, mut serve: impl FnMut(&Rc<C>)) {
        self.has_listed.set(false);
        let Some(connection) = self.first.take() else {
            return;
        };
        let next = connection.listing().next.take();
        if next.is_some() {
            connection.listing().next.set(next);
            return self.flush_several(connection, serve);
        }
        // `next` is `None`, so there is nothing to drop. The compiler cannot derive this across the
        // call of `serve`.
        std::mem::forget(next);
        self.leave(&connection, &mut serve);
    }

    #[inline(never)]
    fn flush_several(&self, first: Rc<C>, mut serve: impl FnMut(&Rc<C>)) {
        let mut next = Some(first);
        while let Some(connection) = next {
            next = connection.listing().next.take();
            self.leave(&connection, &mut serve);
        }
    }

    #[inline(always)]
    fn leave(&self, connection: &Rc<C>, serve: &mut impl FnMut(&Rc<C>)) {
        let listing = connection.listing();
        listing.is_listed.set(false);
        if listing.is_dirty.replace(false) | listing.is_late.replace(false) {
            serve(connection);
        } else {
            listing.is_late.set(true);
            self.list_again(connection);
        }
    }

    /// Lists the connection for the next flush.
    #[inline]
    pub(crate) fn mark_dirty(&self, connection: &Rc<C>) {
        let listing = connection.listing();
        listing.is_dirty.set(true);
        if !listing.is_listed.get() {
            self.list_again(connection);
        }
    }

    /// Lists a connection on which something arrived. The next flush skips it unless it is dirty,
    /// and the flush after the next serves it.
    #[inline(always)]
    pub(crate) fn note_arrival(&self, connection: &Rc<C>) {
        if !connection.listing().is_listed.get() {
            self.list(connection);
        }
    }

    /// Lists the connection for the next drain, which continues it.
    pub(crate) fn mark_unfinished(&self, connection: &Rc<C>) {
        if !connection.listing().is_unfinished.replace(true) {
            self.unfinished.borrow_mut().push(Rc::clone(connection));
            self.has_unfinished.set(true);
        }
    }

    /// Returns a connection that a drain has to continue. It stays listed until
    /// [`Worklist::finish`].
    pub(crate) fn unfinished(&self) -> Option<Rc<C>> {
        self.unfinished.borrow().last().cloned()
    }

    pub(crate) fn finish(&self, connection: &C) {
        let mut unfinished = self.unfinished.borrow_mut();
        let is_same = |other: &Rc<C>| other.qpn() == connection.qpn();
        if let Some(at) = unfinished.iter().rposition(is_same) {
            unfinished.remove(at);
        }
        self.has_unfinished.set(!unfinished.is_empty());
        connection.listing().is_unfinished.set(false);
    }

    /// Removes a retired connection from the lists of requests, swept connections and connections
    /// to flush. An entry left there would keep the connection's memory.
    pub(crate) fn forget(&self, connection: &C) {
        self.requests
            .borrow_mut()
            .retain(|(other, _)| other.qpn() != connection.qpn());
        if connection.listing().is_swept.replace(false) {
            self.swept.borrow_mut().remove(&connection.qpn());
        }
        let mut next = if connection.listing().is_listed.get() {
            self.first.take()
        } else {
            None
        };
        while let Some(listed) = next {
            let listing = listed.listing();
            next = listing.next.take();
            listing.is_listed.set(false);
            if listed.qpn() != connection.qpn() {
                self.list_again(&listed);
            }
        }
    }

    pub(crate) fn clear(&self) {
        let mut next = self.first.take();
        while let Some(connection) = next {
            next = connection.listing().next.take();
        }
        drop((
            self.unfinished.take(),
            self.requests.take(),
            self.swept.take(),
        ));
    }
}

pub(crate) struct Listing<C> {
    next: Cell<Option<Rc<C>>>,
    is_listed: Cell<bool>,
    /// Whether the connection may have something to post, to READ or to publish.
    is_dirty: Cell<bool>,
    /// Whether the last flush skipped the connection. Usually an answer to an arrival is posted
    /// soon and makes the connection dirty. Otherwise the next flush refreshes the published record
    /// (L5).
    is_late: Cell<bool>,
    is_unfinished: Cell<bool>,
    is_swept: Cell<bool>,
}

impl<C> Listing<C> {
    pub(crate) const fn new() -> Self {
        Self {
            next: Cell::new(None),
            is_listed: Cell::new(false),
            is_dirty: Cell::new(false),
            is_late: Cell::new(false),
            is_unfinished: Cell::new(false),
            is_swept: Cell::new(false),
        }
    }
}
