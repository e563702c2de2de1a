//! Every RPC under the same storm: clients with deadlines that give calls up, a server that holds,
//! refuses and drops requests, holds some until their callers give up, calls its clients where it can, and is stopped and killed while its
//! successor takes its place.
//!
//! A server notes in a file how often it executed each request. So the end of each call can be
//! compared with the file: a call that "has not executed" was never executed, a reply belongs to
//! its request, no request is executed twice. In the end, descriptors and memory are released, and
//! each client can have as many calls under way as before.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use copyrpc_calls::methods::{AsyncCaller, Caller};
use copyrpc_calls::{AsyncServer, Bind, ServerRequest, StopHandle};
use copyrpc_testing::executor::{Begun, block_on};
use copyrpc_testing::helpers::{self, Helper, Scratch, next_word, say, scale};
use copyrpc_testing::limits::any_port;
use copyrpc_testing::methods::{self, Sums};
use delegationrpc::Ring;
use fastrand::Rng;
use ipc::parts::{self, Reassembler};
use ipc::{Dir, Ending};

const CLIENTS: u64 = 3;
/// Number of calls that a client makes at once, if it can have several.
const BATCH: u64 = 8;
/// Number of calls of each client, times `SHM_TEST_SCALE`.
const CALLS: u64 = 25 * BATCH;
/// Minimum number of servers of each RPC, one after the other.
const SERVERS: u64 = 3;
/// Number of calls after which a server is replaced, in a long run.
const LIFE: u64 = 40_000;
/// Maximum time in which a client must find the next server.
const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum growth of the process's memory in bytes: its allocator keeps some memory.
const GROWTH: u64 = 32 << 20;
/// Requests from this number on are counted: each is answered with their count, once no further one
/// has arrived for [`QUIET`].
const COUNTED: u64 = 1 << 40;
const QUIET: Duration = Duration::from_millis(30);

/// The fate of a request at the server, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Answer,
    Hold,
    Refuse,
    Drop,
    /// The server calls the client, where it can, and answers.
    Push,
    /// The server holds the request until its caller gives up, which each caller does soon.
    Wait,
}

fn kind(number: u64) -> Kind {
    match number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56 {
        0..3 => Kind::Hold,
        3 => Kind::Refuse,
        4 => Kind::Drop,
        5..8 => Kind::Push,
        8..11 => Kind::Wait,
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
        Self(
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(dir.join("executed"))
                .unwrap(),
        )
    }

    fn execute(&self, number: u64) {
        let mut count = [0];
        let _new = self.0.read_at(&mut count, number).unwrap();
        self.0.write_all_at(&[count[0] + 1], number).unwrap();
    }

    fn read(&self, calls: u64) -> Vec<u8> {
        let mut executed = vec![0; calls as usize];
        let mut at = 0;
        while let Some(read @ 1..) = executed
            .get_mut(at..)
            .map(|rest| self.0.read_at(rest, at as u64).unwrap())
        {
            at += read;
        }
        executed
    }
}

/// The requests that a server has received and not answered.
struct Desk<'a, R> {
    log: &'a Log,
    /// Held requests, by the time of the answer and the number.
    held: BTreeMap<(Instant, u64), R>,
    /// The requests whose callers have to give up, with the number and the time of each.
    waiting: Vec<(u64, Instant, R)>,
    counted: Vec<R>,
    last: Instant,
}

impl<'a, R> Desk<'a, R> {
    fn new(log: &'a Log) -> Self {
        Self {
            log,
            held: BTreeMap::new(),
            waiting: Vec::new(),
            counted: Vec::new(),
            last: Instant::now(),
        }
    }

    /// Executes a request.
    fn take(&mut self, number: u64, request: R) {
        let now = Instant::now();
        if number >= COUNTED {
            self.last = now;
            return self.counted.push(request);
        }
        self.log.execute(number);
        if kind(number) == Kind::Wait {
            return self.waiting.push((number, now, request));
        }
        let hold = if kind(number) == Kind::Hold {
            Duration::from_micros(number % 4_000)
        } else {
            Duration::ZERO
        };
        self.held.insert((now + hold, number), request);
    }

