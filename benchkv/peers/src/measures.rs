//! The rounds. Both ranks make the same measurements between two processes. While rank 0 measures
//! between two of its threads, rank 1 sleeps.

use std::sync::Barrier;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::pin_current_thread;
use benchkv_harness::baseline::{cache_line_ns, unix_echo_rps};
use benchkv_harness::clock::Clock;
use benchkv_harness::launch::exchange::Exchange;
use benchkv_harness::load::{Answerer, Caller, Load, Payload, Rate, Wait, between_threads, serve};
use benchkv_harness::report::Spread;
use flux::Config;
use ipc::Dir;

use crate::Job;
use crate::iceoryx::{IceoryxClient, IceoryxServer};
use crate::ours::flux::Network;
use crate::ours::{DelegationClient, DelegationServer, IpcClient, IpcServer};
use crate::queues::{array_queue, channel, crossfire, kanal, pair, ring};
use crate::result::Figures;

/// Maximum number of unanswered calls of a client of ipc or delegationrpc. A client that streams
/// keeps this number of calls unanswered.
const DEPTH: u32 = 32;
/// Number of unanswered calls of the node of flux that streams.
const FLUX_DEPTH: u32 = 64;
/// The configuration of flux with the smallest lanes that carry [`FLUX_DEPTH`] calls.
const FLUX: Config = Config {
    capacity: 256,
    in_flight: FLUX_DEPTH as usize,
};
/// Number of calls that are verified before a measurement.
const CHECKED: u64 = 10_000;
/// Time for which a bare cache line is measured between two measurements.
const LINE: Duration = Duration::from_millis(8);
/// Number of clients of the server in the measurement with many clients.
const MANY: usize = 1024;
/// Numbers of clients that stream at once.
const CROWDS: [usize; 4] = [1, 2, 4, 8];
/// Maximum number of rounds that measure crowds (see `Across::crowd`); such a round takes about 10
/// s, and five are enough for a median.
const MOST_CROWDED: u32 = 5;
/// Factor by which windows with a crowd are longer. Eight clients then take many turns on one core,
/// even if a turn is as long as the scheduler's time slice.
const LONGER: u32 = 4;
/// Maximum time that the ranks wait for each other.
const MEET_LIMIT: Duration = Duration::from_secs(60);

fn meet(exchange: &mut dyn Exchange) -> Result<(), Failure> {
    Ok(exchange.barrier(MEET_LIMIT, &|| false)?)
}

#[derive(Debug, Clone, Copy)]
enum Ends {
    Ipc,
    Delegation,
    Iceoryx,
}

/// A measurement between the two processes: clients are threads of rank 0, the server is rank 1.
#[derive(Debug, Clone, Copy)]
struct Across {
    /// The name of the figures. For a crowd, the number of calling clients is added to the name.
    name: &'static str,
    ends: Ends,
    /// Number of connected clients; `callers` is the number of clients that call.
    clients: usize,
    callers: usize,
    depth: u32,
    /// The server of a crowd; `None` for other measurements. A crowd is a number of clients that
    /// stream at the same time. They share one core, so they yield the core when they wait. The
    /// server has the other core, or shares the core of the clients. On a shared core, a single
    /// client has to wait for the core too, as each of eight clients has to. So the difference
    /// between one client and eight clients is the cost of the additional clients alone.
    crowd: Option<Server>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Server {
    HasOwnCore,
    SharesCore,
}

impl Across {
    /// Returns the measurements between the processes in a round, in the order in which both ranks
    /// make them.
    fn of_round(round: u32) -> impl Iterator<Item = Self> {
        let one = |name, ends, clients, depth| Self {
            name,
            ends,
            clients,
            callers: 1,
            depth,
            crowd: None,
        };
        let crowds = [
            ("ipc_two_cores", Ends::Ipc, Server::HasOwnCore),
            ("delegation_two_cores", Ends::Delegation, Server::HasOwnCore),
            ("ipc_one_core", Ends::Ipc, Server::SharesCore),
            ("delegation_one_core", Ends::Delegation, Server::SharesCore),
        ];
        let crowds = crowds.into_iter().flat_map(|(name, ends, server)| {
            CROWDS.map(|callers| Self {
                name,
                ends,
                clients: callers,
                callers,
                depth: DEPTH,
                crowd: Some(server),
            })
        });
        let pairs = [
            one("ipc", Ends::Ipc, 1, 1),
            one("iceoryx2", Ends::Iceoryx, 1, 1),
            one("ipc", Ends::Ipc, 1, DEPTH),
            // The next two are the same measurement with 1 and with 1,024 connected clients, one
            // right after the other.
            one("ipc_1_of_1", Ends::Ipc, 1, 1),
            one("ipc_1_of_1024", Ends::Ipc, MANY, 1),
        ];
        pairs
            .into_iter()
            .chain(crowds.filter(move |_| round < MOST_CROWDED))
    }

