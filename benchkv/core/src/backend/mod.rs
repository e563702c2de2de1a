//! The workers of a rank: daemons that are stepped, and the paths of a client's requests to them.
//!
//! A driver owns the threads, the order of the run and the measurement; [`Workers`] own the
//! transports.
//!
//! [`composed`] makes the workers of ipc, delegationrpc, flux and the carrier of messages between
//! ranks, combined into one of the topologies of [`topology`](crate::topology). The other modules
//! are its parts: `daemon` (a daemon's phases), `remote` (a thread's connections to other ranks:
//! copyrpc, SENDs, UCX), `shards` (a daemon's channel to the other daemons of the rank), `backlog`
//! (requests that wait for room in `remote` or `shards`), `paths` (a client's paths), `plan` (the
//! parameters of a rank).

mod backlog;
pub mod composed;
pub mod daemon;
pub mod paths;
pub mod plan;
mod remote;
mod shards;

pub use remote::counter_names;

use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::Sleeper;
use thiserror::Error;

use crate::counters::{Round, TransportReport};
use crate::message::{Request, Response};
use crate::operation::Operation;
use crate::policy::PolicyReport;
use crate::topology::Peer;
use crate::trace::Sample;
use crate::values::ClientValues;

/// The daemons and clients of a rank: one value for each rank, which the threads of the rank share.
pub trait Workers: Sync {
    /// A daemon, which is made and stepped on its own thread.
    type Daemon: Daemon;
    /// A client's paths to the daemons, made and polled on the client's thread.
    type Paths: Paths;

    /// Makes daemon `daemon` of this rank: its servers, so that clients can connect, and its
    /// endpoints, not yet connected. Called once per daemon, on the daemon's thread.
    ///
    /// # Errors
    /// The reason why the transports could not be made: space, permission, device.
    fn open_daemon(&self, daemon: usize) -> Result<Self::Daemon, BackendError>;

    /// Connects client `client` of this rank to the daemons of this rank, and makes its endpoints,
    /// not yet connected. Called once per client, on the client's thread, after every daemon of the
    /// rank is open.
    ///
    /// # Errors
    /// The reason why a daemon could not be reached, or an endpoint could not be made.
    fn open_client(&self, client: usize) -> Result<Self::Paths, BackendError>;
}

/// Connection records, each with the thread at the other end.
pub type Records = Vec<(Peer, Vec<u8>)>;

/// The endpoints of a daemon or client that connect it to threads of other ranks. The default
/// methods call the methods of [`remote`](Self::remote).
pub trait Endpoints {
    /// Returns the part of this value that holds the endpoints; `None` if it has no endpoints.
    fn remote(&mut self) -> Option<&mut dyn Endpoints> {
        None
    }

    /// Returns the connection records of the endpoints, each with its peer.
    fn records(&mut self) -> Records {
        self.remote()
            .map_or_else(Vec::new, |remote| remote.records())
    }

    /// Connects the endpoints with the records that the other ends made for them: one for each
    /// record of [`records`](Self::records). The bytes come from peers, and are untrusted.
    ///
    /// # Errors
    /// [`BackendError::Setup`]: a record has no endpoint here, is malformed, or does not connect.
    fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        self.remote()
            .map_or(Ok(()), |remote| remote.connect(records))
    }

    /// Continues the setup of connections that are not complete when both ends have called
    /// [`connect`](Self::connect). Does not wait. Returns whether all connections are established.
    /// The driver calls the function until it returns `true`, before anything is sent.
    ///
    /// # Errors
    /// A connection cannot be established.
    fn settle(&mut self) -> Result<bool, BackendError> {
        self.remote().map_or(Ok(true), |remote| remote.settle())
    }

    /// Returns the activity of the owner's connections to other ranks; `None` if it has no
    /// connections. The field `backlog_peak` is the maximum since the last call.
    fn transport(&mut self) -> Option<TransportReport> {
        self.remote()?.transport()
    }

    /// Returns two byte counts for each connection of copyrpc: the credit (the peer's room for
    /// answers) that calls of this end have used, and the credit that answers of this end have
    /// returned to the peer.
    fn credit_used(&mut self) -> Vec<(Peer, [u64; 2])> {
        self.remote()
            .map_or_else(Vec::new, |remote| remote.credit_used())
    }

    /// Returns whether a poll of the endpoints may find something. The driver calls it while the
    /// thread of the endpoints has nothing to do.
    fn has_news(&mut self) -> bool {
        self.remote().is_some_and(|remote| remote.has_news())
    }

    /// Ends the connections without informing the peers. A drop would inform the peers, and wait
    /// until they have received the message.
    fn abort(&mut self) {
        self.remote().into_iter().for_each(|remote| remote.abort());
    }
}

