//! The serving end of a connection: the interface that a transport implements for
//! [`Server`](crate::Server) and [`AsyncServer`](crate::AsyncServer), and the handle that stops
//! every server.

use std::fmt;
use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::events::Named;
use crate::oneshot::lock;

/// Stops a server, from any thread: `serve` returns, and `recv` of an
/// [`AsyncServer`](crate::AsyncServer) returns `None`. The documentation of the servers states
/// which of the requests that have arrived are still answered. While a client fetches a reply in
/// [parts](crate::parts) from a [`Reassembler`](crate::parts::Reassembler) that has this handle,
/// the server continues, at most for its stop timeout.
#[derive(Clone, Debug)]
pub struct StopHandle {
    shared: Arc<Stop>,
    waker: Waker,
}

#[derive(Debug)]
struct Stop {
    /// Time of the first call of `stop`.
    since: OnceLock<Instant>,
    unfetched: Mutex<Replies>,
    /// Maximum time for clients to fetch the replies in `unfetched`.
    timeout: Duration,
}

/// The replies in parts that clients have not fetched whole.
#[derive(Debug, Default)]
struct Replies {
    /// The number of the last reply.
    last: u64,
    /// The number of each reply, and the number of its client, where it is known.
    replies: Vec<(u64, Option<u64>)>,
}

impl StopHandle {
    /// Makes the handle of a server. `waker` ends the sleep of the server. After
    /// [`stop`](Self::stop) the server continues at most for `timeout`, while clients fetch replies
    /// in parts.
    #[must_use]
    pub fn new(waker: Waker, timeout: Duration) -> Self {
        let shared = Arc::new(Stop {
            since: OnceLock::new(),
            unfetched: Mutex::default(),
            timeout,
        });
        Self { shared, waker }
    }

    /// Stops the server.
    pub fn stop(&self) {
        self.shared.since.get_or_init(Instant::now);
        self.waker.wake_by_ref();
    }

    /// Returns whether the server is to end: it was stopped, and either clients have fetched all
    /// replies in parts, or the time for the fetches is over.
    #[must_use]
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.shared
            .since
            .get()
            .is_some_and(|since| self.shared.is_over(*since))
    }

    /// Returns whether the server was stopped, so that no further request in parts is taken.
    pub(crate) fn is_stopping(&self) -> bool {
        self.shared.since.get().is_some()
    }

    pub(crate) fn unfetched(&self, client: Option<u64>) -> Unfetched {
        let mut unfetched = lock(&self.shared.unfetched);
        unfetched.last += 1;
        let number = unfetched.last;
        unfetched.replies.push((number, client));
        Unfetched(self.clone(), number)
    }

    /// Forgets the replies of clients for which `is_connected` returns `false`.
    pub(crate) fn forget(&self, is_connected: impl Fn(u64) -> bool) {
        lock(&self.shared.unfetched)
            .replies
            .retain(|(_, client)| client.is_none_or(&is_connected));
    }

    /// Returns the waker that ends the sleep of the server.
    #[must_use]
    pub const fn waker(&self) -> &Waker {
        &self.waker
    }
}

impl Stop {
    #[cold]
    fn is_over(&self, since: Instant) -> bool {
        lock(&self.unfetched).replies.is_empty() || since.elapsed() >= self.timeout
    }
}

/// Guard of one reply in parts, by number. The reply counts as not fetched until the guard is
/// dropped, or until [`StopHandle::forget`] finds that the client of the reply has left.
#[derive(Debug)]
pub(crate) struct Unfetched(StopHandle, u64);

impl Drop for Unfetched {
    fn drop(&mut self) {
        let mut unfetched = lock(&self.0.shared.unfetched);
        unfetched.replies.retain(|(number, _)| *number != self.1);
        if unfetched.replies.is_empty() && self.0.is_stopping() {
            self.0.waker.wake_by_ref();
        }
    }
}

/// The TCP address of a server, shared with further servers in other threads: see
/// [`Server::beside`](crate::Server::beside).
#[derive(Debug)]
pub struct SharedAddress<O> {
    /// The socket that listens at the address.
    pub listener: TcpListener,
    /// The options of the server.
    pub options: O,
    /// The handle that stops all servers at the address.
    pub stop: StopHandle,
}

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// A reply. If the reply is too long, the call ends as `ReplyTooLong`.
    Reply(Vec<u8>),
    /// The handler refuses the request.
    Refusal,
    /// A notice that no handler got the request: its call is for another server.
    SentBack,
    /// The handler dropped the request.
    Dropped,
}

