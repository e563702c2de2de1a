#![doc = include_str!("../README.md")]

mod choice;
#[doc(hidden)]
pub mod protocol;
pub mod rdma;
mod service;
pub mod typed;

pub use choice::{Choice, Chooser};
/// The driver below: devices and their options.
pub use mlx5;
pub use protocol::clock_sync::{PROBE_TYPE, time_handler};
pub use protocol::groups::{QPC_CACHE_CONNECTX3, QPC_CACHE_CONNECTX5};
pub use protocol::{
    CallError, CallFailure, CallHandle, ClientId, ClientStats, CloseReason, Completion, ConfigError, Grouping, Handler, HandlerError,
    Handlers, HeldRequest, JoinError, Layout, ProtocolError, ReplyFailure, ReplyMode, ServerConfig, ServerStats, State,
};
pub use rdma::{RdmaClient, RdmaServer};
pub use service::{Client, ClientError, ClientOptions, DEFAULT_TYPE, Server, ServerError, ServerOptions, SharedAddress, StopHandle};
