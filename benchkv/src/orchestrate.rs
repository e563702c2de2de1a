//! A rank of a job: its threads, and the order of a run. Its modules:
//!
//! - `control`: the control of the workers by the main thread.
//! - `client`: a client from its first connection to its report.
//! - `records`: the connection records of all endpoints.
//!
//! The order of a run: open the servers of all daemons, then the clients and their endpoints;
//! exchange connection records; connect; wait in a barrier until all ranks are ready. Then follow
//! the warm-up, R times a barrier and a window, the drain, a barrier, the end and the join of all
//! threads. A timed window never includes a barrier: load continues during a barrier, and is not
//! counted. Daemons run until the clients of *all* ranks have drained.
//!
//! When the user interrupts the job, ranks end their current window early, agree on the interrupt
//! at their next barrier, and drain. [`drain`] decides the length of a drain.

mod client;
mod control;
mod records;

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Duration;

use benchkv_harness::affinity::{AffinityError, pin_current_thread};
use benchkv_harness::clock::Clock;
use benchkv_harness::environment::{cpu_seconds, host_cpu_seconds};
use benchkv_harness::launch::exchange::{Exchange, ExchangeError};
use copyrpc_shm::sleep::{SLICE, Sleeper};
use thiserror::Error;

use crate::interval::{Published, Reporter};
use crate::options::Options;
use crate::progress::Progress;
use crate::result::{Course, RankReport};
use control::Control;
use engine::activity::{ActivityLog, WorkerReport};
use engine::backend::{BackendError, Daemon, Endpoints, Records, Workers};
use engine::client::ClientReport;
use engine::drain::{self, DAEMON_SLEEP, Drain, End, LOOK_INTERVAL, View};
use engine::phase::Phase;
use engine::topology::Worker;
use engine::trace::recorder::Recorder;
use records::Record;

/// Maximum time for the slowest rank to make and connect its transports.
const SETUP_LIMIT: Duration = Duration::from_secs(30);
/// Maximum time of a barrier during the run.
const BARRIER_LIMIT: Duration = Duration::from_secs(15);
/// Interval at which the main thread checks for failed workers while it waits for another worker of
/// the rank to open or connect.
const WATCH_INTERVAL: Duration = Duration::from_millis(10);
/// Interval at which the main thread checks whether its clients have ended.
const END_INTERVAL: Duration = Duration::from_millis(1);

/// The reason why a rank ended early.
#[derive(Debug, Error)]
pub enum RankError {
    /// The exchange between the ranks failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A transport failed, or found a peer dead.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread could not be pinned as planned.
    #[error(transparent)]
    Affinity(#[from] AffinityError),
    /// Another failure, described in a sentence.
    #[error("{0}")]
    Failed(String),
    /// A thread panicked: a defect of this program.
    #[error("thread {thread} panicked ({message}): this is a defect, please report it")]
    Panicked {
        /// The thread.
        thread: String,
        /// Message of the panic.
        message: String,
    },
}

impl From<String> for RankError {
    fn from(what: String) -> Self {
        Self::Failed(what)
    }
}

impl RankError {
    /// Returns whether the rank ended because another rank ended. Then the end of the other rank is
    /// the cause to report.
    pub const fn follows(&self) -> bool {
        matches!(
            self,
            Self::Exchange(_) | Self::Backend(BackendError::PeerGone { .. })
        )
    }
}

struct Rank<'a, W> {
    options: &'a Options,
    workers: &'a W,
    clock: Clock,
    progress: &'a Progress,
    control: Control,
    /// Counts that clients publish; empty unless this rank prints the lines of `--report-interval`.
    published: Vec<Published>,
    rank: usize,
}

/// Messages of a worker to the main thread during set-up.
enum News {
    /// A worker is open, and its endpoints have these connection records.
    Open(Vec<Record>),
    /// The endpoints of a worker are connected.
    Ready,
}

struct Post {
    tell: Sender<News>,
    mailbox: Receiver<Records>,
}

struct Assembly {
    tell: Sender<News>,
    news: Receiver<News>,
    mailboxes: HashMap<Worker, Sender<Records>>,
    records: Vec<Record>,
}

