//! The server: the serving end of the sessions of its clients.

use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use copyrpc_calls::{ANSWERED, DROPPED, Events, REFUSED, SENT_BACK, StopHandle};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::plain::{Plain, TypeShape};
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::region::Region;
use copyrpc_shm::sleep::{self, Look, Sleeper, Watch};
use copyrpc_shm::sync::LightBarrier;

use crate::announce::Announce;
use crate::blocking;
use crate::error::{ReplyError, SetupError};
use crate::layout::{AreaBytes, Header, Layout};
use crate::limits::{CLIENTS, DEPTH};
use crate::sessions::{CallId, Sessions};
use crate::token::{Listed, Token};
use crate::views::Views;

/// A server of up to `max_clients` clients, in one thread. `W` carries the announcements of clients
/// that the server does not poll.
///
/// `Send`, but best created on the thread that drops it, see [`Region`]. The drop ends the calls of
/// each client. If no [`Token`] of that client is unanswered, the calls end with
/// [`CallFailure::NotSent`](crate::CallFailure::NotSent), so that the client can make them again at
/// another server; otherwise with [`CallFailure::Closed`](crate::CallFailure::Closed).
pub struct Server<Req: Plain, Resp: Plain, W: Announce = ReadyWords> {
    sessions: Sessions<Req, Resp>,
    announced: W,
    listed: Listed,
    /// The last field: the other fields point into the region, and are dropped before it.
    region: Region,
}

impl<Req: Plain, Resp: Plain, W: Announce> fmt::Debug for Server<Req, Resp, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("name", &self.name())
            .field("region_bytes", &self.region.view().len())
            .finish_non_exhaustive()
    }
}

impl<Req: Plain, Resp: Plain, W: Announce> Drop for Server<Req, Resp, W> {
    fn drop(&mut self) {
        // In a forked child the sessions are the parent's, and the memory is not mapped.
        if self.region.is_here() {
            // Ends the call of a token that was dropped since the last poll, as by a handler that
            // panicked.
            self.end_dropped();
            self.sessions.stop();
        }
    }
}

