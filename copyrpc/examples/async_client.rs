//! `client.rs` with futures: sends each word to the server as a request, each from a task of tokio,
//! and prints the answers. See `async_server.rs`.
//!
//! `cargo run -p copyrpc --example async_client -- [ADDRESS:PORT [WORD...]]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use copyrpc::{AsyncClient, ClientError};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

fn main() {
    if let Err(error) = run() {
        eprintln!("async_client: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7479".to_owned());
    let mut words: Vec<String> = args.collect();
    if words.is_empty() {
        words = ["hello", "remote", "memory"].map(String::from).to_vec();
    }
    Ok(Runtime::new()?.block_on(send(address, words))?)
}

async fn send(address: String, words: Vec<String>) -> Result<(), ClientError> {
    let client = AsyncClient::connect(address).await?;
    // All calls share one connection; calls made together share one RDMA WRITE.
    let mut calls = JoinSet::new();
    for word in words {
        let client = client.clone();
        calls.spawn(async move {
            client
                .call(word.as_bytes())
                .await
                .map(|answer| (word, answer))
        });
    }
    for call in calls.join_all().await {
        let (word, answer) = call?;
        println!("{word:?} -> {:?}", String::from_utf8_lossy(&answer));
    }
    Ok(())
}
