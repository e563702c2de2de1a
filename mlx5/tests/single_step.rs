//! A requester is single-stepped through a doorbell and stopped, or killed, after every instruction. Whatever it was doing, third parties
//! that use the same shared receive queue go on, and its own message arrives once or, if it was killed, at most once.
#![cfg(target_arch = "x86_64")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test"
)]

mod support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use mlx5::*;
use support::{describe, parse, watchdog};

const DIR: &str = "MLX5_TEST_STEPPED_DIR";
/// Receives that the target keeps posted.
const RECEIVES: usize = 15;
/// About this many instructions are tried, evenly spread; `MLX5_TEST_SCALE` multiplies it.
const POINTS: usize = 200;
/// Nothing here takes long; this only ends a hang.
const WATCHDOG: Duration = Duration::from_secs(240);

/// The tests stop and kill processes by turns.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// One end, with one queue pair for each peer.
struct End {
    pd: Pd,
    send_cq: Cq,
    recv_cq: MonoCq<u32>,
    srq: Srq,
    mr: Mr,
    qps: HashMap<u32, RcQp>,
}

fn open(dir: &Path) -> End {
    let options = SoftOptions { fabric: FabricSpec::Shared { dir: Some(dir.to_owned()) }, ..Default::default() };
    let device = Device::open(&DeviceSpec::Soft(options)).unwrap();
    let pd = device.alloc_pd();
    let (send_cq, recv_cq) = (device.create_cq(64).unwrap(), device.create_mono_cq(64).unwrap());
    let srq = pd.create_srq(RECEIVES as u32, 0).unwrap();
    let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let mut end = End { pd, send_cq, recv_cq, srq, mr, qps: HashMap::new() };
    end.refill();
    end
}

impl End {
    /// A queue pair for the peer called `name`; where it is, for that peer.
    fn add(&mut self, name: u32) -> (QpAddress, u64, u32) {
        let config = QpConfig { max_send_wr: 32, max_inline_data: 64 };
        let qp = self.pd.create_qp(&self.send_cq, &self.recv_cq, &self.srq, &config).unwrap();
        self.recv_cq.register(qp.qpn(), name);
        let address = qp.address();
        self.qps.insert(name, qp);
        (address, self.mr.addr(), self.mr.rkey())
    }

    fn remove(&mut self, name: u32) {
        let qp = self.qps.remove(&name).unwrap();
        self.recv_cq.unregister(qp.qpn());
    }

    fn connect(&mut self, name: u32, peer: &QpAddress) {
        self.qps.get_mut(&name).unwrap().connect(peer, &ConnectOptions::default()).unwrap();
    }

    fn refill(&mut self) {
        while self.srq.post(&[], 0).is_ok() {}
        self.srq.ring();
    }

    fn post(&mut self, name: u32, peer: (u64, u32), imm: u32) {
        let op = WriteImm { addr: peer.0 + 64 * u64::from(name), rkey: peer.1, imm, payload: Inline(&[imm as u8; 40]) };
        self.qps.get_mut(&name).unwrap().post(&op, Signal::Always, 0).unwrap();
    }

    fn ring(&mut self, name: u32) {
        self.qps.get_mut(&name).unwrap().ring();
    }

    /// Takes send completions; all must be good.
    fn reap(&mut self) {
        let qps = &mut self.qps;
        self.send_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            qps.values_mut().find(|qp| qp.qpn() == cqe.qpn()).unwrap().complete(&cqe).unwrap();
        });
    }

    /// Names and immediates of the messages that have arrived. Does not post their receives again.
    fn arrived(&mut self) -> Vec<(u32, u32)> {
        let (srq, mut got) = (&mut self.srq, vec![]);
        self.recv_cq.poll(64, |name, cqe| {
            srq.complete(cqe.wqe_counter()).expect("a receive completed twice");
            if cqe.result().is_ok() {
                // A message whose sender was killed before it told the owner comes out when its queue pair is destroyed.
                got.push((name.copied().unwrap_or(0), cqe.imm()));
            }
        });
        got
    }
}

