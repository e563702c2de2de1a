//! The launcher's side: starts processes, carries exchange records between them, sends signals, and
//! reads their reports.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write as _};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use copyrpc::{Context, ContextBuilder};

use crate::support;

/// Time after which a hang ends the process. The tests take far less.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(150);
/// The keep-alive of all endpoints.
pub(crate) const KEEPALIVE: Duration = Duration::from_millis(20);
/// Stall timeout of all endpoints: longer than a busy machine keeps a process from running.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_millis(1_500);

/// More calls than can be under way on a connection at once: the credit of 1 KiB pays for 16 that
/// allow no reply.
const MORE: u64 = 32;

const SETTINGS: &str = "COPYRPC_TEST_PROCESS";

/// Returns the factor `COPYRPC_TEST_SCALE` by which the tests run longer than by default.
pub(crate) fn scale() -> u64 {
    std::env::var("COPYRPC_TEST_SCALE").map_or(1, |scale| scale.parse().unwrap())
}

/// The parameters of a process at its start.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The nodes of the process.
    pub(crate) nodes: Range<usize>,
    /// Number of calls that each node makes on each connection.
    pub(crate) quota: u64,
    /// Directory of the fabric.
    pub(crate) dir: PathBuf,
}

impl Settings {
    pub(crate) fn from_env() -> Option<Self> {
        let line = std::env::var(SETTINGS).ok()?;
        let words: Vec<_> = line.splitn(4, ' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        Some(Self {
            nodes: number(0) as usize..number(1) as usize,
            quota: number(2),
            dir: words[3].into(),
        })
    }

    fn to_line(&self) -> String {
        format!(
            "{} {} {} {}",
            self.nodes.start,
            self.nodes.end,
            self.quota,
            self.dir.display()
        )
    }
}

/// The last report of a node about its connection to another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// Number of the connection between the two nodes.
    pub(crate) incarnation: u64,
    pub(crate) issued: u64,
    /// Number of calls that ended by their reply.
    pub(crate) completed: u64,
    /// Number of calls that were cancelled, or ended by their deadline.
    pub(crate) given_up: u64,
    /// Number of calls that ended with the connection.
    pub(crate) disconnected: u64,
    pub(crate) stalled: u64,
    /// Requests received.
    pub(crate) served: u64,
    pub(crate) outstanding: u64,
    /// 1 once the connection has ended.
    pub(crate) is_closed: u64,
    /// Number of steps of the process.
    pub(crate) rounds: u64,
    /// CPU time of the process's thread, in ns.
    pub(crate) cpu_ns: u64,
}

impl Said {
    pub(crate) fn to_line(self) -> String {
        let ended = [
            self.completed,
            self.given_up,
            self.disconnected,
            self.stalled,
        ];
        let rest = [
            self.served,
            self.outstanding,
            self.is_closed,
            self.rounds,
            self.cpu_ns,
        ];
        let numbers = [self.incarnation, self.issued]
            .into_iter()
            .chain(ended)
            .chain(rest);
        numbers
            .map(|number| number.to_string())
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn of_words(words: &[&str]) -> Self {
        let n: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
        let [
            incarnation,
            issued,
            completed,
            given_up,
            disconnected,
            stalled,
            served,
            outstanding,
            is_closed,
            rounds,
            cpu_ns,
        ] = n[..]
        else {
            panic!("{words:?}")
        };
        Self {
            incarnation,
            issued,
            completed,
            given_up,
            disconnected,
            stalled,
            served,
            outstanding,
            is_closed,
            rounds,
            cpu_ns,
        }
    }

    /// Returns whether the connection has ended, and each call has ended once.
    pub(crate) fn is_over(&self) -> bool {
        let ended = self.completed + self.given_up + self.disconnected + self.stalled;
        self.is_closed == 1 && self.outstanding == 0 && ended == self.issued
    }
}

/// A pair of nodes: the reporter and the node reported on, or the caller and the callee.
pub(crate) type Pair = (usize, usize);

/// The reports of all processes.
#[derive(Default)]
struct Heard {
    said: HashMap<Pair, Said>,
    records: HashMap<Pair, String>,
    connected: HashSet<Pair>,
    /// Children that processes of the job forked, which outlive their parents.
    forked: Vec<libc::pid_t>,
    totals: Totals,
}

/// Sums over all contexts that ended well.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) contexts: u64,
    pub(crate) rnr_naks: u64,
    pub(crate) wraps: u64,
    pub(crate) reads: u64,
    pub(crate) metadata_only: u64,
    pub(crate) late_responses: u64,
    pub(crate) stale_responses: u64,
}

struct Process {
    settings: Settings,
    child: Child,
    input: ChildStdin,
    ended: Arc<AtomicBool>,
    /// The process was killed on purpose, and is not started again yet.
    is_dead: bool,
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self
            .heard
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .forked
            .drain(..)
        {
            // SAFETY: kill(2). It was forked by one of our processes and never ends by itself, so
            // the number is its own.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // After a failed test, the process may still run.
        let _killed = self.child.kill();
    }
}

