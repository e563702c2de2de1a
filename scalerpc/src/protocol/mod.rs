//! The core: client and server as state machines, without queue, clock, thread or system call.
//! Memory is a [`Memory`], and time is an argument. Operations go to a queue of the caller;
//! [`rdma`](crate::rdma) executes them on a device.

mod buffers;
pub mod client;
mod config;
mod error;
pub mod groups;
pub mod handlers;
mod memory;
mod request;
mod scheduler;
pub mod server;
mod slices;
#[cfg(test)]
mod tests;
pub mod wire;

pub use client::{
    CallToken, Client, ClientMemory, ClientOp, ClientStats, Completion, ServerRegions, State,
};
pub use config::{
    DEFAULT_DEPTH, DEFAULT_MAX_ROTATION_NS, DEFAULT_SLICE_NS, DEFAULT_SLOT_BYTES,
    DEFAULT_TIMEOUT_NS, Grouping, Layout, MAX_CLIENTS, MAX_DEPTH, ServerConfig,
};
pub use error::{CallFailure, CloseReason, ProtocolError};
pub use handlers::{Handler, HandlerError, Handlers, HeldRequest};
pub use memory::Memory;
pub use request::{ClientId, ClientRegions, Request};
pub use scheduler::{Scheduler, Turn};
pub use server::{Server, ServerMemory, ServerOp, ServerStats};

/// Iterates over the numbers of the set bits.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (word != 0).then(|| {
            let bit = word.trailing_zeros() as usize;
            word &= word - 1;
            bit
        })
    })
}
