//! Four nodes, each calling the next one: `cargo run --release -p copyrpc-flux --example ring`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flux::{Config, Node, network};
use shm::wait::WaitStrategy;

const NODES: usize = 4;
const CALLS: u64 = 200_000;
const IN_FLIGHT: usize = 64;
/// How often a sleeping node looks whether all have finished.
const STOP_INTERVAL: Duration = Duration::from_millis(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cores = std::thread::available_parallelism()?.get();
    // `ring event`, `ring yield`, `ring busy`, or what suits this machine.
    let wait = match std::env::args().nth(1) {
        Some(strategy) => strategy.parse()?,
        None => WaitStrategy::auto(NODES, cores),
    };
    let finished = AtomicUsize::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for node in network::<u64, u64>(NODES, Config::default())? {
            let finished = &finished;
            scope.spawn(move || run(node, wait, finished));
        }
        Ok::<(), flux::ConfigError>(())
    })?;
    let rate = (CALLS * NODES as u64) as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!("{NODES} nodes, {IN_FLIGHT} calls in flight each, wait {wait}: {rate:.2} M calls/s in all");
    Ok(())
}

fn run(mut node: Node<u64, u64>, wait: WaitStrategy, finished: &AtomicUsize) {
    let next = (node.index() + 1) % NODES;
    let (mut sent, mut received) = (0, 0);
    let mut waiter = wait.waiter();
    // A node goes on answering until all have their replies.
    while finished.load(Ordering::Acquire) < NODES {
        while sent < CALLS && node.in_flight() < IN_FLIGHT && node.call(next, sent, sent).is_ok() {
            sent += 1;
        }
        let before = received;
        let taken = node.poll(|number, reply| {
            assert_eq!(reply, Ok(number + 1));
            received += 1;
        });
        while let Some((_, token, payload)) = node.try_recv_raw() {
            // The token is new, so it cannot be refused.
            let _ = node.reply(token, payload + 1);
        }
        if received == CALLS && before < CALLS {
            finished.fetch_add(1, Ordering::Release);
        }
        if taken == 0 {
            waiter.idle(|| node.wait(Some(STOP_INTERVAL)));
        } else {
            waiter.busy();
        }
    }
}
