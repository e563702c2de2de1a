//! Data above the message limit: the client lends memory in a small request; the server READs the
//! memory, WRITEs its result back, and answers. Both sides are in one thread, in the order of the
//! steps.
//!
//! `cargo run --release -p copyrpc --example bulk -- [mebibytes]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::collections::HashMap;
use std::error::Error;

use copyrpc::{
    Context, ContextBuilder, EndpointConfig, Memory, RecvHandle, RemoteMemory, default_device,
};

/// Bytes of one READ or WRITE. A server keeps memory of this size for each request in work, however
/// large the requests are.
const PIECE: usize = 1 << 20;

/// A request in work at the server: its READ or its WRITE is under way.
struct Job {
    request: RecvHandle<u64>,
    lent: RemoteMemory,
    piece: Memory,
    done: u64,
    is_reading: bool,
}

impl Job {
    /// Returns the length of the next piece, or of the piece under way.
    fn len(&self) -> usize {
        PIECE.min((self.lent.len() - self.done) as usize)
    }

    /// READs the next piece; the completion brings `number` back.
    fn read(&mut self, number: u64) -> Result<(), Box<dyn Error>> {
        self.is_reading = true;
        Ok(self.request.endpoint().rdma_read(
            &self.piece,
            0,
            &self.lent,
            self.done,
            self.len(),
            number,
        )?)
    }

    /// WRITEs the piece back in upper case.
    fn write(&mut self, number: u64) -> Result<(), Box<dyn Error>> {
        let mut bytes = vec![0; self.len()];
        self.piece.read(0, &mut bytes)?;
        bytes.make_ascii_uppercase();
        self.piece.write(0, &bytes)?;
        self.is_reading = false;
        Ok(self.request.endpoint().rdma_write(
            &self.piece,
            0,
            &self.lent,
            self.done,
            bytes.len(),
            number,
        )?)
    }
}

fn main() {
    if let Err(error) = run() {
        eprintln!("bulk: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mebibytes: usize = std::env::args().nth(1).map_or(Ok(64), |arg| arg.parse())?;
    let client: Context<()> = ContextBuilder::new(default_device()).build()?;
    let server: Context<u64> = ContextBuilder::new(default_device()).build()?;
    let (a, b) = (
        client.create_endpoint(&EndpointConfig::default())?,
        server.create_endpoint(&EndpointConfig::default())?,
    );
    let (record_a, record_b) = (a.local_info(), b.local_info());
    let (endpoint, _peer) = (a.connect(&record_b)?, b.connect(&record_a)?);

    let lent = client.alloc(mebibytes << 20)?;
    lent.write(0, &vec![b'x'; lent.len()])?;
    endpoint.call(&lent.remote().encode(), (), 8)?;
    let mut jobs = HashMap::new();
    let mut next = 0;
    let mut answer = None;
    while answer.is_none() {
        client.poll(|(), outcome| answer = Some(outcome.map(|bytes| bytes.read::<u64>())))?;
        let mut ended = Vec::new();
        server.poll(|number, outcome| ended.push((number, outcome.map(|_| ()))))?;
        for (number, outcome) in ended {
            outcome?;
            let Some(mut job) = jobs.remove(&number) else {
                continue;
            };
            match job {
                Job {
                    is_reading: true, ..
                } => job.write(number)?,
                _ => {
                    job.done += job.len() as u64;
                    if job.done == job.lent.len() {
                        job.request.reply(&job.done.to_le_bytes())?;
                        continue;
                    }
                    job.read(number)?;
                }
            }
            jobs.insert(number, job);
        }
        while let Some(request) = server.recv() {
            let lent = RemoteMemory::decode(&request.data().read().ok_or("a short request")?)?;
            let mut job = Job {
                request,
                lent,
                piece: server.alloc(PIECE)?,
                done: 0,
                is_reading: false,
            };
            job.read(next)?;
            jobs.insert(next, job);
            next += 1;
        }
    }
    let mut bytes = vec![0; lent.len()];
    lent.read(0, &mut bytes)?;
    let changed = bytes.iter().filter(|byte| **byte == b'X').count();
    println!(
        "the server answered {answer:?}; {changed} of {} bytes were changed",
        bytes.len()
    );
    if changed == bytes.len() {
        Ok(())
    } else {
        Err("not all bytes were changed".into())
    }
}
