//! The serving end.

use std::cell::RefCell;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

use calls::ANSWERED;
use shm::blocking::{self, StopHandle};
use shm::dir::Dir;
use shm::plain::{Plain, TypeShape};
use shm::ready::ReadyWords;
use shm::region::Region;
use shm::sessions::Sessions;
use shm::sleep::{self, Sleeper, Watch};
use shm::sync::light_barrier;

use crate::error::CreateError;
use crate::handle::RecvHandle;
use crate::layout::{AreaBytes, CLIENTS, DEPTH, Header, KIND, Layout};
use crate::views;

/// Serves any number of clients up to `max_clients` from one thread.
///
/// `!Send`: create it on the thread that polls it. Dropping it ends all clients' calls with [`SessionEnd::PeerGone`](crate::SessionEnd::PeerGone), once the last
/// [`RecvHandle`] is gone too.
pub struct Server<Req: Plain, Resp: Plain> {
    stop: StopHandle,
    inner: Rc<RefCell<Inner<Req, Resp>>>,
}

impl<Req: Plain, Resp: Plain> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.inner.borrow();
        f.debug_struct("Server")
            .field("name", &inner.region.name())
            .field("region_bytes", &inner.region.view().len())
            .field("sessions", &inner.sessions)
            .finish_non_exhaustive()
    }
}

/// Everything a server has; its handles share it. No user code runs while it is borrowed.
pub(crate) struct Inner<Req: Plain, Resp: Plain> {
    pub(crate) sessions: Sessions<Req, Resp>,
    ready: ReadyWords,
    /// Dropped last: everything above points into it.
    region: Region,
}

impl<Req: Plain, Resp: Plain> Server<Req, Resp> {
    /// Creates the server `name` for any process of this user on this host, with room for 64 clients of 32
    /// unanswered calls each.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind(name: &str) -> Result<Self, CreateError> {
        Self::bind_in(&Dir::open(None)?, name, CLIENTS, DEPTH, 0)
    }

    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `depth` unanswered calls each (a power of two, 1 to
    /// 32768). `type_tag` is the application's number for the meaning of `Req` and `Resp`; clients must have the same.
    ///
    /// The region takes `max_clients x depth` slots in each direction; a slot is 16 B and the payload, rounded up to 64 B.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind_in(dir: &Dir, name: &str, max_clients: usize, depth: usize, type_tag: u64) -> Result<Self, CreateError> {
        let layout = Layout::new::<Req, Resp>(max_clients, depth, AreaBytes::default())?;
        Self::bind_as(dir, name, KIND, layout, TypeShape::of::<Req, Resp>(type_tag))
    }

    /// Creates a server of this layout, which is of these types.
    pub(crate) fn bind_as(dir: &Dir, name: &str, kind: u64, layout: Layout, shape: TypeShape) -> Result<Self, CreateError> {
        // Registers this process for barriers, which may take long: now, and not in the first reply.
        light_barrier();
        let max_clients = layout.max_clients;
        let header = Header { max_clients: max_clients as u32, depth: layout.depth as u32, shape };
        let region = Region::create(dir, name, kind, layout.total, |view| {
            // SAFETY: the region is made for this layout, which starts with a header; nobody else has it yet.
            let seats = unsafe {
                view.base().cast::<Header>().write(header);
                views::seats(view, &layout)
            };
            Sessions::<Req, Resp>::prepare(&seats);
        })?;
        let view = region.view();
        // SAFETY: the region was made for this layout and outlives the views (see the order of the fields). It has no other server.
        let (sessions, ready) =
            unsafe { (Sessions::new(views::seats(view, &layout), views::lanes(view, &layout)), views::ready(view, &layout)) };
        Ok(Self { stop: StopHandle::default(), inner: Rc::new(RefCell::new(Inner { sessions, ready, region })) })
    }

    /// One bounded pass over the clients that have something to say: takes at most 16 requests from each of at most 8 of them, in
    /// rotation. Returns the number of requests ready for [`recv`](Self::recv). Idle clients cost nothing.
    #[inline(always)]
    pub fn poll(&mut self) -> usize {
        let Inner { sessions, ready, region } = &mut *self.inner.borrow_mut();
        sessions.pass(ready, region.lock_file(), |_| ());
        sessions.waiting()
    }

    /// Like [`poll`](Self::poll), leaving out the clients whose bit is set in `mask` (client `c` is bit `c % 64` of word `c / 64`;
    /// missing words are zero): those the caller does not want to serve in this round. Their requests stay in their lanes.
    pub fn poll_with_skip(&mut self, mask: &[u64]) -> usize {
        let Inner { sessions, ready, region } = &mut *self.inner.borrow_mut();
        sessions.pass_with_skip(ready, mask, region.lock_file(), |_| ());
        sessions.waiting()
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to [`recv`](Self::recv), at most for `timeout` (`None`: without
    /// end). Returns whether there is. Nothing spins here. The places of clients that left or died meanwhile are freed: it looks for the
    /// dead every [`SLICE`](shm::sleep::SLICE). A request of a client that was left out of a poll counts.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// The oldest request that [`poll`](Self::poll) has taken.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<RecvHandle<Req, Resp>> {
        self.inner.borrow_mut().sessions.recv(|from, data| RecvHandle::new(from, data.read(), Rc::clone(&self.inner)))
    }

    /// [Polls](Self::poll) once, and answers all requests that wait with what `handler` makes of each. Returns how many. This takes the fewest
    /// instructions; a handler that answers later, or in another order, takes them with [`recv`](Self::recv).
    #[inline(always)]
    pub fn step(&mut self, mut handler: impl FnMut(&Req) -> Resp) -> usize {
        let waiting = self.poll();
        for _ in 0..waiting {
            // The handler may answer requests that were received before, so nothing is borrowed meanwhile.
            let Some((from, request)) = self.inner.borrow_mut().sessions.recv(|from, request| (from, request.read())) else { break };
            let response = handler(&request);
            // A client that is gone needs no answer.
            self.inner.borrow_mut().sessions.answer(&from, ANSWERED, || response);
        }
        waiting
    }

    /// Answers every request with what `handler` makes of it, until it is [stopped](Self::stop_handle). Sleeps while there is nothing to do.
    pub fn serve(&mut self, mut handler: impl FnMut(&Req) -> Resp) {
        let stop = self.stop.clone();
        blocking::serve(self, &stop, |server| server.step(&mut handler), Self::wait);
    }

    /// Ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Size of the shared-memory region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.inner.borrow().region.view().len()
    }

    /// The start of the region, which is mapped as long as this server or one of its handles lives.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.inner.borrow().region.view().base()
    }
}

/// What [`Server::wait`] waits for, so that a thread can sleep on several things: see [`sleep::wait`].
impl<Req: Plain, Resp: Plain> Sleeper for Server<Req, Resp> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        let Inner { sessions, ready, region } = &mut *self.inner.borrow_mut();
        then(&mut sessions.watch(ready, region.lock_file(), |_| ()));
    }
}

impl<Req: Plain, Resp: Plain> Inner<Req, Resp> {
    /// Whether this process has the region, and is not a forked child of the one that has it.
    pub(crate) fn is_here(&self) -> bool {
        self.region.is_here()
    }
}
