//! RPC over RDMA WRITE with Immediate, for services whose calls are short and many.
//!
//! - Calls and replies are copied into a ring. All messages that gather between two polls travel in
//!   one WRITE, and the receiver reads them where they landed.
//! - Credit guarantees room for replies: a handler never waits for space to answer.
//! - Each call ends exactly once: by its reply, its deadline, its cancellation, or the end of its
//!   connection.
//! - copyrpc runs on mlx5 devices through the crate [`mlx5`], and without a NIC on that crate's
//!   software HCA, with the same bytes.
//!
//! Do not use copyrpc between hosts without RDMA: gRPC and its like are made for them. Nor between
//! processes of one host, where `copyrpc-ipc` is faster; nor for peers that are not trusted, since
//! nothing is encrypted, and the exchange over TCP is authenticated by no more than a shared
//! secret, if there is one. Requests of 128 KiB and more, and replies of 192 KiB and more (with
//! rings of the default size), are sent in [`parts`], up to 1 GiB, or outside of the messages,
//! through [`Memory`]. copyrpc has not been run on a NIC yet.
//!
//! A server and a client, in two processes or two threads. They connect through a TCP address, and
//! all messages go over the device:
//!
//! ```rust
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! # let (told, tell) = std::sync::mpsc::channel();
//! # let server = std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let mut server = copyrpc::Server::bind("127.0.0.1:0")?;
//! # told.send((server.local_addr()?, server.stop_handle())).ok();
//! server.serve(|request| request.to_vec().to_ascii_uppercase())?;
//! # Ok(())
//! # });
//! # let (address, stop) = tell.recv()?;
//!
//! let mut client = copyrpc::Client::connect(address)?;
//! assert_eq!(&client.call(b"ping")?[..], b"PING");
//! # stop.stop();
//! # server.join().map_err(|_| "the server panicked")??;
//! # Ok(())
//! # }
//! ```
//!
//! [`Server`] serves any number of clients in one thread, sleeps while there is nothing to do, and
//! outlives clients that close, crash or disconnect. [`Client`] waits for a server that has not
//! started yet, and connects again when the server has ended. The device is the software HCA, or
//! the device that `COPYRPC_DEVICE=mlx5_0` or the options name. [`AsyncServer`] and [`AsyncClient`]
//! are the same pair for tokio or any other executor.
//!
//! All four are made of [`Context`] and [`Endpoint`], with which a thread has many calls
//! outstanding, holds requests, and polls when it likes. The [`guide`] has their rules, limits and
//! costs:
//!
//! ```rust
//! use copyrpc::mlx5::DeviceSpec;
//! use copyrpc::{Context, ContextBuilder, EndpointConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // One context per thread. Here one thread plays both sides.
//! let client: Context<u64> = ContextBuilder::new(DeviceSpec::default()).build()?;
//! let server: Context<()> = ContextBuilder::new(DeviceSpec::default()).build()?;
//!
//! // Each side makes an endpoint and swaps its 128-byte record with the peer, by any channel.
//! let (a, b) = (client.create_endpoint(&EndpointConfig::default())?, server.create_endpoint(&EndpointConfig::default())?);
//! let (record_a, record_b) = (a.local_info(), b.local_info());
//! let (a, _b) = (a.connect(&record_b)?, b.connect(&record_a)?);
//!
//! // A request of 4 bytes whose reply may have 16. It leaves with the next poll.
//! a.call(b"ping", 7, 16)?;
//! let mut reply = None;
//! while reply.is_none() {
//!     client.poll(|user_data, outcome| reply = Some((user_data, outcome.map(|bytes| bytes.to_vec()))))?;
//!     server.serve(
//!         |request, reply| {
//!             let mut answer = request.to_vec();
//!             answer.reverse();
//!             // Sending fails for a caller that has disconnected, and for more bytes than allowed.
//!             let _sent = reply.send(&answer);
//!         },
//!         |(), _| (),
//!     )?;
//! }
//! assert_eq!(reply, Some((7, Ok(b"gnip".to_vec()))));
//! # Ok(())
//! # }
//! ```
//!
//! Between two processes, the records are sent over a socket: [`Context::connect_over`] returns
//! when both ends are connected. Processes that exchange the records by themselves, for example
//! over MPI, need a barrier between connecting and their first poll. In two terminals:
//!
//! ```text
//! cargo run -p copyrpc --example server
//! cargo run -p copyrpc --example client
//! ```
//!
//! | example | content |
//! |---|---|
//! | `server`, `client` | two processes, in as few lines as possible |
//! | `poll_server`, `poll_client` | the same with a loop of their own; the server sleeps while idle, and all calls of the client share one WRITE |
//! | `async_server`, `async_client` | the same with futures |
//! | `first_service` | the service of the tutorial: counters, with a client that is killed |
//! | `metadata` | a service with methods: clients with deadlines, and a server that is restarted under them |
//! | `subscribe`, `long_poll` | a server that calls its clients; clients whose calls stay until there is something to tell |
//! | `sidecar` | a server of `ipc` that forwards to a remote one |
//! | `transports` | one source over copyrpc, scalerpc and ipc |
//! | `blobs`, `bulk` | data above the message limit: in parts, and by READs and WRITEs |
//! | `calls` | two threads and many calls outstanding: the effect of batching |
//!
//! ## A tour, in the order data flows
//!
//! | module | content |
//! |---|---|
//! | `service` | [`Server`], [`Client`], [`AsyncServer`], [`AsyncClient`]: everything below in one, for programs that only want requests answered |
//! | `context` | [`ContextBuilder`], [`Context`]: device and queues of one thread, and the poll that drives everything |
//! | `config` | [`EndpointConfig`], and the queue lengths that follow from it |
//! | `connect` | [`PendingEndpoint`]: created, exchanging records, connecting; by hand, or over a byte stream |
//! | `endpoint` | [`Endpoint`]: calls, the end |
//! | `queue_share` | the share of an endpoint in the context's queues |
//! | `connection` | the driver of one connection: core, memory, queue pair |
//! | `worklist` | the connections that need service, and the requests that wait |
//! | `control` | the published record, and the destination of READs |
//! | `timers` | the clock, and the deadlines |
//! | `link` | the protocol of one end as a pure state machine: `tx`, `rx`, `credit`, `calls`, `watch`, `idle`, `window`, `backoff`, `closing` |
//! | [`ring`] | positions, limits, the owner type of ring memory, [`RecvBytes`] |
//! | `wire` | every byte format |
//! | `recv` | [`Reply`], [`RecvHandle`]: a request to answer, at once or later |
//! | `raw` | [`Memory`], [`RemoteMemory`]: READs and WRITEs beside the calls |
//! | `operations` | the methods of [`Context`] and [`Endpoint`] for READs and WRITEs |
//! | `context::wait` | [`Context::wait`]: sleeping until there is something to poll for |
//! | [`error`], `stats` | errors, counters |
//! | [`guide`] | rules, limits, what makes it fast |
//!
//! `docs/copyrpc-protocol.md` of the repository has the wire format and the numbered invariants
//! that the code cites.
//!
//! The path of a call: [`Endpoint::call`] checks room and credit and copies the payload into the
//! send ring. The next poll or flush puts flow-control words before the gathered messages and posts
//! them as one WRITE with Immediate. At the peer, [`Context::serve`] takes the completion, checks
//! the batch, and gives each request to its handler as it is parsed, in place. [`Reply::send`]
//! writes into the other ring, where the call has reserved the space, and the reply travels the
//! same way; the caller's poll gives the reply's bytes to its callback. A handler that needs time
//! keeps the request with [`Reply::hold`]. A [`poll`](Context::poll) queues requests instead, for
//! [`Context::recv`], which costs more.

