//! RPC over one-sided verbs on reliable connections, for one server with more clients than its NIC
//! caches queue-pair contexts: ScaleRPC (Chen, Lu, Shu, EuroSys 2019). The server serves its
//! clients in groups, one group per time slice. All groups share the same two message pools.
//!
//! The crate runs on mlx5 devices through the `mlx5` crate, and without a NIC on that crate's
//! software HCA. `COPYRPC_DEVICE=mlx5_0` selects a NIC.
//!
//! ```rust,no_run
//! let mut server = scalerpc::Server::bind("127.0.0.1:7480")?;
//! server.serve(|request| request.to_ascii_uppercase())?;
//! # Ok::<(), scalerpc::SetupError>(())
//! ```
//!
//! ```rust,no_run
//! let mut client = scalerpc::Client::connect("127.0.0.1:7480")?;
//! assert_eq!(client.call(b"ping")?, b"PING");
//! # Ok::<(), scalerpc::ClientError>(())
//! ```
//!
//! A server with several kinds of requests has a handler for each type. A handler can also answer
//! later, from any thread:
//!
//! ```rust
//! # use std::sync::mpsc;
//! # use scalerpc::HeldRequest;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut server = scalerpc::Server::bind("127.0.0.1:0")?;
//! let (queue, requests) = mpsc::channel::<HeldRequest>();
//! let mut handlers = scalerpc::Handlers::new(server.max_payload());
//! handlers.insert(1, |request: &[u8], response: &mut [u8]| {
//!     response[..request.len()].copy_from_slice(request);
//!     Ok(request.len())
//! });
//! handlers.insert_held(2, move |request| drop(queue.send(request)));
//! std::thread::spawn(move || requests.iter().for_each(|request| request.reply(*b"done").unwrap()));
//!
//! let (address, stop) = (server.local_addr()?, server.stop_handle());
//! let client = std::thread::spawn(move || {
//!     let mut client = scalerpc::Client::connect(address)?;
//!     let responses = (client.call_type(1, b"now")?.to_vec(), client.call_type(2, b"later")?.to_vec());
//!     stop.stop();
//!     Ok::<_, scalerpc::ClientError>(responses)
//! });
//! server.serve_types(&mut handlers)?;
//! assert_eq!(client.join().unwrap()?, (b"now".to_vec(), b"done".to_vec()));
//! # Ok(())
//! # }
//! ```
//!
//! [`Caller::rdma`] and [`RdmaClient`] make many calls at once. [`RdmaServer`] is the server
//! without a socket, for programs that have a channel and a loop of their own.
//!
//! | example | content |
//! |---|---|
//! | `groups` | twelve clients with calls outstanding, in one thread |
//! | `grouped_server`, `grouped_client` | the lines above, as two processes |
//! | `workers` | handlers that answer later: a pool of workers |
//! | `two_servers` | a client that chooses among servers |
//!
//! `cargo bench -p scalerpc` measures both ends in one thread. `scalerpc_bench` (package
//! `copyrpc-bench`) measures two processes, and other RPC methods for comparison.
//!
//! ## A tour, in the order data flows
//!
//! | module | content |
//! |---|---|
//! | `service` | [`Server`], [`Client`], [`AsyncClient`]: an address, a device, reconnection |
//! | [`rdma`] | [`RdmaServer`], [`RdmaClient`]: the core on a device; how the two ends connect |
//! | `protocol` | the core, state machines without a device: |
//! | `wire`, `config` | every byte format; [`ServerConfig`], [`Layout`]: the configuration, and the place of everything in memory |
//! | `client` | IDLE, WARMUP, PROCESS; calls and their completions |
//! | `server` | entries, zones, intake, replies |
//! | `scheduler`, `slices`, `groups` | slices; their lengths; the group of each client |
//! | `buffers` | the buffers of responses |
//! | `handlers` | the worker: [`Handlers`] by `rpc_type`, [`HeldRequest`] |
//!
//! `docs/scalerpc.md` of the repository has the design, the wire format and the numbered invariants
//! that the code cites.
//!
//! ## Rules
//!
//! - **Several cores.** A server is one thread; [`Server::share`] and [`Server::beside`] put more
//!   servers at an address. Clients of several servers gain if the slices of these servers end at
//!   the same times ([`RdmaServer::synchronise`]); the slices of servers at one address do.
//! - **Waiting.** A WRITE does not notify the owner of the memory to which it writes, so nothing
//!   wakes a waiting end. A [`Server`] without work and a waiting [`Client`] poll again and again,
//!   and sleep at most a millisecond between two polls. An [`AsyncClient`], whose calls are
//!   futures, is woken by its responses.
//! - **Stepping.** Nothing happens outside of `poll` and `step`. Each is bounded, and uses no
//!   thread, clock or system call. After set-up a call allocates nothing, if the owner's queue of
//!   operations keeps its capacity.
//! - **Operations.** A poll of the core appends operations to a queue of the caller. The caller
//!   executes the operations of one client in the order given, on one reliable connection, and
//!   reports the completions that an operation's documentation names.
//! - **Ends.** Each call ends exactly once, by its response or by a [`CallFailure`]. A handler
//!   never runs twice for one call. The handler ran if a response arrived, and for
//!   [`CallFailure::ReplyTooLong`]; it got the request for [`CallFailure::Refused`] and
//!   [`CallFailure::Dropped`]. No handler ran, nor will run, for [`CallFailure::NotSent`],
//!   [`CallFailure::UnknownType`], each error of a call that was not made, and
//!   [`ClientError::NoCredit`]. Whether a handler ran is not known for [`CallFailure::TimedOut`]
//!   and [`CallFailure::Closed`]. A server that stops leaves no call in doubt: [`Stepped::close`].
//! - **Trust.** Bytes that peers write are checked before use. A client with a wild pointer can
//!   destroy or change requests of other clients; the design page has the threat model.
//! - **Limits.** A payload has at most `slot_bytes - 40` bytes: 4,056 by default, 65,496 at most.
//!   Longer data travel in parts, one call each, or by `copyrpc`, which permits longer calls and
//!   has one-sided READs and WRITEs. A client has at most `depth` calls under way, including calls
//!   that timed out without an answer, and calls whose ends the caller has not taken.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[doc(hidden)]
pub mod protocol;
pub mod rdma;
mod service;