/// The server of a transport. The drop ends the server, and waits until the given answers have
/// arrived. A [`Server`](crate::Server) calls [`serve`](Self::serve), the thread of an
/// [`AsyncServer`](crate::AsyncServer) the functions from [`step`](Self::step) on. Implemented by
/// `copyrpc::Host`, `scalerpc::Host` and `ipc::bytes::Host`.
pub trait Serving: Sized {
    /// The choices of a user.
    type Options: Clone + Default + Send + 'static;
    /// The bytes of a request, for a handler that answers at once: a
    /// [`methods::Request`](crate::methods::Request).
    type Request<'a>;
    /// The duty to answer a received request. Its drop is [`Answer::Dropped`].
    type Token;
    /// A client.
    type Peer: Named;
    /// The reason why the server cannot continue, or could not be made.
    type Error: Send + 'static;
    /// The address of the server, whose text a client can connect to.
    type Address: Clone + fmt::Display + Send + Sync + 'static;
    /// The counters of all clients.
    type Stats: Copy + Default + Send + 'static;
    /// Name and capabilities of the device in use.
    type Device: fmt::Debug + Send + Sync + 'static;
    /// The name of the thread of an [`AsyncServer`](crate::AsyncServer).
    const THREAD: &'static str;

    /// Returns the address at which the server listens.
    ///
    /// # Errors
    /// The system cannot determine the address.
    fn address(&self) -> io::Result<Self::Address>;

    /// Returns the handle that stops the server. The waker of the handle ends the sleep of the
    /// present [`step`], or of the next step.
    ///
    /// [`step`]: Self::step
    fn stop_handle(&self) -> StopHandle;

    /// Returns name and capabilities of the device in use.
    fn device(&self) -> Self::Device;

    /// Returns the number of connected clients.
    fn clients(&self) -> usize;

    /// Returns whether a client with this number ([`Named::number`]) is connected.
    fn has(&self, client: u64) -> bool;

    /// Returns the counters of all clients since the server was made.
    fn stats(&self) -> Self::Stats;

    /// Answers each request with the return value of `handler`, until the server is stopped.
    ///
    /// # Errors
    /// The server cannot continue.
    fn serve<R: AsRef<[u8]>>(
        &mut self,
        handler: impl FnMut(Self::Request<'_>) -> R,
    ) -> Result<(), Self::Error>;

    /// Does one bounded step: connects clients, sends answers, takes requests, and sleeps for at
    /// most about 10 ms if there was nothing to do for a while. If the owner `holds_back`, requests
    /// that were not received do not end the sleep.
    ///
    /// # Errors
    /// The server cannot continue.
    fn step(&mut self, holds_back: bool) -> Result<(), Self::Error>;

    /// Notes that another thread needs the core. The next step does what is otherwise due once in
    /// many steps, such as connecting clients, and sleeps if it finds nothing to do.
    fn hurry(&mut self);

    /// Returns the oldest request that has arrived, with a copy of its bytes and its client.
    fn recv(&mut self) -> Option<(Self::Token, Vec<u8>, Self::Peer)>;

    /// Answers a request. A client that has disconnected gets no answer.
    fn answer(&mut self, request: Self::Token, answer: Answer);

    /// Returns whether the caller of a request waits for the answer: the client is connected, and
    /// did not give up this call.
    fn is_wanted(&self, request: &Self::Token) -> bool;

    /// Takes no more clients and no more requests. Requests that were received can still be
    /// answered.
    fn close(&mut self);

    /// Returns the maximum number of bytes of requests that wait for a receiver: above it, no
    /// further requests are taken. Default: no limit, for transports whose clients have a few slots
    /// each.
    fn max_buffered(_options: &Self::Options) -> usize {
        usize::MAX
    }

    /// Returns the error of a thread that could not be started.
    fn no_thread(error: io::Error) -> Self::Error;
}

/// A [`Serving`] that is made at an address: of copyrpc and scalerpc at any
/// [`ToSocketAddrs`](std::net::ToSocketAddrs), of ipc at a name.
pub trait Bind<A>: Serving {
    /// Makes the server at `address`.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    fn bind_with(address: A, options: &Self::Options) -> Result<Self, Self::Error>;
}

/// A [`Serving`] whose address several servers share, for a thread each.
pub trait Share: Serving {
    /// Shares the address.
    ///
    /// # Errors
    /// No descriptor is free, or the server was closed.
    fn share(&mut self) -> io::Result<SharedAddress<Self::Options>>;

    /// Makes a further server at a shared address.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    fn beside(other: SharedAddress<Self::Options>) -> Result<Self, Self::Error>;
}
