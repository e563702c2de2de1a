//! Three processes with endpoints to each other under load: one is stopped at random moments, or killed.
//!
//! Each rank keeps calls outstanding to both others, echoes theirs, and checks that requests arrive once and in order and that every
//! reply is its own. The test is the launcher: it carries the exchange records and sends the signals.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use copyrpc::{CallFailure, Context, ContextBuilder, EXCHANGE_RECORD_SIZE, Endpoint, EndpointConfig, ExchangeRecord};
use mlx5::verbs::VerbsOptions;
use mlx5::{DeviceSpec, FabricSpec, SoftOptions};

const RANKS: usize = 3;
const DEPTH: usize = 32;
const DIR: &str = "COPYRPC_TEST_DIR";
const RANK: &str = "COPYRPC_TEST_RANK";
/// Nothing here takes long; this only ends a hang.
const WATCHDOG: Duration = Duration::from_secs(120);

fn watchdog() {
    std::thread::spawn(|| {
        std::thread::sleep(WATCHDOG);
        eprintln!("watchdog: the test hangs");
        std::process::abort();
    });
}

/// On the software HCA, or on the device behind libibverbs that `MLX5_TEST_DEVICE` names.
fn open(dir: PathBuf) -> Context<(usize, u64)> {
    let device = match std::env::var("MLX5_TEST_DEVICE").ok() {
        None => DeviceSpec::Soft(SoftOptions { fabric: FabricSpec::Shared { dir: Some(dir) }, ..SoftOptions::default() }),
        device => DeviceSpec::Verbs(VerbsOptions { device, ..VerbsOptions::default() }),
    };
    ContextBuilder::new(device).build().unwrap()
}

// ---- one rank ----

/// Request `serial` from rank `from`; the reply is the same with every byte inverted.
fn request(from: usize, serial: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(serial << 8 | from as u64);
    let mut bytes = serial.to_le_bytes().to_vec();
    bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take((serial * 37 % 400) as usize));
    bytes
}

