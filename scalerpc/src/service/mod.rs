//! A server and its clients, each in two lines. They connect through a TCP address. After that the
//! TCP connection only shows whether the other end lives; all messages go over the device.

mod client;
mod host;
mod server;

use std::time::Duration;

pub use client::{Caller, ClientOptions};
use copyrpc_calls::yield_core;
pub use host::Host;
use mlx5_rendezvous::default_device;
pub use server::{ServerOptions, SharedAddress, Stepped};

use crate::protocol::CloseReason;
use crate::rdma::SetupError;

/// A server at a TCP address. It belongs to one thread, and serves all its clients in that thread.
///
/// A client that disconnects or crashes, or is slow to connect, delays no other client. Any process
/// that reaches the port can call, unless there is a [secret](ServerOptions::secret). The socket
/// over which a client connected stays open as long as the client lives (for at most 512 clients).
/// When the socket closes, the server probes the client at once, and frees the place of a dead
/// client. The end of the socket is no more than a hint: a client whose socket is cut stays
/// connected.
///
/// [`serve`](Server::serve) answers requests of the [default type](DEFAULT_TYPE). A handler that
/// takes long delays the calls of all clients, and clients that connect, but no client loses its
/// connection, however long the handler takes. For more than one type of request, and handlers that
/// answer later, see [`Stepped::serve_types`].
///
/// ```no_run
/// let mut server = scalerpc::Server::bind("127.0.0.1:7480")?;
/// server.serve(|request| request.to_ascii_uppercase())?;
/// # Ok::<(), scalerpc::SetupError>(())
/// ```
pub type Server = copyrpc_calls::Server<Host>;

/// The reason why a client could not be made, or why a call has no response.
pub type ClientError = copyrpc_calls::ClientError<SetupError, CloseReason>;

/// A connection to a [`Server`]. A call after the end of the connection connects again. A client
/// belongs to one thread.
///
/// A client polls only in its calls. Between its calls it may pause for any time: it keeps its zone
/// until another client needs a zone; then the server takes the zone back without an answer of the
/// client (S26 of `docs/scalerpc.md`). Exception: after a timeout, the client cannot give up its
/// zone until the late response is polled. If other clients need the zone, the server evicts the
/// client after [`ServerConfig::drain_ns`](crate::ServerConfig::drain_ns). The next call of the
/// client detects the eviction before its request is sent, and connects again.
///
/// A call whose time ended keeps its slot until the server answers it. While such calls hold every
/// slot ([`ServerConfig::depth`](crate::ServerConfig::depth)), a further call waits for a slot;
/// when its own time ends, it ends with [`ClientError::NoCredit`], and the next call connects
/// again, which gives up all of these calls.
///
/// ```no_run
/// let mut client = scalerpc::Client::connect("127.0.0.1:7480")?;
/// assert_eq!(client.call(b"ping")?, b"PING");
/// # Ok::<(), scalerpc::ClientError>(())
/// ```
pub type Client = copyrpc_calls::Client<Caller>;

/// A connection to a [`Server`] whose calls are futures, for any executor and from any thread.
/// Clones share the connection, which is closed with the last clone. As many calls are under way as
/// the server gives slots to a client; further calls wait for a slot in their order.
///
/// The client has a thread of its own for its device. Calls, responses and the server's events wake
/// the thread; for that, the client sets [`RdmaOptions::sleeps`](crate::rdma::RdmaOptions::sleeps).
///
/// ```no_run
/// # async fn caller() -> Result<(), scalerpc::ClientError> {
/// let client = scalerpc::AsyncClient::connect("127.0.0.1:7480").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
pub type AsyncClient = copyrpc_calls::AsyncClient<Caller>;

/// The response to a call of an [`AsyncClient`].
pub type AsyncCall = copyrpc_calls::AsyncCall<Caller>;

/// A [`Server`] whose requests are futures, for any executor and from any thread: requests of the
/// [default type](DEFAULT_TYPE). The drop of the server waits for the answers at most for
/// [`stop_timeout`](ServerOptions::stop_timeout).
///
/// ```no_run
/// # async fn serve() -> Result<(), scalerpc::SetupError> {
/// let server = scalerpc::AsyncServer::bind("127.0.0.1:7480").await?;
/// while let Some(request) = server.recv().await? {
///     let reply = request.data().to_ascii_uppercase();
///     request.reply(reply);
/// }
/// # Ok(())
/// # }
/// ```
pub type AsyncServer = copyrpc_calls::AsyncServer<Host>;

/// A request that an [`AsyncServer`] has received, to be answered at any time. Until the answer,
/// the request keeps its slot.
pub type ServerRequest = copyrpc_calls::ServerRequest<Host>;

/// The `rpc_type` of calls and handlers by default.
pub const DEFAULT_TYPE: u16 = 0;

/// Number of idle polls that spin; the same number of polls after them yield.
const SPINS: u32 = 256;
/// The first sleep. Nothing wakes a sleeping end: a WRITE does not notify the memory's owner.
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// The waiting strategy between polls that find nothing: first spin, then yield, then sleep, each
/// sleep twice as long as the last, up to [`LONGEST_SLEEP`]. The unpark of the thread ends a sleep.
#[derive(Debug, Default)]
struct Idle {
    idle_polls: u32,
}

impl Idle {
    /// Restarts the strategy: a poll found something.
    const fn reset(&mut self) {
        self.idle_polls = 0;
    }

    /// Makes the next pass a sleep, because another thread needs the core.
    fn exhaust(&mut self) {
        self.idle_polls = self.idle_polls.max(2 * SPINS - 1);
    }

    const fn sleeps_next(&self) -> bool {
        self.idle_polls >= 2 * SPINS - 1
    }

    /// Waits once: a poll found nothing. Returns whether the thread slept.
    fn pass(&mut self) -> bool {
        self.idle_polls = self.idle_polls.saturating_add(1);
        match self.idle_polls.checked_sub(2 * SPINS) {
            None if self.idle_polls < SPINS => std::hint::spin_loop(),
            None if yield_core() => self.exhaust(),
            None => {}
            Some(sleeps) => {
                std::thread::park_timeout(
                    (SHORTEST_SLEEP * 2_u32.pow(sleeps.min(5))).min(LONGEST_SLEEP),
                );
                return true;
            }
        }
        false
    }
}
