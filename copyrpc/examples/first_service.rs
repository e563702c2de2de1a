//! The service of `docs/tutorial.md`: counters with names, a server and many clients, each in a
//! process of its own.
//!
//! `cargo run -p copyrpc --example first_service` plays all of it: it starts a server and nine
//! clients, kills a client, and checks what the others counted. `-- serve ADDRESS` and
//! `-- count ADDRESS NAME TIMES` are the two programs of the tutorial.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use copyrpc::{Client, Server};

const CLIENTS: usize = 8;
const TIMES: u64 = 1000;

fn serve(address: &str) -> Result<(), Box<dyn Error>> {
    let mut server = Server::bind(address)?;
    println!("listening on {}", server.local_addr()?);
    let mut counters = HashMap::<Vec<u8>, u64>::new();
    server.serve(|request| {
        let counter = counters.entry(request.to_vec()).or_default();
        *counter += 1;
        counter.to_string()
    })?;
    Ok(())
}

fn count(address: &str, name: &str, times: u64) -> Result<(), Box<dyn Error>> {
    let mut client = Client::connect(address)?;
    let mut reply = Vec::new();
    for _ in 0..times {
        reply = client
            .call_within(name.as_bytes(), Duration::from_secs(5))?
            .to_vec();
    }
    println!("{name}: {}", String::from_utf8(reply)?);
    Ok(())
}

/// A process of this program, which does not outlive the value.
struct Process(Child);

impl Process {
    fn start(arguments: &[&str]) -> Result<Self, Box<dyn Error>> {
        Ok(Self(
            Command::new(std::env::current_exe()?)
                .args(arguments)
                .stdout(Stdio::piped())
                .spawn()?,
        ))
    }

    /// The next line that it prints.
    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().ok_or("no output")?).read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL. It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn all() -> Result<(), Box<dyn Error>> {
    let mut server = Process::start(&["serve", "127.0.0.1:0"])?;
    let line = server.line()?;
    let address = line
        .strip_prefix("listening on ")
        .ok_or("the server did not start")?;

    let doomed = Process::start(&["count", address, "doomed", &u64::MAX.to_string()])?;
    let names: Vec<String> = (0..CLIENTS)
        .map(|number| format!("client {number}"))
        .collect();
    let mut clients = Vec::new();
    for name in &names {
        clients.push(Process::start(&[
            "count",
            address,
            name,
            &TIMES.to_string(),
        ])?);
    }
    // In the middle of its calls.
    std::thread::sleep(Duration::from_millis(20));
    drop(doomed);

    for (name, client) in names.iter().zip(&mut clients) {
        assert_eq!(client.line()?, format!("{name}: {TIMES}"));
    }
    println!("{CLIENTS} clients counted to {TIMES} each while another one was killed");

    // The server has its counter still, and serves every newcomer.
    let after = Process::start(&["count", address, "doomed", "1"])?.line()?;
    assert!(after.starts_with("doomed: "), "{after:?}");
    println!("the killed client's counter goes on");
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("first_service: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => all(),
        ["serve", address] => serve(address),
        ["count", address, name, times] => count(address, name, times.parse()?),
        _ => Err("usage: first_service [serve ADDRESS | count ADDRESS NAME TIMES]".into()),
    }
}
