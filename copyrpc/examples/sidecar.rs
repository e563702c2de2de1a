//! A sidecar: the programs of a host call it through shared memory, and it makes their calls at a
//! remote server. It repeats a call that reached no handler, and reports an error for a call that
//! it cannot repeat. The remote server is restarted meanwhile, and the sidecar too.
//!
//! `cargo run --release -p copyrpc --example sidecar`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use copyrpc::{Client, Ending, Server, service};
use serde::{Deserialize, Serialize};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Time for which a call is repeated.
const LONG: Duration = Duration::from_secs(20);
/// Number of calls after which a server stops and the next server starts.
const RESTART: u64 = 2_000;
const CALLS: u64 = 9 * RESTART;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Problem {
    /// No handler got the call, which may be repeated.
    Away,
    /// A handler may have got the call.
    Unknown,
}

service! {
    /// Counters with names. The sidecar has the same methods as the remote server.
    mod counters {
        /// Adds to a counter, and returns the sum.
        fn add(name: String, amount: u64) -> Result<u64, Problem> = 1;
    }
}

type Counters = HashMap<String, u64>;

impl counters::Service for Counters {
    fn add(&mut self, name: String, amount: u64) -> Result<u64, Problem> {
        let counter = self.entry(name).or_default();
        *counter += amount;
        Ok(*counter)
    }
}

/// The sidecar's client of the remote server has the methods of the service, and so implements the
/// service for the host.
impl counters::Service for counters::Client<Client> {
    fn add(&mut self, name: String, amount: u64) -> Result<u64, Problem> {
        let outcome = repeat(|| self.add(name.clone(), amount));
        outcome.map_err(|error| {
            if error.may_have_executed() {
                Problem::Unknown
            } else {
                Problem::Away
            }
        })
    }
}

/// Makes a call until it has reached a handler.
fn repeat<T, E: Ending>(mut call: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let start = Instant::now();
    loop {
        match call() {
            Err(error) if error.is_retryable() && start.elapsed() < LONG => {
                thread::sleep(Duration::from_millis(1))
            }
            outcome => return outcome,
        }
    }
}

/// The remote server, again and again, until it has executed all calls.
fn serve_remote(tell: &Sender<SocketAddr>) -> Result<Counters, AnyError> {
    let mut counters = Counters::default();
    let mut executed = 0;
    let mut address = SocketAddr::from(([127, 0, 0, 1], 0));
    while executed < CALLS {
        let mut server = Server::bind(address)?;
        let stop = server.stop_handle();
        address = server.local_addr()?;
        let _ = tell.send(address);
        server.serve(|request| {
            executed += 1;
            (executed % RESTART == 0).then(|| stop.stop());
            counters::answer(&mut counters, &request)
        })?;
    }
    Ok(counters)
}

/// The sidecar, again and again, until all calls have their result.
fn serve_host(name: &str, address: SocketAddr) -> Result<(), AnyError> {
    let (mut sidecar, mut made) = (counters::Client::new(Client::connect(address)?), 0);
    while made < CALLS {
        let mut server = ipc::bytes::Server::bind(name)?;
        let stop = server.stop_handle();
        server.serve(|request| {
            made += 1;
            (made % RESTART == RESTART / 2 || made == CALLS).then(|| stop.stop());
            counters::answer(&mut sidecar, request)
        })?;
    }
    Ok(())
}

/// A program of the host. Everything that it adds is counted once, although the server and the
/// sidecar are restarted.
fn work(sidecar: &str, name: &str) -> Result<(), AnyError> {
    let mut client = counters::Client::new(ipc::bytes::Client::connect_within(sidecar, LONG)?);
    for sum in 1..=CALLS / 3 {
        assert_eq!(repeat(|| client.add(name.to_owned(), 1))?, sum);
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let sidecar = &*format!("sidecar-{}", std::process::id());
    let (tell, told) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let remote = scope.spawn(move || serve_remote(&tell));
        let address = told.recv()?;
        let host = scope.spawn(move || serve_host(sidecar, address));
        let programs = ["one", "two", "three"].map(|name| scope.spawn(move || work(sidecar, name)));
        programs
            .into_iter()
            .chain([host])
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)?;
        let counters = remote.join().map_err(|_| "the remote server panicked")??;
        println!(
            "3 programs made {} calls; servers were restarted every {RESTART}",
            counters.values().sum::<u64>()
        );
        Ok(())
    })
}
