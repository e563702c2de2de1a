#![doc = include_str!("../README.md")]
//!
//! # The files
//! - `gate`: the server's side of the address.
//! - `reach`: the client's.
//! - [`record`]: the bytes that they exchange.

mod gate;
mod reach;
pub mod record;

pub use gate::{Gate, Incoming, Outgoing};
pub use reach::{reach, stream_has_ended};
