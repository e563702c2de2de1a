//! Answers the requests of its clients with the same text in upper case, and prints each exchange.
//!
//! In two terminals: `cargo run -p scalerpc --example grouped_server`, and `grouped_client` in place of `grouped_server`; both take an
//! `ADDRESS:PORT`. The socket there only carries the three records by which the two ends meet. That a client is gone shows in a WRITE to it, at
//! latest a second later. With a second argument, the server ends when so many clients were there and are gone.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::Duration;

use scalerpc::mlx5::DeviceSpec;
use scalerpc::{HandlerError, Handlers, RdmaServer, ServerConfig};

/// The type of the only handler.
const UPPERCASE: u16 = 1;
/// Requests answered in one step.
const BUDGET: usize = 64;
/// How long a client that connects may keep the others from being served.
const PATIENCE: Duration = Duration::from_millis(500);
/// Between two steps while there is nothing to do.
const NAP: Duration = Duration::from_micros(50);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let listener = TcpListener::bind(args.next().as_deref().unwrap_or("127.0.0.1:7472"))?;
    let most = args.next().map_or(Ok(u32::MAX), |clients| clients.parse())?;
    let mut server = RdmaServer::new(&DeviceSpec::default(), &ServerConfig::default())?;
    let mut handlers = Handlers::new(server.core().layout().max_payload());
    handlers.insert(UPPERCASE, |request: &[u8], response: &mut [u8]| {
        let text = std::str::from_utf8(request).map_err(|_| HandlerError)?;
        let answer = text.to_uppercase();
        println!("{text:?} -> {answer:?}");
        // Upper case can be longer; a length that does not fit is told to the caller.
        if let Some(place) = response.get_mut(..answer.len()) {
            place.copy_from_slice(answer.as_bytes());
        }
        Ok(answer.len())
    });
    println!("listening on {}", listener.local_addr()?);

    listener.set_nonblocking(true)?;
    let mut met = 0;
    while met < most || server.clients() > 0 {
        match listener.accept() {
            Ok((mut stream, peer)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                match server.accept_over(&mut stream) {
                    Ok(_) => println!("connected with {peer}, on {}", server.device().info().name),
                    Err(error) => println!("{peer}: {error}"),
                }
                met += 1;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if server.step(&mut handlers, BUDGET) == 0 {
            std::thread::sleep(NAP);
        }
    }
    println!("{} requests in {} slices", server.core().stats().accepted, server.core().stats().slices);
    Ok(())
}
