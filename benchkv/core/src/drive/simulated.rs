//! [`Simulated`]: the ranks of a job in virtual time, on the simulation of the software HCA and a model of their CPUs.
//!
//! Daemons, clients and everything below them are the real code; each is an actor of an [`mlx5::Simulation`]. A turn of an actor is one step of a
//! daemon or client, and takes as long as [`Cpu`] says of what it did; what it sends leaves at the beginning of that time. One that finds nothing to
//! do rests until a neighbour or its device has something for it, and then notices it when a loop that had polled on would have: rests are
//! counted as the empty rounds they stand for.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use mlx5::{Actor, Bell, Device, DeviceSpec, Did, NicParameters, Rule, Simulation, SoftOptions};
use serde::{Deserialize, Serialize};
use shm::clock::Clock;
use shm::dir::Dir;
use shm::wait::WaitStrategy;

use super::cluster::{Cluster, Rank};
use crate::activity::{ActivityLog, WorkerReport};
use crate::backend::daemon::KvDaemon;
use crate::backend::paths::ClientPaths;
use crate::backend::plan::Site;
use crate::backend::{BackendError, Daemon, Restful};
use crate::client::{Client, ClientReport, Step};
use crate::job::Job;
use crate::phase::Phase;
use crate::store::Shard;
use crate::trace::recorder::Recorder;

/// Address space of a rank's device.
const ARENA_BYTES: usize = 4 << 30;
/// A drain in which no operation ends for so long gives up what is outstanding. No policy holds a message back for longer, and no device waits longer
/// for a dead peer.
const DRAIN_NS: u64 = 2_000_000_000;
/// A drain is looked at so often.
const LOOK_NS: u64 = 100_000;

/// What CPUs take, in ns. A core does the work of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// A round of a daemon in which nothing is found.
    pub round_ns: u64,
    /// A poll that a policy adds to a round.
    pub poll_ns: u64,
    /// A message that a round of a daemon moves, received and sent on.
    pub message_ns: u64,
    /// A completion that it takes.
    pub completion_ns: u64,
    /// A WRITE or SEND posted.
    pub write_ns: u64,
    /// A step of a client in which nothing is found.
    pub client_ns: u64,
    /// An operation that it issues, or that ends.
    pub operation_ns: u64,
}

impl Default for Cpu {
    /// Assumptions, not measurements: an operation through all its threads takes of the order of the instructions that `scripts/instructions`
    /// counts for it, at 3 a nanosecond; how they are shared out is a guess.
    fn default() -> Self {
        Self { round_ns: 60, poll_ns: 25, message_ns: 70, completion_ns: 40, write_ns: 100, client_ns: 25, operation_ns: 60 }
    }
}

/// What is simulated beside the job itself.
#[derive(Debug, Clone)]
pub struct World {
    /// The CPUs.
    pub cpu: Cpu,
    /// The network and its NICs, one a rank.
    pub nic: NicParameters,
    /// Whether the devices check everything a NIC would not, and hash all they do: for tests; it takes most of the time.
    pub strict: bool,
    /// Rounds between the samples of a daemon's time series; `None`: no series.
    pub trace_interval: Option<u64>,
}

/// Why a simulated job ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Something could not be made or connected.
    #[error(transparent)]
    Setup(BackendError),
    /// A daemon or client failed.
    #[error("{who} of rank {rank}, at {at_ns} ns: {source}")]
    Failed {
        /// The daemon or client.
        who: String,
        /// Its rank.
        rank: usize,
        /// When.
        at_ns: u64,
        /// How.
        source: BackendError,
    },
}

/// What the threads of a rank found out.
#[derive(Debug)]
pub struct RankOutcome {
    /// By number.
    pub clients: Vec<ClientReport>,
    /// By number.
    pub daemons: Vec<WorkerReport>,
    /// By daemon, if a series was wanted.
    pub series: Vec<Recorder>,
    /// By daemon: what it holds.
    pub stores: Vec<Shard>,
}

/// A job in virtual time.
pub struct Simulated {
    simulation: Simulation<'static>,
    shared: Rc<Shared>,
    ranks: Vec<Threads>,
    /// Everybody, for a change of the phase.
    wakers: Vec<Waker>,
    /// By rank.
    devices: Vec<Device>,
    /// The job is one of a number of operations.
    has_ops: bool,
}

/// What the actors of a job share.
struct Shared {
    phase: Cell<Phase>,
    failure: RefCell<Option<SimulationError>>,
    cpu: Cpu,
}

