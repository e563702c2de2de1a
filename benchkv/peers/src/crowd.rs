//! ipc beside delegationrpc with 1, 2, 4 and 8 clients, which stream and share one core, so that
//! they must yield it when they wait.
//!
//! The server has the other core to itself, or shares the clients'. Only in the latter case a
//! single client has to wait for a core as each of eight does, so only that case shows the cost of
//! more clients by themselves. With two cores the first client beyond one is also the first that
//! makes any thread yield. Clients are threads of rank 0, the server is rank 1.

use std::sync::Barrier;

use bench::load::{Answerer, Caller, Failure, Load, Wait, serve};
use harness::affinity::pin_current_thread;
use harness::clock::Clock;
use launch::exchange::Exchange;

use crate::Job;
use crate::meeting::{CHECKED, DEPTH, MEET_LIMIT, Names, meet};
use crate::ours::{DelegationClient, DelegationServer, IpcClient, IpcServer};
use crate::result::Crowds;

const CLIENTS: [usize; 4] = [1, 2, 4, 8];
/// Maximum number of rounds: more change nothing that the median of five does not show, and each
/// takes about 10 s.
const MOST_ROUNDS: u32 = 5;
/// Factor of the windows' length: many turns of eight clients on a core, also if a turn is as long
/// as the scheduler's slice.
const LONGER: u32 = 4;

#[derive(Debug, Clone, Copy)]
enum Protocol {
    Ipc,
    Delegation,
}

/// A measurement.
#[derive(Debug, Clone, Copy)]
struct Crowd {
    round: u32,
    clients: usize,
    protocol: Protocol,
    /// The server has a core to itself.
    own_core: bool,
}

/// Returns the measurements in the order of both ranks.
fn crowds(job: &Job) -> impl Iterator<Item = Crowd> + use<> {
    let of_round = |round| {
        let placed = [true, false]
            .into_iter()
            .flat_map(|own_core| CLIENTS.map(|clients| (own_core, clients)));
        placed.flat_map(move |(own_core, clients)| {
            [Protocol::Ipc, Protocol::Delegation].map(|protocol| Crowd {
                round,
                clients,
                protocol,
                own_core,
            })
        })
    };
    (0..job.rounds.min(MOST_ROUNDS)).flat_map(of_round)
}

impl Crowd {
    /// Returns the name in the result of this one and those that differ only in the number of
    /// clients.
    fn set(&self) -> &'static str {
        match (self.protocol, self.own_core) {
            (Protocol::Ipc, true) => "ipc_two_cores",
            (Protocol::Ipc, false) => "ipc_one_core",
            (Protocol::Delegation, true) => "delegation_two_cores",
            (Protocol::Delegation, false) => "delegation_one_core",
        }
    }

    fn name(&self, names: &Names) -> String {
        names.of(&format!("{}-{}-{}", self.set(), self.clients, self.round))
    }
}

/// Serves, in rank 1.
pub(crate) fn answer(job: &Job, exchange: &mut dyn Exchange, names: &Names) -> Result<(), Failure> {
    for crowd in crowds(job) {
        pin_current_thread(if crowd.own_core {
            job.cores.1
        } else {
            job.cores.0
        })?;
        let (name, clients) = (crowd.name(names), crowd.clients);
        match crowd.protocol {
            Protocol::Ipc => {
                let server = IpcServer::create(&names.dir, &name, clients, DEPTH)?;
                let bytes = server.region_bytes();
                serve_all(exchange, server, clients, bytes)?;
            }
            Protocol::Delegation => {
                let server = DelegationServer::create(&names.dir, &name, clients, DEPTH)?;
                let bytes = server.region_bytes();
                serve_all(exchange, server, clients, bytes)?;
            }
        }
    }
    Ok(())
}

fn serve_all(
    exchange: &mut dyn Exchange,
    mut server: impl Answerer,
    clients: usize,
    region_bytes: usize,
) -> Result<(), Failure> {
    exchange.all_gather(&(region_bytes as u64).to_le_bytes(), MEET_LIMIT, &|| false)?;
    serve(&mut server, clients, Wait::YIELD)?;
    meet(exchange)
}

/// Measures, in rank 0.
pub(crate) fn call(
    job: &Job,
    exchange: &mut dyn Exchange,
    clock: Clock,
    names: &Names,
) -> Result<Crowds, Failure> {
    let mut results = Crowds::default();
    for crowd in crowds(job) {
        let parts = exchange.all_gather(&[], MEET_LIMIT, &|| false)?;
        let region_bytes = parts
            .get(1)
            .and_then(|part| part.first_chunk())
            .map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let name = crowd.name(names);
        let rates = match crowd.protocol {
            Protocol::Ipc => at_once(job, clock, crowd.clients, || {
                IpcClient::connect(&names.dir, &name)
            }),
            Protocol::Delegation => at_once(job, clock, crowd.clients, || {
                DelegationClient::connect(&names.dir, &name)
            }),
        }?;
        meet(exchange)?;
        results.push(crowd.set(), crowd.clients, &rates, region_bytes);
    }
    Ok(results)
}

/// Returns the rates of `clients` that stream on this thread's core.
fn at_once<C: Caller + Send>(
    job: &Job,
    clock: Clock,
    clients: usize,
    connect: impl Fn() -> Result<C, Failure>,
) -> Result<Vec<f64>, Failure> {
    let callers = (0..clients)
        .map(|_| connect())
        .collect::<Result<Vec<_>, _>>()?;
    let barrier = Barrier::new(clients);
    let one = |mut caller: C| {
        let mut load = Load::new(&mut caller, clock, Wait::YIELD);
        barrier.wait();
        load.check(DEPTH, CHECKED)?;
        barrier.wait();
        let window = load.run(DEPTH, job.duration * LONGER)?;
        load.stop()?;
        Ok::<f64, Failure>(window.rate)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = callers
            .into_iter()
            .map(|caller| scope.spawn(|| one(caller)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a client panicked".into()))
            })
            .collect()
    })
}
