//! [`Simulated`]: the ranks of a job in virtual time, on a simulated HCA and modelled CPUs.
//!
//! Daemons, clients and everything below them are the real code; each daemon and client is an actor
//! of an [`mlx5::Simulation`]. A turn of an actor is one step of a daemon or client. A turn takes
//! the time that [`Cpu`] gives for its work, and its messages are sent at the beginning of that
//! time. An actor without work rests until another actor or the device has work for it. It detects
//! the work at the time at which a polling loop would detect it; a rest counts as the empty rounds
//! of that loop.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::clock::Clock;
use copyrpc_shm::dir::Dir;
use copyrpc_shm::wait::WaitStrategy;
use mlx5::{Device, DeviceSpec, Rule, Simulation, SoftOptions};
use serde::{Deserialize, Serialize};

use super::cluster::Cluster;
use super::threads::{Handle, Shared, Thread, Turns};
pub use super::world::{Change, Cpu, Event, SimulationError, Turn, World};
use crate::activity::WorkerReport;
use crate::backend::daemon::KvDaemon;
use crate::backend::paths::ClientPaths;
use crate::backend::plan::Site;
use crate::backend::{Daemon, Endpoints, OrSetup};
use crate::client::{Client, ClientReport};
use crate::job::Job;
use crate::phase::Phase;
use crate::store::Shard;
use crate::topology::{Peer, Worker};
use crate::trace::Sample;
use crate::trace::recorder::Recorder;

/// Address space of a rank's device.
const ARENA_BYTES: usize = 4 << 30;
/// Maximum time of a drain in which no operation begins or ends although some are due. After this
/// time the simulation gives up outstanding operations. No policy holds a message longer, and no
/// device waits longer for a dead peer.
const DRAIN: Duration = Duration::from_secs(2);
/// Interval at which a drain is checked.
const LOOK: Duration = Duration::from_micros(100);

/// The reports of the threads of a rank.
#[derive(Debug)]
pub struct RankOutcome {
    /// Reports of clients, indexed by number.
    pub clients: Vec<ClientReport>,
    /// Reports of daemons, indexed by number.
    pub daemons: Vec<WorkerReport>,
    /// Time series of each daemon, if the job records them.
    pub series: Vec<Recorder>,
    /// Store of each daemon.
    pub stores: Vec<Shard>,
    /// Whether the rank's host lost power, or one of its threads failed, before the end.
    pub is_dead: bool,
}

/// A job in virtual time.
pub struct Simulated {
    simulation: Simulation<'static>,
    shared: Rc<Shared>,
    ranks: Vec<Threads>,
    /// Wakers of all actors, called when the phase changes and at each [`Change`].
    wakers: Vec<Waker>,
    /// Maximum time for which a client has nothing due; `None` unless the job ends after a number
    /// of operations.
    ops_pause: Option<Duration>,
    /// Changes still to be made, in reverse order, so that the next change is the last element.
    events: Vec<Event>,
    is_strict_about_failures: bool,
}

struct Threads {
    daemons: Vec<Rc<RefCell<Thread<KvDaemon>>>>,
    clients: Vec<Rc<RefCell<Thread<Client<ClientPaths>>>>>,
    device: Device,
    is_dead: bool,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulated")
            .field("simulation", &self.simulation)
            .field("ranks", &self.ranks.len())
            .finish_non_exhaustive()
    }
}

