//! Sends each word to the server as a request, one at a time, and prints the answers. See
//! `grouped_server.rs`.
//!
//! `cargo run -p scalerpc --example grouped_client -- [ADDRESS:PORT [WORD...]]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use scalerpc::Client;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut client = Client::connect(args.next().as_deref().unwrap_or("127.0.0.1:7480"))?;
    let words: Vec<String> = args.collect();
    for word in if words.is_empty() {
        vec!["hello".to_owned(), "message".to_owned(), "pool".to_owned()]
    } else {
        words
    } {
        let answer = client.call(word.as_bytes())?;
        println!("{word:?} -> {:?}", String::from_utf8_lossy(answer));
    }
    Ok(())
}
