//! A server and its clients, each in two lines. They meet at a TCP address, which serves for that only, and go on over the device.

mod async_client;
mod client;
mod server;

use std::time::Duration;

pub use async_client::{AsyncCall, AsyncClient};
pub use client::{Client, ClientError, ClientOptions};
use mlx5::DeviceSpec;
pub use server::{Server, ServerError, ServerOptions, SharedAddress, StopHandle};

/// The `rpc_type` of calls and handlers that are given none.
pub const DEFAULT_TYPE: u16 = 0;

/// Names the device of those that are told none.
const DEVICE_VARIABLE: &str = "COPYRPC_DEVICE";

/// Looks that find nothing before one yields, and again so many before one sleeps.
const SPINS: u32 = 256;
/// The first sleep. Nothing wakes who sleeps: a WRITE is not told to the memory's owner.
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
/// The longest.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// The device that the environment variable names, as [`DeviceSpec`]'s `From<&str>` takes it; else the software HCA.
fn default_device() -> DeviceSpec {
    std::env::var(DEVICE_VARIABLE).map_or_else(|_| DeviceSpec::default(), |name| DeviceSpec::from(&*name))
}

/// What one does between looks that find nothing: spins, then yields, then sleeps, each time twice as long.
#[derive(Debug, Default)]
struct Idle {
    in_vain: u32,
}

impl Idle {
    /// Something was found.
    const fn reset(&mut self) {
        self.in_vain = 0;
    }

    /// Nothing was found. Whether it slept.
    fn pass(&mut self) -> bool {
        self.in_vain = self.in_vain.saturating_add(1);
        match self.in_vain.checked_sub(2 * SPINS) {
            None if self.in_vain < SPINS => std::hint::spin_loop(),
            None => std::thread::yield_now(),
            Some(sleeps) => {
                std::thread::sleep((SHORTEST_SLEEP * 2_u32.pow(sleeps.min(5))).min(LONGEST_SLEEP));
                return true;
            }
        }
        false
    }
}
