//! The threads and processes of one host call one [`Server`] through shared memory. Each [`Client`]
//! has its own lanes for requests and answers; a client that begins to call puts its number into
//! one ring, so the server polls one word, whatever the number of clients, and then the lanes of
//! the calling clients.
//!
//! ```
//! use delegationrpc::{Client, Server};
//!
//! # let name = &format!("delegationrpc-doc-{}", std::process::id());
//! let mut server = Server::<u64, u64>::bind(name)?;
//! let mut client = Client::<u64, u64, &str>::connect(name)?;
//!
//! client.call(12, "the square of 12")?;
//! server.step(|number| number * number);
//! let mut answers = vec![];
//! client.poll(|question, answer| answers.push((question, answer)))?;
//! assert_eq!(answers, [("the square of 12", Ok(144))]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `server.serve(|number| number * number)` does the server's part until a stop, and
//! `client.ask(12, timeout)` the client's part, for a client that wants one answer. `server.poll()`
//! and `server.recv()` take requests that are answered later, by `server.reply`. Both
//! types are the types of [`ipc`], with a [`Ring`] for the announcements of clients, and have the
//! same guarantees and errors: [`ipc::Server::bind_in`] and [`ipc::Client::connect_in`] take the
//! directory and the sizes, [`ipc::Server::bind_with`] the size of the ring too.
//!
//! - **A call** writes its payload into a slot of the client, and is published with one store. A
//!   client that the server does not poll, because it has made no call for about a millisecond,
//!   also announces itself, by one CAS of one word. Shared memory is consistent at any time: a
//!   client stopped or killed at any instruction has made its call or has not, has announced itself
//!   or has not, and delays no other client.
//! - **Order**: the calls of one client arrive in their order; clients that begin to call are taken
//!   up in the order of their announcements in the ring, and then served in rotation.
//! - **Every call ends exactly once**: with its reply, or with an error. [`CallFailure::Refused`]
//!   or [`CallFailure::Dropped`]: the server refused the request or dropped its [`Token`].
//!   [`CallFailure::TimedOut`]: the time that [`ipc::Client::call_within`] was given is over;
//!   [`ipc::Client::cancel`] ends a call without an error. Such a call keeps its slot until its
//!   late reply arrives, which is discarded. [`CallFailure::NotSent`]: the server was dropped and
//!   had no unanswered request of the client, so no handler got the request.
//!   [`CallFailure::Closed`]: the server was dropped and had an unanswered request of the client,
//!   or the server was killed, which takes about a millisecond of polling to detect. A token is the
//!   duty to answer: it can travel as the user data of another call, [`ipc::Server::reply`] and
//!   [`ipc::Server::refuse`] use it up, and dropping it, on any thread, ends the call in the
//!   server's next poll or wait.
//! - **Back-pressure**: at most `depth` calls of a client are unanswered; a further call fails with
//!   [`CallError::Full`], which returns the request. The ring limits no client: the server finds a
//!   client that found the ring full, after at most a millisecond per 64 clients.
//!   [`ring_depth_for`] returns the size of a ring that is never full.
//! - **Clients come and go**: an entry has a generation; announcements of, and answers to, a client
//!   that has ended are discarded.
//! - **Payloads** are plain old data ([`ipc::Plain`]: any bytes are a valid value), whose sizes,
//!   alignments and application tag both ends compare when they connect. A payload up to 48 B
//!   shares one cache line with its sequence number and tag.
//! - **Waiting**: both ends poll. [`ipc::Server::wait`] and [`ipc::Client::wait`] sleep until there
//!   is something to poll for, and cost the other end one load per message while no thread sleeps;
//!   [`ipc::WaitStrategy`] chooses between polling, yielding and sleeping. A thread that polls
//!   several things sleeps on all of them at once with [`sleep::wait`].
//! - **Errors of the handler** are part of the reply type: a refusal carries no more than
//!   [`CallFailure::Refused`]. Data that no payload type holds travel by [`ipc::bytes`], in parts,
//!   or in a file whose name is the payload.
//!
//! **Which to choose**: `ipc` or this crate. A call costs the same number of instructions in both.
//! A server's poll that finds nothing costs about a fifth less in `ipc`. Take `ipc`, which also has
//! messages of bytes ([`ipc::bytes`]), unless the order in which clients begin to call matters: the
//! server of this crate serves them in that order, the server of `ipc` in the order of their
//! numbers. The lanes are the same. The ring takes 128 B, and 8 B for each of its words, so a
//! region is a little larger: 4,800 B instead of 4,672 B with one client at depth 32, 35,776 B
//! instead of 35,584 B with 8 clients.
//!
//! # The region
//!
//! | offset | size in bytes | content | writer |
//! |---|---|---|---|
//! | 0 | 8 | magic `0x444C_4752_5043_5631` | server, before the region has a name |
//! | 8, 12, 16, 20 | 4 each | version (4), max_clients, ring_depth, resp_depth (the calls of a client that can be unanswered) | |
//! | 24 | 24 | sizes, alignments and tag of the payload types | |
//! | 128 | 8 | head, a hint | clients |
//! | 192 | 8 | tail | server |
//! | 256 | 8 x ring_depth | ring words `lap:51 full:1 client:12`, rounded up to 64 | clients: CAS from free; server: store to free |
//! | then | 64 x (1 + max_clients) | entries: departures; session, generation and `armed` of each client; words to sleep on | clients, server |
//! | then | S(Req) x max_clients x resp_depth | request lanes: sequence @0, tag @8, payload @16 of each slot | the client |
//! | then | S(Resp) x max_clients x resp_depth | response lanes, likewise | server |
//! | then | 8 x max_clients x resp_depth, rounded up to 64 | calls that were given up: a tag for each slot | the client |
//!
//! `S(T)` is 16 + the size of `T`, rounded up to 64. The invariants and the argument for each are
//! in `docs/shm-protocols.md`.
//!
//! # The files
//! - `ring`: the words that all clients share, in which they announce themselves; its invariants.
//!   Everything else is in [`ipc`].

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod ring;

pub use ipc::{self, CallError, CallFailure, Dir, SessionEnd, SetupError, Token, sleep};
pub use ring::{Ring, ring_depth_for};

/// A server of many clients in one thread, with announcements through one ring: an [`ipc::Server`]
/// with a [`Ring`].
pub type Server<Req, Resp> = ipc::Server<Req, Resp, Ring>;

/// A client of a [`Server`]: an [`ipc::Client`] with a [`Ring`]. `U` is the type of the user data
/// of a call; the client returns them with the reply.
pub type Client<Req, Resp, U> = ipc::Client<Req, Resp, U, Ring>;

/// A client of a [`Server`] whose calls are futures: an [`ipc::AsyncClient`] with a [`Ring`].
pub type AsyncClient<Req, Resp> = ipc::AsyncClient<Client<Req, Resp, u64>>;
