//! A server whose requests are answered by a pool of workers. The server's thread takes the
//! requests, and gives them to the workers in turn, a batch at a time. Workers answer when they are
//! done, in any order.
//!
//! `cargo run --release -p scalerpc --example workers -- [WORKERS [CALLS]]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::sync::mpsc;
use std::thread;

use scalerpc::{Client, DEFAULT_TYPE, Handlers, HeldRequest, Server};

/// Number of requests that a worker gets before requests are sent to the next worker.
const REQUESTS_PER_BATCH: usize = 4;
const CLIENTS: usize = 4;

/// Returns the sum of the squares below a number, which takes some time.
fn work(request: &[u8]) -> Vec<u8> {
    let number = request
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes));
    (0..number)
        .map(|below| below * below)
        .sum::<u64>()
        .to_le_bytes()
        .to_vec()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let workers: usize = args.next().map_or(Ok(2), |workers| workers.parse())?;
    let calls: u64 = args.next().map_or(Ok(500), |calls| calls.parse())?;
    let mut server = Server::bind("127.0.0.1:0")?;
    let (address, stop) = (server.local_addr()?, server.stop_handle());

    let queues: Vec<_> = (0..workers.max(1))
        .map(|_| {
            let (queue, requests) = mpsc::channel::<HeldRequest>();
            thread::spawn(move || {
                for request in requests {
                    let response = work(request.payload());
                    // A response of eight bytes is never too large.
                    let _ = request.reply(response);
                }
            });
            queue
        })
        .collect();
    let clients = thread::spawn(move || {
        let client = move || -> Result<(), scalerpc::ClientError> {
            let mut client = Client::connect(address)?;
            for number in 0..calls {
                assert_eq!(
                    client.call(&number.to_le_bytes())?,
                    work(&number.to_le_bytes()),
                    "the response to {number}"
                );
            }
            Ok(())
        };
        let outcomes: Vec<_> = (0..CLIENTS)
            .map(|_| thread::spawn(client))
            .collect::<Vec<_>>()
            .into_iter()
            .map(|client| client.join())
            .collect();
        stop.stop();
        outcomes
            .into_iter()
            .all(|outcome| matches!(outcome, Ok(Ok(()))))
    });

    let (mut taken, mut next) = (vec![0; queues.len()], 0);
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert_held(DEFAULT_TYPE, |request| {
        let worker = next / REQUESTS_PER_BATCH % queues.len();
        (next, taken[worker]) = (next + 1, taken[worker] + 1);
        // If the worker has ended, the request is dropped, which ends the call.
        let _ = queues[worker].send(request);
    });
    server.serve_types(&mut handlers)?;
    drop(handlers);
    if !clients.join().is_ok_and(|all_right| all_right) {
        return Err("a client did not get its responses".into());
    }
    println!(
        "{} calls of {CLIENTS} clients, answered by {} workers: {taken:?}",
        server.stats().accepted,
        queues.len()
    );
    Ok(())
}
