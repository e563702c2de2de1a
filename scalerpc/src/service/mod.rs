//! A server and its clients, each in two lines. They connect through a TCP address, which is used
//! for that only; all messages go over the device.

mod async_client;
mod client;
mod server;

use std::time::Duration;

pub use async_client::{AsyncCall, AsyncClient};
pub use client::{Client, ClientError, ClientOptions};
use mlx5::DeviceSpec;
pub use server::{Server, ServerError, ServerOptions, SharedAddress, StopHandle};

/// The `rpc_type` of calls and handlers by default.
pub const DEFAULT_TYPE: u16 = 0;

/// Names the default device.
const DEVICE_VARIABLE: &str = "COPYRPC_DEVICE";

/// Number of polls that find nothing before the first yield, and again before the first sleep.
const SPINS: u32 = 256;
/// The first sleep. Nothing wakes a sleeping end: a WRITE does not notify the memory's owner.
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
/// The longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Returns the device that the environment variable names, as [`DeviceSpec`]'s `From<&str>` takes
/// it; else the software HCA.
fn default_device() -> DeviceSpec {
    std::env::var(DEVICE_VARIABLE)
        .map_or_else(|_| DeviceSpec::default(), |name| DeviceSpec::from(&*name))
}

/// The waiting strategy between polls that find nothing: first spin, then yield, then sleep, each
/// sleep twice as long.
#[derive(Debug, Default)]
struct Idle {
    idle_polls: u32,
}

impl Idle {
    /// Restarts the strategy: a poll found something.
    const fn reset(&mut self) {
        self.idle_polls = 0;
    }

    /// Returns whether the next [`pass`](Self::pass) sleeps.
    const fn sleeps_next(&self) -> bool {
        self.idle_polls >= 2 * SPINS - 1
    }

    /// Waits once: a poll found nothing. Returns whether the thread slept.
    fn pass(&mut self) -> bool {
        self.idle_polls = self.idle_polls.saturating_add(1);
        match self.idle_polls.checked_sub(2 * SPINS) {
            None if self.idle_polls < SPINS => std::hint::spin_loop(),
            None => std::thread::yield_now(),
            Some(sleeps) => {
                std::thread::sleep((SHORTEST_SLEEP * 2_u32.pow(sleeps.min(5))).min(LONGEST_SLEEP));
                return true;
            }
        }
        false
    }
}
