//! The order of a run, with transports made of channels: several ranks as threads of one process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use benchkv_harness::affinity::RankCores;
use benchkv_harness::clock::Clock;
use clap::Parser;
use copyrpc_shm::sleep::{Due, Watch};

use super::*;
use crate::cli::Cli;
use crate::result::{Conditions, JobResult};
use engine::backend::{IssueError, Paths};
use engine::counters;
use engine::message::{Request, Response};
use engine::operation::Operation;
use engine::store::{Shard, owner_of};
use engine::topology::Peer;

/// Maximum time of any wait in a test.
const WATCHDOG: Duration = Duration::from_secs(20);

/// Collective operations between threads.
#[derive(Default)]
pub(crate) struct Meeting {
    state: Mutex<Round>,
    changed: Condvar,
}

#[derive(Default)]
struct Round {
    number: usize,
    parts: Vec<Option<Vec<u8>>>,
    last: Vec<Vec<u8>>,
}

pub(crate) struct ThreadExchange {
    rank: usize,
    size: usize,
    meeting: Arc<Meeting>,
    /// The gate of the barriers before windows; `None` if the test has no gate.
    gate: Option<Arc<Gate>>,
    /// The number of the sleep in which the user interrupts this rank; 0 is the warm-up.
    interrupt_in: Option<usize>,
    sleeps: usize,
}

impl ThreadExchange {
    /// Makes the exchange of a rank of `size` that is not disturbed.
    pub(crate) fn new(rank: usize, size: usize, meeting: &Arc<Meeting>) -> Self {
        Self {
            rank,
            size,
            meeting: Arc::clone(meeting),
            gate: None,
            interrupt_in: None,
            sleeps: 0,
        }
    }
}

/// Lets a daemon answer only while its rank is inside a barrier between windows, and holds the
/// barrier until the daemon has answered often.
#[derive(Default)]
struct Gate {
    meetings: AtomicUsize,
    open: AtomicBool,
    answered: AtomicUsize,
}

impl Gate {
    const ANSWERS: usize = 500;

    /// Passes a barrier. Barriers 2 to 4 open the gate: they come before the three windows, with
    /// load. Barriers 0 (the exchange of records) and 1 (all ranks are ready) have no load, and
    /// barrier 5 comes after the drain.
    fn pass(&self) {
        if !(2..5).contains(&self.meetings.fetch_add(1, Ordering::AcqRel)) {
            return;
        }
        let (start, before) = (Instant::now(), self.answered.load(Ordering::Acquire));
        self.open.store(true, Ordering::Release);
        while self.answered.load(Ordering::Acquire) < before + Self::ANSWERS
            && start.elapsed() < WATCHDOG
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.open.store(false, Ordering::Release);
    }
}

impl Exchange for ThreadExchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(
        &mut self,
        part: &[u8],
        _: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        let mut state = self.meeting.state.lock().unwrap();
        state.parts.resize(self.size, None);
        state.parts[self.rank] = Some(part.to_vec());
        if state.parts.iter().all(Option::is_some) {
            state.last = state.parts.drain(..).map(Option::unwrap).collect();
            state.number += 1;
            self.meeting.changed.notify_all();
            return Ok(state.last.clone());
        }
        let (round, start) = (state.number, Instant::now());
        while state.number == round {
            if give_up() || start.elapsed() > WATCHDOG {
                return Err(ExchangeError::GivenUp);
            }
            state = self
                .meeting
                .changed
                .wait_timeout(state, Duration::from_millis(5))
                .unwrap()
                .0;
        }
        Ok(state.last.clone())
    }

    fn sleep(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        let end = Instant::now() + time;
        self.sleeps += 1;
        // The interrupt comes after 20 ms, so the cut window is long enough to count as a run.
        let interrupt = self
            .interrupt_in
            .filter(|sleep| *sleep < self.sleeps)
            .map(|_| Instant::now() + Duration::from_millis(20));
        while Instant::now() < interrupt.map_or(end, |at| at.min(end)) {
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.interrupt_in.is_some_and(|sleep| sleep < self.sleeps)
    }
}

type Answer = (Operation, Option<Response>);
type Parcel = (Request, Operation, Sender<Answer>);

/// The inboxes of all daemons of all ranks.
type Network = Arc<Mutex<HashMap<(usize, usize), Sender<Parcel>>>>;

/// The flaw that a test causes on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    OpenFails,
    DaemonSeesDeadPeer,
    DaemonPanics,
    DaemonForgetsReplies,
    DaemonStandsStill,
}

struct Channels {
    rank: usize,
    options: Options,
    network: Network,
    flaw: Flaw,
    gate: Option<Arc<Gate>>,
}

struct ChannelDaemon {
    rank: usize,
    number: usize,
    peers: Vec<Peer>,
    inbox: Receiver<Parcel>,
    shard: Shard,
    flaw: Flaw,
    gate: Option<Arc<Gate>>,
    steps: u64,
}

