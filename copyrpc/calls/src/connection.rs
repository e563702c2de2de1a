//! The connection of a client: what a transport has to do for [`Client`](crate::Client) and
//! [`AsyncClient`](crate::AsyncClient).

use std::fmt;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::error::{CallError, CallFailure, ClientError, ConnectFailure, EndReason, SessionEnd};

/// The reason why a connection does not take a call now.
#[derive(Debug)]
pub enum Refusal<E> {
    /// The connection has no room. The call waits.
    NoRoom,
    /// The connection has ended, or a new connection has to replace it. The call waits for the next
    /// connection.
    Ended,
    /// The call ends with this error.
    Failed(E),
}

impl<Req, U, C> From<CallError<Req, U>> for Refusal<ClientError<C, SessionEnd>> {
    fn from(error: CallError<Req, U>) -> Self {
        match error {
            CallError::Full { .. } => Self::NoRoom,
            CallError::Closed { .. } => Self::Ended,
            error => Self::Failed(error.into()),
        }
    }
}

/// The error of a call of a connection.
pub type ErrorOf<C> = ClientError<<C as Connection>::ConnectError, <C as Connection>::EndReason>;

/// The end of a call that a connection has taken. `R` is the type of the reply.
pub type EndOf<C, R = <C as Connection>::Reply> =
    Result<R, CallFailure<<C as Connection>::EndReason>>;

/// Calls that have ended, by number.
pub type Ended<C> = Vec<(u64, EndOf<C>)>;

/// A reply in the memory at which it arrived. Its receiver copies it once.
pub trait Arrival<R>: Sized {
    /// Returns the reply.
    fn into_reply(self) -> R;

    /// Replaces `reply` by this reply. Replies of bytes allocate memory only if `reply` has too
    /// little.
    fn overwrite(self, reply: &mut R) {
        *reply = self.into_reply();
    }
}

impl<R> Arrival<R> for R {
    fn into_reply(self) -> R {
        self
    }
}

impl Arrival<Vec<u8>> for &[u8] {
    fn into_reply(self) -> Vec<u8> {
        self.to_vec()
    }

    #[inline]
    fn overwrite(self, reply: &mut Vec<u8>) {
        self.clone_into(reply);
    }
}

/// Takes the calls that have ended, and returns whether a connection is still wanted. Passes the
/// calls that were given up to the second argument, which cancels them.
pub type GoesOn<'a, C> =
    dyn FnMut(&mut Ended<C>, &mut dyn FnMut(<C as Connection>::Call)) -> bool + 'a;

/// A connection to a server, and everything that is needed to connect again. It belongs to one
/// thread. Implemented by `copyrpc::Caller`, `scalerpc::Caller` and `ipc::bytes::Caller`.
pub trait Connection: Sized {
    /// The kind of a request, by which the server chooses the handler. The default is for servers
    /// of one handler.
    type Kind: Copy + Default + Send + Unpin + 'static;
    /// A request.
    type Request: ToOwned<Owned: Send + Unpin + 'static> + ?Sized;
    /// The reply.
    type Reply: Send + 'static;
    /// The reply in the memory at which it arrived.
    type Arrival<'a>: Arrival<Self::Reply>;
    /// The reason why there is no connection.
    type ConnectError: ConnectFailure + Send + 'static;
    /// The reason why a connection ended.
    type EndReason: EndReason + Send + 'static;
    /// The identifier of a call under way.
    type Call: Copy;
    /// The counters of all connections ever made.
    type Stats: Copy + Default + Send + 'static;
    /// Name and capabilities of the device in use.
    type Device: Clone + fmt::Debug + Send + Sync + 'static;

    /// Makes a call with the given number. The call is sent with the next [`flush`](Self::flush).
    /// `left` is the time until its deadline; `None`: no deadline.
    ///
    /// # Errors
    /// [`Refusal`]; the call was not made.
    fn call(
        &mut self,
        number: u64,
        kind: Self::Kind,
        request: &Self::Request,
        left: Option<Duration>,
    ) -> Result<Self::Call, Refusal<ErrorOf<Self>>>;

