//! Whole ranks whose threads sleep, each on everything that it waits for. Here a sleep does not end
//! by itself within an hour, so a lost wake-up is a hang and not a delay.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use copyrpc_shm::sleep::{self, Bell, Watch, Word};

use super::composed::Composed;
use super::*;
use crate::operation::Operation;
use crate::tests::{self as testing, Scratch, topology};
use crate::topology::{Backend, Carrier, Worker};

const RANKS: usize = 2;
const DAEMONS: usize = 2;
const CLIENTS: usize = 1;
/// Number of operations of each client, one at a time.
const OPERATIONS: u32 = 500;
const WATCHDOG: Duration = Duration::from_secs(60);

/// A sleep that ends at an event, but not by time.
struct Patient<'a>(&'a mut dyn Sleeper);

impl Sleeper for Patient<'_> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.0.with_watch(&mut |watch| then(&mut ForAnHour(watch)));
    }
}

struct ForAnHour<'a>(&'a mut dyn Watch);

impl Watch for ForAnHour<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        self.0.words(show);
    }
    fn arm(&mut self) {
        self.0.arm();
    }
    fn look(&mut self, is_told: bool) -> bool {
        self.0.look(is_told)
    }
    fn slice(&mut self) -> Duration {
        if self.0.slice().is_zero() {
            Duration::ZERO
        } else {
            Duration::from_secs(3600)
        }
    }
    fn check(&mut self) -> bool {
        self.0.check()
    }
}

struct Job {
    ranks: Vec<Composed>,
    meeting: Barrier,
    /// Sender, receiver and bytes of each record.
    records: Mutex<Vec<(Peer, Peer, Vec<u8>)>>,
    clients_left: Barrier,
    is_over: AtomicBool,
    bell: Bell,
    _dir: Scratch,
}

impl Job {
    fn new(backend: Backend, carrier: Carrier) -> Self {
        let dir = Scratch::new();
        let job = testing::job(topology(backend, carrier, RANKS, DAEMONS, CLIENTS));
        let threads = RANKS * (DAEMONS + CLIENTS);
        Self {
            ranks: (0..RANKS)
                .map(|rank| Composed::new(&job, dir.site(rank)).unwrap())
                .collect(),
            meeting: Barrier::new(threads),
            records: Mutex::default(),
            clients_left: Barrier::new(RANKS * CLIENTS),
            is_over: AtomicBool::new(false),
            bell: Bell::default(),
            _dir: dir,
        }
    }

    fn connect(&self, me: Peer, endpoints: &mut impl Endpoints) {
        let mine = endpoints
            .records()
            .into_iter()
            .map(|(to, bytes)| (me, to, bytes));
        self.records.lock().unwrap().extend(mine);
        self.meeting.wait();
        let records = self.records.lock().unwrap().clone();
        let for_me = records.into_iter().filter(|(_, to, _)| *to == me);
        endpoints
            .connect(
                &for_me
                    .map(|(from, _, bytes)| (from, bytes))
                    .collect::<Vec<_>>(),
            )
            .unwrap();
        self.meeting.wait();
    }

    fn run_daemon(&self, rank: usize, number: usize) {
        let mut daemon = self.ranks[rank].open_daemon(number).unwrap();
        self.meeting.wait();
        self.connect(
            Peer {
                rank,
                worker: Worker::Daemon(number),
            },
            &mut daemon,
        );
        loop {
            let mut heard = self.bell.listen();
            if self.is_over.load(Ordering::Acquire) {
                return;
            }
            if daemon
                .step(|| unreachable!("no policy asks for the time"))
                .unwrap()
                .moved
                == 0
            {
                sleep::wait(
                    [&mut heard as &mut dyn Sleeper, &mut Patient(&mut daemon)],
                    None,
                );
            }
        }
    }

    fn run_client(&self, rank: usize, number: usize) {
        self.meeting.wait();
        let mut paths = self.ranks[rank].open_client_on(number, None).unwrap();
        self.connect(
            Peer {
                rank,
                worker: Worker::Client(number),
            },
            &mut paths,
        );
        for token in 0..OPERATIONS {
            let to = if token % 3 == 0 { rank } else { 1 - rank };
            paths
                .issue(
                    Request::get(to as u32, u64::from(token)),
                    Operation::numbered(token),
                )
                .unwrap();
            paths.flush().unwrap();
            let mut ended = None;
            while ended.is_none() {
                paths
                    .poll(|operation, response| ended = Some((operation, response)))
                    .unwrap();
                if ended.is_none() {
                    sleep::wait([&mut Patient(&mut paths) as &mut dyn Sleeper], None);
                }
            }
            assert!(
                matches!(ended, Some((ref operation, Some(_))) if operation.access == token),
                "{ended:?}"
            );
        }
        if self.clients_left.wait().is_leader() {
            self.is_over.store(true, Ordering::Release);
            self.bell.ring();
        }
    }
}

fn ends((backend, carrier): (Backend, Carrier)) {
    let job = Arc::new(Job::new(backend, carrier));
    let workers = (0..DAEMONS)
        .map(Worker::Daemon)
        .chain((0..CLIENTS).map(Worker::Client));
    let start = |(rank, worker)| {
        let job = Arc::clone(&job);
        std::thread::spawn(move || match worker {
            Worker::Daemon(number) => job.run_daemon(rank, number),
            Worker::Client(number) => job.run_client(rank, number),
        })
    };
    let threads: Vec<_> = workers
        .flat_map(|worker| [(0, worker), (1, worker)])
        .map(start)
        .collect();
    let began = Instant::now();
    while !threads.iter().all(|thread| thread.is_finished()) {
        assert!(
            began.elapsed() < WATCHDOG,
            "{backend:?}, {carrier:?}: somebody sleeps forever"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(
        threads.into_iter().all(|thread| thread.join().is_ok()),
        "{backend:?}, {carrier:?}"
    );
}

#[test]
fn threads_are_woken_through_everything_that_they_wait_for() {
    let routings = [
        Backend::Meta,
        Backend::Delegation,
        Backend::Sharded,
        Backend::Direct,
    ]
    .map(|backend| (backend, Carrier::Copyrpc));
    let by_send = [Backend::Delegation, Backend::Direct].map(|backend| (backend, Carrier::RcSend));
    routings.into_iter().chain(by_send).for_each(ends);
}
