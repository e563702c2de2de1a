//! What every shared-memory RPC of the workspace promises, whatever its rings look like: one suite, run by `ipc` and by `delegationrpc`.
//! A test file implements [`Rpc`] and calls `conformance!` with its type.
#![allow(
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shm::dir::Dir;
use shm::membership::{CallFailed, SessionEnd};
use shm::region::Region;
use shm::sync::AtomicU32;

use crate::support::{self, Helper, PATIENCE, Scratch, next_word, say, wait_for};

/// Why a call was not made, with what came back: request and user data.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    Full(u64, u64),
    Ended(u64, u64, SessionEnd),
}

/// The end of a call, as a client sees it.
pub type Outcome = Result<u64, CallFailed>;

/// An RPC from `u64` to `u64`, with `u64` as user data.
pub trait Rpc {
    type Server;
    type Client: Send;
    /// A received request.
    type Held;

    fn create(dir: &Dir, clients: usize, depth: usize) -> Self::Server;
    /// `None` if all seats are taken.
    fn connect(dir: &Dir) -> Option<Self::Client>;
    fn serve_poll(server: &mut Self::Server) -> usize;
    fn serve_wait(server: &mut Self::Server, timeout: Option<Duration>) -> bool;
    fn recv(server: &mut Self::Server) -> Option<(Self::Held, u64)>;
    /// Whether the client was still there.
    fn reply(server: &mut Self::Server, held: Self::Held, response: u64) -> bool;
    fn reject(server: &mut Self::Server, held: Self::Held);
    fn call(client: &mut Self::Client, request: u64, user_data: u64) -> Result<(), Refused>;
    fn poll(client: &mut Self::Client, f: impl FnMut(u64, Outcome)) -> Result<usize, SessionEnd>;
    fn wait(client: &mut Self::Client, timeout: Option<Duration>) -> bool;
    fn id(client: &Self::Client) -> usize;
    /// The region of a server for one client with depth 4, and where its seats begin.
    fn seats(dir: &Dir) -> (Region, usize);
}

fn pair<R: Rpc>(scratch: &Scratch, clients: usize, depth: usize) -> (R::Server, R::Client) {
    (R::create(&scratch.dir(), clients, depth), connect::<R>(scratch))
}

fn connect<R: Rpc>(scratch: &Scratch) -> R::Client {
    R::connect(&scratch.dir()).expect("there is a free seat")
}

/// Polls once and takes everything there is.
fn take_all<R: Rpc>(server: &mut R::Server) -> Vec<(R::Held, u64)> {
    R::serve_poll(server);
    std::iter::from_fn(|| R::recv(server)).collect()
}

fn ends<R: Rpc>(client: &mut R::Client) -> Vec<(u64, Outcome)> {
    let mut ended = vec![];
    let polled = R::poll(client, |user, outcome| ended.push((user, outcome)));
    assert_eq!(polled, Ok(ended.len()));
    ended
}

pub fn full_queue_gives_everything_back_and_a_reply_makes_room<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for n in 0..4 {
        R::call(&mut client, n, n).unwrap();
    }
    assert_eq!(R::call(&mut client, 77, 88), Err(Refused::Full(77, 88)));
    let mut requests = take_all::<R>(&mut server);
    assert_eq!(requests.len(), 4);
    assert!(R::call(&mut client, 0, 0).is_err(), "taken is not answered");
    let (first, _) = requests.remove(0);
    assert!(R::reply(&mut server, first, 100));
    assert!(R::call(&mut client, 0, 0).is_err(), "answered is not polled");
    assert_eq!(ends::<R>(&mut client), [(0, Ok(100))]);
    R::call(&mut client, 4, 4).unwrap();
    assert!(R::call(&mut client, 5, 5).is_err());
}

pub fn rejected_request_ends_its_call<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    R::call(&mut client, 1, 10).unwrap();
    R::call(&mut client, 2, 20).unwrap();
    let mut requests = take_all::<R>(&mut server).into_iter();
    R::reject(&mut server, requests.next().unwrap().0);
    assert!(R::reply(&mut server, requests.next().unwrap().0, 5));
    assert_eq!(ends::<R>(&mut client), [(10, Err(CallFailed::Dropped)), (20, Ok(5))]);
}

