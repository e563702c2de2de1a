#![doc = include_str!("../README.md")]

mod connection;
mod context;
mod control;
mod endpoint;
pub mod error;
mod exchange;
pub mod future;
mod handshake;
mod link;
mod queue_share;
mod raw;
mod recv;
pub mod ring;
mod service;
mod stats;
#[cfg(test)]
mod tests;
mod timers;
pub mod typed;
mod wire;
mod worklist;

pub use connection::Outcome;
pub use context::{
    BuildError, Context, ContextBuilder, CreateEndpointError, DEFAULT_CQ_SIZE, DEFAULT_ENDPOINTS, DEFAULT_SRQ_SIZE, PollError,
};
pub use endpoint::{CallToken, ConnectError, ConnectFailure, Endpoint, EndpointConfig, PendingEndpoint};
pub use error::{CallError, CallFailure, CloseReason, ProtocolError, ReplyError};
pub use exchange::{EXCHANGE_RECORD_SIZE, EXCHANGE_VERSION, ExchangeError, ExchangeRecord, RecordError, Refusal};
pub use link::Window;
/// The driver below: devices and their options, and what its errors say.
pub use mlx5;
pub use raw::{Memory, RdmaError, RemoteMemory, RemoteMemoryError};
pub use recv::{RecvHandle, Reply};
pub use ring::RecvBytes;
pub use service::{
    AsyncCall, AsyncClient, AsyncServer, Client, ClientError, ClientOptions, Server, ServerError, ServerOptions, ServerRequest, StopHandle,
};
pub use stats::Stats;
