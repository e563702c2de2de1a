//! The program whose instructions `scripts/instructions` counts: a server and its clients in one
//! thread, on software devices of one fabric.
//!
//! Arguments: the kind, and the number of operations. The script runs the program with two
//! different numbers under callgrind, and divides the difference of the instructions by the
//! difference of the numbers, so set-up does not count. `--list` prints one line per kind for the
//! script: name, bound in instructions (`-` if there is none), the numbers of the two runs, the
//! part to collect, and the operation. The part to collect: `nohca`, everything but the software
//! HCA's two entry points with all they call; `part NAME`, the function of that name with all it
//! calls but the software HCA.
//!
//! Requests and responses have 32 bytes. The client that calls is in PROCESS and stays in PROCESS:
//! no client of another group waits. The clock of all devices does not advance, so no time limit is
//! reached.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a program for measuring"
)]

use std::hint::black_box;
use std::sync::Arc;

use scalerpc::mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use scalerpc::rdma::PendingClient;
use scalerpc::{Handlers, RdmaClient, RdmaServer, ServerConfig, State};

const ECHO: u16 = 1;
const BYTES: usize = 32;
const BUDGET: usize = 64;

struct Kind {
    name: &'static str,
    bound: Option<u32>,
    collect: &'static str,
    what: &'static str,
    /// Number of clients connected, and number of clients in PROCESS. The first client calls.
    clients: usize,
    active: usize,
    work: Work,
}

#[derive(Clone, Copy)]
enum Work {
    /// Calls, the given number at a time.
    Calls(usize),
    /// Calls, with each function in a frame of its own.
    Parts(usize),
    ClientPolls,
    ServerSteps,
}

const fn kind(
    name: &'static str,
    bound: u32,
    clients: usize,
    active: usize,
    work: Work,
    what: &'static str,
) -> Kind {
    Kind {
        name,
        bound: Some(bound),
        collect: "nohca",
        what,
        clients,
        active,
        work,
    }
}

const fn part(name: &'static str, depth: usize, collect: &'static str, what: &'static str) -> Kind {
    Kind {
        name,
        bound: None,
        collect,
        what,
        clients: 1,
        active: 1,
        work: Work::Parts(depth),
    }
}

const KINDS: &[Kind] = &[
    kind(
        "scale_rpc",
        1485,
        1,
        1,
        Work::Calls(1),
        "scalerpc: a call in PROCESS and its response, both sides, without the software HCA",
    ),
    kind(
        "scale_rpc_depth8",
        808,
        1,
        1,
        Work::Calls(8),
        "scalerpc: the same, 8 at a time",
    ),
    kind(
        "scale_rpc_of_40",
        3105,
        40,
        40,
        Work::Calls(1),
        "scalerpc: as scale_rpc, with 39 clients in PROCESS that do not call",
    ),
    kind(
        "scale_rpc_of_100",
        2840,
        100,
        1,
        Work::Calls(1),
        "scalerpc: as scale_rpc, with 99 IDLE clients",
    ),
    kind(
        "scale_client_poll",
        95,
        1,
        1,
        Work::ClientPolls,
        "scalerpc: a client's poll that finds nothing",
    ),
    kind(
        "scale_server_step",
        161,
        1,
        1,
        Work::ServerSteps,
        "scalerpc: a server's step that finds nothing, one client in PROCESS",
    ),
    kind(
        "scale_server_step_of_40",
        1675,
        40,
        40,
        Work::ServerSteps,
        "scalerpc: the same with 40",
    ),
    part(
        "scale_call",
        1,
        "part part_call",
        "scalerpc, of scale_rpc: RdmaClient::call",
    ),
    part(
        "scale_post",
        1,
        "part part_post",
        "scalerpc, of scale_rpc: the client's poll that posts the request",
    ),
    part(
        "scale_serve",
        1,
        "part part_serve",
        "scalerpc, of scale_rpc: the server's step",
    ),
    part(
        "scale_take",
        1,
        "part part_take",
        "scalerpc, of scale_rpc: the client's poll that finds the response, and poll_completion",
    ),
    part(
        "scale_depth8_call",
        8,
        "part part_call",
        "scalerpc, of scale_rpc_depth8: RdmaClient::call",
    ),
    part(
        "scale_depth8_post",
        8,
        "part part_post",
        "scalerpc, of scale_rpc_depth8: the client's poll that posts the requests",
    ),
    part(
        "scale_depth8_serve",
        8,
        "part part_serve",
        "scalerpc, of scale_rpc_depth8: the server's step",
    ),
    part(
        "scale_depth8_take",
        8,
        "part part_take",
        "scalerpc, of scale_rpc_depth8: the client's poll that finds the responses, and poll_completion",
    ),
];

/// Numbers of operations of the two runs: many laps of each queue, multiples of each depth.
const COUNTS: (usize, usize) = (4_096, 12_288);

struct Room {
    server: RdmaServer,
    handlers: Handlers<'static>,
    clients: Vec<RdmaClient>,
}