    /// Makes the waiting requests due whose callers gave up; at the end of the server, all waiting
    /// requests.
    fn watch(&mut self, is_over: bool, is_wanted: impl Fn(&R) -> bool) {
        let now = Instant::now();
        for (number, since, request) in std::mem::take(&mut self.waiting) {
            if is_over || !is_wanted(&request) {
                self.held.insert((now, number), request);
            } else {
                assert!(
                    since.elapsed() < PATIENCE,
                    "the caller of {number} gave up, and the server does not know"
                );
                self.waiting.push((number, since, request));
            }
        }
    }

    /// Ends the requests that are due; at the end of the server, all requests.
    fn answer(&mut self, is_over: bool, mut end: impl FnMut(R, Kind, u64)) {
        if is_over || self.last.elapsed() > QUIET {
            let count = self.counted.len() as u64;
            self.counted
                .drain(..)
                .for_each(|request| end(request, Kind::Answer, count));
        }
        while let Some(first) = self
            .held
            .first_entry()
            .filter(|first| is_over || first.key().0 <= Instant::now())
        {
            let ((_, number), request) = first.remove_entry();
            end(request, kind(number), answer(number));
        }
    }
}

/// A call of a client.
#[derive(Clone, Copy)]
struct Call {
    number: u64,
    timeout: Duration,
    /// Whether the caller gives the call up.
    is_given_up: bool,
}

/// The end of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Answered,
    MayHaveExecuted,
    HasNotExecuted,
    GivenUp,
}

impl Call {
    fn end<E: Ending>(self, outcome: Result<u64, E>) -> End {
        match outcome {
            Ok(reply) => {
                assert_eq!(reply, answer(self.number), "the reply to {}", self.number);
                End::Answered
            }
            Err(error) => {
                assert!(
                    !(error.is_retryable() && error.may_have_executed()),
                    "{error}"
                );
                if error.may_have_executed() {
                    End::MayHaveExecuted
                } else {
                    End::HasNotExecuted
                }
            }
        }
    }
}

/// A client as the storm sees it.
trait Client: Sized {
    const NAME: &str;
    /// Maximum number of the client's calls that the server can have at once.
    const ROOM: u64;

    fn connect(place: &str, dir: &Dir) -> Self;
    fn make(&mut self, calls: &[Call]) -> Vec<End>;
    /// Makes [`ROOM`](Self::ROOM) calls or more at once. Returns the number of calls that the
    /// server had at once.
    fn fill(&mut self) -> u64;
}

/// A message that contains a number.
trait Word {
    fn word(&self) -> u64;
}

impl Word for u64 {
    fn word(&self) -> u64 {
        *self
    }
}

impl Word for [u8] {
    fn word(&self) -> u64 {
        u64::from_le_bytes(self.try_into().expect("a message of 8 bytes"))
    }
}

