//! Litmus tests of the order of memory: the software HCA shows no outcome that the published models
//! of RDMA forbid ([`programs`] names them), and with delays and by packets it shows weak outcomes
//! that they allow.

mod node;
mod programs;
mod statements;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use copyrpc_testing::limits::{scale_of, watchdog};
use mlx5::*;

use self::node::{COPIES, Key, Node};
use self::programs::{PROGRAMS, Program, Shown};
use self::statements::{LETTERS, NODES, Place, Statement, Word, statements, values, ways};
use crate::random::Random;

const WATCHDOG: Duration = Duration::from_secs(240);
/// Delays of the runs with delays, in ns, on a clock that the test moves.
const DELAYS_NS: (u64, u64) = (0, 8_000);
/// Maximum time by which the clock moves between two statements.
const STEP_NS: u32 = 1_000;

/// A program, parsed.
struct Test {
    program: &'static Program,
    threads: Vec<(usize, Vec<Statement>)>,
    init: Vec<(Place, u64)>,
    forbidden: Vec<Vec<(Place, u64)>>,
    weak: Vec<Vec<(Place, u64)>>,
    /// Number of times that each weak outcome was seen.
    seen: Vec<AtomicU32>,
}

/// The registers of a copy and, when all operations are complete, its words.
#[derive(Default)]
struct Outcome {
    registers: [AtomicU64; LETTERS],
    words: [[AtomicU64; LETTERS]; NODES],
}

impl Outcome {
    fn has(&self, values: &[(Place, u64)]) -> bool {
        values.iter().all(|(place, value)| {
            let cell = match *place {
                Place::Register(register) => &self.registers[register],
                Place::Word(Word { node, index }) => &self.words[node][index],
            };
            cell.load(Ordering::Relaxed) == *value
        })
    }

    fn set_words(&self, node: &Node, number: usize, copy: usize) {
        for (index, cell) in self.words[number].iter().enumerate() {
            let word = Word {
                node: number,
                index,
            };
            cell.store(node.load(copy, word), Ordering::Relaxed);
        }
    }
}

impl Test {
    fn new(program: &'static Program) -> Self {
        let weak = program
            .weak
            .iter()
            .map(|(text, _)| values(text))
            .collect::<Vec<_>>();
        Self {
            program,
            threads: program
                .threads
                .iter()
                .map(|(node, text)| (*node, statements(*node, text)))
                .collect(),
            init: values(program.init),
            forbidden: program.forbidden.iter().map(|text| values(text)).collect(),
            seen: weak.iter().map(|_| AtomicU32::new(0)).collect(),
            weak,
        }
    }

    fn keys(&self) -> Vec<Key> {
        let threads = self.threads.iter().enumerate();
        threads
            .flat_map(|(thread, (from, statements))| {
                let from = *from;
                ways(statements)
                    .into_iter()
                    .map(move |way| Key { thread, from, way })
            })
            .collect()
    }

    /// Gives the words of a copy their first values.
    fn reset(&self, node: &Node, number: usize, copy: usize) {
        for index in 0..LETTERS {
            let word = Word {
                node: number,
                index,
            };
            node.store(copy, word, 0);
        }
        for (place, value) in &self.init {
            if let Place::Word(word) = place {
                if word.node == number {
                    node.store(copy, *word, *value);
                }
            }
        }
    }

    /// Counts an outcome if it is weak. Returns the reason if it is forbidden.
    fn judge(&self, outcome: &Outcome) -> Result<(), String> {
        for (seen, values) in self.seen.iter().zip(&self.weak) {
            seen.fetch_add(outcome.has(values).into(), Ordering::Relaxed);
        }
        let mut forbidden = self.program.forbidden.iter().zip(&self.forbidden);
        match forbidden.find(|(_, values)| outcome.has(values)) {
            Some((text, _)) => Err(format!("{}: {text} is forbidden", self.program.name)),
            None => Ok(()),
        }
    }
}

/// Prints how often a run has seen the weak outcomes, and asserts that it has seen those that it
/// must show.
fn report(tests: &[Test], run: &str, must: Option<Shown>) {
    let (mut all, mut shown) = (0, 0);
    for test in tests {
        for ((text, of), seen) in test.program.weak.iter().zip(&test.seen) {
            let seen = seen.load(Ordering::Relaxed);
            println!("{run}: {}: {text}: {seen}", test.program.name);
            all += 1;
            shown += u32::from(seen > 0);
            let is_due = must.is_some_and(|run| of.includes(run));
            assert!(
                seen > 0 || !is_due,
                "{run}: {}: no {text}",
                test.program.name
            );
        }
    }
    let forbidden = tests.iter().map(|test| test.forbidden.len()).sum::<usize>();
    println!(
        "{run}: {} programs, {forbidden} forbidden outcomes never, {shown} of {all} weak ones seen",
        tests.len()
    );
}

