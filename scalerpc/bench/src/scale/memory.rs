//! The memory of a server by number of connected clients: measured, beside that of reliable
//! connections with buffers of their own.

use bench::held::{Memfds, heap_bytes};
use bench::load::Failure;
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::rdma::PendingClient;
use scalerpc::{RdmaServer, ServerConfig};
use serde::Serialize;

/// Address space of a client's device, whose memory is a few slots, in bytes.
const CLIENT_ARENA_BYTES: usize = 64 << 20;

/// Published memory, in MB, of a node in a cluster in which each node has a reliable connection
/// with buffers of its own to each other node, by number of nodes.
pub(crate) const PER_CONNECTION_MB: [(u32, f64); 2] = [(32, 8.869), (512, 146.198)];

/// The bytes of a server with that many clients connected. The bytes of the clients, in the same
/// process here, do not count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct ServerBytes {
    pub(crate) clients: u32,
    /// Entries, both pools, responses: calculated by the formulas of the configuration.
    pub(crate) registered: u64,
    /// Pages of its device: registered memory, and the queues of the software HCA.
    pub(crate) device: u64,
    /// Bytes of the allocator: send queues, and the records of server and driver for each client.
    pub(crate) heap: u64,
}

impl ServerBytes {
    pub(crate) const fn total(&self) -> u64 {
        self.device + self.heap
    }
}

/// Measures a server made for this many clients, all of which connect.
pub(crate) fn measure(clients: u32) -> Result<ServerBytes, Failure> {
    let config = ServerConfig {
        max_clients: clients,
        ..ServerConfig::default()
    };
    let fabric = LocalFabric::new();
    let soft = |arena_bytes| {
        DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            arena_bytes,
            ..SoftOptions::default()
        })
    };
    let registered =
        config.entries_bytes() + config.layout()?.pools_bytes() + config.responses_bytes();
    let others = Memfds::now()?;
    let start = heap_bytes();
    let mut server = RdmaServer::new(&soft(SoftOptions::default().arena_bytes), &config)?;
    let mut heap = heap_bytes() - start;
    let own = Memfds::now()?.since(&others);
    let mut connected = Vec::with_capacity(clients as usize);
    for _ in 0..clients {
        let start = heap_bytes();
        let offered = server.offer()?;
        heap += heap_bytes() - start;
        let client = PendingClient::new(&soft(CLIENT_ARENA_BYTES), offered.record())?;
        let start = heap_bytes();
        let admission = server.admit(offered, &client.record())?;
        heap += heap_bytes() - start;
        connected.push(client.admitted(&admission));
    }
    Ok(ServerBytes {
        clients,
        registered: registered as u64,
        device: Memfds::now()?.bytes_of(&own),
        heap,
    })
}

/// Returns the bytes for each further client, from the first and the last of `servers`, and the
/// remaining bytes of a server with none.
pub(crate) fn line(servers: &[ServerBytes]) -> Option<(f64, f64)> {
    let (first, last) = (servers.first()?, servers.last()?);
    if first.clients == last.clients {
        return None;
    }
    let per_client =
        (last.total() as f64 - first.total() as f64) / f64::from(last.clients - first.clients);
    Some((
        per_client,
        first.total() as f64 - per_client * f64::from(first.clients),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_goes_through_the_first_and_the_last_server() {
        let server = |clients, device, heap| ServerBytes {
            clients,
            registered: 0,
            device,
            heap,
        };
        assert_eq!(
            line(&[
                server(10, 1_000, 200),
                server(20, 9_999, 0),
                server(30, 3_000, 600)
            ]),
            Some((120.0, 0.0))
        );
        assert_eq!(line(&[server(10, 1, 1)]), None);
        assert_eq!(line(&[]), None);
    }
}
