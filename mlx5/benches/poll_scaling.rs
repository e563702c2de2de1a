//! Measures whether the cost of [`MonoCq::poll`] is independent of the number of queues. [`MonoCq`]
//! is compared with two ways to serve N queues round-robin, in the same process and the same
//! minutes, and with libmlx5:
//!
//! - **flags**: N rings of 64-byte lines, each line with a valid flag, as a server polls its
//!   clients' buffers. This is the cheapest such loop: one load, one branch per empty queue.
//! - **CQs**: N completion queues of this driver, polled one after the other.
//! - **ibv_poll_cq**: one completion queue of libmlx5 for all N queue pairs. A poll takes at most
//!   one completion; its queue pair number is looked up in a table like `MonoCq`'s. This contender
//!   needs `mlx5-run` and libibverbs-dev; otherwise its column is empty, and the reason is printed.
//!
//! There are three loads, and a poll takes at most one message. *idle*: the cost of finding all
//! queues empty. *one active*: the cost of each message if all come to one queue. *all active*: the
//! same if they come to all queues in turn.
//!
//! One thread writes the messages beforehand and then reads them, so only instructions and cache
//! footprint are measured. Lines that come from other cores or from a device cost more, and N flags
//! are N lines.
//!
//! `cargo bench -p mlx5 --bench poll_scaling` prints times; with `-- --instructions` also exact
//! instruction counts (needs valgrind). Without `--bench` (as `cargo test` runs it) it only checks
//! that every contender finds every message.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark"
)]

#[path = "../tests/support/libmlx5/mod.rs"]
mod libmlx5;
#[path = "../tests/support/null.rs"]
mod null;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Instant;

use libmlx5::{IbvWc, Library, QpRequest, VerbsCq, VerbsDevice, VerbsQp, VerbsSrq};
use mlx5::wire::{CQE_BYTES, OP_OWN_OFFSET, ResponderCqe, op_own};
use mlx5::{Cq, CqeOpcode, Device, DeviceSpec, FastMap, MonoCq, NullDevice};
use null::Plays;

const MESSAGES: u32 = 8192;
const MOST_QUEUES: u32 = 1024;

/// A way to find the messages of N queues. A message consists of the queue's number and 32 bits.
trait Contender {
    const NAME: &'static str;
    fn new(queues: u32) -> Self;
    /// Writes, as the device, the next message of `queue`.
    fn write(&mut self, queue: u32, message: u32);
    /// Polls until one message is found, or all queues were found empty. Calls `found` with the
    /// queue and the value of the message. Returns the number of messages found.
    fn poll(&mut self, found: impl FnMut(u32, u32)) -> usize;
}

/// Returns the QPN of `queue`. The QPNs are sparse, as on a device.
fn qpn(queue: u32) -> u32 {
    0x4000 + queue * 97
}

fn cqe(queue: u32, message: u32) -> [u8; 64] {
    ResponderCqe {
        qpn: qpn(queue),
        imm: message,
        byte_count: 64,
        ..Default::default()
    }
    .emit()
}

struct Mono {
    cq: MonoCq<u32>,
    null: NullDevice,
}