/// Runs all programs with all nodes in this thread. A seed chooses which thread executes its next
/// statement, and which device makes progress.
fn in_one_thread(run: &str, options: &SoftOptions, rounds: u32, must: Option<Shown>) {
    watchdog(WATCHDOG);
    let clock_ns = match &options.clock {
        Clock::Manual(now_ns) => Some(Arc::clone(now_ns)),
        _ => None,
    };
    let tests = PROGRAMS.iter().map(Test::new).collect::<Vec<_>>();
    for (number, test) in tests.iter().enumerate() {
        let mut nodes = connected(test, options);
        let mut random = Random::new(number as u64);
        for _ in 0..rounds * scale_of("MLX5_TEST_SCALE") {
            let outcome = one_round(test, &mut nodes, clock_ns.as_deref(), &mut random);
            assert_eq!(test.judge(&outcome), Ok(()), "{run}");
        }
    }
    report(&tests, run, must);
}

/// Makes the nodes of a test, with its queue pairs.
fn connected(test: &Test, options: &SoftOptions) -> Vec<Node> {
    let open = |number| {
        let device = Device::open(DeviceSpec::Soft(options.clone())).unwrap();
        Node::new(number, device)
    };
    let mut nodes = (0..NODES).map(open).collect::<Vec<_>>();
    let regions = core::array::from_fn(|number| nodes[number].region());
    for node in &mut nodes {
        node.set_peers(regions);
    }
    for key in test.keys() {
        let (from, to) = (key.from, key.way.to);
        let (own, other) = (nodes[from].end(key), nodes[to].end(key));
        nodes[from].connect(key, &other);
        nodes[to].connect(key, &own);
    }
    nodes
}

fn one_round(
    test: &Test,
    nodes: &mut [Node],
    clock_ns: Option<&AtomicU64>,
    random: &mut Random,
) -> Outcome {
    let outcome = Outcome::default();
    for (number, node) in nodes.iter().enumerate() {
        test.reset(node, number, 0);
    }
    let mut at = vec![0; test.threads.len()];
    loop {
        let one = random.below((at.len() + NODES) as u32) as usize;
        if let Some(next) = at.get_mut(one) {
            let (number, statements) = &test.threads[one];
            if let Some(statement) = statements.get(*next) {
                let is_done = nodes[*number].execute((one, 0), statement, &outcome.registers);
                *next += usize::from(is_done);
            }
        } else {
            nodes[one - at.len()].device.progress();
        }
        if let Some(now_ns) = clock_ns {
            now_ns.fetch_add(u64::from(random.below(STEP_NS)), Ordering::Relaxed);
        }
        let ended =
            |(at, (_, statements)): (&usize, &(usize, Vec<Statement>))| *at == statements.len();
        if at.iter().zip(&test.threads).all(ended) && nodes.iter_mut().all(Node::drain) {
            break;
        }
    }
    for (number, node) in nodes.iter().enumerate() {
        outcome.set_words(node, number, 0);
    }
    outcome
}

fn options() -> SoftOptions {
    SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        arena_bytes: 1 << 24,
        ..SoftOptions::default()
    }
}

#[test]
fn programs_whose_operations_are_immediate() {
    in_one_thread("immediate", &options(), 500, None);
}

#[test]
fn programs_whose_operations_are_late() {
    let late = SoftOptions {
        clock: Clock::Manual(Arc::default()),
        timing: Timing::Random {
            ns: DELAYS_NS,
            seed: 1,
        },
        ..options()
    };
    in_one_thread("late", &late, 3_000, Some(Shown::Late));
}

#[test]
fn programs_whose_operations_are_packets() {
    let packets = SoftOptions {
        roce: Some(
            "127.0.0.1,port=0,packets=all,delay_us=0..60"
                .parse()
                .unwrap(),
        ),
        ..options()
    };
    in_one_thread("packets", &packets, 100, Some(Shown::Packets));
}

