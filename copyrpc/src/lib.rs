//! RPC over RDMA WRITE with Immediate. Calls and replies are copied into a ring. All messages gathered between two polls travel in one
//! WRITE, and the receiver reads them in place. Credit guarantees room for replies: a handler never waits for space to answer.
//!
//! The crate runs on mlx5 devices through the `mlx5` crate, and without a NIC on that crate's software HCA, with the same bytes.
//!
//! ## Quick start
//!
//! A server and a client, in two processes or two threads. They connect through a TCP address, and all messages go over the device:
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
//! [`Server`] serves any number of clients in one thread, sleeps while there is nothing to do, and outlives clients that leave in whatever way;
//! [`Client`] waits for a server that is not there yet, and connects again when it has gone. The device is the software HCA, or what
//! `COPYRPC_DEVICE=mlx5_0` or the options name. [`AsyncServer`] and [`AsyncClient`] are the same pair for tokio or any other executor. All are made of
//! this, with which a thread has many calls outstanding, holds requests, and polls
//! when it likes:
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
//!             // It fails for a caller that has gone, and for more bytes than that allowed.
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
//! Between two processes, the records go over a socket: [`Context::connect_over`] returns when both ends are connected. Processes that
//! exchange the records by themselves, for example over MPI, need a barrier between connecting and their first poll. In two terminals:
//!
//! ```text
//! cargo run -p copyrpc --example server
//! cargo run -p copyrpc --example client
//! ```
//!
//! | example | content |
//! |---|---|
//! | `server`, `client` | two processes, in as few lines as possible |
//! | `poll_server`, `poll_client` | the same with a loop of their own; the server sleeps while idle, and all calls of the client share
//! one WRITE |
//! | `async_server`, `async_client` | the same with futures |
//! | `kv` | a key-value service: 16 clients with deadlines, and a server that is restarted under them |
//! | `bulk` | data above the message limit |
//! | `calls` | two threads and many calls outstanding: the effect of batching |
//!
//! ## A tour, in the order data flows
//!
//! | module | content |
//! |---|---|
//! | `service` | [`Server`], [`Client`], [`AsyncServer`], [`AsyncClient`]: everything below in one, for programs that only want requests answered |
//! | `context` | [`ContextBuilder`], [`Context`]: device and queues of one thread, and the poll that drives everything |
//! | `config` | [`EndpointConfig`], and the reasons to refuse an endpoint |
//! | `pending` | [`PendingEndpoint`]: created, exchanging records, connecting |
//! | `endpoint` | [`Endpoint`]: calls, the end |
//! | `exchange`, `handshake` | the record that two endpoints exchange, and the exchange over a stream |
//! | `queue_share` | the share of an endpoint in the context's queues |
//! | `connection` | the driver of one connection: core, memory, queue pair |
//! | `worklist` | the connections that need service, and the requests that wait |
//! | `control` | the published record, and the destination of READs |
//! | `timers` | the clock, and the deadlines |
//! | `link` | the protocol of one end as a pure state machine: `tx`, `rx`, `credit`, `calls`, `deadlines`, `watch`, `idle`, `window`, `backoff`, `closing` |
//! | [`ring`] | positions, limits, the owner type of ring memory, [`RecvBytes`] |
//! | `wire` | every byte format |
//! | `recv` | [`Reply`], [`RecvHandle`]: a request to answer, at once or later |
//! | [`typed`] | messages that are structs |
//! | `raw` | [`Memory`], [`RemoteMemory`]: READs and WRITEs beside the calls |
//! | `context::wait` | [`Context::wait`]: sleeping until there is something to poll for |
//! | [`error`], `stats` | errors, counters |
//!
//! `docs/copyrpc-protocol.md` of the repository has the wire format and the numbered invariants that the code cites.
//!
//! The path of a call: [`Endpoint::call`] checks room and credit and copies the payload into the send ring. The next poll or flush puts
//! flow-control words before the gathered messages and posts them as one WRITE with Immediate. At the peer, [`Context::serve`] takes the
//! completion, checks the batch, and gives each request to its handler as it is parsed, in place. [`Reply::send`] writes into the other
//! ring, where the call has reserved the space, and the reply travels the same way; the caller's poll gives the reply's bytes to its
//! callback. A handler that needs time keeps the request with [`Reply::hold`]. A [`poll`](Context::poll) queues requests instead, for
//! [`Context::recv`], which costs more.
//!
//! ## Rules
//!
//! - **Threads.** A context belongs to the thread that built it, with everything made from it (`!Send`); [`ContextBuilder`] is `Send`.
//! - **Stepping.** Nothing happens outside [`Context::poll`], [`serve`](Context::serve), [`drain`](Context::drain),
//!   [`drain_serving`](Context::drain_serving), [`flush_endpoints`](Context::flush_endpoints) and [`wait`](Context::wait). A poll is bounded,
//!   and is a drain and a flush: a loop of those two does all that polls do. The same holds for `serve` and `drain_serving`. Callbacks may
//!   call, reply and receive; a nested poll is refused with an error. A callback that panics loses nothing but its own call.
//! - **Ends.** Each call that was taken ends exactly once: by a reply, a [`CallFailure`], or [`Endpoint::cancel`]. A deadline
//!   ([`Endpoint::call_within`]) is never early. A reply that comes too late reaches no call. One that breaks the protocol ends its own
//!   connection only. To go on with a peer, connect a new endpoint.
//! - **Peers that leave.** While requests are unanswered or replies not taken, a peer whose process died is noticed at latest about two
//!   [keep-alive](EndpointConfig::keepalive) intervals later, and one that is stopped, or does not poll, after its
//!   [stall timeout](EndpointConfig::stall_timeout); a handler of [`serve`](Context::serve) may take any time. On an idle connection a dead one is noticed within about two
//!   [idle keep-alive](EndpointConfig::idle_keepalive) intervals, half a second of the device's retries added; a living one is kept, unless
//!   there is an [idle timeout](EndpointConfig::idle_timeout). An endpoint that has ended has given everything back, though handles of it are
//!   kept: queue pair, share of the queues, and rings, but a receive ring in which the application has requests.
//! - **Close.** [`Endpoint::close`] ends a connection when all that is outstanding has ended, on both sides, and so does dropping the last
//!   handle of an endpoint; [`Endpoint::abort`] ends it at once. Dropping the context sends
//!   what was answered and tells the peers that it goes, and waits until that has arrived, 20 ms at most.
//! - **Order.** Requests are received in the order they were called; replies may be given in any order, and a request may be held as long as
//!   needed. Its bytes stay in the ring until it is answered, and so does what came behind it.
//! - **Limits.** A request has at most `ring_size / 8 - 12` bytes, a response `3 * ring_size / 16 - 44`. Larger ones are refused for good;
//!   `RingFull` and `InsufficientCredit` pass after polls ([`CallError::is_retryable`]).
//! - **Queues.** The endpoints of a context share its queues, which [`ContextBuilder::endpoints`] sizes: two thirds of the SRQ's receives for
//!   their batches in flight, and of the send CQ that number + their one-sided operations + 8 each, and the batches of a
//!   [`Window::Completion`]. One endpoint too many is refused with the size needed, and its peer hears so.
//!
//!   | `endpoints` | batches in flight of each | receives | entries of a CQ | memory of the queues | of all rings of 1 MiB | of 64 KiB |
//!   |---|---|---|---|---|---|---|
//!   | 1 | 32 | 48 | 56 | 9 KiB | 2 MiB | 128 KiB |
//!   | 128, the default | 32 | 6,144 | 7,168 | 1.1 MiB | 256 MiB | 16 MiB |
//!   | 512 | 32 | 24,576 | 28,672 | 4.5 MiB | 1 GiB | 64 MiB |
//!   | 1,024 ([`endpoints_with`](ContextBuilder::endpoints_with)) | 16 | 24,576 | 40,960 | 6.5 MiB | 2 GiB | 128 MiB |
//!   | 4,096 | 4 | 24,576 | 114,688 | 10.5 MiB | 8 GiB | 512 MiB |
//!
//!   Devices round receives and entries up to powers of two. Most have about 32,000 receives in a queue: 10,000
//!   endpoints with 2 batches each are what was tried (`tests/many.rs`).
//! - **Memory.** An endpoint has two rings, 64 bytes of a registered region that 64 endpoints share, a send queue as long as its batches in
//!   flight need ([`EndpointConfig::send_queue_wqebbs`]), and what calls and requests outstanding need. After warm-up nothing is allocated for a
//!   call.
//! - **Fork.** A forked child has none of the registered memory and queues: it must not touch a context or anything made from one, nor drop
//!   it, and should `exec` or `_exit`. The parent is not disturbed, and the child keeps nothing of it alive: peers notice the parent's end.
//! - **Trust.** A peer's bytes are validated before use. [`RecvBytes`] lie in memory that the peer's NIC can write: copy them out, or vouch
//!   for the peer with `as_slice`.
//!
//! ## Beside plain calls
//!
//! - **Waiting.** A poll that finds nothing costs about a hundred instructions, and a core if it is repeated forever. [`Context::wait`]
//!   sleeps until there is something to poll for, and wakes for deadlines and to watch peers; an idle server that waits does not poll at
//!   all. A thread that polls other things as well sleeps on the context and on them with `shm::sleep::wait`.
//! - **Futures.** [`AsyncClient`] and [`AsyncServer`] have a thread that sleeps on the device, so that their futures are of any thread and executor.
//! - **Types.** [`typed::Call`] binds a request to its reply. [`Client::call_typed`], [`Server::serve_typed`], [`Endpoint::call_typed`],
//!   [`RecvHandle::read_as`] and [`RecvHandle::reply_typed`] send structs that derive the traits of
//!   `zerocopy`: the same bytes, with the size checked.
//! - **Bulk data.** What is larger than a message goes around the messages: one side puts the [`RemoteMemory`] of a [`Memory`] into a request,
//!   the other [READs](Endpoint::rdma_read) or [WRITEs](Endpoint::rdma_write) it piece by piece and then answers (`examples/bulk.rs`). A WRITE
//!   posted before a call or reply of the same endpoint is done when that message arrives. Every peer that was told a memory can read and
//!   write it until it is dropped.
//! - **Fabric.** The device says how its peers are reached: [`DeviceSpec::Verbs`](mlx5::DeviceSpec::Verbs) takes the port, GID index, P_Key
//!   index, service level, traffic class, MTU and READs in flight ([`VerbsOptions`](mlx5::verbs::VerbsOptions)).
//!   [`EndpointConfig::connect`] has timeout, retries and RNR timer of one connection ([`ConnectOptions`](mlx5::ConnectOptions)). Values that
//!   the device lacks are refused. Two ends of unequal MTUs use the smaller one ([`Endpoint::path_mtu`]).
//!
//! ## What makes it fast
//!
//! - **Depth.** Whatever is called between two polls shares a WRITE, and the peer's NIC handles WRITEs, not messages. Keep calls outstanding,
//!   and do not flush after each: [`Stats`] shows messages per batch.
//! - **Window.** An owner that polls often sends many small WRITEs. With [`EndpointConfig::window`] they wait for those before them, so that
//!   more gathers in each: a [`Window`] of one or two batches, in the clock of their completion here or of their arrival there.
//! - **Rings.** [`EndpointConfig::ring_size`] bounds what is in flight: about half of it requests, a quarter the replies to them. When
//!   [`Stats::ring_full`] or [`Stats::insufficient_credit`] grow steadily, it is too small, or the response allowances are larger than the
//!   replies.
//! - **Batches in flight.** [`EndpointConfig::batches_in_flight`] bounds the WRITEs under way; [`Stats::batch_stalls`] counts the flushes it
//!   stopped.
//! - **Copies.** One into the ring at each end, one out of it. [`RecvBytes::read`] and [`RecvBytes::copy_to`] allocate nothing.
//! - **Idle endpoints** cost a poll nothing, and a READ per [`EndpointConfig::idle_keepalive`] each; a context may have thousands.

