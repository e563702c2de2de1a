//! Slices of several servers that end at the same times. Each server has a clock of its own, which
//! the test advances.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::connect;
use scalerpc::mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::{Handlers, RdmaClient, RdmaServer, ServerConfig};

const ECHO: u16 = 1;
const SLICE_NS: u64 = 50_000;
/// Time between two steps, in ns.
const STEP_NS: u64 = 1_000;
const STEPS: u64 = 100_000;

/// A server with two groups that always have work, so that each of its slices ends in time.
struct Synchronised {
    clock: Arc<AtomicU64>,
    /// Global clock minus the server's clock, in ns.
    offset_ns: i64,
    server: RdmaServer,
    handlers: Handlers<'static>,
    clients: Vec<RdmaClient>,
}

impl Synchronised {
    fn new(offset_ns: i64) -> Self {
        let clock = Arc::new(AtomicU64::new(
            123_456_789_u64.checked_add_signed(-offset_ns).unwrap(),
        ));
        let spec = (
            FabricSpec::Local(LocalFabric::new()),
            Clock::Manual(Arc::clone(&clock)),
        );
        let device = DeviceSpec::Soft(SoftOptions {
            fabric: spec.0,
            clock: spec.1,
            ..SoftOptions::default()
        });
        let config = ServerConfig {
            max_clients: 4,
            depth: 2,
            group_size: 1,
            slice_ns: SLICE_NS,
            ..ServerConfig::default()
        };
        let mut server = RdmaServer::new(&device, &config).unwrap();
        server.synchronise(Some(offset_ns));
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert(ECHO, |request: &[u8], _: &mut [u8]| Ok(request.len()));
        let clients = (0..2).map(|_| connect(&device, &mut server)).collect();
        Self {
            clock,
            offset_ns,
            server,
            handlers,
            clients,
        }
    }

    /// Makes a step. Returns the global time at which the slice ends, if one began.
    fn step(&mut self) -> Option<u64> {
        for client in &mut self.clients {
            while client.call(ECHO, &[]).is_ok() {}
            client.poll();
            while client.poll_completion(&mut []).is_some() {}
        }
        let before = self.server.stats().slices;
        self.server.step(&mut self.handlers, 16);
        self.clock.fetch_add(STEP_NS, Ordering::Relaxed);
        let has_begun = self.server.stats().slices > before;
        has_begun.then(|| {
            self.server
                .core()
                .scheduler()
                .slice_end_ns()
                .checked_add_signed(self.offset_ns)
                .unwrap()
        })
    }
}

#[test]
fn servers_with_clocks_of_their_own_end_their_slices_at_the_same_times() {
    // The clock of the second server is earlier than the global clock, and the clock of the third
    // server is an hour later.
    let mut servers = [0, 77, -3_600_123_456_789].map(Synchronised::new);
    let mut slices = [0; 3];
    for _ in 0..STEPS {
        for (server, slices) in servers.iter_mut().zip(&mut slices) {
            if let Some(end_ns) = server.step() {
                *slices += 1;
                assert_eq!(end_ns % SLICE_NS, 0, "slice {slices}");
            }
        }
    }
    assert!(
        slices
            .iter()
            .all(|slices| *slices > STEPS * STEP_NS / SLICE_NS / 2),
        "{slices:?}"
    );
}
