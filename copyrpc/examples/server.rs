//! Answers the requests of its clients, however many at once, with the same text in upper case.
//!
//! In two terminals: `cargo run -p copyrpc --example server`, and `client` in place of `server`;
//! both take an `ADDRESS:PORT`. The server ends after Ctrl-C or SIGTERM, and with a second argument
//! after that number of requests. With `COPYRPC_DEVICE=mlx5_0` both take that device in place of
//! the software HCA.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::thread;

use copyrpc::Server;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() {
    if let Err(error) = run() {
        eprintln!("server: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut server = Server::bind(args.next().as_deref().unwrap_or("127.0.0.1:7479"))?;
    let mut to_come = args
        .next()
        .map_or(Ok(u64::MAX), |requests| requests.parse())?;
    println!("listening on {}", server.local_addr()?);
    let (mut signals, stop) = (Signals::new([SIGINT, SIGTERM])?, server.stop_handle());
    thread::spawn(move || signals.forever().for_each(|_| stop.stop()));
    let stop = server.stop_handle();
    server.serve(|request| {
        let text = String::from_utf8_lossy(&request.to_vec()).into_owned();
        let answer = text.to_uppercase();
        println!("{text:?} -> {answer:?}");
        to_come -= 1;
        if to_come == 0 {
            stop.stop();
        }
        answer
    })?;
    Ok(())
}