/// `ipc`, its messages of bytes and `delegationrpc`, in which a `$number` travels as `$message`.
macro_rules! through_shared_memory {
    ($serve:ident, $name:literal, $bind:expr, $client:ty, |$number:ident| $message:expr) => {
        fn $serve(dir: &Dir, log: &Log, is_over: &AtomicBool) {
            let mut server = helpers::wait_for_some("the name stays taken", || $bind(dir).ok());
            say($name);
            let (mut desk, mut has_ended) = (Desk::new(log), false);
            while !has_ended {
                has_ended = is_over.load(Relaxed);
                if server.poll() == 0 {
                    server.wait(Some(Duration::from_millis(1)));
                }
                while let Some((token, request)) = server.recv() {
                    desk.take(request.word(), token);
                }
                desk.watch(has_ended, |token| server.is_wanted(token));
                desk.answer(has_ended, |token, kind, $number| match kind {
                    Kind::Refuse => _ = server.refuse(token),
                    Kind::Drop => drop(token),
                    _ => _ = server.reply(token, $message),
                });
            }
        }

        impl Client for $client {
            const NAME: &str = $name;
            const ROOM: u64 = 32;

            fn connect(_: &str, dir: &Dir) -> Self {
                helpers::wait_for_some("no server comes", || Self::connect_in(dir, $name, 0).ok())
            }

            fn make(&mut self, calls: &[Call]) -> Vec<End> {
                let mut make = |call: &Call| {
                    let $number = call.number;
                    if call.is_given_up {
                        return match self.call($message, ()).map_err(ipc::ClientError::from) {
                            Ok(made) => {
                                if call.timeout > Duration::ZERO {
                                    thread::yield_now();
                                }
                                assert_eq!(self.cancel(made), Some(()));
                                End::GivenUp
                            }
                            Err(error) => call.end(Err(error)),
                        };
                    }
                    let outcome = self.ask($message, call.timeout);
                    // The client was made without a time to wait for the next server.
                    if matches!(&outcome, Err(error) if error.is_retryable()) {
                        let _ = self.reconnect(PATIENCE);
                    }
                    call.end(outcome.map(|reply| reply.word()))
                };
                calls.iter().map(&mut make).collect()
            }

            fn fill(&mut self) -> u64 {
                let ($number, mut most) = (COUNTED, 0);
                while self.call($message, ()).is_ok() {}
                let start = Instant::now();
                while self.in_flight() > 0 {
                    assert!(
                        start.elapsed() < PATIENCE,
                        "{}: {} calls never end",
                        Self::NAME,
                        self.in_flight()
                    );
                    self.poll(|(), reply| most = most.max(reply.unwrap().word()))
                        .unwrap();
                    self.wait(Some(QUIET));
                }
                most
            }
        }
    };
}

through_shared_memory!(
    serve_ipc,
    "ipc",
    |dir| ipc::Server::<u64, u64>::bind_in(dir, "ipc", 4, 32, 0),
    ipc::Client<u64, u64, ()>,
    |number| number
);
through_shared_memory!(
    serve_delegationrpc,
    "delegationrpc",
    |dir| ipc::Server::<u64, u64, Ring>::bind_in(dir, "delegationrpc", 4, 32, 0),
    delegationrpc::Client<u64, u64, ()>,
    |number| number
);
through_shared_memory!(
    serve_bytes,
    "bytes",
    |dir: &Dir| ipc::bytes::Server::with_options(
        "bytes",
        &ipc::bytes::ServerOptions {
            dir: Some(dir.clone()),
            max_clients: 4,
            depth: 32,
            message_bytes: ipc::bytes::MessageBytes {
                request: 64,
                response: 64
            },
            type_tag: 0,
            ..ipc::bytes::ServerOptions::default()
        }
    ),
    ipc::bytes::Client<()>,
    |number| &number.to_le_bytes()
);

/// Makes calls one after the other. Returns their ends.
fn make_in_turn<E: Ending>(
    calls: &[Call],
    mut make: impl FnMut(&Call) -> Result<Vec<u8>, E>,
) -> Vec<End> {
    calls
        .iter()
        .map(|call| call.end(make(call).map(|reply| reply.word())))
        .collect()
}

fn copyrpc_options() -> copyrpc::ClientOptions {
    copyrpc::ClientOptions {
        connect_timeout: PATIENCE,
        connections: 1,
        ..copyrpc::ClientOptions::default()
    }
}

fn serve_copyrpc(place: &str, log: &Log, is_over: &AtomicBool) {
    let mut server = helpers::wait_for_some("the address stays taken", || {
        copyrpc::Server::bind(place).ok()
    });
    say(server.local_addr().unwrap());
    let mut desk = Desk::new(log);
    let end = |request: copyrpc::RecvHandle<()>, kind, reply: u64| match kind {
        Kind::Refuse => _ = request.refuse(),
        Kind::Drop => drop(request),
        _ => _ = request.reply(&reply.to_le_bytes()),
    };
    while !is_over.load(Relaxed) {
        server.step().unwrap();
        while let Some(request) = server.recv() {
            let number = request.data().to_vec().word();
            if number < COUNTED && kind(number) == Kind::Push {
                // The client refuses the call. A client that has disconnected takes no call.
                let pushed = request.endpoint().call(&[0; 100], (), 8);
                assert!(
                    pushed.is_ok() || !request.is_wanted(),
                    "the credit of calls from the server is gone: {pushed:?}"
                );
            }
            desk.take(number, request);
        }
        desk.watch(false, copyrpc::RecvHandle::is_wanted);
        desk.answer(false, end);
    }
    server.close();
    desk.watch(true, copyrpc::RecvHandle::is_wanted);
    desk.answer(true, end);
}

