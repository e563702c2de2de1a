//! Calls of one client, one at a time and several, each to be answered before the next is made from its slot: client and server in two
//! threads, on a core each if there are two. Requests and replies of 32 bytes, first checked to be the right ones.
//! `cargo bench -p delegationrpc --bench calls`; beside its rivals, `scripts/peers shm` measures; `scripts/instructions` counts.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

mod ends;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use delegationrpc::Dir;
use harness::clock::Clock;
use harness::load::{between_threads, two_cores};

use ends::{DelegationClient, DelegationServer};

/// Unanswered calls.
const DEPTHS: [u32; 4] = [1, 4, 16, 32];
/// Calls that are checked before they are measured.
const CHECKED: u64 = 10_000;

fn calls(c: &mut Criterion) {
    let mut group = c.benchmark_group("delegationrpc");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(1));
    let (dir, name) = (Dir::open(None).unwrap(), format!("bench-calls-{}", std::process::id()));
    let server = || DelegationServer::create(&dir, &name, 1, DEPTHS[3]);
    let client = || DelegationClient::connect(&dir, &name);
    between_threads(two_cores().unwrap(), Clock::detect(), server, client, |load| {
        for depth in DEPTHS {
            load.check(depth, CHECKED)?;
            group.bench_function(BenchmarkId::new("calls", depth), |b| b.iter_custom(|calls| load.time(depth, calls).unwrap()));
        }
        Ok(())
    })
    .unwrap();
    group.finish();
}

criterion_group!(benches, calls);
criterion_main!(benches);
