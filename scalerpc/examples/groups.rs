//! A server and twelve clients in groups, all in one thread: each client keeps calls outstanding,
//! and the groups take turns.
//!
//! `cargo run --release -p scalerpc --example groups -- [clients] [calls of each]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;

use scalerpc::mlx5::DeviceSpec;
use scalerpc::rdma::PendingClient;
use scalerpc::{Handlers, RdmaClient, RdmaServer, ServerConfig};

const ADD_ONE: u16 = 1;

/// Passes the records of a connection by hand; between processes `accept_over` and `connect_over`
/// send them through a socket.
fn connect(server: &mut RdmaServer) -> Result<RdmaClient, Box<dyn Error>> {
    let offered = server.offer()?;
    let client = PendingClient::new(&DeviceSpec::default(), offered.record())?;
    let admission = server.admit(offered, &client.record())?;
    Ok(client.admitted(&admission))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let clients: u32 = args.next().map_or(Ok(12), |clients| clients.parse())?;
    let calls: u64 = args.next().map_or(Ok(2_000), |calls| calls.parse())?;

    let config = ServerConfig {
        max_clients: clients,
        group_size: 4,
        ..ServerConfig::default()
    };
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config)?;
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert(ADD_ONE, |request: &[u8], response: &mut [u8]| {
        let number = u64::from_le_bytes(request.try_into().map_err(|_| scalerpc::HandlerError)?);
        response[..8].copy_from_slice(&(number + 1).to_le_bytes());
        Ok(8)
    });
    let mut all = (0..clients)
        .map(|_| connect(&mut server))
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "device {}, {} clients in {} groups",
        server.device().info().name,
        server.clients(),
        server.groups()
    );

    // For each client the calls made and ended, and the sum of the responses.
    let mut done = vec![(0, 0, 0_u64); all.len()];
    while done.iter().any(|(_, ended, _)| *ended < calls) {
        for (client, (called, ended, sum)) in all.iter_mut().zip(&mut done) {
            while *called < calls && client.call(ADD_ONE, &called.to_le_bytes()).is_ok() {
                *called += 1;
            }
            client.poll();
            let mut response = [0; 8];
            while let Some(completion) = client.poll_completion(&mut response) {
                completion.outcome?;
                *ended += 1;
                *sum += u64::from_le_bytes(response);
            }
        }
        server.step(&mut handlers, 64);
    }
    if done
        .iter()
        .any(|(_, _, sum)| *sum != calls * (calls + 1) / 2)
    {
        return Err("a response was lost, or came twice".into());
    }
    let stats = server.stats();
    println!(
        "{} calls, every response right: {} slices, {} requests fetched by READ",
        stats.accepted, stats.slices, stats.reads
    );
    Ok(())
}
