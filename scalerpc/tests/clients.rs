//! A server and its clients on the software HCA, in one thread.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod support;

use std::time::{Duration, Instant};

use scalerpc::mlx5::{DeviceSpec, Rule, SoftOptions, Timing};
use scalerpc::rdma::SyncCallError;
use scalerpc::{CallFailure, CloseReason, Handlers, RdmaClient, RdmaServer, ReplyMode, ServerConfig, State};
use support::connect;

const SUM: u16 = 1;
const WATCHDOG: Duration = Duration::from_secs(60);

/// Two groups of four for eight clients, so that slices end all the time.
fn config(reply_mode: ReplyMode) -> ServerConfig {
    ServerConfig { max_clients: 8, depth: 4, group_size: 4, slice_ns: 20_000, reply_mode, ..ServerConfig::default() }
}

/// Answers with the sum of the payload's bytes, and with the payload.
fn handlers(server: &RdmaServer) -> Handlers {
    let mut handlers = Handlers::new(server.core().layout().max_payload());
    handlers.insert(SUM, |request: &[u8], response: &mut [u8]| {
        let sum: u64 = request.iter().map(|byte| u64::from(*byte)).sum();
        response[..8].copy_from_slice(&sum.to_le_bytes());
        response[8..8 + request.len()].copy_from_slice(request);
        Ok(8 + request.len())
    });
    handlers
}

/// A client that calls with payloads of all lengths, and checks each response.
struct Caller {
    client: RdmaClient,
    nth: u64,
    calls: u64,
    called: u64,
    outstanding: Vec<(scalerpc::CallHandle, Vec<u8>)>,
}

impl Caller {
    fn new(client: RdmaClient, nth: u64, calls: u64) -> Self {
        Self { client, nth, calls, called: 0, outstanding: Vec::new() }
    }

    /// Calls what can be called, takes what has ended.
    fn step(&mut self) {
        while self.called < self.calls {
            let len = (self.called * 37 + self.nth * 101) % 1_500;
            let payload: Vec<u8> = (0..len).map(|at| (at * 7 + self.called + self.nth * 13) as u8).collect();
            let Ok(handle) = self.client.call(SUM, &payload) else { break };
            self.called += 1;
            self.outstanding.push((handle, payload));
        }
        self.client.poll();
        let mut response = [0; 4096];
        while let Some(completion) = self.client.poll_completion(&mut response) {
            let at = self.outstanding.iter().position(|(handle, _)| *handle == completion.handle).expect("ended twice");
            let (_, payload) = self.outstanding.swap_remove(at);
            assert_eq!(completion.outcome, Ok(8 + payload.len()), "client {}", self.nth);
            assert!(response[8..8 + payload.len()] == payload, "client {}", self.nth);
            let sum: u64 = payload.iter().map(|byte| u64::from(*byte)).sum();
            assert_eq!(response[..8], sum.to_le_bytes());
        }
    }

    fn is_done(&self) -> bool {
        self.called == self.calls && self.outstanding.is_empty()
    }
}

fn eight_clients(device: &DeviceSpec, reply_mode: ReplyMode) -> (RdmaServer, Vec<Caller>) {
    let mut server = RdmaServer::new(device, &config(reply_mode)).unwrap();
    let mut handlers = handlers(&server);
    let mut callers: Vec<_> = (0..8).map(|nth| Caller::new(connect(device, &mut server), nth, 300)).collect();
    assert_eq!(server.core().groups().count(), 2);
    let start = Instant::now();
    while !callers.iter().all(Caller::is_done) {
        assert!(start.elapsed() < WATCHDOG, "{:?}", server.core().stats());
        callers.iter_mut().for_each(Caller::step);
        server.step(&mut handlers, 16);
    }
    let stats = server.core().stats();
    assert_eq!((stats.accepted, stats.garbage), (8 * 300, 0));
    assert!(stats.slices > 3, "{stats:?}");
    let direct: u64 = callers.iter().map(|caller| caller.client.core().stats().direct).sum();
    assert!(direct > 100, "requests are written in PROCESS: {direct} of 2400");
    (server, callers)
}

#[test]
fn eight_clients_of_two_groups_get_every_response_written() {
    eight_clients(&DeviceSpec::default(), ReplyMode::ServerWrites);
}

#[test]
fn eight_clients_of_two_groups_read_every_response() {
    eight_clients(&DeviceSpec::default(), ReplyMode::ClientReads);
}

/// Buffers are gathered late, and results come late: one reused too early would be sent wrongly, and is named. A staging slot is reused when its
/// response came, which may be before the completion of the request's WRITE (S21); nothing else is.
#[test]
fn no_buffer_is_reused_while_the_device_may_still_read_it() {
    for reply_mode in [ReplyMode::ServerWrites, ReplyMode::ClientReads] {
        let options = SoftOptions { timing: Timing::Delay { ns: 3_000 }, strict: true, ..SoftOptions::default() };
        let (server, callers) = eight_clients(&DeviceSpec::Soft(options), reply_mode);
        assert_eq!(server.violations(), []);
        for caller in &callers {
            let violations = caller.client.violations();
            assert!(violations.iter().all(|violation| violation.rule == Rule::SourceChanged), "{violations:?}");
        }
    }
}

#[test]
fn a_synchronous_call_ends_with_its_response_or_says_why() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config(ReplyMode::ServerWrites)).unwrap();
    let mut handlers = handlers(&server);
    let mut client = connect(&DeviceSpec::default(), &mut server);
    let mut response = [0; 16];
    let mut serve = || {
        server.step(&mut handlers, 1);
    };
    for _ in 0..10 {
        let len = client.call_sync(SUM, &[1, 2, 3], &mut response, &mut serve).unwrap();
        assert_eq!((len, response[0], &response[8..11]), (11, 6, &[1, 2, 3][..]));
    }
    let failure = client.call_sync(99, &[], &mut response, &mut serve);
    assert_eq!(failure, Err(SyncCallError::Failure(CallFailure::UnknownType)));
}

#[test]
fn a_client_whose_server_is_gone_is_disconnected() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config(ReplyMode::ServerWrites)).unwrap();
    let mut client = connect(&DeviceSpec::default(), &mut server);
    client.call(SUM, &[1]).unwrap();
    drop(server);
    let start = Instant::now();
    while client.core().state() != State::Closed(CloseReason::Disconnected) {
        assert!(start.elapsed() < WATCHDOG);
        client.poll();
    }
    let completion = client.poll_completion(&mut []).unwrap();
    assert_eq!(completion.outcome, Err(CallFailure::Closed(CloseReason::Disconnected)));
}
