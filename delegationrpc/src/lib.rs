#![doc = include_str!("../README.md")]
//!
//! # The files, in the order a call passes them
//! - `client`: calls through its lane, announces itself if the server does not look there, and collects the replies.
//! - `ring`: the words that all clients share, in which they announce themselves; its invariants.
//! - `server`: takes each client's requests in order, answers them in any.
//! - `layout`, `views`: what lies where in the region, and the only place that turns offsets into addresses.
//! - `error`: what can go wrong, one type per verb.

mod client;
mod error;
mod layout;
mod ring;
mod server;
mod views;

pub use calls::{AskError, CallError, CallFailed, SessionEnd, Tag as CallToken};
pub use client::Client;
pub use error::{ConnectError, CreateError, ParameterError, ReplyError};
pub use layout::ring_depth_for;
pub use server::{RecvEntry, Server, Token};
pub use shm::blocking::StopHandle;
pub use shm::dir::Dir;
pub use shm::plain::Plain;
pub use shm::wait::WaitStrategy;