struct ChannelPaths {
    me: Peer,
    peers: Vec<Peer>,
    all: Network,
    /// Senders to all daemons; empty until `connect`.
    network: HashMap<(usize, usize), Sender<Parcel>>,
    shards: usize,
    reply_to: Sender<Answer>,
    replies: Receiver<Answer>,
}

impl Workers for Channels {
    type Daemon = ChannelDaemon;
    type Paths = ChannelPaths;

    fn open_daemon(&self, daemon: usize) -> Result<ChannelDaemon, BackendError> {
        if self.flaw == Flaw::OpenFails {
            return Err(BackendError::Setup {
                what: "the inbox".to_owned(),
                source: "no space".into(),
            });
        }
        let (sender, inbox) = channel();
        self.network
            .lock()
            .unwrap()
            .insert((self.rank, daemon), sender);
        let workload = &self.options.job.workload;
        let shards = self.options.job.topology.daemons;
        let peers = self
            .options
            .job
            .topology
            .peers_of(self.rank, Worker::Daemon(daemon));
        let shard = Shard::new(daemon, shards, workload.store_keys());
        Ok(ChannelDaemon {
            rank: self.rank,
            number: daemon,
            peers,
            inbox,
            shard,
            flaw: self.flaw,
            gate: self.gate.clone(),
            steps: 0,
        })
    }

    fn open_client(&self, client: usize) -> Result<ChannelPaths, BackendError> {
        let (reply_to, replies) = channel();
        let worker = Worker::Client(client);
        Ok(ChannelPaths {
            me: Peer {
                rank: self.rank,
                worker,
            },
            peers: self.options.job.topology.peers_of(self.rank, worker),
            all: self.network.clone(),
            network: HashMap::new(),
            shards: self.options.job.topology.daemons,
            reply_to,
            replies,
        })
    }
}

/// Returns the bytes that a thread writes into the record for a peer: the names of both.
fn letter(from: Peer, to: Peer) -> Vec<u8> {
    format!("{from} to {to}").into_bytes()
}

fn letters(me: Peer, peers: &[Peer]) -> Records {
    peers
        .iter()
        .map(|peer| (*peer, letter(me, *peer)))
        .collect()
}

fn assert_answered(me: Peer, peers: &[Peer], records: &[(Peer, Vec<u8>)]) {
    assert_eq!(
        records,
        peers
            .iter()
            .map(|peer| (*peer, letter(*peer, me)))
            .collect::<Vec<_>>()
    );
}

impl ChannelDaemon {
    fn me(&self) -> Peer {
        Peer {
            rank: self.rank,
            worker: Worker::Daemon(self.number),
        }
    }
}

impl Endpoints for ChannelDaemon {
    fn records(&mut self) -> Records {
        letters(self.me(), &self.peers)
    }

    fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        assert_answered(self.me(), &self.peers, records);
        Ok(())
    }
}

impl Endpoints for ChannelPaths {
    fn records(&mut self) -> Records {
        letters(self.me, &self.peers)
    }

    fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        assert_answered(self.me, &self.peers, records);
        self.network = self.all.lock().unwrap().clone();
        Ok(())
    }
}

impl Sleeper for ChannelDaemon {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due::now());
    }
}

impl Daemon for ChannelDaemon {
    fn step(&mut self, _: impl FnOnce() -> u64) -> Result<counters::Round, BackendError> {
        self.steps += 1;
        match self.flaw {
            Flaw::DaemonSeesDeadPeer if self.steps > 2000 => {
                return Err(BackendError::PeerGone {
                    rank: 1,
                    how: "its lock is free".to_owned(),
                });
            }
            Flaw::DaemonPanics if self.steps > 2000 => panic!("on purpose"),
            // The pause is longer than the maximum silence of daemons that run.
            Flaw::DaemonStandsStill if self.steps == 100 => {
                std::thread::sleep(Duration::from_millis(4500))
            }
            _ => {}
        }
        if self
            .gate
            .as_ref()
            .is_some_and(|gate| !gate.open.load(Ordering::Acquire))
        {
            return Ok(counters::Round::default());
        }
        let mut moved = 0;
        for (request, operation, reply_to) in self.inbox.try_iter().take(16) {
            moved += 1;
            let response = self.shard.apply(&request);
            if let Some(gate) = &self.gate {
                gate.answered.fetch_add(1, Ordering::AcqRel);
            }
            if self.flaw != Flaw::DaemonForgetsReplies || self.steps < 100 {
                let _ = reply_to.send((operation, Some(response)));
            }
        }
        Ok(counters::Round {
            moved,
            ..counters::Round::default()
        })
    }
}

impl Sleeper for ChannelPaths {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due::now());
    }
}