// ---- the process that is stepped ----

/// Not a test of its own: the process that the tests below stop and kill.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn stepped_process() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    watchdog(WATCHDOG);
    let mut end = open(Path::new(&dir));
    let (address, ..) = end.add(0);
    // SAFETY: gettid takes no arguments.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    println!("\nstepped {tid} {}", describe(&address, 0, 0));
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let (peer, addr, rkey) = parse(&lines.next().unwrap());
    end.connect(0, &peer);
    for (imm, _) in (0..).zip(lines) {
        end.post(0, (addr, rkey), imm);
        // SAFETY: raise sends a signal to this thread; the tracer sees it and takes it away.
        unsafe { libc::raise(libc::SIGUSR1) };
        end.ring(0);
        // SAFETY: as above.
        unsafe { libc::raise(libc::SIGUSR1) };
        end.reap();
    }
}

// ---- its tracer, which is also the target and the third party ----

struct Stepped {
    child: Child,
    tid: libc::pid_t,
    stdin: ChildStdin,
    _output: BufReader<ChildStdout>,
}

#[derive(Debug, PartialEq)]
enum Stop {
    Step,
    Marker,
}

impl Stepped {
    /// Starts it, connects it to queue pair 0 of `target`, and attaches to it.
    fn start(dir: &Path, target: &mut End) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stepped_process", "--ignored", "--nocapture"])
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("stepped ") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the helper ended early");
        }
        let mut words = line.split_whitespace().skip(1);
        let tid = words.next().unwrap().parse().unwrap();
        let rest: Vec<&str> = words.collect();
        let (peer, ..) = parse(&rest.join(" "));
        let mut stdin = child.stdin.take().unwrap();
        let (own, addr, rkey) = target.add(0);
        target.connect(0, &peer);
        writeln!(stdin, "{}", describe(&own, addr, rkey)).unwrap();
        let stepped = Self { child, tid, stdin, _output: output };
        stepped.ptrace(libc::PTRACE_SEIZE, 0);
        stepped
    }

    fn ptrace(&self, request: libc::c_uint, data: libc::c_long) {
        // SAFETY: requests without an address, on a thread of our own child.
        let done = unsafe { libc::ptrace(request, self.tid, 0, data) };
        assert_eq!(done, 0, "ptrace {request}: {}", std::io::Error::last_os_error());
    }

    fn wait(&self) -> Stop {
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        let waited = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        assert_eq!(waited, self.tid);
        assert!(libc::WIFSTOPPED(status), "the helper ended with status {status:#x}");
        match libc::WSTOPSIG(status) {
            libc::SIGTRAP => Stop::Step,
            libc::SIGUSR1 => Stop::Marker,
            other => panic!("stopped by signal {other}"),
        }
    }

    /// Has it post the next message; it stands in front of the doorbell then.
    fn go(&mut self) {
        self.stdin.write_all(b"\n").unwrap();
        assert_eq!(self.wait(), Stop::Marker);
    }

    /// Executes up to `n` instructions; false if the doorbell ended before.
    fn step(&self, n: usize) -> bool {
        (0..n).all(|_| {
            self.ptrace(libc::PTRACE_SINGLESTEP, 0);
            self.wait() == Stop::Step
        })
    }

    /// Lets it run to the marker behind the doorbell.
    fn finish(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
        assert_eq!(self.wait(), Stop::Marker);
    }

    fn resume(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        // Its traced thread is reaped by its tracer first.
        let mut status = 0;
        while !libc::WIFSIGNALED(status) {
            // SAFETY: `status` is valid for the call.
            assert_eq!(unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) }, self.tid);
        }
        self.child.wait().unwrap();
    }
}