impl Contender for Mono {
    const NAME: &'static str = "MonoCq";
    fn new(queues: u32) -> Self {
        let device = Device::open(DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
        let mut cq = device.create_mono_cq(MESSAGES).unwrap();
        for queue in 0..queues {
            cq.register(qpn(queue), queue);
        }
        Self {
            cq,
            null: device.null().unwrap(),
        }
    }
    fn write(&mut self, queue: u32, message: u32) {
        assert!(self.null.write_cqe(
            self.cq.cqn(),
            &cqe(queue, message),
            CqeOpcode::ResponderWriteImm
        ));
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        self.cq.poll(1, |queue, cqe| {
            found(queue.copied().unwrap_or(u32::MAX), cqe.imm())
        })
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
        let queue = |_| FlagQueue {
            lines: vec![Line::default()],
            consumer: 0,
            producer: 0,
        };
        Self {
            queues: (0..queues).map(queue).collect(),
            next: 0,
        }
    }
    fn write(&mut self, queue: u32, message: u32) {
        let FlagQueue {
            lines, producer, ..
        } = &mut self.queues[queue as usize];
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
            self.next = if queue + 1 == self.queues.len() {
                0
            } else {
                queue + 1
            };
            let FlagQueue {
                lines, consumer, ..
            } = &mut self.queues[queue];
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
        let device = Device::open(DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
        // Each CQ holds its share of the messages of *all active*, and the active CQ holds all
        // messages of *one active*.
        let entries = |queue| {
            if queue == active(queues) {
                MESSAGES
            } else {
                (MESSAGES / queues).max(2)
            }
        };
        Self {
            cqs: (0..queues)
                .map(|q| device.create_cq(entries(q)).unwrap())
                .collect(),
            null: device.null().unwrap(),
            next: 0,
        }
    }
    fn write(&mut self, queue: u32, message: u32) {
        assert!(self.null.write_cqe(
            self.cqs[queue as usize].cqn(),
            &cqe(queue, message),
            CqeOpcode::ResponderWriteImm
        ));
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        for _ in 0..self.cqs.len() {
            let queue = self.next;
            self.next = if queue + 1 == self.cqs.len() {
                0
            } else {
                queue + 1
            };
            if self.cqs[queue].poll(1, |cqe| found(queue as u32, cqe.imm())) != 0 {
                return 1;
            }
        }
        0
    }
}

/// The libmlx5 objects for the maximum number of queues. They are made once, because a thousand
/// queue pairs take long to make.
struct Verbs {
    cq: VerbsCq,
    srq: VerbsSrq,
    qps: Vec<VerbsQp>,
    queues: FastMap<u32>,
    posted: u32,
}

fn library() -> &'static Result<(Library, VerbsDevice), String> {
    static LIBRARY: OnceLock<Result<(Library, VerbsDevice), String>> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let library = Library::load(libmlx5::DRIVER)?;
        let device = VerbsDevice::open(&library, false)?;
        Ok((library, device))
    })
}

const RECEIVES: u32 = 2 * MESSAGES;

impl Verbs {
    fn new(device: &VerbsDevice) -> Self {
        let cq = device.create_cq(MESSAGES, CQE_BYTES as u32, false, false);
        let srq = device.create_srq(RECEIVES - 1, 1);
        let request = QpRequest {
            send_cq: cq.parts.cq,
            recv_cq: cq.parts.cq,
            srq: srq.parts.srq,
            is_datagram: 0,
            send_wr: 1,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: 0,
            recv_sge: 0,
        };
        let qps: Vec<VerbsQp> = (0..MOST_QUEUES)
            .map(|_| device.create_qp(&request))
            .collect();
        let mut queues = FastMap::new();
        for (queue, qp) in (0..).zip(&qps) {
            queues.insert(qp.parts.qpn, queue).unwrap();
        }
        Self {
            cq,
            srq,
            qps,
            queues,
            posted: 0,
        }
    }
}

/// The contender that polls libmlx5. It has the objects of [`Verbs`] until it is dropped.
struct IbvPollCq {
    verbs: Option<Box<Verbs>>,
    cq: *mut c_void,
    poll: unsafe extern "C" fn(*mut c_void, c_int, *mut IbvWc) -> c_int,
}

thread_local! {
    /// The libmlx5 objects while no contender has them.
    static VERBS: Cell<Option<Box<Verbs>>> = const { Cell::new(None) };
}

impl Drop for IbvPollCq {
    fn drop(&mut self) {
        // Takes the unread completions, so that the next contender does not get them.
        while self
            .verbs
            .as_ref()
            .is_some_and(|verbs| !verbs.cq.poll(64).is_empty())
        {}
        VERBS.set(self.verbs.take());
    }
}

