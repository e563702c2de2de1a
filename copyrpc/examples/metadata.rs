//! A metadata service with five methods. The server is restarted with its files while client
//! processes continue.
//!
//! `cargo run --release -p copyrpc --example metadata`; `COPYRPC_DEVICE=mlx5_0` takes the device
//! mlx5_0 in place of the software HCA.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::mpsc::Sender;
use std::time::Duration;
use std::{env, thread};

use copyrpc::methods::MethodError;
use copyrpc::{Client, ClientError, ClientOptions, Ending, Server, StopHandle, service};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Attributes {
    bytes: u64,
    version: u32,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Problem {
    Missing,
    Exists,
}

service! {
    /// Files and their attributes.
    mod metadata {
        /// Adds a file.
        fn create(path: String, bytes: u64) -> Result<Attributes, Problem> = 1;
        /// Returns the attributes of a file.
        fn stat(path: String) -> Result<Attributes, Problem> = 2;
        /// Renames a file.
        fn rename(from: String, to: String) -> Result<(), Problem> = 3;
        /// Removes a file.
        fn remove(path: String) -> Result<(), Problem> = 4;
        /// Returns the paths that begin so.
        fn list(prefix: String) -> Result<Vec<String>, Problem> = 5;
    }
}

type AnyError = Box<dyn Error + Send + Sync>;
type Files = BTreeMap<String, Attributes>;

impl metadata::Service for Files {
    fn create(&mut self, path: String, bytes: u64) -> Result<Attributes, Problem> {
        if self.contains_key(&path) {
            return Err(Problem::Exists);
        }
        let attributes = Attributes { bytes, version: 1 };
        self.insert(path, attributes.clone());
        Ok(attributes)
    }

    fn stat(&mut self, path: String) -> Result<Attributes, Problem> {
        self.get(&path).cloned().ok_or(Problem::Missing)
    }

    fn rename(&mut self, from: String, to: String) -> Result<(), Problem> {
        let attributes = BTreeMap::remove(self, &from).ok_or(Problem::Missing)?;
        self.insert(
            to,
            Attributes {
                version: attributes.version + 1,
                ..attributes
            },
        );
        Ok(())
    }

    fn remove(&mut self, path: String) -> Result<(), Problem> {
        BTreeMap::remove(self, &path)
            .map(drop)
            .ok_or(Problem::Missing)
    }

    fn list(&mut self, prefix: String) -> Result<Vec<String>, Problem> {
        Ok(self
            .range(prefix.clone()..)
            .map(|(path, _)| path.clone())
            .take_while(|path| path.starts_with(&prefix))
            .collect())
    }
}

fn serve(
    address: SocketAddr,
    mut files: Files,
    tell: &Sender<(SocketAddr, StopHandle)>,
) -> Result<Files, AnyError> {
    let mut server = Server::bind(address)?;
    tell.send((server.local_addr()?, server.stop_handle()))?;
    server.serve(|request| metadata::answer(&mut files, &request))?;
    Ok(files)
}

/// Calls until the call has its result. Repeats it if no handler got it: then even a rename may be
/// repeated.
fn repeat<T>(
    mut call: impl FnMut() -> Result<T, MethodError<Problem, ClientError>>,
) -> Result<T, MethodError<Problem, ClientError>> {
    loop {
        match call() {
            Err(error) if error.is_retryable() => std::thread::sleep(Duration::from_millis(1)),
            outcome => return outcome,
        }
    }
}

/// The work of a client process.
fn work(address: &str, name: &str) -> Result<(), AnyError> {
    let options = ClientOptions {
        timeout: Some(Duration::from_secs(5)),
        ..ClientOptions::default()
    };
    let mut client = metadata::Client::new(Client::with_options(address, &options)?);
    for file in 0..200 {
        let [draft, path] = ["draft", "file"].map(|kind| format!("/{name}/{kind}{file:03}"));
        repeat(|| client.create(draft.clone(), file))?;
        repeat(|| client.rename(draft.clone(), path.clone()))?;
        assert_eq!(
            repeat(|| client.stat(path.clone()))?,
            Attributes {
                bytes: file,
                version: 2
            }
        );
        assert!(matches!(
            repeat(|| client.remove(draft.clone())),
            Err(MethodError::Failed(Problem::Missing))
        ));
    }
    assert_eq!(repeat(|| client.list(format!("/{name}/")))?.len(), 200);
    Ok(())
}

fn run() -> Result<(), AnyError> {
    if let [_, address, name] = &*env::args().collect::<Vec<_>>() {
        return work(address, name);
    }
    let (tell, told) = std::sync::mpsc::channel();
    let start = |address, files, tell| thread::spawn(move || serve(address, files, &tell));
    let mut server = start(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        Files::new(),
        tell.clone(),
    );
    let (address, mut stop) = told.recv()?;
    let client = |number: u32| {
        Command::new(env::current_exe()?)
            .args([address.to_string(), format!("client{number}")])
            .spawn()
    };
    let clients = (0..4).map(client).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(50));
        stop.stop();
        let files = server.join().map_err(|_| "the server panicked")??;
        server = start(address, files, tell.clone());
        (_, stop) = told.recv()?;
    }
    for mut client in clients {
        assert!(client.wait()?.success());
    }
    stop.stop();
    let files = server.join().map_err(|_| "the server panicked")??;
    println!(
        "4 clients have {} files; the server was restarted 3 times",
        files.len()
    );
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("metadata: {error}");
        std::process::exit(1);
    }
}