pub fn replies_in_any_order_at_full_depth_bring_every_token_back_once<R: Rpc>(name: &str) {
    const CALLS: u64 = 200_000;
    let seed = 0x5eed_0002;
    let mut random = fastrand::Rng::with_seed(seed);
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 16);
    let mut returned = vec![0u8; CALLS as usize];
    let (mut sent, mut expected, mut received, mut held, mut empty) = (0, 0, 0, vec![], 0);
    while received < CALLS {
        while sent < CALLS && R::call(&mut client, sent, sent).is_ok() {
            sent += 1;
        }
        for (request, number) in take_all::<R>(&mut server) {
            assert_eq!(number, expected, "requests of a client come in order");
            expected += 1;
            held.push((request, number));
        }
        for _ in 0..random.usize(..=held.len()) {
            let (request, number) = held.swap_remove(random.usize(..held.len()));
            assert!(R::reply(&mut server, request, !number));
        }
        let ended = ends::<R>(&mut client);
        for (user, outcome) in &ended {
            assert_eq!(*outcome, Ok(!user), "seed {seed:#x}");
            returned[*user as usize] += 1;
            received += 1;
        }
        empty = if ended.is_empty() { empty + 1 } else { 0 };
        assert!(empty < 1000, "seed {seed:#x}: stuck at {received}");
    }
    assert!(returned.iter().all(|&n| n == 1));
}

pub fn calls_of_a_server_that_ends_end_once_after_what_it_answered<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 8);
    for n in 0..5 {
        R::call(&mut client, n, n).unwrap();
    }
    let mut requests = take_all::<R>(&mut server).into_iter();
    assert!(R::reply(&mut server, requests.next().unwrap().0, 100));
    R::reject(&mut server, requests.next().unwrap().0);
    // What is held goes first, as it does when a daemon ends.
    let rest = requests.count() as u64;
    drop(server);
    let mut ended = vec![];
    let mut polled = Ok(0);
    for _ in 0..3 {
        polled = R::poll(&mut client, |user, outcome| ended.push((user, outcome)));
    }
    assert_eq!(polled, Err(SessionEnd::ServerGone));
    assert_eq!(ended[..2], [(0, Ok(100)), (1, Err(CallFailed::Dropped))]);
    assert_eq!(ended[2..].iter().map(|(user, _)| *user).collect::<Vec<_>>(), (2..2 + rest).collect::<Vec<_>>());
    assert!(ended[2..].iter().all(|(_, outcome)| outcome.is_err()));
    assert_eq!(R::call(&mut client, 7, 8), Err(Refused::Ended(7, 8, SessionEnd::ServerGone)));
    assert!(scratch.names().is_empty());
    // A server of the same name is another one.
    let _next = R::create(&scratch.dir(), 1, 8);
    assert_eq!(R::call(&mut client, 7, 8), Err(Refused::Ended(7, 8, SessionEnd::ServerGone)));
}

pub fn late_answer_to_a_former_client_reaches_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    R::call(&mut client, 1, 1).unwrap();
    let (late, _) = take_all::<R>(&mut server).remove(0);
    R::call(&mut client, 2, 2).unwrap();
    assert!(R::connect(&scratch.dir()).is_none());
    drop(client);
    assert!(take_all::<R>(&mut server).is_empty(), "a request of a client that left is not worth serving");
    let mut next = connect::<R>(&scratch);
    assert_eq!(R::id(&next), 0);
    R::call(&mut next, 3, 3).unwrap();
    let (request, number) = take_all::<R>(&mut server).remove(0);
    assert_eq!(number, 3);
    assert!(!R::reply(&mut server, late, 9));
    assert_eq!(ends::<R>(&mut next), []);
    assert!(R::reply(&mut server, request, 30));
    assert_eq!(ends::<R>(&mut next), [(3, Ok(30))]);
}

pub fn answer_that_a_former_client_did_not_take_reaches_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    for n in 0..4 {
        R::call(&mut client, n, n).unwrap();
    }
    for (request, number) in take_all::<R>(&mut server) {
        assert!(R::reply(&mut server, request, number));
    }
    drop(client);
    R::serve_poll(&mut server);
    let mut next = connect::<R>(&scratch);
    for n in 10..14 {
        R::call(&mut next, n, n).unwrap();
    }
    assert_eq!(ends::<R>(&mut next), []);
    assert_eq!(take_all::<R>(&mut server).iter().map(|(_, number)| *number).collect::<Vec<_>>(), [10, 11, 12, 13]);
}

pub fn seats_are_reused_without_end<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 2, 2);
    for n in 0..20_000 {
        R::serve_poll(&mut server);
        let mut client = connect::<R>(&scratch);
        R::call(&mut client, n, n).unwrap();
        // Some leave with a call announced, some with one in work.
        if n % 3 > 0 {
            let (request, number) = take_all::<R>(&mut server).remove(0);
            assert_eq!(number, n);
            if n % 3 == 1 {
                assert!(R::reply(&mut server, request, n));
                assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
            }
        }
    }
}