    /// Sets the deadline of a call under way: `left` from now.
    fn end_within(&mut self, call: Self::Call, left: Duration);

    /// Sends the calls that were made.
    fn flush(&mut self);

    /// Passes the calls that have ended, by number, to `on_end`. Returns whether the poll found
    /// work. A call whose request no handler got, nor will get, ends as [`ClientError::NotSent`].
    fn poll(&mut self, on_end: impl FnMut(u64, EndOf<Self, Self::Arrival<'_>>)) -> bool;

    /// Returns the error of a call whose time ended while it waited for room.
    fn late(&mut self) -> ErrorOf<Self>;

    /// Cancels a call: its end does not matter any more. Informs the server.
    fn cancel(&mut self, call: Self::Call);

    /// Sleeps until there is something to poll for or the waker is called, at most for `limit`.
    fn sleep(&mut self, limit: Option<Duration>);

    /// Returns the waker that ends the sleep. A new connection has another waker.
    fn waker(&self) -> Waker;

    /// Makes a new connection, on which later calls are made. Tries for `within`, and only while
    /// `goes_on` returns `true`. `goes_on` takes the calls that have ended meanwhile over the
    /// previous connection, and cancels calls there.
    ///
    /// # Errors
    /// The error of a call that waits for the connection.
    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ErrorOf<Self>>;

    /// Checks, in a pause between calls, whether the connection has ended. Returns whether calls
    /// need a new connection. A client with one call at a time calls the function before each call.
    fn has_ended(&mut self) -> bool;

    /// Does the work that is due after the end of a call when no other call follows at once. A
    /// client with one call at a time calls the function.
    #[inline(always)]
    fn rest(&mut self) {}

    /// Returns the properties that a user may ask for.
    fn facts(&self) -> Facts<Self::Stats>;

    /// Returns name and capabilities of the device in use.
    fn device(&self) -> Self::Device;
}

/// Properties of a [`Connection`] that a user may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Facts<S> {
    /// Maximum time for a new connection.
    pub connect_timeout: Duration,
    /// Maximum time of a call by default; `None`: without a limit.
    pub timeout: Option<Duration>,
    /// Maximum number of connections of an [`AsyncClient`](crate::AsyncClient).
    pub connections: usize,
    /// Maximum length of a request in bytes.
    pub max_request: usize,
    /// Maximum length of a reply in bytes.
    pub max_reply: usize,
    /// The counters.
    pub stats: S,
}

/// The repetitions of a call that no handler got: one repetition in any case, and further
/// repetitions for the time that a new connection may take.
#[derive(Debug, Default)]
pub(crate) struct Repeats {
    end: Option<Instant>,
}

impl Repeats {
    pub(crate) fn go_on(&mut self, patience: Duration) -> bool {
        let now = Instant::now();
        match self.end {
            Some(end) => now < end,
            None => {
                self.end = now.checked_add(patience);
                true
            }
        }
    }
}

/// A [`Connection`] that is made to an address: of copyrpc and scalerpc to any
/// [`ToSocketAddrs`](std::net::ToSocketAddrs), of ipc to a name.
pub trait Dial<A>: Connection {
    /// The choices of a user.
    type Options: Clone + Default + Send + 'static;
    /// The reason why there is no client.
    type Error: Send + 'static;
    /// The name of the thread of an [`AsyncClient`](crate::AsyncClient).
    const THREAD: &'static str;

    /// Connects to the server at `address`. Waits for the server as long as `is_wanted` returns
    /// `true`. `has_thread`: the connection gets a thread of its own.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    fn dial(
        address: A,
        options: &Self::Options,
        has_thread: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, Self::Error>;

    /// Returns the error of a thread that could not be started.
    fn no_thread(error: std::io::Error) -> Self::Error;
}
