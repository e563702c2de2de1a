//! A server and its clients, each in two lines. They connect through a TCP address, which is used
//! for that only; all messages go over the device.

mod caller;
mod server;
#[cfg(test)]
mod tests;

pub use caller::{Caller, ClientOptions};
pub use mlx5_rendezvous::default_device;
pub use server::{Host, ServerOptions, SharedAddress};

use crate::error::{CloseReason, SetupError};

/// A server at a TCP address. It belongs to one thread, and serves all its clients in that thread.
///
/// A client that disconnects or crashes, or is slow to connect, delays no other client. One process
/// or thread may have several servers, each with its own address and device. The socket over which
/// a client connected stays open as long as the client lives: its end makes the server ask the
/// client's device at once whether the client still exists, and free the place of a client that
/// died. The end of the socket is no more than a hint: a client whose socket is cut stays
/// connected.
///
/// While no client calls, the server sleeps, and wakes 100 times a second to poll for new clients.
/// The server cannot be sent to another thread, so bind it in the thread that serves, and send its
/// address and its stop handle to the threads that need them:
///
/// ```
/// let (tell, told) = std::sync::mpsc::channel();
/// let serving = std::thread::spawn(move || -> Result<(), copyrpc::SetupError> {
///     let mut server = copyrpc::Server::bind("127.0.0.1:0")?;
///     let _ = tell.send((server.local_addr(), server.stop_handle()));
///     server.serve(|request| request.to_vec())
/// });
/// let (address, stop) = told.recv()?;
/// assert_eq!(copyrpc::Client::connect(address?)?.call(b"ping")?, b"ping");
/// stop.stop();
/// # serving.join().unwrap()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A port 0 is any free port. Clients connect through the TCP address; their messages are sent over
/// the device. So `0.0.0.0:7479` lets clients of other hosts connect if the device is a NIC, or
/// `soft:roce=ADDRESS` at both ends; the software HCA `soft` reaches processes of its user on this
/// host only, at whatever address. A handler of [`serve`](Server::serve) may take any time, but at
/// most 2 s on a device that sends packets (`soft:roce=ADDRESS`), after which clients take the
/// server for dead. For handlers that answer later, or answer only some requests, see
/// [`Host::step`] and [`Host::recv`].
///
/// A server in the main thread is as short as this:
///
/// ```no_run
/// let mut server = copyrpc::Server::bind("127.0.0.1:7479")?;
/// server.serve(|request| request.to_vec().to_ascii_uppercase())?;
/// # Ok::<(), copyrpc::SetupError>(())
/// ```
pub type Server = copyrpc_calls::Server<Host>;

/// Why a client could not be made, or a call has no reply.
pub type ClientError = copyrpc_calls::ClientError<SetupError, CloseReason>;

/// A connection to a [`Server`]. A call after the end of the connection connects again. A client
/// belongs to one thread. The server cannot call a client: while the client has a call under way,
/// it refuses each request of the server.
///
/// A call takes [`max_reply`](ClientOptions::max_reply) from the credit of the connection until the
/// server answers it, even if the call has run out of time before. For many calls at once there are
/// [`Context`](crate::Context) and [`Endpoint`](crate::Endpoint), which this type uses.
///
/// ```no_run
/// let mut client = copyrpc::Client::connect("127.0.0.1:7479")?;
/// assert_eq!(&client.call(b"ping")?[..], b"PING");
/// # Ok::<(), copyrpc::ClientError>(())
/// ```
pub type Client = copyrpc_calls::Client<Caller>;

/// A connection to a [`Server`] whose calls are futures, for any executor and from any thread.
/// Clones share the connection, and therefore its WRITEs. Dropping the last clone closes the
/// connection, and waits, at most 20 ms, until the server has received the close. A call that an
/// [`AsyncServer`] holds for long stops no other call; it keeps its
/// [`max_reply`](ClientOptions::max_reply) from the credit of the connection. If such calls keep
/// all of the credit for 100 ms, further calls go over a further connection, up to
/// [`connections`](ClientOptions::connections) in all.
///
/// ```no_run
/// # async fn caller() -> Result<(), copyrpc::ClientError> {
/// let client = copyrpc::AsyncClient::connect("127.0.0.1:7479").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
pub type AsyncClient = copyrpc_calls::AsyncClient<Caller>;

/// The reply to a call of an [`AsyncClient`].
pub type AsyncCall = copyrpc_calls::AsyncCall<Caller>;

/// A [`Server`] whose requests are received by futures, for any executor and from any thread. The
/// drop of the server waits for the answers at most for
/// [`stop_timeout`](ServerOptions::stop_timeout).
///
/// ```no_run
/// # async fn serve(spawn: impl Fn(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>)) -> Result<(), copyrpc::SetupError> {
/// let server = copyrpc::AsyncServer::bind("127.0.0.1:7479").await?;
/// while let Some(request) = server.recv().await? {
///     // With tokio: `tokio::spawn`.
///     spawn(Box::pin(async move {
///         let reply = request.data().to_ascii_uppercase();
///         request.reply(reply);
///     }));
/// }
/// # Ok(())
/// # }
/// ```
pub type AsyncServer = copyrpc_calls::AsyncServer<Host>;

/// A request that an [`AsyncServer`] has received, to be answered at any time. Until the answer,
/// the request keeps its client's [`max_reply`](ClientOptions::max_reply) from the credit of the
/// client's connection, which is a quarter of the ring: a client that makes many calls that wait
/// for an event needs a small `max_reply`.
pub type ServerRequest = copyrpc_calls::ServerRequest<Host>;
