//! Clients that are processes of their own, children of their rank.
//!
//! A rank starts this executable once for each client, with its own arguments and the words that steer its workers. The process computes
//! the same options from them, opens its paths to the rank's daemons, and sends its records and report through its rank. While it
//! measures, the words alone steer it. It ends with its rank, for any reason.

use std::time::Duration;

use harness::clock::Clock;
use harness::environment::peak_rss_bytes;
use launch::exchange::ExchangeError;
use launch::helper::{Helper, HelperError, Owner};
use launch::hosts::Hosts;
use serde::{Deserialize, Serialize};
use shm::memfd::MemfdId;

use super::RankError;
use super::seat::Seat;
use crate::cli::Cli;
use crate::control::Steering;
use crate::interval::Tallies;
use crate::options::Options;
use engine::backend::composed::Composed;
use engine::backend::{Backend, Endpoints, Records};
use engine::client::ClientReport;

/// Interval at which a rank that waits for a client checks whether to give up.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time for a client to end when it is told to.
const END_LIMIT: Duration = Duration::from_secs(2);

/// The first message to a client process: its task.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    rank: usize,
    client: usize,
    /// Process id of its rank.
    process: u32,
    hosts: Hosts,
    /// The device of the rank, as it is typed: `auto` is resolved once.
    device: String,
    /// The MPI library, if the rank has one.
    library: Option<String>,
    steering: MemfdWords,
    tallies: Option<MemfdWords>,
}

/// A [`MemfdId`].
type MemfdWords = (u64, u64, u32, u32);

fn words_of(id: MemfdId) -> MemfdWords {
    let MemfdId { token, bytes, pid, fd } = id;
    (token, bytes, pid, fd)
}

fn id_of((token, bytes, pid, fd): MemfdWords) -> MemfdId {
    MemfdId { token, bytes, pid, fd }
}

/// The messages of a client process, in this order. The second and last message to it is the records of the other ends of its endpoints.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ClientNews {
    /// It has opened its paths, and sends these records.
    Open(Records),
    /// Its endpoints are connected.
    Ready,
    /// It has ended its part.
    Done(Box<ClientReport>),
}

/// Why a client process ended early.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    how: String,
    /// See [`RankError::follows`].
    follows: bool,
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { how: error.to_string(), follows: false }
    }
}

/// A rank's end of a client process.
pub(super) struct ClientProcess {
    helper: Helper,
    client: usize,
}

impl ClientProcess {
    /// Starts a process for client `client` of a seat. It is killed when the calling thread ends.
    pub(super) fn start<B>(seat: &Seat<'_, B>, client: usize) -> Result<Self, RankError> {
        let args: Vec<_> = std::env::args_os().skip(1).collect();
        let helper = Helper::start(&args).map_err(|source| RankError::ClientStart { client, source })?;
        let mut process = Self { helper, client };
        process.send(&Task {
            rank: seat.rank,
            client,
            process: std::process::id(),
            hosts: seat.options.hosts.clone(),
            device: seat.options.asked.device.to_string(),
            library: seat.options.launcher.library.clone(),
            steering: words_of(seat.steering.id()),
            tallies: seat.tallies.map(|tallies| words_of(tallies.id())),
        })?;
        Ok(process)
    }

    fn failed(&self, how: impl Into<Failure>) -> RankError {
        let Failure { how, follows } = how.into();
        RankError::ClientProcess { client: self.client, pid: self.helper.pid(), how, follows }
    }

    fn send(&mut self, message: &impl Serialize) -> Result<(), RankError> {
        let bytes = serde_json::to_vec(message).map_err(|error| self.failed(error))?;
        self.helper.send(bytes).map_err(|error| self.failed(error))
    }

    /// Sends the records of the other ends to the client.
    pub(super) fn connect(&mut self, records: Records) -> Result<(), RankError> {
        self.send(&records)
    }

    /// Waits for the client's next message.
    pub(super) fn next_news(&mut self, is_over: &dyn Fn() -> bool) -> Result<ClientNews, RankError> {
        loop {
            if let Some(message) = self.helper.receive(LOOK_INTERVAL).map_err(|error| self.failed(error))? {
                let said: Result<ClientNews, Failure> = serde_json::from_slice(&message).map_err(|error| self.failed(error))?;
                return said.map_err(|why| self.failed(why));
            }
            if is_over() {
                // The words tell it, too: it closes its paths and reports, or is killed.
                let _ = self.helper.receive(END_LIMIT);
                return Err(ExchangeError::GivenUp.into());
            }
        }
    }

    /// Ends the client.
    pub(super) fn give_up(self) -> RankError {
        self.helper.end(END_LIMIT);
        ExchangeError::GivenUp.into()
    }
}

/// Runs a client process: does the task of `owner`, with the arguments of the job.
///
/// # Errors
/// The owner is gone. Every other failure is reported to it.
pub fn serve(cli: Cli, mut owner: Owner) -> Result<(), HelperError> {
    match work(cli, &mut owner) {
        Ok(report) => say(&mut owner, &Ok(ClientNews::Done(Box::new(report)))),
        Err(why) => say(&mut owner, &Err(why)),
    }
}

fn say(owner: &mut Owner, news: &Result<ClientNews, Failure>) -> Result<(), HelperError> {
    owner.send(serde_json::to_vec(news).map_err(|error| HelperError::Protocol(error.to_string()))?)
}

fn work(mut cli: Cli, owner: &mut Owner) -> Result<ClientReport, Failure> {
    let task: Task = serde_json::from_slice(&owner.receive()?)?;
    let steering = Steering::attach(&id_of(task.steering))?;
    let tallies = task.tallies.map(|words| Tallies::attach(&id_of(words))).transpose()?;
    cli.job.device = task.device.parse().map_err(|how| Failure { how, follows: false })?;
    let options = Options::resolve_on(cli, &task.hosts, task.library)?;
    let backend = Composed::for_clients(&options.job, options.site(task.rank, task.process)?)?;
    let seat = Seat {
        options: &options,
        backend: &backend,
        clock: Clock::detect(),
        rank: task.rank,
        steering: &steering,
        tallies: tallies.as_ref(),
    };
    let connect = |paths: &mut <Composed as Backend>::Paths| {
        let lost = |error: HelperError| ExchangeError::Protocol(error.to_string());
        say(owner, &Ok(ClientNews::Open(paths.records()))).map_err(lost)?;
        let records: Records =
            serde_json::from_slice(&owner.receive().map_err(lost)?).map_err(|e| ExchangeError::Protocol(e.to_string()))?;
        paths.connect(&records)?;
        while !paths.settle()? {
            if steering.is_stopped() {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        say(owner, &Ok(ClientNews::Ready)).map_err(lost)?;
        Ok(true)
    };
    let report = seat.run(task.client, connect).map_err(|error| Failure { how: error.to_string(), follows: error.follows() })?;
    Ok(ClientReport { process_rss_bytes: peak_rss_bytes(), ..report })
}
