//! Two servers of the same service, and a client of both that gives each call to the server with
//! the fewest outstanding calls.
//!
//! `cargo run --release -p scalerpc --example two_servers -- [CALLS]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::thread;

use scalerpc::{Client, DEFAULT_TYPE, Server};

fn main() -> Result<(), Box<dyn Error>> {
    let calls: u64 = std::env::args()
        .nth(1)
        .map_or(Ok(2_000), |calls| calls.parse())?;
    let (mut clients, mut servers) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let (tell, told) = std::sync::mpsc::channel();
        servers.push(thread::spawn(move || {
            let mut server = Server::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
            let address = server.local_addr().map_err(|error| error.to_string())?;
            let _ = tell.send((address, server.stop_handle()));
            server
                .serve(|request| request.iter().rev().copied().collect::<Vec<u8>>())
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(server.stats().accepted)
        }));
        let (address, stop) = told.recv()?;
        clients.push((Client::connect(address)?, stop));
    }

    let mut made = 0;
    let mut ended = 0;
    let mut outstanding = [0; 2];
    let mut response = [0; 8];
    while ended < calls {
        while made < calls {
            let server = usize::from(outstanding[1] < outstanding[0]);
            // All slots at this server are in use, so all slots at the other server are in use too.
            if clients[server]
                .0
                .connection()
                .rdma()
                .call(DEFAULT_TYPE, &made.to_le_bytes())
                .is_err()
            {
                break;
            }
            (made, outstanding[server]) = (made + 1, outstanding[server] + 1);
        }
        for ((client, _), outstanding) in clients.iter_mut().zip(&mut outstanding) {
            client.connection().rdma().poll();
            while let Some(completion) = client.connection().rdma().poll_completion(&mut response) {
                completion.outcome?;
                assert!(
                    u64::from_be_bytes(response) < calls,
                    "a number that was sent, reversed"
                );
                (ended, *outstanding) = (ended + 1, *outstanding - 1);
            }
        }
        thread::yield_now();
    }
    clients.iter().for_each(|(_, stop)| stop.stop());
    let answered: Result<Vec<_>, _> = servers
        .into_iter()
        .map(|server| server.join().map_err(|_| "a server panicked".to_owned())?)
        .collect();
    println!("{calls} calls, answered by the servers: {:?}", answered?);
    Ok(())
}