impl Assembly {
    fn new() -> Self {
        let (tell, news) = channel();
        Self {
            tell,
            news,
            mailboxes: HashMap::new(),
            records: Vec::new(),
        }
    }

    fn post_for(&mut self, worker: Worker) -> Post {
        let (letters, mailbox) = channel();
        self.mailboxes.insert(worker, letters);
        Post {
            tell: self.tell.clone(),
            mailbox,
        }
    }
}

/// Runs this rank's part of the job and returns its measurements.
///
/// Starts one thread per daemon and client. All threads have ended when the function returns.
///
/// # Errors
/// The first failure of this rank, or the report of another rank's failure.
pub fn run_rank<W: Workers>(
    options: &Options,
    workers: &W,
    exchange: &mut dyn Exchange,
    clock: Clock,
    progress: &Progress,
) -> Result<RankReport, RankError> {
    let rank = exchange.rank();
    let reports = rank == 0 && options.asked.report_interval.is_some();
    let clients = if reports {
        options.job.workload.clients
    } else {
        0
    };
    let published = (0..clients).map(|_| Published::default()).collect();
    let rank = Rank {
        options,
        workers,
        clock,
        progress,
        control: Control::new(options.job.topology.daemons),
        published,
        rank,
    };
    let outcome = std::thread::scope(|scope| {
        let outcome = rank.conduct(scope, exchange);
        // On success every thread has ended already. After a failure the call ends the threads, and
        // the scope waits for them.
        rank.control.stop();
        outcome
    });
    match (outcome, rank.control.take_failure()) {
        // The main thread gave up because of a worker, or a worker panicked at the very end.
        (Err(RankError::Exchange(ExchangeError::GivenUp)), Some(failure))
        | (Ok(_), Some(failure @ RankError::Panicked { .. })) => Err(failure),
        // Another rank may have detected the failure of this rank and ended. The report of that end
        // may have arrived before this rank recorded its own failure.
        (Err(news), Some(failure)) if news.follows() && !failure.follows() => Err(failure),
        // If the outcome is `Ok`, a remaining failure came after the last barrier, and was caused
        // by a peer that had already ended. So it does not count.
        (outcome, _) => outcome,
    }
}

type Thread<'scope, T> = ScopedJoinHandle<'scope, Option<T>>;