impl Simulated {
    /// Opens and connects every rank of `job`, at time 0.
    ///
    /// # Errors
    /// [`SimulationError::Setup`].
    pub fn new(job: &Job, world: &World) -> Result<Self, SimulationError> {
        let simulation = Simulation::new(world.nic);
        let options = SoftOptions {
            arena_bytes: ARENA_BYTES,
            strict: world.strict,
            trace: world.strict,
            ..simulation.options()
        };
        let dir = Dir::in_memory(Clock::by_hand(simulation.hands()));
        let mut devices = Vec::with_capacity(job.topology.ranks);
        let open = |rank| {
            let spec = DeviceSpec::Soft(SoftOptions {
                faults: world.faults.of_device(rank),
                ..options.clone()
            });
            let device = Device::open(&spec).or_setup("the device of a simulated rank")?;
            devices.push(device.clone());
            let site = Site {
                rank,
                dir: dir.clone(),
                devices: vec![spec],
            };
            Ok((site, Some(device)))
        };
        let cluster = Cluster::on(job, open).map_err(SimulationError::Setup)?;
        let killed = world.faults.killed.map(|at| Event {
            at_ns: at.at_ns,
            change: Change::Kill(at.rank),
        });
        let mut events: Vec<Event> = killed.into_iter().collect();
        events.extend(&world.events);
        events.sort_by_key(|event| std::cmp::Reverse(event.at_ns));
        let pauses = (0..job.topology.ranks).map(|rank| job.longest_pause(rank));
        let ops_pause = pauses.max().filter(|_| job.ops.is_some());
        let mut simulated = Self {
            simulation,
            shared: Rc::new(Shared {
                phase: Cell::new(Phase::Ready),
                failures: RefCell::default(),
                world: world.clone(),
            }),
            ranks: Vec::with_capacity(devices.len()),
            wakers: Vec::new(),
            ops_pause,
            events,
            is_strict_about_failures: true,
        };
        for ((rank, workers), device) in cluster.ranks.into_iter().enumerate().zip(devices) {
            let mut threads = Threads {
                daemons: Vec::new(),
                clients: Vec::new(),
                device,
                is_dead: false,
            };
            for (number, daemon) in workers.daemons.into_iter().enumerate() {
                let asks = || job.topology.asks(rank, number);
                let mut thread = Thread::new(daemon, &simulated.shared, job.runs, (rank, number));
                let interval = world.trace_interval;
                thread.series =
                    interval.map(|interval| Recorder::new(interval, WaitStrategy::Busy, asks()));
                let thread = simulated.spawn(thread, &threads.device)?;
                threads.daemons.push(thread);
            }
            for (number, client) in workers.clients.into_iter().enumerate() {
                let thread = Thread::new(client, &simulated.shared, job.runs, (rank, number));
                let thread = simulated.spawn(thread, &threads.device)?;
                threads.clients.push(thread);
            }
            simulated.ranks.push(threads);
        }
        Ok(simulated)
    }

