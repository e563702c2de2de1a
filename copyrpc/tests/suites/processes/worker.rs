//! A process of a job: contexts that call each other and the contexts of all other processes, and
//! execute the launcher's commands.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use copyrpc::{
    CallFailure, CallToken, CloseReason, Context, ContextBuilder, EXCHANGE_RECORD_SIZE, Endpoint,
    EndpointConfig, ExchangeRecord, PendingEndpoint, RecvHandle,
};
use copyrpc_testing::limits;

use super::job::{self, KEEPALIVE, STALL_TIMEOUT, Said, WATCHDOG};
use super::plan::{Caller, Patience, Plan};
use crate::support;

/// Number of calls that a node tries to have outstanding on a connection: far more than credit and
/// ring allow.
const DEPTH: usize = 64;
/// Batches in flight of an endpoint, and receives of a context: the minimum of B1 for an endpoint
/// to each of 16 nodes.
const BATCHES: u32 = 2;
const RECEIVES: u32 = 48;

/// Number of rounds without work after which a process sleeps.
const SPINS: u32 = 32;

/// The calling end, and the number of the call.
type UserData = (Caller, u64);

/// A node's view of another node.
struct Peer {
    caller: Caller,
    pending: Option<PendingEndpoint<UserData>>,
    endpoint: Option<Endpoint<UserData>>,
    /// Whether both ends are connected.
    may_call: bool,
    said: Said,
    /// The next call, if it was refused and has to be repeated.
    next: Option<Plan>,
    /// Calls that will be cancelled, with the rounds until then.
    doomed: Vec<(CallToken, u32)>,
}

/// A request that was received and is answered later.
struct Held {
    handle: RecvHandle<UserData>,
    caller: Caller,
    serial: u64,
}

struct Node {
    number: usize,
    context: Context<UserData>,
    peers: HashMap<usize, Peer>,
    /// Peers by the QPN of the endpoint.
    peer_of: HashMap<u32, usize>,
    held: Vec<Held>,
    rng: fastrand::Rng,
}

/// A process of a job, which the launcher starts as a test of this binary.
#[test]
#[ignore = "a process of the other tests, started by them"]
fn process() {
    let Some(settings) = job::Settings::from_env() else {
        return;
    };
    limits::watchdog(WATCHDOG);
    let builder = ContextBuilder::new(support::spec_in(settings.dir)).srq_size(RECEIVES);
    let mut nodes: HashMap<_, _> = settings
        .nodes
        .map(|number| (number, Node::new(number, &builder)))
        .collect();
    let commands = commands();
    let mut issue = true;
    let mut serve = true;
    let mut told = Instant::now();
    let mut rounds = 0_u64;
    let mut idle_rounds = 0;
    while serve {
        while let Ok(line) = commands.try_recv() {
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                ["stop"] => {
                    issue = false;
                    println!("\nstopped");
                }
                ["exit"] => serve = false,
                ["fork"] => println!("\nforked {}", fork()),
                [verb, node, peer, ref rest @ ..] => {
                    nodes.get_mut(&node.parse().unwrap()).unwrap().obey(
                        verb,
                        peer.parse().unwrap(),
                        rest.first().copied(),
                    );
                }
                _ => panic!("{line}"),
            }
        }
        let mut moved = false;
        for node in nodes.values_mut() {
            moved |= node.step(issue, settings.quota);
        }
        rounds += 1;
        if told.elapsed() > Duration::from_millis(2) {
            for node in nodes.values() {
                node.report(rounds, cpu_ns());
            }
            told = Instant::now();
        }
        idle_rounds = if moved { 0 } else { idle_rounds + 1 };
        // The thread sleeps and does not yield: Linux may give no core for seconds to a thread that
        // yielded often, which looks like a stopped process.
        if idle_rounds > SPINS {
            std::thread::sleep(Duration::from_micros(10));
        }
    }
    let infos: Vec<_> = nodes
        .values()
        .map(|node| (node.context.device_info(), node.context.stats()))
        .collect();
    for (info, stats) in infos {
        assert_eq!(info.violations, 0);
        let counts = [
            info.rnr_naks.unwrap_or(0),
            stats.wraps,
            stats.reads,
            stats.metadata_only,
            stats.late_responses,
            stats.stale_responses,
        ];
        println!(
            "\ntotals {}",
            counts.map(|count| count.to_string()).join(" ")
        );
    }
}