struct Threads {
    daemons: Vec<Rc<RefCell<Thread<KvDaemon>>>>,
    clients: Vec<Rc<RefCell<Thread<Client<ClientPaths>>>>>,
}

/// What a daemon and a client have in common: the worker, its log, and its rest.
struct Thread<W> {
    worker: W,
    shared: Rc<Shared>,
    log: ActivityLog,
    waker: Waker,
    /// Since when it rests.
    rests_since_ns: Option<u64>,
    series: Option<Recorder>,
    has_drained: bool,
    has_failed: bool,
    /// WRITEs and SENDs of a daemon so far.
    writes: u64,
    rank: usize,
    number: usize,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulated").field("simulation", &self.simulation).field("ranks", &self.ranks.len()).finish_non_exhaustive()
    }
}

impl Simulated {
    /// Opens and connects every rank of `job`, at time 0.
    ///
    /// # Errors
    /// [`SimulationError::Setup`].
    pub fn new(job: &Job, world: &World) -> Result<Self, SimulationError> {
        let mut simulation = Simulation::new(world.nic);
        let options = SoftOptions { arena_bytes: ARENA_BYTES, strict: world.strict, trace: world.strict, ..simulation.options() };
        let dir = Dir::in_memory(Clock::by_hand(simulation.hands()));
        let spec = DeviceSpec::Soft(options);
        let mut devices = Vec::with_capacity(job.topology.ranks);
        let open = |rank| {
            let device = Device::open(&spec).map_err(|e| BackendError::setup("the device of a simulated rank", e))?;
            devices.push(device.clone());
            Ok((Site { rank, process: 0, dir: dir.clone(), device: spec.clone() }, Some(device)))
        };
        let cluster = Cluster::on(job, open).map_err(SimulationError::Setup)?;
        let shared = Rc::new(Shared { phase: Cell::new(Phase::Ready), failure: RefCell::default(), cpu: world.cpu });
        let (bell, mut wakers) = (simulation.bell(), Vec::new());
        let mut ranks = Vec::with_capacity(devices.len());
        for ((number, rank), device) in cluster.ranks.into_iter().enumerate().zip(&devices) {
            let Rank { daemons, clients } = rank;
            let mut spawner = Spawner {
                simulation: &mut simulation,
                bell: &bell,
                device,
                shared: &shared,
                runs: job.runs,
                rank: number,
                wakers: &mut wakers,
            };
            let series = || world.trace_interval.map(|interval| Recorder::new(interval, WaitStrategy::Busy));
            let daemons = daemons
                .into_iter()
                .enumerate()
                .map(|(number, daemon)| spawner.spawn(number, daemon, series()))
                .collect::<Result<_, _>>()?;
            let clients =
                clients.into_iter().enumerate().map(|(number, client)| spawner.spawn(number, client, None)).collect::<Result<_, _>>()?;
            ranks.push(Threads { daemons, clients });
        }
        Ok(Self { simulation, shared, ranks, wakers, devices, has_ops: job.ops.is_some() })
    }

    /// Warm-up, then `runs` windows of `window`, then a drain. Returns what every rank found out. A job of a number of operations has one
    /// window, which is as long as they take, and no warm-up.
    ///
    /// # Errors
    /// The first failure of a daemon or client.
    pub fn run(mut self, warmup: Duration, window: Duration, runs: usize) -> Result<(Vec<RankOutcome>, Summary), SimulationError> {
        let nanos = |time: Duration| time.as_nanos() as u64;
        if self.has_ops {
            self.finish(Phase::Window(0))?;
        } else {
            self.pass(Phase::WarmUp, nanos(warmup))?;
            for run in 0..runs {
                self.pass(Phase::Window(run as u16), nanos(window))?;
            }
        }
        self.finish(Phase::Drain)?;
        self.pass(Phase::GiveUp, LOOK_NS)?;
        self.abort();
        let now_ns = self.simulation.now_ns();
        let broken = |device: &Device| device.soft().map_or_else(Vec::new, |hca| hca.take_violations());
        let violations: Vec<String> = self
            .devices
            .iter()
            .flat_map(broken)
            // copyrpc reuses what its peer has told to have consumed: S5 of its protocol says why it may.
            .filter(|violation| violation.rule != Rule::SourceChanged)
            .map(|violation| violation.to_string())
            .collect();
        let summary =
            Summary { ended_ns: now_ns, turns: self.simulation.actor_steps(), trace_hash: self.simulation.trace_hash(), violations };
        // The actors have the other handles.
        drop(self.simulation);
        Ok((self.ranks.into_iter().map(|threads| threads.outcome(now_ns)).collect(), summary))
    }