pub fn threads_lose_and_repeat_nothing<R: Rpc>(name: &str) {
    const CLIENTS: usize = 4;
    const CALLS: u64 = 30_000;
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), CLIENTS, 8);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| call_until_done::<R>(connect::<R>(&scratch), CALLS))).collect();
        let start = Instant::now();
        while clients.iter().any(|client| !client.is_finished()) {
            assert!(start.elapsed() < 2 * PATIENCE, "stuck");
            let mut requests = take_all::<R>(&mut server);
            if requests.is_empty() {
                std::thread::yield_now();
            }
            // Youngest first.
            while let Some((request, number)) = requests.pop() {
                assert!(R::reply(&mut server, request, number + 1));
            }
        }
    });
}

fn call_until_done<R: Rpc>(mut client: R::Client, calls: u64) {
    let mut returned = vec![0u8; calls as usize];
    let (mut sent, mut received, start) = (0, 0, Instant::now());
    while received < calls {
        while sent < calls && R::call(&mut client, sent, sent).is_ok() {
            sent += 1;
        }
        let ended = ends::<R>(&mut client);
        for (user, outcome) in &ended {
            assert_eq!(*outcome, Ok(user + 1));
            returned[*user as usize] += 1;
            received += 1;
        }
        if ended.is_empty() {
            std::thread::yield_now();
        }
        assert!(start.elapsed() < PATIENCE, "stuck at {received}");
    }
    assert!(returned.iter().all(|&n| n == 1));
}

/// The other side of the tests below. Run as a test, without a role, it has nothing to check.
pub fn helper_process<R: Rpc>(_: &str) {
    let Some((role, dir)) = support::role() else { return };
    match role.as_str() {
        // Answers even numbers only, until it is killed.
        "server" => {
            let mut server = R::create(&dir, 2, 8);
            say("ready");
            let mut odd = vec![];
            loop {
                let requests = take_all::<R>(&mut server);
                if requests.is_empty() {
                    std::thread::yield_now();
                }
                for (request, number) in requests {
                    if number % 2 == 0 {
                        assert!(R::reply(&mut server, request, number));
                    } else {
                        odd.push(request);
                    }
                }
            }
        }
        "caller" => {
            let mut client = R::connect(&dir).expect("there is a free seat");
            let mut number = 0;
            say("connected");
            loop {
                while R::call(&mut client, number, number).is_ok() {
                    number += 1;
                }
                if R::poll(&mut client, |_, _| {}).is_err() {
                    return;
                }
            }
        }
        "idle" => {
            let mut client = R::connect(&dir).expect("there is a free seat");
            R::call(&mut client, 1, 1).unwrap();
            say("called");
            next_word();
        }
        other => panic!("unknown role {other}"),
    }
}

pub fn calls_of_a_killed_server_end_once_and_its_successor_serves<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    for _ in 0..3 {
        let mut server = Helper::start("server", &scratch);
        server.hear();
        let mut client = connect::<R>(&scratch);
        let mut ended = vec![];
        for n in 0..8 {
            R::call(&mut client, n, n).unwrap();
        }
        wait_for("the server does not answer", || {
            R::poll(&mut client, |user, outcome| ended.push((user, outcome))).unwrap();
            ended.len() == 4
        });
        server.kill();
        wait_for("the death was not noticed", || {
            R::poll(&mut client, |user, outcome| ended.push((user, outcome))) == Err(SessionEnd::ServerGone)
        });
        ended.sort_by_key(|(user, _)| *user);
        let gone = Err(CallFailed::Ended(SessionEnd::ServerGone));
        assert_eq!(ended, (0..8).map(|n| (n, if n % 2 == 0 { Ok(n) } else { gone })).collect::<Vec<_>>());
        assert_eq!(R::call(&mut client, 7, 8), Err(Refused::Ended(7, 8, SessionEnd::ServerGone)));
    }
    assert_eq!(scratch.dir().sweep().unwrap(), 1);
    assert!(scratch.names().is_empty());
}

pub fn seat_of_a_killed_client_is_free_again<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 8);
    for _ in 0..5 {
        let mut client = Helper::start("idle", &scratch);
        assert_eq!(client.hear(), "called");
        assert!(R::connect(&scratch.dir()).is_none());
        let (late, _) = take_all::<R>(&mut server).remove(0);
        client.kill();
        let mut next = None;
        wait_for("the seat stays taken", || {
            R::serve_poll(&mut server);
            next = R::connect(&scratch.dir());
            next.is_some()
        });
        assert!(!R::reply(&mut server, late, 1));
        drop(next);
        R::serve_poll(&mut server);
    }
}

