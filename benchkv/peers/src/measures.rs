//! What is measured, in which order, and which process does what. Both ranks go through the same list; they meet before each measurement
//! that needs both, and rank 1 sleeps during the others.

use std::time::Duration;

use flux::Config;
use harness::affinity::pin_current_thread;
use harness::clock::Clock;
use harness::echo::Echo;
use harness::exchange::Exchange;
use harness::pingpong::PingPong;
use ipc::Dir;

use crate::Job;
use crate::load::{Answerer, Caller, Failure, Load, Payload, Wait, Window, serve};
use crate::ours::delegation::{DelegationClient, DelegationServer};
use crate::ours::flux as ours_flux;
use crate::ours::ipc::{IpcClient, IpcServer};
use crate::result::{Comparison, Figures, Regions, TableRow};
use crate::rivals::array_queue::{QueueAnswerer, QueueCaller, Queues};
use crate::rivals::iceoryx::{IceoryxClient, IceoryxServer};
use crate::rivals::{channel, rings};

const TAG: u64 = 0x7065_6572;
/// Unanswered calls that a client of ipc and delegationrpc can have, and has where it streams.
const DEPTH: u32 = 32;
/// Unanswered calls of the streaming node of flux.
const FLUX_DEPTH: u32 = 64;
/// The smallest lanes of flux that carry [`FLUX_DEPTH`].
const FLUX: Config = Config { capacity: 256, in_flight: FLUX_DEPTH as usize };
/// Clients of the server with many.
const MANY: usize = 1024;
/// Clients of the comparison of ipc and delegationrpc.
const TABLE_CLIENTS: [usize; 4] = [1, 2, 4, 8];
/// Calls that are checked before something is measured.
const CHECKED: u64 = 10_000;
/// How long the ranks wait for each other.
const MEET_LIMIT: Duration = Duration::from_secs(60);

fn meet(exchange: &mut dyn Exchange) -> Result<(), Failure> {
    Ok(exchange.barrier(MEET_LIMIT, &|| false)?)
}

/// Names of this run: rank 1's process is in them.
struct Names {
    dir: Dir,
    run: String,
}

impl Names {
    fn agree(exchange: &mut dyn Exchange) -> Result<Self, Failure> {
        let parts = exchange.all_gather(std::process::id().to_string().as_bytes(), MEET_LIMIT, &|| false)?;
        let run = parts.get(1).map(|part| String::from_utf8_lossy(part).into_owned()).unwrap_or_default();
        Ok(Self { dir: Dir::open(None)?, run })
    }

    fn of(&self, what: &str) -> String {
        format!("peers-{}-{what}", self.run)
    }
}

/// Rank 1: answers.
pub(crate) fn answer(job: &Job, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    pin_current_thread(job.cores.1)?;
    let names = Names::agree(exchange)?;
    let create = |what, clients| IpcServer::create(&names.dir, &names.of(what), clients, DEPTH as usize, TAG);
    let (mut alone, mut among) = (create("alone", 1)?, create("among", MANY)?);
    let mut rival = IceoryxServer::create(&names.of("iceoryx"))?;
    meet(exchange)?;
    // All clients connect meanwhile.
    meet(exchange)?;
    let answer = |exchange: &mut dyn Exchange, server: Server<'_>| {
        meet(exchange)?;
        match server {
            Server::Ipc(server) => serve(server, 1, Wait::Busy),
            Server::Iceoryx(server) => serve(server, 1, Wait::Busy),
        }
    };
    // The checks, then the rounds.
    for server in [Server::Ipc(&mut alone), Server::Ipc(&mut among), Server::Iceoryx(&mut rival)] {
        answer(exchange, server)?;
    }
    for _ in 0..job.rounds {
        answer(exchange, Server::Ipc(&mut alone))?;
        answer(exchange, Server::Iceoryx(&mut rival))?;
        answer(exchange, Server::Ipc(&mut alone))?;
        answer(exchange, Server::Ipc(&mut alone))?;
        answer(exchange, Server::Ipc(&mut among))?;
    }
    for round in 0..table_rounds(job) {
        for clients in TABLE_CLIENTS {
            let name = names.of(&format!("ipc-{clients}-{round}"));
            let mut server = IpcServer::create(&names.dir, &name, clients, DEPTH as usize, TAG)?;
            table_serve(exchange, &mut server, clients)?;
            let name = names.of(&format!("delegation-{clients}-{round}"));
            let mut server = delegation_server(&names.dir, &name, clients)?;
            table_serve(exchange, &mut server, clients)?;
        }
    }
    Ok(())
}

