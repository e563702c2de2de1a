//! A [`Server`] serves many [`Client`]s, of its own or other processes of one user on one host.
//! Each client has a lane of requests and a lane of responses of its own, so clients never wait for
//! each other, and a client that is stopped or killed at any instruction disturbs no other client.
//!
//! ```
//! use std::time::Duration;
//! use ipc::{Client, Server};
//!
//! # let name = &format!("ipc-doc-{}", std::process::id());
//! # let (handles, stop) = std::sync::mpsc::channel();
//! # let server = std::thread::spawn({ let name = name.clone(); move || { let name = &name;
//! let mut server = Server::<u64, u64>::bind(name)?;
//! # handles.send(server.stop_handle()).unwrap();
//! server.serve(|number| number * number); // until its `stop_handle` stops it, from any thread
//! # Ok::<(), ipc::SetupError>(()) }});
//!
//! // In this process or in another:
//! let mut client = Client::<u64, u64, ()>::connect_within(name, Duration::from_secs(10))?;
//! assert_eq!(client.ask(12, Duration::from_secs(1))?, 144);
//! # stop.recv()?.stop();
//! # server.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! By polling, a client can have many calls under way at a time, and the server can answer them in
//! any order:
//!
//! ```
//! use ipc::sleep::{self, Sleeper};
//! use ipc::{Client, Server};
//!
//! # let name = &format!("ipc-doc-poll-{}", std::process::id());
//! let mut server = Server::<u64, u64>::bind(name)?;
//! let mut client = Client::<u64, u64, &str>::connect(name)?;
//!
//! client.call(12, "the square of 12")?;
//! sleep::wait([&mut server as &mut dyn Sleeper, &mut client], None); // until there is something to poll for
//! server.poll();
//! while let Some((token, number)) = server.recv() {
//!     server.reply(token, number * number)?;
//! }
//! let mut answers = vec![];
//! client.poll(|question, answer| answers.push((question, answer)))?;
//! assert_eq!(answers, [("the square of 12", Ok(144))]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A thread that has answers for the server's thread to send ends the sleep of the server:
//!
//! ```
//! use std::sync::Arc;
//!
//! use ipc::sleep::{self, Alarm, Sleeper};
//!
//! # let name = &format!("ipc-doc-alarm-{}", std::process::id());
//! let mut server = ipc::Server::<u64, u64>::bind(name)?;
//! let alarm = Arc::new(Alarm::default());
//! let waker = alarm.waker();
//! std::thread::spawn(move || waker.wake());
//! sleep::wait([&mut server as &mut dyn Sleeper, &mut &*alarm], None);
//! assert!(alarm.take());
//! # Ok::<(), ipc::SetupError>(())
//! ```
//!
//! - **Names**: [`Server::bind`] and [`Client::connect`] use the directory `/dev/shm/copyrpc-<uid>`
//!   and the tag 0, and `bind` makes room for 64 clients with 32 unanswered calls each;
//!   [`Server::bind_in`] takes the directory, these two numbers and a tag of the application's
//!   choice, and [`Client::connect_in`] the directory and the tag.
//! - **Payloads** are plain old data, checked by the compiler ([`Plain`]: any bytes are a valid
//!   value) and by both ends when they connect: sizes, alignments and a tag of the application's
//!   choice.
//! - **Order**: the server takes a client's requests in the order of its calls, and answers them in
//!   any order it likes. A [`Token`] is the duty to answer: it can be kept anywhere and moved to
//!   another thread, [`Server::reply`] and [`Server::refuse`] use it up, and dropping it, on any
//!   thread, ends the call in the server's next poll or wait.
//! - **Every call ends exactly once**: with its reply, or with an error. [`CallFailure::Refused`]
//!   or [`CallFailure::Dropped`]: the server refused the request or dropped its token.
//!   [`CallFailure::TimedOut`]: the time that [`Client::call_within`] was given is over;
//!   [`Client::cancel`] ends a call without an error. Such a call keeps its slot until its late
//!   reply arrives, which is discarded, and a server that asks sees that the call has ended
//!   ([`Server::is_wanted`]). [`CallFailure::NotSent`]: the server was dropped and had no
//!   unanswered request of the client, so no handler got the request. [`CallFailure::Closed`]: the
//!   server was dropped and had an unanswered request of the client, or the server was killed,
//!   which takes about a millisecond of polling to detect. The entry of a client that has ended
//!   becomes free for the next client, and late answers to the ended client are discarded.
//! - **Back-pressure**: at most `depth` calls of a client are unanswered; a further call fails with
//!   [`CallError::Full`], which returns the request.
//! - **Cost**: no lock, no system call and no read-modify-write per call of an active client. A
//!   client that makes no call for one to two milliseconds is no longer active; its next call also
//!   sets a bit. The server polls active clients only. Payloads up to 48 B travel in one cache
//!   line.
//! - **Waiting**: both ends poll. [`Server::wait`] and [`Client::wait`] sleep until there is
//!   something to poll for, and cost the other end one load per message while no thread sleeps; a
//!   [`WaitStrategy`] chooses between polling, yielding and sleeping. A thread that polls several
//!   things, even those of other crates of this workspace, sleeps on all of them at once, as above
//!   ([`sleep::wait`]).
//! - **Virtual time**: in a directory that is in memory ([`Dir::in_memory`]) there are no files,
//!   and deadlines follow the clock of the directory, which may be set by hand. A single-threaded
//!   driver of both ends is notified of new messages through [`sleep::rest`].
//! - **Messages of any length** up to a bound chosen when the server is created, at most 1 MiB:
//!   [`bytes`]. Longer data travel in [`parts`], or in a file whose name is the message.
//! - **Futures**: an [`AsyncClient`] has a thread that sleeps until a reply or a call wakes it; its
//!   calls are futures for any executor, and a call whose future is dropped is given up. The
//!   requests of a [`bytes::AsyncServer`] are futures too. A [`Server`] of values is a loop over
//!   [`Server::recv`], whose tokens other threads can hold.
//! - **Errors of the handler** are part of the reply type: a refusal carries no more than
//!   [`CallFailure::Refused`]. A [`service!`] over [`bytes`] has methods with errors of their own.
//! - **Memory**: 192 B + 64 B per client + a slot of 16 B and the payload, rounded up to 64 B, for
//!   each call in each direction + 8 B per call + 1 bit per client, each rounded up to 64 B: 4,672
//!   B for one client at depth 32, 35,584 B for 8 (and a page for every region).
//!
//! `docs/shm-protocols.md` describes the conditions that the crate needs, the effect of a stopped
//! or killed process on others, and the cost of garbage. `delegationrpc` is this crate with a
//! different [`Announce`]: a ring of client numbers instead of the bits. **Which to choose**: this
//! crate, unless clients have to be served in the order in which they begin to call. A call costs
//! the same instructions in both, and a poll of a server that finds nothing is cheaper here.
//!
//! # The files, in the order a call passes them
//! - `client`: publishes a request in its own lane, and collects replies; `membership`: its entry,
//!   and the state of the server.
//! - `announce`: the announcement to a server that does not poll the lane.
//! - `given_up`: the calls that clients gave up, for a server that asks.
//! - `entries`: a server's clients: entries with generations; the search for clients that have
//!   ended.
//! - `sessions`: a bounded, fair pass over the active lanes.
//! - `server`, `token`: received requests, which are answered once, in any order; the handles by
//!   which other threads reach a server.
//! - [`bytes`]: messages of any length up to a bound: long messages are outside of the lanes.
//! - `limits`, `layout`, `views`: the places in the region, and the only code that turns offsets
//!   into addresses.
//! - `async_client`: a client in a thread of its own, whose calls are futures.
//! - `blocking`: serving and waiting in the caller's thread. `error`: the errors, one type per
//!   verb.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod announce;
mod async_client;
mod blocking;
pub mod bytes;
mod client;
mod entries;
mod error;
mod given_up;
mod layout;
mod limits;
mod membership;
mod server;
mod sessions;
mod token;
mod views;

