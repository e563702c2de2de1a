//! Servers and clients of values as the suites see them, whatever announces clients.

use std::marker::PhantomData;
use std::time::Duration;

use ipc::{Announce, CallError, CallToken, Client, ConnectError, CreateError, Dir, JoinError, ReplyError, Server, SessionEnd, Token};
use shm::region::{self, OpenError, Region};

use crate::conformance::{Outcome, Refused, Rpc};

/// A payload of more than one word, which shows whether it is whole: a number, and words that follow from it.
pub type Block = [u64; 7];

/// The block of a number.
pub fn seal(number: u64) -> Block {
    std::array::from_fn(|i| number.rotate_left(9 * i as u32) ^ i as u64)
}

/// The number of a block, which must be whole.
pub fn unseal(block: &Block) -> u64 {
    assert_eq!(*block, seal(block[0]), "a torn payload");
    block[0]
}

/// The announcements of a suite's clients to their server.
pub trait Sizes {
    type Announced: Announce;

    /// Words of a server for so many clients with so many calls together.
    fn words(clients: usize, calls: usize) -> usize;
}

/// Clients of a server whose entries a test looks at, at most.
const ENTRIES_MAX: usize = 448;

/// The RPC of values with these announcements.
pub struct Typed<S>(PhantomData<S>);

impl<S: Sizes> Rpc for Typed<S> {
    type Server = Server<Block, Block, S::Announced>;
    type Client = Client<Block, Block, u64, S::Announced>;
    type Held = Token;

    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server> {
        match Server::bind_with(dir, "s", S::words(clients, clients * depth), clients, depth, 1) {
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
        match Self::Server::bind_with(dir, "s", S::words(clients, clients * depth), clients, depth, 1) {
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

    fn entries(dir: &Dir, calls: usize) -> (Region, usize) {
        let words = S::words(ENTRIES_MAX, calls);
        let announced = 128 + S::Announced::bytes(ENTRIES_MAX, words).unwrap();
        (Region::open(dir, "s", S::Announced::KIND, 128).unwrap(), announced)
    }
}

fn refused(error: CallError<Block, u64>) -> Refused {
    match error {
        CallError::Full { request, user_data, .. } => Refused::Full(unseal(&request), user_data),
        CallError::Disconnected { request, user_data, end } => Refused::Ended(unseal(&request), user_data, end),
        CallError::TooLarge { .. } => panic!("{error:?}"),
    }
}
