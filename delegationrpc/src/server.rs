//! The serving end.

use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use shm::clients::{Patrol, Seats};
use shm::dir::Dir;
use shm::lane::LaneTx;
use shm::pending::Tag;
use shm::plain::{Plain, TypeShape};
use shm::region::Region;
use shm::sleep::{SLICE, Watch};
use shm::sync::light_barrier;

use crate::error::{CreateError, ReplyError};
use crate::layout::{ANSWERED, Header, KIND, Layout, MAGIC, REJECTED, Response, VERSION};
use crate::ring::{Cursor, Name};
use crate::views::{self, Shared};

/// Most requests that one [`Server::poll`] looks at.
pub const POLL_MAX: usize = 256;

/// Names a received request until it is answered. Plain data, 16 bytes: it can be kept anywhere, also as the user data of another call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    client: u32,
    generation: u32,
    tag: Tag,
}

impl Token {
    /// The number of the client that asks, below `max_clients`.
    #[must_use]
    pub fn client_id(&self) -> usize {
        self.client as usize
    }
}

/// A received request.
#[derive(Debug, Clone, Copy)]
pub struct RecvEntry<Req> {
    /// What [`Server::reply`] needs. Each must be answered or rejected once, in any order: the client waits for it.
    pub token: Token,
    /// A copy that the client cannot change any more.
    pub payload: Req,
}

/// The server's end of one client's session.
struct Session<Resp> {
    generation: u32,
    responses: LaneTx<Response<Resp>>,
}

/// Serves many clients through one ring, from one thread.
///
/// `Send`, but best created on the thread that drops it, see [`Region`]. Dropping it ends all clients' calls with
/// [`SessionEnd::ServerGone`](crate::SessionEnd::ServerGone).
pub struct Server<Req, Resp> {
    shared: Shared<Req, Resp>,
    cursor: Cursor,
    /// Requests that `poll` has seen and `recv` has not taken.
    available: usize,
    /// By seat, as far as this server has met its client.
    sessions: Vec<Option<Session<Resp>>>,
    /// By seat and slot of the tag: the tag of the request that waits for its answer.
    unanswered: Vec<Option<Tag>>,
    seats: Seats,
    patrol: Patrol,
    started: Instant,
    /// Last: everything above points into it.
    region: Region,
    _types: PhantomData<(Req, Resp)>,
}

