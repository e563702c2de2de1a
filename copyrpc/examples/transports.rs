//! A service over three transports from one source: `serve` and `greet` know traits only, and the
//! scheme of an address chooses copyrpc, scalerpc, or ipc within the host.
//!
//! `cargo run -p copyrpc --example transports` plays a server and a client over each. With an
//! address (`127.0.0.1:0`, `scalerpc:127.0.0.1:0`, `shm:NAME`) it plays them there.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::sync::mpsc::{Sender, channel};

use copyrpc::methods::Request;
use copyrpc::{StopHandle, service};
use copyrpc_calls::{Bind, Client, Connection, Dial, Server};

service! {
    mod greetings {
        fn greet(name: String) -> Result<String, String> = 1;
    }
}

struct Greetings;

impl greetings::Service for Greetings {
    fn greet(&mut self, name: String) -> Result<String, String> {
        if name.is_empty() {
            Err("who is it?".to_owned())
        } else {
            Ok(format!("hello {name}"))
        }
    }
}

fn serve<S: Bind<String>>(
    address: String,
    bound: Sender<(String, StopHandle)>,
) -> Result<(), S::Error>
where
    for<'a> S::Request<'a>: Request,
{
    let mut server = Server::<S>::bind(address)?;
    if let Ok(address) = server.local_addr() {
        // The receiver is gone if the program ends.
        let _ = bound.send((address.to_string(), server.stop_handle()));
    }
    server.serve(|request| greetings::answer(&mut Greetings, &request))
}

fn greet<C>(address: String) -> Result<String, Box<dyn Error>>
where
    C: Dial<String, Error: Error> + Connection<Request = [u8], Reply = Vec<u8>>,
    C: Connection<ConnectError: 'static, EndReason: 'static>,
{
    let mut client = greetings::Client::new(Client::<C>::connect(address)?);
    Ok(client.greet("reader".to_owned())?)
}

fn play<S, C>(address: &str) -> Result<(), Box<dyn Error>>
where
    S: Bind<String, Error: Error>,
    for<'a> S::Request<'a>: Request,
    C: Dial<String, Error: Error> + Connection<Request = [u8], Reply = Vec<u8>>,
    C: Connection<ConnectError: 'static, EndReason: 'static>,
{
    let (tell, bound) = channel();
    let address = address.to_owned();
    let server = std::thread::spawn(move || serve::<S>(address, tell));
    let greeting = match bound.recv() {
        Ok((address, stop)) => {
            let greeting = greet::<C>(address);
            stop.stop();
            Some(greeting)
        }
        Err(_) => None,
    };
    server.join().map_err(|_| "the server panicked")??;
    println!("{}", greeting.ok_or("the server has no address")??);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut addresses: Vec<String> = std::env::args().skip(1).collect();
    if addresses.is_empty() {
        let name = format!("shm:transports-{}", std::process::id());
        addresses = vec!["127.0.0.1:0".into(), "scalerpc:127.0.0.1:0".into(), name];
    }
    for address in addresses {
        println!("{address}");
        match address.split_once(':') {
            Some(("shm", name)) => play::<ipc::bytes::Host, ipc::bytes::Caller>(name)?,
            Some(("scalerpc", address)) => play::<scalerpc::Host, scalerpc::Caller>(address)?,
            _ => play::<copyrpc::Host, copyrpc::Caller>(&address)?,
        }
    }
    Ok(())
}
