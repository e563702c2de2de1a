//! The rounds. Both ranks go through [`ROUND`]. A barrier precedes each measurement that needs
//! both; rank 1 sleeps during the others.

use std::time::Duration;

use bench::load::{Answerer, Caller, Failure, Load, Payload, Rate, Wait, between_threads, serve};
use flux::Config;
use harness::affinity::pin_current_thread;
use harness::clock::Clock;
use launch::echo::Echo;
use launch::exchange::Exchange;
use launch::pingpong::PingPong;

use crate::Job;
use crate::crowd;
use crate::meeting::{CHECKED, DEPTH, Names, meet};
use crate::ours::flux::Network;
use crate::ours::{DelegationClient, DelegationServer, IpcClient, IpcServer};
use crate::result::{Comparison, Figures};
use crate::rivals::array_queue::{QueueAnswerer, QueueCaller, Queues};
use crate::rivals::iceoryx::{IceoryxClient, IceoryxServer};
use crate::rivals::{channel, rings};

/// Unanswered calls of the streaming node of flux.
const FLUX_DEPTH: u32 = 64;
/// The smallest lanes of flux that carry [`FLUX_DEPTH`].
const FLUX: Config = Config {
    capacity: 256,
    in_flight: FLUX_DEPTH as usize,
};
/// Number of clients of the server with many.
const MANY: usize = 1024;

/// The answering ends of rank 1.
#[derive(Debug, Clone, Copy)]
enum Ends {
    /// ipc, one client.
    Alone,
    /// ipc, 1,024 clients.
    Among,
    Iceoryx,
}

/// The measurements between the two processes in a round: the ends, the number of unanswered calls,
/// and the name of the figure.
const ROUND: [(Ends, u32, &str); 5] = [
    (Ends::Alone, 1, "ipc"),
    (Ends::Iceoryx, 1, "iceoryx2"),
    (Ends::Alone, DEPTH, "ipc"),
    // The same measurement twice, next to each other.
    (Ends::Alone, 1, "ipc_1_of_1"),
    (Ends::Among, 1, "ipc_1_of_1024"),
];

/// Answers, in rank 1.
pub(crate) fn answer(job: &Job, exchange: &mut dyn Exchange) -> Result<(), Failure> {
    pin_current_thread(job.cores.1)?;
    let names = Names::agree(exchange)?;
    let mut alone = IpcServer::create(&names.dir, &names.of("alone"), 1, DEPTH)?;
    let mut among = IpcServer::create(&names.dir, &names.of("among"), MANY, DEPTH)?;
    let mut iceoryx = IceoryxServer::create(&job.iceoryx2, &names.of("iceoryx"))?;
    meet(exchange)?;
    // All clients connect meanwhile.
    meet(exchange)?;
    // In the first round all calls are verified.
    for _ in 0..=job.rounds {
        for (ends, ..) in ROUND {
            meet(exchange)?;
            match ends {
                Ends::Alone => serve(&mut alone, 1, Wait::BUSY),
                Ends::Among => serve(&mut among, 1, Wait::BUSY),
                Ends::Iceoryx => serve(&mut iceoryx, 1, Wait::BUSY),
            }?;
        }
    }
    crowd::answer(job, exchange, &names)
}

/// Measures, in rank 0.
pub(crate) fn call(job: &Job, exchange: &mut dyn Exchange) -> Result<Comparison, Failure> {
    pin_current_thread(job.cores.0)?;
    let clock = Clock::detect();
    let names = Names::agree(exchange)?;
    meet(exchange)?;
    let mut across = Across::connect(job, clock, &names)?;
    meet(exchange)?;
    across.round(exchange, None)?;

    let mut within = Within::new(job, clock, &names)?;
    let mut figures = Figures::default();
    for _ in 0..job.rounds {
        baselines(job, clock, &mut figures)?;
        across.round(exchange, Some(&mut figures))?;
        within.round(&mut figures)?;
    }
    let crowds = crowd::call(job, exchange, clock, &names)?;
    let regions = [
        ("delegation_1_client", within.delegation.0.region_bytes()),
        ("flux_2_nodes", lanes_bytes(2)),
        ("flux_8_nodes", lanes_bytes(8)),
    ];
    Ok(Comparison::new(job, &figures, &crowds, regions.into()))
}

/// Returns the bytes of the lanes of a network of flux, by its documentation: a slot is 16 B and
/// the payload, rounded up to 64 B.
fn lanes_bytes(nodes: usize) -> usize {
    nodes * (nodes - 1) * FLUX.capacity * (16 + size_of::<Payload>()).next_multiple_of(64)
}

/// Measures the lower bounds, and the alternatives that every program has.
fn baselines(job: &Job, clock: Clock, figures: &mut Figures) -> Result<(), Failure> {
    let raw = PingPong {
        cores: Some(job.cores),
        duration: job.duration * 2,
    }
    .measure(&clock)?;
    figures.put("raw_cacheline_rtt_ns", raw.latency_ns.p50 as f64);
    let bytes = size_of::<Payload>();
    let echo = Echo {
        depth: 1,
        request_bytes: bytes,
        reply_bytes: bytes,
        duration: job.duration,
    }
    .measure(&clock)?;
    figures.put("uds_echo_rate", echo.rps);
    figures.put("uds_echo_rtt_p50_ns", echo.latency_ns.p50 as f64);
    Ok(())
}