impl<Req, Resp> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("name", &self.region.name())
            .field("region_bytes", &self.region.view().len())
            .field("cursor", &self.cursor)
            .finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain> Server<Req, Resp> {
    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `resp_depth` unanswered calls each (1 to 32768) and a
    /// ring of `ring_depth` words (a power of two; [`ring_depth_for`](crate::ring_depth_for) gives one that is never full). `type_tag` is the
    /// application's number for the meaning of `Req` and `Resp`; clients must have the same.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn create(
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
            // SAFETY: the layout starts with a header, page aligned, and nobody else has the region yet. Zero is right for all the rest.
            unsafe { view.base().cast::<Header>().write(header) };
        })?;
        // SAFETY: the region was made for this layout and outlives the views (see the order of the fields).
        let (shared, seats) = unsafe { (Shared::new(region.view(), layout), views::seats(region.view(), &layout)) };
        Ok(Self {
            shared,
            cursor: Cursor::default(),
            available: 0,
            sessions: (0..max_clients).map(|_| None).collect(),
            unanswered: vec![None; layout.slots()],
            seats,
            patrol: Patrol::default(),
            started: Instant::now(),
            region,
            _types: PhantomData,
        })
    }

    /// Looks for requests and returns how many [`recv`](Self::recv) can take, at most [`POLL_MAX`]. Frees the ring words of the requests
    /// received so far, as [`advance_tail`](Self::advance_tail) does, and the places of clients that are gone.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.advance_tail();
        let Self { shared, cursor, sessions, unanswered, seats, patrol, started, region, .. } = self;
        // The names come eight to a line, the requests they name one or more lines each.
        let fetch = |name: Name| shared.index(name.client, name.slot).into_iter().for_each(|index| shared.prefetch(index));
        self.available = cursor.available(&shared.ring(), POLL_MAX, fetch);
        if self.available == 0 {
            cursor.keep_order(&shared.ring());
        }
        let now_ns = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        patrol.pass(seats, region.lock_file(), now_ns, |client, _| bury(client, shared, sessions, unanswered));
        self.available
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to [`recv`](Self::recv), at most for `timeout` (`None`: without
    /// end). Returns whether there is. Nothing spins here. Frees the ring words of the requests received so far first, and the places of
    /// clients that leave or die meanwhile: it looks for the dead every [`SLICE`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.advance_tail();
        self.patrol.slept();
        let seats = self.seats;
        seats.server_sleep().wait(timeout, SLICE, &mut Idle(self))
    }

    /// The next request that [`poll`](Self::poll) has seen, in the order in which the clients announced them.
    #[inline]
    pub fn recv(&mut self) -> Option<RecvEntry<Req>> {
        while self.available > 0 {
            self.available -= 1;
            let name = self.cursor.take(&self.shared.ring())?;
            if let Some(entry) = self.read(name) {
                return Some(entry);
            }
        }
        None
    }

    /// Copies the request that `name` announces, unless its client is gone or broken.
    #[inline]
    fn read(&mut self, name: Name) -> Option<RecvEntry<Req>> {
        let Self { shared, sessions, unanswered, seats, .. } = self;
        let Name { client, slot, .. } = name;
        let index = shared.index(client, slot)?;
        let generation = seats.taken_by(client).filter(|&generation| name.is_of(generation))?;
        let session = sessions.get_mut(client)?;
        if session.is_none() {
            // SAFETY: the client's slots are empty, since the creation or since the end of the session before it, whose end of the lane went
            // with it.
            *session = Some(Session { generation, responses: unsafe { shared.responses_to(client) }? });
        }
        session.as_ref().filter(|session| session.generation == generation)?;
        let (tag, payload) = shared.read_request(index);
        let (tag, _) = Tag::unpack(tag);
        match shared.index(client, tag.slot()).and_then(|index| unanswered.get_mut(index.get())) {
            Some(waiting @ None) => *waiting = Some(tag),
            // It called with a tag that it cannot have, or whose call is unanswered: it announced a call twice, or made too many.
            _ => {
                seats.evict(client, generation);
                return None;
            }
        }
        Some(RecvEntry { token: Token { client: client as u32, generation, tag }, payload })
    }

    /// Frees the ring words of the requests received so far. [`poll`](Self::poll) and [`reply`](Self::reply) do it too; calling it before
    /// lets clients of a small ring go on while requests are worked on.
    #[inline]
    pub fn advance_tail(&mut self) {
        self.cursor.release(&self.shared.ring());
    }

    /// Answers a request. The client can see the answer when this returns; nothing has to be flushed, and nothing can be full.
    ///
    /// # Errors
    /// [`ReplyError`]; nobody sees the answer.
    #[inline]
    pub fn reply(&mut self, token: Token, response: Resp) -> Result<(), ReplyError> {
        self.answer(token, ANSWERED, response)
    }

    /// Ends a request without an answer: the client's call ends with [`CallFailed::Dropped`](crate::CallFailed::Dropped).
    ///
    /// # Errors
    /// [`ReplyError`]; the call had ended.
    pub fn reject(&mut self, token: Token) -> Result<(), ReplyError> {
        self.answer(token, REJECTED, Resp::new_zeroed())
    }

    #[inline]
    fn answer(&mut self, token: Token, note: u8, response: Resp) -> Result<(), ReplyError> {
        let (client, tag) = (token.client_id(), token.tag);
        let Self { shared, sessions, unanswered, seats, cursor, .. } = self;
        let session = sessions.get_mut(client).and_then(Option::as_mut);
        // A late answer to a former holder of the seat reaches nobody.
        let Some(session) = session.filter(|session| session.generation == token.generation) else {
            return Err(ReplyError::ClientGone { client });
        };
        match shared.index(client, tag.slot()).and_then(|index| unanswered.get_mut(index.get())) {
            Some(waiting) if *waiting == Some(tag) => *waiting = None,
            _ => return Err(ReplyError::AlreadyAnswered { client }),
        }
        // Before the client can call again: so the words in use are never more than the calls that are unanswered.
        cursor.release(&shared.ring());
        // There is room: the client has at most `resp_depth` calls unanswered, counting the answers it has not taken yet.
        session.responses.publish(Response { tag: tag.pack(note), payload: response });
        if let Some(sleep) = seats.client_sleep(client) {
            sleep.wake();
        }
        Ok(())
    }

    /// Size of the shared-memory region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.region.view().len()
    }
}

/// Forgets a client that is gone, and makes its slots fit for the next.
fn bury<Req: Plain, Resp: Plain>(
    client: usize,
    shared: &Shared<Req, Resp>,
    sessions: &mut [Option<Session<Resp>>],
    unanswered: &mut [Option<Tag>],
) {
    if let Some(session) = sessions.get_mut(client) {
        *session = None;
    }
    unanswered.chunks_exact_mut(shared.resp_depth()).nth(client).into_iter().for_each(|of_client| of_client.fill(None));
    // SAFETY: the client is gone, and our end went with the session.
    unsafe { shared.reset(client) };
}

/// A server that waits, all it has received being released.
struct Idle<'a, Req, Resp>(&'a mut Server<Req, Resp>);

impl<Req: Plain, Resp: Plain> Watch for Idle<'_, Req, Resp> {
    fn look(&mut self, _: bool) -> bool {
        self.0.available > 0 || self.0.cursor.available(&self.0.shared.ring(), 1, |_| ()) > 0
    }

    fn check(&mut self) -> bool {
        let Server { shared, cursor, sessions, unanswered, seats, patrol, started, region, .. } = &mut *self.0;
        cursor.keep_order_asleep(&shared.ring());
        let now_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        patrol.check(seats, region.lock_file(), now_ns, |client, _| bury(client, shared, sessions, unanswered));
        false
    }
}
