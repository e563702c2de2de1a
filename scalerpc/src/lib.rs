#![doc = include_str!("../README.md")]

pub mod choice;
pub mod client;
pub mod clock_sync;
mod config;
mod error;
pub mod groups;
pub mod handlers;
mod legacy;
mod mapping;
mod memory;
pub mod pool;
pub mod rdma;
mod scheduler;
pub mod server;
#[cfg(test)]
mod tests;
pub mod wire;

pub use client::{CallHandle, Client, ClientMemory, ClientOp, Completion, Permit, ServerRegions, State};
pub use config::{
    ConfigError, DEFAULT_DEPTH, DEFAULT_SLICE_NS, DEFAULT_SLOT_BYTES, DEFAULT_TIMEOUT_NS, Grouping, Layout, MAX_CLIENTS, MAX_DEPTH,
    ReplyMode, ServerConfig,
};
pub use error::{CallError, CallFailure, CloseReason, ProtocolError};
pub use handlers::{Handler, HandlerError, Handlers};
pub use mapping::{Bound, ClientId, VirtualMapping};
pub use memory::{HeapMemory, Memory};
/// The driver below: devices and their options.
pub use mlx5;
pub use rdma::{RdmaClient, RdmaServer};
pub use scheduler::{Scheduler, Turn};
pub use server::{ClientRegions, JoinError, ReplyFailure, Request, Server, ServerMemory, ServerOp};