    const fn wait(&self) -> Wait<'static> {
        match self.crowd {
            None => Wait::BUSY,
            Some(_) => Wait::YIELD,
        }
    }
}

/// Runs rank 1, which answers.
pub(crate) fn answer(job: &Job, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    let dir = Dir::open(None)?;
    dir.sweep()?;
    let measurements = (0..job.rounds).flat_map(Across::of_round);
    for (number, across) in measurements.enumerate() {
        pin_current_thread(match across.crowd {
            Some(Server::SharesCore) => job.cores.0,
            _ => job.cores.1,
        })?;
        let name = format!("peers-{}-{number}", std::process::id());
        let clients = across.clients;
        match across.ends {
            Ends::Ipc => {
                let server = IpcServer::create(&dir, &name, clients, DEPTH)?;
                let bytes = server.region_bytes();
                serve_all(&across, exchange, &name, server, bytes)?;
            }
            Ends::Delegation => {
                let server = DelegationServer::create(&dir, &name, clients, DEPTH)?;
                let bytes = server.region_bytes();
                serve_all(&across, exchange, &name, server, bytes)?;
            }
            Ends::Iceoryx => {
                let server = IceoryxServer::create(&job.iceoryx2, &name)?;
                serve_all(&across, exchange, &name, server, 0)?;
            }
        }
    }
    Ok(())
}

/// Sends the server's name and the size of its region, in bytes, to rank 0, and serves the callers.
fn serve_all(
    across: &Across,
    exchange: &mut dyn Exchange,
    name: &str,
    mut server: impl Answerer,
    region_bytes: usize,
) -> Result<(), Failure> {
    let said = format!("{name} {region_bytes}");
    exchange.all_gather(said.as_bytes(), MEET_LIMIT, &|| false)?;
    serve(&mut server, across.callers, across.wait())?;
    meet(exchange)
}

/// Runs rank 0, which measures. Returns the figures.
pub(crate) fn call(job: &Job, exchange: &mut dyn Exchange) -> Result<Figures, Failure> {
    pin_current_thread(job.cores.0)?;
    let mut calling = Calling {
        job,
        clock: Clock::detect(),
        dir: Dir::open(None)?,
        figures: Figures::new(),
    };
    for round in 0..job.rounds {
        calling.note_line()?;
        calling.baselines()?;
        calling.note_line()?;
        for across in Across::of_round(round) {
            let parts = exchange.all_gather(&[], MEET_LIMIT, &|| false)?;
            let said = parts.get(1).map_or(&[][..], Vec::as_slice);
            let (name, bytes) = std::str::from_utf8(said)?
                .split_once(' ')
                .ok_or("the server has no name")?;
            calling.across(&across, name, bytes.parse()?)?;
            meet(exchange)?;
            calling.note_line()?;
        }
        calling.within(round)?;
    }
    Ok(calling.figures)
}

struct Calling<'a> {
    job: &'a Job,
    clock: Clock,
    dir: Dir,
    figures: Figures,
}

