//! The daemons and clients of a simulated job as actors. A turn of an actor is one step of the
//! daemon or client, and takes the time that the model of the CPU gives.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use fastrand::Rng;
use mlx5::hca::Hca;
use mlx5::{Actor, Did};

use super::world::{Cpu, SimulationError, Turn, World};
use crate::activity::ActivityLog;
use crate::backend::daemon::KvDaemon;
use crate::backend::paths::ClientPaths;
use crate::backend::{BackendError, Daemon, Restful};
use crate::client::{Client, Step};
use crate::drain::DAEMON_SLEEP;
use crate::phase::Phase;
use crate::trace::recorder::Recorder;

pub(super) struct Shared {
    pub(super) phase: Cell<Phase>,
    pub(super) failures: RefCell<Vec<SimulationError>>,
    pub(super) world: World,
}

/// The common part of a daemon and a client: the worker, its log, and the state of its rest. A
/// thread rests from a step that finds nothing until there is work.
pub(super) struct Thread<W> {
    pub(super) worker: W,
    pub(super) log: ActivityLog,
    pub(super) waker: Waker,
    pub(super) series: Option<Recorder>,
    pub(super) has_drained: bool,
    /// Whether the thread failed, or its rank is dead. The thread then takes no more turns.
    pub(super) is_over: bool,
    shared: Rc<Shared>,
    cpu: Cpu,
    /// Random numbers that decide which completions fail to wake the thread.
    lost: Rng,
    /// Random numbers of [`Cpu::noise`].
    noise: Rng,
    rests_since_ns: Option<u64>,
    /// The device of the thread's rank; `None` if the device is not simulated.
    pub(super) hca: Option<Rc<Hca>>,
    /// Number of WRITEs and SENDs that a daemon posted in the polls of an unfinished round, or when
    /// its rest began. Their time is added to the next complete round.
    writes: u64,
    /// Messages that a daemon moved, or operations of a client, in the last turn.
    moved: usize,
    rank: usize,
    number: usize,
}

pub(super) trait Turns: Sized {
    const NAME: &str;

    /// Steps the worker. Returns the time that the step takes, or the rest that follows the step.
    fn turn(thread: &mut Thread<Self>, now_ns: u64) -> Result<Did, BackendError>;

    /// Returns the time of a step that finds nothing, in ns.
    fn round_ns(cpu: &Cpu) -> u64;

    fn restful(&mut self) -> &mut dyn Restful;
}

pub(super) struct Handle<W>(pub(super) Rc<RefCell<Thread<W>>>);

impl<W> Thread<W> {
    pub(super) fn new(
        worker: W,
        shared: &Rc<Shared>,
        runs: usize,
        (rank, number): (usize, usize),
    ) -> Self {
        let World { cpu, faults, .. } = &shared.world;
        Self {
            worker,
            log: ActivityLog::new(runs, 0),
            waker: Waker::noop().clone(),
            series: None,
            has_drained: false,
            is_over: false,
            cpu: cpu.times(faults.slowness(rank)),
            lost: Rng::with_seed(faults.seed ^ (rank as u64) << 32 ^ number as u64),
            noise: Rng::with_seed(shared.world.nic.seed ^ (rank as u64) << 32 ^ number as u64),
            shared: Rc::clone(shared),
            rests_since_ns: None,
            hca: None,
            writes: 0,
            moved: 0,
            rank,
            number,
        }
    }

    /// Returns the number of messages that all threads of the rank have sent. The increase during a
    /// turn is the number that the turn has sent.
    fn sends(&self) -> u64 {
        self.hca.as_ref().map_or(0, |hca| hca.sends())
    }

    /// Returns the number of rounds in the present rest and the end of the rest, if the thread is
    /// woken at `now_ns`; `None` if the thread does not rest. A rest lasts whole rounds, like a
    /// loop that polls every `round_ns`.
    fn end_of_rest(&self, now_ns: u64, round_ns: u64) -> Option<(u64, u64)> {
        let since_ns = self.rests_since_ns?;
        let round_ns = round_ns.max(1);
        let rounds = (now_ns - since_ns).div_ceil(round_ns);
        Some((rounds, since_ns + rounds * round_ns))
    }

    /// Ends the rest. Returns the time until the thread detects the wake-up; `None` if the thread
    /// detects it at once or did not rest.
    fn wake(&mut self, now_ns: u64, round_ns: u64) -> Option<u64> {
        let (rounds, end_ns) = self.end_of_rest(now_ns, round_ns)?;
        self.rests_since_ns = None;
        self.log.note_empty(rounds);
        Some(end_ns - now_ns).filter(|ns| *ns > 0)
    }

    /// Begins a rest after a step that found nothing to do. Returns the cost `round_ns` of the step
    /// instead if a rest would not be longer.
    fn rest(
        &mut self,
        rest: Option<Duration>,
        longest: Duration,
        now_ns: u64,
        round_ns: u64,
    ) -> Did {
        let loses = self.shared.world.faults.lost_permille > 0;
        let longest = if loses {
            longest.min(DAEMON_SLEEP)
        } else {
            longest
        };
        match rest.map(|rest| rest.min(longest)) {
            Some(rest) if rest.as_nanos() > u128::from(round_ns) => {
                self.rests_since_ns = Some(now_ns);
                let rest_ns = u64::try_from(rest.as_nanos()).ok();
                let until_ns = rest_ns.and_then(|ns| now_ns.checked_add(ns));
                Did::IdleUntil(until_ns)
            }
            _ => Did::Cost(round_ns),
        }
    }
}

