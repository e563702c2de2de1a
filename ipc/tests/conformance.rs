//! The suite that all shared-memory RPCs of the workspace pass.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]

#[path = "../shm/tests/support/conformance.rs"]
#[macro_use]
mod conformance;
#[path = "../shm/tests/support/mod.rs"]
mod support;

use std::time::Duration;

use conformance::{Outcome, Refused, Rpc};
use ipc::{CallError, Client, ConnectError, Dir, RecvHandle, Server, SessionEnd};
use shm::clients::JoinError;
use shm::region::Region;

struct Ipc;

impl Rpc for Ipc {
    type Server = Server<u64, u64>;
    type Client = Client<u64, u64, u64>;
    type Held = RecvHandle<u64, u64>;

    fn create(dir: &Dir, clients: usize, depth: usize) -> Self::Server {
        Server::create(dir, "s", clients, depth, 1).unwrap()
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
        server.recv().map(|request| {
            let number = *request.data();
            (request, number)
        })
    }

    fn reply(_: &mut Self::Server, held: Self::Held, response: u64) -> bool {
        held.reply(response).is_ok()
    }

    fn reject(_: &mut Self::Server, held: Self::Held) {
        drop(held);
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
        (Region::open(dir, "s", u64::from_be_bytes(*b"ipcLANE\x01"), 64).unwrap(), 128)
    }
}

conformance!(Ipc);
