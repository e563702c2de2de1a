//! The overhead of the software HCA over the cost of its cache lines: two processes on two cores,
//! one RC connection. The same exchange with shared memory only is measured in the same run, in
//! turn.
//!
//! | name | one operation |
//! |---|---|
//! | `raw_line` | round trip of one 64 B line each way: 56 B and a sequence word that the other side waits for; first and last word read |
//! | `raw_two_lines` | the same with 64 B in one line and the sequence word in another: the cost of a message in a buffer of its own |
//! | `round_trip` | WRITE+IMM of 64 B inline and its doorbell; the other side polls its `MonoCq`, reads the payload's first and last word, completes the SRQ receive (posted again 16 at a time, before the answer) and answers in the same way |
//! | `lane` | one way through a `copyrpc_shm::lane` of 128 slots of one line, 56 B of them data |
//! | `inline_8`, `inline_1` | one way WRITE+IMM of 64 B inline, 8 and 1 to a doorbell; received as in `round_trip`. At most 96 in flight, as with the credits of an RPC |
//! | `sge_8`, `sge_1` | the same as `inline_8` and `inline_1` with the 64 B in an SGE |
//! | `loopback_8`, `loopback_1` | the same as `inline_8` and `inline_1` from a queue pair to itself: one process is requester and responder |
//!
//! A round measures each operation once. The time of an operation in a round is the median of its
//! blocks (64 round trips, or 4,096 messages), so a block in which a process lost its core does not
//! count. The output has median, minimum and maximum of the rounds, and of the ratios within each
//! round.
//!
//! `cargo bench -p mlx5 --bench soft_hca`; after `--`: `--rounds N` (11), `--json FILE` (`-` for
//! stdout, without other output there), `--check` (fails if `round_trip` takes more than 2.0 times
//! `raw_line`, or `inline_8` has a rate below 9 M/s; no CI runs it, because time is no test).
//! Without `--bench` (as `cargo test` runs it) it only checks that every message arrives once, in
//! order and whole.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark"
)]

mod raw;
mod verbs;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use raw::Raw;
use verbs::{End, Payload};

const WATCHDOG: Duration = Duration::from_secs(900);
const BLOCK_TRIPS: u64 = 64;
const BLOCK_MESSAGES: u64 = 4096;
/// Number of blocks that a round measures of each operation.
const TRIP_BLOCKS: u64 = 200;
const MESSAGE_BLOCKS: u64 = 32;
const ROUNDS: usize = 11;
/// Bounds of `--check`.
const MOST_RAW_ROUND_TRIPS: f64 = 2.0;
const LEAST_RATE: f64 = 9e6;

/// The wait of a process: it polls, and yields after each poll unless each process has its own
/// core.
#[derive(Clone, Copy)]
struct Wait {
    has_own_core: bool,
}

impl Wait {
    #[inline(always)]
    fn until(self, mut done: impl FnMut() -> bool) {
        while !done() {
            if !self.has_own_core {
                std::thread::yield_now();
            }
        }
    }
}

/// A measurement: operations per block, and the time of each block in ns per operation.
struct Blocks {
    each: u64,
    times: Vec<f64>,
}

