//! Like `server.rs`, with a loop of its own: it polls, answers at a time of its choice, and reports
//! the ends of its clients.
//!
//! In two terminals: `cargo run -p copyrpc --example poll_server`, and `poll_client` in place of
//! `poll_server`; both take an `ADDRESS:PORT`. The socket at that address only swaps the records of
//! the endpoints. With a second argument, the server ends after that number of clients.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::Duration;

use copyrpc::{
    Context, ContextBuilder, Endpoint, EndpointConfig, RecvHandle, ReplyError, default_device,
};

/// Time between two polls for new clients while nothing arrives.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum time for a client to connect. The other clients wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

fn main() {
    if let Err(error) = run() {
        eprintln!("poll_server: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let listener = TcpListener::bind(args.next().as_deref().unwrap_or("127.0.0.1:7471"))?;
    let mut to_come = args
        .next()
        .map_or(Ok(usize::MAX), |clients| clients.parse())?;
    listener.set_nonblocking(true)?;
    println!("listening on {}", listener.local_addr()?);
    let context: Context<()> = ContextBuilder::new(default_device()).build()?;
    let mut clients = Vec::new();
    while to_come > 0 || !clients.is_empty() {
        if to_come > 0 && accept(&listener, &context, &mut clients)? {
            to_come -= 1;
        }
        // Posts the answers, then sleeps until something arrives.
        context.wait(Some(LOOK))?;
        context.poll(|(), _| ())?;
        while let Some(request) = context.recv() {
            answer(request)?;
        }
        // The endpoint of a client that has disconnected ends by itself. Dropping an endpoint that
        // has not ended would close it.
        clients.retain(|client| {
            client.closed().is_none_or(|reason| {
                println!(
                    "a client is gone after {} requests: {reason}",
                    client.stats().replies
                );
                false
            })
        });
    }
    Ok(())
}

/// Connects a client, if one waits to be accepted.
fn accept(
    listener: &TcpListener,
    context: &Context<()>,
    clients: &mut Vec<Endpoint<()>>,
) -> Result<bool, Box<dyn Error>> {
    let (stream, address) = match listener.accept() {
        Ok(accepted) => accepted,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    match context.connect_over(&EndpointConfig::default(), &stream) {
        Ok(client) => {
            println!(
                "connected with {address}, on {}",
                context.device_info().name
            );
            clients.push(client);
        }
        // The client was sent the same reason.
        Err(error) => println!("{address} is not connected: {error}"),
    }
    Ok(true)
}

fn answer(request: RecvHandle<()>) -> Result<(), Box<dyn Error>> {
    let text = String::from_utf8_lossy(&request.data().to_vec()).into_owned();
    let answer = text.to_uppercase();
    println!("{text:?} -> {answer:?}");
    match request.reply(answer.as_bytes()) {
        // The client has disconnected meanwhile.
        Err(ReplyError::Closed(_)) => Ok(()),
        answered => Ok(answered?),
    }
}
