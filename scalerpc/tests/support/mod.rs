//! Helpers of the binding's tests: a client that is connected by hand, and calls of which both ends
//! check every byte. The bytes of a request and its response are a function of its client and its
//! number ([`plan`]). The server records the requests that it ran for ([`books`]).
#![allow(dead_code, reason = "each test uses what it needs")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

pub(crate) mod books;
pub(crate) mod caller;
pub(crate) mod plan;

use scalerpc::mlx5::DeviceSpec;
use scalerpc::rdma::PendingClient;
use scalerpc::{RdmaClient, RdmaServer};

/// Connects one more client of a server of the same process.
pub(crate) fn connect(device: &DeviceSpec, server: &mut RdmaServer) -> RdmaClient {
    let offered = server.offer().unwrap();
    let client = PendingClient::new(device, offered.record()).unwrap();
    let admission = server.admit(offered, &client.record()).unwrap();
    client.admitted(&admission)
}