impl Blocks {
    fn run(blocks: u64, each: u64, mut block: impl FnMut()) -> f64 {
        let mut this = Self {
            each,
            times: Vec::with_capacity(blocks as usize),
        };
        for _ in 0..blocks {
            let start = Instant::now();
            block();
            this.times
                .push(start.elapsed().as_nanos() as f64 / this.each as f64);
        }
        median(&mut this.times)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The role of a process. The first process, the timer, takes the times and starts the second
/// process, the helper, which sends in the one-way measurements.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Timer,
    Helper,
}

#[derive(Clone, Copy)]
enum Work {
    RawLine,
    RawTwoLines,
    RoundTrip,
    Lane,
    Rate(Payload, u64),
    Loopback(u64),
}

const WORKS: [(&str, Work); 10] = [
    ("raw_line", Work::RawLine),
    ("raw_two_lines", Work::RawTwoLines),
    ("round_trip", Work::RoundTrip),
    ("lane", Work::Lane),
    ("inline_8", Work::Rate(Payload::Inline, 8)),
    ("inline_1", Work::Rate(Payload::Inline, 1)),
    ("sge_8", Work::Rate(Payload::Gathered, 8)),
    ("sge_1", Work::Rate(Payload::Gathered, 1)),
    ("loopback_8", Work::Loopback(8)),
    ("loopback_1", Work::Loopback(1)),
];

struct Process {
    role: Role,
    raw: Raw,
    end: End,
    own: End,
}

impl Process {
    /// Runs the same work in both processes at once. Returns ns per operation in the timer.
    fn measure(&mut self, work: Work, trip_blocks: u64, message_blocks: u64) -> f64 {
        let Self {
            role,
            raw,
            end,
            own,
        } = self;
        raw.meet();
        let messages = message_blocks * BLOCK_MESSAGES;
        match (work, *role) {
            (Work::RawLine, _) => {
                Blocks::run(trip_blocks, BLOCK_TRIPS, || raw.line_trips(BLOCK_TRIPS))
            }
            (Work::RawTwoLines, _) => {
                Blocks::run(trip_blocks, BLOCK_TRIPS, || raw.two_line_trips(BLOCK_TRIPS))
            }
            (Work::RoundTrip, _) => {
                Blocks::run(trip_blocks, BLOCK_TRIPS, || end.trips(*role, BLOCK_TRIPS))
            }
            (Work::Lane, Role::Timer) => Blocks::run(message_blocks, BLOCK_MESSAGES, || {
                raw.lane_receive(BLOCK_MESSAGES)
            }),
            (Work::Lane, Role::Helper) => Blocks::run(1, messages, || raw.lane_send(messages)),
            (Work::Rate(..), Role::Timer) => Blocks::run(message_blocks, BLOCK_MESSAGES, || {
                end.receive_many(BLOCK_MESSAGES, raw.window())
            }),
            (Work::Rate(payload, batch), Role::Helper) => Blocks::run(1, messages, || {
                end.send_many(messages, payload, batch, raw.window())
            }),
            (Work::Loopback(batch), Role::Timer) => {
                Blocks::run(message_blocks, BLOCK_MESSAGES, || {
                    own.loopback(BLOCK_MESSAGES, batch)
                })
            }
            (Work::Loopback(_), Role::Helper) => 0.0,
        }
    }

    /// Runs a few blocks of every operation, and checks every byte.
    fn verify(&mut self) {
        self.end.looks_at_all(true);
        self.own.looks_at_all(true);
        for (_, work) in WORKS {
            self.measure(work, 2, 1);
        }
        self.end.looks_at_all(false);
        self.own.looks_at_all(false);
    }
}

struct Options {
    rounds: usize,
    json: Option<PathBuf>,
    check: bool,
    measures: bool,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Self {
        let mut options = Self {
            rounds: ROUNDS,
            json: None,
            check: false,
            measures: false,
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut value = || {
                arguments
                    .next()
                    .unwrap_or_else(|| panic!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--rounds" => options.rounds = value().parse().expect("--rounds needs a number"),
                "--json" => options.json = Some(value().into()),
                "--check" => options.check = true,
                "--bench" => options.measures = true,
                // Options that `cargo test` and `cargo bench` pass to any benchmark.
                _ => {}
            }
        }
        assert!(options.rounds > 0, "--rounds needs a positive number");
        options
    }
}

fn allowed_cores() -> Vec<usize> {
    // SAFETY: zero is a valid `cpu_set_t`, the call writes only the set, and each core is below
    // CPU_SETSIZE.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set),
            0
        );
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&core| libc::CPU_ISSET(core, &set))
            .collect()
    }
}

fn pin(core: usize) {
    // SAFETY: zero is a valid `cpu_set_t`, the core is below CPU_SETSIZE, and the call reads only
    // the set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        assert_eq!(
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set),
            0
        );
    }
}

fn watchdog() {
    std::thread::spawn(|| {
        std::thread::sleep(WATCHDOG);
        eprintln!("soft_hca: it hangs");
        std::process::abort();
    });
}

