//! The crate as the tests of all shared-memory RPCs see it.

use std::time::Duration;

use delegationrpc::ipc::{CallToken, JoinError, ReplyError};
use delegationrpc::{CallError, Client, ConnectError, CreateError, Dir, Server, SessionEnd, Token};
use shm::region::{self, OpenError, Region};

use crate::conformance::{Outcome, Refused, Rpc};
use crate::support::{Block, seal, unseal};

pub(crate) struct Delegation;

impl Rpc for Delegation {
    type Server = Server<Block, Block>;
    type Client = Client<Block, Block, u64>;
    type Held = Token;

    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server> {
        // The smallest ring that is never full, so that it laps often.
        match Server::bind_with(dir, "s", (clients * depth).next_power_of_two(), clients, depth, 1) {
            Err(CreateError::Region(region::CreateError::Exists { .. } | region::CreateError::Busy { .. })) => None,
            created => Some(created.unwrap()),
        }
    }

    fn connect(dir: &Dir) -> Option<Self::Client> {
        match Client::connect_in(dir, "s", 1) {
            Err(
                ConnectError::Join(JoinError::Full { .. }) | ConnectError::Region(OpenError::NotFound { .. } | OpenError::OwnerGone { .. }),
            ) => None,
            connected => Some(connected.unwrap()),
        }
    }

    fn serve_poll(server: &mut Self::Server) -> usize {
        server.poll()
    }

    fn serve_wait(server: &mut Self::Server, timeout: Option<Duration>) -> bool {
        server.wait(timeout)
    }

    fn recv(server: &mut Self::Server) -> Option<(Self::Held, u64)> {
        server.recv().map(|(token, request)| (token, unseal(&request)))
    }

    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool {
        match server.reply(held, seal(response)) {
            Ok(()) => true,
            Err(ReplyError::ClientGone { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn reject(server: &mut Self::Server, held: Self::Held) {
        server.reject(held).unwrap();
    }

    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<CallToken, Refused> {
        client.call(seal(request), user_data).map_err(refused)
    }

    fn call_within(client: &mut Self::Client, request: u64, user_data: u64, timeout: Duration) -> Result<CallToken, Refused> {
        client.call_within(seal(request), user_data, timeout).map_err(refused)
    }

    fn cancel(client: &mut Self::Client, call: CallToken) -> Option<u64> {
        client.cancel(call)
    }

    fn poll(client: &mut Self::Client, mut f: impl FnMut(u64, Outcome)) -> Result<usize, SessionEnd> {
        client.poll(|user_data, outcome| f(user_data, outcome.map(|block| unseal(&block))))
    }

    fn wait(client: &mut Self::Client, timeout: Option<Duration>) -> bool {
        client.wait(timeout)
    }

    fn id(client: &Self::Client) -> usize {
        client.id()
    }

    const WAKES: usize = 128;

    fn create_refused(dir: &Dir, clients: usize, depth: usize) -> region::CreateError {
        match Self::Server::bind_with(dir, "s", (clients * depth).next_power_of_two(), clients, depth, 1) {
            Err(CreateError::Region(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn connect_refused(dir: &Dir) -> OpenError {
        match Self::Client::connect_in(dir, "s", 1) {
            Err(ConnectError::Region(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn seats(dir: &Dir, calls: usize) -> (Region, usize) {
        let ring_bytes = (8 * calls.next_power_of_two()).next_multiple_of(64);
        (Region::open(dir, "s", u64::from_be_bytes(*b"DLGRPC\x02\x00"), 256).unwrap(), 256 + ring_bytes)
    }
}

fn refused(error: CallError<Block, u64>) -> Refused {
    match error {
        CallError::Full { request, user_data, .. } => Refused::Full(unseal(&request), user_data),
        CallError::Disconnected { request, user_data, end } => Refused::Ended(unseal(&request), user_data, end),
        CallError::TooLarge { .. } => panic!("{error:?}"),
    }
}
