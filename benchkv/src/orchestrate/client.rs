//! A client from its first connection to its report.

use benchkv_harness::affinity::pin_current_thread;
use copyrpc_shm::sleep::SLICE;
use copyrpc_shm::wait::Waiter;

use super::{Post, Rank, RankError};
use engine::activity::ActivityLog;
use engine::backend::{Paths, Workers};
use engine::client::{Client, ClientReport, Step};
use engine::phase::Phase;
use engine::topology::Worker;

impl<W: Workers> Rank<'_, W> {
    pub(super) fn client_thread(
        &self,
        number: usize,
        post: &Post,
    ) -> Result<ClientReport, RankError> {
        let Self {
            options,
            control,
            clock,
            ..
        } = self;
        let rank = self.local_rank();
        let core = rank.and_then(|rank| options.plan.client_core(rank, number));
        core.map_or(Ok(()), pin_current_thread)?;
        // The parameters take a while to make, so they are made before the client connects: the
        // load begins soon after all clients are connected.
        let spec = options.job.client(self.rank, number);
        let mut paths = self.workers.open_client(number)?;
        let is_wanted = self.connect(Worker::Client(number), &mut paths, post)?;
        let mut client = Client::new(spec, paths);
        let mut log = ActivityLog::new(options.job.runs, clock.now_ns());
        let mut waiter = options.wait.waiter();
        let published = self.published.get(number);
        while is_wanted && !control.is_stopped() {
            let phase = control.phase();
            let is_given_up = phase == Phase::GiveUp;
            // After `GiveUp` the client takes one more step, so that answers that have arrived
            // still count.
            let phase = if is_given_up { Phase::Drain } else { phase };
            if let Some(sweep) = &options.asked.sweep {
                let (clients, depth) = (options.job.workload.clients, options.job.queue_depth);
                if let Some(depth) = sweep.depth_in(phase, number, clients, depth) {
                    client.set_queue_depth(depth);
                }
            }
            let step = self.step(&mut client, phase, &mut log, &mut waiter)?;
            if let (Some(published), Step::Busy(_) | Step::Drained) = (published, step) {
                published.set(client.tally());
            }
            if step == Step::Drained || is_given_up {
                break;
            }
        }
        let worker = log.report(clock.now_ns(), client.paths_mut());
        Ok(client.report(worker))
    }

    fn step<P: Paths>(
        &self,
        client: &mut Client<P>,
        phase: Phase,
        log: &mut ActivityLog,
        waiter: &mut Waiter,
    ) -> Result<Step, RankError> {
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
                    self.control.sleep(phase, client.paths_mut(), longest);
                });
            }
        }
        Ok(step)
    }
}
