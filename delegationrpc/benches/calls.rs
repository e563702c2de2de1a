//! Calls of one client, one at a time and several. `cargo bench -p delegationrpc --bench calls`;
//! `scripts/peers shm` measures them together with other RPC crates; `scripts/instructions` counts
//! instructions.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../../benchkv/harness/criterion/calls.rs"]
mod calls;
#[path = "../../ipc/benches/ends/mod.rs"]
mod ends;

use criterion::{Criterion, criterion_group, criterion_main};
use delegationrpc::{Dir, Ring};
use ends::{RpcClient, RpcServer};

const DEPTHS: [u32; 4] = [1, 4, 16, 32];

fn bench(c: &mut Criterion) {
    let (dir, name) = (
        Dir::open(None).unwrap(),
        format!("bench-calls-{}", std::process::id()),
    );
    let server = || RpcServer::<Ring>::create(&dir, &name, 1, DEPTHS[3]);
    calls::bench_calls(c, "delegationrpc", &DEPTHS, server, || {
        RpcClient::<Ring>::connect(&dir, &name)
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
