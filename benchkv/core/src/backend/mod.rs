//! What a backend contributes to a rank: daemons that are stepped, and the paths a client's requests take to them.
//!
//! A driver owns the threads, the order of the run and the measurement; a backend owns the transports.
//!
//! [`composed`] is the one backend so far: ipc, delegationrpc, flux and what carries messages between ranks, put together after one of the
//! topologies that [`topology`](crate::topology) has. Its parts: `daemon` (a daemon's phases), `remote` (a thread's connections to other ranks: copyrpc, SENDs, UCX),
//! `shards` (a daemon's channel to the other daemons of the rank), `paths` (a client).

pub mod composed;
pub mod daemon;
pub mod paths;
pub mod plan;
mod remote;
mod shards;

pub use remote::counter_names;

use std::task::Waker;
use std::time::Duration;

use shm::sleep::Sleeper;
use thiserror::Error;

use crate::counters::{Round, TransportReport};
use crate::message::{Request, Response};
use crate::policy::PolicyReport;
use crate::topology::Peer;
use crate::trace::Sample;
use crate::values::ClientValues;

/// A topology. One value per rank, shared by its threads.
pub trait Backend: Sync {
    /// A daemon, made and stepped on its own thread.
    type Daemon: Daemon;
    /// A client's way to the daemons, made and polled on the client's thread.
    type Paths: Paths;

    /// Makes daemon `daemon` of this rank: its servers, so that clients can connect, and its endpoints, not yet connected. Called once per
    /// daemon, on the daemon's thread.
    ///
    /// # Errors
    /// Why the transports could not be made: space, permission, device.
    fn open_daemon(&self, daemon: usize) -> Result<Self::Daemon, BackendError>;

    /// Connects client `client` of this rank to the daemons of this rank, and makes its endpoints, not yet connected. Called once per client,
    /// on the client's thread, after every daemon of the rank is open.
    ///
    /// # Errors
    /// Why a daemon could not be reached, or an endpoint not be made.
    fn open_client(&self, client: usize) -> Result<Self::Paths, BackendError>;
}

/// Connection records, each with the thread at the other end.
pub type Records = Vec<(Peer, Vec<u8>)>;

/// The endpoints that a daemon or client has to threads of other ranks. A thread without any leaves it at what is written here.
pub trait Endpoints {
    /// The connection records of the endpoints, each with whom it is for.
    fn records(&self) -> Records {
        Vec::new()
    }

    /// Connects the endpoints: the records that the other ends made for them, one for each of [`records`](Self::records). Bytes of a peer:
    /// untrusted.
    ///
    /// # Errors
    /// [`BackendError::Setup`] when a record does not fit.
    fn connect(&mut self, _records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        Ok(())
    }

    /// Lets connections come about for which connecting both ends is not enough, without waiting. Returns whether all stand; called until then,
    /// before anything is sent.
    ///
    /// # Errors
    /// One cannot come about.
    fn settle(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    /// What its connections to other ranks did; `None` if it has none. `backlog_peak` is that since the last call.
    fn transport(&mut self) -> Option<TransportReport> {
        None
    }

    /// Of each connection that gives credit: bytes that calls of this end have paid for, and bytes that its answers have given back.
    fn credit_used(&self) -> Vec<(Peer, [u64; 2])> {
        Vec::new()
    }
}

/// A daemon: shard owner, and carrier of remote requests where the topology says so. A sleep on it ends where a step has something to do.
pub trait Daemon: Endpoints + Sleeper {
    /// One bounded round over all phases. `now_ns` is the time; it is read by daemons whose policies need it.
    ///
    /// # Errors
    /// [`BackendError::PeerGone`] when a remote rank is dead. The daemon is of no use after an error.
    fn step(&mut self, now_ns: impl FnOnce() -> u64) -> Result<Round, BackendError>;

    /// How it stands, for a time series: all but time, run and the counters of rounds.
    fn gauges(&self) -> Sample {
        Sample::default()
    }

    /// What its policies did; `None` if it has none.
    fn policy(&self) -> Option<PolicyReport> {
        None
    }
}

/// What a driver that runs many threads' work in one thread asks when a step has found nothing to do.
pub trait Restful {
    /// How long there is nothing to do unless `waker` is called, by a neighbour of the rank in one of its own steps, or a device of this one
    /// gets a completion; `None`: there is something now.
    fn rest(&mut self, waker: &Waker) -> Option<Duration>;

    /// Whether it has connections to other ranks, and so something to hear from its device.
    fn has_connections(&self) -> bool;

    /// Whether the device has something for it, asked while it rests.
    fn has_news(&self) -> bool;

    /// Ends its connections without a goodbye, which to be heard needs time to pass: dropped, it would wait for that.
    fn abort(&mut self);
}

/// How a client's requests reach a store. A sleep on them ends where a poll has something to do.
pub trait Paths: Endpoints + Sleeper {
    /// Offers a request; its end is reported by [`poll`](Self::poll) with the same token. Nothing is kept of a request that is refused. Requests
    /// for one key are executed in the order in which they were accepted.
    ///
    /// # Errors
    /// [`IssueError::Full`]: try again after a poll. [`IssueError::Down`]: never again.
    fn issue(&mut self, request: &Request, token: u32) -> Result<(), IssueError>;

    /// Reports every operation that has ended since the last call, each exactly once, in any order.
    ///
    /// # Errors
    /// A daemon is gone; what is outstanding will not end.
    fn poll(&mut self, ended: impl FnMut(u32, Ending)) -> Result<(), BackendError>;

    /// Where the tails of its values are; `None`: they have none.
    fn values(&self) -> Option<ClientValues> {
        None
    }

    /// Sends what was issued and may have been gathered. Called after the last of several issues.
    ///
    /// # Errors
    /// The path is of no more use.
    fn flush(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The store answered.
    Reply(Response),
    /// The transport gave it up with an error.
    Error,
}

/// A request was not accepted.
#[derive(Debug, Error)]
pub enum IssueError {
    /// No room now.
    #[error("no room in the request path now")]
    Full,
    /// The path is of no more use.
    #[error(transparent)]
    Down(#[from] BackendError),
}

/// The transports of a rank failed.
#[derive(Debug, Error)]
pub enum BackendError {
    /// Another rank is dead, found by the fabric.
    #[error("rank {rank} is gone: {how}")]
    PeerGone {
        /// The dead rank.
        rank: usize,
        /// What the fabric saw.
        how: String,
    },
    /// Something could not be made or connected.
    #[error("{what}: {source}")]
    Setup {
        /// What was being done.
        what: String,
        /// The transport's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A transport of this rank failed during the run.
    #[error("{what} failed: {source}")]
    Transport {
        /// The transport.
        what: &'static str,
        /// Its reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl BackendError {
    /// [`Setup`](Self::Setup) for this reason.
    pub fn setup(what: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Setup { what: what.into(), source: source.into() }
    }

    fn transport(what: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Transport { what, source: source.into() }
    }
}

#[cfg(test)]
mod tests;
