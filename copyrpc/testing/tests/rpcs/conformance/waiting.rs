//! The part of the suite that sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use copyrpc_calls::{CallFailure, SessionEnd};
use copyrpc_shm::ready::{ARMED, HOT};
use copyrpc_shm::sync::AtomicU32;

use super::{answer_all, connect, ends, pair, take_all};
use crate::rpc::Rpc;
use crate::start;
use copyrpc_testing::helpers::{self, PATIENCE, Scratch, wait_for_some};

pub(crate) fn wait_ends_with_something_to_poll_for_or_with_its_time<R: Rpc>(name: &str) {
    const SHORT: Option<Duration> = Some(Duration::from_millis(3));
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 4);
    for timeout in [Some(Duration::ZERO), SHORT] {
        assert!(!R::serve_wait(&mut server, timeout) && !R::wait(&mut client, timeout));
    }
    for n in 0..100 {
        R::call(&mut client, n, n).unwrap();
        assert!(
            !R::wait(&mut client, Some(Duration::ZERO)),
            "a call is no reply"
        );
        assert!(
            R::serve_wait(&mut server, None) && R::serve_wait(&mut server, None),
            "a wait takes nothing"
        );
        R::serve_poll(&mut server);
        assert!(R::serve_wait(&mut server, None), "polled is not received");
        let (request, number) = R::recv(&mut server).unwrap();
        assert_eq!(number, n);
        assert!(
            !R::serve_wait(&mut server, Some(Duration::ZERO)),
            "received is nothing to poll for"
        );
        assert!(R::reply(&mut server, request, n));
        assert!(R::wait(&mut client, None) && R::wait(&mut client, None));
        assert_eq!(ends::<R>(&mut client), [(n, Ok(n))]);
        assert!(!R::wait(&mut client, Some(Duration::ZERO)));
    }
}

/// A sleeper checks ten times a second without a wake-up; if this number of wake-ups were lost, the
/// test would exceed its time.
pub(crate) fn sleepers_are_woken_by_every_request_and_every_reply<R: Rpc>(name: &str) {
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
                        assert!(
                            R::wait(&mut client, Some(PATIENCE)) && start.elapsed() < PATIENCE,
                            "not woken"
                        );
                        ended = ends::<R>(&mut client);
                    }
                    assert_eq!(ended, [(n, Ok(n + 1))]);
                }
            });
        }
        let (mut served, start) = (0, Instant::now());
        while served < CLIENTS * CALLS {
            assert!(
                R::serve_wait(&mut server, Some(PATIENCE)) && start.elapsed() < PATIENCE,
                "not woken"
            );
            served += answer_all::<R>(&mut server, |number| number + 1);
        }
    });
}

/// A sleeping thread has voluntary context switches, and few: spinning and yielding would not
/// switch, and short sleeps would switch more often.
pub(crate) fn idle_sleepers_hardly_run<R: Rpc>(name: &str) {
    const LONG: Option<Duration> = Some(Duration::from_millis(500));
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 2, 4);
    // Both are warm: the server has polled this client's lane.
    R::call(&mut client, 1, 1).unwrap();
    let (request, _) = take_all::<R>(&mut server).remove(0);
    assert!(R::reply(&mut server, request, 1));
    assert_eq!(ends::<R>(&mut client).len(), 1);
    let before = helpers::voluntary_switches();
    assert!(!R::serve_wait(&mut server, LONG));
    let between = helpers::voluntary_switches();
    assert!(!R::wait(&mut client, LONG));
    let after = helpers::voluntary_switches();
    for switches in [between - before, after - between] {
        assert!((1..=40).contains(&switches), "{switches} context switches");
    }
}

