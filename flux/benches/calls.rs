//! Calls of one node to another, one at a time and several, each to be answered before the next is made from its slot: the nodes in two
//! threads, on a core each if there are two; alone, and among idle ones. Requests and replies of 32 bytes, first checked to be the right ones.
//! `cargo bench -p copyrpc-flux --bench calls`; beside its rivals, `scripts/peers shm` measures; `scripts/instructions` counts.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

mod ends;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flux::Config;
use harness::clock::Clock;
use harness::load::{between_threads, two_cores};

use ends::Network;

/// Unanswered calls.
const DEPTHS: [u32; 4] = [1, 8, 64, 256];
/// Calls that are checked before they are measured.
const CHECKED: u64 = 10_000;

fn calls(c: &mut Criterion) {
    for nodes in [2, 8] {
        let mut group = c.benchmark_group(format!("flux of {nodes} nodes"));
        group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        group.throughput(Throughput::Elements(1));
        let network = Network::new(nodes, Config::default()).unwrap();
        between_threads(
            two_cores().unwrap(),
            Clock::detect(),
            || Ok(network.answerer),
            || Ok(network.caller),
            |load| {
                for depth in DEPTHS {
                    load.check(depth, CHECKED)?;
                    group.bench_function(BenchmarkId::new("calls", depth), |b| b.iter_custom(|calls| load.time(depth, calls).unwrap()));
                }
                Ok(())
            },
        )
        .unwrap();
        group.finish();
    }
}

criterion_group!(benches, calls);
criterion_main!(benches);
