//! Messages of any length up to a bound that is chosen when the server is created: a [`Server`] and
//! its [`Client`]s, which exchange `&[u8]`, while the server and the clients at the top of this
//! crate exchange values of one type.
//!
//! Both are built on the typed server and clients, with a message of 48 B in each slot of the
//! lanes. A message of up to [`INLINE_MAX`] bytes is in its slot and costs no more than a value; a
//! longer message is in an area outside of the lanes that belongs to its call. The bytes of a
//! message are copied once into shared memory and once out of it, since memory that a peer can
//! still write is never lent as a slice.
//!
//! Longer data than the bound, which is 4,096 bytes by `bind` and [`MESSAGE_MAX`] at most, travel
//! in [`parts`](crate::parts), or in a file whose name is the message. A request above the bound is
//! refused before it is sent ([`CallError::TooLarge`](crate::CallError::TooLarge)). An answer above
//! the bound is not sent, and its call ends with
//! [`CallFailure::ReplyTooLong`](crate::CallFailure::ReplyTooLong), although the handler has run.
//!
//! Servers of messages and servers of values are two kinds, and a client of one kind is refused by
//! a server of the other, whatever their tags. `bind` and `connect` of both kinds use the tag 0: to
//! connect to a server made by `bind`, `connect_in` takes the tag 0.
//!
//! ```
//! use ipc::Dir;
//! use ipc::bytes::{Client, MessageBytes, Server, ServerOptions};
//!
//! # let path = std::env::temp_dir().join(format!("ipc-bytes-doc-{}", std::process::id()));
//! # std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path)?;
//! # let dir = Dir::open(Some(&path))?;
//! let message_bytes = MessageBytes { request: 4096, response: 1 << 16 };
//! let options = ServerOptions { dir: Some(dir.clone()), message_bytes, type_tag: 1, ..ServerOptions::default() };
//! let mut server = Server::with_options("twice", &options)?;
//! let mut client = Client::<&str>::connect_in(&dir, "twice", 1)?;
//!
//! client.call(b"ab", "user data")?;
//! server.poll();
//! while let Some((token, request)) = server.recv() {
//!     let twice = request.repeat(2);
//!     server.reply(token, &twice)?;
//! }
//! client.poll(|user, answer| assert_eq!((user, answer), ("user data", Ok(&b"abab"[..]))))?;
//! # drop(server);
//! # std::fs::remove_dir(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod client;
mod message;
mod server;

pub use client::Client;

/// A server of byte messages, in one thread: by default for any process of this user on this host,
/// for messages of up to 4096 bytes, with room for 64 clients of 32 unanswered calls each, and with
/// the application's tag 0. With the functions of [`Host`], its thread polls by itself.
pub type Server = copyrpc_calls::Server<Host>;

/// The events of the sessions of a server, by the numbers of the clients.
pub type Events = copyrpc_calls::Events<usize>;

/// An event of a session.
pub type Event<'a> = copyrpc_calls::Event<'a, usize>;

/// The sessions of an [`AsyncClient`], one after the other.
pub type Caller = crate::Reconnecting<Client<u64>>;

/// A client whose calls are futures.
pub type AsyncClient = copyrpc_calls::AsyncClient<Caller>;

/// A [`Server`] whose requests are futures, for any executor and from any thread. The server keeps
/// its name until it is dropped: calls that are made after it was stopped wait until the drop, and
/// are for the next server of the name.
///
/// ```no_run
/// # async fn serve() -> Result<(), ipc::SetupError> {
/// let server = ipc::bytes::AsyncServer::bind("upper").await?;
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

pub use message::{INLINE_MAX, MESSAGE_MAX, MessageBytes};
pub use server::{Host, ServerOptions};
