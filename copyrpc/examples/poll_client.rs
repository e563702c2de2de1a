//! Sends each word to the server as a request, all at once, and prints the answers. See
//! `poll_server.rs`.
//!
//! `cargo run -p copyrpc --example poll_client -- [ADDRESS:PORT [WORD...]]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::net::TcpStream;
use std::time::Duration;

use copyrpc::{Context, ContextBuilder, EndpointConfig, default_device};

/// The maximum number of bytes of an answer.
const ANSWER: usize = 256;

fn main() {
    if let Err(error) = run() {
        eprintln!("poll_client: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7471".into());
    let mut words: Vec<String> = args.collect();
    if words.is_empty() {
        words = ["hello", "remote", "memory"].map(String::from).to_vec();
    }
    let context: Context<usize> = ContextBuilder::new(default_device()).build()?;
    let stream = TcpStream::connect(address)?;
    let endpoint = context.connect_over(&EndpointConfig::default(), &stream)?;

    let mut sent = 0;
    let mut ended = 0;
    let mut failure = None;
    while ended < words.len() {
        // The number of the word is returned with its answer. A call that is refused for lack of
        // room is made after the next poll.
        while let Some(word) = words.get(sent) {
            match endpoint.call_within(word.as_bytes(), sent, ANSWER, Duration::from_secs(5)) {
                Ok(_) => sent += 1,
                Err(error) if error.is_retryable() => break,
                Err(error) => return Err(error.into()),
            }
        }
        // Posts the calls, all in one WRITE, then sleeps until something arrives.
        context.wait(None)?;
        context.poll(|number, outcome| {
            ended += 1;
            match outcome {
                Ok(bytes) => println!(
                    "{:?} -> {:?}",
                    words[number],
                    String::from_utf8_lossy(&bytes.to_vec())
                ),
                Err(error) => failure = Some(error),
            }
        })?;
    }
    println!(
        "{} messages in {} WRITEs",
        endpoint.stats().messages_sent,
        endpoint.stats().batches_sent
    );
    endpoint.close();
    while endpoint.closed().is_none() {
        context.wait(None)?;
        context.poll(|_, _| ())?;
    }
    failure.map_or(Ok(()), |error| Err(error.into()))
}