impl Client for copyrpc::Client {
    const NAME: &str = "copyrpc";
    const ROOM: u64 = 1;

    fn connect(place: &str, _: &Dir) -> Self {
        Self::with_options(place.to_owned(), &copyrpc_options()).unwrap()
    }

    fn make(&mut self, calls: &[Call]) -> Vec<End> {
        make_in_turn(calls, |call| {
            self.call_within(&call.number.to_le_bytes(), call.timeout)
                .map(<[u8]>::to_vec)
        })
    }

    fn fill(&mut self) -> u64 {
        self.call_within(&COUNTED.to_le_bytes(), PATIENCE)
            .unwrap()
            .word()
    }
}

/// A server whose requests are futures, of any transport. It reports its address by `say_place`.
fn serve_tasks<S: Bind<String, Error: std::fmt::Debug> + 'static>(
    place: &str,
    options: &S::Options,
    say_place: fn(&AsyncServer<S>),
    log: &Log,
    is_over: &AtomicBool,
) {
    let server = helpers::wait_for_some("the address stays taken", || {
        block_on(AsyncServer::<S>::with_options(place.to_owned(), options)).ok()
    });
    say_place(&server);
    let stop = server.stop_handle();
    let desk = Mutex::new(Desk::new(log));
    let has_ended = AtomicBool::new(false);
    let answer_due = |is_over| {
        let mut desk = desk.lock().unwrap();
        desk.watch(is_over, ServerRequest::<S>::is_wanted);
        desk.answer(is_over, |request, kind, reply| match kind {
            Kind::Refuse => request.refuse(),
            Kind::Drop => drop(request),
            _ => request.reply(reply.to_le_bytes()),
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Relaxed) {
                if is_over.load(Relaxed) {
                    stop.stop();
                }
                answer_due(false);
                thread::sleep(Duration::from_micros(200));
            }
        });
        while let Some(request) = block_on(server.recv()).unwrap() {
            desk.lock().unwrap().take(request.data().word(), request);
        }
        has_ended.store(true, Relaxed);
    });
    answer_due(true);
}

fn serve_scalerpc(place: &str, log: &Log, is_over: &AtomicBool) {
    let mut server = helpers::wait_for_some("the address stays taken", || {
        scalerpc::Server::bind(place).ok()
    });
    say(server.local_addr().unwrap());
    let desk = RefCell::new(Desk::new(log));
    let mut handlers = scalerpc::Handlers::new(server.max_payload());
    handlers.insert_held(scalerpc::DEFAULT_TYPE, |request| {
        desk.borrow_mut().take(request.payload().word(), request)
    });
    let answer_due = |is_over| {
        let mut desk = desk.borrow_mut();
        desk.watch(is_over, scalerpc::HeldRequest::is_wanted);
        desk.answer(is_over, |request, kind, reply| match kind {
            Kind::Refuse | Kind::Drop => drop(request),
            _ => _ = request.reply(reply.to_le_bytes()),
        });
    };
    while !is_over.load(Relaxed) {
        server.step(&mut handlers).unwrap();
        answer_due(false);
    }
    answer_due(true);
    server.close(&mut handlers);
}

fn scalerpc_options() -> scalerpc::ClientOptions {
    scalerpc::ClientOptions {
        connect_timeout: PATIENCE,
        connections: 1,
        ..scalerpc::ClientOptions::default()
    }
}

impl Client for scalerpc::Client {
    const NAME: &str = "scalerpc";
    const ROOM: u64 = SLOTS;

    fn connect(place: &str, _: &Dir) -> Self {
        Self::with_options(place.to_owned(), &scalerpc_options()).unwrap()
    }

