//! Services as users run them: many tasks with deadlines, requests that are held, refused, dropped,
//! answered at too great length, and calls from the server, while the server is suspended, killed,
//! and ended by SIGTERM with a successor at its address.
//!
//! A server appends the number of each request to a log before it answers. So the end of each call
//! can be compared with the log: a call that "was not sent" was never executed, a reply belongs to
//! its request, and no call is executed twice. After the storm every client gets an answer again.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use copyrpc::{
    AsyncClient, AsyncServer, Client, ClientError, ClientOptions, EndpointConfig, RecvHandle,
    Server, ServerOptions, ServerRequest,
};
use copyrpc_testing::executor::block_on;
use copyrpc_testing::limits::{self, any_port};
use fastrand::Rng;

const WATCHDOG: Duration = Duration::from_secs(120);
/// Longer than any reply that a client takes.
const TOO_LONG: usize = 70 << 10;
/// Time in which every client has to get an answer after the storm; a client that is stuck gets
/// none.
const CALM: Duration = Duration::from_secs(40);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Answer,
    /// Answers after `hold_ms`.
    Hold,
    /// Keeps the request until the server ends, and then answers.
    Keep,
    Refuse,
    Drop,
    TooLong,
    /// Calls the client many times, then answers.
    Push,
}

const KINDS: [Kind; 7] = [
    Kind::Answer,
    Kind::Hold,
    Kind::Keep,
    Kind::Refuse,
    Kind::Drop,
    Kind::TooLong,
    Kind::Push,
];
const PUSHES: usize = 40;

/// A request: its number, its treatment by the server, and the time for which the server holds it.
#[derive(Clone, Copy, Debug)]
struct Task {
    number: u64,
    kind: Kind,
    hold_ms: u8,
}

impl Task {
    const BYTES: usize = 10;

    /// Returns a random request; the server is asked to keep `kept` in 100.
    fn random(number: u64, kept: u32, rng: &mut Rng) -> Self {
        let kind = match rng.u32(..100) {
            percent if percent < kept => Kind::Keep,
            ..50 => Kind::Answer,
            50..80 => Kind::Hold,
            percent => KINDS[3 + (percent % 4) as usize],
        };
        Self {
            number,
            kind,
            hold_ms: rng.u8(..),
        }
    }

    fn encode(self, size: usize) -> Vec<u8> {
        let mut bytes = vec![self.number as u8; Self::BYTES + size];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..Self::BYTES].copy_from_slice(&[self.kind as u8, self.hold_ms]);
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(
            bytes[Self::BYTES..]
                .iter()
                .all(|&byte| byte == number as u8),
            "the request {number} arrived whole"
        );
        Self {
            number,
            kind: KINDS[usize::from(bytes[8])],
            hold_ms: bytes[9],
        }
    }

    fn hold(self) -> Duration {
        match self.kind {
            Kind::Hold => Duration::from_millis(u64::from(self.hold_ms)),
            Kind::Keep => WATCHDOG,
            _ => Duration::ZERO,
        }
    }

    fn reply(self) -> Vec<u8> {
        match self.kind {
            Kind::TooLong => vec![0; TOO_LONG],
            _ => self
                .number
                .to_be_bytes()
                .repeat(1 + self.number as usize % 50),
        }
    }
}

/// The file that lists which requests were executed. A write outlives the process.
struct Log(File);

impl Log {
    fn open() -> Self {
        let path = std::env::var_os("COPYRPC_TEST_LOG").unwrap();
        Self(OpenOptions::new().append(true).open(path).unwrap())
    }

    fn take(&mut self, request: &[u8]) -> Task {
        let task = Task::decode(request);
        self.0.write_all(&task.number.to_le_bytes()).unwrap();
        task
    }

    /// Returns how often each of the first `calls` numbers was executed.
    fn read(path: &Path, calls: u64) -> Vec<u32> {
        let mut executed = vec![0; calls as usize];
        // A kill may cut the last number.
        for number in std::fs::read(path).unwrap().chunks_exact(8) {
            executed[u64::from_le_bytes(number.try_into().unwrap()) as usize] += 1;
        }
        executed
    }
}

fn endpoint() -> EndpointConfig {
    // Some suspensions are longer than the stall timeout.
    EndpointConfig {
        stall_timeout: Duration::from_millis(400),
        keepalive: Duration::from_millis(50),
        ..EndpointConfig::default()
    }
}

static IS_TERMINATED: AtomicBool = AtomicBool::new(false);

extern "C" fn terminate(_: libc::c_int) {
    IS_TERMINATED.store(true, Relaxed);
}

