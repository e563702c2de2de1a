//! The program whose instructions `scripts/instructions` counts: caller and answerer in one thread,
//! on two software devices of one fabric.
//!
//! Arguments: the kind of operation, and the number of calls. The script runs the program under
//! callgrind with two numbers of calls, and divides the difference of the instructions by the
//! difference of the calls, so set-up does not count. `--list` prints one line per kind for the
//! script: name, bound in instructions (`-` if there is none), the two numbers of calls, the part
//! to collect, and the operation. The part to collect is `nohca`, the whole program, or `part
//! NAME`, the function of that name with all that it calls. Neither includes the software HCA: its
//! two entry points with all that they call. An appended `but NAME` excludes one more function with
//! all that it calls.
//!
//! Requests and replies have 32 bytes. With depth 64, all calls of a round are sent in one WRITE,
//! and so are their replies.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a program for measuring"
)]

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use copyrpc::{
    Client, ClientOptions, Context, ContextBuilder, Endpoint, EndpointConfig, RecvBytes, Reply,
    Server, ServerOptions,
};
use mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

const BYTES: usize = 32;

struct Kind {
    name: &'static str,
    bound: Option<u32>,
    collect: &'static str,
    what: &'static str,
    depth: usize,
    endpoints: usize,
    work: Work,
}

#[derive(Clone, Copy)]
enum Work {
    /// Calls by the public functions, answered in callbacks of `Context::serve`.
    Calls,
    /// Calls for which the answerer drains, receives, replies and flushes.
    ReceivedCalls,
    /// Calls by functions that are not inlined, so that each function can be counted alone.
    Parts,
    IdlePolls,
    /// Calls of a `Client`, without a timeout or with one; the `Server` is in another thread.
    Client(Option<Duration>),
}

const fn part(name: &'static str, depth: usize, collect: &'static str, what: &'static str) -> Kind {
    Kind {
        name,
        bound: None,
        collect,
        what,
        depth,
        endpoints: 1,
        work: Work::Parts,
    }
}

const KINDS: &[Kind] = &[
    Kind {
        name: "rpc_depth1",
        bound: Some(1318),
        collect: "nohca",
        what: "copyrpc: one call and its reply, both sides, one at a time, without the software HCA",
        depth: 1,
        endpoints: 1,
        work: Work::Calls,
    },
    Kind {
        name: "rpc_depth64",
        bound: Some(231),
        collect: "nohca",
        what: "copyrpc: the same, 64 at a time",
        depth: 64,
        endpoints: 1,
        work: Work::Calls,
    },
    Kind {
        name: "rpc_depth1_received",
        bound: Some(1648),
        collect: "nohca",
        what: "copyrpc: as rpc_depth1, the answerer with drain, recv, reply and flush in the place of serve",
        depth: 1,
        endpoints: 1,
        work: Work::ReceivedCalls,
    },
    Kind {
        name: "rpc_depth64_received",
        bound: Some(399),
        collect: "nohca",
        what: "copyrpc: the same, 64 at a time",
        depth: 64,
        endpoints: 1,
        work: Work::ReceivedCalls,
    },
    Kind {
        name: "rpc_depth1_of_1024",
        bound: Some(1318),
        collect: "nohca",
        what: "copyrpc: as rpc_depth1, with 1,023 idle endpoints beside it",
        depth: 1,
        endpoints: 1024,
        work: Work::Calls,
    },
    Kind {
        name: "idle_poll",
        bound: Some(72),
        collect: "nohca",
        what: "copyrpc: one poll that finds nothing, one endpoint",
        depth: 1,
        endpoints: 1,
        work: Work::IdlePolls,
    },
    Kind {
        name: "idle_poll_of_1024",
        bound: Some(72),
        collect: "nohca",
        what: "copyrpc: the same with 1,024 endpoints",
        depth: 1,
        endpoints: 1024,
        work: Work::IdlePolls,
    },
    part(
        "depth1_call",
        1,
        "part part_call",
        "copyrpc, of rpc_depth1: Endpoint::call",
    ),
    part(
        "depth1_caller_flush",
        1,
        "part part_caller_flush",
        "copyrpc, of rpc_depth1: the caller's flush",
    ),
    part(
        "depth1_answerer_serve",
        1,
        "part part_answerer_serve",
        "copyrpc, of rpc_depth1: the answerer's serve, handler included",
    ),
    part(
        "depth1_caller_drain",
        1,
        "part part_caller_drain",
        "copyrpc, of rpc_depth1: the caller's drain, callback included",
    ),
    part(
        "depth64_call",
        64,
        "part part_call",
        "copyrpc, of rpc_depth64: Endpoint::call",
    ),
    part(
        "depth64_caller_flush",
        64,
        "part part_caller_flush",
        "copyrpc, of rpc_depth64: the caller's flush",
    ),
    part(
        "depth64_answerer_serve",
        64,
        "part part_answerer_serve",
        "copyrpc, of rpc_depth64: the answerer's serve, handler included",
    ),
    part(
        "depth64_caller_drain",
        64,
        "part part_caller_drain",
        "copyrpc, of rpc_depth64: the caller's drain, callback included",
    ),
    client(
        "client_call",
        998,
        "part part_client but wait_for_turn",
        None,
        "copyrpc: Client::call, one at a time, the client's side with one poll too early, without the software HCA",
    ),
    client(
        "client_call_within",
        998,
        "part part_client but wait_for_turn",
        Some(Duration::from_secs(3600)),
        "copyrpc: the same, Client::call_within",
    ),
    client(
        "server_serve",
        868,
        "part part_server",
        None,
        "copyrpc: Server::serve, the server's side of client_call, handler included",
    ),
];

