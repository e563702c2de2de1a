//! Throughput of calls: caller and answerer in one thread, on two software devices of one fabric.
//! One call at a time, and 64 gathered before each flush; request and reply of the same size.
//! Before a case is measured, the bytes of its requests and replies are checked. Start it with
//! `cargo bench -p copyrpc --bench calls`. `copyrpc_bench` measures calls between processes, and
//! `scripts/instructions` counts instructions.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a benchmark"
)]

use std::hint::black_box;
use std::time::Duration;

use copyrpc::{Context, ContextBuilder, Endpoint, EndpointConfig, Outcome, RecvBytes, Reply};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

const SIZES: [usize; 3] = [32, 1 << 10, 16 << 10];
const BATCH: usize = 64;
/// Maximum number of times that a round flushes, answers and drains. A round needs several turns if
/// its calls do not fit into one WRITE.
const MOST_TURNS: usize = 1000;

struct Pair {
    caller: Context<usize>,
    answerer: Context<usize>,
    endpoint: Endpoint<usize>,
    _peer: Endpoint<usize>,
    bytes: usize,
}

/// Returns the payload of call `number` of `bytes`; its reply carries the complement.
fn pattern(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (number * 31 + at * 7 + at / 256) as u8)
        .collect()
}

fn complement(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

impl Pair {
    /// Connects two contexts. The rings are so large that the replies of a batch fit the credit
    /// that a connection starts with, a quarter of the ring.
    fn new(bytes: usize) -> Self {
        let fabric = LocalFabric::new();
        let context = || {
            let options = SoftOptions {
                fabric: FabricSpec::Local(fabric.clone()),
                arena_bytes: 1 << 30,
                ..SoftOptions::default()
            };
            ContextBuilder::new(DeviceSpec::Soft(options))
                .build()
                .unwrap()
        };
        let (caller, answerer) = (context(), context());
        let ring_size = (4 * BATCH * (bytes + 64)).next_power_of_two().max(64 << 10) as u64;
        let config = EndpointConfig {
            ring_size,
            ..EndpointConfig::default()
        };
        let (a, b) = (
            caller.create_endpoint(&config).unwrap(),
            answerer.create_endpoint(&config).unwrap(),
        );
        let (of_a, of_b) = (a.local_info(), b.local_info());
        Self {
            endpoint: a.connect(&of_b).unwrap(),
            _peer: b.connect(&of_a).unwrap(),
            caller,
            answerer,
            bytes,
        }
    }

    /// Flushes the gathered calls, answers and drains, until `calls` calls have ended.
    #[inline(always)]
    fn finish(
        &self,
        calls: usize,
        mut answer: impl FnMut(RecvBytes<'_>, Reply<'_, usize>),
        mut ended: impl FnMut(usize, RecvBytes<'_>),
    ) {
        let mut left = calls;
        for _ in 0..MOST_TURNS {
            self.caller.flush_endpoints().unwrap();
            self.answerer.serve(&mut answer, |_, _| ()).unwrap();
            let on_response = |number, outcome: Outcome<'_>| {
                ended(number, outcome.unwrap());
                left -= 1;
            };
            self.caller.drain(on_response).unwrap();
            if left == 0 {
                return;
            }
        }
        panic!("{left} of {calls} calls have not ended");
    }

    /// Makes and answers `calls` calls. Returns the number of bytes of the replies.
    #[inline(always)]
    fn round(&self, calls: usize, payload: &[u8]) -> usize {
        for number in 0..calls {
            self.endpoint.call(payload, number, self.bytes).unwrap();
        }
        let mut bytes = 0;
        let answer = |request: RecvBytes<'_>, reply: Reply<'_, usize>| {
            black_box(request.read::<u64>());
            reply.send(payload).unwrap();
        };
        self.finish(calls, answer, |_, reply| {
            black_box(reply.read::<u64>());
            bytes += reply.len();
        });
        bytes
    }

    /// Checks the bytes of all requests and replies over several laps of the ring.
    fn check(&self, calls: usize) {
        for _ in 0..8 * BATCH / calls {
            for number in 0..calls {
                self.endpoint
                    .call(&pattern(number, self.bytes), number, self.bytes)
                    .unwrap();
            }
            let mut answered = 0;
            let mut replied = vec![false; calls];
            let answer = |request: RecvBytes<'_>, reply: Reply<'_, usize>| {
                let data = request.to_vec();
                assert!(
                    data == pattern(answered, self.bytes),
                    "request {answered} of {calls} x {} B",
                    self.bytes
                );
                answered += 1;
                reply.send(&complement(&data)).unwrap();
            };
            self.finish(calls, answer, |number, reply| {
                assert!(
                    reply.to_vec() == complement(&pattern(number, self.bytes)),
                    "reply {number} of {calls} x {} B",
                    self.bytes
                );
                assert!(!std::mem::replace(&mut replied[number], true));
            });
        }
    }
}

fn calls(c: &mut Criterion) {
    for (name, calls) in [("round trip", 1), ("batch of 64", BATCH)] {
        let mut group = c.benchmark_group(name);
        group
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        group.throughput(Throughput::Elements(calls as u64));
        for bytes in SIZES {
            let pair = Pair::new(bytes);
            pair.check(calls);
            let payload = pattern(0, bytes);
            let round = || {
                let replied = pair.round(calls, black_box(&payload));
                assert_eq!(replied, calls * bytes);
            };
            group.bench_function(BenchmarkId::from_parameter(format!("{bytes} B")), |b| {
                b.iter(round)
            });
        }
        group.finish();
    }
}

criterion_group!(benches, calls);
criterion_main!(benches);