impl Room {
    fn new(clients: usize, active: usize) -> Self {
        let (fabric, clock) = (LocalFabric::new(), Clock::Manual(Arc::default()));
        // Small arenas: Valgrind has little address space, which a few hundred devices fill.
        let device = |arena_bytes| {
            let fabric = FabricSpec::Local(fabric.clone());
            DeviceSpec::Soft(SoftOptions {
                fabric,
                clock: clock.clone(),
                arena_bytes,
                ..SoftOptions::default()
            })
        };
        let config = ServerConfig {
            max_clients: clients as u32,
            ..ServerConfig::default()
        };
        let mut server = RdmaServer::new(&device(16 << 20), &config).unwrap();
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert(ECHO, |request: &[u8], response: &mut [u8]| {
            response[..request.len()].copy_from_slice(request);
            Ok(request.len())
        });
        let connect = |_| {
            let offered = server.offer().unwrap();
            let client = PendingClient::new(&device(1 << 20), offered.record()).unwrap();
            let admission = server.admit(offered, &client.record()).unwrap();
            client.admitted(&admission)
        };
        let clients = (0..clients).map(connect).collect();
        let mut room = Self {
            server,
            handlers,
            clients,
        };
        (0..active).for_each(|nth| room.activate(nth));
        room
    }

    fn activate(&mut self, nth: usize) {
        self.clients[nth].call(ECHO, &[0; BYTES]).unwrap();
        while !matches!(self.clients[nth].state(), State::Process { .. })
            || self.clients[nth].core().is_busy()
        {
            self.clients[nth].poll();
            while self.clients[nth].poll_completion(&mut []).is_some() {}
            self.server.step(&mut self.handlers, BUDGET);
        }
    }

    fn run(&mut self, count: usize, work: Work) {
        match work {
            Work::Calls(depth) => assert_eq!(
                (0..count / depth).map(|_| self.round(depth)).sum::<usize>(),
                count
            ),
            Work::Parts(depth) => assert_eq!(
                (0..count / depth)
                    .map(|_| self.round_of_parts(depth))
                    .sum::<usize>(),
                count
            ),
            Work::ClientPolls => (0..count).for_each(|_| black_box(&mut self.clients[0]).poll()),
            Work::ServerSteps => assert_eq!(
                (0..count)
                    .map(|_| self.server.step(&mut self.handlers, BUDGET))
                    .sum::<usize>(),
                0
            ),
        }
    }

    /// Makes `depth` calls and takes their responses. Returns the number of successful calls.
    fn round(&mut self, depth: usize) -> usize {
        let payload = black_box([0x5a; BYTES]);
        let client = &mut self.clients[0];
        for _ in 0..depth {
            client.call(ECHO, &payload).unwrap();
        }
        client.poll();
        self.server.step(&mut self.handlers, BUDGET);
        client.poll();
        let (mut ended, mut response) = (0, [0; BYTES]);
        while let Some(completion) = client.poll_completion(&mut response) {
            ended += usize::from(
                black_box(completion.outcome) == Ok(BYTES) && black_box(response) == payload,
            );
        }
        ended
    }

    fn round_of_parts(&mut self, depth: usize) -> usize {
        let payload = black_box([0x5a; BYTES]);
        for _ in 0..depth {
            part_call(&mut self.clients[0], &payload);
        }
        part_post(&mut self.clients[0]);
        part_serve(&mut self.server, &mut self.handlers);
        part_take(&mut self.clients[0])
    }
}

#[inline(never)]
fn part_call(client: &mut RdmaClient, payload: &[u8]) {
    client.call(ECHO, payload).unwrap();
}

#[inline(never)]
fn part_post(client: &mut RdmaClient) {
    client.poll();
    black_box(1);
}

#[inline(never)]
fn part_serve(server: &mut RdmaServer, handlers: &mut Handlers) {
    server.step(handlers, BUDGET);
}

#[inline(never)]
fn part_take(client: &mut RdmaClient) -> usize {
    client.poll();
    let (mut ended, mut response) = (0, [0; BYTES]);
    while let Some(completion) = client.poll_completion(&mut response) {
        ended += usize::from(black_box(completion.outcome) == Ok(BYTES));
    }
    ended
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            for k in KINDS {
                let bound = k.bound.map_or("-".to_owned(), |b| b.to_string());
                println!(
                    "{}|{bound}|{}|{}|{}|{}",
                    k.name, COUNTS.0, COUNTS.1, k.collect, k.what
                );
            }
        }
        // `cargo bench` starts every benchmark with this argument, and `cargo test --benches`
        // without an argument.
        [] | [.., "--bench"] => println!("instructions: counted by scripts/instructions"),
        [name, count] => {
            let kind = KINDS
                .iter()
                .find(|k| k.name == name)
                .unwrap_or_else(|| panic!("no such operation: {name}"));
            Room::new(kind.clients, kind.active).run(count.parse().unwrap(), kind.work);
        }
        _ => panic!("usage: instructions OPERATION COUNT | --list"),
    }
}
