//! The calls of every RPC of this workspace through shared memory: the table of calls that wait for
//! an answer, their deadlines, and the errors of calls. A late, repeated or forged answer finds no
//! call in the table. The crate has no unsafe code. Time is an argument, in nanoseconds of any
//! monotonic clock; [`parts`], the clients and the servers read the clock of the system. Only
//! clients whose calls are futures and servers whose requests are futures start a thread. `ipc`,
//! `delegationrpc` and `flux` are built on it; `copyrpc` and `scalerpc` share the errors, the
//! clients and servers, and the services with [`methods`].
//!
//! ```rust
//! use std::time::Duration;
//! use copyrpc_calls::Calls;
//!
//! let mut calls = Calls::new(2);
//! let first = calls.insert("first")?;
//! let second = calls.insert("second")?;
//! calls.end_within(second, 1_000, Duration::from_nanos(50));
//!
//! assert_eq!(calls.take(first), Some("first"));
//! assert_eq!(calls.take(first), None); // an answer is taken once
//!
//! let mut late = vec![];
//! calls.expire(1_050, |_, call| late.push(call));
//! assert_eq!((late, calls.waiting(), calls.len()), (vec!["second"], 0, 1)); // its place waits for the late answer
//! # Ok::<(), &str>(())
//! ```
//!
//! # The files
//! - `tag`: the identifier of a call, which its messages carry.
//! - `table`: the calls that wait for an answer.
//! - `deadlines`: a heap of deadlines, here and in `copyrpc`.
//! - `error`: the errors of calls, and the error of an option.
//! - `patience`: the number of empty polls before a thread sleeps.
//! - [`payloads`]: the values that methods take and return.
//! - [`methods`]: services with methods, over any client that sends bytes.
//! - `header`: the header of the requests of methods.
//! - `context`: the call of a request, as a method at the server sees it.
//! - `connection`: the interface of a transport to the clients of `copyrpc`, `scalerpc` and `ipc`.
//! - `client`: the client with one call at a time.
//! - [`futures`]: the client whose calls are futures, over a connection that a thread owns.
//! - `futures::further`: further connections of that client, for calls that would wait behind long
//!   polls.
//! - `futures::posting`: the way of that client's calls from any thread to the thread of the connection.
//! - `serving`: the interface of a transport to the servers, and the handle that stops them.
//! - `events`: the clients that connect to a server and disconnect.
//! - `server`: the server with one handler, in the thread of its owner.
//! - `async_server`: the server whose requests are futures.
//! - `tower`: the client as a service of the crate `tower`, and a server that answers with such a
//!   service, with the feature `tower`.
//! - [`oneshot`]: one value from a thread to a future.
//! - [`parts`]: payloads above the limits of a message, over the same clients.
#![forbid(unsafe_code)]

mod async_server;
mod client;
mod connection;
mod context;
mod deadlines;
mod error;
mod events;
pub mod futures;
mod header;
pub mod methods;
pub mod oneshot;
pub mod parts;
mod patience;
pub mod payloads;
mod server;
mod serving;
mod table;
mod tag;
#[cfg(feature = "tower")]
mod tower;

pub use async_server::{AsyncServer, ServerRequest};
pub use client::Client;
pub use connection::{Arrival, Connection, Dial, EndOf, Ended, ErrorOf, Facts, GoesOn, Refusal};
pub use deadlines::Deadlines;
pub use error::{
    CallError, CallFailure, ClientError, ConnectFailure, EndReason, Ending, OptionError, SessionEnd,
};
pub use events::{Event, Events, Named};
pub use futures::further::CONNECTIONS;
pub use futures::{AsyncCall, AsyncClient};
pub use patience::{Patience, yield_core};
pub use server::Server;
pub use serving::{Answer, Bind, Serving, Share, SharedAddress, StopHandle};
pub use table::{CALLS_MAX, Calls};
pub use tag::{ANSWERED, DROPPED, REFUSED, SENT_BACK, TOO_LONG, Tag, Tagged};
#[cfg(feature = "tower")]
pub use tower::Answering;

/// Errors go to other threads, and `?` makes a `Box<dyn Error + Send + Sync>` of each.
#[cfg(test)]
mod errors {
    type Error = crate::ClientError<std::convert::Infallible, crate::SessionEnd>;

    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<Error>();
        check::<crate::CallError<u64, u64>>();
        check::<crate::SessionEnd>();
        check::<crate::methods::MethodError<u64, Error>>();
        check::<crate::parts::PartsError<Error>>();
    }
}
