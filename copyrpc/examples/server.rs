//! Answers the requests of one client after the other with the same text in upper case, and prints each exchange. Sleeps while idle.
//!
//! In two terminals: `cargo run -p copyrpc --example server`, and `client` in place of `server`; both take an `ADDRESS:PORT`. The socket
//! there only swaps the records of the endpoints, and its end tells that the client is gone.
//! With a second argument, the server ends after so many clients.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use copyrpc::mlx5::DeviceSpec;
use copyrpc::{Context, ContextBuilder, EndpointConfig, RecvHandle};

/// How often the server looks whether its client is there.
const LOOK: Duration = Duration::from_millis(100);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let listener = TcpListener::bind(args.next().as_deref().unwrap_or("127.0.0.1:7471"))?;
    let clients = args.next().map_or(Ok(usize::MAX), |clients| clients.parse())?;
    println!("listening on {}", listener.local_addr()?);
    for stream in listener.incoming().take(clients) {
        serve(&stream?)?;
    }
    Ok(())
}

fn serve(stream: &TcpStream) -> Result<(), Box<dyn Error>> {
    let context: Context<()> = ContextBuilder::new(DeviceSpec::default()).build()?;
    let endpoint = context.connect_over(&EndpointConfig::default(), stream)?;
    println!("connected with {}, on {}", stream.peer_addr()?, context.device_info().name);
    stream.set_nonblocking(true)?;
    while endpoint.closed().is_none() && is_there(stream) {
        // Posts what was answered, then sleeps until something arrives.
        context.wait(Some(LOOK))?;
        context.poll(|(), _| ())?;
        while let Some(request) = context.recv() {
            answer(request)?;
        }
    }
    println!("the client is gone after {} requests", endpoint.stats().replies);
    Ok(())
}

/// It sends nothing more, so there is nothing to read before its end.
fn is_there(stream: &TcpStream) -> bool {
    stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn answer(request: RecvHandle<()>) -> Result<(), Box<dyn Error>> {
    let text = String::from_utf8_lossy(&request.data().to_vec()).into_owned();
    let answer = text.to_uppercase();
    println!("{text:?} -> {answer:?}");
    Ok(request.reply(answer.as_bytes())?)
}
