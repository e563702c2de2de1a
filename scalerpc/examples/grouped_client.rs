//! Sends each word to the server as a request, as many at once as there are slots, and prints the answers. See `grouped_server.rs`.
//!
//! `cargo run -p scalerpc --example grouped_client -- [ADDRESS:PORT [WORD...]]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::HashMap;
use std::error::Error;
use std::net::TcpStream;

use scalerpc::RdmaClient;
use scalerpc::mlx5::DeviceSpec;

/// The type of the server's only handler.
const UPPERCASE: u16 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7472".into());
    let mut words: Vec<String> = args.collect();
    if words.is_empty() {
        words = ["hello", "message", "pool"].map(String::from).to_vec();
    }
    let mut stream = TcpStream::connect(address)?;
    let mut client = RdmaClient::connect_over(&DeviceSpec::default(), &mut stream)?;

    let mut response = vec![0; client.core().layout().max_payload()];
    let (mut outstanding, mut unsent) = (HashMap::new(), words.iter());
    while !outstanding.is_empty() || !unsent.as_slice().is_empty() {
        // A call that is refused for want of a slot is made after the next poll.
        while let Some(word) = unsent.as_slice().first() {
            match client.call(UPPERCASE, word.as_bytes()) {
                Ok(handle) => drop(outstanding.insert(handle, word)),
                Err(error) if error.is_retryable() => break,
                Err(error) => return Err(error.into()),
            }
            unsent.next();
        }
        client.poll();
        while let Some(completion) = client.poll_completion(&mut response) {
            let word = outstanding.remove(&completion.handle).ok_or("an answer to no call")?;
            println!("{word:?} -> {:?}", String::from_utf8_lossy(&response[..completion.outcome?]));
        }
        std::thread::yield_now();
    }
    let stats = client.core().stats();
    println!("{} calls, {} of them written straight into the pool", stats.calls, stats.direct);
    Ok(())
}
