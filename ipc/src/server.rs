//! The serving end.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::{Duration, Instant};

use shm::clients::{Patrol, Seats};
use shm::dir::Dir;
use shm::lane::{LaneRx, LaneTx};
use shm::pending::Tag;
use shm::plain::{Plain, TypeShape};
use shm::ready::{self, ARMED, HotSet, ReadyWords};
use shm::region::{Region, RegionView};
use shm::sleep::{SLICE, Watch};
use shm::sync::{AtomicU32, Ordering, light_barrier};

use crate::error::{ClientGone, CreateError};
use crate::handle::RecvHandle;
use crate::layout::{AreaBytes, Header, KIND, Layout, Request, Response};
use crate::views;

/// Serves any number of clients up to `max_clients` from one thread.
///
/// `!Send`: create it on the thread that polls it. Dropping it ends all clients' calls with [`SessionEnd::ServerGone`](crate::SessionEnd::ServerGone), once the last
/// [`RecvHandle`] is gone too.
pub struct Server<Req: Plain, Resp: Plain> {
    inner: Rc<RefCell<Inner<Req, Resp>>>,
}

impl<Req: Plain, Resp: Plain> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.inner.borrow();
        f.debug_struct("Server")
            .field("name", &inner.region.name())
            .field("region_bytes", &inner.region.view().len())
            .field("waiting", &inner.inbox.len())
            .finish_non_exhaustive()
    }
}

/// Everything a server has; its handles share it. No user code runs while it is borrowed.
pub(crate) struct Inner<Req: Plain, Resp: Plain> {
    hot: HotSet,
    patrol: Patrol,
    lines: Lines<Req, Resp>,
    /// Requests taken from the lanes and not yet received, at most `max_clients x depth`.
    inbox: VecDeque<Arrived<Req>>,
    ready: ReadyWords,
    started: Instant,
    /// Dropped last: everything above points into it.
    region: Region,
}

/// A request and whom to answer.
#[derive(Clone, Copy)]
pub(crate) struct Arrived<Req> {
    pub(crate) client: usize,
    generation: u32,
    pub(crate) tag: Tag,
    pub(crate) payload: Req,
}

/// The server's end of one client's session.
struct Line<Req, Resp> {
    generation: u32,
    requests: LaneRx<Request<Req>>,
    responses: LaneTx<Response<Resp>>,
    /// Requests taken and not answered. Above `depth` only if the client breaks the protocol.
    held: usize,
}

struct Lines<Req, Resp> {
    lines: Vec<Option<Line<Req, Resp>>>,
    seats: Seats,
    layout: Layout,
}

impl<Req: Plain, Resp: Plain> Server<Req, Resp> {
    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `depth` unanswered calls each (a power of two, 1 to
    /// 32768). `type_tag` is the application's number for the meaning of `Req` and `Resp`; clients must have the same.
    ///
    /// The region takes `max_clients x depth` slots in each direction; a slot is 16 B and the payload, rounded up to 64 B.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn create(dir: &Dir, name: &str, max_clients: usize, depth: usize, type_tag: u64) -> Result<Self, CreateError> {
        let layout = Layout::new::<Req, Resp>(max_clients, depth, AreaBytes::default())?;
        Self::create_as(dir, name, KIND, layout, TypeShape::of::<Req, Resp>(type_tag))
    }

