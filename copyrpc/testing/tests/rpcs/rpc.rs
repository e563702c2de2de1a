//! A shared-memory RPC as the suites see it.

use std::time::Duration;

use copyrpc_calls::{CallFailure, SessionEnd, Tag as CallToken};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::region::{self, Region};
use copyrpc_shm::sleep::Sleeper;

/// The reason why a call was not made, with the returned request and user data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Full(u64, u64),
    Ended(u64, u64, SessionEnd),
}

/// The end of a call, as a client sees it.
pub(crate) type Outcome = Result<u64, CallFailure>;

/// An RPC from `u64` to `u64`, with `u64` as user data.
pub(crate) trait Rpc {
    type Server: Sleeper;
    type Client: Send + Sleeper;
    /// A received request.
    type Held;

    /// The name of the RPC for helper processes.
    const NAME: &str;

    /// Returns `None` if there is a server already, or another process is about to remove a dead
    /// server.
    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server>;
    fn create(dir: &Dir, clients: usize, depth: usize) -> Self::Server {
        Self::try_create(dir, clients, depth).expect("there is no server yet")
    }
    /// Returns `None` if all entries are taken, or there is no living server.
    fn connect(dir: &Dir) -> Option<Self::Client>;
    fn serve_poll(server: &mut Self::Server) -> usize;
    fn serve_wait(server: &mut Self::Server, timeout: Option<Duration>) -> bool;
    fn recv(server: &mut Self::Server) -> Option<(Self::Held, u64)>;
    /// Returns whether the client was still there.
    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool;
    fn reject(server: &mut Self::Server, held: Self::Held);
    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<CallToken, Refused>;
    fn call_within(
        client: &mut Self::Client,
        request: u64,
        user_data: u64,
        timeout: Duration,
    ) -> Result<CallToken, Refused>;
    fn cancel(client: &mut Self::Client, call: CallToken) -> Option<u64>;
    fn poll(client: &mut Self::Client, f: impl FnMut(u64, Outcome)) -> Result<usize, SessionEnd>;
    fn wait(client: &mut Self::Client, timeout: Option<Duration>) -> bool;
    fn id(client: &Self::Client) -> usize;
    /// Returns the region of a server for at most 448 clients with `calls` calls together, and the
    /// offset of its entries.
    fn entries(dir: &Dir, calls: usize) -> (Region, usize);
    /// Offset of the words by which clients announce calls to the server of
    /// [`entries`](Self::entries). The words end where the entries begin.
    const WAKES: usize;
    /// Returns the reason why there is no server `s`.
    fn create_refused(dir: &Dir, clients: usize, depth: usize) -> region::CreateError;
    /// Returns the reason why there is no client of `s`.
    fn connect_refused(dir: &Dir) -> region::OpenError;
}
