//! `server.rs` with futures: a task of tokio answers each request.
//!
//! In two terminals: `cargo run -p copyrpc --example async_server`, and `async_client` in place of
//! `async_server`; both take an `ADDRESS:PORT`. The server ends after Ctrl-C or SIGTERM, and with a
//! second argument after that number of requests. The plain `client` is served as well.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::thread;

use copyrpc::{AsyncServer, ServerRequest};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

fn main() {
    if let Err(error) = run() {
        eprintln!("async_server: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7479".to_owned());
    let requests = args
        .next()
        .map_or(Ok(u64::MAX), |requests| requests.parse())?;
    Runtime::new()?.block_on(serve(address, requests))
}

async fn serve(address: String, requests: u64) -> Result<(), Box<dyn std::error::Error>> {
    let server = AsyncServer::bind(address).await?;
    println!("listening on {}", server.local_addr());
    let (mut signals, stop) = (Signals::new([SIGINT, SIGTERM])?, server.stop_handle());
    thread::spawn(move || signals.forever().for_each(|_| stop.stop()));
    let mut tasks = JoinSet::new();
    for _ in 0..requests {
        let Some(request) = server.recv().await? else {
            break;
        };
        tasks.spawn(answer(request));
    }
    tasks.join_all().await;
    Ok(())
}

async fn answer(request: ServerRequest) {
    let text = String::from_utf8_lossy(request.data()).into_owned();
    let answer = text.to_uppercase();
    println!("{text:?} -> {answer:?}");
    request.reply(answer);
}