/// The target, and a third party connected to it by queue pair 1.
struct World {
    dir: PathBuf,
    target: End,
    third: End,
    third_peer: (u64, u32),
    sent: u32,
    received: u32,
    /// Immediates from the stepped process.
    from_stepped: Vec<u32>,
}

fn world(name: &str) -> World {
    let dir = PathBuf::from(format!("/dev/shm/mlx5-test-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    World::connect(&dir)
}

impl World {
    fn connect(dir: &Path) -> Self {
        let (mut target, mut third) = (open(dir), open(dir));
        let ((target_qp, addr, rkey), (third_qp, ..)) = (target.add(1), third.add(1));
        target.connect(1, &third_qp);
        third.connect(1, &target_qp);
        Self { dir: dir.to_owned(), target, third, third_peer: (addr, rkey), sent: 0, received: 0, from_stepped: vec![] }
    }

    fn take(&mut self) {
        for (name, imm) in self.target.arrived() {
            match name {
                0 => self.from_stepped.push(imm),
                _ => {
                    assert_eq!(imm, self.received, "the third party's messages arrive once and in order");
                    self.received += 1;
                }
            }
        }
    }

    /// The third party sends `n` messages; all arrive while nothing else is done but polling, or it has been stalled.
    fn third_party_sends(&mut self, n: u32) {
        for _ in 0..n {
            self.third.post(1, self.third_peer, self.sent);
            self.third.ring(1);
            self.sent += 1;
        }
        let end = Instant::now() + Duration::from_secs(10);
        while self.received < self.sent {
            self.take();
            self.target.refill();
            self.third.reap();
            assert!(Instant::now() < end, "third party stalled: {} of {} arrived", self.received, self.sent);
        }
        self.third.reap();
    }

    /// Receives, of the full number posted, that messages cannot use: the dead took them. If there are any, begins again with new ends.
    fn receives_lost(&mut self) -> usize {
        let (before, n) = (self.received, self.target.srq.depth() as u32);
        for _ in 0..n {
            self.third.post(1, self.third_peer, self.sent);
            self.third.ring(1);
            self.sent += 1;
        }
        for _ in 0..100 {
            self.take();
        }
        self.third.reap();
        let lost = (before + n - self.received) as usize;
        self.target.refill();
        if lost > 0 {
            let Self { target, third, third_peer, .. } = World::connect(&self.dir);
            (self.target, self.third, self.third_peer) = (target, third, third_peer);
            (self.sent, self.received) = (0, 0);
        }
        lost
    }

    fn finish(self) {
        let dir = self.dir.clone();
        drop(self);
        drop(open(&dir));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing is left behind");
        std::fs::remove_dir(&dir).unwrap();
    }
}

fn scale() -> usize {
    std::env::var("MLX5_TEST_SCALE").map_or(1, |s| s.parse().unwrap())
}

/// Instructions between two points, from the length of one whole doorbell.
fn stride(instructions: usize) -> usize {
    (instructions / (POINTS * scale())).max(1)
}

/// Counts the instructions of a doorbell.
fn length(world: &mut World, stepped: &mut Stepped) -> usize {
    stepped.go();
    let mut n = 0;
    while stepped.step(1) {
        n += 1;
    }
    stepped.resume();
    while world.from_stepped.is_empty() {
        world.take();
    }
    n
}

#[test]
fn a_requester_stopped_at_any_instruction_stalls_nobody_and_delivers_once_when_continued() {
    let _one = ONE_AT_A_TIME.lock();
    watchdog(WATCHDOG);
    let mut world = world("stop");
    let mut stepped = Stepped::start(&world.dir, &mut world.target);
    let instructions = length(&mut world, &mut stepped);
    let mut stops = 0;
    for point in (0..instructions).step_by(stride(instructions)) {
        stepped.go();
        // The way through the code differs a little from time to time; a step too many ends at the marker.
        let inside = stepped.step(point);
        world.third_party_sends(3);
        if inside {
            stepped.finish();
        }
        stepped.resume();
        stops += 1;
        let end = Instant::now() + Duration::from_secs(10);
        while world.from_stepped.len() <= stops {
            world.take();
            assert!(Instant::now() < end, "the message of stop {stops} at instruction {point} did not arrive");
        }
        world.target.refill();
    }
    assert_eq!(world.from_stepped, (0..=stops as u32).collect::<Vec<_>>(), "once each, in order");
    println!("{instructions} instructions, {stops} stops, 0 stalls, 0 lost, 0 duplicated");
    stepped.kill();
    world.finish();
}

#[test]
fn a_requester_killed_at_any_instruction_stalls_nobody_and_leaks_at_most_one_receive() {
    let _one = ONE_AT_A_TIME.lock();
    watchdog(WATCHDOG);
    let mut world = world("kill");
    let mut stepped = Stepped::start(&world.dir, &mut world.target);
    let instructions = length(&mut world, &mut stepped);
    stepped.kill();
    world.target.remove(0);
    world.from_stepped.clear();
    let (mut kills, mut delivered, mut leaked) = (0, 0, 0);
    // A process each: fewer points.
    for point in (0..instructions).step_by(stride(instructions) * 4) {
        let mut stepped = Stepped::start(&world.dir, &mut world.target);
        stepped.go();
        stepped.step(point);
        stepped.kill();
        kills += 1;
        world.third_party_sends(3);
        world.target.remove(0);
        world.take();
        world.target.refill();
        assert!(world.from_stepped.len() <= 1, "killed at instruction {point}: delivered twice");
        delivered += world.from_stepped.drain(..).count();
        let lost = world.receives_lost();
        assert!(lost <= 1, "killed at instruction {point}: {lost} receives are gone");
        leaked += lost;
    }
    println!("{instructions} instructions, {kills} kills, {delivered} delivered, {leaked} receives lost, 0 stalls");
    assert!(delivered > 0 && delivered < kills, "both outcomes happen");
    world.finish();
}

/// The memory of a receive queue, and its place in the device's table, could still be popped from by a requester that resumes.
#[test]
fn a_receive_queue_destroyed_under_a_stopped_requester_shares_nothing_with_the_next_one() {
    let _one = ONE_AT_A_TIME.lock();
    watchdog(WATCHDOG);
    let mut world = world("queue");
    let mut stepped = Stepped::start(&world.dir, &mut world.target);
    let instructions = length(&mut world, &mut stepped);
    stepped.kill();
    let mut stops = 0;
    for point in (0..instructions).step_by(stride(instructions) * 4) {
        let World { mut target, mut third, .. } = World::connect(&world.dir);
        let mut stepped = Stepped::start(&world.dir, &mut target);
        stepped.go();
        let inside = stepped.step(point);
        let End { pd, send_cq, mut recv_cq, srq, mr, qps } = target;
        for qp in qps.values() {
            recv_cq.unregister(qp.qpn());
        }
        drop((qps, srq));
        // What the old queue pairs left in the completion queue is of the old receive queue.
        while recv_cq.poll(64, |_, _| ()) > 0 {}
        let srq = pd.create_srq(RECEIVES as u32, 0).unwrap();
        let mut target = End { pd, send_cq, recv_cq, srq, mr, qps: HashMap::new() };
        target.refill();
        third.remove(1);
        let ((target_qp, addr, rkey), (third_qp, ..)) = (target.add(1), third.add(1));
        target.connect(1, &third_qp);
        third.connect(1, &target_qp);
        if inside {
            stepped.finish();
        }
        (world.target, world.third, world.third_peer) = (target, third, (addr, rkey));
        (world.sent, world.received) = (0, 0);
        assert_eq!(world.receives_lost(), 0, "stopped at instruction {point}: the old requester took a receive of the new queue");
        stepped.kill();
        stops += 1;
    }
    println!("{instructions} instructions, {stops} stops, 0 receives of the next queue lost");
    world.finish();
}
