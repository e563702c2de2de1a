//! Processes that poll and sleep in turn, killed at random moments, and stopped and continued:
//! clients of a server that lives, and servers with clients that live. The surviving processes do
//! not hang, and get each answer exactly once, whatever calls they give up; entries can be taken
//! again; the next server starts; no file is left.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use copyrpc_calls::SessionEnd;
use copyrpc_shm::dir::Dir;

use crate::caller::{Caller, answer};
use crate::rpc::Rpc;
use crate::start;
use copyrpc_testing::helpers::{
    Helper, PATIENCE, Scratch, is_over, next_word, say, scale, wait_for, wait_for_some,
};

const DEPTH: usize = 8;
const CLIENTS: usize = 6;
const ENTRIES: usize = 8;
/// Number of clients that are killed, times `SHM_TEST_SCALE`.
const CLIENT_KILLS: u32 = 250;
/// Number of servers that are killed, times `SHM_TEST_SCALE`.
const SERVER_KILLS: u32 = 25;
/// Minimum number of calls of a client that is not killed.
const CALLS_MIN: u64 = 1000;
/// Maximum number of requests that wait long for their answers.
const SHELF: usize = 8;
/// Number of low bits of a request's number that count the client's calls; the upper bits are the
/// client's number.
const CALL_BITS: u32 = 40;

/// The other side of the tests.
pub(crate) fn helper<R: Rpc>(role: &str, dir: &Dir) {
    match role {
        "client" => client::<R>(dir),
        "server" => server::<R>(dir),
        other => panic!("unknown role {other}"),
    }
}

/// Numbers of a client's calls by their end: answered, dropped by the server, timed out, given up,
/// and ended because the server was gone.
#[derive(Default)]
struct Tally([u64; 5]);

impl Tally {
    fn add(&mut self, ended: [u64; 5]) {
        self.0
            .iter_mut()
            .zip(ended)
            .for_each(|(sum, ended)| *sum += ended);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [answered, dropped, late, cancelled, gone] = self.0;
        write!(
            f,
            "{answered} answered, {dropped} dropped, {late} late, {cancelled} given up, {gone} ended, 0 lost, 0 duplicated"
        )
    }
}

/// Calls until the test hangs up, and connects again whenever the server is gone.
fn client<R: Rpc>(dir: &Dir) {
    let first = next_word().parse::<u64>().unwrap() << CALL_BITS;
    let (mut number, mut random) = (first, fastrand::Rng::with_seed(first));
    let mut tally = Tally::default();
    while !is_over() || number < first + CALLS_MIN {
        let Some(connected) = R::connect(dir) else {
            std::thread::yield_now();
            continue;
        };
        let mut caller = Caller::<R>::new(connected);
        session(&mut caller, &mut number, first + CALLS_MIN, &mut random);
        assert!(caller.is_idle(), "calls that did not end");
        tally.add([
            caller.answered,
            caller.dropped,
            caller.late,
            caller.cancelled,
            caller.gone,
        ]);
    }
    assert_eq!(
        tally.0.iter().sum::<u64>(),
        number - first,
        "every call ends once"
    );
    say(tally.0.map(|ended| ended.to_string()).join(" "));
}

/// Returns the timeout of a call: mostly none; sometimes no time, or about as long as the call
/// takes.
fn timeout(random: &mut fastrand::Rng) -> Option<Duration> {
    (random.u8(..4) == 0).then(|| {
        Duration::from_micros(if random.bool() {
            random.u64(..300)
        } else {
            random.u64(..100_000)
        })
    })
}

/// Calls until the server is gone, or until the test has closed the input, `enough` calls were
/// made, and all have ended.
fn session<R: Rpc>(
    caller: &mut Caller<R>,
    number: &mut u64,
    enough: u64,
    random: &mut fastrand::Rng,
) {
    let mut depth = 1;
    let mut sleeps = false;
    let mut ends = false;
    let mut progress = Instant::now();
    for round in 0u64.. {
        if round % 64 == 0 {
            ends = ends || *number >= enough && is_over();
            depth = random.usize(1..=DEPTH);
            sleeps = random.bool();
        }
        let first = *number;
        // Calls that were given up keep their places.
        while !ends && caller.waiting() < depth && caller.try_call(*number, timeout(random)) {
            *number += 1;
        }
        if random.u8(..16) == 0 {
            caller.cancel();
        }
        match caller.poll() {
            Ok(0) if ends && caller.is_idle() => return,
            Ok(0) if *number > first => {}
            Ok(0) => {
                assert!(
                    progress.elapsed() < PATIENCE,
                    "{} calls hang",
                    caller.waiting()
                );
                // A client whose call was given up just now may have nothing to wait for.
                if sleeps && !caller.is_idle() {
                    assert!(caller.sleep(), "{} calls hang", caller.waiting());
                } else {
                    std::thread::yield_now();
                }
                continue;
            }
            Ok(_) => {}
            Err(SessionEnd::PeerGone) => return,
            Err(other) => panic!("{other}"),
        }
        progress = Instant::now();
    }
}

