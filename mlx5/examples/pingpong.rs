//! Two processes exchange messages over one connection, on the software HCA or on DEVICE, for
//! example `mlx5_0`.
//!
//! `cargo run --release -p mlx5 --example pingpong [DEVICE [ROUNDS]]`
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

use mlx5::{Device, Endpoint, EndpointAddress, EndpointConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = Device::open(args.first().map_or("soft", |name| name))?;
    let rounds = args.get(1).map_or(Ok(100_000), |rounds| rounds.parse())?;
    let endpoint = device.endpoint(EndpointConfig::default())?;
    if let Ok(address) = std::env::var("PINGPONG") {
        return answer(connect(endpoint, TcpStream::connect(address)?)?, rounds);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let mut child = Command::new(std::env::current_exe()?)
        .args(&args)
        .env("PINGPONG", address)
        .spawn()?;
    ask(connect(endpoint, listener.accept()?.0)?, rounds)?;
    println!("on {}", device.info().name);
    if child.wait()?.success() {
        Ok(())
    } else {
        Err("the other process failed".into())
    }
}

/// Exchanges the addresses of both ends by any means, here TCP, and connects.
fn connect(mut endpoint: Endpoint, mut stream: TcpStream) -> Result<Endpoint, Box<dyn Error>> {
    let mut peer = [0; EndpointAddress::LEN];
    stream.write_all(&endpoint.address().to_bytes())?;
    stream.read_exact(&mut peer)?;
    endpoint.connect(&EndpointAddress::from_bytes(&peer).ok_or("not an address")?)?;
    Ok(endpoint)
}

fn ask(mut endpoint: Endpoint, rounds: u32) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    for round in 0..rounds {
        endpoint.send(&round.to_le_bytes())?;
        assert_eq!(endpoint.recv()?, round.to_be_bytes());
    }
    println!(
        "{rounds} round trips, mean {:?}",
        start.elapsed() / rounds.max(1)
    );
    Ok(())
}

fn answer(mut endpoint: Endpoint, rounds: u32) -> Result<(), Box<dyn Error>> {
    for _ in 0..rounds {
        let message: Vec<u8> = endpoint.recv()?.into_iter().rev().collect();
        endpoint.send(&message)?;
    }
    Ok(())
}