pub use announce::Announce;
pub use async_client::{AsyncCall, AsyncClient, ClientOptions, Reconnecting, Session};
pub use client::Client;
/// Services with methods, over a [`bytes::Client`].
pub use copyrpc_calls::methods;
/// Payloads above the limits of a message, over a [`bytes::Client`].
pub use copyrpc_calls::parts;
pub use copyrpc_calls::{CallError, CallFailure, SessionEnd, Tag as CallToken};
pub use copyrpc_calls::{Ending, OptionError, StopHandle, service};
pub use copyrpc_shm::dir::Dir;
pub use copyrpc_shm::plain::Plain;
pub use copyrpc_shm::ready::ReadyWords;
pub use copyrpc_shm::sleep;
pub use copyrpc_shm::wait::WaitStrategy;
pub use error::{ClientError, Misfit, ReplyError, SetupError};
pub use limits::{CLIENTS_MAX, DEPTH_MAX};
pub use server::Server;
pub use token::Token;

/// Checks that `?` makes a `Box<dyn Error + Send + Sync>` of every error.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::ClientError>();
        check::<crate::CallError<u64, u64>>();
        check::<crate::CallFailure>();
        check::<crate::OptionError>();
        check::<crate::SetupError>();
        check::<crate::ReplyError>();
        check::<crate::SessionEnd>();
    }
}
