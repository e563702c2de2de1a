//! Messages of bytes as the tests of all shared-memory RPCs see them: of every length from 8 to
//! 128, so that some are in their lanes and some outside of the lanes.

use std::time::Duration;

use copyrpc_shm::region::{self, OpenError, Region};
use ipc::bytes::{Client, MessageBytes, Server, ServerOptions};
use ipc::{CallError, CallToken, Dir, ReplyError, SessionEnd, SetupError, Token};

use crate::rpc::{Outcome, Refused, Rpc};

pub(crate) struct Bytes;

const LENGTHS: u64 = 121;
const MOST: MessageBytes = MessageBytes {
    request: 128,
    response: 128,
};

/// Returns a message that encodes a number, of a length that depends on the number.
fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(8 + (number % LENGTHS) as usize, number as u8);
    bytes
}

fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    assert_eq!(bytes, message(number), "not the message that was sent");
    number
}

impl Rpc for Bytes {
    type Server = Server;
    type Client = Client<u64>;
    type Held = Token;

    const NAME: &str = "bytes";

    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server> {
        match Server::with_options(
            "s",
            &ServerOptions {
                dir: Some(dir.clone()),
                max_clients: clients,
                depth,
                message_bytes: MOST,
                type_tag: 1,
                ..ServerOptions::default()
            },
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
            .map(|(token, request)| (token, number(request)))
    }

    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool {
        match server.reply(held, &message(response)) {
            Ok(()) => true,
            Err(ReplyError::ClientGone { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn reject(server: &mut Self::Server, held: Self::Held) {
        server.refuse(held).unwrap();
    }

    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<CallToken, Refused> {
        client
            .call(&message(request), user_data)
            .map_err(|error| refused(error, request))
    }

    fn call_within(
        client: &mut Self::Client,
        request: u64,
        user_data: u64,
        timeout: Duration,
    ) -> Result<CallToken, Refused> {
        client
            .call_within(&message(request), user_data, timeout)
            .map_err(|error| refused(error, request))
    }

    fn cancel(client: &mut Self::Client, call: CallToken) -> Option<u64> {
        client.cancel(call)
    }

    fn poll(
        client: &mut Self::Client,
        mut f: impl FnMut(u64, Outcome),
    ) -> Result<usize, SessionEnd> {
        client.poll(|user, outcome| f(user, outcome.map(number)))
    }

    fn wait(client: &mut Self::Client, timeout: Option<Duration>) -> bool {
        client.wait(timeout)
    }

    fn id(client: &Self::Client) -> usize {
        client.id()
    }

    const WAKES: usize = 128;

    fn create_refused(dir: &Dir, clients: usize, depth: usize) -> region::CreateError {
        match Self::Server::with_options(
            "s",
            &ServerOptions {
                dir: Some(dir.clone()),
                max_clients: clients,
                depth,
                message_bytes: MOST,
                type_tag: 1,
                ..ServerOptions::default()
            },
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

    fn entries(dir: &Dir, _: usize) -> (Region, usize) {
        (
            Region::open(dir, "s", u64::from_be_bytes(*b"ipcBYTE\x02"), 128).unwrap(),
            192,
        )
    }
}

fn refused(error: CallError<&[u8], u64>, request: u64) -> Refused {
    match error {
        CallError::Full { user_data, .. } => Refused::Full(request, user_data),
        CallError::Closed {
            user_data, reason, ..
        } => Refused::Ended(request, user_data, reason),
        CallError::TooLarge { .. } | CallError::NoSuchNode { .. } => panic!("{error}"),
    }
}