enum Server<'a> {
    Ipc(&'a mut IpcServer),
    Iceoryx(&'a mut IceoryxServer),
}

const fn table_rounds(job: &Job) -> u32 {
    if job.rounds < 3 { job.rounds } else { 3 }
}

fn delegation_server(dir: &Dir, name: &str, clients: usize) -> Result<DelegationServer, Failure> {
    let depth = DEPTH as usize;
    Ok(DelegationServer::create(dir, name, clients, delegationrpc::ring_depth_for(clients, depth), depth, TAG)?)
}

fn table_serve(exchange: &mut dyn Exchange, server: &mut impl Answerer, clients: usize) -> Result<(), Failure> {
    meet(exchange)?;
    serve(server, clients, Wait::Yield)?;
    meet(exchange)
}

/// Rank 0: measures.
pub(crate) fn call(job: &Job, exchange: &mut dyn Exchange) -> Result<Comparison, Failure> {
    pin_current_thread(job.cores.0)?;
    let clock = Clock::detect();
    let names = Names::agree(exchange)?;
    meet(exchange)?;
    let connect = |what| IpcClient::connect(&names.dir, &names.of(what), TAG);
    let mut alone = connect("alone")?;
    let mut many = (0..MANY).map(|_| connect("among")).collect::<Result<Vec<_>, _>>()?;
    // Neither the first nor the last of the seats.
    let mut among = many.swap_remove(MANY / 2);
    let mut rival = IceoryxClient::connect(&names.of("iceoryx"))?;
    meet(exchange)?;

    let mut across = Across { exchange, clock, duration: job.duration };
    across.check(&mut alone, DEPTH)?;
    across.check(&mut among, DEPTH)?;
    across.check(&mut rival, 1)?;
    let within = Within { clock, job };
    let queues = Queues::new(1, delegationrpc::ring_depth_for(1, DEPTH as usize), DEPTH as usize);
    let name = names.of("delegation");
    let mut delegation = delegation_server(&names.dir, &name, 1)?;
    let mut delegate = DelegationClient::connect(&names.dir, &name, TAG)?;
    let (mut flux_caller, mut flux_answerer, _none) = ours_flux::pair(2, FLUX)?;
    let (mut of_eight_caller, mut of_eight_answerer, _idle) = ours_flux::pair(8, FLUX)?;
    let (mut channel_caller, mut channel_answerer) = channel::pair(FLUX_DEPTH as usize);
    let (mut ring_caller, mut ring_answerer) = rings::pair(FLUX_DEPTH as usize);

    let mut figures = Figures::default();
    for _ in 0..job.rounds {
        let raw = PingPong { cores: Some(job.cores), duration: job.duration * 2 }.measure(&clock)?;
        figures.push("raw_cacheline_rtt_ns", raw.latency_ns.p50 as f64);
        figures.push("ipc_rtt_ns", across.run(&mut alone, 1)?.block_ns);
        figures.push("iceoryx2_rtt_ns", across.run(&mut rival, 1)?.block_ns);
        let echo = Echo { depth: 1, request_bytes: size_of::<Payload>(), reply_bytes: size_of::<Payload>(), duration: job.duration };
        let echo = echo.measure(&clock)?;
        figures.push("uds_echo_rate", echo.rps);
        figures.push("uds_echo_rtt_p50_ns", echo.latency_ns.p50 as f64);
        figures.deep("ipc", across.run(&mut alone, DEPTH)?);
        figures.push("ipc_ns_1_of_1", across.run(&mut alone, 1)?.block_ns);
        figures.push("ipc_ns_1_of_1024", across.run(&mut among, 1)?.block_ns);

        figures.both("delegation", within.run(&mut delegate, &mut delegation, DEPTH)?);
        figures.both("array_queue", within.run(&mut QueueCaller(&queues, 0), &mut QueueAnswerer(&queues), DEPTH)?);
        figures.both("flux", within.run(&mut flux_caller, &mut flux_answerer, FLUX_DEPTH)?);
        figures.both("crossbeam_channel", within.run(&mut channel_caller, &mut channel_answerer, FLUX_DEPTH)?);
        figures.both("rtrb", within.run(&mut ring_caller, &mut ring_answerer, FLUX_DEPTH)?);
        figures.both("flux_of_8", within.run(&mut of_eight_caller, &mut of_eight_answerer, FLUX_DEPTH)?);
    }
    let Across { exchange, .. } = across;
    let table = table(job, exchange, clock, &names)?;
    let regions = Regions { delegation_1: delegation.region_bytes() };
    Ok(Comparison::new(job, &figures, table, regions))
}

/// Measurements between the two processes.
struct Across<'a> {
    exchange: &'a mut dyn Exchange,
    clock: Clock,
    duration: Duration,
}