// Compiles and runs the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod config;
mod connect;
mod connection;
mod context;
mod control;
mod endpoint;
pub mod error;
pub mod guide;
mod link;
mod operations;
mod queue_share;
mod raw;
mod recv;
pub mod ring;
mod service;
mod stats;
#[cfg(test)]
mod tests;
mod timers;
mod wire;
mod worklist;

pub use config::EndpointConfig;
pub use connect::{
    EXCHANGE_RECORD_SIZE, EXCHANGE_VERSION, ExchangeRecord, PendingEndpoint, RecordError, Refusal,
};
pub use connection::Outcome;
pub use context::{Context, ContextBuilder, DEFAULT_CQ_SIZE, DEFAULT_ENDPOINTS, DEFAULT_SRQ_SIZE};
/// Services with methods, over [`Client`] and [`AsyncClient`].
pub use copyrpc_calls::methods;
/// Payloads above the limits of a message, over the same clients.
pub use copyrpc_calls::parts;
pub use copyrpc_calls::{Ending, OptionError, StopHandle, service};
pub use endpoint::{CallToken, Endpoint};
pub use error::{
    CallError, CallFailure, CloseReason, ProtocolError, Reentrant, ReplyError, SetupError,
};
pub use link::Window;
/// The driver of the devices, with their options and errors.
pub use mlx5;
pub use mlx5_rendezvous::{Event, Events, Peer, Secret};
pub use raw::{Memory, RdmaError, RemoteMemory, RemoteMemoryError};
pub use recv::{RecvHandle, Reply};
pub use ring::RecvBytes;
pub use service::{
    AsyncCall, AsyncClient, AsyncServer, Caller, Client, ClientError, ClientOptions, Host, Server,
    ServerOptions, ServerRequest, SharedAddress, default_device,
};
pub use stats::Stats;

/// Errors can be sent to other threads, and `?` turns each into a `Box<dyn Error + Send + Sync>`.
/// `ReplyError` returns a request, which belongs to its thread.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::CallError<()>>();
        check::<crate::CallFailure>();
        check::<crate::ClientError>();
        check::<crate::CloseReason>();
        check::<crate::Reentrant>();
        check::<crate::ProtocolError>();
        check::<crate::OptionError>();
        check::<crate::RdmaError<()>>();
        check::<crate::RemoteMemoryError>();
        check::<crate::SetupError>();
    }
}
