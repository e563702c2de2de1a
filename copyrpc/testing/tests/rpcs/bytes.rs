//! Messages of bytes as the tests of all shared-memory RPCs see them: of every length from 8 to
//! 128, so that some are in their lanes and some outside of the lanes.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use copyrpc_shm::region::{self, OpenError, Region};
use copyrpc_testing::helpers::{Scratch, wait_for_some};
use ipc::bytes::{Client, Events, MessageBytes, Server, ServerOptions};
use ipc::{CallError, CallToken, Dir, ReplyError, SessionEnd, SetupError, Token};

use crate::rpc::{Outcome, Refused, Rpc};
use crate::start;

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

fn options(dir: &Dir, max_clients: usize, depth: usize) -> ServerOptions {
    ServerOptions {
        dir: Some(dir.clone()),
        max_clients,
        depth,
        message_bytes: MOST,
        type_tag: 1,
        ..ServerOptions::default()
    }
}

impl Rpc for Bytes {
    type Server = Server;
    type Client = Client<u64>;
    type Held = Token;

    const NAME: &str = "bytes";

    fn try_create(dir: &Dir, clients: usize, depth: usize) -> Option<Self::Server> {
        match Server::with_options("s", &options(dir, clients, depth)) {
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

#[test]
fn a_server_tells_of_each_session_and_why_it_ended() {
    let scratch = Scratch::new("bytes-events");
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let events = Events::new(move |event| {
        tell.lock().unwrap().send(event.to_string()).unwrap();
    });
    let mut server = Server::with_options(
        "s",
        &ServerOptions {
            events,
            ..options(&scratch.dir(), 2, 8)
        },
    )
    .unwrap();
    let next = |server: &mut Server| {
        wait_for_some("no event", || {
            server.poll();
            told.try_recv().ok()
        })
    };
    for ends_well in [false, true] {
        let mut client = start::<Bytes>("conformance: idle", &scratch);
        assert_eq!(client.hear(), "called");
        assert_eq!(next(&mut server), "0 has connected");
        let reason = if ends_well {
            client.hang_up();
            "left"
        } else {
            client.kill();
            "died"
        };
        assert_eq!(
            next(&mut server),
            format!("0 is disconnected: the client has {reason}")
        );
    }
    // A client that makes no call has no session.
    let mut clients = [(); 2].map(|()| Bytes::connect(&scratch.dir()).unwrap());
    Bytes::call(&mut clients[1], 1, 1).unwrap();
    assert_eq!(next(&mut server), "1 has connected");
    drop(server);
    assert_eq!(
        told.iter().collect::<Vec<_>>(),
        ["1 is disconnected: the server has ended"]
    );
}
