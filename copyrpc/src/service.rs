//! A server and its clients, each in two lines. They connect through a TCP address, which is used
//! for that only; all messages go over the device.

mod async_client;
mod async_server;
mod caller;
mod client;
mod server;
#[cfg(test)]
mod tests;

pub use async_client::{AsyncCall, AsyncClient};
pub use async_server::{AsyncServer, ServerRequest};
pub use caller::{ClientError, ClientOptions};
pub use client::Client;
use mlx5::DeviceSpec;
pub use server::{Server, ServerError, ServerOptions, StopHandle};

/// Names the default device.
const DEVICE_VARIABLE: &str = "COPYRPC_DEVICE";

/// Returns the device that the environment variable `COPYRPC_DEVICE` names, as [`DeviceSpec`]'s
/// `From<&str>` takes it; else the software HCA: that of servers and clients by default, for a
/// [`Context`](crate::Context) that meets them.
#[must_use]
pub fn default_device() -> DeviceSpec {
    std::env::var(DEVICE_VARIABLE)
        .map_or_else(|_| DeviceSpec::default(), |name| DeviceSpec::from(&*name))
}
