//! One rank of a job: its threads, and the order of a run.
//!
//! Servers and endpoints, exchange of connection records, connections, clients, ready barrier over all ranks; then warm-up, R times (barrier,
//! window), drain, barrier, stop, join. A window never includes a barrier: load goes on while ranks meet, and is not counted. Daemons run until the
//! clients of *all* ranks have drained.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Duration;

use harness::affinity::{AffinityError, pin_current_thread};
use harness::clock::Clock;
use harness::exchange::{Exchange, ExchangeError};
use shm::wait::Waiter;
use thiserror::Error;

use crate::backend::{Backend, BackendError, Daemon, Paths};
use crate::client::{Client, ClientReport, ClientSpec, Step};
use crate::control::{Control, Phase};
use crate::options::Options;
use crate::result::{DaemonReport, RankReport};
use crate::verify::Verifier;

/// How long the slowest rank may take to make and connect its transports.
const SETUP_LIMIT: Duration = Duration::from_secs(30);
/// How long ranks may take to meet during the run.
const BARRIER_LIMIT: Duration = Duration::from_secs(15);
/// How long clients wait for what is outstanding at the end; what has not ended by then is lost.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// How often the main thread looks whether a worker failed while it waits for another.
const WATCH_INTERVAL: Duration = Duration::from_millis(10);

/// Why a rank ended before its time.
#[derive(Debug, Error)]
pub enum RankError {
    /// The ranks can no longer act together.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A transport failed, or found a peer dead.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread could not be placed as planned.
    #[error(transparent)]
    Affinity(#[from] AffinityError),
    /// A thread could not be started.
    #[error("thread {thread} could not be started: {source}")]
    Thread {
        /// The thread.
        thread: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A thread did not get ready.
    #[error("{thread} was not ready within {SETUP_LIMIT:?}")]
    NotReady {
        /// Which threads were being waited for.
        thread: &'static str,
    },
    /// A thread panicked: a defect of this program.
    #[error("thread {thread} panicked ({message}): this is a defect, please report it")]
    Panicked {
        /// The thread.
        thread: String,
        /// What it said.
        message: String,
    },
    /// What another rank sent as its connection records is none.
    #[error("rank {rank} sent connection records that cannot be read")]
    Records {
        /// The rank.
        rank: usize,
    },
}

/// What the threads of a rank share.
struct Rank<'a, B> {
    options: &'a Options,
    backend: &'a B,
    clock: Clock,
    control: Control<RankError>,
    rank: usize,
}

/// What a worker tells the main thread while it gets ready.
enum News {
    /// Daemon `.0` is open and has these records.
    Open(usize, Vec<(usize, Vec<u8>)>),
    /// A daemon or client can take part.
    Ready,
}

/// Runs this rank's part of the job and returns what it measured.
///
/// Starts one thread per daemon and client; all have ended when this returns.
///
/// # Errors
/// The first failure of this rank, or the news of another's.
pub fn run_rank<B: Backend>(options: &Options, backend: &B, exchange: &mut dyn Exchange, clock: Clock) -> Result<RankReport, RankError> {
    let rank = Rank { options, backend, clock, control: Control::new(), rank: exchange.rank() };
    let outcome = std::thread::scope(|scope| {
        let outcome = rank.conduct(scope, exchange);
        // On success everything has ended already; on failure this ends it, and the scope waits for it.
        rank.control.stop();
        outcome
    });
    match (outcome, rank.control.take_failure()) {
        // The main thread gave up because of a worker, or a worker panicked at the very end.
        (Err(RankError::Exchange(ExchangeError::GivenUp)), Some(failure)) | (Ok(_), Some(failure @ RankError::Panicked { .. })) => {
            Err(failure)
        }
        // Other failures after the last barrier come from peers that have already left.
        (outcome, _) => outcome,
    }
}

type Worker<'scope, T> = ScopedJoinHandle<'scope, Option<T>>;

impl<B: Backend> Rank<'_, B> {
    /// The place of this rank among those of its host, by which it has its cores.
    fn local_rank(&self) -> Option<usize> {
        self.options.launcher.local_rank(self.rank)
    }

