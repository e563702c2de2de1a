//! The benchmark that `ipc`, `delegationrpc` and `flux` share. Each of these crates includes this
//! file: it needs criterion, and the harness does not depend on criterion.
//!
//! One caller keeps `depth` calls unanswered. Each call is answered before the next call is made
//! from its slot. Both ends are threads, each on its own core if there are two cores. Requests and
//! replies have 32 bytes, and are verified before the measurement.

use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::load::{Answerer, Caller, between_threads, two_cores};
use criterion::{BenchmarkId, Criterion, Throughput};

/// Number of calls that are verified before the measurement.
const CHECKED: u64 = 10_000;

/// Makes each end on the thread that uses it, and measures calls at each depth.
pub(crate) fn bench_calls<A: Answerer, C: Caller>(
    c: &mut Criterion,
    name: &str,
    depths: &[u32],
    answerer: impl FnOnce() -> Result<A, Failure> + Send,
    caller: impl FnOnce() -> Result<C, Failure>,
) {
    let mut group = c.benchmark_group(name);
    group
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(1));
    between_threads(
        two_cores().unwrap(),
        Clock::detect(),
        answerer,
        caller,
        |load| {
            for &depth in depths {
                load.check(depth, CHECKED)?;
                group.bench_function(BenchmarkId::new("calls", depth), |b| {
                    b.iter_custom(|calls| load.time(depth, calls).unwrap())
                });
            }
            Ok(())
        },
    )
    .unwrap();
    group.finish();
}
