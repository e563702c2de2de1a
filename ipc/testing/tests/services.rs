//! Four RPCs under the same storm: clients with deadlines, a server that holds, refuses and drops requests, and that is stopped and killed while
//! its successor takes its place.
//!
//! A server notes in a file how often it executed each request. So the end of each call can be held against the truth: a call that "may
//! not have executed" never did, a reply belongs to its request, no request is executed twice. In the end descriptors and memory are back.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use delegationrpc::Ring;
use fastrand::Rng;
use ipc::parts::Reassembler;
use ipc::{Announce, Dir, Ending, ReadyWords};
use shm_testing::helpers::{self, Helper, Scratch, next_word, say, scale};
use shm_testing::limits::any_port;
use shm_testing::methods::{self, Sums};

const CLIENTS: u64 = 3;
/// Calls of a client, of each RPC, times `SHM_TEST_SCALE`.
const CALLS: u64 = 400;
/// Servers of each RPC, at least.
const SERVERS: u64 = 4;
/// Calls that a server lasts for, in a long run.
const LIFE: u64 = 40_000;
/// Time in which a client finds the next server.
const PATIENCE: Duration = Duration::from_secs(20);
/// Memory by which the process may grow, as its allocator keeps some, in bytes.
const GROWTH: u64 = 32 << 20;

/// The fate of a request at the server, by its number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Answer,
    Hold,
    Refuse,
    Drop,
}

fn kind(number: u64) -> Kind {
    match number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56 {
        0..3 => Kind::Hold,
        3 => Kind::Refuse,
        4 => Kind::Drop,
        _ => Kind::Answer,
    }
}

fn answer(number: u64) -> u64 {
    number.rotate_left(17) ^ 0x5a5a
}

/// A file with a byte for each request. A write outlives the process.
struct Log(File);

impl Log {
    fn open(dir: &Path) -> Self {
        Self(OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join("executed")).unwrap())
    }

    fn execute(&self, number: u64) {
        let mut count = [0];
        let _new = self.0.read_at(&mut count, number).unwrap();
        self.0.write_all_at(&[count[0] + 1], number).unwrap();
    }

    fn read(&self, calls: u64) -> Vec<u8> {
        let mut executed = vec![0; calls as usize];
        let mut at = 0;
        while let Some(read @ 1..) = executed.get_mut(at..).map(|rest| self.0.read_at(rest, at as u64).unwrap()) {
            at += read;
        }
        executed
    }
}

/// Requests that are held, and until when.
struct Held<R>(VecDeque<(Instant, u64, R)>);

impl<R> Held<R> {
    fn push(&mut self, number: u64, request: R) {
        self.0.push_back((Instant::now() + Duration::from_micros(number % 4_000), number, request));
    }

    /// Takes a request that is due; at the end, any.
    fn pop(&mut self, is_over: bool) -> Option<(u64, R)> {
        let is_due = self.0.front().is_some_and(|(due, ..)| is_over || *due <= Instant::now());
        self.0.pop_front().filter(|_| is_due).map(|(_, number, request)| (number, request))
    }
}

/// An RPC as the storm sees it.
trait Carrier {
    type Client;

    const NAME: &str;

    /// Serves at a place until the test says so.
    fn serve(place: &str, dir: &Dir, log: &Log, is_over: &AtomicBool);
    fn connect(place: &str, dir: &Dir) -> Self::Client;
    fn call(client: &mut Self::Client, number: u64, timeout: Duration) -> Result<u64, Box<dyn Ending>>;
}

fn words(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("a message of 8 bytes"))
}

/// `ipc` and `delegationrpc`.
struct Shared<W>(std::marker::PhantomData<W>);

trait Named: Announce {
    const NAME: &str;
}

impl Named for ReadyWords {
    const NAME: &str = "ipc";
}

impl Named for Ring {
    const NAME: &str = "delegationrpc";
}

impl<W: Named + 'static> Carrier for Shared<W> {
    type Client = ipc::Client<u64, u64, (), W>;

    const NAME: &str = W::NAME;

    fn serve(_: &str, dir: &Dir, log: &Log, is_over: &AtomicBool) {
        let bind = || ipc::Server::<u64, u64, W>::bind_in(dir, W::NAME, 4, 32, 0).ok();
        let mut server = helpers::wait_for_some("the name stays taken", bind);
        say(W::NAME);
        let mut held = Held(VecDeque::new());
        while !is_over.load(Relaxed) {
            if server.poll() == 0 {
                server.wait(Some(Duration::from_millis(1)));
            }
            while let Some((token, number)) = server.recv() {
                log.execute(number);
                match kind(number) {
                    Kind::Answer => _ = server.reply(token, answer(number)),
                    Kind::Hold => held.push(number, token),
                    Kind::Refuse => _ = server.refuse(token),
                    Kind::Drop => drop(token),
                }
            }
            while let Some((number, token)) = held.pop(false) {
                let _ = server.reply(token, answer(number));
            }
        }
        while let Some((number, token)) = held.pop(true) {
            let _ = server.reply(token, answer(number));
        }
    }

    fn connect(_: &str, dir: &Dir) -> Self::Client {
        helpers::wait_for_some("no server comes", || ipc::Client::connect_in(dir, W::NAME, 0).ok())
    }

    fn call(client: &mut Self::Client, number: u64, timeout: Duration) -> Result<u64, Box<dyn Ending>> {
        client.ask(number, timeout).map_err(|error| {
            // It was made without a time to wait for the next server.
            if matches!(error, ipc::AskError::NotSent(_)) {
                let _ = client.reconnect(PATIENCE);
            }
            Box::new(error) as _
        })
    }
}