/// Rank 0's ends of the measurements between the two processes.
struct Across {
    clock: Clock,
    duration: Duration,
    alone: IpcClient,
    among: IpcClient,
    _idle: Vec<IpcClient>,
    iceoryx: IceoryxClient,
}

impl Across {
    fn connect(job: &Job, clock: Clock, names: &Names) -> Result<Self, Failure> {
        let connect = |what| IpcClient::connect(&names.dir, &names.of(what));
        let mut idle = (0..MANY)
            .map(|_| connect("among"))
            .collect::<Result<Vec<_>, _>>()?;
        // A client that has neither the first nor the last of the places.
        let among = idle.swap_remove(MANY / 2);
        let iceoryx = IceoryxClient::connect(&job.iceoryx2, &names.of("iceoryx"))?;
        Ok(Self {
            clock,
            duration: job.duration,
            alone: connect("alone")?,
            among,
            _idle: idle,
            iceoryx,
        })
    }

    /// Measures; verifies only, if `figures` is `None`.
    fn round(
        &mut self,
        exchange: &mut dyn Exchange,
        mut figures: Option<&mut Figures>,
    ) -> Result<(), Failure> {
        let (clock, duration) = (self.clock, self.duration);
        for (ends, depth, name) in ROUND {
            meet(exchange)?;
            let figures = figures.as_deref_mut();
            match ends {
                Ends::Alone => one(&mut self.alone, clock, duration, depth, name, figures),
                Ends::Among => one(&mut self.among, clock, duration, depth, name, figures),
                Ends::Iceoryx => one(&mut self.iceoryx, clock, duration, depth, name, figures),
            }?;
        }
        Ok(())
    }
}

fn one(
    caller: &mut impl Caller,
    clock: Clock,
    duration: Duration,
    depth: u32,
    name: &str,
    figures: Option<&mut Figures>,
) -> Result<(), Failure> {
    let mut load = Load::new(caller, clock, Wait::BUSY);
    match figures {
        Some(figures) => figures.push(name, depth, load.run(depth, duration)?),
        None => load.check(depth, CHECKED)?,
    }
    load.stop()
}

/// The measurements between two threads of rank 0.
struct Within<'a> {
    job: &'a Job,
    clock: Clock,
    delegation: (DelegationServer, DelegationClient),
    queues: Queues,
    flux: Network,
    flux_of_8: Network,
    channels: (channel::ChannelCaller, channel::ChannelAnswerer),
    rings: (rings::RingCaller, rings::RingAnswerer),
}

impl<'a> Within<'a> {
    fn new(job: &'a Job, clock: Clock, names: &Names) -> Result<Self, Failure> {
        let name = names.of("delegation");
        let server = DelegationServer::create(&names.dir, &name, 1, DEPTH)?;
        let depth = DEPTH as usize;
        Ok(Self {
            job,
            clock,
            delegation: (server, DelegationClient::connect(&names.dir, &name)?),
            queues: Queues::new(1, depth.next_power_of_two().max(1024), depth),
            flux: Network::new(2, FLUX)?,
            flux_of_8: Network::new(8, FLUX)?,
            channels: channel::pair(FLUX_DEPTH as usize),
            rings: rings::pair(FLUX_DEPTH as usize),
        })
    }

    fn round(&mut self, figures: &mut Figures) -> Result<(), Failure> {
        let Self {
            job,
            clock,
            delegation,
            queues,
            flux,
            flux_of_8,
            channels,
            rings,
        } = self;
        let mut pair = Pair {
            job,
            clock: *clock,
            figures,
        };
        pair.run("delegation", DEPTH, &mut delegation.1, &mut delegation.0)?;
        pair.run(
            "array_queue",
            DEPTH,
            &mut QueueCaller(queues, 0),
            &mut QueueAnswerer(queues),
        )?;
        pair.run("flux", FLUX_DEPTH, &mut flux.caller, &mut flux.answerer)?;
        pair.run(
            "crossbeam_channel",
            FLUX_DEPTH,
            &mut channels.0,
            &mut channels.1,
        )?;
        pair.run("rtrb", FLUX_DEPTH, &mut rings.0, &mut rings.1)?;
        pair.run(
            "flux_of_8",
            FLUX_DEPTH,
            &mut flux_of_8.caller,
            &mut flux_of_8.answerer,
        )
    }
}

struct Pair<'a> {
    job: &'a Job,
    clock: Clock,
    figures: &'a mut Figures,
}

impl Pair<'_> {
    /// Verifies, then measures at depth 1 and at `depth`.
    fn run<C: Caller>(
        &mut self,
        name: &str,
        depth: u32,
        caller: &mut C,
        answerer: &mut (impl Answerer + Send),
    ) -> Result<(), Failure> {
        let Self { job, clock, .. } = *self;
        let windows = between_threads(
            Some(job.cores),
            clock,
            || Ok(answerer),
            || Ok(caller),
            |load| {
                load.check(depth, CHECKED)?;
                Ok::<[Rate; 2], Failure>([
                    load.run(1, job.duration)?,
                    load.run(depth, job.duration)?,
                ])
            },
        )?;
        for (window, depth) in windows.into_iter().zip([1, depth]) {
            self.figures.push(name, depth, window);
        }
        Ok(())
    }
}
