//! What the tests of the binding share: a client that is connected by hand, and calls of which both ends check every byte. What a request and
//! its response are follows from whose they are and the how-manyth ([`plan`]); the server writes down what it ran for ([`books`]).
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

/// One more client of a server of the same process.
pub(crate) fn connect(device: &DeviceSpec, server: &mut RdmaServer) -> RdmaClient {
    let offered = server.offer().unwrap();
    let client = PendingClient::new(device, offered.record()).unwrap();
    let admission = server.admit(offered, &client.record()).unwrap();
    client.admitted(&admission)
}