impl<Req: Plain, Resp: Plain, W: Announce> Server<Req, Resp, W> {
    /// Creates the server `name` for any process of this user on this host, with room for 64
    /// clients of 32 unanswered calls each. The application's tag is 0; [`bind_in`](Self::bind_in)
    /// takes another tag.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn bind(name: &str) -> Result<Self, SetupError> {
        Self::bind_in(&Dir::open(None)?, name, CLIENTS, DEPTH, 0)
    }

    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `depth`
    /// unanswered calls each (a power of two, 1 to 32768). `type_tag` is the application's number
    /// for the meaning of `Req` and `Resp`; clients must have the same number.
    ///
    /// The region takes `max_clients x depth` slots in each direction; a slot is 16 B and the
    /// payload, rounded up to 64 B.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn bind_in(
        dir: &Dir,
        name: &str,
        max_clients: usize,
        depth: usize,
        type_tag: u64,
    ) -> Result<Self, SetupError> {
        Self::bind_with(
            dir,
            name,
            W::words_for(max_clients),
            max_clients,
            depth,
            type_tag,
        )
    }

    /// Like [`bind_in`](Self::bind_in), with the number of `words` for announcements, for a `W`
    /// that permits several numbers.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn bind_with(
        dir: &Dir,
        name: &str,
        words: usize,
        max_clients: usize,
        depth: usize,
        type_tag: u64,
    ) -> Result<Self, SetupError> {
        let layout = Layout::new::<Req, Resp, W>(max_clients, words, depth, AreaBytes::default())?;
        Self::bind_as(
            dir,
            name,
            W::KIND,
            layout,
            TypeShape::of::<Req, Resp>(type_tag),
        )
    }

    /// Creates a server with this layout. `shape` describes its types.
    pub(crate) fn bind_as(
        dir: &Dir,
        name: &str,
        kind: u64,
        layout: Layout,
        shape: TypeShape,
    ) -> Result<Self, SetupError> {
        // Registers this process for barriers, which may take long, now and not in the first reply.
        let _ = LightBarrier::of_process();
        let header = Header {
            magic: W::MAGIC,
            version: W::VERSION,
            // The layout has checked that each of these three numbers fits.
            max_clients: layout.max_clients as u32,
            words: layout.words as u32,
            depth: layout.depth as u32,
            shape,
            _reserved: [0; 10],
        };
        let region = Region::create(dir, name, kind, layout.total, |view| {
            // SAFETY: the region has the size of this layout, which starts with a header. It is
            // zeroed and aligned to a page, no other process has it yet, and it outlives these
            // views, which are dropped here.
            let views = unsafe {
                view.base().cast::<Header>().write(header);
                Views::<Req, Resp, W>::new(view.base(), &layout)
            };
            views.entries.prepare();
        })?;
        // SAFETY: the region was zeroed, has the size of this layout, and outlives the views (see
        // the order of the fields).
        let Views {
            entries,
            lanes,
            announced,
        } = unsafe { Views::new(region.view().base(), &layout) };
        // SAFETY: the layout has lanes for every entry, the region outlives the sessions, as above,
        // and it has no other server.
        let sessions = unsafe { Sessions::new(entries, lanes, region.clock().clone()) };
        Ok(Self {
            sessions,
            announced,
            listed: Listed::new(entries),
            region,
        })
    }

    /// Passes the events of the sessions to `events` from now on.
    pub(crate) fn hear(&mut self, events: Events<usize>) {
        self.sessions.hear(events);
    }

    /// Does one bounded pass over the active clients: finds at most 16 requests of each of at most
    /// 8 clients, in rotation. Returns the number of requests ready for [`recv`](Self::recv). Idle
    /// clients cost nothing. Ends the calls whose [`Token`] was dropped, and frees the entries of
    /// clients that have ended.
    #[inline(always)]
    #[doc(alias = "advance_tail")]
    pub fn poll(&mut self) -> usize {
        self.poll_with_skip(&[])
    }

    /// Like [`poll`](Self::poll), without the clients whose bit is set in `mask` (client `c` is bit
    /// `c % 64` of word `c / 64`; missing words are zero). Their requests stay in their lanes.
    #[inline(always)]
    pub fn poll_with_skip(&mut self, mask: &[u64]) -> usize {
        self.end_dropped();
        self.sessions
            .pass(&mut self.announced, mask, self.region.lock_file());
        self.sessions.waiting()
    }

    #[inline(always)]
    fn end_dropped(&mut self) {
        if self.listed.dropped().any() {
            self.end_all();
        }
    }

    #[cold]
    fn end_all(&mut self) {
        for call in self.listed.dropped().take() {
            self.sessions.answer(&call, DROPPED, Resp::new_zeroed);
        }
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to [`recv`](Self::recv), or
    /// the server is [stopped](StopHandle::stop), at most for `timeout` (`None`: without a limit).
    /// Returns whether there is something. Does not spin. Frees the entries of clients that close,
    /// and every [`SLICE`](copyrpc_shm::sleep::SLICE) the entries of clients that died. The request
    /// of a client that was excluded from a poll by a mask ends the sleep too.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// Returns the oldest request that [`poll`](Self::poll) has found: the token to answer it with,
    /// and a copy of the request, which the client cannot change any more. The client waits until
    /// the token is answered, refused or dropped; tokens may be kept, and answered in any order.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<(Token, Req)> {
        let (call, request) = self.sessions.recv()?;
        Some((Token::new(call, &self.listed), request))
    }

    /// Answers a request. The client can see the answer when this returns; no flush is needed, and
    /// there is always room for the answer.
    ///
    /// # Errors
    /// [`ReplyError`]; the answer was not delivered.
    #[inline(always)]
    pub fn reply(&mut self, token: Token, response: Resp) -> Result<(), ReplyError> {
        self.end(token, ANSWERED, |_| response)
    }

    /// Ends a request without an answer: the client's call ends with
    /// [`CallFailure::Refused`](crate::CallFailure::Refused).
    ///
    /// # Errors
    /// [`ReplyError`]; the call had ended.
    pub fn refuse(&mut self, token: Token) -> Result<(), ReplyError> {
        self.end(token, REFUSED, |_| Resp::new_zeroed())
    }

    /// Ends a request that no handler got: the client's call ends with
    /// [`CallFailure::NotSent`](crate::CallFailure::NotSent), so that the client can make it again.
    pub(crate) fn send_back(&mut self, token: Token) {
        // A client that is gone needs no answer.
        let _ = self.end(token, SENT_BACK, |_| Resp::new_zeroed());
    }

    /// Returns the number of connected clients.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.sessions.clients()
    }

    /// Returns whether the caller of a request still waits for the answer: the client is connected,
    /// as far as this server has found out by [`poll`](Self::poll) or [`wait`](Self::wait), and the
    /// call did not end by its timeout or a cancellation. A client detects a timeout when it polls.
    #[must_use]
    pub fn is_wanted(&self, token: &Token) -> bool {
        token
            .call_at(&self.listed)
            .is_some_and(|call| self.sessions.is_wanted(&call))
    }

    pub(crate) fn has(&self, client: usize) -> bool {
        self.sessions.has(client)
    }

    /// Answers with the result of `make`. Calls `make` only if the client is still there, and
    /// before the client can see the answer, so `make` may write the memory that belongs to the
    /// answer.
    #[inline(always)]
    pub(crate) fn end(
        &mut self,
        token: Token,
        note: u8,
        make: impl FnOnce(&CallId) -> Resp,
    ) -> Result<(), ReplyError> {
        let Some(call) = token.call_at(&self.listed) else {
            return Err(ReplyError::ForeignToken {
                client: token.client(),
            });
        };
        token.use_up();
        let is_there = self.sessions.answer(&call, note, || make(&call));
        if is_there {
            Ok(())
        } else {
            Err(ReplyError::ClientGone {
                client: call.client(),
            })
        }
    }

    /// Like [`recv`](Self::recv), for a message that `take` accepts. A client whose message is
    /// refused loses its session.
    #[inline]
    pub(crate) fn recv_if(&mut self, mut take: impl FnMut(&CallId, Req) -> bool) -> Option<Token> {
        loop {
            let (call, request) = self.sessions.recv()?;
            if take(&call, request) {
                return Some(Token::new(call, &self.listed));
            }
            self.sessions.evict(&call);
        }
    }

    /// [Polls](Self::poll) once, and answers all waiting requests with the results of `handler`.
    /// Returns their number. `step` takes the fewest instructions. To reply later or out of order,
    /// use [`poll`](Self::poll) and [`recv`](Self::recv).
    #[inline(always)]
    pub fn step(&mut self, mut handler: impl FnMut(&Req) -> Resp) -> usize {
        self.end_dropped();
        if self.sessions.waiting() > 0 {
            return self.answer_waiting(handler);
        }
        self.sessions
            .pass_answering(&mut self.announced, self.region.lock_file(), &mut handler)
    }

    /// Answers the requests that an earlier poll has found, and the requests after them.
    #[cold]
    fn answer_waiting(&mut self, mut handler: impl FnMut(&Req) -> Resp) -> usize {
        let waiting = self.poll();
        for _ in 0..waiting {
            let Some((token, request)) = self.recv() else {
                break;
            };
            // A client that has ended needs no answer. A handler that panics drops the token.
            let _ = self.reply(token, handler(&request));
        }
        waiting
    }

    /// Answers every request with the result of `handler`, until the server is
    /// [stopped](Self::stop_handle). Sleeps while there is nothing to do.
    pub fn serve(&mut self, mut handler: impl FnMut(&Req) -> Resp) {
        let stop = self.stop_handle();
        blocking::serve(self, &stop, |server| server.step(&mut handler), Self::wait);
    }

    /// Returns a handle that ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.listed.stop_handle()
    }

    /// Returns the size of the shared-memory region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.region.view().len()
    }

    pub(crate) fn name(&self) -> &str {
        self.region.name()
    }

    /// Returns the start of the region, which is mapped as long as this server lives.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.region.view().base()
    }
}

/// The condition of [`Server::wait`], for a [`sleep::wait`] on several things.
impl<Req: Plain, Resp: Plain, W: Announce> Sleeper for Server<Req, Resp, W> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.end_dropped();
        let Self {
            sessions,
            announced,
            listed,
            region,
        } = self;
        let mut clients = sessions.watch(announced, region.lock_file());
        // Another thread that stops the server or drops a token wakes this thread through the word
        // of the clients' watch.
        let mut left = Look(|| listed.any());
        sleep::join([&mut clients as &mut dyn Sleeper, &mut left], then);
    }
}
