//! The suite that all shared-memory RPCs of the workspace pass.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../../ipc/shm/tests/support/conformance.rs"]
#[macro_use]
mod conformance;
#[path = "../../ipc/shm/tests/support/mod.rs"]
mod support;

use std::time::Duration;

use conformance::{Outcome, Refused, Rpc};
use delegationrpc::{CallError, Client, ConnectError, Dir, ReplyError, Server, SessionEnd, Token};
use shm::clients::JoinError;
use shm::region::Region;

struct Delegation;

impl Rpc for Delegation {
    type Server = Server<u64, u64>;
    type Client = Client<u64, u64, u64>;
    type Held = Token;

    fn create(dir: &Dir, clients: usize, depth: usize) -> Self::Server {
        // The smallest ring that is never full, so that it laps often.
        Server::create(dir, "s", clients, (clients * depth).next_power_of_two(), depth, 1).unwrap()
    }

    fn connect(dir: &Dir) -> Option<Self::Client> {
        match Client::connect(dir, "s", 1) {
            Err(ConnectError::Join(JoinError::Full { .. })) => None,
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
        server.recv().map(|entry| (entry.token, entry.payload))
    }

    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool {
        match server.reply(held, response) {
            Ok(()) => true,
            Err(ReplyError::ClientGone { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn reject(server: &mut Self::Server, held: Self::Held) {
        server.reject(held).unwrap();
    }

    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<(), Refused> {
        client.call(request, user_data).map_err(|error| match error {
            CallError::QueueFull { request, user_data, .. } => Refused::Full(request, user_data),
            CallError::Ended { request, user_data, end } => Refused::Ended(request, user_data, end),
        })
    }

    fn poll(client: &mut Self::Client, f: impl FnMut(u64, Outcome)) -> Result<usize, SessionEnd> {
        client.poll(f)
    }

    fn wait(client: &mut Self::Client, timeout: Option<Duration>) -> bool {
        client.wait(timeout)
    }

    fn id(client: &Self::Client) -> usize {
        client.id()
    }

    fn seats(dir: &Dir) -> (Region, usize) {
        // A ring of 4 words takes one line.
        (Region::open(dir, "s", u64::from_be_bytes(*b"DLGRPC\x02\x00"), 256).unwrap(), 256 + 64)
    }
}

conformance!(Delegation);