/// The test, and the places where the threads of [`programs_whose_nodes_run_at_once`] meet.
struct Meeting {
    test: Test,
    options: SoftOptions,
    end: Instant,
    barrier: Barrier,
    regions: Mutex<[node::Region; NODES]>,
    addresses: Mutex<BTreeMap<(Key, usize), QpAddress>>,
    outcomes: Vec<Outcome>,
    is_over: AtomicBool,
    forbidden: OnceLock<String>,
}

/// Each node is a thread of the system with a device of its own. It runs the copies of a program
/// one after the other, beside those of the other nodes.
#[test]
fn programs_whose_nodes_run_at_once() {
    watchdog(WATCHDOG);
    let time = Duration::from_millis(40) * scale_of("MLX5_TEST_SCALE");
    let mut tests = vec![];
    for program in PROGRAMS {
        let meeting = Meeting {
            test: Test::new(program),
            options: options(),
            end: Instant::now() + time,
            barrier: Barrier::new(NODES),
            regions: Mutex::default(),
            addresses: Mutex::default(),
            outcomes: (0..COPIES).map(|_| Outcome::default()).collect(),
            is_over: AtomicBool::new(false),
            forbidden: OnceLock::new(),
        };
        std::thread::scope(|scope| {
            for number in 0..NODES {
                let meeting = &meeting;
                scope.spawn(move || meeting.run(number));
            }
        });
        assert_eq!(meeting.forbidden.get(), None, "at once");
        tests.push(meeting.test);
    }
    report(&tests, "at once", None);
}

impl Meeting {
    fn run(&self, number: usize) {
        let mut node = self.join(number);
        let mut threads = vec![];
        for (thread, (node, statements)) in self.test.threads.iter().enumerate() {
            if *node == number {
                threads.push((thread, statements));
            }
        }
        let mut random = Random::new(number as u64);
        while !self.is_over.load(Ordering::Relaxed) {
            for copy in 0..COPIES {
                self.test.reset(&node, number, copy);
            }
            self.barrier.wait();
            for (copy, outcome) in self.outcomes.iter().enumerate() {
                let mut at = vec![0; threads.len()];
                while let Some(open) = (0..at.len()).find(|i| at[*i] < threads[*i].1.len()) {
                    let one = (random.below(at.len() as u32) as usize).max(open);
                    let (thread, statements) = threads[one];
                    if let Some(statement) = statements.get(at[one]) {
                        let is_done = node.execute((thread, copy), statement, &outcome.registers);
                        at[one] += usize::from(is_done);
                        if !is_done {
                            crate::end::pause();
                        }
                    }
                }
            }
            while !node.drain() {}
            self.barrier.wait();
            for (copy, outcome) in self.outcomes.iter().enumerate() {
                outcome.set_words(&node, number, copy);
            }
            self.barrier.wait();
            if number == 0 {
                self.judge();
            }
            self.barrier.wait();
        }
    }

    /// Opens a device, and connects it to those of the other threads.
    fn join(&self, number: usize) -> Node {
        let device = Device::open(DeviceSpec::Soft(self.options.clone())).unwrap();
        let mut node = Node::new(number, device);
        self.regions.lock().unwrap()[number] = node.region();
        let ends = |key: &Key| [(key.from, key.way.to), (key.way.to, key.from)];
        let own: Vec<(Key, usize)> = self
            .test
            .keys()
            .iter()
            .flat_map(|key| ends(key).map(|(one, other)| (*key, one, other)))
            .filter(|(_, one, _)| *one == number)
            .map(|(key, _, other)| (key, other))
            .collect();
        for (key, _) in &own {
            let address = node.end(*key);
            let mut addresses = self.addresses.lock().unwrap();
            addresses.insert((*key, number), address);
        }
        self.barrier.wait();
        node.set_peers(*self.regions.lock().unwrap());
        for (key, other) in own {
            let address = self.addresses.lock().unwrap()[&(key, other)];
            node.connect(key, &address);
        }
        self.barrier.wait();
        node
    }

    /// Judges the outcomes of a round.
    fn judge(&self) {
        for outcome in &self.outcomes {
            if let Err(why) = self.test.judge(outcome) {
                let _ = self.forbidden.set(why);
            }
            for register in &outcome.registers {
                register.store(0, Ordering::Relaxed);
            }
        }
        let is_over = Instant::now() >= self.end || self.forbidden.get().is_some();
        self.is_over.store(is_over, Ordering::Relaxed);
    }
}
