#![doc = include_str!("../README.md")]
//!
//! # The files, in the order a call passes them
//! - `client`: publishes a request in its own lane, and collects replies; `membership`: its seat, and whether there is still a server.
//! - `announce`: how a client tells a server that does not poll its lane.
//! - `seats`: a server's clients: seats with generations, their holders' deaths noticed.
//! - `sessions`: a bounded, fair pass over the lanes that have something in them.
//! - `server`, `token`: received requests, answered once, in any order, and what other threads have of a server.
//! - [`bytes`]: the same for messages of any length up to a bound: long ones lie beside the lanes.
//! - `limits`, `layout`, `views`: what lies where in the region, and the only place that turns offsets into addresses.
//! - `blocking`: serving and waiting in the caller's thread. `error`: what can go wrong, one type per verb.

mod announce;
mod blocking;
pub mod bytes;
mod client;
mod error;
mod layout;
mod limits;
mod membership;
mod seats;
mod server;
mod sessions;
mod token;
mod views;

pub use announce::Announce;
pub use calls::{AskError, CallError, CallFailed, SessionEnd, Tag as CallToken};
pub use client::Client;
pub use error::{ConnectError, CreateError, ParameterError, ReplyError};
pub use limits::{CLIENTS_MAX, DEPTH_MAX};
pub use seats::JoinError;
pub use server::Server;
pub use shm::dir::Dir;
pub use shm::plain::Plain;
pub use shm::ready::ReadyWords;
pub use shm::wait::WaitStrategy;
pub use token::{StopHandle, Token};