/// A server that asserts that each client's calls arrive once and in order, and answers them in any
/// order.
struct Serving<R: Rpc> {
    server: R::Server,
    held: Vec<(R::Held, u64)>,
    /// Requests that are answered much later.
    shelf: Vec<(R::Held, u64)>,
    /// The number of the last request, by client.
    last: HashMap<u64, u64>,
    executed: u64,
    late: u64,
    random: fastrand::Rng,
}

impl<R: Rpc> Serving<R> {
    fn new(server: R::Server) -> Self {
        Self {
            server,
            held: vec![],
            shelf: vec![],
            last: HashMap::new(),
            executed: 0,
            late: 0,
            random: fastrand::Rng::new(),
        }
    }

    fn step(&mut self) {
        let mut is_idle = R::serve_poll(&mut self.server) == 0;
        while let Some((request, number)) = R::recv(&mut self.server) {
            let last = self.last.insert(number >> CALL_BITS, number);
            assert!(
                last.is_none_or(|last| number == last + 1),
                "{number:#x} after {last:#x?}"
            );
            self.executed += 1;
            if self.random.u8(..128) == 0 {
                // The drop rejects the request.
                drop(request);
                continue;
            }
            let to = if self.random.u8(..32) == 0 {
                &mut self.shelf
            } else {
                &mut self.held
            };
            to.push((request, number));
        }
        // The shelf has requests of living clients, and with time many of dead clients.
        if self.shelf.len() > SHELF || self.random.u16(..1000) == 0 && !self.shelf.is_empty() {
            let index = self.random.usize(..self.shelf.len());
            self.held.push(self.shelf.swap_remove(index));
        }
        for _ in 0..self.random.usize(..=self.held.len()) {
            let (request, number) = self.held.swap_remove(self.random.usize(..self.held.len()));
            self.late += u64::from(!R::reply(&mut self.server, request, answer(number)));
            is_idle = false;
        }
        if is_idle && self.random.bool() {
            R::serve_wait(&mut self.server, Some(Duration::from_micros(100)));
        } else if is_idle {
            std::thread::yield_now();
        }
    }
}

/// Serves until the test hangs up.
fn server<R: Rpc>(dir: &Dir) {
    let created = wait_for_some("the name stays taken", || {
        R::try_create(dir, ENTRIES, DEPTH)
    });
    let mut serving = Serving::<R>::new(created);
    say("ready");
    while !is_over() {
        for _ in 0..64 {
            serving.step();
        }
    }
}

/// The client processes: for each its number, its process, and whether it is stopped.
struct Crowd {
    clients: Vec<(u64, Helper, bool)>,
    next: u64,
    kills: u32,
    stops: u32,
    random: fastrand::Rng,
}

impl Crowd {
    fn new<R: Rpc>(scratch: &Scratch) -> Self {
        let mut crowd = Self {
            clients: vec![],
            next: 0,
            kills: 0,
            stops: 0,
            random: fastrand::Rng::new(),
        };
        (0..CLIENTS).for_each(|_| crowd.start::<R>(scratch));
        crowd
    }

    fn start<R: Rpc>(&mut self, scratch: &Scratch) {
        let mut client = start::<R>("storm: client", scratch);
        client.tell(&self.next.to_string());
        self.clients.push((self.next, client, false));
        self.next += 1;
    }

