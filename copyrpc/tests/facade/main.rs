//! What is around calls and replies: one-sided operations, waiting, typed messages, futures. On the software HCA, all ends in one process.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod raw;
mod wait;

use std::time::{Duration, Instant};

use copyrpc::{Context, ContextBuilder, Endpoint, EndpointConfig};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

/// Nothing here takes long; this only ends a hang.
const WATCHDOG: Duration = Duration::from_secs(60);

fn builder(fabric: &LocalFabric) -> ContextBuilder {
    ContextBuilder::new(DeviceSpec::Soft(SoftOptions { fabric: FabricSpec::Local(fabric.clone()), ..SoftOptions::default() }))
}

fn small() -> EndpointConfig {
    EndpointConfig { ring_size: 4096, ..EndpointConfig::default() }
}

fn connect<U, V>(a: &Context<U>, b: &Context<V>, config: &EndpointConfig) -> (Endpoint<U>, Endpoint<V>) {
    let (a, b) = (a.create_endpoint(config).unwrap(), b.create_endpoint(config).unwrap());
    let (record_a, record_b) = (a.local_info(), b.local_info());
    (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
}

/// Steps until `step` says that all is done; fails when that takes far longer than it needs.
fn step_until(mut step: impl FnMut() -> bool) {
    let watchdog = Instant::now() + WATCHDOG;
    while !step() {
        assert!(Instant::now() < watchdog, "watchdog");
    }
}
