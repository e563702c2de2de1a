//! News by long polls: a reader's call stays at the server until there is news that the reader has
//! not seen, or until the time of the call ends.
//!
//! `cargo run -p copyrpc --example long_poll`
//!
//! In contrast to `subscribe` the readers are plain clients. A call that timed out keeps its part of
//! the credit until it is answered, so the server drops the calls that were given up.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use copyrpc::{Client, ClientError, RecvHandle, Server};

type Failure = Box<dyn Error + Send + Sync>;

const NEWS: [&str; 3] = ["one", "two", "three"];
/// Time between two news, and maximum time of a poll.
const PAUSE: Duration = Duration::from_millis(250);
const POLL: Duration = Duration::from_millis(100);

/// A call that waits for news, and the number of news that its reader has seen.
struct Poll {
    request: RecvHandle<()>,
    seen: usize,
}

/// Serves until a client ends it. A request is `?` and the number of news that a reader has seen,
/// `!` and a piece of news, or empty: the end.
fn serve(tell: &Sender<SocketAddr>) -> Result<(), Failure> {
    let mut server = Server::bind("127.0.0.1:0")?;
    tell.send(server.local_addr()?)?;
    let (mut news, mut polls): (Vec<String>, Vec<Poll>) = (Vec::new(), Vec::new());
    loop {
        server.step()?;
        while let Some(request) = server.recv() {
            let message = request.data().to_vec();
            let seen = message
                .strip_prefix(b"?")
                .and_then(|seen| seen.try_into().ok())
                .map(u64::from_le_bytes);
            // A client that has disconnected meanwhile takes no reply.
            let _gone = match (seen, message.strip_prefix(b"!")) {
                (Some(seen), _) => {
                    let seen = seen as usize;
                    polls.push(Poll { request, seen });
                    Ok(())
                }
                (_, Some(text)) => {
                    news.push(String::from_utf8_lossy(text).into_owned());
                    request.reply(&[])
                }
                _ if message.is_empty() => {
                    let _gone = request.reply(&[]);
                    return Ok(());
                }
                _ => request.refuse(),
            };
        }
        polls.retain(|poll| poll.request.is_wanted());
        let (ready, waiting): (Vec<_>, _) =
            polls.into_iter().partition(|poll| poll.seen < news.len());
        polls = waiting;
        for Poll { request, seen } in ready {
            let _gone = request.reply(news[seen].as_bytes());
        }
    }
}

/// Reads all news, each once and in order. Returns the number of polls without news, too.
fn read(address: SocketAddr) -> Result<(Vec<String>, u32), Failure> {
    let mut client = Client::connect(address)?;
    let (mut news, mut without) = (Vec::new(), 0);
    while news.len() < NEWS.len() {
        match client.call_within(
            &[b"?", &(news.len() as u64).to_le_bytes()[..]].concat(),
            POLL,
        ) {
            Ok(piece) => news.push(String::from_utf8(piece.to_vec())?),
            // To ask again changes nothing at the server.
            Err(ClientError::TimedOut) => without += 1,
            Err(error) if error.is_retryable() => without += 1,
            Err(error) => return Err(error.into()),
        }
    }
    Ok((news, without))
}

fn main() {
    if let Err(error) = run() {
        eprintln!("long_poll: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Failure> {
    let (tell, told) = channel();
    let serving = thread::spawn(move || serve(&tell));
    let address = told.recv()?;
    let readers = [(); 3].map(|()| thread::spawn(move || read(address)));
    let mut publisher = Client::connect(address)?;
    for news in NEWS {
        thread::sleep(PAUSE);
        publisher.call(format!("!{news}").as_bytes())?;
    }
    for reader in readers {
        let (news, without) = reader.join().map_err(|_| "a reader panicked")??;
        println!("read {news:?}; {without} polls had no news");
        if news != NEWS {
            return Err("news are missing".into());
        }
    }
    publisher.call(&[])?;
    serving.join().map_err(|_| "the server panicked")?
}
