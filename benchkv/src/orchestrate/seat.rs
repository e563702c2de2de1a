//! A client from its first connection to its report: the same in a thread of its rank and in a process of its own.

use harness::affinity::pin_current_thread;
use harness::clock::Clock;
use shm::sleep::SLICE;
use shm::wait::Waiter;

use super::RankError;
use crate::control::Steering;
use crate::interval::Tallies;
use crate::options::Options;
use engine::activity::ActivityLog;
use engine::backend::{Backend, Paths};
use engine::client::{Client, ClientReport, Step};
use engine::phase::Phase;

/// The state of a rank that a client needs.
#[derive(Debug)]
pub(super) struct Seat<'a, B> {
    pub(super) options: &'a Options,
    pub(super) backend: &'a B,
    pub(super) clock: Clock,
    pub(super) rank: usize,
    pub(super) steering: &'a Steering,
    /// With `--report-interval`, on rank 0.
    pub(super) tallies: Option<&'a Tallies>,
}

impl<B: Backend> Seat<'_, B> {
    /// Runs client `number` of the rank, on the calling thread. `connect` exchanges the records of its endpoints, and returns `false` if
    /// the rank has given up.
    pub(super) fn run(
        &self,
        number: usize,
        connect: impl FnOnce(&mut B::Paths) -> Result<bool, RankError>,
    ) -> Result<ClientReport, RankError> {
        let options = self.options;
        if let Some(core) = options.launcher.local_rank(self.rank).and_then(|rank| options.plan.client_core(rank, number)) {
            pin_current_thread(core)?;
        }
        // This takes a while: the rank begins when its clients are connected.
        let spec = options.job.client(self.rank, number);
        let mut paths = self.backend.open_client(number)?;
        let is_wanted = connect(&mut paths)?;
        let mut client = Client::new(spec, paths);
        let mut log = ActivityLog::new(options.job.runs, self.clock.now_ns());
        let mut waiter = options.wait.waiter();
        let mut desk = self.tallies.and_then(|tallies| tallies.desk(number));
        while is_wanted && !self.steering.is_stopped() {
            let phase = self.steering.phase();
            let is_given_up = phase == Phase::GiveUp;
            // Answers that have arrived by then still count.
            let step = self.step(&mut client, if is_given_up { Phase::Drain } else { phase }, &mut log, &mut waiter)?;
            if let Some(desk) = &mut desk {
                desk.look(|| client.tally());
            }
            if step == Step::Drained || is_given_up {
                break;
            }
        }
        if let Some(desk) = desk {
            desk.leave(client.tally());
        }
        let worker = log.report(self.clock.now_ns(), client.paths_mut());
        Ok(client.report(worker))
    }

    fn step<P: Paths>(&self, client: &mut Client<P>, phase: Phase, log: &mut ActivityLog, waiter: &mut Waiter) -> Result<Step, RankError> {
        log.enter(phase, || self.clock.now_ns(), client.paths_mut());
        let step = client.step(phase, || self.clock.now_ns())?;
        match step {
            Step::Busy(operations) => {
                log.note(operations);
                waiter.busy();
            }
            Step::Idle | Step::Drained => {
                log.note(0);
                waiter.idle(|| {
                    let longest = client.until_due(self.clock.now_ns()).min(SLICE);
                    self.steering.sleep(phase, client.paths_mut(), longest);
                });
            }
        }
        Ok(step)
    }
}