const fn client(
    name: &'static str,
    bound: u32,
    collect: &'static str,
    timeout: Option<Duration>,
    what: &'static str,
) -> Kind {
    Kind {
        name,
        bound: Some(bound),
        collect,
        what,
        depth: 1,
        endpoints: 1,
        work: Work::Client(timeout),
    }
}

/// Number of calls in each of the two runs: many laps of every ring and queue, and multiples of the
/// depths.
const COUNTS: (usize, usize) = (16_384, 49_152);

struct Pair {
    caller: Context<u64>,
    answerer: Context<u64>,
    endpoints: Vec<Endpoint<u64>>,
    _peers: Vec<Endpoint<u64>>,
}

impl Pair {
    fn new(endpoints: usize) -> Self {
        let fabric = LocalFabric::new();
        let context = || {
            // The clock does not advance. Otherwise the number of times that a context reads it,
            // and the work that the context then finds due, would depend on the speed of the
            // machine.
            let clock = Clock::Manual(Arc::new(AtomicU64::new(1_000_000_000)));
            let options = SoftOptions {
                fabric: FabricSpec::Local(fabric.clone()),
                arena_bytes: 1 << 30,
                clock,
                ..SoftOptions::default()
            };
            // The queues have the sizes for 1,024 endpoints of 8 batches in flight each.
            ContextBuilder::new(DeviceSpec::Soft(options))
                .srq_size(16_383)
                .cq_size(16_384)
                .build()
                .unwrap()
        };
        let (caller, answerer): (Context<u64>, Context<u64>) = (context(), context());
        // Send queues have the size for the default number of batches in flight.
        let max_send_wr = Some(EndpointConfig::default().send_queue_wqebbs());
        let config = EndpointConfig {
            ring_size: 64 << 10,
            batches_in_flight: 8,
            raw_operations: 0,
            max_send_wr,
            idle_keepalive: None,
            ..EndpointConfig::default()
        };
        let connect = |_| {
            let (a, b) = (
                caller.create_endpoint(&config).unwrap(),
                answerer.create_endpoint(&config).unwrap(),
            );
            let (of_a, of_b) = (a.local_info(), b.local_info());
            (a.connect(&of_b).unwrap(), b.connect(&of_a).unwrap())
        };
        let (endpoints, peers) = (0..endpoints).map(connect).unzip();
        Self {
            caller,
            answerer,
            endpoints,
            _peers: peers,
        }
    }

    fn run(&self, calls: usize, depth: usize, work: Work) {
        let ended = match work {
            Work::Calls => (0..calls / depth).map(|_| self.round(depth)).sum(),
            Work::ReceivedCalls => (0..calls / depth).map(|_| self.round_received(depth)).sum(),
            Work::Parts => (0..calls / depth).map(|_| self.round_of_parts(depth)).sum(),
            Work::IdlePolls => {
                for _ in 0..calls {
                    assert_eq!(self.caller.poll(|_, _| ()).unwrap(), 0);
                }
                calls
            }
            Work::Client(timeout) => calls_of_client(calls, timeout),
        };
        assert_eq!(ended, calls);
    }

    /// Makes `depth` calls and their replies. Returns the number of calls that ended well.
    #[inline(always)]
    fn round(&self, depth: usize) -> usize {
        let payload = black_box([0x5a; BYTES]);
        for call in 0..depth as u64 {
            self.endpoints[0].call(&payload, call, BYTES).unwrap();
        }
        self.caller.flush_endpoints().unwrap();
        serve(&self.answerer, &payload);
        let mut ended = 0;
        drain(&self.caller, &mut ended);
        ended
    }

    fn round_received(&self, depth: usize) -> usize {
        let payload = black_box([0x5a; BYTES]);
        for call in 0..depth as u64 {
            self.endpoints[0].call(&payload, call, BYTES).unwrap();
        }
        self.caller.flush_endpoints().unwrap();
        self.answerer.drain(|_, _| ()).unwrap();
        while let Some(request) = self.answerer.recv() {
            black_box(request.data().read::<u64>());
            request.reply(&payload).unwrap();
        }
        self.answerer.flush_endpoints().unwrap();
        let mut ended = 0;
        drain(&self.caller, &mut ended);
        ended
    }

