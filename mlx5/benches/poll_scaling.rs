//! Is the cost of [`MonoCq::poll`] flat in the number of queues? It is measured beside two ways to serve N queues round-robin, in the same
//! process and the same minutes:
//!
//! - **flags**: N rings of 64-byte lines, each line with a valid flag: what a server does that polls its clients' buffers. The cheapest
//!   such loop: one load and one branch per queue that has nothing.
//! - **CQs**: N completion queues of this driver, polled one after the other.
//!
//! Three loads, each taking one message per poll: *idle* is the cost of learning that no queue has anything; *one active* that of each
//! message when all come to one queue; *all active* when they come to all in turn.
//!
//! One thread writes the messages beforehand and then reads them, so what is measured is instructions and cache footprint. Lines that come
//! from other cores or from a device cost more, and N flags are N lines.
//!
//! `cargo bench -p mlx5 --bench poll_scaling` prints times; with `-- --instructions` also exact instruction counts (needs valgrind).
//! Without `--bench` (as `cargo test` runs it) only the check that every contender finds every message is made.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr, reason = "a benchmark")]

use std::hint::black_box;
use std::process::Command;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Instant;

use mlx5::wire::ResponderCqe;
use mlx5::{Cq, CqeOpcode, Device, DeviceSpec, MonoCq, NullDevice};

/// Messages written beforehand.
const MESSAGES: u32 = 8192;
const MOST_QUEUES: u32 = 1024;

/// A way to find the messages of N queues, which the queues' numbers and messages of 32 bits go through.
trait Contender {
    const NAME: &'static str;
    fn new(queues: u32) -> Self;
    /// The device's side: the next message of `queue`.
    fn write(&mut self, queue: u32, message: u32);
    /// Looks until one message is found, or all queues were found empty. Adds what it found to `found` in any way that needs both.
    fn poll(&mut self, found: impl FnMut(u32, u32)) -> usize;
}

/// QPNs as a device gives them: sparse.
fn qpn(queue: u32) -> u32 {
    0x4000 + queue * 97
}

fn cqe(queue: u32, message: u32) -> [u8; 64] {
    ResponderCqe { qpn: qpn(queue), imm: message, byte_count: 64, ..Default::default() }.emit()
}

struct Mono {
    cq: MonoCq<u32>,
    null: NullDevice,
}