    fn make(&mut self, calls: &[Call]) -> Vec<End> {
        make_in_turn(calls, |call| {
            self.call_within(&call.number.to_le_bytes(), call.timeout)
                .map(<[u8]>::to_vec)
        })
    }

    fn fill(&mut self) -> u64 {
        self.call(&COUNTED.to_le_bytes()).unwrap();
        self.connection().rdma().free_slots() as u64
    }
}

/// A client whose calls are futures, many of them at a time.
struct Tasks<C>(C);

/// The connecting of a client whose calls are futures.
trait Reach: AsyncCaller<Error: std::fmt::Debug> {
    const NAME: &str;
    const ROOM: u64;

    fn reach(place: &str, dir: &Dir) -> Self;
}

impl Reach for copyrpc::AsyncClient {
    const NAME: &str = "copyrpc, tasks";
    const ROOM: u64 = 63;

    fn reach(place: &str, _: &Dir) -> Self {
        block_on(Self::with_options(place.to_owned(), &copyrpc_options())).unwrap()
    }
}

impl Reach for ipc::bytes::AsyncClient {
    const NAME: &str = "bytes, tasks";
    const ROOM: u64 = 32;

    fn reach(_: &str, dir: &Dir) -> Self {
        let options = ipc::ClientOptions {
            dir: Some(dir.clone()),
            connect_timeout: PATIENCE,
            connections: 1,
            ..ipc::ClientOptions::default()
        };
        block_on(Self::with_options("bytes", &options)).unwrap()
    }
}

/// The default depth of a server of `scalerpc`.
const SLOTS: u64 = 8;

impl Reach for scalerpc::AsyncClient {
    const NAME: &str = "scalerpc, tasks";
    const ROOM: u64 = SLOTS;

    fn reach(place: &str, _: &Dir) -> Self {
        block_on(Self::with_options(place.to_owned(), &scalerpc_options())).unwrap()
    }
}

impl<C: Reach> Client for Tasks<C> {
    const NAME: &str = C::NAME;
    const ROOM: u64 = C::ROOM;

    fn connect(place: &str, dir: &Dir) -> Self {
        Self(C::reach(place, dir))
    }

    fn make(&mut self, calls: &[Call]) -> Vec<End> {
        let begin = |call: &Call| {
            Begun::new(
                self.0
                    .call(call.number.to_le_bytes().to_vec(), Some(call.timeout)),
            )
        };
        let mut ends = Vec::new();
        for (call, begun) in calls
            .iter()
            .zip(calls.iter().map(begin).collect::<Vec<_>>())
        {
            ends.push(if call.is_given_up {
                End::GivenUp
            } else {
                call.end(begun.end().map(|reply| reply.word()))
            });
        }
        ends
    }

    fn fill(&mut self) -> u64 {
        let begun: Vec<_> = (0..2 * C::ROOM)
            .map(|_| Begun::new(self.0.call(COUNTED.to_le_bytes().to_vec(), Some(PATIENCE))))
            .collect();
        begun
            .into_iter()
            .map(|begun| begun.end().unwrap().word())
            .max()
            .unwrap_or(0)
    }
}

/// The server of a storm.
#[test]
fn helper_process() {
    let Some((role, dir)) = helpers::role() else {
        return;
    };
    let (name, place) = role.split_once(' ').unwrap();
    let (log, is_over) = (Log::open(dir.path()), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            next_word();
            is_over.store(true, Relaxed);
        });
        match name {
            "ipc" => serve_ipc(&dir, &log, &is_over),
            "delegationrpc" => serve_delegationrpc(&dir, &log, &is_over),
            "bytes" => serve_bytes(&dir, &log, &is_over),
            "copyrpc" => serve_copyrpc(place, &log, &is_over),
            "copyrpc-tasks" => serve_tasks::<copyrpc::Host>(
                place,
                &copyrpc::ServerOptions::default(),
                |server| say(server.local_addr()),
                &log,
                &is_over,
            ),
            "scalerpc" => serve_scalerpc(place, &log, &is_over),
            "scalerpc-tasks" => serve_tasks::<scalerpc::Host>(
                place,
                &scalerpc::ServerOptions::default(),
                |server| say(server.local_addr()),
                &log,
                &is_over,
            ),
            "bytes-tasks" => serve_tasks::<ipc::bytes::Host>(
                "bytes",
                &ipc::bytes::ServerOptions {
                    dir: Some(dir.clone()),
                    max_clients: 4,
                    ..ipc::bytes::ServerOptions::default()
                },
                |_| say("bytes"),
                &log,
                &is_over,
            ),
            other => panic!("{other}"),
        }
    });
}