/// A process of the test below: a server that ends at SIGTERM, after it has answered the requests
/// that it holds.
#[test]
#[ignore = "a process of another test, started by it"]
fn service_process() {
    let Ok(address) = std::env::var("COPYRPC_TEST_ADDRESS") else {
        return;
    };
    limits::watchdog(WATCHDOG * (1 + limits::scale_of("COPYRPC_TEST_SCALE")));
    // SAFETY: the handler stores to an atomic.
    unsafe {
        libc::signal(
            libc::SIGTERM,
            terminate as extern "C" fn(libc::c_int) as libc::sighandler_t,
        )
    };
    let options = ServerOptions {
        endpoint: endpoint(),
        ..ServerOptions::default()
    };
    if std::env::var_os("COPYRPC_TEST_ASYNC").is_some() {
        serve_async(&address, &options)
    } else {
        serve_in_steps(&address, &options)
    }
}

/// Calls `bind` until the predecessor no longer has the address.
fn bind<S, E: std::fmt::Display>(
    mut bind: impl FnMut() -> Result<S, E>,
    at: impl Fn(&S) -> std::net::SocketAddr,
) -> S {
    loop {
        match bind() {
            Ok(server) => {
                println!("\nat {}", at(&server));
                return server;
            }
            Err(error) if error.to_string().contains("in use") => {
                thread::sleep(Duration::from_millis(5))
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Requests, each with the time at which it is answered.
type Held<R> = Vec<(Instant, Task, R)>;

/// Takes the requests that are due; at the end of the server, all requests.
fn take_due<R>(held: &mut Held<R>) -> Held<R> {
    let (now, is_over) = (Instant::now(), IS_TERMINATED.load(Relaxed));
    let (due, later) = std::mem::take(held)
        .into_iter()
        .partition(|(due, ..)| is_over || *due <= now);
    *held = later;
    due
}

fn serve_in_steps(address: &str, options: &ServerOptions) {
    let mut server = bind(
        || Server::with_options(address, options),
        |server| server.local_addr().unwrap(),
    );
    let (mut log, mut held) = (Log::open(), Held::new());
    while !IS_TERMINATED.load(Relaxed) {
        server.step().unwrap();
        while let Some(request) = server.recv() {
            let task = log.take(&request.data().to_vec());
            if task.kind == Kind::Push {
                // Calls of the server to the client; those for which the ring has no room are
                // refused.
                (0..PUSHES).for_each(|_| _ = request.endpoint().call(&[1; 1000], (), 8));
            }
            held.push((Instant::now() + task.hold(), task, request));
        }
        take_due(&mut held)
            .into_iter()
            .for_each(|(_, task, request)| answer(task, request));
    }
    held.into_iter()
        .for_each(|(_, task, request)| answer(task, request));
}

fn answer(task: Task, request: RecvHandle<()>) {
    match task.kind {
        Kind::Refuse => _ = request.refuse(),
        Kind::Drop => drop(request),
        _ => {
            if let Err(copyrpc::ReplyError::TooLarge { request, .. }) = request.reply(&task.reply())
            {
                let _ = request.refuse();
            }
        }
    }
}

fn serve_async(address: &str, options: &ServerOptions) {
    let server = bind(
        || block_on(AsyncServer::with_options(address.to_owned(), options)),
        AsyncServer::local_addr,
    );
    let (stop, mut log) = (server.stop_handle(), Log::open());
    let (held, is_over) = (
        Mutex::new(Held::<ServerRequest>::new()),
        AtomicBool::new(false),
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            while !(is_over.load(Relaxed) && held.lock().unwrap().is_empty()) {
                if IS_TERMINATED.load(Relaxed) {
                    stop.stop();
                }
                let due = take_due(&mut held.lock().unwrap());
                for (_, task, request) in due {
                    match task.kind {
                        Kind::Refuse => request.refuse(),
                        Kind::Drop => drop(request),
                        _ => request.reply(task.reply()),
                    }
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        while let Some(request) = block_on(server.recv()).unwrap() {
            let task = log.take(request.data());
            held.lock()
                .unwrap()
                .push((Instant::now() + task.hold(), task, request));
        }
        is_over.store(true, Relaxed);
    });
}

/// A server process, and its address.
struct Service {
    process: Child,
    /// The process's output, kept open so that its last line can be written.
    _output: BufReader<ChildStdout>,
    address: String,
}

impl Service {
    fn start(address: &str, log: &Path, is_async: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "services::service_process",
        ]);
        command
            .env("COPYRPC_TEST_ADDRESS", address)
            .env("COPYRPC_TEST_LOG", log);
        if is_async {
            command.env("COPYRPC_TEST_ASYNC", "1");
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let address = output
            .by_ref()
            .lines()
            .find_map(|line| line.unwrap().strip_prefix("at ").map(str::to_owned))
            .expect("a server binds");
        Self {
            process,
            _output: output,
            address,
        }
    }

    fn signal(&self, signal: libc::c_int) {
        assert_eq!(
            // SAFETY: a child that was not waited for.
            unsafe { libc::kill(self.process.id() as libc::pid_t, signal) },
            0
        );
    }

    fn end(mut self, signal: libc::c_int) {
        self.signal(signal);
        let status = self.process.wait().unwrap();
        assert!(signal == libc::SIGKILL || status.success(), "{status}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // After a failed test, the process may still run.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The calls of all clients of a world.
#[derive(Default)]
struct Calls {
    next: AtomicU64,
    /// Percentage of requests that the server keeps.
    kept: u32,
    ended: Mutex<Vec<(Task, Result<(), ClientError>)>>,
    /// Whether the storm is over: then each client calls until it has an answer.
    is_calm: AtomicBool,
    answered: AtomicUsize,
    /// The first wrong reply. No client makes a call after it.
    wrong: OnceLock<String>,
}

impl Calls {
    /// Returns the next call of a client, its bytes and its time, or `None` after the client's
    /// first answer in the calm, and after a wrong reply to any client.
    fn next(
        &self,
        last: Option<&(Task, bool)>,
        rng: &mut Rng,
    ) -> Option<(Task, Vec<u8>, Duration)> {
        let is_calm = self.is_calm.load(Relaxed);
        if self.wrong.get().is_some()
            || is_calm
                && last.is_some_and(|(task, is_answered)| task.kind == Kind::Answer && *is_answered)
        {
            return None;
        }
        let number = self.next.fetch_add(1, Relaxed);
        let task = if is_calm {
            Task {
                number,
                kind: Kind::Answer,
                hold_ms: 0,
            }
        } else {
            Task::random(number, self.kept, rng)
        };
        let time = if is_calm {
            Duration::from_secs(2)
        } else {
            Duration::from_millis(rng.u64(5..150))
        };
        Some((task, task.encode(rng.usize(..2_000)), time))
    }

    fn end(&self, task: Task, outcome: Result<Vec<u8>, ClientError>) -> (Task, bool) {
        if let Ok(reply) = &outcome {
            if *reply != task.reply() {
                let (number, front) = (task.number, &reply[..reply.len().min(8)]);
                let _first = self.wrong.set(format!(
                    "the call {number} got a reply of {} bytes that begins with {front:?}",
                    reply.len()
                ));
            }
            self.answered.fetch_add(1, Relaxed);
        }
        let is_answered = outcome.is_ok();
        self.ended.lock().unwrap().push((task, outcome.map(drop)));
        (task, is_answered)
    }

    /// Fails after a wrong reply, and if the server has ended by itself. Otherwise waits for a
    /// moment.
    fn check(&self, seed: u64, service: &mut Service) {
        assert!(
            self.wrong.get().is_none(),
            "SERVICES_SEED={seed}: {:?}",
            self.wrong
        );
        assert_eq!(
            service.process.try_wait().unwrap(),
            None,
            "SERVICES_SEED={seed}: the server ended by itself"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

fn client_options() -> ClientOptions {
    ClientOptions {
        endpoint: endpoint(),
        connect_timeout: CALM,
        ..ClientOptions::default()
    }
}

fn call_in_turn(address: &str, calls: &Calls, mut rng: Rng) {
    let mut client = Client::with_options(address, &client_options()).unwrap();
    let mut last = None;
    while let Some((task, request, time)) = calls.next(last.as_ref(), &mut rng) {
        last = Some(calls.end(task, client.call_within(&request, time).map(<[u8]>::to_vec)));
    }
}

async fn call_beside_others(client: AsyncClient, calls: Arc<Calls>, mut rng: Rng) {
    let mut last = None;
    while let Some((task, request, time)) = calls.next(last.as_ref(), &mut rng) {
        last = Some(calls.end(task, client.call_within(request, time).await));
    }
}

/// Signals of a world, by kind.
#[derive(Default)]
struct Counts {
    stops: AtomicUsize,
    kills: AtomicUsize,
    terminations: AtomicUsize,
    calls: AtomicU64,
    answered: AtomicUsize,
}

fn world(seed: u64, counts: &Counts) {
    const BLOCKING: usize = 2;
    const TASKS: usize = 24;
    let mut rng = Rng::with_seed(seed);
    let log = Scratch::new(seed);
    let is_async = rng.bool();
    let mut service = Service::start(&any_port(), &log.0, is_async);
    let (address, calls) = (
        service.address.clone(),
        Arc::new(Calls {
            kept: rng.u32(..40),
            ..Calls::default()
        }),
    );
    let clients: Vec<_> = (0..BLOCKING)
        .map(|_| {
            let address = address.clone();
            let calls = Arc::clone(&calls);
            let rng = rng.fork();
            thread::spawn(move || call_in_turn(&address, &calls, rng))
        })
        .collect();
    let tasks = thread::spawn({
        let address = address.clone();
        let calls = Arc::clone(&calls);
        let mut rng = rng.fork();
        move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = AsyncClient::with_options(address, &client_options())
                    .await
                    .unwrap();
                let tasks: Vec<_> = (0..TASKS)
                    .map(|_| {
                        tokio::spawn(call_beside_others(
                            client.clone(),
                            Arc::clone(&calls),
                            rng.fork(),
                        ))
                    })
                    .collect();
                for task in tasks {
                    task.await.unwrap();
                }
            });
        }
    });
    while calls.ended.lock().unwrap().len() < BLOCKING + TASKS {
        calls.check(seed, &mut service);
    }
    for _ in 0..rng.u32(1..6) {
        thread::sleep(Duration::from_millis(rng.u64(20..500)));
        match rng.u32(..5) {
            0 | 1 => {
                counts.stops.fetch_add(1, Relaxed);
                service.signal(libc::SIGSTOP);
                // Shorter than the clients' timeouts, and longer than the time after which they
                // give the server up.
                thread::sleep(Duration::from_millis(if rng.bool() {
                    rng.u64(1..100)
                } else {
                    rng.u64(500..900)
                }));
                service.signal(libc::SIGCONT);
            }
            2 => {
                counts.kills.fetch_add(1, Relaxed);
                service.end(libc::SIGKILL);
                service = Service::start(&address, &log.0, is_async);
            }
            3 => {
                counts.terminations.fetch_add(1, Relaxed);
                service.end(libc::SIGTERM);
                service = Service::start(&address, &log.0, is_async);
            }
            _ => {}
        }
    }
    calls.is_calm.store(true, Relaxed);
    let start = Instant::now();
    for thread in clients.into_iter().chain([tasks]) {
        while !thread.is_finished() {
            assert!(
                start.elapsed() < CALM,
                "SERVICES_SEED={seed}: a client gets no answer any more: {:?}",
                calls.ended.lock().unwrap().last()
            );
            calls.check(seed, &mut service);
        }
        thread.join().unwrap();
    }
    calls.check(seed, &mut service);
    service.end(libc::SIGTERM);
    let made = calls.next.load(Relaxed);
    let (executed, ended) = (Log::read(&log.0, made), calls.ended.lock().unwrap());
    assert_eq!(ended.len() as u64, made, "every call ends, once");
    for (task, outcome) in &*ended {
        let times = executed[task.number as usize];
        let (least, most) = match outcome {
            Ok(()) => (1, 1),
            Err(error) if error.is_retryable() => (0, 0),
            Err(ClientError::Refused | ClientError::ReplyTooLong { .. }) => (1, 1),
            Err(error) => (0, u32::from(error.may_have_executed())),
        };
        assert!(
            (least..=most).contains(&times),
            "SERVICES_SEED={seed}: {outcome:?} of {:?}, executed {times} times",
            task.kind
        );
    }
    counts.calls.fetch_add(made, Relaxed);
    counts
        .answered
        .fetch_add(calls.answered.load(Relaxed), Relaxed);
}

/// A file of a world, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(seed: u64) -> Self {
        let path =
            std::env::temp_dir().join(format!("copyrpc-services-{}-{seed}", std::process::id()));
        File::create_new(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// `SERVICES_SEED` repeats one world; `COPYRPC_TEST_FIRST_SEED` and `COPYRPC_TEST_SCALE` choose
/// others, and more.
#[test]
fn services_that_hold_pause_die_and_are_replaced_end_every_call_truly_and_serve_everybody_after() {
    const SIDE_BY_SIDE: u64 = 4;
    let scale = limits::scale_of("COPYRPC_TEST_SCALE");
    limits::watchdog(WATCHDOG * (1 + scale));
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let counts = Counts::default();
    if let Some(seed) = number("SERVICES_SEED") {
        world(seed, &counts);
    } else {
        let (first, seeds) = (
            number("COPYRPC_TEST_FIRST_SEED").unwrap_or(1),
            10 * u64::from(scale),
        );
        let next = AtomicU64::new(first);
        thread::scope(|scope| {
            for _ in 0..SIDE_BY_SIDE {
                scope.spawn(|| {
                    while let Some(seed) =
                        Some(next.fetch_add(1, Relaxed)).filter(|&seed| seed < first + seeds)
                    {
                        world(seed, &counts);
                    }
                });
            }
        });
    }
    let [stops, kills, terminations, answered] = [
        &counts.stops,
        &counts.kills,
        &counts.terminations,
        &counts.answered,
    ]
    .map(|count| count.load(Relaxed));
    println!(
        "services: {stops} stops, {kills} kills, {terminations} terminations; {} calls made, {answered} calls answered",
        counts.calls.load(Relaxed)
    );
}
