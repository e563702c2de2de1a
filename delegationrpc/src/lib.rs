#![doc = include_str!("../README.md")]
//!
//! # The files
//! - `ring`: the words that all clients share, in which they announce themselves; its invariants. The rest is [`ipc`].

mod ring;

pub use ipc::{self, CallError, CallFailed, ConnectError, CreateError, Dir, SessionEnd, Token};
pub use ring::{Ring, ring_depth_for};

/// Serves many clients, who announce themselves through one ring, from one thread: an [`ipc::Server`] with a [`Ring`].
pub type Server<Req, Resp> = ipc::Server<Req, Resp, Ring>;

/// One client of a [`Server`]: an [`ipc::Client`] with a [`Ring`]. `U` is what the caller wants back with each reply.
pub type Client<Req, Resp, U> = ipc::Client<Req, Resp, U, Ring>;
