//! A server on its thread, and a client that asks it:
//! `cargo run --release -p copyrpc-ipc --example echo`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use ipc::bytes::{Client, Server};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = format!("echo-{}", std::process::id());
    let (named, stop) = std::sync::mpsc::channel();
    let server = std::thread::spawn({
        let name = name.clone();
        move || -> Result<(), ipc::SetupError> {
            let mut server = Server::bind(&name)?;
            let _ = named.send(server.stop_handle());
            server.serve(<[u8]>::to_ascii_uppercase)
        }
    });
    let mut client = Client::connect_within(&name, Duration::from_secs(10))?;
    println!(
        "{}",
        String::from_utf8(client.ask(b"hello", Duration::from_secs(10))?)?
    );
    stop.recv()?.stop();
    Ok(server.join().map_err(|_| "the server panicked")??)
}