// Compiles and runs the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod config;
mod connection;
mod context;
mod control;
mod endpoint;
pub mod error;
mod exchange;
mod handshake;
mod link;
mod pending;
mod queue_share;
mod raw;
mod recv;
pub mod ring;
mod service;
mod stats;
#[cfg(test)]
mod tests;
mod timers;
pub mod typed;
mod wire;
mod worklist;

pub use config::{CreateEndpointError, EndpointConfig};
pub use connection::Outcome;
pub use context::{BuildError, Context, ContextBuilder, DEFAULT_CQ_SIZE, DEFAULT_ENDPOINTS, DEFAULT_SRQ_SIZE, PollError};
pub use endpoint::{CallToken, Endpoint};
pub use error::{CallError, CallFailure, CloseReason, ProtocolError, ReplyError};
pub use exchange::{EXCHANGE_RECORD_SIZE, EXCHANGE_VERSION, ExchangeError, ExchangeRecord, RecordError, Refusal};
pub use link::Window;
/// The driver of the devices, with their options and errors.
pub use mlx5;
pub use pending::{ConnectError, ConnectFailure, PendingEndpoint};
pub use raw::{Memory, RdmaError, RemoteMemory, RemoteMemoryError};
pub use recv::{RecvHandle, Reply};
pub use ring::RecvBytes;
pub use service::{
    AsyncCall, AsyncClient, AsyncServer, Client, ClientError, ClientOptions, Server, ServerError, ServerOptions, ServerRequest, StopHandle,
};
pub use stats::Stats;

/// Errors can be sent to other threads, and `?` turns each into a `Box<dyn Error + Send + Sync>`. `ConnectError` and `ReplyError` return
/// an endpoint or a request, which belong to their thread.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::BuildError>();
        check::<crate::CallError<()>>();
        check::<crate::CallFailure>();
        check::<crate::ClientError>();
        check::<crate::CloseReason>();
        check::<crate::ConnectFailure>();
        check::<crate::CreateEndpointError>();
        check::<crate::ExchangeError>();
        check::<crate::PollError>();
        check::<crate::ProtocolError>();
        check::<crate::RdmaError<()>>();
        check::<crate::RemoteMemoryError>();
        check::<crate::ServerError>();
    }
}