    /// Makes a daemon or client an actor of the simulation. If the worker has endpoints, the actor
    /// uses `device`, the device of the rank.
    fn spawn<W: Turns + 'static>(
        &mut self,
        mut thread: Thread<W>,
        device: &Device,
    ) -> Result<Rc<RefCell<Thread<W>>>, SimulationError> {
        thread.hca = device.soft().cloned();
        let devices: &[&dyn mlx5::Simulated] = if thread.worker.restful().remote().is_some() {
            &[device]
        } else {
            &[]
        };
        let thread = Rc::new(RefCell::new(thread));
        let actor = self
            .simulation
            .spawn(devices, Handle(Rc::clone(&thread)))
            .or_setup("an actor of the simulation")
            .map_err(SimulationError::Setup)?;
        let waker = self.simulation.bell().waker(actor);
        thread.borrow_mut().waker = waker.clone();
        self.wakers.push(waker);
        Ok(thread)
    }

    /// Runs the warm-up, then `runs` windows of length `window`, then a drain. Returns the reports
    /// of the ranks. A job with a number of operations has no warm-up. It has one window, which
    /// lasts until these operations have ended or no more of them end, and at most for `window`.
    ///
    /// # Errors
    /// The first failure of a daemon or client.
    pub fn run(
        self,
        warmup: Duration,
        window: Duration,
        runs: usize,
    ) -> Result<(Vec<RankOutcome>, Summary), SimulationError> {
        let ended = self.run_through(warmup, window, runs);
        let failure = ended.failures.into_iter().next();
        failure.map_or(Ok((ended.ranks, ended.summary)), Err)
    }

    /// Runs the job like [`run`](Self::run), but continues after failures: a rank dies with its
    /// first thread that fails, as a process would.
    pub fn run_on(mut self, warmup: Duration, window: Duration, runs: usize) -> Ended {
        self.is_strict_about_failures = false;
        self.run_through(warmup, window, runs)
    }

    fn run_through(mut self, warmup: Duration, window: Duration, runs: usize) -> Ended {
        if let Some(pause) = self.ops_pause {
            self.finish(Phase::Window(0), pause, window);
        } else {
            self.pass(Phase::WarmUp, warmup);
            (0..runs).for_each(|run| self.pass(Phase::Window(run as u16), window));
        }
        self.finish(Phase::Drain, Duration::ZERO, Duration::MAX);
        let left = self.left();
        self.pass(Phase::GiveUp, LOOK);
        self.abort();
        let now_ns = self.simulation.now_ns();
        let broken = |rank: &Threads| {
            let hca = rank.device.soft();
            hca.map_or_else(Vec::new, |hca| hca.take_violations())
        };
        // `SourceChanged` is no violation here: copyrpc reuses space of its send ring as soon as
        // the peer has consumed the bytes, which may be before the WRITE completes (S5 of
        // docs/copyrpc-protocol.md).
        let broken = self.ranks.iter().flat_map(broken);
        let broken = broken.filter(|violation| violation.rule != Rule::SourceChanged);
        let violations = broken.map(|violation| violation.to_string());
        let summary = Summary {
            ended_ns: now_ns,
            turns: self.simulation.actor_steps(),
            trace_hash: self.simulation.trace_hash(),
            violations: violations.chain(left).collect(),
        };
        // The actors in the simulation hold the other handles of the threads, so the simulation is
        // dropped before the threads are taken apart.
        drop(self.simulation);
        let ranks = self.ranks.into_iter();
        Ended {
            ranks: ranks.map(|threads| threads.outcome(now_ns)).collect(),
            summary,
            failures: self.shared.failures.take(),
        }
    }

    fn has_failed(&self) -> bool {
        self.is_strict_about_failures && !self.shared.failures.borrow().is_empty()
    }

    fn pass(&mut self, phase: Phase, time: Duration) {
        self.enter(phase);
        self.let_pass(time.as_nanos() as u64);
    }

    fn enter(&self, phase: Phase) {
        self.shared.phase.set(phase);
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Lets `ns` pass, and applies the changes that are due in that time.
    fn let_pass(&mut self, ns: u64) {
        if self.has_failed() {
            return;
        }
        let until_ns = self.simulation.now_ns().saturating_add(ns);
        let is_due = |event: &&Event| event.at_ns <= until_ns;
        while let Some(&Event { at_ns, change }) = self.events.last().filter(is_due) {
            self.events.pop();
            // A change is made before the turns that are due at the same time, so a change at time
            // 0 is made before the job begins.
            if at_ns > self.simulation.now_ns() {
                self.simulation.run(at_ns);
            }
            self.change(change);
        }
        self.simulation.run(until_ns);
        if !self.is_strict_about_failures {
            self.end_failed_ranks();
        }
    }

    /// Enters a phase, and lets time pass until all clients have drained, until no operation begins
    /// or ends for [`DRAIN`] plus `pause`, or until `longest` is over. Clients may have nothing due
    /// for up to `pause`.
    fn finish(&mut self, phase: Phase, pause: Duration, longest: Duration) {
        self.enter(phase);
        let (mut moved, mut quiet) = (0, Duration::ZERO);
        let end_ns = u64::try_from(longest.as_nanos())
            .map_or(u64::MAX, |ns| self.simulation.now_ns().saturating_add(ns));
        while quiet < DRAIN + pause
            && self.simulation.now_ns() < end_ns
            && !self.has_drained()
            && !self.has_failed()
        {
            self.let_pass(LOOK.as_nanos() as u64);
            let clients = self.ranks.iter().flat_map(|rank| &rank.clients);
            let now = clients.map(|client| client.borrow().log.moved()).sum();
            quiet = if now == moved {
                quiet + LOOK
            } else {
                Duration::ZERO
            };
            moved = now;
        }
    }

    fn has_drained(&self) -> bool {
        let mut clients = self.alive().flat_map(|(_, rank)| &rank.clients);
        clients.all(|client| client.borrow().has_drained)
    }

    fn alive(&self) -> impl Iterator<Item = (usize, &Threads)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| !rank.is_dead)
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Kill(rank) => self.kill(rank),
            Change::Policies(act) => {
                let daemons = self.ranks.iter().flat_map(|rank| &rank.daemons);
                daemons.for_each(|daemon| daemon.borrow_mut().worker.act_on_policies(act));
            }
            Change::Load { clients, depth } => {
                let all = self.ranks.iter();
                for (number, client) in all.flat_map(|rank| rank.clients.iter().enumerate()) {
                    let depth = if number < clients { depth } else { 0 };
                    client.borrow_mut().worker.set_queue_depth(depth);
                }
            }
        }
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Cuts the power of the host of a rank.
    fn kill(&mut self, rank: usize) {
        let rank = self.ranks.get_mut(rank);
        if let Some(rank) = rank.filter(|rank| !rank.is_dead) {
            rank.end();
            self.simulation.kill(&rank.device);
        }
    }

    fn end_failed_ranks(&mut self) {
        let failed = |failure: &SimulationError| match failure {
            SimulationError::Failed { rank, .. } => Some(*rank),
            SimulationError::Setup(_) => None,
        };
        let failures = self.shared.failures.borrow();
        let failed: Vec<usize> = failures.iter().filter_map(failed).collect();
        drop(failures);
        failed.into_iter().for_each(|rank| self.kill(rank));
    }

    /// Returns descriptions of the requests, answers and credit that healthy ranks still hold at
    /// the end.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut used: HashMap<(Peer, Peer), [u64; 2]> = HashMap::new();
        for (rank, threads) in self.alive() {
            let mut note = |worker, credit: Vec<(Peer, [u64; 2])>| {
                let own = Peer { rank, worker };
                used.extend(credit.into_iter().map(|(peer, used)| ((own, peer), used)));
            };
            for (number, daemon) in threads.daemons.iter().enumerate() {
                let daemon = &mut daemon.borrow_mut().worker;
                note(Worker::Daemon(number), daemon.credit_used());
                let Sample {
                    outstanding,
                    backlog,
                    held,
                    ..
                } = daemon.gauges();
                if outstanding + backlog + held > 0 {
                    let what = format!(
                        "{outstanding} requests outstanding, {backlog} in backlogs and {held} answers held"
                    );
                    left.push(format!("daemon {number} of rank {rank} ended with {what}"));
                }
            }
            for (number, client) in threads.clients.iter().enumerate() {
                let paths = client.borrow_mut().worker.paths_mut().credit_used();
                note(Worker::Client(number), paths);
            }
        }
        // Where both ends of a connection are alive, the credit that one end has paid equals the
        // credit that the other end has given back.
        let lost = used.iter().filter_map(|((from, to), [paid, _])| {
            let [_, given_back] = used.get(&(*to, *from))?;
            (paid != given_back).then(|| {
                format!("{from} paid {paid} bytes of credit to {to}, which gave {given_back} back")
            })
        });
        let mut lost: Vec<String> = lost.collect();
        lost.sort_unstable();
        left.append(&mut lost);
        left
    }

    fn abort(&self) {
        for rank in &self.ranks {
            let daemons = rank.daemons.iter();
            daemons.for_each(|daemon| daemon.borrow_mut().worker.abort());
            let clients = rank.clients.iter();
            clients.for_each(|client| client.borrow_mut().worker.paths_mut().abort());
        }
    }
}