/// A daemon: the owner of a shard, and in some topologies the carrier of remote requests. A sleep
/// on a daemon ends when a step has something to do.
pub trait Daemon: Endpoints + Sleeper {
    /// Does one bounded round over all phases. `now_ns` returns the time. Only daemons whose
    /// policies need the time call it.
    ///
    /// # Errors
    /// [`BackendError::PeerGone`] when another rank is lost, [`BackendError::Transport`] when a
    /// transport of this rank failed. The daemon cannot be used after an error.
    fn step(&mut self, now_ns: impl FnOnce() -> u64) -> Result<Round, BackendError>;

    /// Returns the daemon's state for a time series. The fields for the time, the run and the
    /// counters of rounds are not set.
    fn gauges(&self) -> Sample {
        Sample::default()
    }

    /// Appends the number of unanswered requests of each endpoint of the daemon, in the order of
    /// [`Topology::asks`](crate::topology::Topology::asks).
    fn by_endpoint(&self, _values: &mut Vec<u32>) {}

    /// Returns the effects of the daemon's policies; `None` if the daemon has no policies.
    fn policy(&self) -> Option<PolicyReport> {
        None
    }
}

/// Queries for a driver that runs the work of many threads in one thread. The driver uses them
/// after a step that found nothing to do.
pub trait Restful: Endpoints {
    /// Returns the time for which there is nothing to do. The time ends earlier if another worker
    /// of the rank calls `waker` in one of its own steps, or if the device of this thread gets a
    /// completion. Returns `None` if there is work now.
    fn rest(&mut self, waker: &Waker) -> Option<Duration>;
}

/// The paths of a client's requests to a store. Only the paths keep the records of outstanding
/// operations. A sleep on the paths ends when a poll has something to do.
pub trait Paths: Endpoints + Sleeper {
    /// Offers a request, and keeps its operation, `note`, until the operation ends;
    /// [`poll`](Self::poll) then reports it. The paths keep nothing of a refused request. Requests
    /// for one key are executed in the order in which they were accepted.
    ///
    /// # Errors
    /// [`IssueError::Full`]: try again after a poll. [`IssueError::Down`]: never again.
    fn issue(&mut self, request: Request, note: Operation) -> Result<(), IssueError>;

    /// Reports every operation that has ended since the last call, each exactly once, in any order,
    /// with the answer of the store. `None` as the answer means that the transport failed the
    /// operation with an error.
    ///
    /// # Errors
    /// A daemon is lost; outstanding operations will not end.
    fn poll(&mut self, ended: impl FnMut(Operation, Option<Response>)) -> Result<(), BackendError>;

    /// Returns the memory for the tails of the client's values, their bytes after the first 8;
    /// `None` if values have no tails.
    fn values(&self) -> Option<ClientValues> {
        None
    }

    /// Sends requests that were issued and gathered. It is called after the last of several issues.
    ///
    /// # Errors
    /// The path is unusable.
    fn flush(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// The reason why a request was not accepted.
#[derive(Debug, Error)]
pub enum IssueError {
    /// Room is lacking now.
    #[error("no room in the request path now")]
    Full,
    /// The path is unusable.
    #[error(transparent)]
    Down(Box<BackendError>),
}

/// The reason why the transports of a rank failed.
#[derive(Debug, Error)]
pub enum BackendError {
    /// Another rank is lost: the rank is dead, has closed a connection, or has broken the protocol.
    #[error("rank {rank} is lost: {how}")]
    PeerGone {
        /// The lost rank.
        rank: usize,
        /// The reason that the carrier reported.
        how: String,
    },
    /// Something could not be made or connected.
    #[error("{what}: {source}")]
    Setup {
        /// The action that failed.
        what: String,
        /// The transport's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A transport of this rank failed during the run.
    #[error("{what} failed: {source}")]
    Transport {
        /// The transport.
        what: &'static str,
        /// The cause of the failure.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl BackendError {
    /// Makes the error [`Setup`](Self::Setup) with this action and this reason.
    pub fn setup(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Setup {
            what: what.into(),
            source: source.into(),
        }
    }

    fn gone(peer: &Peer, how: impl ToString) -> Self {
        Self::PeerGone {
            rank: peer.rank,
            how: how.to_string(),
        }
    }

    fn transport(
        what: &'static str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Transport {
            what,
            source: source.into(),
        }
    }
}

/// Takes an error out of its box. Functions that are called for each message return errors in
/// boxes, because a result with a box fits into registers.
impl From<Box<BackendError>> for BackendError {
    fn from(error: Box<Self>) -> Self {
        *error
    }
}

/// Adds the action that failed to an error, while a rank is set up.
pub(crate) trait OrSetup<T> {
    fn or_setup(self, what: impl Into<String>) -> Result<T, BackendError>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> OrSetup<T> for Result<T, E> {
    fn or_setup(self, what: impl Into<String>) -> Result<T, BackendError> {
        self.map_err(|source| BackendError::setup(what, source))
    }
}

#[cfg(test)]
mod tests;
