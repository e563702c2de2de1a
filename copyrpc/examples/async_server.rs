//! `server.rs` with futures: answers the requests of one client after the other with the same text in upper case. Sleeps while idle.
//!
//! In two terminals: `cargo run -p copyrpc --features async --example async_server`, and `async_client` in place of `async_server`; both
//! take an `ADDRESS:PORT`. With a second argument, the server ends after so many clients. The plain `client` is served as well.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::net::{TcpListener, TcpStream};

use copyrpc::future::{AsyncContext, AsyncRequest};
use copyrpc::mlx5::DeviceSpec;
use copyrpc::{ContextBuilder, EndpointConfig};

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
    let context = AsyncContext::new(ContextBuilder::new(DeviceSpec::default()).build()?);
    let endpoint = context.create_endpoint(&EndpointConfig::default())?.connect_over(stream)?;
    println!("connected with {}, on {}", stream.peer_addr()?, context.device_info().name);
    context.run_until(async {
        // Until the client closes the connection.
        while let Some(request) = context.recv().await {
            answer(request)?;
        }
        println!("the client is gone after {} requests: {:?}", endpoint.stats().replies, endpoint.closed());
        Ok(())
    })?
}

/// The answer leaves once the future of the server waits again, with all others of that time.
fn answer(request: AsyncRequest) -> Result<(), Box<dyn Error>> {
    let text = String::from_utf8_lossy(&request.data().to_vec()).into_owned();
    let answer = text.to_uppercase();
    println!("{text:?} -> {answer:?}");
    Ok(request.reply(answer.as_bytes())?)
}
