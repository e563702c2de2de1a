//! Calls of one node to another, one at a time and several; with two nodes alone, and with further,
//! idle nodes. `cargo bench -p copyrpc-flux --bench calls`; `scripts/peers shm` measures them
//! together with other crates; `scripts/instructions` counts instructions.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../../benchkv/harness/criterion/calls.rs"]
mod calls;
mod ends;

use criterion::{Criterion, criterion_group, criterion_main};
use flux::Config;

use ends::Network;

fn bench(c: &mut Criterion) {
    for nodes in [2, 8] {
        let network = Network::new(nodes, Config::default()).unwrap();
        let name = format!("flux of {nodes} nodes");
        calls::bench_calls(
            c,
            &name,
            &[1, 8, 64, 256],
            || Ok(network.answerer),
            || Ok(network.caller),
        );
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