/// A storm under way.
struct Storm {
    made: AtomicU64,
    /// Number of servers of the whole storm, and number of servers that have started after the
    /// first.
    servers: u64,
    successors: AtomicU64,
    /// The number of the last call outside the storm. One client at a time makes such calls.
    last: Mutex<u64>,
    /// Whether a client has failed: then the other clients make no more calls.
    has_failed: AtomicBool,
}

impl Storm {
    /// Waits until `is_so` holds or a client has failed. Returns whether no client has failed.
    fn waits_until(&self, is_so: impl Fn() -> bool) -> bool {
        while !is_so() && !self.has_failed.load(Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        !self.has_failed.load(Relaxed)
    }
}

/// Makes the calls of a client. Returns their ends, in order.
fn work<C: Client>(place: &str, dir: &Dir, first: u64, calls: u64, storm: &Storm) -> Vec<End> {
    let (mut client, mut rng) = (C::connect(place, dir), Rng::with_seed(first));
    let mut ends = Vec::with_capacity(calls as usize);
    for made in (0..calls).step_by(BATCH as usize) {
        // Each server gets a share of the calls. In the middle of a share, the clients wait until
        // the server of the share has started.
        if !storm.waits_until(|| {
            2 * made * storm.servers < (2 * storm.successors.load(Relaxed) + 3) * calls
        }) {
            return ends;
        }
        let call = |number| {
            let timeout = match rng.u32(..100) {
                0 => Duration::from_nanos(rng.u64(..2)),
                _ if kind(number) == Kind::Wait => Duration::from_millis(3),
                1..5 => Duration::from_micros(rng.u64(..3_000)),
                _ => Duration::from_secs(1),
            };
            Call {
                number,
                timeout,
                is_given_up: rng.u32(..20) == 0,
            }
        };
        let batch: Vec<_> = (first + made..).take(BATCH as usize).map(call).collect();
        ends.extend(client.make(&batch));
        storm.made.fetch_add(BATCH, Relaxed);
    }
    if storm.waits_until(|| storm.successors.load(Relaxed) + 1 == storm.servers) {
        check_room(&mut client, &mut storm.last.lock().unwrap());
    }
    ends
}

/// Checks that the client can have as many calls under way as its server permits.
fn check_room<C: Client>(client: &mut C, number: &mut u64) {
    // The last server may have started after the client's last call.
    helpers::wait_for("the client gets no answer", || {
        *number += 1;
        let call = Call {
            number: *number,
            timeout: Duration::from_secs(1),
            is_given_up: false,
        };
        client.make(&[call]) == [End::Answered]
    });
    let mut room = 0;
    let start = Instant::now();
    while room < C::ROOM {
        assert!(
            start.elapsed() < PATIENCE,
            "{}: room for {room} calls, of {}",
            C::NAME,
            C::ROOM
        );
        room = client.fill();
    }
    assert_eq!(room, C::ROOM, "{}", C::NAME);
}

fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Lock of each test that opens descriptors in this process, because [`storm`] counts them.
static DESCRIPTORS: Mutex<()> = Mutex::new(());

/// Runs a test while no other test of this program runs.
fn alone(test: impl FnOnce()) {
    let _alone = DESCRIPTORS.lock();
    helpers::limited(test);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn storm<C: Client>(server_name: &str) {
    let scratch = Scratch::new(&format!("services-{server_name}"));
    let calls = CALLS * u64::from(scale());
    let all = CLIENTS * calls;
    let servers = SERVERS.max(all / LIFE);
    let log = Log::open(scratch.path());
    let mut server = Helper::start(&format!("{server_name} {}", any_port()), &scratch);
    let place = server.hear();
    // A process allocates some memory and descriptors only once, so they are not counted.
    let storm = Storm {
        made: AtomicU64::new(0),
        servers,
        successors: AtomicU64::new(0),
        last: Mutex::new(all),
        has_failed: AtomicBool::new(false),
    };
    check_room(
        &mut C::connect(&place, &scratch.dir()),
        &mut storm.last.lock().unwrap(),
    );
    let (before, mut kills) = ((descriptors(), memory()), 0);
    let ends: Vec<End> = thread::scope(|scope| {
        let place = &*place;
        let storm = &storm;
        let scratch = &scratch;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn(move || work::<C>(place, &scratch.dir(), client * calls, calls, storm))
            })
            .collect();
        for life in 1..servers {
            // No client ends before its last server has started, unless it fails.
            storm.waits_until(|| {
                let has_failed = clients.iter().any(ScopedJoinHandle::is_finished);
                storm.has_failed.store(has_failed, Relaxed);
                storm.made.load(Relaxed) >= life * all / servers
            });
            if storm.has_failed.load(Relaxed) {
                break;
            }
            if life % 2 == 0 {
                server.kill();
                kills += 1;
            } else {
                server.hang_up();
                server.wait();
            }
            server = Helper::start(&format!("{server_name} {place}"), scratch);
            server.hear();
            storm.successors.store(life, Relaxed);
        }
        clients
            .into_iter()
            .flat_map(|client| client.join().unwrap())
            .collect()
    });
    server.hang_up();
    server.wait();
    drop(server);
    let mut counts = [0; 4];
    for (number, (end, executed)) in ends.iter().zip(log.read(all)).enumerate() {
        let is_true = match end {
            End::Answered => executed == 1,
            End::MayHaveExecuted | End::GivenUp => executed <= 1,
            End::HasNotExecuted => executed == 0,
        };
        assert!(
            is_true,
            "{}: call {number} ended as {end:?}, and was executed {executed} times",
            C::NAME
        );
        counts[*end as usize] += 1;
    }
    let [answered, unknown, not, given_up] = counts;
    println!(
        "{}: {answered} calls answered, {unknown} of unknown fate, {not} not executed, {given_up} given up, {kills} kills, {} restarts",
        C::NAME,
        servers - 1 - kills
    );
    assert_eq!(answered + unknown + not + given_up, all);
    assert!(answered > all / 2, "{}: the storm was no service", C::NAME);
    drop(ends);
    assert!(
        descriptors() < before.0,
        "the server's pipe is closed, and nothing else is open"
    );
    // The bound includes the records of the ends, and memory that the allocator keeps.
    assert!(
        memory() < before.1 + GROWTH + 2 * all,
        "{} bytes, {} before",
        memory(),
        before.1
    );
    let left = scratch.names();
    assert!(left.iter().all(|name| name == "executed"), "{left:?}");
}