pub fn stopped_or_killed_client_stalls_nobody<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 3, 8);
    let mut good = connect::<R>(&scratch);
    let mut serve = |rounds: u64| {
        for n in 0..rounds {
            R::call(&mut good, n, n).unwrap();
            let mut ended = vec![];
            wait_for("a good client is stalled", || {
                for (request, number) in take_all::<R>(&mut server) {
                    // A client that was killed may be known to be gone.
                    R::reply(&mut server, request, number);
                }
                ended.extend(ends::<R>(&mut good));
                !ended.is_empty()
            });
            assert_eq!(ended, [(n, Ok(n))]);
        }
    };
    for round in 0..40 {
        let mut caller = Helper::start("caller", &scratch);
        caller.hear();
        serve(20 + round * 7);
        caller.signal(libc::SIGSTOP);
        serve(200);
        if round % 2 == 0 {
            caller.signal(libc::SIGCONT);
            serve(50);
        }
        caller.kill();
        serve(600);
    }
}

pub fn wait_ends_with_something_to_poll_for_or_with_its_time<R: Rpc>(name: &str) {
    const SHORT: Option<Duration> = Some(Duration::from_millis(3));
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 4);
    for timeout in [Some(Duration::ZERO), SHORT] {
        assert!(!R::serve_wait(&mut server, timeout) && !R::wait(&mut client, timeout));
    }
    for n in 0..100 {
        R::call(&mut client, n, n).unwrap();
        assert!(!R::wait(&mut client, Some(Duration::ZERO)), "a call is no reply");
        assert!(R::serve_wait(&mut server, None) && R::serve_wait(&mut server, None), "a wait takes nothing");
        R::serve_poll(&mut server);
        assert!(R::serve_wait(&mut server, None), "polled is not received");
        let (request, number) = R::recv(&mut server).unwrap();
        assert_eq!(number, n);
        assert!(!R::serve_wait(&mut server, Some(Duration::ZERO)), "received is nothing to poll for");
        assert!(R::reply(&mut server, request, n));
        assert!(R::wait(&mut client, None) && R::wait(&mut client, None));
        assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
        assert!(!R::wait(&mut client, Some(Duration::ZERO)));
    }
}

/// A sleeper looks by itself ten times a second; so many wake-ups that were lost would exceed everybody's patience.
pub fn sleepers_are_woken_by_every_request_and_every_reply<R: Rpc>(name: &str) {
    const CLIENTS: u64 = 2;
    const CALLS: u64 = 3000;
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), CLIENTS as usize, 4);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let (mut client, start) = (connect::<R>(&scratch), Instant::now());
                for n in 0..CALLS {
                    R::call(&mut client, n, n).unwrap();
                    let mut ended = vec![];
                    while ended.is_empty() {
                        assert!(R::wait(&mut client, Some(PATIENCE)) && start.elapsed() < PATIENCE, "not woken");
                        ended = ends::<R>(&mut client);
                    }
                    assert_eq!(ended, [(n, Ok(n + 1))]);
                }
            });
        }
        let (mut served, start) = (0, Instant::now());
        while served < CLIENTS * CALLS {
            assert!(R::serve_wait(&mut server, Some(PATIENCE)) && start.elapsed() < PATIENCE, "not woken");
            for (request, number) in take_all::<R>(&mut server) {
                assert!(R::reply(&mut server, request, number + 1));
                served += 1;
            }
        }
    });
}

/// Who spins or yields switches to no other thread by its own will, and who sleeps for short does so more often.
pub fn idle_sleepers_hardly_run<R: Rpc>(name: &str) {
    const LONG: Option<Duration> = Some(Duration::from_millis(500));
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 4);
    // Both are warm: the server has polled this client's lane.
    R::call(&mut client, 1, 1).unwrap();
    let (request, _) = take_all::<R>(&mut server).remove(0);
    assert!(R::reply(&mut server, request, 1));
    assert_eq!(ends::<R>(&mut client).len(), 1);
    let before = support::voluntary_switches();
    assert!(!R::serve_wait(&mut server, LONG));
    let between = support::voluntary_switches();
    assert!(!R::wait(&mut client, LONG));
    let after = support::voluntary_switches();
    for switches in [between - before, after - between] {
        assert!((1..=40).contains(&switches), "{switches} context switches");
    }
}

