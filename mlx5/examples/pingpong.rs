//! Two processes exchange messages over one connection, on the software HCA or on DEVICE, for
//! example `mlx5_0`.
//!
//! `cargo run --release -p mlx5 --example pingpong [DEVICE [ROUNDS]]`
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

use mlx5::{
    Access, ConnectOptions, Cq, Device, Inline, Mr, Pd, QpAddress, QpConfig, RcQp, ReceiveSource,
    Send, Signal,
};

/// Bytes of a message.
const BYTES: usize = 4;

/// A connection with one message under way.
struct Connection {
    qp: RcQp,
    cq: Cq,
    buffer: Mr,
    has_sent: bool,
    has_arrived: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = Device::open(args.first().map_or("soft", |name| name))?;
    let rounds = args.get(1).map_or(Ok(100_000), |rounds| rounds.parse())?;
    let pd = device.alloc_pd()?;
    if let Ok(address) = std::env::var("PINGPONG") {
        return answer(connect(&device, &pd, TcpStream::connect(address)?)?, rounds);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let mut child = Command::new(std::env::current_exe()?)
        .args(&args)
        .env("PINGPONG", address)
        .spawn()?;
    ask(connect(&device, &pd, listener.accept()?.0)?, rounds)?;
    println!("on {}", device.info().name);
    if child.wait()?.success() {
        Ok(())
    } else {
        Err("the other process failed".into())
    }
}

/// Makes a queue pair with a receive posted, exchanges addresses by any means, here TCP, and
/// connects.
fn connect(device: &Device, pd: &Pd, mut stream: TcpStream) -> Result<Connection, Box<dyn Error>> {
    let cq = device.create_cq(8)?;
    let own = ReceiveSource::Own {
        depth: 1,
        max_sge: 1,
    };
    let mut qp = pd.create_qp(&cq, &cq, own, &QpConfig::default())?;
    let buffer = pd.alloc(BYTES, Access::LOCAL_WRITE)?;
    let mut peer = [0; QpAddress::LEN];
    stream.write_all(&qp.address().to_bytes())?;
    stream.read_exact(&mut peer)?;
    let peer = QpAddress::from_bytes(&peer).ok_or("not an address")?;
    qp.connect(&peer, &ConnectOptions::default())?;
    let mut connection = Connection {
        qp,
        cq,
        buffer,
        has_sent: false,
        has_arrived: false,
    };
    connection.post_receive()?;
    Ok(connection)
}

impl Connection {
    fn post_receive(&mut self) -> Result<(), Box<dyn Error>> {
        let buffer = self.buffer.sge(0, BYTES as u32)?;
        self.qp.post_receive(&[buffer], 0)?;
        self.qp.ring_receives();
        Ok(())
    }

    fn send(&mut self, message: [u8; BYTES]) -> Result<(), Box<dyn Error>> {
        let payload = Inline(&message[..]);
        self.qp.post(&Send { payload }, Signal::Always, 0)?;
        self.qp.ring();
        while !std::mem::take(&mut self.has_sent) {
            self.poll()?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<[u8; BYTES], Box<dyn Error>> {
        while !std::mem::take(&mut self.has_arrived) {
            self.poll()?;
        }
        let mut message = [0; BYTES];
        self.buffer.read(0, &mut message)?;
        self.post_receive()?;
        Ok(message)
    }

    fn poll(&mut self) -> Result<(), Box<dyn Error>> {
        let mut result = Ok(());
        self.cq.poll(8, |cqe| {
            result = result.and(cqe.result());
            self.has_sent |= self.qp.complete(&cqe).is_some();
            self.has_arrived |= self.qp.complete_receive(&cqe).is_some();
        });
        Ok(result?)
    }
}

fn ask(mut connection: Connection, rounds: u32) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    for round in 0..rounds {
        connection.send(round.to_le_bytes())?;
        assert_eq!(connection.receive()?, round.to_be_bytes());
    }
    println!(
        "{rounds} round trips, mean {:?}",
        start.elapsed() / rounds.max(1)
    );
    Ok(())
}

fn answer(mut connection: Connection, rounds: u32) -> Result<(), Box<dyn Error>> {
    for _ in 0..rounds {
        let mut message = connection.receive()?;
        message.reverse();
        connection.send(message)?;
    }
    Ok(())
}