impl Across<'_> {
    fn check(&mut self, caller: &mut impl Caller, depth: u32) -> Result<(), Failure> {
        meet(self.exchange)?;
        let mut load = Load::new(caller, self.clock, Wait::Busy);
        load.check(depth, CHECKED)?;
        load.stop()
    }

    fn run(&mut self, caller: &mut impl Caller, depth: u32) -> Result<Window, Failure> {
        meet(self.exchange)?;
        let mut load = Load::new(caller, self.clock, Wait::Busy);
        let window = load.run(depth, self.duration)?;
        load.stop()?;
        Ok(window)
    }
}

/// Measurements between two threads of this process.
struct Within<'a> {
    clock: Clock,
    job: &'a Job,
}

impl Within<'_> {
    /// At depth 1, and at `depth`, after checking.
    fn run(&self, caller: &mut impl Caller, answerer: &mut (impl Answerer + Send), depth: u32) -> Result<[Window; 2], Failure> {
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                pin_current_thread(self.job.cores.1)?;
                serve(answerer, 1, Wait::Busy)
            });
            let mut load = Load::new(caller, self.clock, Wait::Busy);
            load.check(depth, CHECKED)?;
            let windows = [load.run(1, self.job.duration)?, load.run(depth, self.job.duration)?];
            load.stop()?;
            answering.join().unwrap_or_else(|_| Err("the answerer panicked".into()))?;
            Ok(windows)
        })
    }
}

/// The comparison of ipc and delegationrpc.
fn table(job: &Job, exchange: &mut dyn Exchange, clock: Clock, names: &Names) -> Result<Vec<TableRow>, Failure> {
    let mut rows = Vec::new();
    for round in 0..table_rounds(job) {
        for clients in TABLE_CLIENTS {
            for protocol in ["ipc", "delegationrpc"] {
                meet(exchange)?;
                let rates = if protocol == "ipc" {
                    let name = names.of(&format!("ipc-{clients}-{round}"));
                    clients_at_once(job, clock, clients, || Ok(IpcClient::connect(&names.dir, &name, TAG)?))?
                } else {
                    let name = names.of(&format!("delegation-{clients}-{round}"));
                    clients_at_once(job, clock, clients, || Ok(DelegationClient::connect(&names.dir, &name, TAG)?))?
                };
                meet(exchange)?;
                rows.push(TableRow::new(protocol, clients, &rates));
            }
        }
    }
    Ok(rows)
}

/// The rates of `clients` at depth 32 that share this process's core.
fn clients_at_once<C: Caller + Send>(
    job: &Job,
    clock: Clock,
    clients: usize,
    connect: impl Fn() -> Result<C, Failure>,
) -> Result<Vec<f64>, Failure> {
    let callers = (0..clients).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
    let start = std::sync::Barrier::new(clients);
    let one = |mut caller: C| {
        let mut load = Load::new(&mut caller, clock, Wait::Yield);
        start.wait();
        load.check(DEPTH, CHECKED)?;
        start.wait();
        let window = load.run(DEPTH, job.duration * 3)?;
        load.stop()?;
        Ok::<f64, Failure>(window.rate)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = callers.into_iter().map(|caller| scope.spawn(|| one(caller))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a client panicked".into()))).collect()
    })
}
