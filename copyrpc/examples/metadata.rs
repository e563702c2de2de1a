//! A metadata service with five methods. The server is restarted with its files while client processes go on.
//!
//! `cargo run --release -p copyrpc --example metadata`; `COPYRPC_DEVICE=mlx5_0` takes that device in place of the software HCA.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::mpsc::Sender;
use std::time::Duration;
use std::{env, thread};

use copyrpc::methods::MethodError;
use copyrpc::{Client, ClientError, ClientOptions, Server, StopHandle, payload, service};

payload! {
    #[derive(Clone, Debug, PartialEq)]
    struct Attributes { bytes: u64, version: u32 }
}
payload! {
    #[derive(Debug, PartialEq)]
    enum Problem { Missing = 1, Exists = 2 }
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
/// Attempts of a call, while the server is restarted.
const TRIES: usize = 20;

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
        self.insert(to, Attributes { version: attributes.version + 1, ..attributes });
        Ok(())
    }

    fn remove(&mut self, path: String) -> Result<(), Problem> {
        BTreeMap::remove(self, &path).map(drop).ok_or(Problem::Missing)
    }

    fn list(&mut self, prefix: String) -> Result<Vec<String>, Problem> {
        Ok(self.range(prefix.clone()..).map(|(path, _)| path.clone()).take_while(|path| path.starts_with(&prefix)).collect())
    }
}

fn serve(address: SocketAddr, mut files: Files, tell: &Sender<(SocketAddr, StopHandle)>) -> Result<Files, AnyError> {
    let mut server = Server::bind(address)?;
    tell.send((server.local_addr()?, server.stop_handle()))?;
    server.serve(|request| metadata::answer(&mut files, &request.to_vec()))?;
    Ok(files)
}

type Outcome<T> = Result<T, MethodError<Problem, ClientError>>;

/// Calls until a handler answers. A call that no handler got is repeated. So is one that a handler may have got before the connection ended, as
/// every call here can be: `done` returns the result if the handler's error says that the earlier one was executed.
fn repeat<T>(mut call: impl FnMut() -> Outcome<T>, done: impl Fn(&Problem) -> Option<T>) -> Outcome<T> {
    let mut may_be_done = false;
    for _ in 0..TRIES {
        match call() {
            Err(MethodError::Call(error)) if error.is_retryable() || error.may_have_executed() => may_be_done |= error.may_have_executed(),
            Err(MethodError::Failed(problem)) if may_be_done => return done(&problem).ok_or(MethodError::Failed(problem)),
            outcome => return outcome,
        }
    }
    call()
}

/// The work of a client process.
fn work(address: &str, name: &str) -> Result<(), AnyError> {
    let options = ClientOptions { timeout: Some(Duration::from_secs(5)), ..ClientOptions::default() };
    let mut client = metadata::Client::new(Client::with_options(address, &options)?);
    for file in 0..200 {
        let [draft, path] = ["draft", "file"].map(|kind| format!("/{name}/{kind}{file:03}"));
        let new = Attributes { bytes: file, version: 1 };
        repeat(|| client.create(draft.clone(), file), |problem| (*problem == Problem::Exists).then(|| new.clone()))?;
        repeat(|| client.rename(draft.clone(), path.clone()), |problem| (*problem == Problem::Missing).then_some(()))?;
        assert_eq!(repeat(|| client.stat(path.clone()), |_| None)?, Attributes { version: 2, ..new });
        assert!(matches!(repeat(|| client.remove(draft.clone()), |_| None), Err(MethodError::Failed(Problem::Missing))));
    }
    assert_eq!(repeat(|| client.list(format!("/{name}/")), |_| None)?.len(), 200);
    Ok(())
}

fn run() -> Result<(), AnyError> {
    if let [_, address, name] = &*env::args().collect::<Vec<_>>() {
        return work(address, name);
    }
    let (tell, told) = std::sync::mpsc::channel();
    let start = |address, files, tell| thread::spawn(move || serve(address, files, &tell));
    let mut server = start(SocketAddr::from(([127, 0, 0, 1], 0)), Files::new(), tell.clone());
    let (address, mut stop) = told.recv()?;
    let client = |number: u32| Command::new(env::current_exe()?).args([address.to_string(), format!("client{number}")]).spawn();
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
    println!("4 clients have {} files; the server was restarted 3 times", files.len());
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("metadata: {error}");
        std::process::exit(1);
    }
}