    /// Stops, continues or kills a random client, if `who` holds for it.
    fn strike<R: Rpc>(&mut self, scratch: &Scratch, who: impl Fn(u64) -> bool) {
        let index = self.random.usize(..self.clients.len());
        let (number, client, is_stopped) = &mut self.clients[index];
        if !who(*number) {
            return;
        }
        match self.random.u8(..4) {
            0 if *is_stopped => {
                client.signal(libc::SIGCONT);
                *is_stopped = false;
            }
            0 => {
                client.signal(libc::SIGSTOP);
                *is_stopped = true;
                self.stops += 1;
            }
            _ => {
                client.kill();
                self.clients.swap_remove(index);
                self.kills += 1;
                self.start::<R>(scratch);
            }
        }
    }

    /// Asks all clients to end, and calls `meanwhile` until they have ended.
    fn end(mut self, mut meanwhile: impl FnMut()) -> Tally {
        for (_, client, _) in &mut self.clients {
            client.signal(libc::SIGCONT);
            client.hang_up();
        }
        let mut tally = Tally::default();
        for (_, client, _) in &mut self.clients {
            wait_for("a client hangs", || {
                meanwhile();
                client.has_ended()
            });
            let ended: Vec<u64> = client
                .hear()
                .split(' ')
                .map(|ended| ended.parse().unwrap())
                .collect();
            tally.add(ended.try_into().unwrap());
            client.wait();
        }
        tally
    }
}

pub(crate) fn clients_killed_at_random_moments_disturb_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut serving = Serving::<R>::new(R::create(&scratch.dir(), ENTRIES, DEPTH));
    let mut crowd = Crowd::new::<R>(&scratch);
    let mut random = fastrand::Rng::new();
    let mut progress = Instant::now();
    while crowd.kills < CLIENT_KILLS * scale() {
        for _ in 0..random.u32(..400) {
            serving.step();
        }
        let kills = crowd.kills;
        // The client has usually made calls; sometimes it is starting.
        let any = random.u8(..16) == 0;
        crowd.strike::<R>(&scratch, |client| any || serving.last.contains_key(&client));
        if crowd.kills > kills {
            progress = Instant::now();
        }
        assert!(progress.elapsed() < PATIENCE, "no client can call");
    }
    let (kills, stops) = (crowd.kills, crowd.stops);
    let tally = crowd.end(|| serving.step());
    let mut entries = vec![];
    wait_for("an entry stays taken", || {
        (0..64).for_each(|_| serving.step());
        entries.extend(R::connect(&scratch.dir()));
        entries.len() == ENTRIES
    });
    println!(
        "{kills} clients killed, {stops} stopped, {} calls executed, {} of them for the dead; survivors: {tally}; all {ENTRIES} entries recovered",
        serving.executed, serving.late
    );
    let [ended @ .., gone] = tally.0;
    assert!(gone == 0 && !ended.contains(&0), "{tally}");
    drop((serving, entries));
    assert!(scratch.names().is_empty());
}

pub(crate) fn servers_killed_at_random_moments_are_replaced<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut crowd = Crowd::new::<R>(&scratch);
    let mut random = fastrand::Rng::new();
    let kills = SERVER_KILLS * scale();
    let mut ready = 0;
    for _ in 0..kills {
        let mut server = start::<R>("storm: server", &scratch);
        // Sometimes the server is killed while it starts.
        if random.u8(..4) > 0 {
            assert_eq!(server.hear(), "ready");
            ready += 1;
        }
        for _ in 0..random.u8(..6) {
            std::thread::sleep(Duration::from_micros(random.u64(..5000)));
            crowd.strike::<R>(&scratch, |_| true);
            if random.u8(..4) == 0 {
                server.signal(libc::SIGSTOP);
                std::thread::sleep(Duration::from_micros(random.u64(..2000)));
                server.signal(libc::SIGCONT);
            }
        }
        server.kill();
        assert!(scratch.names().len() <= 1);
    }
    let mut server = start::<R>("storm: server", &scratch);
    assert_eq!(server.hear(), "ready");
    let (client_kills, stops) = (crowd.kills, crowd.stops);
    let tally = crowd.end(std::thread::yield_now);
    println!(
        "{kills} servers killed, {ready} of them serving, all replaced; {client_kills} clients killed, {stops} stopped; survivors: {tally}"
    );
    server.hang_up();
    server.wait();
    assert!(scratch.names().is_empty());
}

suite! {
    ipc delegation: {
        clients_killed_at_random_moments_disturb_nobody
        servers_killed_at_random_moments_are_replaced
    }
}