    /// The order of the run, on the main thread.
    fn conduct<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, exchange: &mut dyn Exchange) -> Result<RankReport, RankError> {
        let (control, options) = (&self.control, self.options);
        let give_up = || control.is_stopped();
        let (tell, news) = channel();
        let daemons = self.start_daemons(scope, exchange, &tell, &news)?;
        let clients = self.start_clients(scope, &tell)?;
        self.await_ready(&news, clients.len(), "a client")?;
        exchange.barrier(SETUP_LIMIT, &give_up)?;

        control.set_phase(Phase::WarmUp);
        exchange.sleep(options.warmup, &give_up)?;
        for run in 0..options.runs {
            control.set_phase(Phase::Between);
            exchange.barrier(BARRIER_LIMIT, &give_up)?;
            control.set_phase(Phase::Window(run as u16));
            exchange.sleep(options.duration, &give_up)?;
        }
        control.set_phase(Phase::Drain);
        let clients: Vec<ClientReport> = join_all(clients)?;
        exchange.barrier(BARRIER_LIMIT + DRAIN_LIMIT, &give_up)?;
        control.stop();
        let daemons = join_all(daemons)?;
        Ok(RankReport::new(self.rank, options, clients, daemons))
    }

    /// Starts the daemons and connects their endpoints to those of all other ranks.
    fn start_daemons<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        exchange: &mut dyn Exchange,
        tell: &Sender<News>,
        news: &Receiver<News>,
    ) -> Result<Vec<Worker<'scope, DaemonReport>>, RankError> {
        let count = self.options.server_threads;
        let (mut threads, mut mailboxes) = (Vec::new(), Vec::new());
        for daemon in 0..count {
            let (mailbox, records) = channel();
            let tell = tell.clone();
            threads.push(self.spawn(scope, format!("daemon-{daemon}"), move || self.daemon_thread(daemon, &tell, &records))?);
            mailboxes.push(mailbox);
        }
        let mut mine = vec![None; exchange.size()];
        let mut owners = vec![None; exchange.size()];
        for _ in 0..count {
            let News::Open(daemon, records) = self.next_news(news, "a daemon")? else { continue };
            for (remote, record) in records {
                if let (Some(slot), Some(owner)) = (mine.get_mut(remote), owners.get_mut(remote)) {
                    (*slot, *owner) = (Some(record), Some(daemon));
                }
            }
        }
        let part = serde_json::to_vec(&mine).map_err(|_| RankError::Records { rank: self.rank })?;
        let all = exchange.all_gather(&part, SETUP_LIMIT, &|| self.control.is_stopped())?;
        let mut theirs: Vec<Vec<(usize, Vec<u8>)>> = vec![Vec::new(); count];
        for (remote, part) in all.iter().enumerate() {
            let Some(owner) = owners.get(remote).copied().flatten() else { continue };
            let mut records: Vec<Option<Vec<u8>>> = serde_json::from_slice(part).map_err(|_| RankError::Records { rank: remote })?;
            let for_me = records.get_mut(self.rank).and_then(Option::take).ok_or(RankError::Records { rank: remote })?;
            if let Some(records) = theirs.get_mut(owner) {
                records.push((remote, for_me));
            }
        }
        for (mailbox, records) in mailboxes.iter().zip(theirs) {
            // A daemon that has ended has recorded why.
            let _ = mailbox.send(records);
        }
        self.await_ready(news, count, "a daemon")?;
        Ok(threads)
    }

    fn start_clients<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        tell: &Sender<News>,
    ) -> Result<Vec<Worker<'scope, ClientReport>>, RankError> {
        let start = |client| {
            let tell = tell.clone();
            self.spawn(scope, format!("client-{client}"), move || self.client_thread(client, &tell))
        };
        (0..self.options.workload.clients).map(start).collect()
    }

    /// Starts a worker whose failure or panic stops the rank.
    fn spawn<'scope, T: Send + 'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        thread: String,
        work: impl FnOnce() -> Result<T, RankError> + Send + 'scope,
    ) -> Result<Worker<'scope, T>, RankError> {
        let name = thread.clone();
        let guarded = move || {
            let ended = catch_unwind(AssertUnwindSafe(work));
            let failure = match ended {
                Ok(Ok(report)) => return Some(report),
                Ok(Err(failure)) => failure,
                Err(panic) => RankError::Panicked { thread: name, message: panic_message(&*panic) },
            };
            self.control.fail(failure);
            None
        };
        Builder::new().name(thread.clone()).spawn_scoped(scope, guarded).map_err(|source| RankError::Thread { thread, source })
    }

    fn daemon_thread(
        &self,
        number: usize,
        tell: &Sender<News>,
        mailbox: &Receiver<Vec<(usize, Vec<u8>)>>,
    ) -> Result<DaemonReport, RankError> {
        if let Some(core) = self.local_rank().and_then(|rank| self.options.plan.daemon_core(rank, number)) {
            pin_current_thread(core)?;
        }
        let mut daemon = self.backend.open_daemon(number)?;
        // The main thread hangs up only when the job is over.
        let _ = tell.send(News::Open(number, daemon.records()));
        let Ok(records) = mailbox.recv() else { return Ok(DaemonReport::default()) };
        daemon.connect(records)?;
        let _ = tell.send(News::Ready);

        let (mut waiter, mut report) = (self.options.wait.waiter(), DaemonReport::default());
        while !self.control.is_stopped() {
            report.loops += 1;
            match daemon.step() {
                Ok(true) => waiter.busy(),
                Ok(false) => {
                    report.empty_loops += 1;
                    waiter.idle(no_event);
                }
                Err(failure) => {
                    // Recorded before the daemon is dropped: its clients fail as a consequence.
                    self.control.fail(failure.into());
                    break;
                }
            }
        }
        report.transport = daemon.transport();
        Ok(report)
    }

    fn client_thread(&self, number: usize, tell: &Sender<News>) -> Result<ClientReport, RankError> {
        let (options, workload) = (self.options, &self.options.workload);
        if let Some(core) = self.local_rank().and_then(|rank| options.plan.client_core(rank, number)) {
            pin_current_thread(core)?;
        }
        let pattern = workload.pattern(self.rank, number);
        let writer = self.rank * workload.clients + number;
        let verifier = workload.verify.then(|| Verifier::new(writer as u16, workload.ranks * workload.clients, pattern.read_keys));
        let corrupt_one = options.fault.is_some() && writer == 0;
        let spec =
            ClientSpec { rank: self.rank as u16, queue_depth: options.queue_depth, runs: options.runs, pattern, verifier, corrupt_one };
        let mut client = Client::new(spec, self.backend.connect_client(number)?);
        let _ = tell.send(News::Ready);
        let mut waiter = options.wait.waiter();
        while !self.control.is_stopped() && self.control.phase() != Phase::Drain {
            self.client_step(&mut client, self.control.phase(), &mut waiter)?;
        }
        let give_up_ns = self.clock.now_ns() + DRAIN_LIMIT.as_nanos() as u64;
        while !self.control.is_stopped() && self.clock.now_ns() < give_up_ns {
            if self.client_step(&mut client, Phase::Drain, &mut waiter)? == Step::Drained {
                break;
            }
        }
        Ok(client.report())
    }

    fn client_step<P: Paths>(&self, client: &mut Client<P>, phase: Phase, waiter: &mut Waiter) -> Result<Step, RankError> {
        let step = client.step(phase, || self.clock.now_ns())?;
        match step {
            Step::Busy => waiter.busy(),
            Step::Idle | Step::Drained => waiter.idle(no_event),
        }
        Ok(step)
    }

    fn await_ready(&self, news: &Receiver<News>, count: usize, who: &'static str) -> Result<(), RankError> {
        (0..count).try_for_each(|_| self.next_news(news, who).map(drop))
    }

    /// Waits for a worker, and gives up when any has failed.
    fn next_news(&self, news: &Receiver<News>, who: &'static str) -> Result<News, RankError> {
        let end_ns = self.clock.now_ns() + SETUP_LIMIT.as_nanos() as u64;
        while self.clock.now_ns() < end_ns {
            if self.control.is_stopped() {
                return Err(ExchangeError::GivenUp.into());
            }
            match news.recv_timeout(WATCH_INTERVAL) {
                Ok(news) => return Ok(news),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        Err(RankError::NotReady { thread: who })
    }
}

/// How an idle thread sleeps: not at all. It polls several things, none of which ends a sleep on another, so `--wait` offers no events.
fn no_event() {
    std::thread::yield_now();
}

/// Joins workers that are about to end. One without a report has failed and recorded why.
fn join_all<T>(workers: Vec<Worker<'_, T>>) -> Result<Vec<T>, RankError> {
    let join = |worker: Worker<'_, T>| worker.join().ok().flatten().ok_or(RankError::Exchange(ExchangeError::GivenUp));
    workers.into_iter().map(join).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests;