struct CopyRpc;

impl Carrier for CopyRpc {
    type Client = copyrpc::Client;

    const NAME: &str = "copyrpc";

    fn serve(place: &str, _: &Dir, log: &Log, is_over: &AtomicBool) {
        let mut server = helpers::wait_for_some("the address stays taken", || copyrpc::Server::bind(place).ok());
        say(server.local_addr().unwrap());
        let mut held = Held(VecDeque::new());
        while !is_over.load(Relaxed) {
            server.step().unwrap();
            while let Some(request) = server.recv() {
                let number = words(&request.data().to_vec());
                log.execute(number);
                match kind(number) {
                    Kind::Answer => _ = request.reply(&answer(number).to_le_bytes()),
                    Kind::Hold => held.push(number, request),
                    Kind::Refuse => _ = request.refuse(),
                    Kind::Drop => drop(request),
                }
            }
            while let Some((number, request)) = held.pop(false) {
                let _ = request.reply(&answer(number).to_le_bytes());
            }
        }
        server.close();
        while let Some((number, request)) = held.pop(true) {
            let _ = request.reply(&answer(number).to_le_bytes());
        }
    }

    fn connect(place: &str, _: &Dir) -> Self::Client {
        let options = copyrpc::ClientOptions { connect_timeout: PATIENCE, ..copyrpc::ClientOptions::default() };
        copyrpc::Client::with_options(place.to_owned(), &options).unwrap()
    }

    fn call(client: &mut Self::Client, number: u64, timeout: Duration) -> Result<u64, Box<dyn Ending>> {
        let reply = client.call_within(&number.to_le_bytes(), timeout);
        reply.map(|reply| words(&reply)).map_err(|error| Box::new(error) as _)
    }
}

struct ScaleRpc;

impl Carrier for ScaleRpc {
    type Client = scalerpc::Client;

    const NAME: &str = "scalerpc";

    fn serve(place: &str, _: &Dir, log: &Log, is_over: &AtomicBool) {
        let mut server = helpers::wait_for_some("the address stays taken", || scalerpc::Server::bind(place).ok());
        say(server.local_addr().unwrap());
        let held = RefCell::new(Held(VecDeque::new()));
        let mut handlers = scalerpc::Handlers::new(server.max_payload());
        handlers.insert_held(scalerpc::DEFAULT_TYPE, |request| {
            let number = words(request.payload());
            log.execute(number);
            match kind(number) {
                Kind::Answer => _ = request.reply(answer(number).to_le_bytes().to_vec()),
                Kind::Hold => held.borrow_mut().push(number, request),
                Kind::Refuse | Kind::Drop => drop(request),
            }
        });
        let answer_held = |is_over| {
            while let Some((number, request)) = held.borrow_mut().pop(is_over) {
                let _ = request.reply(answer(number).to_le_bytes().to_vec());
            }
        };
        while !is_over.load(Relaxed) {
            server.step(&mut handlers).unwrap();
            answer_held(false);
        }
        answer_held(true);
        server.close(&mut handlers);
    }

    fn connect(place: &str, _: &Dir) -> Self::Client {
        let options = scalerpc::ClientOptions { connect_timeout: PATIENCE, ..scalerpc::ClientOptions::default() };
        scalerpc::Client::with_options(place.to_owned(), &options).unwrap()
    }

    fn call(client: &mut Self::Client, number: u64, timeout: Duration) -> Result<u64, Box<dyn Ending>> {
        let reply = client.call_within(&number.to_le_bytes(), timeout);
        reply.map(|reply| words(&reply)).map_err(|error| Box::new(error) as _)
    }
}

/// The server of a storm.
#[test]
fn helper_process() {
    let Some((role, dir)) = helpers::role() else { return };
    let (name, place) = role.split_once(' ').unwrap();
    let (log, is_over) = (Log::open(dir.path()), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            next_word();
            is_over.store(true, Relaxed);
        });
        match name {
            "ipc" => Shared::<ReadyWords>::serve(place, &dir, &log, &is_over),
            "delegationrpc" => Shared::<Ring>::serve(place, &dir, &log, &is_over),
            "copyrpc" => CopyRpc::serve(place, &dir, &log, &is_over),
            "scalerpc" => ScaleRpc::serve(place, &dir, &log, &is_over),
            other => panic!("{other}"),
        }
    });
}

