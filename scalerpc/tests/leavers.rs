//! Clients that disconnect free everything, on the heap and in the device's memory: after a first
//! number of clients has connected and disconnected, further clients take no more memory.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use benchkv_harness::held::{Counting, heap_bytes, memfds};
use copyrpc_testing::limits;
use scalerpc::mlx5::{Clock, Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::rdma::{PendingClient, RdmaOptions};
use scalerpc::{Handlers, RdmaServer, ServerConfig};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const STEP_NS: u64 = 50_000_000;
/// Number of clients at a time.
const AT_A_TIME: usize = 8;

struct Room {
    now_ns: Arc<AtomicU64>,
    device: Device,
    server: RdmaServer,
    handlers: Handlers<'static>,
}

impl Room {
    fn new() -> Self {
        let (fabric, now_ns) = (LocalFabric::new(), Arc::<AtomicU64>::default());
        let open = || {
            let (fabric, clock) = (
                FabricSpec::Local(fabric.clone()),
                Clock::Manual(Arc::clone(&now_ns)),
            );
            Device::open(DeviceSpec::Soft(SoftOptions {
                fabric,
                clock,
                ..SoftOptions::default()
            }))
            .unwrap()
        };
        let config = ServerConfig {
            max_clients: 2 * AT_A_TIME as u32,
            group_size: 2,
            ..ServerConfig::default()
        };
        let server = RdmaServer::on(&open(), &config, &RdmaOptions::default()).unwrap();
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert(1, |request: &[u8], _: &mut [u8]| Ok(request.len()));
        Self {
            device: open(),
            now_ns,
            server,
            handlers,
        }
    }

    fn step(&mut self) {
        self.server.step(&mut self.handlers, 64);
        self.now_ns.fetch_add(STEP_NS, Ordering::Relaxed);
    }

    /// Connects clients, which make calls and disconnect: in the middle of a call, if they are
    /// `rude`. Returns when the server has removed all of them.
    fn visit(&mut self, rude: bool) {
        let join = |_| {
            let offered = self.server.offer().unwrap();
            let client =
                PendingClient::on(&self.device, offered.record(), &RdmaOptions::default()).unwrap();
            let admission = self.server.admit(offered, &client.record()).unwrap();
            client.admitted(&admission)
        };
        let mut clients: Vec<_> = (0..AT_A_TIME).map(join).collect();
        clients
            .iter_mut()
            .for_each(|client| client.set_timeout_ns(u64::MAX));
        for _ in 0..2 {
            clients
                .iter_mut()
                .for_each(|client| while client.call(1, &[7; 200]).is_ok() {});
            while !rude && clients.iter().any(|client| client.core().is_busy())
                || rude && clients.iter().all(|client| client.free_slots() == 0)
            {
                for client in &mut clients {
                    client.poll();
                    while client.poll_completion(&mut []).is_some() {}
                }
                self.step();
            }
        }
        drop(clients);
        while self.server.clients() > 0 {
            self.step();
        }
    }
}

#[test]
fn clients_that_left_leave_nothing_behind() {
    limits::watchdog(Duration::from_secs(120));
    let mut room = Room::new();
    let mut held = Vec::new();
    for _ in 0..6 {
        for nth in 0..100 {
            room.visit(nth % 2 == 0);
        }
        let device_bytes: u64 = memfds().unwrap().values().sum();
        held.push((heap_bytes(), device_bytes));
    }
    assert!(room.server.stats().accepted > 0);
    // A list may have grown by an entry or two. The bound is less than a byte for each client.
    let [_, (heap, device), .., last] = held[..] else {
        panic!("{held:?}")
    };
    assert!(
        last.0 < heap + (4 * 100 * AT_A_TIME) as u64 && last.1 <= device,
        "bytes after so many times 800 clients: {held:?}"
    );
}
