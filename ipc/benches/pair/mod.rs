//! A server and its clients in one thread, whose operations `scripts/instructions` counts: of ipc,
//! and of delegationrpc, which has another `W`.

use std::hint::black_box;

use ipc::{Announce, CallFailure, Client, Dir, Server, Token};

type Payload = [u64; 4];

/// Unanswered calls of a client.
pub(crate) const DEPTH: usize = 32;
/// Selects all functions but the search for dead clients, which has rows of its own: it runs once
/// per millisecond, so its cost per call depends on the speed of the machine.
pub(crate) const WITHOUT_LOOKS: &str = "all but reap_clients";

/// Both ends: a server and its clients. The client that calls has the middle number.
pub(crate) struct Pair<W: Announce> {
    pub(crate) client: Client<Payload, Payload, u32, W>,
    _idle: Vec<Client<Payload, Payload, u32, W>>,
    server: Server<Payload, Payload, W>,
}

impl<W: Announce> Pair<W> {
    pub(crate) fn new(clients: usize) -> Self {
        let (dir, name) = (
            Dir::open(None).unwrap(),
            format!("instructions-{}", std::process::id()),
        );
        let server = Server::bind_in(&dir, &name, clients, DEPTH, 0).unwrap();
        let mut clients: Vec<_> = (0..clients)
            .map(|_| Client::connect_in(&dir, &name, 0).unwrap())
            .collect();
        Self {
            client: clients.swap_remove(clients.len() / 2),
            _idle: clients,
            server,
        }
    }

    pub(crate) fn calls(&mut self, calls: u64, depth: usize) {
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
            self.client
                .poll(|slot, reply| ended += taken(slot, reply))
                .unwrap();
        }
        assert_eq!(ended, calls);
    }

    pub(crate) fn served(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.client.call(black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.server.step(|request| *black_box(request));
            }
            self.client
                .poll(|slot, reply| ended += taken(slot, reply))
                .unwrap();
        }
        assert_eq!(ended, calls);
    }

    pub(crate) fn empty_polls(&mut self, polls: u64) {
        (0..polls).for_each(|_| assert_eq!(self.server.poll(), 0));
    }
}

/// Takes a reply as a caller does: checks that it is a payload, and copies the payload.
fn taken(slot: u32, reply: Result<Payload, CallFailure>) -> u64 {
    reply.map_or(0, |payload| {
        black_box(slot);
        black_box(&payload);
        1
    })
}

/// Calls one at a time, each function in a frame of its own.
pub(crate) fn parts<W: Announce>(calls: u64) {
    let Pair {
        mut client,
        mut server,
        _idle,
    } = Pair::<W>::new(1);
    for _ in 0..calls {
        part_call(&mut client, black_box([0x5a; 4]));
        assert_eq!(part_server_poll(&mut server), 1);
        let (token, request) = part_recv(&mut server).unwrap();
        part_reply(&mut server, token, black_box(request));
        assert_eq!(part_client_poll(&mut client), 1);
    }
}

#[inline(never)]
fn part_call<W: Announce>(client: &mut Client<Payload, Payload, u32, W>, request: Payload) {
    client.call(request, 0).unwrap();
}

#[inline(never)]
fn part_server_poll<W: Announce>(server: &mut Server<Payload, Payload, W>) -> usize {
    server.poll()
}

#[inline(never)]
fn part_recv<W: Announce>(server: &mut Server<Payload, Payload, W>) -> Option<(Token, Payload)> {
    server.recv()
}

#[inline(never)]
fn part_reply<W: Announce>(
    server: &mut Server<Payload, Payload, W>,
    token: Token,
    response: Payload,
) {
    server.reply(token, response).unwrap();
}

#[inline(never)]
fn part_client_poll<W: Announce>(client: &mut Client<Payload, Payload, u32, W>) -> usize {
    client
        .poll(|slot, reply| {
            black_box((slot, reply.unwrap()));
        })
        .unwrap()
}