#[test]
fn every_call_of_every_rpc_ends_once_and_as_it_says() {
    alone(|| {
        storm::<ipc::Client<u64, u64, ()>>("ipc");
        storm::<delegationrpc::Client<u64, u64, ()>>("delegationrpc");
        storm::<ipc::bytes::Client<()>>("bytes");
        storm::<Tasks<ipc::bytes::AsyncClient>>("bytes");
        storm::<Tasks<ipc::bytes::AsyncClient>>("bytes-tasks");
        storm::<copyrpc::Client>("copyrpc");
        storm::<Tasks<copyrpc::AsyncClient>>("copyrpc");
        storm::<Tasks<copyrpc::AsyncClient>>("copyrpc-tasks");
        storm::<scalerpc::Client>("scalerpc");
        storm::<Tasks<scalerpc::AsyncClient>>("scalerpc");
        storm::<Tasks<scalerpc::AsyncClient>>("scalerpc-tasks");
        rest::<ipc::Client<u64, u64, ()>>("ipc");
        rest::<delegationrpc::Client<u64, u64, ()>>("delegationrpc");
        rest::<ipc::bytes::Client<()>>("bytes");
        rest::<Tasks<ipc::bytes::AsyncClient>>("bytes");
        rest::<copyrpc::Client>("copyrpc");
        rest::<Tasks<copyrpc::AsyncClient>>("copyrpc");
        rest::<scalerpc::Client>("scalerpc");
        rest::<Tasks<scalerpc::AsyncClient>>("scalerpc");
    });
}

