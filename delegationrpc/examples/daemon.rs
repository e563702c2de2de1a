//! A daemon thread and two clients on one ring: `cargo run --release -p delegationrpc --example daemon`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use delegationrpc::{Client, Dir, Server, ring_depth_for};
use shm::wait::WaitStrategy;

const CLIENTS: usize = 2;
const DEPTH: usize = 32;
const CALLS: u64 = 500_000;
/// How often a sleeping server looks whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(10);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let dir = Dir::open(None)?;
    dir.sweep()?;
    let name = format!("daemon-{}", std::process::id());
    // `daemon event`, `daemon yield`, `daemon busy`, or what suits this machine.
    let wait = match std::env::args().nth(1) {
        Some(strategy) => strategy.parse()?,
        None => WaitStrategy::auto(CLIENTS + 1, std::thread::available_parallelism()?.get()),
    };
    let mut server = Server::<u64, u64>::create(&dir, &name, CLIENTS, ring_depth_for(CLIENTS, DEPTH), DEPTH, 0)?;

    let stop = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (dir, name) = (dir.clone(), name.clone());
            std::thread::spawn(move || run_client(&dir, &name, wait))
        })
        .collect();
    let watcher = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || -> Result<(), Failure> {
            let results: Vec<_> = clients.into_iter().map(|client| client.join().map_err(|_| "a client panicked")).collect();
            stop.store(true, Ordering::Relaxed);
            results.into_iter().try_for_each(|result| result?)
        }
    });

    let mut waiter = wait.waiter();
    while !stop.load(Ordering::Relaxed) {
        if server.poll() == 0 {
            waiter.idle(|| server.wait(Some(STOP_INTERVAL)));
            continue;
        }
        waiter.busy();
        while let Some(request) = server.recv() {
            server.reply(request.token, request.payload + 1)?;
        }
    }
    watcher.join().map_err(|_| "the watcher panicked")??;
    let calls = CALLS * CLIENTS as u64;
    println!(
        "{calls} calls of {CLIENTS} clients, {DEPTH} in flight each, wait {wait}, region {} KiB: {:.2} M/s",
        server.region_bytes() / 1024,
        calls as f64 / start.elapsed().as_secs_f64() / 1e6
    );
    Ok(())
}

fn run_client(dir: &Dir, name: &str, wait: WaitStrategy) -> Result<(), Failure> {
    let mut client = Client::<u64, u64, u64>::connect(dir, name, 0)?;
    let (mut sent, mut received) = (0, 0);
    let mut waiter = wait.waiter();
    while received < CALLS {
        while sent < CALLS && client.in_flight() < client.resp_depth() {
            client.call(sent, sent).map_err(|error| error.to_string())?;
            sent += 1;
        }
        let ended = client.poll(|number, reply| assert_eq!(reply, Ok(number + 1)))? as u64;
        received += ended;
        if ended == 0 {
            waiter.idle(|| client.wait(None));
        } else {
            waiter.busy();
        }
    }
    Ok(())
}