impl Process {
    fn start(settings: Settings, heard: &Arc<Mutex<Heard>>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "processes::worker::process",
                "--ignored",
                "--nocapture",
            ])
            .env(SETTINGS, settings.to_line())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = child.stdout.take().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(heard);
        let nodes = settings.nodes.clone();
        let end = Arc::clone(&ended);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                heard.lock().unwrap().take(&line, &nodes);
            }
            end.store(true, Ordering::Relaxed);
        });
        Self {
            settings,
            child,
            input,
            ended,
            is_dead: false,
        }
    }
}

impl Heard {
    fn take(&mut self, line: &str, nodes: &Range<usize>) {
        let words: Vec<_> = line.split(' ').collect();
        let pair = |node: &str, other: &str| (node.parse().unwrap(), other.parse().unwrap());
        match words[..] {
            ["said", node, other, ref numbers @ ..] => {
                self.said.insert(pair(node, other), Said::of_words(numbers));
            }
            ["record", node, other, record] => {
                drop(self.records.insert(pair(node, other), record.to_owned()))
            }
            ["connected", node, other] => drop(self.connected.insert(pair(node, other))),
            ["forked", pid] => self.forked.push(pid.parse().unwrap()),
            // The output before the stop is obsolete.
            ["stopped"] => self.said.retain(|(node, _), _| !nodes.contains(node)),
            ["totals", ref numbers @ ..] => {
                let n: Vec<u64> = numbers.iter().map(|word| word.parse().unwrap()).collect();
                let totals = &mut self.totals;
                totals.contexts += 1;
                let sums = [
                    &mut totals.rnr_naks,
                    &mut totals.wraps,
                    &mut totals.reads,
                    &mut totals.metadata_only,
                ];
                let more = [&mut totals.late_responses, &mut totals.stale_responses];
                sums.into_iter()
                    .chain(more)
                    .zip(n)
                    .for_each(|(sum, number)| *sum += number);
            }
            _ => {}
        }
    }
}

/// A job: processes with an equal number of nodes each.
pub(crate) struct Job {
    /// Lock that lets one job run at a time: all its processes keep a core busy.
    _alone: MutexGuard<'static, ()>,
    processes: Vec<Process>,
    nodes_each: usize,
    heard: Arc<Mutex<Heard>>,
    connections: u64,
    dir: PathBuf,
}