impl<W: Workers> Rank<'_, W> {
    /// Returns the index of this rank among the ranks of its host, which determines its cores.
    fn local_rank(&self) -> Option<usize> {
        self.options.launcher.local_rank(self.rank)
    }

    /// Conducts the run, on the main thread: starts the workers, and sets the phases in order.
    fn conduct<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        exchange: &mut dyn Exchange,
    ) -> Result<RankReport, RankError> {
        let (control, options) = (&self.control, self.options);
        let give_up = || control.is_stopped();
        self.progress.enter(Phase::Ready);
        let mut assembly = Assembly::new();
        let topology = options.job.topology;
        let daemons = (0..topology.daemons).map(Worker::Daemon);
        let daemons = self.start(scope, &mut assembly, daemons, Self::daemon_thread)?;
        self.await_open(&mut assembly, daemons.len(), "a daemon")?;
        let clients = (0..topology.clients).map(Worker::Client);
        let clients = self.start(scope, &mut assembly, clients, Self::client_thread)?;
        self.await_open(&mut assembly, clients.len(), "a client")?;
        self.exchange_records(assembly, exchange)?;
        exchange.barrier(SETUP_LIMIT, &give_up)?;

        let mut course = self.load(&clients, exchange)?;
        self.enter(Phase::Drain);
        let end = self.drain(&clients, exchange, Duration::ZERO, drain::LONGEST, &|| ())?;
        course.is_cut = end == End::Cut;
        if end != End::Drained {
            self.enter(Phase::GiveUp);
        }
        let clients: Vec<ClientReport> = join_all(clients)?;
        exchange.barrier(BARRIER_LIMIT, &give_up)?;
        control.stop();
        let (daemons, series): (_, Vec<Option<Recorder>>) = join_all(daemons)?.into_iter().unzip();
        let mut report = RankReport::new(self.rank, course, clients, daemons);
        if let Some(trace) = &options.asked.traced {
            // The measurement does not depend on the trace, so a failure to write it is only
            // reported.
            let written = trace.write(self.rank, series.iter().flatten().map(Recorder::series));
            written.unwrap_or_else(|failure| report.add_trace_failure(&*failure));
        }
        Ok(report)
    }

    /// Runs the warm-up and the windows. Ends early if the user interrupts.
    fn load(
        &self,
        clients: &[Thread<'_, ClientReport>],
        exchange: &mut dyn Exchange,
    ) -> Result<Course, RankError> {
        let (control, options) = (&self.control, self.options);
        let load_ns = self.clock.now_ns();
        let reporter = RefCell::new(self.reporter(load_ns));
        // Called repeatedly by all waits.
        let watch = || {
            let now_ns = self.clock.now_ns();
            let elapsed = Duration::from_nanos(now_ns - load_ns);
            self.progress.advance(elapsed);
            let mut reporter = reporter.borrow_mut();
            let interval = reporter
                .as_mut()
                .and_then(|it| it.look(now_ns, control.phase()));
            if let Some(interval) = interval {
                let line = interval.line(options.job.runs, options.job.workload.ranks);
                self.progress.print(&line.to_string());
            }
        };
        let give_up = || {
            watch();
            control.is_stopped()
        };
        let mut course = Course::default();
        // A client may have nothing to issue for up to this time, so a silence of this length is no
        // sign of lost operations.
        let quiet = options.job.longest_pause(self.rank);
        exchange.catch_interrupts()?;
        if options.job.ops.is_none() {
            self.enter(Phase::WarmUp);
            exchange.sleep(options.warmup(), &give_up)?;
            self.enter(Phase::Between);
        }
        for run in 0..options.job.runs {
            // All ranks decide by the same gathered values, so all run this window or none does.
            // Otherwise ranks that have left the loop would wait for ranks that run the window.
            let mine = [exchange.is_interrupted().into()];
            let interrupted = exchange.all_gather(&mine, BARRIER_LIMIT, &give_up)?;
            if interrupted.iter().any(|part| part != &[0]) {
                course.is_interrupted = true;
                break;
            }
            let host_s = host_cpu_seconds();
            let (begin_ns, cpu_s) = (self.clock.now_ns(), cpu_seconds());
            self.enter(Phase::Window(run as u16));
            match options.job.ops {
                // The outcome is not used: lost operations are counted when the job drains.
                Some(_) => _ = self.drain(clients, exchange, quiet, options.duration(), &watch)?,
                None => exchange.sleep(options.duration(), &give_up)?,
            }
            let elapsed_ns = self.clock.now_ns() - begin_ns;
            course.windows_s.push(elapsed_ns as f64 / 1e9);
            course.cpu_s += cpu_seconds() - cpu_s;
            let host_s = host_cpu_seconds().zip(host_s);
            course.host_cpu_s += host_s.map_or(0.0, |(end_s, begin_s)| end_s - begin_s);
            course.is_interrupted = exchange.is_interrupted();
            if run + 1 < options.job.runs {
                self.enter(Phase::Between);
            }
        }
        Ok(course)
    }

    fn reporter(&self, now_ns: u64) -> Option<Reporter<'_>> {
        let seconds = self.options.asked.report_interval;
        let interval = Duration::from_secs_f64(seconds.filter(|_| self.rank == 0)?);
        Some(Reporter::new(&self.published, interval, now_ns))
    }

    /// Waits for clients to end, together with the other ranks, for at most `longest`. A silence of
    /// up to `quiet` is no sign of lost operations. Calls `watch` meanwhile. On return all clients
    /// have ended, or no rank waits for them any more.
    fn drain(
        &self,
        clients: &[Thread<'_, ClientReport>],
        exchange: &mut dyn Exchange,
        quiet: Duration,
        longest: Duration,
        watch: &dyn Fn(),
    ) -> Result<End, RankError> {
        let give_up = || self.control.is_stopped();
        let mut drain = Drain::new(self.clock.now_ns(), quiet, longest);
        loop {
            let has_drained = self.await_end(clients, LOOK_INTERVAL, watch);
            let daemons = self.control.drain_progress();
            let is_interrupted = exchange.is_interrupted();
            let view = drain.look(self.clock.now_ns(), has_drained, is_interrupted, &daemons);
            // While clients issue, an interrupt ends this wait, and clients stop issuing. The drain
            // at the end of the job follows.
            let view = View {
                cuts: view.cuts || (is_interrupted && self.control.phase().is_loading()),
                ..view
            };
            let encoded = serde_json::to_vec(&view).unwrap_or_default();
            let parts = exchange.all_gather(&encoded, BARRIER_LIMIT, &give_up)?;
            let read = |(rank, part): (usize, &Vec<u8>)| {
                serde_json::from_slice::<View>(part)
                    .map_err(|_| format!("rank {rank} did not say how far it has drained"))
            };
            let views = parts.iter().enumerate().map(read);
            let views = views.collect::<Result<Vec<_>, _>>()?;
            if let Some(end) = drain.compare(&views, &daemons) {
                return Ok(end);
            }
        }
    }

    /// Waits until all `clients` have ended, at most for `time`. Calls `watch` meanwhile. Returns
    /// whether all clients have ended.
    fn await_end(
        &self,
        clients: &[Thread<'_, ClientReport>],
        time: Duration,
        watch: &dyn Fn(),
    ) -> bool {
        let end_ns = self.clock.now_ns().saturating_add(time.as_nanos() as u64);
        loop {
            watch();
            let have_ended = clients.iter().all(Thread::is_finished);
            if have_ended || self.control.is_stopped() || self.clock.now_ns() >= end_ns {
                return have_ended;
            }
            std::thread::sleep(END_INTERVAL);
        }
    }

    fn enter(&self, phase: Phase) {
        self.control.set_phase(phase);
        self.progress.enter(phase);
    }

    fn start<'scope, T: Send + 'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        assembly: &mut Assembly,
        workers: impl Iterator<Item = Worker>,
        work: fn(&Self, usize, &Post) -> Result<T, RankError>,
    ) -> Result<Vec<Thread<'scope, T>>, RankError> {
        let start = |worker| {
            let post = assembly.post_for(worker);
            let (kind, number) = match worker {
                Worker::Daemon(number) => ("daemon", number),
                Worker::Client(number) => ("client", number),
            };
            self.spawn(scope, format!("{kind}-{number}"), move || {
                work(self, number, &post)
            })
        };
        workers.map(start).collect()
    }

    /// Exchanges the records of all endpoints with the other ranks, and gives each endpoint the
    /// record of its other end.
    fn exchange_records(
        &self,
        assembly: Assembly,
        exchange: &mut dyn Exchange,
    ) -> Result<(), RankError> {
        let Assembly {
            news,
            mailboxes,
            records: mine,
            ..
        } = assembly;
        let give_up = || self.control.is_stopped();
        let parts = exchange.all_gather(&records::encode(&mine), SETUP_LIMIT, &give_up)?;
        let mut mail = records::deliver(self.rank, &mine, &parts)
            .map_err(|rank| format!("rank {rank} sent connection records that cannot be read"))?;
        for (worker, mailbox) in &mailboxes {
            // The send fails only if the worker has ended, and the worker has recorded the reason.
            let _ = mailbox.send(mail.remove(worker).unwrap_or_default());
        }
        (0..mailboxes.len()).try_for_each(|_| self.next_news(&news, "a connection").map(drop))
    }

    /// Starts a worker whose failure or panic stops the rank.
    fn spawn<'scope, T: Send + 'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        thread: String,
        work: impl FnOnce() -> Result<T, RankError> + Send + 'scope,
    ) -> Result<Thread<'scope, T>, RankError> {
        let name = thread.clone();
        let guarded = move || {
            let ended = catch_unwind(AssertUnwindSafe(work));
            let failure = match ended {
                Ok(Ok(report)) => return Some(report),
                Ok(Err(failure)) => failure,
                Err(panic) => RankError::Panicked {
                    thread: name,
                    message: panic_message(&*panic),
                },
            };
            self.control.fail(failure);
            None
        };
        Builder::new()
            .name(thread.clone())
            .spawn_scoped(scope, guarded)
            .map_err(|why| format!("thread {thread} could not be started: {why}").into())
    }

    /// Connects the endpoints of an open worker. Returns `false` if the rank has given up.
    fn connect(
        &self,
        worker: Worker,
        endpoints: &mut impl Endpoints,
        post: &Post,
    ) -> Result<bool, RankError> {
        let record = |(to, bytes)| Record {
            from: worker,
            to,
            bytes,
        };
        let records = endpoints.records().into_iter().map(record).collect();
        // The send fails only if the main thread has ended the job.
        let _ = post.tell.send(News::Open(records));
        let Ok(records) = post.mailbox.recv() else {
            return Ok(false);
        };
        endpoints.connect(&records)?;
        while !endpoints.settle()? {
            if self.control.is_stopped() {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        let _ = post.tell.send(News::Ready);
        Ok(true)
    }

    fn daemon_thread(
        &self,
        number: usize,
        post: &Post,
    ) -> Result<(WorkerReport, Option<Recorder>), RankError> {
        let plan = &self.options.plan;
        let core = self
            .local_rank()
            .and_then(|rank| plan.daemon_core(rank, number));
        core.map_or(Ok(()), pin_current_thread)?;
        let mut daemon = self.workers.open_daemon(number)?;
        if !self.connect(Worker::Daemon(number), &mut daemon, post)? {
            return Ok((WorkerReport::default(), None));
        }
        let mut waiter = self.options.wait.waiter();
        let now_ns = || self.clock.now_ns();
        let mut log = ActivityLog::new(self.options.job.runs, now_ns());
        let asks = || self.options.job.topology.asks(self.rank, number);
        let traced = self.options.asked.traced.as_ref();
        let mut series =
            traced.map(|trace| Recorder::new(trace.interval, self.options.wait, asks()));
        while !self.control.is_stopped() {
            let phase = self.control.phase();
            log.enter(phase, now_ns, &mut daemon);
            match daemon.step(now_ns) {
                Ok(round) if round.is_part => {}
                Ok(round) => {
                    if self.is_watched(phase) {
                        self.control.note_drain_round(number, round.moved);
                    }
                    log.note_round(round, now_ns);
                    if let Some(series) = &mut series {
                        series.note(phase, round, now_ns, |values| {
                            daemon.by_endpoint(values);
                            daemon.gauges()
                        });
                    }
                    if round.moved > 0 {
                        waiter.busy();
                    } else {
                        waiter.idle(|| self.sleep(phase, &mut daemon));
                    }
                }
                Err(failure) => {
                    // The failure is recorded before the daemon is dropped, because its clients
                    // fail as a consequence of the drop.
                    self.control.fail(failure.into());
                    break;
                }
            }
        }
        let report = WorkerReport {
            policy: daemon.policy(),
            trace: series.as_ref().map(Recorder::report),
            ..log.report(now_ns(), &mut daemon)
        };
        Ok((report, series))
    }

    /// Returns whether the rank counts the rounds of its daemons. It counts them while it waits for
    /// clients to end.
    fn is_watched(&self, phase: Phase) -> bool {
        phase == Phase::Drain || self.options.job.ops.is_some()
    }

    fn sleep(&self, phase: Phase, daemon: &mut dyn Sleeper) {
        let longest = if self.is_watched(phase) {
            DAEMON_SLEEP
        } else {
            SLICE
        };
        self.control.sleep(phase, daemon, longest);
    }

    fn await_open(
        &self,
        assembly: &mut Assembly,
        count: usize,
        who: &'static str,
    ) -> Result<(), RankError> {
        for _ in 0..count {
            if let News::Open(records) = self.next_news(&assembly.news, who)? {
                assembly.records.extend(records);
            }
        }
        Ok(())
    }

    /// Waits for a message of a worker. Gives up when any worker has failed.
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
        Err(format!("{who} was not ready within {SETUP_LIMIT:?}").into())
    }
}

/// Joins workers that are about to end. A worker without a report has failed and recorded the
/// reason.
fn join_all<T>(workers: Vec<Thread<'_, T>>) -> Result<Vec<T>, RankError> {
    let join = |worker: Thread<'_, T>| {
        let report = worker.join().ok().flatten();
        report.ok_or(RankError::Exchange(ExchangeError::GivenUp))
    };
    workers.into_iter().map(join).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
