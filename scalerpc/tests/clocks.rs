//! Slices of several servers, synchronised by the time of one of them. Each server has a clock of its own, which the test advances.
#![allow(clippy::unwrap_used, reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use scalerpc::mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::protocol::clock_sync::{PROBE_TYPE, SYNC_INTERVAL_NS, time_handler};
use scalerpc::rdma::TimeFollower;
use scalerpc::{CallFailure, CloseReason, Handlers, RdmaClient, RdmaServer, ServerConfig};
use support::connect;

const ECHO: u16 = 1;
const SLICE_NS: u64 = 50_000;
/// Time between two steps, in ns.
const STEP_NS: u64 = 1_000;
/// A bound far above the need of any test, which only ends a hang.
const STEPS: u64 = 5_000_000;

fn device(fabric: &LocalFabric, clock: &Arc<AtomicU64>) -> DeviceSpec {
    let (fabric, clock) = (FabricSpec::Local(fabric.clone()), Clock::Manual(Arc::clone(clock)));
    DeviceSpec::Soft(SoftOptions { fabric, clock, ..SoftOptions::default() })
}

fn server(device: &DeviceSpec) -> (RdmaServer, Handlers<'static>) {
    let config = ServerConfig { max_clients: 4, depth: 2, group_size: 1, slice_ns: SLICE_NS, ..ServerConfig::default() };
    let server = RdmaServer::new(device, &config).unwrap();
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert(ECHO, |request: &[u8], _: &mut [u8]| Ok(request.len()));
    (server, handlers)
}

/// A server with two groups that always have work, so that each of its slices ends in time.
struct Following {
    clock: Arc<AtomicU64>,
    server: RdmaServer,
    handlers: Handlers<'static>,
    clients: Vec<RdmaClient>,
    follower: TimeFollower,
    /// Number of slices that began with the time known.
    synchronised: u64,
}

impl Following {
    fn new(fabric: &LocalFabric, now_ns: u64, leader: &mut RdmaServer) -> Self {
        let clock = Arc::new(AtomicU64::new(now_ns));
        let device = device(fabric, &clock);
        let follower = TimeFollower::new(connect(&device, leader));
        let (mut server, handlers) = server(&device);
        let clients = (0..2).map(|_| connect(&device, &mut server)).collect();
        Self { clock, server, handlers, clients, follower, synchronised: 0 }
    }

    fn step(&mut self, leader_ns: u64) {
        for client in &mut self.clients {
            while client.call(ECHO, &[]).is_ok() {}
            client.poll();
            while client.poll_completion(&mut []).is_some() {}
        }
        self.follower.step(&mut self.server).unwrap();
        let before = self.server.stats().slices;
        self.server.step(&mut self.handlers, 16);
        let Some(offset) = self.follower.offset() else { return };
        let global_ns = self.clock.load(Ordering::Relaxed).checked_add_signed(offset.offset_ns).unwrap();
        assert!(global_ns.abs_diff(leader_ns) <= offset.error_ns, "{global_ns} {leader_ns} {offset:?}");
        if self.server.stats().slices > before {
            self.synchronised += 1;
            let end_ns = self.server.core().scheduler().slice_end_ns();
            assert_eq!(end_ns.checked_add_signed(offset.offset_ns).unwrap() % SLICE_NS, 0, "slice {before} with {offset:?}");
        }
    }
}

#[test]
fn two_servers_end_their_slices_by_the_time_of_a_third() {
    let (fabric, clock) = (LocalFabric::new(), Arc::new(AtomicU64::new(123_456_789)));
    let (mut leader, mut handlers) = server(&device(&fabric, &clock));
    let handler_clock = Arc::clone(&clock);
    handlers.insert(PROBE_TYPE, time_handler(move || handler_clock.load(Ordering::Relaxed)));
    // One clock is behind the leader's, and one is ahead by an hour.
    let mut servers = [77, 3_600_123_456_789].map(|now_ns| Following::new(&fabric, now_ns, &mut leader));
    // Long enough for several exchanges, and many slices.
    for _ in 0..4 * SYNC_INTERVAL_NS / STEP_NS {
        leader.step(&mut handlers, 16);
        let leader_ns = clock.load(Ordering::Relaxed);
        servers.iter_mut().for_each(|following| following.step(leader_ns));
        for clock in servers.iter().map(|following| &following.clock).chain([&clock]) {
            clock.fetch_add(STEP_NS, Ordering::Relaxed);
        }
    }
    for following in &servers {
        assert!(following.synchronised > SYNC_INTERVAL_NS / SLICE_NS, "{:?}", following.server.stats());
        assert!(following.follower.offset().unwrap().error_ns <= 2 * STEP_NS, "{:?}", following.follower.offset());
    }
}

/// A server that tells no time, and a leader that is gone, are reported.
#[test]
fn a_leader_without_a_clock_and_one_that_is_gone_are_told() {
    let (fabric, clock) = (LocalFabric::new(), Arc::new(AtomicU64::new(0)));
    let device = device(&fabric, &clock);
    let ((mut leader, mut handlers), (mut here, _)) = (server(&device), server(&device));
    let mut follower = TimeFollower::new(connect(&device, &mut leader));
    let mut follow = |leader: Option<&mut RdmaServer>| {
        let mut leader = leader;
        let mut failure = None;
        for _ in 0..STEPS {
            clock.fetch_add(STEP_NS, Ordering::Relaxed);
            if let Some(leader) = &mut leader {
                leader.step(&mut handlers, 16);
            }
            failure = follower.step(&mut here).err();
            if failure.is_some() {
                break;
            }
        }
        assert_eq!(follower.offset(), None);
        failure
    };
    assert_eq!(follow(Some(&mut leader)), Some(CallFailure::UnknownType));
    drop(leader);
    assert_eq!(follow(None), Some(CallFailure::Closed(CloseReason::Disconnected)));
}
