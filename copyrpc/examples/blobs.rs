//! A store of blobs up to 1 GiB: two clients put blobs and get them back, each in one call, while
//! the server is restarted. The parts in which they travel are the library's business. Sums are
//! checked at both ends.
//!
//! `cargo run --release -p copyrpc --example blobs -- [mebibytes]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use copyrpc::methods::MethodError;
use copyrpc::parts::{self, PartsError, Reassembler};
use copyrpc::{Client, ClientError, ClientOptions, Ending, Server, StopHandle, service};
use serde::{Deserialize, Serialize};

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Failure = MethodError<Problem, PartsError<ClientError>>;

/// Maximum bytes of a blob, and of a blob with the other arguments of a method.
const MAX_BLOB: usize = 1 << 30;
const MAX_BYTES: usize = MAX_BLOB + 4096;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Problem {
    Missing,
    Damaged,
}

service! {
    /// Blobs and their sums.
    mod blobs {
        /// Keeps a blob. Returns the number of blobs.
        fn put(name: String, sum: u64, blob: Vec<u8>) -> Result<u64, Problem> = 1;
        fn get(name: String) -> Result<Vec<u8>, Problem> = 2;
    }
}

/// The store. It outlives its server; to outlive the process, blobs would have to be in files.
#[derive(Default)]
struct Blobs(HashMap<String, Vec<u8>>);

impl blobs::Service for Blobs {
    fn put(&mut self, name: String, sum: u64, blob: Vec<u8>) -> Result<u64, Problem> {
        if sum_of(&blob) != sum {
            return Err(Problem::Damaged);
        }
        self.0.insert(name, blob);
        Ok(self.0.len() as u64)
    }

    fn get(&mut self, name: String) -> Result<Vec<u8>, Problem> {
        self.0.get(&name).cloned().ok_or(Problem::Missing)
    }
}

/// FNV-1a over words of 8 bytes.
fn sum_of(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| {
        chunk
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte))
    };
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |sum, chunk| {
        (sum ^ word(chunk)).wrapping_mul(0x100_0000_01b3)
    })
}

fn serve(
    address: SocketAddr,
    mut store: Blobs,
    tell: &Sender<(SocketAddr, StopHandle)>,
) -> Result<Blobs, AnyError> {
    let mut server = Server::bind(address)?;
    // A blob of each client at once.
    let mut parts = Reassembler::new(server.stop_handle(), MAX_BYTES, 4 * MAX_BYTES);
    tell.send((server.local_addr()?, server.stop_handle()))?;
    server.serve(|part| parts.answer(&part, |request| blobs::answer(&mut store, &request)))?;
    Ok(store)
}

/// Calls until the call has its result. Repeats it if no handler got it (even if the connection
/// ended in the middle of a blob), and if its reply was lost, because every method of this service
/// may run twice.
fn repeat<T>(mut call: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    loop {
        match call() {
            Err(error) if error.is_retryable() => println!("once more: {error}"),
            Err(MethodError::Call(error @ (PartsError::Unfetched(_) | PartsError::ReplyLost))) => {
                println!("once more: {error}")
            }
            outcome => return outcome,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn work(address: SocketAddr, name: &str, bytes: usize) -> Result<(), AnyError> {
    // Each call fetches at most this part of the reply.
    let options = ClientOptions {
        max_reply: Some(128 << 10),
        ..ClientOptions::default()
    };
    let client = Client::with_options(address, &options)?;
    let (max_request, max_reply) = (client.max_request(), client.max_reply());
    let mut client = blobs::Client::new(parts::Client::new(client, max_request, max_reply));
    let blob: Vec<u8> = (0..bytes).map(|n| (n ^ n >> 8 ^ n >> 16) as u8).collect();
    let (sum, start) = (sum_of(&blob), Instant::now());
    repeat(|| client.put(name.to_owned(), sum, blob.clone()))?;
    let put = start.elapsed();
    let same = repeat(|| client.get(name.to_owned()))?;
    println!(
        "{name}: {} MiB there in {put:?}, back in {:?}",
        bytes >> 20,
        start.elapsed() - put
    );
    assert!(sum_of(&same) == sum && same == blob);
    assert!(matches!(
        client.get("other".to_owned()),
        Err(MethodError::Failed(Problem::Missing))
    ));
    Ok(())
}

fn run() -> Result<(), AnyError> {
    let mebibytes: usize = std::env::args().nth(1).map_or(Ok(16), |arg| arg.parse())?;
    let (tell, told) = std::sync::mpsc::channel();
    let start = |address, store, tell| thread::spawn(move || serve(address, store, &tell));
    let mut server = start(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        Blobs::default(),
        tell.clone(),
    );
    let (address, mut stop) = told.recv()?;
    let clients = ["one", "two"]
        .map(|name| thread::spawn(move || work(address, name, (mebibytes << 20).min(MAX_BLOB))));
    thread::sleep(Duration::from_millis(20));
    // Blobs that are on their way back arrive before the server ends.
    stop.stop();
    server = start(
        address,
        server.join().map_err(|_| "the server panicked")??,
        tell,
    );
    (_, stop) = told.recv()?;
    clients
        .into_iter()
        .try_for_each(|client| client.join().map_err(|_| "a client panicked")?)?;
    stop.stop();
    println!(
        "the store has {} blobs",
        server.join().map_err(|_| "the server panicked")??.0.len()
    );
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("blobs: {error}");
        std::process::exit(1);
    }
}