/// The second process, which is killed when this value is dropped.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        // Both calls fail if the process has ended already, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// First argument of the helper. The directory of the fabric, the helper's core or `-`, and the
/// number of rounds follow.
const HELPER: &str = "--helper";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    watchdog();
    if let [HELPER, dir, core, rounds] =
        arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        return help(Path::new(dir), core.parse().ok(), rounds.parse().unwrap());
    }
    let options = Options::parse(arguments.into_iter());
    let dir = std::env::temp_dir().join(format!("soft-hca-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let outcome = std::panic::catch_unwind(|| lead(&options, &dir));
    std::fs::remove_dir_all(&dir).unwrap();
    match outcome {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Runs the first process. Returns `false` if `--check` was given and a bound does not hold.
fn lead(options: &Options, dir: &Path) -> bool {
    let cores = allowed_cores();
    let pinned = cores.len() >= 2;
    let place = if pinned {
        cores[1].to_string()
    } else {
        "-".into()
    };
    let rounds = if options.measures { options.rounds } else { 0 };
    let helper = Command::new(std::env::current_exe().unwrap())
        .args([
            HELPER.as_ref(),
            dir.as_os_str(),
            place.as_ref(),
            rounds.to_string().as_ref(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut helper = Helper(helper);
    if pinned {
        pin(cores[0]);
    }
    let wait = Wait {
        has_own_core: pinned,
    };
    let (mut to, mut from) = (
        helper.0.stdin.take().unwrap(),
        BufReader::new(helper.0.stdout.take().unwrap()),
    );
    let raw = Raw::create(wait);
    writeln!(to, "{}", raw.describe()).unwrap();
    let mut process = Process {
        role: Role::Timer,
        raw,
        end: connect(dir, wait, &mut to, &mut from),
        own: End::to_itself(dir, wait),
    };
    process.verify();
    let mut rows: Vec<Row> = WORKS
        .iter()
        .map(|&(name, _)| Row {
            name,
            ns: Vec::new(),
        })
        .collect();
    for _ in 0..rounds {
        for (row, (_, work)) in rows.iter_mut().zip(WORKS) {
            row.ns
                .push(process.measure(work, TRIP_BLOCKS, MESSAGE_BLOCKS));
        }
    }
    let status = helper.0.wait().unwrap();
    assert!(status.success(), "the other process: {status}");
    if rounds == 0 {
        eprintln!(
            "soft_hca: every message arrived once, in order and whole; `cargo bench` measures"
        );
        return true;
    }
    let report = Report {
        rows,
        cores: pinned.then(|| (cores[0], cores[1])),
    };
    match &options.json {
        Some(path) if path.as_os_str() == "-" => println!("{}", report.json()),
        Some(path) => {
            std::fs::write(path, report.json() + "\n").unwrap();
            print!("{}", report.table());
        }
        None => print!("{}", report.table()),
    }
    !options.check || report.holds()
}

fn help(dir: &Path, core: Option<usize>, rounds: usize) {
    // SAFETY: this prctl takes integers only, and accesses no memory of the process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    if let Some(core) = core {
        pin(core);
    }
    let wait = Wait {
        has_own_core: core.is_some(),
    };
    let (mut to, mut from) = (std::io::stdout(), BufReader::new(std::io::stdin()));
    let raw = Raw::attach(&line(&mut from), wait);
    let mut process = Process {
        role: Role::Helper,
        raw,
        end: connect(dir, wait, &mut to, &mut from),
        own: End::to_itself(dir, wait),
    };
    process.verify();
    for _ in 0..rounds {
        for (_, work) in WORKS {
            process.measure(work, TRIP_BLOCKS, MESSAGE_BLOCKS);
        }
    }
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    assert!(line.ends_with('\n'), "the other process ended");
    line
}

/// Connects this process to the other. When the function returns, both processes are connected.
fn connect(dir: &Path, wait: Wait, to: &mut impl Write, from: &mut BufReader<impl Read>) -> End {
    let mut end = End::open(dir, wait);
    writeln!(to, "{}", end.describe()).unwrap();
    to.flush().unwrap();
    end.connect(&line(from));
    writeln!(to, "connected").unwrap();
    to.flush().unwrap();
    assert_eq!(line(from), "connected\n");
    end
}

/// A kind of operation, with the time of each round in ns per operation.
struct Row {
    name: &'static str,
    ns: Vec<f64>,
}

struct Spread([f64; 3]);

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        let median = median(&mut values);
        Self([median, values[0], values[values.len() - 1]])
    }

    fn text(&self, unit: &str, digits: usize) -> String {
        let [median, least, most] = self.0;
        format!("{median:>9.digits$} {unit:<6} ({least:.digits$} to {most:.digits$})")
    }
}

struct Report {
    rows: Vec<Row>,
    cores: Option<(usize, usize)>,
}

/// Ratios of times: the name, and the names of the two rows.
const RATIOS: [(&str, &str, &str); 7] = [
    ("round trip / raw line", "round_trip", "raw_line"),
    ("round trip / raw two lines", "round_trip", "raw_two_lines"),
    ("raw two lines / raw line", "raw_two_lines", "raw_line"),
    ("time of inline_8 / lane", "inline_8", "lane"),
    ("time of inline_1 / lane", "inline_1", "lane"),
    ("time of sge_8 / lane", "sge_8", "lane"),
    ("time of sge_1 / lane", "sge_1", "lane"),
];

impl Report {
    fn row(&self, name: &str) -> &[f64] {
        self.rows
            .iter()
            .find(|row| row.name == name)
            .map_or(&[], |row| &row.ns)
    }

    fn ratio(&self, of: &str, to: &str) -> Spread {
        Spread::of(
            self.row(of)
                .iter()
                .zip(self.row(to))
                .map(|(of, to)| of / to),
        )
    }

    fn is_trip(row: &Row) -> bool {
        row.name.starts_with("raw_") || row.name == "round_trip"
    }

    fn table(&self) -> String {
        let rounds = self.rows[0].ns.len();
        let mut text = match self.cores {
            Some((timer, helper)) => format!(
                "two processes on cores {timer} and {helper}; {rounds} rounds: median (least to most)\n"
            ),
            None => format!(
                "fewer than two cores are allowed: UNPINNED, so these are times of the scheduler; {rounds} rounds\n"
            ),
        };
        for row in &self.rows {
            let spread = if Self::is_trip(row) {
                Spread::of(row.ns.iter().copied()).text("ns", 0)
            } else {
                Spread::of(row.ns.iter().map(|ns| 1e3 / ns)).text("M/s", 2)
            };
            writeln!(text, "{:<28} {spread}", row.name).unwrap();
        }
        for (what, of, to) in RATIOS {
            writeln!(text, "{what:<28} {}", self.ratio(of, to).text("x", 2)).unwrap();
        }
        text
    }

    fn json(&self) -> String {
        let mut fields = vec![
            format!("\"pinned\": {}", self.cores.is_some()),
            format!("\"rounds\": {}", self.rows[0].ns.len()),
        ];
        for row in &self.rows {
            let [median, least, most] = Spread::of(row.ns.iter().copied()).0;
            fields.push(format!(
                "\"{}_ns\": {{\"median\": {median:.2}, \"min\": {least:.2}, \"max\": {most:.2}}}",
                row.name
            ));
        }
        for (_, of, to) in RATIOS {
            let [median, least, most] = self.ratio(of, to).0;
            fields.push(format!("\"{of}_per_{to}\": {{\"median\": {median:.3}, \"min\": {least:.3}, \"max\": {most:.3}}}"));
        }
        format!("{{{}}}", fields.join(", "))
    }

    fn holds(&self) -> bool {
        let [trips, ..] = self.ratio("round_trip", "raw_line").0;
        let [rate, ..] = Spread::of(self.row("inline_8").iter().map(|ns| 1e9 / ns)).0;
        let holds = trips <= MOST_RAW_ROUND_TRIPS && rate >= LEAST_RATE;
        if !holds {
            eprintln!(
                "soft_hca: {trips:.2} raw round trips (bound {MOST_RAW_ROUND_TRIPS}), {:.2} M/s (bound {})",
                rate / 1e6,
                LEAST_RATE / 1e6
            );
        }
        holds
    }
}
