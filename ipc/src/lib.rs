#![doc = include_str!("../README.md")]
//!
//! # The files, in the order a call passes them
//! - `client`: publishes a request in its own lane, and collects replies.
//! - `layout`, `views`: what lies where in the region, and the only place that turns offsets into addresses.
//! - `server`: a bounded, fair pass over the lanes that have something in them.
//! - `handle`: a received request, answered once, in any order.
//! - [`bytes`]: the same for messages of any length up to a bound: long ones lie beside the lanes.
//! - `error`: what can go wrong, one type per verb.

pub mod bytes;
mod client;
mod error;
mod handle;
mod layout;
mod server;
mod views;

pub use calls::{AskError, CallError, CallFailed, SessionEnd, Tag as CallToken};
pub use client::Client;
pub use error::{ClientGone, ConnectError, CreateError, ParameterError};
pub use handle::RecvHandle;
pub use layout::DEPTH_MAX;
pub use server::Server;
pub use shm::blocking::StopHandle;
pub use shm::dir::Dir;
pub use shm::plain::Plain;
pub use shm::wait::WaitStrategy;