fn inverted(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

/// One rank's view of one of its peers.
struct Peer {
    endpoint: Endpoint<(usize, u64)>,
    issued: u64,
    completed: u64,
    failed: u64,
    served: u64,
}

struct Rank {
    rank: usize,
    context: Context<(usize, u64)>,
    peers: HashMap<usize, Peer>,
}

impl Rank {
    /// Makes the endpoints and connects them, with the launcher carrying the records.
    fn connect(rank: usize, dir: PathBuf, lines: &mut impl Iterator<Item = String>) -> Self {
        let context = open(dir);
        let config = EndpointConfig { ring_size: 16 << 10, ..EndpointConfig::default() };
        let mut pending: HashMap<_, _> =
            (0..RANKS).filter(|peer| *peer != rank).map(|peer| (peer, context.create_endpoint(&config).unwrap())).collect();
        for (peer, endpoint) in &pending {
            println!("\nrecord {peer} {}", to_hex(&endpoint.local_info().encode()));
        }
        let mut peers = HashMap::new();
        while peers.len() < RANKS - 1 {
            let line = lines.next().unwrap();
            let (peer, record) = line.split_once(' ').unwrap();
            let peer = peer.parse().unwrap();
            let record = ExchangeRecord::decode(&from_hex(record)).unwrap();
            let endpoint = pending.remove(&peer).unwrap().connect(&record).unwrap();
            peers.insert(peer, Peer { endpoint, issued: 0, completed: 0, failed: 0, served: 0 });
        }
        println!("\nconnected");
        Self { rank, context, peers }
    }

    /// One step; whether anything moved.
    fn step(&mut self, issue: bool) -> bool {
        let rank = self.rank;
        for (to, peer) in self.peers.iter_mut().filter(|_| issue) {
            while peer.endpoint.outstanding_calls() < DEPTH {
                let bytes = request(rank, peer.issued);
                match peer.endpoint.call(&bytes, (*to, peer.issued), bytes.len()) {
                    Ok(_) => peer.issued += 1,
                    Err(error) if error.is_retryable() => break,
                    Err(_) => break, // The peer is dead; its calls end by themselves.
                }
            }
        }
        let peers = &mut self.peers;
        let taken = self.context.poll(|(to, serial), outcome| {
            let peer = peers.get_mut(&to).unwrap();
            match outcome {
                Ok(bytes) => {
                    assert_eq!(bytes.to_vec(), inverted(&request(rank, serial)), "reply to call {serial} of {rank} to {to}");
                    peer.completed += 1;
                }
                Err(CallFailure::Closed(_)) => peer.failed += 1,
                Err(other) => panic!("{other}"),
            }
        });
        while let Some(handle) = self.context.recv() {
            let (from, peer) = peers.iter_mut().find(|(_, peer)| peer.endpoint == handle.endpoint()).unwrap();
            let bytes = handle.data().to_vec();
            assert_eq!(bytes, request(*from, peer.served), "request {} of {from} to {rank}", peer.served);
            peer.served += 1;
            handle.reply(&inverted(&bytes)).unwrap();
        }
        taken.unwrap() > 0
    }

    fn is_done(&self) -> bool {
        self.peers.values().all(|peer| peer.endpoint.outstanding_calls() == 0)
    }
}

/// Not a test of its own: one of the three processes of the tests below, which re-execute this binary.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn rank_process() {
    let (Ok(rank), Some(dir)) = (std::env::var(RANK), std::env::var_os(DIR)) else { return };
    watchdog();
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let mut rank = Rank::connect(rank.parse().unwrap(), dir.into(), &mut lines);
    assert_eq!(lines.next().as_deref(), Some("go"));
    // They hold the lock that the thread needs.
    drop(lines);
    let (issue, serve) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
    let (stop, exit) = (Arc::clone(&issue), Arc::clone(&serve));
    std::thread::spawn(move || {
        let mut lines = std::io::stdin().lines();
        let _stop = lines.next();
        stop.store(false, Ordering::Relaxed);
        let _exit = lines.next();
        exit.store(false, Ordering::Relaxed);
    });
    let (mut told, mut said_done) = (Instant::now(), false);
    while serve.load(Ordering::Relaxed) {
        if !rank.step(issue.load(Ordering::Relaxed)) {
            std::thread::yield_now();
        }
        let is_done = !issue.load(Ordering::Relaxed) && rank.is_done();
        if told.elapsed() > Duration::from_millis(1) || (is_done && !said_done) {
            for (to, peer) in &rank.peers {
                let is_closed = u64::from(peer.endpoint.closed().is_some());
                println!("\nprogress {to} {} {} {} {} {is_closed}", peer.issued, peer.completed, peer.failed, peer.served);
            }
            told = Instant::now();
        }
        if is_done && !said_done {
            println!("\ndone");
            said_done = true;
        }
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(hex: &str) -> [u8; EXCHANGE_RECORD_SIZE] {
    std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
}

// ---- the launcher ----

/// What a rank said last of one of its peers.
#[derive(Default)]
struct Progress {
    issued: AtomicU64,
    completed: AtomicU64,
    failed: AtomicU64,
    served: AtomicU64,
    closed: AtomicU64,
}

#[derive(Default)]
struct Said {
    progress: [Progress; RANKS],
    done: AtomicBool,
    ended: AtomicBool,
}

struct Process {
    child: Child,
    input: Mutex<ChildStdin>,
    said: Arc<Said>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // Of a failed test: nothing may be left running.
        let _killed = self.child.kill();
    }
}

struct Job {
    ranks: Vec<Process>,
    /// The ranks that are expected to go on.
    living: Vec<usize>,
    dir: PathBuf,
}

impl Job {
    fn start(name: &str) -> Self {
        watchdog();
        let dir = PathBuf::from(format!("/dev/shm/copyrpc-test-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut records = Vec::new();
        let mut outputs = Vec::new();
        let mut ranks = Vec::new();
        for rank in 0..RANKS {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "rank_process", "--ignored", "--nocapture"])
                .env(RANK, rank.to_string())
                .env(DIR, &dir)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let input = Mutex::new(child.stdin.take().unwrap());
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
            let mut own = lines.by_ref().filter_map(|line| line.strip_prefix("record ").map(str::to_owned));
            for line in own.by_ref().take(RANKS - 1) {
                let (to, record) = line.split_once(' ').unwrap();
                records.push((rank, to.parse::<usize>().unwrap(), record.to_owned()));
            }
            outputs.push(lines);
            ranks.push(Process { child, input, said: Arc::default() });
        }
        let job = Self { ranks, living: (0..RANKS).collect(), dir };
        for (from, to, record) in records {
            job.tell(to, &format!("{from} {record}"));
        }
        for (rank, mut lines) in outputs.into_iter().enumerate() {
            assert!(lines.any(|line| line == "connected"));
            let said = Arc::clone(&job.ranks[rank].said);
            std::thread::spawn(move || listen(lines, &said));
        }
        for rank in 0..RANKS {
            job.tell(rank, "go");
        }
        job
    }

    fn tell(&self, rank: usize, line: &str) {
        writeln!(self.ranks[rank].input.lock().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: kill(2) of our own child.
        assert_eq!(unsafe { libc::kill(self.ranks[rank].child.id().try_into().unwrap(), signal) }, 0);
    }

    /// Stops a rank and waits until it is stopped.
    fn stop(&self, rank: usize) {
        self.signal(rank, libc::SIGSTOP);
        self.wait("to be stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.ranks[rank].child.id())).unwrap();
            stat.rsplit(") ").next().unwrap().starts_with('T')
        });
    }

    fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            for &rank in &self.living {
                assert!(!self.ranks[rank].said.ended.load(Ordering::Relaxed), "rank {rank} ended while waiting {what}");
            }
            assert!(start.elapsed() < WATCHDOG, "watchdog: waited {what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn completed(&self, from: usize, to: usize) -> u64 {
        self.ranks[from].said.progress[to].completed.load(Ordering::Relaxed)
    }

    /// Waits until calls of both ranks to each other have completed that were not complete when this was called.
    fn wait_for_traffic(&self, a: usize, b: usize) {
        let (ab, ba) = (self.completed(a, b), self.completed(b, a));
        // More than can have been under way.
        let more = 2 * DEPTH as u64;
        self.wait("for traffic", || self.completed(a, b) > ab + more && self.completed(b, a) > ba + more);
    }

    /// Has the living ranks stop issuing and waits until all their calls have ended.
    fn stop_issuing(&self) {
        for &rank in &self.living {
            self.tell(rank, "stop");
        }
        self.wait("for the last calls", || self.living.iter().all(|rank| self.ranks[*rank].said.done.load(Ordering::Relaxed)));
    }

    /// Checks the books of the living ranks and ends them.
    fn finish(self) {
        for &from in &self.living {
            for &to in self.living.iter().filter(|to| **to != from) {
                let said = &self.ranks[from].said.progress[to];
                let issued = said.issued.load(Ordering::Relaxed);
                assert!(issued > 0);
                assert_eq!(said.completed.load(Ordering::Relaxed), issued, "lost calls of {from} to {to}");
                assert_eq!(said.failed.load(Ordering::Relaxed), 0);
                // What the other served it says at its own pace.
                let served = &self.ranks[to].said.progress[from].served;
                self.wait("for the books", || served.load(Ordering::Relaxed) == issued);
            }
        }
        for &rank in &self.living {
            self.tell(rank, "exit");
        }
        for (rank, mut process) in self.ranks.into_iter().enumerate() {
            let status = process.child.wait().unwrap();
            assert_eq!(status.success(), self.living.contains(&rank), "rank {rank}: {status}");
        }
        // Whoever comes next finds and leaves a clean directory.
        drop(open(self.dir.clone()));
        std::fs::remove_dir(&self.dir).expect("nothing is left behind");
    }
}

fn listen(lines: impl Iterator<Item = String>, said: &Said) {
    for line in lines {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["progress", to, ref numbers @ ..] => {
                let progress = &said.progress[to.parse::<usize>().unwrap()];
                let fields = [&progress.issued, &progress.completed, &progress.failed, &progress.served, &progress.closed];
                for (field, number) in fields.into_iter().zip(numbers) {
                    field.store(number.parse().unwrap(), Ordering::Relaxed);
                }
            }
            ["done"] => said.done.store(true, Ordering::Relaxed),
            _ => {}
        }
    }
    said.ended.store(true, Ordering::Relaxed);
}

