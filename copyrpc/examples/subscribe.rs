//! A server that calls its clients: three subscribers get the news of a publisher, until the server
//! ends. One subscriber disconnects before.
//!
//! `cargo run -p copyrpc --example subscribe`
//!
//! The facade's clients are not called, so a subscriber is a `Context` with one endpoint. The
//! server calls back over the endpoint of the request by which a client subscribed; the call needs
//! no reply, and its end only changes the server's counters.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use copyrpc::{Client, Context, ContextBuilder, Endpoint, EndpointConfig, Server, default_device};

type Failure = Box<dyn Error + Send + Sync>;

const NEWS: [&str; 3] = ["one", "two", "three"];
/// Maximum time of a subscriber to take the news.
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves until a client ends it. The drop of the server waits until the last news has arrived, and
/// then sends a close to the subscribers.
fn serve(tell: &Sender<SocketAddr>) -> Result<(), Failure> {
    let mut server = Server::bind("127.0.0.1:0")?;
    tell.send(server.local_addr()?)?;
    let mut subscribers: Vec<Endpoint<()>> = Vec::new();
    loop {
        server.step()?;
        while let Some(request) = server.recv() {
            let message = request.data().to_vec();
            match &message[..] {
                b"subscribe" => subscribers.push(request.endpoint()),
                b"stop" => {
                    let _gone = request.reply(&[]);
                    return Ok(());
                }
                // A subscriber that has disconnected is removed. So is a subscriber for which there
                // is no credit or room, because it does not take the news; its connection is ended,
                // so that it detects this.
                news => subscribers.retain(|subscriber| {
                    let takes = subscriber.call_within(news, (), 0, PATIENCE).is_ok();
                    if !takes {
                        subscriber.close();
                    }
                    takes
                }),
            }
            // A client that has disconnected meanwhile takes no reply.
            let _gone = request.reply(&[subscribers.len() as u8]);
        }
    }
}

/// Subscribes, and takes `most` news at most. Returns the news that arrived before the server
/// ended.
fn subscribe(address: SocketAddr, most: usize, ready: &Sender<()>) -> Result<Vec<String>, Failure> {
    let context: Context<()> = ContextBuilder::new(default_device()).build()?;
    // The socket stays open: its end would make the server check whether the client has died.
    let socket = TcpStream::connect(address)?;
    let endpoint = context.connect_over(&EndpointConfig::default(), &socket)?;
    endpoint.call(b"subscribe", (), 1)?;
    let mut news = Vec::new();
    // The reason why the server's end of the connection is closed is no error here.
    while endpoint.closed().is_none() && news.len() < most {
        context.poll(|(), subscribed| {
            if subscribed.is_ok() {
                let _waits = ready.send(());
            }
        })?;
        while let Some(request) = context.recv() {
            news.push(String::from_utf8_lossy(&request.data().to_vec()).into_owned());
            let _gone = request.reply(&[]);
        }
        context.wait(Some(PATIENCE))?;
    }
    news.truncate(most);
    Ok(news)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("subscribe: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Failure> {
    let ((tell, told), (ready, is_ready)) = (channel(), channel());
    let serving = thread::spawn(move || serve(&tell));
    let address = told.recv()?;
    let subscribers = [usize::MAX, usize::MAX, 1].map(|most| {
        let ready = ready.clone();
        (
            most.min(NEWS.len()),
            thread::spawn(move || subscribe(address, most, &ready)),
        )
    });
    drop(ready);
    for _ in &subscribers {
        is_ready.recv()?;
    }
    let mut publisher = Client::connect(address)?;
    for news in NEWS {
        println!(
            "{news:?} to {} subscribers",
            publisher.call(news.as_bytes())?[0]
        );
    }
    publisher.call(b"stop")?;
    for (count, subscriber) in subscribers {
        let news = subscriber.join().map_err(|_| "a subscriber panicked")??;
        println!("took {news:?}");
        if news != NEWS[..count] {
            return Err("news are missing".into());
        }
    }
    serving.join().map_err(|_| "the server panicked")?
}