impl Contender for IbvPollCq {
    const NAME: &'static str = "ibv_poll_cq";
    fn new(_: u32) -> Self {
        let (_, device) = library().as_ref().unwrap();
        let verbs = VERBS.take().unwrap_or_else(|| Box::new(Verbs::new(device)));
        Self {
            cq: verbs.cq.parts.cq,
            poll: verbs.cq.poll_function(),
            verbs: Some(verbs),
        }
    }
    fn write(&mut self, queue: u32, message: u32) {
        let verbs = self.verbs.as_mut().unwrap();
        verbs.srq.post(0, &[]);
        let wqe_counter = (verbs.posted % RECEIVES) as u16;
        verbs.posted += 1;
        // libmlx5 creates the queue pairs with user indices that count from 0, so a queue's number
        // is its user index. The CQE carries the user index in the field of the SRQ number.
        let qpn = verbs.qps[queue as usize].parts.qpn;
        let mut cqe = ResponderCqe {
            qpn,
            srqn: queue,
            imm: message,
            byte_count: 64,
            wqe_counter,
            ..Default::default()
        }
        .emit();
        cqe[OP_OWN_OFFSET] = op_own(CqeOpcode::ResponderWriteImm, verbs.cq.owner());
        verbs.cq.write(&[0; CQE_BYTES], &cqe);
    }
    #[inline(always)]
    fn poll(&mut self, mut found: impl FnMut(u32, u32)) -> usize {
        let mut wc = IbvWc::default();
        // SAFETY: `cq` is a completion queue, and `wc` has room for one completion.
        if unsafe { (self.poll)(self.cq, 1, &mut wc) } != 1 {
            return 0;
        }
        let queue = self
            .verbs
            .as_ref()
            .and_then(|verbs| verbs.queues.get(wc.qp_num));
        found(
            queue.copied().unwrap_or(u32::MAX),
            u32::from_be(wc.imm_data),
        );
        1
    }
}

const NAMES: [&str; 4] = [Mono::NAME, Flags::NAME, Cqs::NAME, IbvPollCq::NAME];

/// Returns the number of the only active queue in the load *one active*.
fn active(queues: u32) -> u32 {
    queues * 5 / 8
}

#[derive(Clone, Copy)]
enum Load {
    Idle,
    OneActive,
    AllActive,
}

const LOADS: [(&str, Load); 3] = [
    ("idle", Load::Idle),
    ("one-active", Load::OneActive),
    ("all-active", Load::AllActive),
];

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

/// Checks that every contender finds every message once, with its queue, and a queue's messages in
/// order.
fn verify<C: Contender>(queues: u32) {
    for (name, load) in LOADS {
        let mut contender = filled::<C>(queues, load);
        let (mut seen, mut last) = (0, vec![None; queues as usize]);
        let mut one = || {
            contender.poll(|queue, message| {
                let expected = if matches!(load, Load::OneActive) {
                    active(queues)
                } else {
                    message % queues
                };
                assert_eq!(
                    queue,
                    expected,
                    "{} found a message of another queue",
                    C::NAME
                );
                assert!(
                    last[queue as usize].replace(message) < Some(message),
                    "{} lost the order or a message twice",
                    C::NAME
                );
                seen += 1;
            })
        };
        while one() != 0 {}
        let want = if matches!(load, Load::Idle) {
            0
        } else {
            MESSAGES
        };
        assert_eq!(seen, want, "{}, {queues} queues, {name}", C::NAME);
    }
}