impl Contender for Mono {
    const NAME: &'static str = "MonoCq";
    fn new(queues: u32) -> Self {
        let device = Device::open(&DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
        let mut cq = device.create_mono_cq(MESSAGES).unwrap();
        for queue in 0..queues {
            cq.register(qpn(queue), queue);
        }
        Self { cq, null: device.null().unwrap() }
    }
    fn write(&mut self, queue: u32, message: u32) {
        assert!(self.null.write_cqe(self.cq.cqn(), &cqe(queue, message), CqeOpcode::ResponderWriteImm));
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        self.cq.poll(1, |queue, cqe| found(queue.copied().unwrap_or(u32::MAX), cqe.imm()))
    }
}

#[derive(Default)]
#[repr(C, align(64))]
struct Line {
    message: AtomicU32,
    valid: AtomicU8,
}

struct FlagQueue {
    lines: Vec<Line>,
    consumer: usize,
    producer: usize,
}

struct Flags {
    queues: Vec<FlagQueue>,
    next: usize,
}

impl Contender for Flags {
    const NAME: &'static str = "flags";
    fn new(queues: u32) -> Self {
        let queue = |_| FlagQueue { lines: vec![Line::default()], consumer: 0, producer: 0 };
        Self { queues: (0..queues).map(queue).collect(), next: 0 }
    }
    fn write(&mut self, queue: u32, message: u32) {
        let FlagQueue { lines, producer, .. } = &mut self.queues[queue as usize];
        lines[*producer].message.store(message, Ordering::Relaxed);
        lines[*producer].valid.store(1, Ordering::Release);
        *producer += 1;
        if *producer == lines.len() {
            lines.push(Line::default());
        }
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        for _ in 0..self.queues.len() {
            let queue = self.next;
            self.next = if queue + 1 == self.queues.len() { 0 } else { queue + 1 };
            let FlagQueue { lines, consumer, .. } = &mut self.queues[queue];
            let line = &lines[*consumer];
            if line.valid.load(Ordering::Acquire) != 0 {
                *consumer += 1;
                found(queue as u32, line.message.load(Ordering::Relaxed));
                return 1;
            }
        }
        0
    }
}

struct Cqs {
    cqs: Vec<Cq>,
    null: NullDevice,
    next: usize,
}

impl Contender for Cqs {
    const NAME: &'static str = "CQs";
    fn new(queues: u32) -> Self {
        let device = Device::open(&DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
        // Room for every load with little memory: in the all-active one each queue gets its share, the active one has all.
        let entries = |queue| if queue == active(queues) { MESSAGES } else { (MESSAGES / queues).max(2) };
        Self { cqs: (0..queues).map(|q| device.create_cq(entries(q)).unwrap()).collect(), null: device.null().unwrap(), next: 0 }
    }
    fn write(&mut self, queue: u32, message: u32) {
        assert!(self.null.write_cqe(self.cqs[queue as usize].cqn(), &cqe(queue, message), CqeOpcode::ResponderWriteImm));
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        for _ in 0..self.cqs.len() {
            let queue = self.next;
            self.next = if queue + 1 == self.cqs.len() { 0 } else { queue + 1 };
            if self.cqs[queue].poll(1, |cqe| found(queue as u32, cqe.imm())) != 0 {
                return 1;
            }
        }
        0
    }
}

/// The queue that is the only active one.
fn active(queues: u32) -> u32 {
    queues * 5 / 8
}

#[derive(Clone, Copy)]
enum Load {
    Idle,
    OneActive,
    AllActive,
}

const LOADS: [(&str, Load); 3] = [("idle", Load::Idle), ("one-active", Load::OneActive), ("all-active", Load::AllActive)];

/// A contender with all the messages of `load` written.
fn filled<C: Contender>(queues: u32, load: Load) -> C {
    let mut contender = C::new(queues);
    for message in 0..MESSAGES {
        match load {
            Load::Idle => {}
            Load::OneActive => contender.write(active(queues), message),
            Load::AllActive => contender.write(message % queues, message),
        }
    }
    contender
}

#[inline(never)]
fn poll_many<C: Contender>(contender: &mut C, polls: u32) -> (usize, u32) {
    let (mut n, mut sum) = (0, 0u32);
    for _ in 0..polls {
        n += contender.poll(|queue, message| sum = sum.wrapping_add(queue ^ message));
    }
    (n, black_box(sum))
}

/// Every contender finds every message once, with its queue, and a queue's messages in order.
fn verify<C: Contender>(queues: u32) {
    for (name, load) in LOADS {
        let mut contender = filled::<C>(queues, load);
        let (mut seen, mut last) = (0, vec![None; queues as usize]);
        let mut one = || {
            contender.poll(|queue, message| {
                let expected = if matches!(load, Load::OneActive) { active(queues) } else { message % queues };
                assert_eq!(queue, expected, "{} found a message of another queue", C::NAME);
                assert!(last[queue as usize].replace(message) < Some(message), "{} lost the order or a message twice", C::NAME);
                seen += 1;
            })
        };
        while one() != 0 {}
        let want = if matches!(load, Load::Idle) { 0 } else { MESSAGES };
        assert_eq!(seen, want, "{}, {queues} queues, {name}", C::NAME);
    }
}

/// Time of a poll in ns.
fn time<C: Contender>(queues: u32, load: Load) -> f64 {
    let mut contender = filled::<C>(queues, load);
    // An idle round of many queues is long; without messages there is no other bound.
    let polls = if matches!(load, Load::Idle) { (1 << 21) / queues.max(64) } else { MESSAGES };
    let start = Instant::now();
    let (found, _) = poll_many(&mut contender, polls);
    let ns = start.elapsed().as_nanos() as f64 / f64::from(polls);
    assert_eq!(found as u32, if matches!(load, Load::Idle) { 0 } else { MESSAGES });
    ns
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print_times() {
    println!("time of one poll in ns, and as a multiple of MonoCq's (medians of 15 interleaved rounds)");
    for (name, load) in LOADS {
        println!("\n{name}\n{:>7} {:>10} {:>18} {:>18}", "queues", Mono::NAME, Flags::NAME, Cqs::NAME);
        for queues in (0..=10).map(|log| 1 << log) {
            let rounds: Vec<[f64; 3]> =
                (0..15).map(|_| [time::<Mono>(queues, load), time::<Flags>(queues, load), time::<Cqs>(queues, load)]).collect();
            let [mono, flags, cqs] = [0, 1, 2].map(|i| median(rounds.iter().map(|r| r[i]).collect()));
            let [by_flags, by_cqs] = [1, 2].map(|i| median(rounds.iter().map(|r| r[i] / r[0]).collect()));
            println!("{queues:>7} {mono:>10.1} {flags:>10.1} {by_flags:>6.1}x {cqs:>10.1} {by_cqs:>6.1}x");
        }
    }
}

/// What `count` runs under callgrind.
fn run(contender: &str, load: &str, queues: u32, polls: u32) -> u32 {
    let load = LOADS.into_iter().find(|(name, _)| *name == load).unwrap().1;
    match contender {
        Mono::NAME => poll_many(&mut filled::<Mono>(queues, load), polls).1,
        Flags::NAME => poll_many(&mut filled::<Flags>(queues, load), polls).1,
        _ => poll_many(&mut filled::<Cqs>(queues, load), polls).1,
    }
}

/// Instructions of a poll: the difference of two runs of different length.
fn count(contender: &str, load: &str, queues: u32) -> f64 {
    let collected = |polls: u32| -> u64 {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(std::env::current_exe().unwrap())
            .args(["--run", contender, load, &queues.to_string(), &polls.to_string()])
            .output()
            .unwrap_or_else(|e| panic!("valgrind cannot be started ({e}); install it, or leave --instructions out"));
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text.lines().find_map(|line| line.split_once("Collected : "));
        line.unwrap_or_else(|| panic!("valgrind counted nothing:\n{text}")).1.trim().parse().unwrap()
    };
    (collected(3072) as f64 - collected(1024) as f64) / 2048.0
}

fn print_instructions() {
    println!("\ninstructions of one poll (callgrind)");
    println!("{:<11} {:>7} {:>9} {:>9} {:>9}", "load", "queues", Mono::NAME, Flags::NAME, Cqs::NAME);
    for (load, _) in LOADS {
        for queues in [1, 32, MOST_QUEUES] {
            let [mono, flags, cqs] = [Mono::NAME, Flags::NAME, Cqs::NAME].map(|contender| count(contender, load, queues));
            println!("{load:<11} {queues:>7} {mono:>9.1} {flags:>9.1} {cqs:>9.1}");
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `--run` and four more: what `count` starts.
    if let [_, contender, load, queues, polls] = &arguments[..] {
        println!("{}", run(contender, load, queues.parse().unwrap(), polls.parse().unwrap()));
        return;
    }
    for queues in [1, 2, 7, 64, MOST_QUEUES] {
        verify::<Mono>(queues);
        verify::<Flags>(queues);
        verify::<Cqs>(queues);
    }
    if arguments.iter().any(|a| a == "--bench") {
        print_times();
    }
    if arguments.iter().any(|a| a == "--instructions") {
        print_instructions();
    }
}