    fn round_of_parts(&self, depth: usize) -> usize {
        let payload = black_box([0x5a; BYTES]);
        for call in 0..depth as u64 {
            part_call(&self.endpoints[0], &payload, call);
        }
        part_caller_flush(&self.caller);
        part_answerer_serve(&self.answerer, &payload);
        let mut ended = 0;
        part_caller_drain(&self.caller, &mut ended);
        ended
    }
}

/// Makes `calls` calls of a client. Its server, in another thread, makes one turn for each call.
/// Returns the number of calls with the right reply.
fn calls_of_client(calls: usize, timeout: Option<Duration>) -> usize {
    let fabric = LocalFabric::new();
    let clock = Clock::Manual(Arc::new(AtomicU64::new(1_000_000_000)));
    let device = DeviceSpec::Soft(SoftOptions {
        fabric: FabricSpec::Local(fabric),
        arena_bytes: 1 << 30,
        clock,
        ..SoftOptions::default()
    });
    let (ask, asked) = sync_channel(0);
    let (tell, told) = sync_channel(0);
    let options = ServerOptions {
        device: device.clone(),
        ..ServerOptions::default()
    };
    let server = thread::spawn(move || {
        let mut server = Server::with_options("127.0.0.1:0", &options).unwrap();
        tell.send(server.local_addr().unwrap()).unwrap();
        // The server steps until the client asks for the first turn. Meanwhile the client connects.
        while asked.try_recv().is_err() {
            server.step().unwrap();
        }
        loop {
            part_server(&mut server);
            tell.send(server.local_addr().unwrap()).unwrap();
            if asked.recv().is_err() {
                break;
            }
        }
    });
    let options = ClientOptions {
        device,
        ..ClientOptions::default()
    };
    let mut client = Client::with_options(told.recv().unwrap(), &options).unwrap();
    let payload = black_box([0x5a; BYTES]);
    let wait = || wait_for_turn(&ask, &told);
    let ended = (0..calls)
        .filter(|_| part_client(&mut client, &payload, timeout, wait) == payload)
        .count();
    drop(ask);
    server.join().unwrap();
    ended
}

#[inline(never)]
fn part_client<'a>(
    client: &'a mut Client,
    payload: &[u8],
    timeout: Option<Duration>,
    wait: impl FnMut(),
) -> &'a [u8] {
    client.call_with_idle(payload, timeout, wait).unwrap()
}

#[inline(never)]
fn part_server(server: &mut Server) {
    server
        .serve_turn(&mut |request: RecvBytes<'_>| request.to_vec())
        .unwrap();
}

#[inline(never)]
fn wait_for_turn(ask: &SyncSender<()>, told: &Receiver<SocketAddr>) {
    ask.send(()).unwrap();
    told.recv().unwrap();
}

#[inline(always)]
fn serve(context: &Context<u64>, payload: &[u8; BYTES]) {
    let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
        black_box(request.read::<u64>());
        reply.send(payload).unwrap();
    };
    context.serve(on_request, |_, _| ()).unwrap();
}

#[inline(always)]
fn drain(context: &Context<u64>, ended: &mut usize) {
    context
        .drain(|_, outcome| {
            *ended += usize::from(black_box(outcome.unwrap().read::<u64>()).is_some())
        })
        .unwrap();
}

#[inline(never)]
fn part_call(endpoint: &Endpoint<u64>, payload: &[u8], user_data: u64) {
    endpoint.call(payload, user_data, BYTES).unwrap();
}

#[inline(never)]
fn part_caller_flush(context: &Context<u64>) {
    context.flush_endpoints().unwrap();
}

#[inline(never)]
fn part_answerer_serve(context: &Context<u64>, payload: &[u8; BYTES]) {
    serve(context, payload);
}

#[inline(never)]
fn part_caller_drain(context: &Context<u64>, ended: &mut usize) {
    drain(context, ended);
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
        // `cargo bench` starts every benchmark like this, and `cargo test --benches` without an
        // argument.
        [] | [.., "--bench"] => println!("instructions: counted by scripts/instructions"),
        [name, calls] => {
            let kind = KINDS
                .iter()
                .find(|k| k.name == name)
                .unwrap_or_else(|| panic!("no such operation: {name}"));
            let pair = Pair::new(kind.endpoints);
            pair.run(calls.parse().unwrap(), kind.depth, kind.work);
            // Contexts that are dropped wait for a time, and the work that they do meanwhile
            // depends on the speed of the machine.
            std::mem::forget(pair);
        }
        _ => panic!("usage: instructions OPERATION CALLS | --list"),
    }
}
