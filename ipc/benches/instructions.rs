//! The program whose instructions `scripts/instructions` counts: a server and its clients in one thread, requests and replies of 32 bytes.
//!
//! Bounds are about a fiftieth above what was counted.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program for measuring")]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use harness::counted::{self, Operation};
use ipc::{CallFailed, Client, Dir, Server, Token};

type Payload = [u64; 4];

const DEPTH: usize = 32;
/// Many laps of every lane, and multiples of the depth.
const COUNTS: (u64, u64) = (4096, 20_480);

/// Work that depends on the clock is counted on rows of its own: it comes once in a millisecond, and so more often the slower the machine.
const WITHOUT_LOOKS: &str = "all but look_for_the_gone";

const fn operation(name: &'static str, bound: u32, collect: &'static str, what: &'static str, run: fn(u64)) -> Operation {
    Operation { name, bound: Some(bound), counts: COUNTS, collect, what, run }
}

const OPERATIONS: &[Operation] = &[
    operation("ipc_rpc_depth1", 341, WITHOUT_LOOKS, "ipc: one call and its reply, both sides, one at a time", |calls| {
        Pair::new(1).calls(calls, 1)
    }),
    operation("ipc_rpc_depth32", 221, WITHOUT_LOOKS, "ipc: the same, 32 at a time", |calls| Pair::new(1).calls(calls, DEPTH)),
    operation("ipc_serve_depth1", 262, WITHOUT_LOOKS, "ipc: as ipc_rpc_depth1, answered by Server::step", |calls| {
        Pair::new(1).served(calls, 1)
    }),
    operation("ipc_serve_depth32", 165, WITHOUT_LOOKS, "ipc: as ipc_rpc_depth32, answered by Server::step", |calls| {
        Pair::new(1).served(calls, DEPTH);
    }),
    operation("ipc_rpc_depth1_of_1024", 341, WITHOUT_LOOKS, "ipc: as ipc_rpc_depth1, among 1,023 idle clients", |calls| {
        Pair::new(1024).calls(calls, 1);
    }),
    operation("ipc_call", 54, "in part_call", "ipc, of ipc_rpc_depth1: Client::call", parts),
    operation("ipc_server_poll", 118, "in part_server_poll", "ipc, of ipc_rpc_depth1: Server::poll that finds a request", parts),
    operation("ipc_recv", 78, "in part_recv", "ipc, of ipc_rpc_depth1: Server::recv", parts),
    operation("ipc_reply", 53, "in part_reply", "ipc, of ipc_rpc_depth1: Server::reply", parts),
    operation("ipc_client_poll", 84, "in part_client_poll", "ipc, of ipc_rpc_depth1: Client::poll that finds a reply", parts),
    operation("ipc_client_poll_empty", 58, WITHOUT_LOOKS, "ipc: Client::poll that finds nothing, a call in flight", |polls| {
        let mut pair = Pair::new(1);
        pair.client.call([1; 4], 0).unwrap();
        (0..polls).for_each(|_| assert_eq!(pair.client.poll(|_, _| ()), Ok(0)));
    }),
    operation("ipc_server_poll_empty", 32, WITHOUT_LOOKS, "ipc: Server::poll that finds nothing, one client", |polls| {
        Pair::new(1).empty_polls(polls)
    }),
    operation("ipc_server_poll_empty_of_1024", 32, WITHOUT_LOOKS, "ipc: the same with 1,024 clients", |polls| {
        Pair::new(1024).empty_polls(polls)
    }),
    looks("ipc_looks_of_64", 16_000, "ipc: eight of the server's looks for dead clients, 64 clients", |times| {
        Pair::new(64).rest_and_look(times)
    }),
    looks("ipc_looks_of_1024", 20_000, "ipc: the same with 1,024 clients", |times| Pair::new(1024).rest_and_look(times)),
];

/// A server's look for dead clients after a rest in which eight have become due, the most that it makes up for at once.
const fn looks(name: &'static str, bound: u32, what: &'static str, run: fn(u64)) -> Operation {
    Operation { name, bound: Some(bound), counts: (2, 10), collect: "in look_for_the_gone", what, run }
}

/// Both ends. The client that calls is in the middle.
struct Pair {
    client: Client<Payload, Payload, u32>,
    _idle: Vec<Client<Payload, Payload, u32>>,
    server: Server<Payload, Payload>,
}

impl Pair {
    fn new(clients: usize) -> Self {
        let (dir, name) = (Dir::open(None).unwrap(), format!("instructions-{}", std::process::id()));
        let server = Server::bind_in(&dir, &name, clients, DEPTH, 0).unwrap();
        let mut clients: Vec<_> = (0..clients).map(|_| Client::connect_in(&dir, &name, 0).unwrap()).collect();
        Self { client: clients.swap_remove(clients.len() / 2), _idle: clients, server }
    }

    fn calls(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.client.call(black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                self.server.poll();
                while let Some((token, request)) = self.server.recv() {
                    self.server.reply(token, black_box(request)).unwrap();
                    answered += 1;
                }
            }
            self.client.poll(|slot, reply| ended += taken(slot, reply)).unwrap();
        }
        assert_eq!(ended, calls);
    }

    fn served(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.client.call(black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.server.step(|request| *black_box(request));
            }
            self.client.poll(|slot, reply| ended += taken(slot, reply)).unwrap();
        }
        assert_eq!(ended, calls);
    }

    fn rest_and_look(&mut self, times: u64) {
        for _ in 0..times {
            std::thread::sleep(Duration::from_millis(10));
            self.empty_polls(256);
        }
    }

    fn empty_polls(&mut self, polls: u64) {
        (0..polls).for_each(|_| assert_eq!(self.server.poll(), 0));
    }
}

/// A caller with its reply: it looks whether there is one, and has the payload in memory of its own.
fn taken(slot: u32, reply: Result<Payload, CallFailed>) -> u64 {
    reply.map_or(0, |payload| {
        black_box(slot);
        black_box(&payload);
        1
    })
}

/// The calls of `ipc_rpc_depth1`, each function in a frame of its own.
fn parts(calls: u64) {
    let Pair { mut client, mut server, _idle } = Pair::new(1);
    for _ in 0..calls {
        part_call(&mut client, black_box([0x5a; 4]));
        assert_eq!(part_server_poll(&mut server), 1);
        let (token, request) = part_recv(&mut server).unwrap();
        part_reply(&mut server, token, black_box(request));
        assert_eq!(part_client_poll(&mut client), 1);
    }
}

#[inline(never)]
fn part_call(client: &mut Client<Payload, Payload, u32>, request: Payload) {
    client.call(request, 0).unwrap();
}

#[inline(never)]
fn part_server_poll(server: &mut Server<Payload, Payload>) -> usize {
    server.poll()
}

#[inline(never)]
fn part_recv(server: &mut Server<Payload, Payload>) -> Option<(Token, Payload)> {
    server.recv()
}

#[inline(never)]
fn part_reply(server: &mut Server<Payload, Payload>, token: Token, response: Payload) {
    server.reply(token, response).unwrap();
}

#[inline(never)]
fn part_client_poll(client: &mut Client<Payload, Payload, u32>) -> usize {
    client
        .poll(|slot, reply| {
            black_box((slot, reply.unwrap()));
        })
        .unwrap()
}

fn main() -> ExitCode {
    counted::main(OPERATIONS)
}