impl<W: Turns> Thread<W> {
    fn turn(&mut self, now_ns: u64) -> Did {
        self.moved = 0;
        if self.is_over {
            return Did::IdleUntil(None);
        }
        if let Some(ns) = self.shared.world.faults.stop_ns(self.rank, now_ns) {
            return Did::Cost(ns);
        }
        if let Some(ns) = self.wake(now_ns, W::round_ns(&self.cpu)) {
            return Did::Cost(ns);
        }
        let did = W::turn(self, now_ns).map(|did| match did {
            Did::Cost(ns) if self.cpu.noise > 0 => {
                let least = 100_u64.saturating_sub(self.cpu.noise);
                Did::Cost(ns * self.noise.u64(least..=200 - least) / 100)
            }
            did => did,
        });
        did.unwrap_or_else(|source| {
            self.is_over = true;
            let failed = SimulationError::Failed {
                who: format!("{} {}", W::NAME, self.number),
                rank: self.rank,
                at_ns: now_ns,
                source,
            };
            self.shared.failures.borrow_mut().push(failed);
            Did::IdleUntil(None)
        })
    }
}

impl<W: Turns> Actor for Handle<W> {
    fn step(&mut self, now_ns: u64) -> Did {
        let thread = &mut *self.0.borrow_mut();
        let did = thread.turn(now_ns);
        if let Some(tell) = thread.shared.world.on_turn {
            tell(&Turn {
                at_ns: now_ns,
                rank: thread.rank,
                who: W::NAME,
                number: thread.number,
                moved: thread.moved,
                did,
            });
        }
        did
    }

    fn has_news(&mut self) -> bool {
        let thread = &mut *self.0.borrow_mut();
        let permille = thread.shared.world.faults.lost_permille;
        let is_lost = |thread: &mut Thread<W>| permille > 0 && thread.lost.u16(..1000) < permille;
        thread.worker.restful().has_news() && !is_lost(thread)
    }

    fn notices_ns(&self, now_ns: u64, is_rung: bool) -> u64 {
        let thread = self.0.borrow();
        let line_ns = if is_rung { thread.cpu.line_ns } else { 0 };
        let now_ns = now_ns.saturating_add(line_ns);
        let end = thread.end_of_rest(now_ns, W::round_ns(&thread.cpu));
        end.map_or(now_ns, |(_, end_ns)| end_ns)
    }
}

impl Turns for KvDaemon {
    const NAME: &str = "daemon";

    fn turn(thread: &mut Thread<Self>, now_ns: u64) -> Result<Did, BackendError> {
        let (cpu, phase) = (thread.cpu, thread.shared.phase.get());
        thread.log.enter(phase, || now_ns, &mut thread.worker);
        let before = thread.sends();
        let round = thread.worker.step(|| now_ns)?;
        thread.moved = round.moved;
        if round.is_part {
            thread.writes += thread.sends() - before;
            return Ok(Did::Cost(cpu.poll_ns));
        }
        thread.log.note_round(round, || now_ns);
        if let Some(series) = &mut thread.series {
            let worker = &thread.worker;
            let gauges = |values: &mut Vec<u32>| {
                worker.by_endpoint(values);
                worker.gauges()
            };
            series.note(phase, round, || now_ns, gauges);
        }
        let now = thread.sends();
        let writes = now - before + std::mem::take(&mut thread.writes);
        if round.moved + round.cqes > 0 || writes > 0 {
            let ns = [
                round.moved as u64 * cpu.message_ns,
                round.cqes as u64 * cpu.completion_ns,
                writes * cpu.write_ns,
            ];
            let stall_ns = if round.moved > 0 { cpu.stall_ns } else { 0 };
            return Ok(Did::Cost(cpu.round_ns + stall_ns + ns.iter().sum::<u64>()));
        }
        let rest = thread.worker.rest(&thread.waker);
        thread.writes = thread.sends() - now;
        Ok(thread.rest(rest, Duration::MAX, now_ns, cpu.round_ns))
    }

    fn round_ns(cpu: &Cpu) -> u64 {
        cpu.round_ns
    }

    fn restful(&mut self) -> &mut dyn Restful {
        self
    }
}

impl Turns for Client<ClientPaths> {
    const NAME: &str = "client";

    fn turn(thread: &mut Thread<Self>, now_ns: u64) -> Result<Did, BackendError> {
        let (cpu, phase) = (thread.cpu, thread.shared.phase.get());
        if thread.has_drained {
            return Ok(Did::IdleUntil(None));
        }
        let is_given_up = phase == Phase::GiveUp;
        let phase = if is_given_up { Phase::Drain } else { phase };
        let paths = thread.worker.paths_mut();
        thread.log.enter(phase, || now_ns, paths);
        let ended = thread.worker.step(phase, || now_ns)?;
        if let Step::Busy(operations) = ended {
            thread.moved = operations;
            thread.log.note(operations);
            let operations_ns = operations as u64 * cpu.operation_ns;
            return Ok(Did::Cost(cpu.client_ns + cpu.stall_ns + operations_ns));
        }
        thread.log.note(0);
        thread.has_drained |= is_given_up || ended == Step::Drained;
        let longest = thread.worker.until_due(now_ns);
        let rest = thread.worker.paths_mut().rest(&thread.waker);
        Ok(thread.rest(rest, longest, now_ns, cpu.client_ns))
    }

    fn round_ns(cpu: &Cpu) -> u64 {
        cpu.client_ns
    }

    fn restful(&mut self) -> &mut dyn Restful {
        self.paths_mut()
    }
}
