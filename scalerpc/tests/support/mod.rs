//! What the tests of the binding share: a client that is connected by hand.
#![allow(clippy::unwrap_used, reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests")]

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
