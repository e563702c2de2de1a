//! The interface besides calls and replies: one-sided operations, waiting, typed messages. On the
//! software HCA, all ends in one process.

mod channel;
mod fork;
mod raw;
mod wait;

use std::time::{Duration, Instant};

use copyrpc::{Context, ContextBuilder, Endpoint, EndpointConfig, RecvHandle};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

/// Time after which a hang ends the process. The tests take far less.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A context on the software HCA, or on the device of libibverbs that `MLX5_TEST_DEVICE` names.
fn builder(fabric: &LocalFabric) -> ContextBuilder {
    ContextBuilder::new(match std::env::var("MLX5_TEST_DEVICE").ok() {
        None => DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            ..SoftOptions::default()
        }),
        Some(name) => DeviceSpec::from(&*name),
    })
}

fn small() -> EndpointConfig {
    EndpointConfig {
        ring_size: 4096,
        ..EndpointConfig::default()
    }
}

fn connect<U, V>(
    a: &Context<U>,
    b: &Context<V>,
    config: &EndpointConfig,
) -> (Endpoint<U>, Endpoint<V>) {
    let (a, b) = (
        a.create_endpoint(config).unwrap(),
        b.create_endpoint(config).unwrap(),
    );
    let (record_a, record_b) = (a.local_info(), b.local_info());
    (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
}

/// Calls `step` until it returns `true`. Panics after [`WATCHDOG`].
fn step_until(mut step: impl FnMut() -> bool) {
    let watchdog = Instant::now() + WATCHDOG;
    while !step() {
        assert!(Instant::now() < watchdog, "watchdog");
    }
}

/// Polls until a request has arrived, and returns the request.
fn next_request<U>(context: &Context<U>) -> RecvHandle<U> {
    let mut request = context.recv();
    step_until(|| {
        if request.is_none() {
            context.poll(|_, _| ()).unwrap();
            request = context.recv();
        }
        request.is_some()
    });
    request.unwrap()
}
