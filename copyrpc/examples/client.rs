//! Sends each word to the server as a request, one after the other, and prints the answers. See
//! `server.rs`.
//!
//! `cargo run -p copyrpc --example client -- [ADDRESS:PORT [WORD...]]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use copyrpc::Client;

fn main() {
    if let Err(error) = run() {
        eprintln!("client: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut client = Client::connect(args.next().as_deref().unwrap_or("127.0.0.1:7479"))?;
    let words: Vec<String> = args.collect();
    for word in if words.is_empty() {
        vec!["hello".to_owned(), "remote".to_owned(), "memory".to_owned()]
    } else {
        words
    } {
        let answer = client.call(word.as_bytes())?;
        println!("{word:?} -> {:?}", String::from_utf8_lossy(answer));
    }
    Ok(())
}
