//! A server thread and a client that keeps 8 calls in flight: `cargo run --release -p copyrpc-ipc --example echo`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{Client, Dir, Server};
use shm::wait::WaitStrategy;

const CALLS: u64 = 200_000;
/// How often a sleeping server looks whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(10);

fn main() -> Result<(), Box<dyn Error>> {
    let dir = Dir::open(None)?;
    dir.sweep()?;
    let name = format!("echo-{}", std::process::id());
    // `echo event`, `echo yield`, `echo busy`, or what suits this machine.
    let wait = match std::env::args().nth(1) {
        Some(strategy) => strategy.parse()?,
        None => WaitStrategy::auto(2, std::thread::available_parallelism()?.get()),
    };

    let stop = Arc::new(AtomicBool::new(false));
    let server = std::thread::spawn({
        let (dir, name, stop) = (dir.clone(), name.clone(), Arc::clone(&stop));
        // A server stays on the thread that creates it.
        move || -> Result<(), ipc::CreateError> {
            let mut server = Server::<u64, u64>::create(&dir, &name, 4, 8, 0)?;
            let mut waiter = wait.waiter();
            while !stop.load(Ordering::Relaxed) {
                if server.poll() == 0 {
                    waiter.idle(|| server.wait(Some(STOP_INTERVAL)));
                    continue;
                }
                waiter.busy();
                while let Some(request) = server.recv() {
                    let echo = *request.data();
                    // A client that left does not wait for its answer.
                    let _ = request.reply(echo);
                }
            }
            Ok(())
        }
    });

    let mut client = loop {
        match Client::<u64, u64, u64>::connect(&dir, &name, 0) {
            Err(ipc::ConnectError::Region(shm::region::OpenError::NotFound { .. })) if !server.is_finished() => std::thread::yield_now(),
            other => break other?,
        }
    };
    let start = Instant::now();
    let (mut sent, mut received) = (0, 0);
    let mut waiter = wait.waiter();
    while received < CALLS {
        while sent < CALLS && client.in_flight() < client.depth() {
            client.call(sent, sent)?;
            sent += 1;
        }
        let ended = client.poll(|number, reply| assert_eq!(reply, Ok(number)))? as u64;
        received += ended;
        if ended == 0 {
            waiter.idle(|| client.wait(None));
        } else {
            waiter.busy();
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{CALLS} calls, 8 in flight, wait {wait}: {:.2} M/s", CALLS as f64 / seconds / 1e6);
    stop.store(true, Ordering::Relaxed);
    server.join().map_err(|_| "the server panicked")??;
    Ok(())
}