pub fn sleeping_client_learns_of_its_servers_end<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = Helper::start("server", &scratch);
    server.hear();
    let mut client = connect::<R>(&scratch);
    R::call(&mut client, 1, 1).unwrap();
    assert!(!R::wait(&mut client, Some(Duration::from_millis(250))), "odd numbers are not answered");
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            assert!(R::wait(&mut client, Some(PATIENCE)), "the death was not noticed");
            let mut ended = vec![];
            let polled = R::poll(&mut client, |user, outcome| ended.push((user, outcome)));
            (polled, ended, R::wait(&mut client, None))
        });
        server.kill();
        let gone = Err(CallFailed::Ended(SessionEnd::ServerGone));
        assert_eq!(watch.join().unwrap(), (Err(SessionEnd::ServerGone), vec![(1, gone)], true));
    });
    // One that closes in good order.
    let (server, mut client) = pair::<R>(&scratch, 1, 4);
    drop(server);
    assert!(R::wait(&mut client, None));
    assert_eq!(R::poll(&mut client, |_, _| {}), Err(SessionEnd::ServerGone));
}

pub fn sleeping_server_frees_the_seat_of_a_killed_client<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 8);
    let mut client = Helper::start("idle", &scratch);
    assert_eq!(client.hear(), "called");
    assert_eq!(take_all::<R>(&mut server).len(), 1);
    client.kill();
    wait_for("the seat stays taken", || {
        R::serve_wait(&mut server, Some(Duration::from_millis(50)));
        R::connect(&scratch.dir()).is_some()
    });
}

/// It looks by itself ten times a second; so many clients that wake nobody would exceed everybody's patience.
pub fn sleeping_server_frees_the_seat_of_a_client_that_leaves<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 4);
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| {
            let mut last = None;
            for _ in 0..1000 {
                last = None;
                wait_for("the seat stays taken", || {
                    last = R::connect(&scratch.dir());
                    last.is_some()
                });
            }
            R::call(last.as_mut().unwrap(), 7, 7).unwrap();
            last
        });
        assert!(R::serve_wait(&mut server, Some(2 * PATIENCE)));
        let _last = clients.join().unwrap();
        assert_eq!(take_all::<R>(&mut server)[0].1, 7);
    });
}

pub fn garbage_in_the_words_of_sleepers_stalls_nobody<R: Rpc>(name: &str) {
    // Each may take two slices.
    const CALLS: u64 = 8;
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    let (region, seats) = R::seats(&scratch.dir());
    let words = [seats + 8, seats + 12, seats + 64 + 16, seats + 64 + 20];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(6);
            while !done.load(Ordering::Acquire) {
                for word in words {
                    // SAFETY: in bounds, and all access to these words is atomic.
                    let word = unsafe { region.view().at::<AtomicU32>(word).unwrap().as_ref() };
                    word.store(if random.bool() { 0 } else { random.u32(..) }, Ordering::Relaxed);
                }
                std::thread::yield_now();
            }
        });
        let caller = scope.spawn(|| {
            for n in 0..CALLS {
                R::call(&mut client, n, n).unwrap();
                assert!(R::wait(&mut client, Some(PATIENCE)), "the client was not woken");
                assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
            }
        });
        for _ in 0..CALLS {
            let is_woken = R::serve_wait(&mut server, Some(PATIENCE));
            for (request, number) in take_all::<R>(&mut server) {
                assert!(is_woken && R::reply(&mut server, request, number));
            }
        }
        let outcome = caller.join();
        done.store(true, Ordering::Release);
        outcome.unwrap();
    });
}

/// Makes the suite's tests for an implementation of [`Rpc`].
macro_rules! conformance {
    ($rpc:ty, $($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                conformance::$test::<$rpc>(concat!(env!("CARGO_CRATE_NAME"), "-", stringify!($test)));
            }
        )*
    };
    ($rpc:ty) => {
        conformance! {
            $rpc,
            helper_process
            full_queue_gives_everything_back_and_a_reply_makes_room
            rejected_request_ends_its_call
            replies_in_any_order_at_full_depth_bring_every_token_back_once
            calls_of_a_server_that_ends_end_once_after_what_it_answered
            late_answer_to_a_former_client_reaches_nobody
            answer_that_a_former_client_did_not_take_reaches_nobody
            seats_are_reused_without_end
            threads_lose_and_repeat_nothing
            calls_of_a_killed_server_end_once_and_its_successor_serves
            seat_of_a_killed_client_is_free_again
            stopped_or_killed_client_stalls_nobody
            wait_ends_with_something_to_poll_for_or_with_its_time
            sleepers_are_woken_by_every_request_and_every_reply
            idle_sleepers_hardly_run
            sleeping_client_learns_of_its_servers_end
            sleeping_server_frees_the_seat_of_a_killed_client
            sleeping_server_frees_the_seat_of_a_client_that_leaves
            garbage_in_the_words_of_sleepers_stalls_nobody
        }
    };
}