pub(crate) fn sleeping_client_learns_of_its_servers_end<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = start::<R>("conformance: server", &scratch);
    server.hear();
    let mut client = connect::<R>(&scratch);
    R::call(&mut client, 1, 1).unwrap();
    assert!(
        !R::wait(&mut client, Some(Duration::from_millis(250))),
        "odd numbers are not answered"
    );
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            assert!(
                R::wait(&mut client, Some(PATIENCE)),
                "the death was not noticed"
            );
            let mut ended = vec![];
            let polled = R::poll(&mut client, |user, outcome| ended.push((user, outcome)));
            (polled, ended, R::wait(&mut client, None))
        });
        server.kill();
        let gone = Err(CallFailure::Closed(SessionEnd::PeerGone));
        assert_eq!(
            watch.join().unwrap(),
            (Err(SessionEnd::PeerGone), vec![(1, gone)], true)
        );
    });
    // A client that closes in good order.
    let (server, mut client) = pair::<R>(&scratch, 1, 4);
    drop(server);
    assert!(R::wait(&mut client, None));
    assert_eq!(R::poll(&mut client, |_, _| {}), Err(SessionEnd::PeerGone));
}

pub(crate) fn sleeping_server_frees_the_entry_of_a_killed_client<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 8);
    let mut client = start::<R>("conformance: idle", &scratch);
    assert_eq!(client.hear(), "called");
    assert_eq!(take_all::<R>(&mut server).len(), 1);
    client.kill();
    let mut next = wait_for_some("the entry stays taken", || {
        R::serve_wait(&mut server, Some(Duration::from_millis(50)));
        R::connect(&scratch.dir())
    });
    // The first call of the new client has the tag of the dead client's call, which was not
    // answered.
    R::call(&mut next, 2, 2).unwrap();
    let (request, number) = take_all::<R>(&mut server).remove(0);
    assert!(number == 2 && R::reply(&mut server, request, 3));
    assert_eq!(ends::<R>(&mut next), [(2, Ok(3))]);
}

/// The server checks by itself ten times a second: 1,000 clients that do not wake it would take
/// longer than the test waits.
pub(crate) fn sleeping_server_frees_the_entry_of_a_client_that_leaves<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let mut server = R::create(&scratch.dir(), 1, 4);
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| {
            let connect = || wait_for_some("the entry stays taken", || R::connect(&scratch.dir()));
            (1..1000).for_each(|_| drop(connect()));
            let mut last = connect();
            R::call(&mut last, 7, 7).unwrap();
            last
        });
        assert!(R::serve_wait(&mut server, Some(2 * PATIENCE)));
        let _last = clients.join().unwrap();
        assert_eq!(take_all::<R>(&mut server)[0].1, 7);
    });
}

pub(crate) fn garbage_in_the_words_of_sleepers_stalls_nobody<R: Rpc>(name: &str) {
    // Each call may take two slices, so there are few calls.
    const CALLS: u64 = 8;
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    let (region, entries) = R::entries(&scratch.dir(), 4);
    let words = [
        entries + 8,
        entries + 12,
        entries + 64 + 16,
        entries + 64 + 20,
    ];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(6);
            while !done.load(Ordering::Acquire) {
                for word in words {
                    // SAFETY: in bounds, and all access to these words is atomic.
                    let word = unsafe { region.view().at::<AtomicU32>(word).unwrap().as_ref() };
                    word.store(
                        if random.bool() { 0 } else { random.u32(..) },
                        Ordering::Relaxed,
                    );
                }
                std::thread::yield_now();
            }
        });
        let caller = scope.spawn(|| {
            for n in 0..CALLS {
                R::call(&mut client, n, n).unwrap();
                assert!(
                    R::wait(&mut client, Some(PATIENCE)),
                    "the client was not woken"
                );
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

/// The server then polls the lane, and finds nothing in it.
pub(crate) fn flag_that_is_down_over_an_empty_lane_ends_no_wait<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (mut server, mut client) = pair::<R>(&scratch, 1, 4);
    let (region, entries) = R::entries(&scratch.dir(), 4);
    // SAFETY: in bounds, and all access to this word is atomic.
    let armed = unsafe {
        region
            .view()
            .at::<AtomicU32>(entries + 64 + 8)
            .unwrap()
            .as_ref()
    };
    assert_eq!(armed.load(Ordering::Relaxed), ARMED);
    armed.store(HOT, Ordering::Relaxed);
    // The wait is longer than a slice.
    assert!(!R::serve_wait(
        &mut server,
        Some(Duration::from_millis(150))
    ));
    R::call(&mut client, 1, 1).unwrap();
    assert!(R::serve_wait(&mut server, Some(PATIENCE)));
    assert_eq!(take_all::<R>(&mut server)[0].1, 1);
}