/// Forks a child that does nothing until it is killed.
fn fork() -> libc::pid_t {
    // SAFETY: the child calls nothing but close(2) and pause(2).
    unsafe {
        let child = libc::fork();
        if child == 0 {
            // No process waits for the end of its output.
            for file in 0..3 {
                libc::close(file);
            }
            loop {
                libc::pause();
            }
        }
        child
    }
}

/// Returns the CPU time of this thread until now.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    assert_eq!(
        // SAFETY: room for the answer.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) },
        0
    );
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the lines of the standard input, which a thread reads.
fn commands() -> Receiver<String> {
    let (to, from) = channel();
    std::thread::spawn(move || {
        std::io::stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| to.send(line))
    });
    from
}

impl Node {
    fn new(number: usize, builder: &ContextBuilder) -> Self {
        let context = builder.clone().build().unwrap();
        let rng = fastrand::Rng::with_seed(number as u64);
        Self {
            number,
            context,
            peers: HashMap::new(),
            peer_of: HashMap::new(),
            held: Vec::new(),
            rng,
        }
    }

    /// Executes the launcher's command about `other`.
    fn obey(&mut self, verb: &str, other: usize, argument: Option<&str>) {
        match verb {
            "offer" => self.offer(other, argument.unwrap().parse().unwrap()),
            "connect" => {
                let record = ExchangeRecord::decode(&from_hex(argument.unwrap())).unwrap();
                let peer = self.peers.get_mut(&other).unwrap();
                let endpoint = peer.pending.take().unwrap().connect(&record).unwrap();
                self.peer_of.insert(endpoint.qpn(), other);
                peer.endpoint = Some(endpoint);
                println!("\nconnected {} {other}", self.number);
            }
            "go" => self.peers.get_mut(&other).unwrap().may_call = true,
            _ => panic!("{verb}"),
        }
    }

    /// Makes an endpoint for a new connection to `other`, which replaces the earlier connection.
    fn offer(&mut self, other: usize, incarnation: u64) {
        if let Some(before) = self.peers.remove(&other) {
            let endpoint = before.endpoint.unwrap();
            assert!(
                endpoint.closed().is_some() && endpoint.outstanding_calls() == 0,
                "{endpoint:?}"
            );
            self.peer_of.remove(&endpoint.qpn());
            self.held.retain(|held| held.caller.from != other);
        }
        let config = EndpointConfig {
            batches_in_flight: BATCHES,
            keepalive: KEEPALIVE,
            stall_timeout: STALL_TIMEOUT,
            ..support::small()
        };
        let pending = self.context.create_endpoint(&config).unwrap();
        let record = pending
            .local_info()
            .encode()
            .map(|byte| format!("{byte:02x}"))
            .concat();
        println!("\nrecord {} {other} {record}", self.number);
        let caller = Caller {
            from: self.number,
            to: other,
            incarnation,
        };
        let said = Said {
            incarnation,
            ..Said::default()
        };
        self.peers.insert(
            other,
            Peer {
                caller,
                pending: Some(pending),
                endpoint: None,
                may_call: false,
                said,
                next: None,
                doomed: Vec::new(),
            },
        );
    }

    /// Takes a step. Returns whether the step had any work.
    fn step(&mut self, issue: bool, quota: u64) -> bool {
        for peer in self.peers.values_mut().filter(|peer| peer.may_call) {
            peer.cancel();
            if issue {
                peer.call(&self.context, quota);
            }
        }
        let taken = self.poll();
        self.receive();
        self.answer();
        taken > 0
    }