    /// Creates a server of this layout, which is of these types.
    pub(crate) fn create_as(dir: &Dir, name: &str, kind: u64, layout: Layout, shape: TypeShape) -> Result<Self, CreateError> {
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
            (0..max_clients).filter_map(|client| seats.armed(client)).for_each(|armed| armed.store(ARMED, Ordering::Relaxed));
        })?;
        // SAFETY: the region was made for this layout and outlives the views (see the order of the fields).
        let (seats, ready) = unsafe { (views::seats(region.view(), &layout), views::ready(region.view(), &layout)) };
        let inner = Inner {
            hot: HotSet::new(max_clients),
            patrol: Patrol::default(),
            lines: Lines { lines: (0..max_clients).map(|_| None).collect(), seats, layout },
            inbox: VecDeque::new(),
            ready,
            started: Instant::now(),
            region,
        };
        Ok(Self { inner: Rc::new(RefCell::new(inner)) })
    }

    /// One bounded pass over the clients that have something to say: takes at most 16 requests from each of at most 8 of them, in
    /// rotation. Returns the number of requests ready for [`recv`](Self::recv). Idle clients cost nothing.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.poll_with_skip(&[])
    }

    /// Like [`poll`](Self::poll), leaving out the clients whose bit is set in `mask` (client `c` is bit `c % 64` of word `c / 64`;
    /// missing words are zero): those the caller does not want to serve in this round. Their requests stay in their lanes.
    #[inline]
    pub fn poll_with_skip(&mut self, mask: &[u64]) -> usize {
        let Inner { hot, patrol, lines, inbox, ready, started, region } = &mut *self.inner.borrow_mut();
        let now_ns = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let view = region.view();
        hot.pass(ready, &mut Round { lines, inbox, mask, view }, now_ns);
        let seats = lines.seats;
        patrol.pass(&seats, region.lock_file(), now_ns, |client, _| bury(client, hot, inbox, lines, view));
        inbox.len()
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to [`recv`](Self::recv), at most for `timeout` (`None`: without
    /// end). Returns whether there is. Nothing spins here. The places of clients that left or died meanwhile are freed: it looks for the
    /// dead every [`SLICE`]. A request of a client that was left out of a poll counts.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let inner = &mut *self.inner.borrow_mut();
        inner.patrol.slept();
        let seats = inner.lines.seats;
        seats.server_sleep().wait(timeout, SLICE, inner)
    }

    /// The oldest request that [`poll`](Self::poll) has taken.
    #[inline]
    pub fn recv(&mut self) -> Option<RecvHandle<Req, Resp>> {
        let arrived = self.inner.borrow_mut().inbox.pop_front()?;
        Some(RecvHandle::new(arrived, Rc::clone(&self.inner)))
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

/// Forgets a client that is gone.
fn bury<Req: Plain, Resp: Plain>(
    client: usize,
    hot: &mut HotSet,
    inbox: &mut VecDeque<Arrived<Req>>,
    lines: &mut Lines<Req, Resp>,
    view: RegionView<'_>,
) {
    hot.remove(client);
    inbox.retain(|arrived| arrived.client != client);
    lines.bury(client, view);
}

impl<Req: Plain, Resp: Plain> Watch for Inner<Req, Resp> {
    fn arm(&mut self) {
        let Self { hot, lines, inbox, region, .. } = self;
        hot.arm(&Round { lines, inbox, mask: &[], view: region.view() });
    }

    fn look(&mut self, is_told: bool) -> bool {
        let Self { hot, lines, inbox, ready, region, .. } = self;
        let is_quiet = inbox.is_empty() && !ready.any();
        !(hot.cool(&Round { lines, inbox, mask: &[], view: region.view() }, is_told) && is_quiet)
    }

    fn check(&mut self) -> bool {
        let Self { hot, patrol, lines, inbox, started, region, .. } = self;
        let (seats, view) = (lines.seats, region.view());
        let now_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        patrol.check(&seats, region.lock_file(), now_ns, |client, _| bury(client, hot, inbox, lines, view));
        false
    }
}

impl<Req: Plain, Resp: Plain> Inner<Req, Resp> {
    /// Whether this process has the region, and is not a forked child of the one that has it.
    pub(crate) fn is_here(&self) -> bool {
        self.region.is_here()
    }

    /// Answers a request with what `make` gives, which is called while the place of the answer is the server's. The answer is visible to
    /// the client when this returns.
    #[inline]
    pub(crate) fn answer(&mut self, to: &Arrived<Req>, note: u8, make: impl FnOnce() -> Resp) -> Result<(), ClientGone> {
        let line = self.lines.lines.get_mut(to.client).and_then(Option::as_mut);
        // A late answer to a former holder of the seat reaches nobody.
        let Some(line) = line.filter(|line| line.generation == to.generation) else {
            return Err(ClientGone { client: to.client });
        };
        line.held = line.held.saturating_sub(1);
        // There is room: the client has at most `depth` unanswered calls, counting the answers it has not taken yet.
        line.responses.publish(Response { tag: to.tag.pack(note), payload: make() });
        if let Some(sleep) = self.lines.seats.client_sleep(to.client) {
            sleep.wake();
        }
        Ok(())
    }

    /// Ends the session of a client that asked for something that breaks the protocol.
    pub(crate) fn evict(&mut self, from: &Arrived<Req>) {
        self.lines.seats.evict(from.client, from.generation);
    }
}

impl<Req: Plain, Resp: Plain> Lines<Req, Resp> {
    /// The server's end of the session of `client`, begun at the first sight of it.
    #[inline(always)]
    fn current(&mut self, client: usize, view: RegionView<'_>) -> Option<&mut Line<Req, Resp>> {
        let generation = self.seats.taken_by(client)?;
        let line = self.lines.get_mut(client)?;
        if line.is_none() {
            let depth = self.layout.depth as u64;
            // SAFETY: the region was made for this layout and outlives the lines; `client` is below `max_clients`, as `taken_by` knows it.
            // This is the only consumer of the requests and the only producer of the responses, both begin at 0 with empty slots, and
            // `answer` publishes no more than the client has room for. Any bytes are a valid `Request`, by `Plain`.
            let (requests, responses) = unsafe {
                (
                    LaneRx::new(views::request_lane(view, &self.layout, client), depth, 0),
                    LaneTx::new(views::response_lane(view, &self.layout, client), depth, 0),
                )
            };
            *line = Some(Line { generation, requests, responses, held: 0 });
        }
        line.as_mut().filter(|line| line.generation == generation)
    }

    /// Ends the server's side of a session whose client is gone, and makes its seat fit for the next.
    fn bury(&mut self, client: usize, view: RegionView<'_>) {
        if let Some(line) = self.lines.get_mut(client) {
            *line = None;
            // SAFETY: the layout fits; the client is gone, and our ends went with the line.
            unsafe { views::reset_lanes(view, &self.layout, client) };
        }
        if let Some(armed) = self.seats.armed(client) {
            armed.store(ARMED, Ordering::Relaxed);
        }
    }
}

/// One pass over the hot lanes.
struct Round<'a, Req, Resp> {
    lines: &'a mut Lines<Req, Resp>,
    inbox: &'a mut VecDeque<Arrived<Req>>,
    mask: &'a [u64],
    view: RegionView<'a>,
}

impl<Req: Plain, Resp: Plain> ready::Lanes for Round<'_, Req, Resp> {
    #[inline(always)]
    fn visit(&mut self, client: usize, budget: usize) -> usize {
        if self.mask.get(client / 64).is_some_and(|word| word >> (client % 64) & 1 != 0) {
            return 0;
        }
        let (seats, depth) = (self.lines.seats, self.lines.layout.depth);
        let Some(line) = self.lines.current(client, self.view) else { return 0 };
        let mut taken = 0;
        while taken < budget {
            if line.held >= depth {
                if line.requests.is_ready() {
                    seats.evict(client, line.generation);
                }
                break;
            }
            let Some(request) = line.requests.pop() else { break };
            let (tag, _) = Tag::unpack(request.tag);
            self.inbox.push_back(Arrived { client, generation: line.generation, tag, payload: request.payload });
            line.held += 1;
            taken += 1;
        }
        taken
    }
    fn is_ready(&self, client: usize) -> bool {
        let line = self.lines.lines.get(client).and_then(Option::as_ref);
        // A session not begun has never been visited.
        self.lines.seats.taken_by(client).is_some() && line.is_none_or(|line| line.requests.is_ready())
    }

    fn armed(&self, client: usize) -> Option<&AtomicU32> {
        self.lines.seats.armed(client)
    }
}
