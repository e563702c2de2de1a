//! A daemon thread and two clients on one ring:
//! `cargo run --release -p delegationrpc --example daemon`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use delegationrpc::{Client, Server};

const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = format!("daemon-{}", std::process::id());
    let mut server = Server::<u64, u64>::bind(&name)?;
    let stop = server.stop_handle();
    let daemon = std::thread::spawn(move || server.serve(|number| number * number));
    let mut clients = [
        Client::<u64, u64, ()>::connect(&name)?,
        Client::connect(&name)?,
    ];
    for number in 1..=4 {
        for client in &mut clients {
            println!(
                "client {}: {number} squared is {}",
                client.id(),
                client.ask(number, PATIENCE)?
            );
        }
    }
    stop.stop();
    daemon.join().map_err(|_| "the daemon panicked".into())
}
