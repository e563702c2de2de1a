//! The serving end.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use calls::{ANSWERED, REJECTED};
use shm::blocking::{self, StopHandle};
use shm::dir::Dir;
use shm::dropped::Dropped;
use shm::plain::{Plain, TypeShape};
use shm::region::Region;
use shm::sessions::{Asker, Sessions};
use shm::sleep::{self, Look, Sleeper, Watch};
use shm::sync::light_barrier;

use crate::error::{CreateError, ReplyError};
use crate::layout::{CLIENTS, Header, KIND, Layout, MAGIC, RESP_DEPTH, VERSION, ring_depth_for};
use crate::ring::{Announced, Cursor};
use crate::views::{self, RingView};

/// The duty to answer a received request, 24 bytes. It can be kept anywhere, also as the user data of another call.
///
/// Dropping it, on whatever thread, ends the client's call with [`CallFailed::Rejected`](crate::CallFailed::Rejected): the server tells the client in
/// its next [`poll`](Server::poll) or [`wait`](Server::wait). A server that sleeps finds a token that another thread dropped within a
/// [`SLICE`](shm::sleep::SLICE).
#[must_use = "a token that is dropped rejects its request"]
pub struct Token {
    asker: Asker,
    /// The number in [`LISTS`] of the server that received the request.
    server: u64,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("asker", &self.asker).finish_non_exhaustive()
    }
}

impl Token {
    /// The number of the client that asks, below `max_clients`.
    #[must_use]
    pub fn client_id(&self) -> usize {
        self.asker.client()
    }
}

impl Drop for Token {
    #[cold]
    fn drop(&mut self) {
        // A server that is gone has ended all calls.
        if let Some(dropped) = lists().get(&self.server) {
            dropped.push(self.asker);
        }
    }
}

/// Where the servers of this process find the requests whose tokens were dropped, by the server's number. Tokens have the number and not a
/// counted reference, which would cost every call about a tenth more.
static LISTS: Mutex<BTreeMap<u64, Arc<Dropped<Asker>>>> = Mutex::new(BTreeMap::new());

fn lists() -> MutexGuard<'static, BTreeMap<u64, Arc<Dropped<Asker>>>> {
    LISTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server's entry in [`LISTS`].
struct Listed {
    /// Not used again in this process.
    server: u64,
    dropped: Arc<Dropped<Asker>>,
}

impl Listed {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (server, dropped) = (NEXT.fetch_add(1, Ordering::Relaxed), Arc::default());
        lists().insert(server, Arc::clone(&dropped));
        Self { server, dropped }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        lists().remove(&self.server);
    }
}

/// A received request.
#[derive(Debug)]
pub struct RecvEntry<Req> {
    /// What [`Server::reply`] needs. The client waits until it is answered, rejected or dropped; tokens may be kept, and answered in any order.
    pub token: Token,
    /// A copy that the client cannot change any more.
    pub payload: Req,
}

/// Serves many clients, who announce themselves through one ring, from one thread.
///
/// `Send`, but best created on the thread that drops it, see [`Region`]. Dropping it ends all clients' calls with
/// [`SessionEnd::PeerGone`](crate::SessionEnd::PeerGone).
pub struct Server<Req, Resp> {
    sessions: Sessions<Req, Resp>,
    cursor: Cursor,
    ring: RingView,
    unanswered: Unanswered,
    listed: Listed,
    stop: StopHandle,
    /// Last: everything above points into it.
    region: Region,
}

impl<Req, Resp> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("name", &self.region.name())
            .field("region_bytes", &self.region.view().len())
            .field("sessions", &self.sessions)
            .field("cursor", &self.cursor)
            .finish_non_exhaustive()
    }
}

/// The requests that were received and wait for their answer. A client has `resp_depth` slots, and gives the slot of each call in its tag.
struct Unanswered {
    /// By client and slot: the tag as a word, 0 if there is none.
    tags: Box<[u64]>,
    resp_depth: usize,
}

impl Unanswered {
    #[inline(always)]
    fn place(&mut self, asker: &Asker) -> Option<&mut u64> {
        let slot = Some(asker.tag().slot()).filter(|&slot| slot < self.resp_depth)?;
        self.tags.get_mut(asker.client() * self.resp_depth + slot)
    }

