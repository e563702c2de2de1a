//! Four processes with 64 queue pairs between every two (192 in each). All send to all: WRITE with
//! immediate, READ, SEND and atomics, with every result checked. Meanwhile processes are stopped
//! and killed at random, and new processes take the places of the killed ones. The other processes
//! continue, and get transport errors only from killed processes. In the end every posted receive
//! can be used.

use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use crate::random::Random;
use crate::worker::{PROCESSES, QPS};

const DIR: &str = "MLX5_TEST_WORKER_DIR";
const NUMBER: &str = "MLX5_TEST_WORKER_NUMBER";
/// Time in which processes are stopped and killed, by default.
const SECONDS: u64 = 12;
/// Watchdog, far above the duration of any step.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs one of the four processes. It is not a test of its own.
#[test]
#[ignore = "helper process of the other test, started by it"]
fn worker_process() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    copyrpc_testing::limits::watchdog(
        Duration::from_secs(
            SECONDS * u64::from(copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE")),
        ) + 4 * PATIENCE,
    );
    crate::worker::run(
        Path::new(&dir),
        std::env::var(NUMBER).unwrap().parse().unwrap(),
    );
}

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    number: usize,
    /// The processes from which this process reported errors.
    errors: Vec<usize>,
}

impl Process {
    fn start(dir: &Path, number: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "all_to_all::worker_process",
                "--ignored",
                "--nocapture",
            ])
            .env(DIR, dir)
            .env(NUMBER, number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tx, lines) = channel();
        std::thread::spawn(move || {
            output
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| tx.send(line))
        });
        let input = child.stdin.take();
        let mut process = Self {
            child,
            input,
            lines,
            number,
            errors: vec![],
        };
        process.hear("ready");
        process
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Returns the numbers in the process's next answer that begins with `verb`.
    fn hear(&mut self, verb: &str) -> Vec<u64> {
        let end = Instant::now() + PATIENCE;
        loop {
            let line = match self
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("process {} has stalled: no {verb}", self.number)
                }
                Err(RecvTimeoutError::Disconnected) => panic!("process {} ended", self.number),
            };
            let mut words = line.split_whitespace();
            let first = words.next();
            let numbers = words.filter_map(|word| word.parse().ok());
            match first {
                Some("error") => self.errors.extend(numbers.map(|n: u64| n as usize)),
                Some(first) if first == verb => return numbers.collect(),
                _ => {}
            }
        }
    }

    fn ask(&mut self, line: &str, verb: &str) -> Vec<u64> {
        self.tell(line);
        self.hear(verb)
    }

    fn signal(&self, signal: i32) {
        assert_eq!(
            // SAFETY: kill(2) of our own child.
            unsafe { libc::kill(self.child.id().try_into().unwrap(), signal) },
            0
        );
    }

    /// Stops the process, and waits until proc(5) shows it as stopped.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let is_stopped =
            |stat: String| stat.rsplit(") ").next().is_some_and(|s| s.starts_with('T'));
        while !is_stopped(
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap(),
        ) {
            std::thread::yield_now();
        }
    }
}

struct World {
    dir: PathBuf,
    processes: Vec<Process>,
}

impl World {
    fn new() -> Self {
        let dir = crate::fabric::new_dir("all");
        let processes = (0..PROCESSES)
            .map(|number| Process::start(&dir, number))
            .collect();
        let mut world = Self { dir, processes };
        (0..PROCESSES).for_each(|a| (0..a).for_each(|b| world.connect(a, b)));
        world
    }

    fn connect(&mut self, a: usize, b: usize) {
        let of_a = self.processes[a].ask(&format!("create {b}"), "created");
        let of_b = self.processes[b].ask(&format!("create {a}"), "created");
        let line = |peer: usize, numbers: &[u64]| {
            format!(
                "connect {peer} {}",
                numbers
                    .iter()
                    .map(u64::to_string)
                    .collect::<Vec<_>>()
                    .join(" ")
            )
        };
        self.processes[a].ask(&line(b, &of_b), "connected");
        self.processes[b].ask(&line(a, &of_a), "connected");
    }

    /// Checks that every process outside `except` completes operations with every other such
    /// process.
    fn all_go_on(&mut self, except: &[usize]) {
        let end = Instant::now() + PATIENCE;
        let others: Vec<usize> = (0..PROCESSES).filter(|p| !except.contains(p)).collect();
        let before: Vec<_> = others
            .iter()
            .map(|&p| self.processes[p].ask("status", "status"))
            .collect();
        for (&p, before) in others.iter().zip(before) {
            loop {
                let now = self.processes[p].ask("status", "status");
                if others.iter().all(|&q| q == p || now[q] > before[q]) {
                    break;
                }
                assert!(
                    Instant::now() < end,
                    "process {p} has stalled while {except:?} were stopped: {before:?}, {now:?}"
                );
            }
        }
    }

