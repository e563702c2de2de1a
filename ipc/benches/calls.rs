//! Calls of one client, one at a time and several. `cargo bench -p copyrpc-ipc --bench calls`;
//! `scripts/peers shm` measures them together with other RPC crates; `scripts/instructions` counts
//! instructions.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../../benchkv/harness/criterion/calls.rs"]
mod calls;
mod ends;

use criterion::{Criterion, criterion_group, criterion_main};
use ends::{RpcClient, RpcServer};
use ipc::{Dir, ReadyWords};

const DEPTHS: [u32; 4] = [1, 4, 16, 32];

fn bench(c: &mut Criterion) {
    let (dir, name) = (
        Dir::open(None).unwrap(),
        format!("bench-calls-{}", std::process::id()),
    );
    let server = || RpcServer::<ReadyWords>::create(&dir, &name, 1, DEPTHS[3]);
    calls::bench_calls(c, "ipc", &DEPTHS, server, || {
        RpcClient::<ReadyWords>::connect(&dir, &name)
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