/// Servers are killed while their client has no call in flight, and the client makes its next call
/// after the kill.
fn rest<C: Client>(server_name: &str) {
    let scratch = Scratch::new(&format!("services-rest-{server_name}"));
    let mut server = Helper::start(&format!("{server_name} {}", any_port()), &scratch);
    let place = server.hear();
    let mut client = C::connect(&place, &scratch.dir());
    for number in (0..).filter(|number| kind(*number) == Kind::Answer).take(4) {
        let ends = client.make(&[Call {
            number,
            timeout: PATIENCE,
            is_given_up: false,
        }]);
        assert_eq!(ends, [End::Answered], "{}: call {number}", C::NAME);
        server.kill();
        server = Helper::start(&format!("{server_name} {place}"), &scratch);
        server.hear();
        thread::sleep(4 * QUIET);
    }
    server.hang_up();
    server.wait();
}

/// `ipc` and `copyrpc` are tested in their own crates.
#[test]
fn payloads_above_a_message_are_one_call_of_scalerpc() {
    alone(|| {
        let mut server = scalerpc::Server::bind(any_port()).unwrap();
        let address = server.local_addr().unwrap();
        let stop = server.stop_handle();
        let max = server.max_payload();
        let client = thread::spawn(move || {
            methods::check_in_parts(scalerpc::Client::connect(address).unwrap(), max, max);
            stop.stop();
        });
        let mut parts = Reassembler::new(server.stop_handle(), 4 << 20, 8 << 20);
        server
            .serve(|part| parts.answer(part, |whole| methods::numbers::answer(&mut Sums, &whole)))
            .unwrap();
        assert_eq!(parts.held(), 0);
        client.join().unwrap();
    });
}

/// Lets the handler stop the server; its client fetches the reply afterwards. `copyrpc` is tested
/// in its own crate.
fn serve_and_stop<C: Caller<Error: std::fmt::Debug + 'static>>(
    stop: StopHandle,
    serve: impl FnOnce(&mut dyn FnMut(&[u8]) -> Vec<u8>),
    connect: impl FnOnce() -> C + Send + 'static,
) {
    let reply = vec![7; 1 << 20];
    let expected = reply.clone();
    let client = thread::spawn(move || {
        let mut client = parts::Client::new(connect(), 4056, 4056);
        assert!(client.call(b"get", None).unwrap() == expected);
    });
    let mut parts = Reassembler::new(stop.clone(), 1 << 20, 2 << 20);
    serve(&mut |part| {
        parts.answer(part, |_| {
            stop.stop();
            reply.clone()
        })
    });
    client.join().unwrap();
}

#[test]
fn a_server_that_stops_lets_its_client_fetch_a_long_reply() {
    alone(|| {
        // On a busy machine a client takes longer than the default for its parts.
        let options = scalerpc::ServerOptions {
            stop_timeout: PATIENCE,
            ..scalerpc::ServerOptions::default()
        };
        let mut server = scalerpc::Server::with_options(any_port(), &options).unwrap();
        let (address, stop) = (server.local_addr().unwrap(), server.stop_handle());
        serve_and_stop(
            stop,
            |handler| server.serve(handler).unwrap(),
            move || scalerpc::Client::connect(address).unwrap(),
        );
        let name = format!("parts-at-a-stop-{}", std::process::id());
        let mut server = ipc::bytes::Server::bind(&name).unwrap();
        serve_and_stop(
            server.stop_handle(),
            |handler| server.serve(handler).unwrap(),
            move || ipc::bytes::Client::connect(&name).unwrap(),
        );
    });
}
