//! A key-value service: a server and 16 clients with deadlines, which outlive a restart of the server. Requests and replies are structs.
//!
//! `cargo run --release -p copyrpc --example kv`; `COPYRPC_DEVICE=mlx5_0` takes that device in place of the software HCA.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use copyrpc::typed::Call;
use copyrpc::{Client, ClientError, ClientOptions, EndpointConfig, Server, ServerError, ServerOptions, StopHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const CLIENTS: u64 = 16;
const ROUNDS: u64 = 500;
const GET: u64 = 0;
const PUT: u64 = 1;

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct Request {
    operation: u64,
    key: u64,
    value: u64,
}

/// The value of a key, or its previous value.
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct Reply {
    is_found: u64,
    value: u64,
}

impl Call for Request {
    type Reply = Reply;
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;
/// The stored values, and the operations on them.
type Store = HashMap<u64, u64>;

fn answer(store: &mut Store, request: Request) -> Reply {
    let found = match request.operation {
        PUT => store.insert(request.key, request.value),
        _ => store.get(&request.key).copied(),
    };
    Reply { is_found: found.is_some().into(), value: found.unwrap_or(0) }
}

/// Serves until it is stopped, and returns the store.
fn serve(address: SocketAddr, mut store: Store, tell: &mpsc::Sender<(SocketAddr, StopHandle)>) -> Result<Store, ServerError> {
    let endpoint = EndpointConfig { ring_size: 64 << 10, ..EndpointConfig::default() };
    let mut server = Server::with_options(address, &ServerOptions { endpoint, ..ServerOptions::default() })?;
    let address = server.local_addr().map_err(|source| ServerError::Listen { address: address.to_string(), source })?;
    // The thread that waits for it may be gone.
    let _ = tell.send((address, server.stop_handle()));
    server.serve_typed(|request| answer(&mut store, request))?;
    Ok(store)
}

/// Puts and gets keys of its own, and checks each value that it put. Returns the number of calls that it repeated because the server was
/// gone.
fn client(address: SocketAddr, number: u64) -> Result<u64, ClientError> {
    let endpoint = EndpointConfig { ring_size: 64 << 10, ..EndpointConfig::default() };
    let options = ClientOptions { endpoint, timeout: Some(Duration::from_secs(5)), ..ClientOptions::default() };
    let (mut client, mut again) = (Client::with_options(address, &options)?, 0);
    let mut call = |operation, key, value| loop {
        match client.call_typed(&Request { operation, key, value }) {
            // Putting the same value twice is putting it once.
            Err(ClientError::Closed(_)) => again += 1,
            outcome => return outcome,
        }
    };
    for round in 0..ROUNDS {
        let key = number * ROUNDS + round;
        call(PUT, key, round)?;
        assert_eq!(call(GET, key, 0)?, Reply { is_found: 1, value: round }, "a value that was put is there");
        assert_eq!(call(GET, u64::MAX, 0)?.is_found, 0);
    }
    Ok(again)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("kv: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), AnyError> {
    let (tell, told) = mpsc::channel();
    let start = |address, store| {
        let tell = tell.clone();
        thread::spawn(move || serve(address, store, &tell))
    };
    let mut server = start(SocketAddr::from(([127, 0, 0, 1], 0)), Store::new());
    let (address, mut stop) = told.recv_timeout(Duration::from_secs(30))?;
    let clients: Vec<_> = (0..CLIENTS).map(|number| thread::spawn(move || client(address, number))).collect();
    // Restarts the server with its store, while the clients go on.
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(50));
        stop.stop();
        let store = server.join().map_err(|_| "the server panicked")??;
        server = start(address, store);
        (_, stop) = told.recv_timeout(Duration::from_secs(30))?;
    }
    let mut again = 0;
    for client in clients {
        again += client.join().map_err(|_| "a client panicked")??;
    }
    stop.stop();
    let store = server.join().map_err(|_| "the server panicked")??;
    println!("{} clients put and got {} keys over 3 restarts; {again} calls were made again", CLIENTS, store.len());
    Ok(())
}
