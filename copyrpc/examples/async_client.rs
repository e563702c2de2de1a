//! `client.rs` with futures: sends each word to the server as a request, all at once, and prints the answers. See `async_server.rs`.
//!
//! `cargo run -p copyrpc --features async --example async_client -- [ADDRESS:PORT [WORD...]]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::future::{Future, poll_fn};
use std::net::TcpStream;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use copyrpc::future::AsyncContext;
use copyrpc::mlx5::DeviceSpec;
use copyrpc::{ContextBuilder, EndpointConfig};

/// Most bytes of an answer.
const ANSWER: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7471".into());
    let mut words: Vec<String> = args.collect();
    if words.is_empty() {
        words = ["hello", "remote", "memory"].map(String::from).to_vec();
    }
    let context = AsyncContext::new(ContextBuilder::new(DeviceSpec::default()).build()?);
    let pending = context.create_endpoint(&EndpointConfig::default())?;
    let endpoint = context.endpoint(pending.connect_over(TcpStream::connect(address)?)?);

    let call = |word| endpoint.call(str::as_bytes(word), ANSWER).within(Duration::from_secs(5));
    let (mut calls, mut failure) = (words.iter().map(|word| (word, call(word))).collect::<Vec<_>>(), None);
    // All at once, as the `join_all` of a library of futures would.
    context.run_until(poll_fn(|task| {
        calls.retain_mut(|(word, call)| match Pin::new(call).poll(task) {
            Poll::Pending => true,
            Poll::Ready(Ok(answer)) => {
                println!("{word:?} -> {:?}", String::from_utf8_lossy(&answer));
                false
            }
            Poll::Ready(Err(error)) => {
                failure = Some(error);
                false
            }
        });
        if calls.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }))?;
    println!("{} messages in {} WRITEs", context.stats().messages_sent, context.stats().batches_sent);
    endpoint.endpoint().close();
    context.run_until(endpoint.closed())?;
    failure.map_or(Ok(()), |error| Err(error.into()))
}
