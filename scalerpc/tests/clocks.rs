//! Slices of several servers, synchronised by the time of one of them.
#![allow(clippy::unwrap_used, reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests")]

mod support;

use std::time::{Duration, Instant};

use scalerpc::clock_sync::{PROBE_TYPE, time_handler};
use scalerpc::mlx5::DeviceSpec;
use scalerpc::rdma::TimeFollower;
use scalerpc::{CallFailure, CloseReason, Handlers, RdmaClient, RdmaServer, ServerConfig};
use support::connect;

const ECHO: u16 = 1;
const SLICE_NS: u64 = 500_000;
const WATCHDOG: Duration = Duration::from_secs(60);

fn server() -> (RdmaServer, Handlers) {
    let config = ServerConfig { max_clients: 4, depth: 2, group_size: 1, slice_ns: SLICE_NS, ..ServerConfig::default() };
    let server = RdmaServer::new(&DeviceSpec::default(), &config).unwrap();
    let mut handlers = Handlers::new(server.core().layout().max_payload());
    handlers.insert(ECHO, |request: &[u8], _: &mut [u8]| Ok(request.len()));
    (server, handlers)
}

/// A server with two groups that always have work, so that each of its slices ends in time.
struct Following {
    server: RdmaServer,
    handlers: Handlers,
    clients: Vec<RdmaClient>,
    follower: TimeFollower,
    /// Slices that began with the time known.
    synchronised: u64,
}

impl Following {
    fn new(leader: &mut RdmaServer) -> Self {
        let follower = TimeFollower::new(connect(&DeviceSpec::default(), leader));
        let (mut server, handlers) = server();
        let clients = (0..2).map(|_| connect(&DeviceSpec::default(), &mut server)).collect();
        Self { server, handlers, clients, follower, synchronised: 0 }
    }

    fn step(&mut self) {
        for client in &mut self.clients {
            while client.call(ECHO, &[]).is_ok() {}
            client.poll();
            while client.poll_completion(&mut []).is_some() {}
        }
        self.follower.step(&mut self.server).unwrap();
        let before = self.server.core().stats().slices;
        self.server.step(&mut self.handlers, 16);
        let Some(offset) = self.follower.offset() else { return };
        if self.server.core().stats().slices > before {
            self.synchronised += 1;
            let end_ns = self.server.core().scheduler().slice_end_ns();
            assert_eq!(end_ns.checked_add_signed(offset.offset_ns).unwrap() % SLICE_NS, 0, "slice {before} with {offset:?}");
        }
    }

    /// What the leader's clock shows lies between two looks at it, give or take the error that is claimed.
    fn check_time(&self, leader_ns: impl Fn() -> u64) {
        let offset = self.follower.offset().unwrap();
        let before_ns = leader_ns();
        let global_ns = self.server.now_ns().checked_add_signed(offset.offset_ns).unwrap();
        let after_ns = leader_ns();
        assert!(before_ns <= global_ns + offset.error_ns && global_ns <= after_ns + offset.error_ns, "{offset:?}");
    }
}

#[test]
fn two_servers_end_their_slices_by_the_time_of_a_third() {
    let origin = Instant::now();
    // Far from the time of either.
    let leader_ns = move || 3_600_000_000_000 + u64::try_from(origin.elapsed().as_nanos()).unwrap();
    let (mut leader, mut handlers) = server();
    handlers.insert(PROBE_TYPE, time_handler(leader_ns));
    let mut servers = [Following::new(&mut leader), Following::new(&mut leader)];
    while servers.iter().any(|following| following.synchronised < 50) {
        assert!(origin.elapsed() < WATCHDOG, "{:?}", servers.map(|following| *following.server.core().stats()));
        leader.step(&mut handlers, 16);
        servers.iter_mut().for_each(Following::step);
    }
    servers.iter().for_each(|following| following.check_time(leader_ns));
}

/// A server that tells no time is not silently followed, nor is one that is gone.
#[test]
fn a_leader_without_a_clock_and_one_that_is_gone_are_told() {
    let start = Instant::now();
    let (mut leader, mut handlers) = server();
    let (mut here, _) = server();
    let mut follow = |leader: &mut Option<RdmaServer>, follower: &mut TimeFollower| {
        loop {
            assert!(start.elapsed() < WATCHDOG);
            if let Some(leader) = leader {
                leader.step(&mut handlers, 16);
            }
            if let Err(failure) = follower.step(&mut here) {
                return failure;
            }
        }
    };
    let mut follower = TimeFollower::new(connect(&DeviceSpec::default(), &mut leader));
    let mut leader = Some(leader);
    assert_eq!(follow(&mut leader, &mut follower), CallFailure::UnknownType);
    drop(leader.take());
    assert_eq!(follow(&mut leader, &mut follower), CallFailure::Closed(CloseReason::Disconnected));
    assert_eq!(follower.offset(), None);
}