impl Job {
    /// Starts the processes and connects every node to every other node, including the nodes of the
    /// same process.
    pub(crate) fn start(name: &str, processes: usize, nodes_each: usize, quota: u64) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = PathBuf::from(format!(
            "/dev/shm/copyrpc-test-{name}-{}",
            std::process::id()
        ));
        std::fs::create_dir(&dir).unwrap();
        let heard = Arc::default();
        let settings = |process| Settings {
            nodes: process * nodes_each..(process + 1) * nodes_each,
            quota,
            dir: dir.clone(),
        };
        let processes: Vec<_> = (0..processes)
            .map(|process| Process::start(settings(process), &heard))
            .collect();
        let mut job = Self {
            _alone: alone,
            processes,
            nodes_each,
            heard,
            connections: 0,
            dir,
        };
        let nodes = job.processes.len() * nodes_each;
        let pairs: Vec<_> = (0..nodes)
            .flat_map(|a| (0..a).map(move |b| (a, b)))
            .collect();
        job.connect(&pairs);
        job
    }

    /// Connects pairs of nodes that are not connected.
    pub(crate) fn connect(&mut self, pairs: &[Pair]) {
        let both: Vec<Pair> = pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]).collect();
        let mut heard = self.heard.lock().unwrap();
        for pair in &both {
            heard.records.remove(pair);
            heard.connected.remove(pair);
            heard.said.remove(pair);
        }
        drop(heard);
        let first = self.connections;
        self.connections += pairs.len() as u64;
        for (at, (a, b)) in (0..).zip(&both) {
            self.tell(*a, &format!("offer {a} {b} {}", first + at / 2));
        }
        self.wait("for records", |heard| {
            both.iter().all(|pair| heard.records.contains_key(pair))
        });
        for (a, b) in &both {
            let record = self.heard.lock().unwrap().records[&(*b, *a)].clone();
            self.tell(*a, &format!("connect {a} {b} {record}"));
        }
        self.wait("for connections", |heard| {
            both.iter().all(|pair| heard.connected.contains(pair))
        });
        for (a, b) in &both {
            self.tell(*a, &format!("go {a} {b}"));
        }
    }

    fn process_of(&mut self, node: usize) -> &mut Process {
        &mut self.processes[node / self.nodes_each]
    }

    fn tell(&mut self, node: usize, line: &str) {
        writeln!(self.process_of(node).input, "{line}").unwrap();
    }

    fn signal(&mut self, node: usize, signal: i32) {
        let pid = self.process_of(node).child.id().try_into().unwrap();
        // SAFETY: kill(2) of our own child, which was not waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Stops the process of a node and waits until it is stopped.
    pub(crate) fn stop(&mut self, node: usize) {
        self.signal(node, libc::SIGSTOP);
        let stat = format!("/proc/{}/stat", self.process_of(node).child.id());
        let is_stopped = |_: &Heard| {
            std::fs::read_to_string(&stat)
                .unwrap()
                .rsplit(") ")
                .next()
                .unwrap()
                .starts_with('T')
        };
        self.wait("to be stopped", is_stopped);
    }

    pub(crate) fn resume(&mut self, node: usize) {
        self.signal(node, libc::SIGCONT);
    }

    /// Makes the process of a node fork a child, which lives as long as the job.
    pub(crate) fn fork(&mut self, node: usize) -> libc::pid_t {
        let before = self.heard.lock().unwrap().forked.len();
        self.tell(node, "fork");
        self.wait("for a child", |heard| heard.forked.len() > before);
        self.heard.lock().unwrap().forked[before]
    }

    /// Kills the process of a node.
    pub(crate) fn kill(&mut self, node: usize) {
        self.signal(node, libc::SIGKILL);
        let process = self.process_of(node);
        process.is_dead = true;
        assert!(!process.child.wait().unwrap().success());
    }

    /// Starts the killed process of a node again; the node has no connections then.
    pub(crate) fn restart(&mut self, node: usize) {
        let (heard, settings) = (
            Arc::clone(&self.heard),
            self.process_of(node).settings.clone(),
        );
        *self.process_of(node) = Process::start(settings, &heard);
    }

    fn wait(&self, what: &str, condition: impl Fn(&Heard) -> bool) {
        let start = Instant::now();
        while !condition(&self.heard.lock().unwrap()) {
            for process in self.processes.iter().filter(|process| !process.is_dead) {
                assert!(
                    !process.ended.load(Ordering::Relaxed),
                    "the process of nodes {:?} ended; waited {what}",
                    process.settings.nodes
                );
            }
            if start.elapsed() > WATCHDOG / 2 {
                panic!(
                    "watchdog: waited {what}; said: {:#?}",
                    self.heard.lock().unwrap().said
                );
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until `condition` holds for the last report of each of the pairs, and returns these
    /// reports.
    pub(crate) fn wait_until(
        &self,
        what: &str,
        pairs: &[Pair],
        condition: impl Fn(&Said) -> bool,
    ) -> Vec<Said> {
        self.wait(what, |heard| {
            pairs
                .iter()
                .all(|pair| heard.said.get(pair).is_some_and(&condition))
        });
        let heard = self.heard.lock().unwrap();
        pairs.iter().map(|pair| heard.said[pair]).collect()
    }

    /// Waits until calls of `a` to `b` and back have completed that began after this was called,
    /// and returns the reports of both on each other.
    pub(crate) fn wait_for_traffic(&self, a: usize, b: usize) -> [Said; 2] {
        [(a, b), (b, a)].map(|pair| {
            let before = self.wait_until("for anything", &[pair], |_| true)[0].completed;
            self.wait_until("for traffic", &[pair], |said| {
                said.completed > before + MORE
            })[0]
        })
    }

    /// Makes all processes stop calling, waits until all calls have ended, and checks by the
    /// reports that every call ended once and was received once. Then ends the processes.
    pub(crate) fn finish(mut self) -> Totals {
        let nodes = self.processes.len() * self.nodes_each;
        for process in &mut self.processes {
            writeln!(process.input, "stop").unwrap();
        }
        let pairs: Vec<Pair> = (0..nodes)
            .flat_map(|a| (0..nodes).filter(move |b| *b != a).map(move |b| (a, b)))
            .collect();
        self.wait("for the books", |heard| {
            pairs.iter().all(|&(a, b)| {
                let (Some(caller), Some(server)) =
                    (heard.said.get(&(a, b)), heard.said.get(&(b, a)))
                else {
                    return false;
                };
                let ended = caller.completed + caller.given_up;
                let is_balanced =
                    caller.issued > 0 && ended == caller.issued && server.served == caller.issued;
                is_balanced || caller.is_closed == 1
            })
        });
        let books: Vec<_> = self
            .heard
            .lock()
            .unwrap()
            .said
            .iter()
            .map(|(pair, said)| (*pair, *said))
            .collect();
        assert!(
            books.iter().all(|(_, said)| said.is_closed == 0),
            "connections ended: {books:#?}"
        );
        for process in &mut self.processes {
            writeln!(process.input, "exit").unwrap();
            let status = process.child.wait().unwrap();
            assert!(
                status.success(),
                "the process of nodes {:?}: {status}",
                process.settings.nodes
            );
        }
        self.wait_for_totals(nodes as u64);
        let totals = self.heard.lock().unwrap().totals;
        assert_eq!((totals.rnr_naks, totals.stale_responses), (0, 0));
        // Opening and closing a device removes the files that dead processes left in the directory.
        drop::<Context<()>>(
            ContextBuilder::new(support::spec_in(self.dir.clone()))
                .build()
                .unwrap(),
        );
        std::fs::remove_dir(&self.dir).expect("nothing is left behind");
        totals
    }

    fn wait_for_totals(&mut self, contexts: u64) {
        self.processes
            .iter_mut()
            .for_each(|process| process.is_dead = true);
        self.wait("for the totals", |heard| heard.totals.contexts == contexts);
    }
}