    /// Whether it was not there.
    #[inline(always)]
    fn insert(&mut self, asker: &Asker) -> bool {
        self.place(asker).is_some_and(|place| std::mem::replace(place, asker.tag().pack(0)) == 0)
    }

    /// Removes a request of a client that is there.
    #[inline(always)]
    fn remove(&mut self, asker: &Asker) {
        if let Some(place) = self.place(asker) {
            *place = 0;
        }
    }

    fn forget(&mut self, client: usize) {
        self.tags.chunks_exact_mut(self.resp_depth).nth(client).into_iter().for_each(|tags| tags.fill(0));
    }
}

impl<Req: Plain, Resp: Plain> Server<Req, Resp> {
    /// Creates the server `name` for any process of this user on this host, with room for 64 clients of 32 unanswered
    /// calls each.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind(name: &str) -> Result<Self, CreateError> {
        Self::bind_in(&Dir::open(None)?, name, CLIENTS, ring_depth_for(CLIENTS, RESP_DEPTH), RESP_DEPTH, 0)
    }

    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `resp_depth` unanswered calls each (a power of two, 1 to
    /// 32768) and a ring of `ring_depth` words (a power of two; [`ring_depth_for`](crate::ring_depth_for) gives one that is never full).
    /// `type_tag` is the application's number for the meaning of `Req` and `Resp`; clients must have the same.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind_in(
        dir: &Dir,
        name: &str,
        max_clients: usize,
        ring_depth: usize,
        resp_depth: usize,
        type_tag: u64,
    ) -> Result<Self, CreateError> {
        // Registers this process for barriers, which may take long: now, and not in the first reply.
        light_barrier();
        let layout = Layout::new::<Req, Resp>(max_clients, ring_depth, resp_depth)?;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            // The layout has bounded all three.
            max_clients: max_clients as u32,
            ring_depth: ring_depth as u32,
            resp_depth: resp_depth as u32,
            shape: TypeShape::of::<Req, Resp>(type_tag),
            _reserved: [0; 10],
        };
        let region = Region::create(dir, name, KIND, layout.total, |view| {
            // SAFETY: the layout starts with a header, page aligned, and nobody else has the region yet.
            let seats = unsafe {
                view.base().cast::<Header>().write(header);
                views::seats(view, &layout)
            };
            Sessions::<Req, Resp>::prepare(&seats);
        })?;
        let view = region.view();
        // SAFETY: the region was made for this layout and outlives the views (see the order of the fields). It has no other server.
        let (sessions, ring) =
            unsafe { (Sessions::new(views::seats(view, &layout), views::lanes(view, &layout)), RingView::new(view, &layout)) };
        let unanswered = Unanswered { tags: vec![0; layout.slots()].into_boxed_slice(), resp_depth };
        Ok(Self { sessions, cursor: Cursor::default(), ring, unanswered, listed: Listed::new(), stop: StopHandle::default(), region })
    }

    /// One bounded pass over the clients that have something to say: those that have announced themselves and those that it found calling
    /// lately. Takes at most 16 requests from each of at most 8 of them, in rotation. Returns the number of requests ready for
    /// [`recv`](Self::recv). Idle clients cost nothing. Frees the ring words that it takes, and the places of clients that are gone.
    /// Rejects the requests whose [`Token`] was dropped.
    #[inline(always)]
    pub fn poll(&mut self) -> usize {
        self.reject_dropped();
        let Self { sessions, cursor, ring, unanswered, region, .. } = self;
        sessions.pass(&mut Announced { ring: ring.ring(), cursor }, region.lock_file(), |client| unanswered.forget(client));
        sessions.waiting()
    }

    #[inline(always)]
    fn reject_dropped(&mut self) {
        if self.listed.dropped.any() {
            self.reject_all();
        }
    }

    #[cold]
    fn reject_all(&mut self) {
        for asker in self.listed.dropped.take() {
            self.end(&asker, REJECTED, Resp::new_zeroed);
        }
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to [`recv`](Self::recv), or another thread drops a [`Token`], at most for `timeout` (`None`: without
    /// end). Returns whether there is. Nothing spins here. The places of clients that left or died meanwhile are freed: it looks for the
    /// dead every [`SLICE`](shm::sleep::SLICE).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// The oldest request that [`poll`](Self::poll) has found.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<RecvEntry<Req>> {
        match self.take()? {
            Ok(entry) => Some(entry),
            Err(asker) => self.recv_after(asker),
        }
    }

    /// The oldest request, or whose it is if there is something wrong with it.
    #[inline(always)]
    fn take(&mut self) -> Option<Result<RecvEntry<Req>, Asker>> {
        let Self { sessions, unanswered, listed, .. } = self;
        sessions.recv(|asker, payload| {
            let is_new = unanswered.insert(&asker);
            if is_new { Ok(RecvEntry { token: Token { asker, server: listed.server }, payload: payload.read() }) } else { Err(asker) }
        })
    }

    /// The oldest request of another client than this one, which called with a tag that it cannot have, or whose call is unanswered.
    #[cold]
    fn recv_after(&mut self, mut broken: Asker) -> Option<RecvEntry<Req>> {
        loop {
            self.sessions.evict(&broken);
            match self.take()? {
                Ok(entry) => return Some(entry),
                Err(next) => broken = next,
            }
        }
    }

    /// Answers a request. The client can see the answer when this returns; nothing has to be flushed, and nothing can be full.
    ///
    /// # Errors
    /// [`ReplyError`]; nobody sees the answer.
    #[inline(always)]
    pub fn reply(&mut self, token: Token, response: Resp) -> Result<(), ReplyError> {
        self.answer(token, ANSWERED, || response)
    }

    /// Ends a request without an answer, as dropping the token does, but at once: the client's call ends with
    /// [`CallFailed::Rejected`](crate::CallFailed::Rejected).
    ///
    /// # Errors
    /// [`ReplyError`]; the call had ended.
    pub fn reject(&mut self, token: Token) -> Result<(), ReplyError> {
        self.answer(token, REJECTED, Resp::new_zeroed)
    }

    #[inline(always)]
    fn answer(&mut self, token: Token, note: u8, make: impl FnOnce() -> Resp) -> Result<(), ReplyError> {
        let client = token.client_id();
        if token.server != self.listed.server {
            return Err(ReplyError::ForeignToken { client });
        }
        let asker = token.asker;
        std::mem::forget(token);
        if self.end(&asker, note, make) { Ok(()) } else { Err(ReplyError::ClientGone { client }) }
    }

    /// Ends a request; whether its client was still there.
    #[inline(always)]
    fn end(&mut self, asker: &Asker, note: u8, make: impl FnOnce() -> Resp) -> bool {
        let is_there = self.sessions.answer(asker, note, make);
        // The place of a client that is gone is its successor's.
        if is_there {
            self.unanswered.remove(asker);
        }
        is_there
    }

    /// [Polls](Self::poll) once, and answers all requests that wait with what `handler` makes of each. Returns how many.
    #[inline(always)]
    pub fn step(&mut self, mut handler: impl FnMut(&Req) -> Resp) -> usize {
        let waiting = self.poll();
        for _ in 0..waiting {
            let Some(entry) = self.recv() else { break };
            let response = handler(&entry.payload);
            // A client that is gone needs no answer.
            let _ = self.reply(entry.token, response);
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
        self.region.view().len()
    }
}

/// What [`Server::wait`] waits for, so that a thread can sleep on several things: see [`sleep::wait`].
impl<Req: Plain, Resp: Plain> Sleeper for Server<Req, Resp> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.reject_dropped();
        let Self { sessions, cursor, ring, unanswered, listed, region, .. } = self;
        let mut announced = Announced { ring: ring.ring(), cursor };
        let mut clients = sessions.watch(&mut announced, region.lock_file(), |client| unanswered.forget(client));
        // Nobody wakes for these: the slices of the clients' watch bound how late they are.
        let mut rejections = Look(|| listed.dropped.any());
        sleep::join([&mut clients as &mut dyn Sleeper, &mut rejections], then);
    }
}