    /// Enters a phase, and lets this much time pass.
    fn pass(&mut self, phase: Phase, ns: u64) -> Result<(), SimulationError> {
        self.enter(phase);
        self.simulation.run(self.simulation.now_ns().saturating_add(ns));
        self.shared.failure.take().map_or(Ok(()), Err)
    }

    fn enter(&self, phase: Phase) {
        self.shared.phase.set(phase);
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Enters a phase, and lets time pass until all clients have drained, or nothing ends any more.
    fn finish(&mut self, phase: Phase) -> Result<(), SimulationError> {
        self.enter(phase);
        let (mut moved, mut quiet_ns) = (0, 0);
        while quiet_ns < DRAIN_NS && !self.ranks.iter().flat_map(|rank| &rank.clients).all(|client| client.borrow().has_drained) {
            self.simulation.run(self.simulation.now_ns() + LOOK_NS);
            self.shared.failure.take().map_or(Ok(()), Err)?;
            let now = self.ranks.iter().flat_map(|rank| &rank.clients).map(|client| client.borrow().log.moved()).sum();
            quiet_ns = if now == moved { quiet_ns + LOOK_NS } else { 0 };
            moved = now;
        }
        Ok(())
    }

    fn abort(&self) {
        for Threads { daemons, clients } in &self.ranks {
            daemons.iter().for_each(|daemon| daemon.borrow_mut().worker.abort());
            clients.iter().for_each(|client| client.borrow_mut().worker.paths_mut().abort());
        }
    }
}

/// What a simulation did, beside what its job did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Virtual time at the end, in ns.
    pub ended_ns: u64,
    /// Turns of all daemons and clients.
    pub turns: u64,
    /// Equal where two simulations did the same; of the times and turns alone unless [`World::strict`].
    pub trace_hash: u64,
    /// Rules that programs broke, which a NIC would not have noticed; none unless [`World::strict`].
    pub violations: Vec<String>,
}

struct Spawner<'a> {
    simulation: &'a mut Simulation<'static>,
    bell: &'a Bell,
    device: &'a Device,
    shared: &'a Rc<Shared>,
    runs: usize,
    rank: usize,
    wakers: &'a mut Vec<Waker>,
}

impl Spawner<'_> {
    fn spawn<W>(&mut self, number: usize, worker: W, series: Option<Recorder>) -> Result<Rc<RefCell<Thread<W>>>, SimulationError>
    where
        W: 'static,
        Handle<W>: Actor,
    {
        let log = ActivityLog::new(self.runs, 0);
        let (shared, rank) = (Rc::clone(self.shared), self.rank);
        let thread = Thread {
            worker,
            shared,
            log,
            waker: Waker::noop().clone(),
            rests_since_ns: None,
            series,
            has_drained: false,
            has_failed: false,
            writes: 0,
            rank,
            number,
        };
        let thread = Rc::new(RefCell::new(thread));
        let actor = self.simulation.spawn(&[self.device], Handle(Rc::clone(&thread)));
        let actor = actor.map_err(|e| SimulationError::Setup(BackendError::setup("an actor of the simulation", e)))?;
        let waker = self.bell.waker(actor);
        thread.borrow_mut().waker = waker.clone();
        self.wakers.push(waker);
        Ok(thread)
    }
}

/// A thread as an actor.
struct Handle<W>(Rc<RefCell<Thread<W>>>);

impl<W> Thread<W> {
    /// One that rested notices what there is when a loop that polls every `round_ns` would have: after so long, if not now.
    fn wake(&mut self, now_ns: u64, round_ns: u64) -> Option<u64> {
        let since_ns = self.rests_since_ns.take()?;
        let round_ns = round_ns.max(1);
        let rounds = (now_ns - since_ns).div_ceil(round_ns);
        self.log.note_empty(rounds);
        Some(since_ns + rounds * round_ns - now_ns).filter(|ns| *ns > 0)
    }

    /// A step found nothing to do, and took `round_ns`.
    fn rest(&mut self, rest: Option<Duration>, longest: Duration, now_ns: u64, round_ns: u64) -> Did {
        match rest.map(|rest| rest.min(longest)) {
            Some(rest) if rest.as_nanos() > u128::from(round_ns) => {
                self.rests_since_ns = Some(now_ns);
                let until_ns = u64::try_from(rest.as_nanos()).ok().and_then(|ns| now_ns.checked_add(ns));
                Did::IdleUntil(until_ns)
            }
            _ => Did::Cost(round_ns),
        }
    }

