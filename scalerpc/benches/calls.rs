//! Throughput of calls: the server and its clients in one thread, on software devices of one
//! fabric. Three cases: one call at a time; eight clients of one group with eight calls each; and
//! the same in two groups that take turns in the shortest slices, so that the result is the work of
//! switching and not the time of a slice. Each case first verifies that the bytes are right, and
//! that the server switches groups only if there are two. `cargo bench -p scalerpc --bench calls`;
//! `scalerpc_bench` measures between processes.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a benchmark"
)]

use std::hint::black_box;
use std::time::Duration;

use benchkv_harness::pattern::{self, Tag};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::rdma::PendingClient;
use scalerpc::{CallFailure, CallToken, Handlers, RdmaClient, RdmaServer, ServerConfig};

const SIZES: [usize; 2] = [32, 1 << 10];
/// Number and depth of the clients that call together.
const CLIENTS: u32 = 8;
const DEPTH: u32 = 8;
/// Length of a slice, in ns: the minimum.
const SLICE_NS: u64 = 1_000;
/// Maximum number of turns in a round. In a turn each client polls, and the server makes a step. A
/// switch takes several turns.
const MOST_TURNS: usize = 1_000_000;
const CHECKED: u64 = 50;
const BUDGET: usize = 64;

/// Types of requests, answered with their own payload, or with the reply of [`pattern`].
const ECHO: u16 = 1;
const CHECK: u16 = 2;

struct Room {
    clients: Vec<RdmaClient>,
    server: RdmaServer,
    handlers: Handlers<'static>,
    depth: u32,
    payload: Vec<u8>,
    reply: Vec<u8>,
}

impl Room {
    fn new(clients: u32, depth: u32, group_size: u32, bytes: usize) -> Self {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let device = DeviceSpec::Soft(SoftOptions {
            fabric,
            arena_bytes: 1 << 30,
            ..SoftOptions::default()
        });
        let config = ServerConfig {
            max_clients: clients,
            depth,
            group_size,
            slice_ns: SLICE_NS,
            ..ServerConfig::default()
        };
        let mut server = RdmaServer::new(&device, &config).unwrap();
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert(ECHO, |request: &[u8], reply: &mut [u8]| {
            reply[..request.len()].copy_from_slice(request);
            Ok(request.len())
        });
        handlers.insert(CHECK, |request: &[u8], reply: &mut [u8]| {
            let tag = Tag::of_request(request);
            assert!(pattern::is_request(request, tag), "a request that is none");
            pattern::fill_reply(&mut reply[..request.len()], tag);
            Ok(request.len())
        });
        let mut connect = || {
            let offered = server.offer().unwrap();
            let client = PendingClient::new(&device, offered.record()).unwrap();
            let admission = server.admit(offered, &client.record()).unwrap();
            client.admitted(&admission)
        };
        let clients: Vec<_> = (0..clients).map(|_| connect()).collect();
        Self {
            clients,
            server,
            handlers,
            depth,
            payload: vec![0x5a; bytes],
            reply: vec![0; bytes],
        }
    }

    /// Makes `depth` calls of each client, and returns when all replies have arrived.
    #[inline(always)]
    fn round<C: Calls>(&mut self, calls: &mut C) {
        let Self {
            clients,
            server,
            handlers,
            depth,
            payload,
            reply,
        } = self;
        let mut left = clients.len() * *depth as usize;
        let mut to_call = [*depth; CLIENTS as usize];
        for _ in 0..MOST_TURNS {
            for (number, (client, to_call)) in clients.iter_mut().zip(&mut to_call).enumerate() {
                while *to_call > 0 {
                    calls.fill(number, payload);
                    match client.call(C::TYPE, black_box(payload)) {
                        Ok(token) => calls.made(number, token),
                        // All slots are lent until the slice begins.
                        Err(CallFailure::Full) => break,
                        Err(error) => panic!("{error}"),
                    }
                    *to_call -= 1;
                }
                client.poll();
                while let Some(completion) = client.poll_completion(reply) {
                    calls.ended(
                        number,
                        completion.call,
                        &reply[..completion.outcome.unwrap()],
                    );
                    left -= 1;
                }
            }
            if left == 0 {
                return;
            }
            server.step(handlers, BUDGET);
        }
        panic!("{left} calls have not ended");
    }

    /// Verifies the bytes of all calls, the number of groups, and that several groups take turns.
    fn check(&mut self, expected: usize) {
        let mut calls = Checked {
            next: 0,
            tag: Tag::new(0, 0),
            unanswered: Vec::new(),
        };
        for _ in 0..CHECKED {
            self.round(&mut calls);
            assert!(calls.unanswered.is_empty());
        }
        let (groups, slices) = (self.server.groups(), self.server.stats().slices);
        assert_eq!(
            (groups, slices > CHECKED / 2),
            (expected, expected > 1),
            "{slices} slices"
        );
    }
}

/// The payloads of the calls of a round, and the use of their replies.
trait Calls {
    const TYPE: u16;
    fn fill(&mut self, client: usize, payload: &mut [u8]);
    fn made(&mut self, client: usize, token: CallToken);
    fn ended(&mut self, client: usize, token: CallToken, reply: &[u8]);
}

/// Payloads with the minimum of work, and a count of the bytes that were received in responses.
struct Measured(usize);

impl Calls for Measured {
    const TYPE: u16 = ECHO;

    fn fill(&mut self, _: usize, _: &mut [u8]) {}

    fn made(&mut self, _: usize, _: CallToken) {}

    #[inline(always)]
    fn ended(&mut self, _: usize, _: CallToken, reply: &[u8]) {
        self.0 += black_box(reply).len();
    }
}

struct Checked {
    next: u64,
    tag: Tag,
    unanswered: Vec<(usize, CallToken, Tag)>,
}

impl Calls for Checked {
    const TYPE: u16 = CHECK;

    fn fill(&mut self, client: usize, payload: &mut [u8]) {
        self.tag = Tag::new(client, self.next);
        self.next += 1;
        pattern::fill_request(payload, self.tag);
    }

    fn made(&mut self, client: usize, token: CallToken) {
        self.unanswered.push((client, token, self.tag));
    }

    fn ended(&mut self, client: usize, token: CallToken, reply: &[u8]) {
        let found = self
            .unanswered
            .iter()
            .position(|(of, call, _)| (*of, *call) == (client, token));
        let (.., tag) = self.unanswered.swap_remove(found.unwrap());
        assert!(
            pattern::is_reply(reply, tag),
            "a reply of another call, or a broken one"
        );
    }
}

fn calls(c: &mut Criterion) {
    for (clients, depth, groups) in [(1, 1, 1), (CLIENTS, DEPTH, 1), (CLIENTS, DEPTH, 2)] {
        let name = format!("{clients} x {depth} calls, groups: {groups}");
        let calls = (clients * depth) as usize;
        let mut group = c.benchmark_group(name);
        group
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        group.throughput(Throughput::Elements(calls as u64));
        for bytes in SIZES {
            let mut room = Room::new(clients, depth, CLIENTS / groups, bytes);
            room.check(groups as usize);
            let mut round = || {
                let mut measured = Measured(0);
                room.round(&mut measured);
                assert_eq!(measured.0, calls * bytes);
            };
            group.bench_function(format!("{bytes} B"), |b| b.iter(&mut round));
        }
        group.finish();
    }
}

criterion_group!(benches, calls);
criterion_main!(benches);