    /// Kills process `p`. The other processes detect the death, and a new process takes the place
    /// of `p`.
    fn kill(&mut self, p: usize) {
        self.processes[p].child.kill().unwrap();
        self.processes[p].child.wait().unwrap();
        let others: Vec<usize> = (0..PROCESSES).filter(|&q| q != p).collect();
        others
            .iter()
            .for_each(|&q| self.processes[q].tell(&format!("dead {p}")));
        for &q in &others {
            let process = &mut self.processes[q];
            assert_eq!(
                process.hear("reaped"),
                [QPS as u64],
                "each queue pair to the killed process has failed"
            );
            assert_eq!(
                core::mem::take(&mut process.errors),
                [p],
                "errors from the killed process only"
            );
        }
        self.processes[p] = Process::start(&self.dir, p);
        others.iter().for_each(|&q| self.connect(p, q));
    }

    /// Returns the number of receives that cannot be used, of all posted.
    fn leaked(&mut self) -> u64 {
        let mut leaked = 0;
        for p in 0..PROCESSES {
            let by = (p + 1) % PROCESSES;
            self.processes[p].ask("hold", "holds");
            let depth = self.depth();
            let flooded = self.processes[by].ask(&format!("flood {p} {depth}"), "flooded")[0];
            let released = self.processes[p].ask("release", "released");
            assert_eq!(released[1], depth);
            if released[0] != depth {
                println!(
                    "process {p} has received {} of {depth}; {flooded} were sent",
                    released[0]
                );
            }
            leaked += depth - released[0];
        }
        leaked
    }

    /// Returns the number of messages that were sent, by processes that send no more, and not
    /// received. All messages in flight arrive first.
    fn lost(&mut self) -> u64 {
        let end = Instant::now() + PATIENCE;
        loop {
            let totals: Vec<_> = self
                .processes
                .iter_mut()
                .map(|process| process.ask("totals", "totals"))
                .collect();
            let pairs = (0..PROCESSES).flat_map(|from| (0..PROCESSES).map(move |to| (from, to)));
            let lost = pairs
                .map(|(from, to)| totals[from][to].abs_diff(totals[to][PROCESSES + from]))
                .sum();
            if lost == 0 || Instant::now() > end {
                return lost;
            }
        }
    }

    /// Number of receives that each process has posted.
    fn depth(&self) -> u64 {
        (crate::worker::DEPTH as u64 + 1).next_power_of_two() - 1
    }
}

#[test]
fn processes_are_killed_and_stopped_at_random_and_the_others_go_on() {
    let seconds = SECONDS * u64::from(copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE"));
    copyrpc_testing::limits::watchdog(Duration::from_secs(seconds) + 4 * PATIENCE);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    let seed = std::env::var("MLX5_TEST_SEED")
        .map_or(u64::from(now.subsec_nanos()), |seed| seed.parse().unwrap());
    println!("MLX5_TEST_SEED={seed}");
    let mut random = Random::new(seed);
    let mut world = World::new();
    world.all_go_on(&[]);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut kills, mut stops) = (0, 0);
    while Instant::now() < end {
        let first = random.below(PROCESSES as u32) as usize;
        let second = (first + 1 + random.below(PROCESSES as u32 - 1) as usize) % PROCESSES;
        match random.below(4) {
            0 => {
                std::thread::sleep(Duration::from_micros(random.below(20_000).into()));
                world.kill(first);
                kills += 1;
            }
            what => {
                let stopped: &[usize] = if random.one_in(2) {
                    &[first]
                } else {
                    &[first, second]
                };
                stopped.iter().for_each(|&p| world.processes[p].stop());
                stops += stopped.len();
                world.all_go_on(stopped);
                if what == 1 {
                    // The first process is killed while it is stopped. The second one resumes
                    // before that, because a stopped process cannot connect to the successor.
                    stopped[1..]
                        .iter()
                        .for_each(|&p| world.processes[p].signal(libc::SIGCONT));
                    world.kill(first);
                    kills += 1;
                } else {
                    stopped
                        .iter()
                        .for_each(|&p| world.processes[p].signal(libc::SIGCONT));
                }
            }
        }
    }
    world.all_go_on(&[]);
    world
        .processes
        .iter_mut()
        .for_each(|process| process.tell("finish"));
    world
        .processes
        .iter_mut()
        .for_each(|process| drop(process.hear("finished")));
    let lost = world.lost();
    let completed: u64 = world
        .processes
        .iter_mut()
        .flat_map(|process| process.ask("status", "status"))
        .sum();
    let leaked = world.leaked();
    let errors: usize = world
        .processes
        .iter()
        .map(|process| process.errors.len())
        .sum();
    println!(
        "{} processes x {} queue pairs: {kills} kills, {stops} stops, {completed} operations of the living, 0 stalls, {lost} lost, 0 damaged, \
         {leaked} receives leaked of {}",
        PROCESSES,
        QPS * (PROCESSES - 1),
        world.depth() * PROCESSES as u64
    );
    assert_eq!((lost, leaked, errors), (0, 0, 0));
    assert!(kills > 0 && stops > 0);
    for process in &mut world.processes {
        drop(process.input.take());
        assert!(process.child.wait().unwrap().success());
    }
    crate::fabric::remove_dir(&world.dir);
}