/// The ends of a client's calls, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Answered,
    MayHaveExecuted,
    HasNotExecuted,
}

fn work<C: Carrier>(place: &str, dir: &Dir, first: u64, calls: u64, made: &AtomicU64) -> Vec<End> {
    let (mut client, mut rng) = (C::connect(place, dir), Rng::with_seed(first));
    let numbers = first..first + calls;
    numbers
        .map(|number| {
            made.fetch_add(1, Relaxed);
            let timeout = match rng.u32(..100) {
                0 => Duration::ZERO,
                1..5 => Duration::from_micros(rng.u64(..3_000)),
                _ => Duration::from_secs(1),
            };
            match C::call(&mut client, number, timeout) {
                Ok(reply) => {
                    assert_eq!(reply, answer(number), "{}: the reply to {number}", C::NAME);
                    End::Answered
                }
                Err(error) => {
                    assert!(!(error.is_retryable() && error.may_have_executed()), "{error}");
                    if error.may_have_executed() { End::MayHaveExecuted } else { End::HasNotExecuted }
                }
            }
        })
        .collect()
}

fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn storm<C: Carrier>() {
    let scratch = Scratch::new(&format!("services-{}", C::NAME));
    let calls = CALLS * u64::from(scale());
    let all = CLIENTS * calls;
    let servers = SERVERS.max(all / LIFE);
    let log = Log::open(scratch.path());
    let mut server = Helper::start(&format!("{} {}", C::NAME, any_port()), &scratch);
    let place = server.hear();
    // A process makes some things once.
    drop(C::connect(&place, &scratch.dir()));
    let before = (descriptors(), memory());
    let (made, mut kills) = (AtomicU64::new(0), 0);
    let ends: Vec<End> = thread::scope(|scope| {
        let (place, made, scratch) = (&*place, &made, &scratch);
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| scope.spawn(move || work::<C>(place, &scratch.dir(), client * calls, calls, made))).collect();
        for life in 1..servers {
            while made.load(Relaxed) < life * all / servers {
                thread::sleep(Duration::from_millis(1));
            }
            if life % 2 == 0 {
                server.kill();
                kills += 1;
            } else {
                server.hang_up();
                server.wait();
            }
            server = Helper::start(&format!("{} {place}", C::NAME), scratch);
            server.hear();
        }
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    server.hang_up();
    server.wait();
    drop(server);
    let mut counts = [0; 3];
    for (number, (end, executed)) in ends.iter().zip(log.read(all)).enumerate() {
        let is_true = match end {
            End::Answered => executed == 1,
            End::MayHaveExecuted => executed <= 1,
            End::HasNotExecuted => executed == 0,
        };
        assert!(is_true, "{}: call {number} ended as {end:?}, and was executed {executed} times", C::NAME);
        counts[*end as usize] += 1;
    }
    let [answered, unknown, not] = counts;
    println!(
        "{}: {answered} calls answered, {unknown} of unknown fate, {not} not executed, {kills} kills, {} restarts",
        C::NAME,
        servers - 1 - kills
    );
    assert_eq!(answered + unknown + not, all);
    assert!(answered > all / 2, "{}: the storm was no service", C::NAME);
    drop(ends);
    assert!(descriptors() < before.0, "the server's pipe is closed, and nothing else is open");
    // The ends themselves, and what is kept for the next allocation.
    assert!(memory() < before.1 + GROWTH + 2 * all, "{} bytes, {} before", memory(), before.1);
    let left = scratch.names();
    assert!(left.iter().all(|name| name == "executed"), "{left:?}");
}

#[test]
fn every_call_of_every_rpc_ends_once_and_as_it_says() {
    helpers::limited(|| {
        storm::<Shared<ReadyWords>>();
        storm::<Shared<Ring>>();
        storm::<CopyRpc>();
        storm::<ScaleRpc>();
    });
}

/// Their own crates test `ipc` and `copyrpc`.
#[test]
fn payloads_above_a_message_are_one_call_of_scalerpc() {
    helpers::limited(|| {
        let mut server = scalerpc::Server::bind(any_port()).unwrap();
        let (address, stop, max) = (server.local_addr().unwrap(), server.stop_handle(), server.max_payload());
        let client = thread::spawn(move || {
            methods::check_in_parts(scalerpc::Client::connect(address).unwrap(), max, max);
            stop.stop();
        });
        let mut parts = Reassembler::new(4 << 20, 8 << 20);
        server.serve(|part| parts.answer(part, |whole| methods::numbers::answer(&mut Sums, &whole))).unwrap();
        assert_eq!(parts.held(), 0);
        client.join().unwrap();
    });
}