    fn fail(&mut self, who: &str, now_ns: u64, source: BackendError) -> Did {
        self.has_failed = true;
        let failure = SimulationError::Failed { who: format!("{who} {}", self.number), rank: self.rank, at_ns: now_ns, source };
        self.shared.failure.borrow_mut().get_or_insert(failure);
        Did::IdleUntil(None)
    }
}

impl Actor for Handle<KvDaemon> {
    fn step(&mut self, now_ns: u64) -> Did {
        let thread = &mut *self.0.borrow_mut();
        let (cpu, phase) = (thread.shared.cpu, thread.shared.phase.get());
        if thread.has_failed {
            return Did::IdleUntil(None);
        }
        if let Some(ns) = thread.wake(now_ns, cpu.round_ns) {
            return Did::Cost(ns);
        }
        thread.log.enter(phase, || now_ns, &mut thread.worker);
        let round = match thread.worker.step(|| now_ns) {
            Ok(round) => round,
            Err(error) => {
                return thread.fail("daemon", now_ns, error);
            }
        };
        if round.is_part {
            return Did::Cost(cpu.poll_ns);
        }
        thread.log.note_round(round, || now_ns);
        if let Some(series) = &mut thread.series {
            series.note(phase, round, || now_ns, || thread.worker.gauges());
        }
        let writes = thread.worker.gauges().writes;
        let writes = writes - std::mem::replace(&mut thread.writes, writes);
        if round.moved + round.cqes > 0 || writes > 0 {
            let ns = [round.moved as u64 * cpu.message_ns, round.cqes as u64 * cpu.completion_ns, writes * cpu.write_ns];
            return Did::Cost(cpu.round_ns + ns.iter().sum::<u64>());
        }
        let rest = thread.worker.rest(&thread.waker);
        thread.rest(rest, Duration::MAX, now_ns, cpu.round_ns)
    }

    fn has_news(&mut self) -> bool {
        self.0.borrow_mut().worker.has_news()
    }
}

impl Actor for Handle<Client<ClientPaths>> {
    fn step(&mut self, now_ns: u64) -> Did {
        let thread = &mut *self.0.borrow_mut();
        let (cpu, phase) = (thread.shared.cpu, thread.shared.phase.get());
        if thread.has_drained || thread.has_failed {
            return Did::IdleUntil(None);
        }
        if let Some(ns) = thread.wake(now_ns, cpu.client_ns) {
            return Did::Cost(ns);
        }
        let is_given_up = phase == Phase::GiveUp;
        let phase = if is_given_up { Phase::Drain } else { phase };
        thread.log.enter(phase, || now_ns, thread.worker.paths_mut());
        match thread.worker.step(phase, || now_ns) {
            Ok(Step::Busy(operations)) => {
                thread.log.note(operations);
                Did::Cost(cpu.client_ns + operations as u64 * cpu.operation_ns)
            }
            Ok(ended) => {
                thread.log.note(0);
                thread.has_drained |= is_given_up || ended == Step::Drained;
                let longest = thread.worker.until_due(now_ns);
                let rest = thread.worker.paths_mut().rest(&thread.waker);
                thread.rest(rest, longest, now_ns, cpu.client_ns)
            }
            Err(error) => thread.fail("client", now_ns, error),
        }
    }

    fn has_news(&mut self) -> bool {
        self.0.borrow_mut().worker.paths_mut().has_news()
    }
}

impl Threads {
    fn outcome(self, now_ns: u64) -> RankOutcome {
        let (mut series, mut stores) = (Vec::new(), Vec::new());
        let daemon = |thread: Rc<RefCell<Thread<KvDaemon>>>| {
            let Thread { mut worker, log, series: recorder, .. } = Rc::into_inner(thread)?.into_inner();
            let report = log.report(now_ns, &mut worker);
            let trace = recorder.as_ref().map(Recorder::report);
            series.extend(recorder);
            let report = WorkerReport { policy: worker.policy(), trace, ..report };
            stores.push(worker.into_store());
            Some(report)
        };
        let daemons = self.daemons.into_iter().filter_map(daemon).collect();
        let client = |thread: Rc<RefCell<Thread<Client<ClientPaths>>>>| {
            let Thread { mut worker, log, .. } = Rc::into_inner(thread)?.into_inner();
            let report = log.report(now_ns, worker.paths_mut());
            Some(worker.report(report))
        };
        let clients = self.clients.into_iter().filter_map(client).collect();
        RankOutcome { clients, daemons, series, stores }
    }
}