#[test]
fn a_process_stopped_at_random_moments_delays_nobody_else_and_loses_nothing() {
    let scale = std::env::var("COPYRPC_TEST_SCALE").map_or(1, |scale| scale.parse().unwrap());
    let job = Job::start("stop");
    let mut rng = fastrand::Rng::with_seed(11);
    for _ in 0..200 * scale {
        let stopped = rng.usize(..RANKS);
        let (a, b) = ((stopped + 1) % RANKS, (stopped + 2) % RANKS);
        std::thread::sleep(Duration::from_micros(rng.u64(..2_000)));
        job.stop(stopped);
        job.wait_for_traffic(a, b);
        job.signal(stopped, libc::SIGCONT);
    }
    for (a, b) in [(0, 1), (1, 2), (2, 0)] {
        job.wait_for_traffic(a, b);
    }
    job.stop_issuing();
    job.finish();
}

#[test]
fn calls_to_a_killed_process_end_and_the_others_go_on() {
    let mut job = Job::start("kill");
    job.wait_for_traffic(0, 2);
    job.wait_for_traffic(1, 2);
    job.living = vec![0, 1];
    job.signal(2, libc::SIGKILL);
    let to_dead = |rank: usize| &job.ranks[rank].said.progress[2];
    job.wait("for the death to be noticed", || job.living.iter().all(|rank| to_dead(*rank).closed.load(Ordering::Relaxed) == 1));
    job.wait_for_traffic(0, 1);
    job.stop_issuing();
    for rank in [0, 1] {
        let said = to_dead(rank);
        let [issued, completed, failed] = [&said.issued, &said.completed, &said.failed].map(|count| count.load(Ordering::Relaxed));
        assert!(failed > 0, "calls were outstanding");
        assert_eq!(issued, completed + failed, "a call of {rank} to the dead process did not end");
    }
    job.finish();
}