/// Services with methods, over [`Client`] and [`AsyncClient`].
pub use copyrpc_calls::methods;
/// Payloads above the limits of a message, over the same clients.
pub use copyrpc_calls::parts;
pub use copyrpc_calls::{Ending, OptionError, StopHandle, service};
/// The driver of the devices, with their options.
pub use mlx5;
pub use mlx5_rendezvous::{Event, Events, Peer, Secret};
pub use protocol::groups::{QPC_CACHE_CONNECTX3, QPC_CACHE_CONNECTX5};
pub use protocol::{
    CallFailure, CallToken, ClientId, ClientStats, CloseReason, Completion, Grouping, Handler,
    HandlerError, Handlers, HeldRequest, Layout, ProtocolError, ServerConfig, ServerStats, State,
};
pub use rdma::{RdmaClient, RdmaServer, SetupError};
pub use service::{
    AsyncCall, AsyncClient, AsyncServer, Caller, Client, ClientError, ClientOptions, DEFAULT_TYPE,
    Host, Server, ServerOptions, ServerRequest, SharedAddress, Stepped,
};

/// Errors can be sent to other threads, and `?` turns each into a `Box<dyn Error + Send + Sync>`.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::CallFailure>();
        check::<crate::ClientError>();
        check::<crate::CloseReason>();
        check::<crate::ProtocolError>();
        check::<crate::OptionError>();
        check::<crate::SetupError>();
    }
}
