//! Servers and clients of values as the suites see them, whatever announces clients.

use std::time::Duration;

use copyrpc_shm::region::{self, OpenError, Region};
use delegationrpc::Ring;
use ipc::{
    Announce, CallError, CallToken, Client, Dir, ReadyWords, ReplyError, Server, SessionEnd,
    SetupError, Token,
};

use crate::rpc::{Outcome, Refused, Rpc};

/// A payload of more than one word, which shows whether it is whole: a number, and words that
/// follow from it.
type Block = [u64; 7];

/// Returns the block of a number.
fn seal(number: u64) -> Block {
    std::array::from_fn(|i| number.rotate_left(9 * i as u32) ^ i as u64)
}

/// Returns the number of a block. Asserts that the block is whole.
fn unseal(block: &Block) -> u64 {
    assert_eq!(*block, seal(block[0]), "a torn payload");
    block[0]
}

/// An RPC of values, by the announcements of its clients to their server.
pub(crate) trait Typed {
    type Announced: Announce + 'static;

    const NAME: &str;

    /// Returns the number of words of a server for `clients` clients with `calls` calls together.
    fn words(clients: usize, calls: usize) -> usize;
}

pub(crate) struct Ipc;

impl Typed for Ipc {
    type Announced = ReadyWords;

    const NAME: &str = "ipc";

    fn words(clients: usize, _: usize) -> usize {
        ReadyWords::words(clients)
    }
}

/// `delegationrpc`, with the smallest ring that is never full, so that the ring wraps often.
pub(crate) struct Delegation;

impl Typed for Delegation {
    type Announced = Ring;

    const NAME: &str = "delegation";

    fn words(_: usize, calls: usize) -> usize {
        calls.next_power_of_two()
    }
}

/// Maximum number of clients of a server whose entries a test reads.
const ENTRIES_MAX: usize = 448;

impl<T: Typed> Rpc for T {
    type Server = Server<Block, Block, T::Announced>;
    type Client = Client<Block, Block, u64, T::Announced>;
    type Held = Token;

    const NAME: &str = <T as Typed>::NAME;

    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server> {
        match Server::bind_with(
            dir,
            "s",
            T::words(clients, clients * depth),
            clients,
            depth,
            1,
        ) {
            Err(SetupError::Create(
                region::CreateError::Exists { .. } | region::CreateError::Busy { .. },
            )) => None,
            created => Some(created.unwrap()),
        }
    }

    fn connect(dir: &Dir) -> Option<Self::Client> {
        match Client::connect_in(dir, "s", 1) {
            Err(
                SetupError::Full { .. }
                | SetupError::Region(OpenError::NotFound { .. } | OpenError::OwnerGone { .. }),
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
        server
            .recv()
            .map(|(token, request)| (token, unseal(&request)))
    }

    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool {
        match server.reply(held, seal(response)) {
            Ok(()) => true,
            Err(ReplyError::ClientGone { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn reject(server: &mut Self::Server, held: Self::Held) {
        server.refuse(held).unwrap();
    }

    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<CallToken, Refused> {
        client.call(seal(request), user_data).map_err(refused)
    }

    fn call_within(
        client: &mut Self::Client,
        request: u64,
        user_data: u64,
        timeout: Duration,
    ) -> Result<CallToken, Refused> {
        client
            .call_within(seal(request), user_data, timeout)
            .map_err(refused)
    }

    fn cancel(client: &mut Self::Client, call: CallToken) -> Option<u64> {
        client.cancel(call)
    }

    fn poll(
        client: &mut Self::Client,
        mut f: impl FnMut(u64, Outcome),
    ) -> Result<usize, SessionEnd> {
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
        match Self::Server::bind_with(
            dir,
            "s",
            T::words(clients, clients * depth),
            clients,
            depth,
            1,
        ) {
            Err(SetupError::Create(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn connect_refused(dir: &Dir) -> OpenError {
        match Self::Client::connect_in(dir, "s", 1) {
            Err(SetupError::Region(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn entries(dir: &Dir, calls: usize) -> (Region, usize) {
        let words = T::words(ENTRIES_MAX, calls);
        let announced = 128 + T::Announced::bytes(ENTRIES_MAX, words).unwrap();
        (
            Region::open(dir, "s", T::Announced::KIND, 128).unwrap(),
            announced,
        )
    }
}

fn refused(error: CallError<Block, u64>) -> Refused {
    match error {
        CallError::Full {
            request, user_data, ..
        } => Refused::Full(unseal(&request), user_data),
        CallError::Closed {
            request,
            user_data,
            reason,
        } => Refused::Ended(unseal(&request), user_data, reason),
        CallError::TooLarge { .. } | CallError::NoSuchNode { .. } => panic!("{error:?}"),
    }
}