/// Returns the time of a poll in ns.
fn time<C: Contender>(queues: u32, load: Load) -> f64 {
    let mut contender = filled::<C>(queues, load);
    // The idle load has no messages to limit the number of polls. The more queues there are, the
    // longer a poll takes, so the fewer polls are made.
    let polls = if matches!(load, Load::Idle) {
        (1 << 21) / queues.max(64)
    } else {
        MESSAGES
    };
    let start = Instant::now();
    let (found, _) = poll_many(&mut contender, polls);
    let ns = start.elapsed().as_nanos() as f64 / f64::from(polls);
    assert_eq!(
        found as u32,
        if matches!(load, Load::Idle) {
            0
        } else {
            MESSAGES
        }
    );
    ns
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print_times() {
    println!(
        "time of one poll in ns, and as a multiple of MonoCq's (medians of 15 interleaved rounds)"
    );
    let has_verbs = library().is_ok();
    for (name, load) in LOADS {
        let [mono, others @ ..] = NAMES;
        println!(
            "\n{name}\n{:>7} {mono:>10} {:>18} {:>18} {:>18}",
            "queues", others[0], others[1], others[2]
        );
        for queues in (0..=10).map(|log| 1 << log) {
            let verbs = || {
                if has_verbs {
                    time::<IbvPollCq>(queues, load)
                } else {
                    f64::NAN
                }
            };
            let round = |_| {
                [
                    time::<Mono>(queues, load),
                    time::<Flags>(queues, load),
                    time::<Cqs>(queues, load),
                    verbs(),
                ]
            };
            let rounds: Vec<[f64; 4]> = (0..15).map(round).collect();
            let column = |i: usize| median(rounds.iter().map(|round| round[i]).collect());
            let ratio = |i: usize| median(rounds.iter().map(|round| round[i] / round[0]).collect());
            print!("{queues:>7} {:>10.1}", column(0));
            for i in 1..4 {
                match column(i).is_nan() {
                    true => print!(" {:>18}", "-"),
                    false => print!(" {:>10.1} {:>6.1}x", column(i), ratio(i)),
                }
            }
            println!();
        }
    }
}

/// Fills a contender and polls it `polls` times: the work of the processes that `count` starts
/// under callgrind. Returns a value that depends on every message.
fn run(contender: &str, load: &str, queues: u32, polls: u32) -> u32 {
    let load = LOADS.into_iter().find(|(name, _)| *name == load).unwrap().1;
    match contender {
        Mono::NAME => poll_many(&mut filled::<Mono>(queues, load), polls).1,
        Flags::NAME => poll_many(&mut filled::<Flags>(queues, load), polls).1,
        IbvPollCq::NAME => poll_many(&mut filled::<IbvPollCq>(queues, load), polls).1,
        _ => poll_many(&mut filled::<Cqs>(queues, load), polls).1,
    }
}

/// Returns the instructions of a poll: the difference of two runs of different length.
fn count(contender: &str, load: &str, queues: u32) -> f64 {
    let collected = |polls: u32| -> u64 {
        let output = Command::new("valgrind")
            // Instructions are collected only inside `poll_many`, so the thread of `mlx5-run`'s
            // device does not count.
            .args([
                "--tool=callgrind",
                "--callgrind-out-file=/dev/null",
                "--toggle-collect=*poll_many*",
            ])
            .arg(std::env::current_exe().unwrap())
            .args([
                "--run",
                contender,
                load,
                &queues.to_string(),
                &polls.to_string(),
            ])
            .output()
            .unwrap_or_else(|e| {
                panic!("valgrind cannot be started ({e}); install it, or leave --instructions out")
            });
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text
            .lines()
            .find_map(|line| line.split_once("Collected : "));
        line.unwrap_or_else(|| panic!("valgrind counted nothing:\n{text}"))
            .1
            .trim()
            .parse()
            .unwrap()
    };
    (collected(3072) as f64 - collected(1024) as f64) / 2048.0
}

fn print_instructions() {
    println!("\ninstructions of one poll (callgrind)");
    let [mono, flags, cqs, verbs] = NAMES;
    println!(
        "{:<11} {:>7} {mono:>11} {flags:>11} {cqs:>11} {verbs:>11}",
        "load", "queues"
    );
    for (load, _) in LOADS {
        for queues in [1, 32, MOST_QUEUES] {
            print!("{load:<11} {queues:>7}");
            for name in NAMES {
                match name == IbvPollCq::NAME && library().is_err() {
                    true => print!(" {:>11}", "-"),
                    false => print!(" {:>11.1}", count(name, load, queues)),
                }
            }
            println!();
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `--run` and four more: the arguments that `count` passes.
    if let [_, contender, load, queues, polls] = &arguments[..] {
        println!(
            "{}",
            run(
                contender,
                load,
                queues.parse().unwrap(),
                polls.parse().unwrap()
            )
        );
        return;
    }
    for queues in [1, 2, 7, 64, MOST_QUEUES] {
        verify::<Mono>(queues);
        verify::<Flags>(queues);
        verify::<Cqs>(queues);
        if library().is_ok() {
            verify::<IbvPollCq>(queues);
        }
    }
    if let Err(reason) = library() {
        println!("no column for ibv_poll_cq: {reason}");
    }
    if arguments.iter().any(|a| a == "--bench") {
        print_times();
    }
    if arguments.iter().any(|a| a == "--instructions") {
        print_instructions();
    }
}