    fn poll(&mut self) -> usize {
        let peers = &mut self.peers;
        let on_response = |(caller, serial): UserData, outcome: copyrpc::Outcome<'_>| {
            let peer = peers.get_mut(&caller.to).unwrap();
            assert_eq!(caller, peer.caller);
            let (endpoint, said) = (peer.endpoint.as_ref().unwrap(), &mut peer.said);
            let plan = caller.plan(
                serial,
                endpoint.max_payload(),
                endpoint.max_response_allowance(),
            );
            match outcome {
                Ok(bytes) => {
                    assert_eq!(
                        bytes.to_vec(),
                        plan.reply,
                        "reply to call {serial} of {caller:?}"
                    );
                    said.completed += 1;
                }
                Err(CallFailure::TimedOut) => {
                    assert!(
                        matches!(plan.patience, Patience::Deadline(_)),
                        "call {serial} of {caller:?} had no deadline"
                    );
                    said.given_up += 1;
                }
                Err(CallFailure::Closed(CloseReason::Disconnected)) => said.disconnected += 1,
                Err(CallFailure::Closed(CloseReason::PeerStalled)) => said.stalled += 1,
                Err(other) => panic!("call {serial} of {caller:?}: {other}"),
            }
        };
        self.context.poll(on_response).unwrap()
    }

    fn receive(&mut self) {
        while let Some(handle) = self.context.recv() {
            // The request is of an endpoint that was replaced since.
            let Some(other) = self.peer_of.get(&handle.endpoint().qpn()) else {
                continue;
            };
            let peer = self.peers.get_mut(other).unwrap();
            let caller = Caller {
                from: *other,
                to: self.number,
                ..peer.caller
            };
            let held = Held {
                handle,
                caller,
                serial: peer.said.served,
            };
            held.check();
            peer.said.served += 1;
            self.held.push(held);
        }
    }

    /// Answers half of the held requests in random order, so some are held for many rounds.
    fn answer(&mut self) {
        for _ in 0..self.held.len().div_ceil(2) {
            let held = self.held.swap_remove(self.rng.usize(..self.held.len()));
            let reply = held.check();
            let (endpoint, outcome) = (held.handle.endpoint(), held.handle.reply(&reply));
            assert!(outcome.is_ok() || endpoint.closed().is_some());
        }
    }

    fn report(&self, rounds: u64, cpu_ns: u64) {
        for (other, peer) in &self.peers {
            let Some(endpoint) = &peer.endpoint else {
                continue;
            };
            let is_closed = endpoint.closed().is_some();
            let outstanding = endpoint.outstanding_calls() as u64;
            let said = Said {
                outstanding,
                is_closed: u64::from(is_closed),
                rounds,
                cpu_ns,
                ..peer.said
            };
            println!("\nsaid {} {other} {}", self.number, said.to_line());
        }
    }
}

impl Peer {
    /// Calls until a call is refused. Flushes after most calls, so that, without B1, there would be
    /// more batches than receives.
    fn call(&mut self, context: &Context<UserData>, quota: u64) {
        let Some(endpoint) = &self.endpoint else {
            return;
        };
        while endpoint.outstanding_calls() < DEPTH && self.said.issued < quota {
            let new = || {
                self.caller.plan(
                    self.said.issued,
                    endpoint.max_payload(),
                    endpoint.max_response_allowance(),
                )
            };
            let plan = self.next.take().unwrap_or_else(new);
            let user_data = (self.caller, self.said.issued);
            let taken = match plan.patience {
                Patience::Deadline(timeout) => {
                    endpoint.call_within(&plan.request, user_data, plan.allowance, timeout)
                }
                _ => endpoint.call(&plan.request, user_data, plan.allowance),
            };
            match taken {
                Ok(token) => {
                    self.said.issued += 1;
                    if self.said.issued % 8 != 0 {
                        context.flush_endpoints().unwrap();
                    }
                    if let Patience::Cancels(rounds) = plan.patience {
                        self.doomed.push((token, rounds));
                    }
                }
                Err(error) => {
                    // If the connection has ended, its calls end by themselves.
                    assert!(
                        error.is_retryable() || endpoint.closed().is_some(),
                        "{error}"
                    );
                    self.next = Some(plan);
                    return;
                }
            }
        }
    }

    fn cancel(&mut self) {
        let Some(endpoint) = &self.endpoint else {
            return;
        };
        let (caller, said) = (self.caller, &mut self.said);
        self.doomed.retain_mut(|(token, rounds)| {
            if *rounds == 0 {
                // The call may have ended in another way.
                if let Some((of, serial)) = endpoint.cancel(*token) {
                    let plan = caller.plan(
                        serial,
                        endpoint.max_payload(),
                        endpoint.max_response_allowance(),
                    );
                    assert!(of == caller && matches!(plan.patience, Patience::Cancels(_)));
                    said.given_up += 1;
                }
                return false;
            }
            *rounds -= 1;
            true
        });
    }
}

impl Held {
    /// Checks the bytes of the request. Returns its reply.
    fn check(&self) -> Vec<u8> {
        let endpoint = self.handle.endpoint();
        let plan = self.caller.plan(
            self.serial,
            endpoint.max_payload(),
            endpoint.max_response_allowance(),
        );
        assert_eq!(
            self.handle.data().to_vec(),
            plan.request,
            "request {} of {:?}",
            self.serial,
            self.caller
        );
        assert!(self.handle.max_reply() >= plan.allowance);
        plan.reply
    }
}

fn from_hex(hex: &str) -> [u8; EXCHANGE_RECORD_SIZE] {
    std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
}