/// The end of a job that ran despite failures.
#[derive(Debug)]
pub struct Ended {
    /// Outcome of each rank, indexed by number.
    pub ranks: Vec<RankOutcome>,
    /// Counters of the simulation.
    pub summary: Summary,
    /// Failures of daemons and clients, in the order of their occurrence.
    pub failures: Vec<SimulationError>,
}

/// The counters of a simulation, in addition to those of its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Virtual time at the end, in ns.
    pub ended_ns: u64,
    /// Number of turns of all daemons and clients.
    pub turns: u64,
    /// Hash of the times and turns of the run, and with [`World::strict`] also of all actions of
    /// the devices.
    pub trace_hash: u64,
    /// Requests, answers and credit that threads still held at the end; with [`World::strict`] also
    /// violations of rules that a NIC does not check.
    pub violations: Vec<String>,
}

impl Threads {
    /// Ends the threads: none of them takes another turn.
    fn end(&mut self) {
        self.is_dead = true;
        let daemons = self.daemons.iter();
        daemons.for_each(|daemon| daemon.borrow_mut().is_over = true);
        let clients = self.clients.iter();
        clients.for_each(|client| client.borrow_mut().is_over = true);
    }

    fn outcome(self, now_ns: u64) -> RankOutcome {
        let (mut series, mut stores) = (Vec::new(), Vec::new());
        let daemon = |thread: Rc<RefCell<Thread<KvDaemon>>>| {
            let mut thread = Rc::into_inner(thread)?.into_inner();
            let report = WorkerReport {
                policy: thread.worker.policy(),
                trace: thread.series.as_ref().map(Recorder::report),
                ..thread.log.report(now_ns, &mut thread.worker)
            };
            series.extend(thread.series);
            stores.push(thread.worker.into_store());
            Some(report)
        };
        let daemons = self.daemons.into_iter().filter_map(daemon).collect();
        let client = |thread: Rc<RefCell<Thread<Client<ClientPaths>>>>| {
            let mut thread = Rc::into_inner(thread)?.into_inner();
            let report = thread.log.report(now_ns, thread.worker.paths_mut());
            Some(thread.worker.report(report))
        };
        RankOutcome {
            clients: self.clients.into_iter().filter_map(client).collect(),
            daemons,
            series,
            stores,
            is_dead: self.is_dead,
        }
    }
}
