//! The call of a request, as a method at the server sees it: the client, the end of the caller's
//! time, and whether the caller still waits.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::time::Instant;

use crate::header::Header;

/// A request to pass to the `answer` of a [`service!`](crate::service!): plain bytes, or the
/// request of a server, which also shows its caller.
pub trait Request {
    /// Returns the bytes.
    fn data(&self) -> Cow<'_, [u8]>;

    /// Returns what is known of the call. Plain bytes show only a deadline, counted from this call,
    /// which is right for a handler that is called as soon as its request arrives.
    fn context(&self) -> Context<'_> {
        Context::new().with_deadline(Header::deadline(&self.data(), Instant::now()))
    }
}

impl<T: AsRef<[u8]> + ?Sized> Request for T {
    #[inline]
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.as_ref())
    }
}

/// The answer to the question whether a caller waits for the reply, as far as it is known.
pub trait Wanted: Sync {
    /// Returns `false` once the client has disconnected or gave up the call.
    fn is_wanted(&self) -> bool;
}

/// An answer that does not change: it was determined before the handler was called.
impl Wanted for bool {
    fn is_wanted(&self) -> bool {
        *self
    }
}

/// The call that a method answers. A method of a [`service!`](crate::service!) gets it if its
/// declaration begins with `&context`.
#[derive(Clone, Copy)]
#[must_use]
pub struct Context<'a> {
    client: Option<u64>,
    address: Option<SocketAddr>,
    deadline: Option<Instant>,
    wanted: &'a dyn Wanted,
}

impl<'a> Context<'a> {
    /// Returns the context of an unknown client, which waits without a limit.
    pub const fn new() -> Self {
        Self {
            client: None,
            address: None,
            deadline: None,
            wanted: &true,
        }
    }

    /// Returns the context with this client: its number, and the address of its socket.
    pub const fn with_client(self, client: u64, address: Option<SocketAddr>) -> Self {
        Self {
            client: Some(client),
            address,
            ..self
        }
    }

    /// Returns the context with this deadline.
    pub const fn with_deadline(self, deadline: Option<Instant>) -> Self {
        Self { deadline, ..self }
    }

    /// Returns the context with this answer to the question whether the caller waits.
    pub const fn with_wanted(self, wanted: &'a dyn Wanted) -> Self {
        Self { wanted, ..self }
    }

    /// Returns a request of these bytes in this context, for bytes that arrived in
    /// [parts](crate::parts).
    pub fn with_data(self, data: &'a [u8]) -> impl Request + Sync + 'a {
        Joined {
            data,
            context: self,
        }
    }

    /// Returns the number of the client, which no other client of the server has while this client
    /// is connected; `None` if the server passed bytes alone. In copyrpc and scalerpc this is the
    /// number of the client's `Peer`; in ipc, the number of its place at the server.
    #[must_use]
    pub const fn client(&self) -> Option<u64> {
        self.client
    }

    /// Returns the address of the client's socket, where the client has one and the server passed it.
    #[must_use]
    pub const fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Returns the end of the caller's time; `None` if the caller waits without a limit. It counts
    /// from the arrival of the request, so the caller's own time has ended by then.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether the caller waits for the reply: its time is not over, and as far as the
    /// server knows, the client is connected and did not give up the call. A handler in the thread
    /// of its server gets the state at the time of the handler's call; a handler that answers a
    /// [`ServerRequest`](crate::ServerRequest) gets a state that is at most 15 ms old.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted.is_wanted()
            && self
                .deadline
                .is_none_or(|deadline| Instant::now() < deadline)
    }
}

impl Default for Context<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("client", &self.client)
            .field("address", &self.address)
            .field("deadline", &self.deadline)
            .field("is_wanted", &self.is_wanted())
            .finish()
    }
}

struct Joined<'a> {
    data: &'a [u8],
    context: Context<'a>,
}

impl Request for Joined<'_> {
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.data)
    }

    fn context(&self) -> Context<'_> {
        self.context
    }
}