impl Paths for ChannelPaths {
    fn issue(&mut self, request: Request, note: Operation) -> Result<(), IssueError> {
        let owner = (
            request.rank() as usize,
            owner_of(request.key(), self.shards),
        );
        let _ = self.network[&owner].send((request, note, self.reply_to.clone()));
        Ok(())
    }

    fn poll(
        &mut self,
        mut ended: impl FnMut(Operation, Option<Response>),
    ) -> Result<(), BackendError> {
        self.replies
            .try_iter()
            .for_each(|(operation, response)| ended(operation, response));
        Ok(())
    }
}

/// Runs a job of rank threads; `flaw` is the flaw of rank 0.
fn run(args: &str, flaw: Flaw) -> (Options, Vec<Result<RankReport, RankError>>) {
    run_as(args, flaw, None, &[])
}

/// Runs a job with `interrupts`: for each rank, the number of the sleep in which the user
/// interrupts the rank.
fn run_as(
    args: &str,
    flaw: Flaw,
    gate: Option<Arc<Gate>>,
    interrupts: &[Option<usize>],
) -> (Options, Vec<Result<RankReport, RankError>>) {
    let args = format!(
        "benchkv --empty --duration 0.05 --warmup 0.02 --runs 2 --wait yield --pin none --queue-depth 4 {args}"
    );
    let options = Options::resolve(Cli::try_parse_from(args.split_whitespace()).unwrap()).unwrap();
    let size = options.job.workload.ranks;
    let (meeting, network) = (Arc::new(Meeting::default()), Network::default());
    let outcomes = std::thread::scope(|scope| {
        let start = |rank| {
            let interrupt_in = interrupts.get(rank).copied().flatten();
            let mut exchange = ThreadExchange {
                rank,
                size,
                meeting: meeting.clone(),
                gate: gate.clone(),
                interrupt_in,
                sleeps: 0,
            };
            let flaw = if rank == 0 { flaw } else { Flaw::None };
            let backend = Channels {
                rank,
                options: options.clone(),
                network: network.clone(),
                flaw,
                gate: gate.clone(),
            };
            scope.spawn(move || {
                run_rank(
                    &backend.options,
                    &backend,
                    &mut exchange,
                    Clock::monotonic(),
                    &Progress::hidden(),
                )
            })
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (options, outcomes)
}

/// No thread can be pinned to core 1023, so a rank with a thread on this core fails.
#[test]
fn threads_have_the_cores_of_their_ranks_place_on_its_host() {
    let core = benchkv_harness::affinity::usable_cores().unwrap()[0];
    for (daemon, client) in [(1023, core), (core, 1023)] {
        let mut options =
            Options::resolve(Cli::try_parse_from(["benchkv", "--ranks", "1", "--empty"]).unwrap())
                .unwrap();
        // Rank 0 is the second rank on this host.
        options.launcher.ranks_here = vec![7, 0];
        options.plan.pinned = [(core, core), (daemon, client)]
            .map(|(d, c)| RankCores {
                daemons: vec![d],
                clients: vec![c],
            })
            .into();
        let backend = Channels {
            rank: 0,
            options,
            network: Network::default(),
            flaw: Flaw::None,
            gate: None,
        };
        let mut exchange = ThreadExchange {
            rank: 0,
            size: 1,
            meeting: Arc::default(),
            gate: None,
            interrupt_in: None,
            sleeps: 0,
        };
        let outcome = run_rank(
            &backend.options,
            &backend,
            &mut exchange,
            Clock::monotonic(),
            &Progress::hidden(),
        );
        assert!(
            matches!(
                outcome,
                Err(RankError::Affinity(AffinityError::Refused { core: 1023 }))
            ),
            "{outcome:?}"
        );
    }
}

fn result(args: &str, flaw: Flaw) -> JobResult {
    reduce(run(args, flaw))
}

fn reduce((options, outcomes): (Options, Vec<Result<RankReport, RankError>>)) -> JobResult {
    let parts: Vec<_> = outcomes
        .into_iter()
        .map(|report| serde_json::to_vec(&report.unwrap()).unwrap())
        .collect();
    let conditions = Conditions {
        clock: Clock::monotonic().source(),
        environment: benchkv_harness::environment::Environment::detect(),
    };
    JobResult::reduce(&options, conditions, &parts).unwrap()
}

#[test]
fn a_whole_job_ends_with_nothing_lost_and_every_value_right() {
    for args in [
        "--ranks 1",
        "--ranks 2",
        "--ranks 3 --server-threads 2 --client-threads 2 --distribution zipfian",
        "--ranks 3 --server-threads 2 --backend meta",
        "--ranks 2 --server-threads 2 --client-threads 3 --backend direct",
    ] {
        // The windows are long enough that each thread runs in some window on a loaded machine.
        let result = result(&format!("{args} --duration 0.3"), Flaw::None);
        assert!(
            result.is_sound(),
            "{args}: {:?}",
            result.first_verify_failure
        );
        assert_eq!(
            (result.fate.errors, result.fate.issued),
            (0, result.fate.completed),
            "{args}"
        );
        assert_eq!(result.measured.remote_ops > 0, result.ranks > 1, "{args}");
        assert!(result.measured.local_ops > 0, "{args}");
        assert!(
            result.measured.local_ops + result.measured.remote_ops < result.fate.completed,
            "{args}: warm-up and drain are not measured"
        );
    }
}

#[test]
fn a_window_never_includes_a_barrier() {
    let result = reduce(run_as(
        "--ranks 1 --runs 3",
        Flaw::None,
        Some(Arc::default()),
        &[],
    ));
    assert!(
        result.fate.completed as usize >= 3 * Gate::ANSWERS,
        "load goes on while ranks meet"
    );
    // Operations that were answered at the end of a barrier may be collected in the window that
    // follows, or in one step more of the window before.
    assert!(
        result.measured.local_ops <= 3 * 3 * 4,
        "{} operations that ended in barriers were counted in windows",
        result.measured.local_ops
    );
}

/// Ranks notice the interrupt in different windows, or not before a barrier. All end after the same
/// window.
#[test]
fn an_interrupted_job_ends_together_with_what_it_has() {
    let windows = |interrupts: &[Option<usize>]| {
        let result = reduce(run_as(
            "--ranks 2 --runs 3 --duration 0.1",
            Flaw::None,
            None,
            interrupts,
        ));
        assert!(
            result.is_sound() && result.interrupted,
            "{:?}",
            result.first_verify_failure
        );
        assert_eq!(
            (result.fate.issued, result.fate.errors),
            (result.fate.completed, 0)
        );
        assert!(
            result.runs.iter().all(|run| run.duration_s > 0.0),
            "{:?}",
            result.runs
        );
        result.runs.len()
    };
    assert_eq!(windows(&[Some(0), None]), 0, "in the warm-up");
    assert_eq!(windows(&[None, Some(1)]), 1);
    assert_eq!(windows(&[Some(2), Some(3)]), 2);
    assert_eq!(windows(&[Some(3), Some(3)]), 3, "in the last");
}

#[test]
fn a_corrupted_value_makes_the_result_unsound() {
    // The runs are long enough that a client reads the value back on a loaded machine.
    let result = result("--ranks 2 --fault corrupt-value --duration 0.5", Flaw::None);
    assert_eq!(result.verify_failures, Some(1));
    assert!(
        result
            .first_verify_failure
            .as_ref()
            .unwrap()
            .contains("private key"),
        "{:?}",
        result.first_verify_failure
    );
    assert!(!result.is_sound());
}

#[test]
fn what_is_never_answered_is_counted_as_lost_after_a_bounded_drain() {
    // The runs are long enough that the daemon reaches the step from which it drops replies.
    let result = result("--ranks 2 --duration 0.5", Flaw::DaemonForgetsReplies);
    assert!(result.fate.lost > 0 && !result.is_sound());
    assert_eq!(
        result.fate.issued,
        result.fate.completed + result.fate.errors + result.fate.lost
    );
}

/// A daemon that does not run for a while, as on a loaded machine, answers later.
#[test]
fn what_a_daemon_did_not_look_at_because_it_did_not_run_is_not_lost() {
    let result = result(
        "--ranks 1 --duration 0.1 --runs 1 --warmup 0",
        Flaw::DaemonStandsStill,
    );
    assert_eq!((result.fate.lost, result.fate.errors), (0, 0));
    assert!(result.is_sound());
}

#[test]
fn a_failed_set_up_ends_the_rank_with_its_reason() {
    let (_, outcomes) = run("--ranks 1 --server-threads 2", Flaw::OpenFails);
    let message = outcomes[0].as_ref().unwrap_err().to_string();
    assert_eq!(message, "the inbox: no space");
}

#[test]
fn a_peer_found_dead_by_a_daemon_ends_the_rank_and_is_named() {
    let (_, outcomes) = run("--ranks 1 --duration 15", Flaw::DaemonSeesDeadPeer);
    let error = outcomes[0].as_ref().unwrap_err();
    assert!(
        matches!(
            error,
            RankError::Backend(BackendError::PeerGone { rank: 1, .. })
        ),
        "{error}"
    );
}

#[test]
fn a_panic_in_a_worker_is_an_error_not_a_hang() {
    let (_, outcomes) = run("--ranks 1 --duration 15", Flaw::DaemonPanics);
    let error = outcomes[0].as_ref().unwrap_err();
    assert!(
        matches!(error, RankError::Panicked { thread, message } if thread == "daemon-0" && message == "on purpose"),
        "{error}"
    );
}