impl Calling<'_> {
    /// Measures how far the two cores are from each other now. No other measurement may be under
    /// way.
    fn note_line(&mut self) -> Result<(), Failure> {
        let line_ns = cache_line_ns(Some(self.job.cores), self.clock, LINE)?;
        self.figures.note_line(line_ns);
        Ok(())
    }

    /// Measures the ping-pong of a cache line and the echo of a socket; calculates the bytes of
    /// flux's lanes.
    fn baselines(&mut self) -> Result<(), Failure> {
        let Self { job, figures, .. } = self;
        let raw_ns = cache_line_ns(Some(job.cores), self.clock, job.duration * 2)?;
        figures.put("raw_cacheline_rtt_ns", raw_ns);
        figures.put("uds_echo_rate", unix_echo_rps(self.clock, job.duration)?);
        // The documentation of flux gives the size of a slot: 16 bytes and the payload, rounded up
        // to a multiple of 64.
        let lane_bytes = FLUX.capacity * (16 + size_of::<Payload>()).next_multiple_of(64);
        for nodes in [2, 8] {
            let bytes = nodes * (nodes - 1) * lane_bytes;
            figures.put(&format!("flux_{nodes}_nodes_bytes"), bytes as f64);
        }
        Ok(())
    }

    fn across(&mut self, across: &Across, name: &str, region_bytes: f64) -> Result<(), Failure> {
        let (dir, place) = (&self.dir, &self.job.iceoryx2);
        let rates = match across.ends {
            Ends::Ipc => self.at_once(across, || IpcClient::connect(dir, name)),
            Ends::Delegation => self.at_once(across, || DelegationClient::connect(dir, name)),
            Ends::Iceoryx => self.at_once(across, || IceoryxClient::connect(place, name)),
        }?;
        let figures = &mut self.figures;
        if across.crowd.is_none() {
            for rate in rates {
                figures.push(across.name, across.depth, rate);
            }
            return Ok(());
        }
        let name = format!("{}_{}", across.name, across.callers);
        let rates = rates.iter().map(|rate| rate.rate);
        let Spread { min, max, .. } = Spread::of(rates.clone());
        figures.put(&format!("{name}_rate"), rates.sum());
        // The fairness is the rate of the slowest client divided by the rate of the fastest client.
        figures.put(&format!("{name}_fairness"), min / max);
        figures.put(&format!("{name}_region_bytes"), region_bytes);
        Ok(())
    }

    /// Verifies the calls of the callers, then measures the rates of the callers, which start
    /// together on this thread's core. Half of the other clients have places in the server's region
    /// before the callers' places, and half after them.
    fn at_once<C: Caller>(
        &self,
        across: &Across,
        connect: impl Fn() -> Result<C, Failure> + Sync,
    ) -> Result<Vec<Rate>, Failure> {
        let idle = |count| (0..count).map(|_| connect()).collect::<Result<Vec<_>, _>>();
        let others = across.clients - across.callers;
        let _before = idle(others / 2)?;
        let (barrier, clock) = (&Barrier::new(across.callers), self.clock);
        let connected = &Barrier::new(across.callers + 1);
        let longer = if across.crowd.is_some() { LONGER } else { 1 };
        let duration = self.job.duration * longer;
        let one = || {
            let caller = connect();
            connected.wait();
            connected.wait();
            let mut caller = caller?;
            let mut load = Load::new(&mut caller, clock, across.wait());
            load.check(across.depth, CHECKED)?;
            barrier.wait();
            let rate = load.run(across.depth, duration)?;
            load.stop()?;
            Ok::<Rate, Failure>(rate)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..across.callers).map(|_| scope.spawn(one)).collect();
            connected.wait();
            let behind = idle(others - others / 2);
            connected.wait();
            let panicked = |_| Err("a client panicked".into());
            let rates = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(panicked));
            let rates = rates.collect();
            behind.and(rates)
        })
    }

    /// Measures between two threads.
    fn within(&mut self, round: u32) -> Result<(), Failure> {
        let name = format!("peers-{}-within-{round}", std::process::id());
        let server = DelegationServer::create(&self.dir, &name, 1, DEPTH)?;
        let client = DelegationClient::connect(&self.dir, &name)?;
        self.pair("delegation", DEPTH, client, server)?;
        let (caller, answerer) = pair(|| array_queue(1024));
        self.pair("array_queue", DEPTH, caller, answerer)?;
        let flux = Network::new(2, FLUX)?;
        self.pair("flux", FLUX_DEPTH, flux.caller, flux.answerer)?;
        let (caller, answerer) = pair(|| channel(FLUX_DEPTH as usize));
        self.pair("crossbeam_channel", FLUX_DEPTH, caller, answerer)?;
        let (caller, answerer) = pair(|| crossfire(FLUX_DEPTH as usize));
        self.pair("crossfire", FLUX_DEPTH, caller, answerer)?;
        let (caller, answerer) = pair(|| kanal(FLUX_DEPTH as usize));
        self.pair("kanal", FLUX_DEPTH, caller, answerer)?;
        let (caller, answerer) = pair(|| ring(FLUX_DEPTH as usize));
        self.pair("rtrb", FLUX_DEPTH, caller, answerer)?;
        let flux = Network::new(8, FLUX)?;
        self.pair("flux_of_8", FLUX_DEPTH, flux.caller, flux.answerer)
    }

    /// Verifies, then measures at depth 1 and at `depth`.
    fn pair(
        &mut self,
        name: &str,
        depth: u32,
        caller: impl Caller,
        answerer: impl Answerer + Send,
    ) -> Result<(), Failure> {
        let Self { job, clock, .. } = *self;
        let rates = between_threads(
            Some(job.cores),
            clock,
            || Ok(answerer),
            || Ok(caller),
            |load| {
                load.check(depth, CHECKED)?;
                let rate = load.run(1, job.duration)?;
                Ok::<[Rate; 2], Failure>([rate, load.run(depth, job.duration)?])
            },
        )?;
        for (rate, depth) in rates.into_iter().zip([1, depth]) {
            self.figures.push(name, depth, rate);
        }
        self.note_line()
    }
}
