//! Properties of a network of nodes. Loops are bounded by counts of polls, so that nothing hangs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flux::{CallError, CallFailure, Config, Node, OptionError, SessionEnd, network};

const PATIENCE: Duration = Duration::from_secs(60);

fn pair(config: Config) -> (Node<u64, u64>, Node<u64, u64>) {
    let mut nodes = network(2, config).unwrap();
    let b = nodes.pop().unwrap();
    (nodes.pop().unwrap(), b)
}

fn no_reply(_: u64, _: Result<u64, CallFailure>) {
    panic!("nobody asked");
}

#[test]
fn sizes_out_of_range_are_named() {
    let make = |nodes, capacity, in_flight| {
        network::<u8, ()>(
            nodes,
            Config {
                capacity,
                in_flight,
            },
        )
        .map(drop)
    };
    let refused = |error: OptionError| (error.option, error.value);
    assert_eq!(make(0, 1024, 256).map_err(refused), Err(("nodes", 0)));
    assert_eq!(make(257, 1024, 256).map_err(refused), Err(("nodes", 257)));
    for in_flight in [0, usize::MAX] {
        assert_eq!(
            make(2, 1024, in_flight).map_err(refused),
            Err(("in_flight", in_flight as u64))
        );
    }
    for (capacity, in_flight) in [
        (0, 1),
        (1000, 1),
        (512, 256),
        (2, 1),
        (1 << 19, 1),
        (1 << 40, 1),
    ] {
        assert_eq!(
            make(2, capacity, in_flight).map_err(refused),
            Err(("capacity", capacity as u64))
        );
    }
    assert_eq!(make(1, 4, 1), Ok(()));
}

#[test]
fn full_gives_everything_back_and_is_per_node() {
    let mut nodes = network::<u64, u64>(
        3,
        Config {
            capacity: 16,
            in_flight: 4,
        },
    )
    .unwrap();
    for n in 0..4 {
        nodes[0].call(1, n, n).unwrap();
    }
    match nodes[0].call(1, 77, 88) {
        Err(CallError::Full {
            request: 77,
            user_data: 88,
            depth: 4,
        }) => {}
        other => panic!("{other:?}"),
    }
    nodes[0].call(2, 5, 5).unwrap();
    assert!(matches!(
        nodes[0].call(0, 1, 1),
        Err(CallError::NoSuchNode { last: 2, .. })
    ));
    for to in [3, usize::MAX] {
        assert!(matches!(
            nodes[0].call(to, 1, 1),
            Err(CallError::NoSuchNode { .. })
        ));
    }
    // Taking the calls makes no room, answering does.
    assert_eq!(nodes[1].poll(no_reply), 4);
    assert_eq!(nodes[0].poll(no_reply), 0);
    assert!(nodes[0].call(1, 1, 1).is_err());
    let (_, token, _) = nodes[1].recv().unwrap();
    nodes[1].reply(token, 0).unwrap();
    assert_eq!(nodes[0].poll(|_, _| {}), 1);
    nodes[0].call(1, 1, 1).unwrap();
}

#[test]
fn reply_is_visible_without_further_calls() {
    let (mut a, mut b) = pair(Config::default());
    for round in 0..2000 {
        a.call(1, round, round).unwrap();
        b.poll(no_reply);
        let (from, token, payload) = b.recv().unwrap();
        assert_eq!((from, payload), (0, round));
        b.reply(token, payload * 2).unwrap();
        let mut got = None;
        a.poll(|user, reply| got = Some((user, reply)));
        assert_eq!(got, Some((round, Ok(round * 2))));
    }
}

#[test]
fn token_is_good_at_the_node_that_received_the_call_only() {
    let mut nodes = network::<u64, u64>(3, Config::default()).unwrap();
    let mut c = nodes.pop().unwrap();
    let mut b = nodes.pop().unwrap();
    let mut a = nodes.pop().unwrap();
    let (_, mut of_another_network) = pair(Config::default());
    a.call(1, 1, 1).unwrap();
    b.poll(no_reply);
    let (_, token, _) = b.recv().unwrap();
    let refused = c.reply(token, 10).unwrap_err();
    assert_eq!(refused.payload, 10);
    let refused = of_another_network.reply(refused.token, 11).unwrap_err();
    assert_eq!((refused.payload, a.poll(no_reply)), (11, 0));
    b.reply(refused.token, 12).unwrap();
    assert_eq!(a.poll(|_, reply| assert_eq!(reply, Ok(12))), 1);
    assert_eq!(
        (b.poll(no_reply), a.poll(no_reply)),
        (0, 0),
        "an answered call was rejected besides"
    );
}

#[test]
fn calls_whose_tokens_are_dropped_end_as_dropped_and_make_room() {
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    // More than one lap of the lane; in some laps the node has just polled, in others it has slept.
    for round in 0..50 {
        for n in 0..4 {
            a.call(1, n, n).unwrap();
        }
        assert!(a.call(1, 4, 4).is_err());
        b.poll(no_reply);
        for n in 0..4 {
            let (_, token, payload) = b.recv().unwrap();
            if n % 2 == 0 {
                drop(token);
            } else {
                b.reply(token, payload).unwrap();
            }
        }
        assert!(
            b.wait(Some(PATIENCE)),
            "a rejection is something to poll for"
        );
        assert_eq!(b.poll(no_reply), 2);
        let mut ended = vec![];
        a.poll(|user, reply| ended.push((user, reply)));
        ended.sort_unstable_by_key(|(user, _)| *user);
        let dropped = Err(CallFailure::Dropped);
        assert_eq!(
            ended,
            [(0, dropped), (1, Ok(1)), (2, dropped), (3, Ok(3))],
            "round {round}"
        );
        assert_eq!(
            (b.poll(no_reply), a.poll(no_reply), a.in_flight()),
            (0, 0, 0)
        );
        if round % 2 == 0 {
            assert!(!b.wait(Some(Duration::from_millis(1))));
        }
    }
}

/// The node sleeps without a timeout, so a lost wake-up is a hang, which the main thread detects.
#[test]
fn token_dropped_by_another_thread_wakes_the_node_that_rejects_the_call() {
    const CALLS: u64 = 3000;
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    let (give, take) = std::sync::mpsc::channel();
    let dropper = std::thread::spawn(move || take.into_iter().for_each(drop));
    let answerer = std::thread::spawn(move || {
        let (mut received, mut rejected) = (0, 0);
        while rejected < CALLS {
            assert!(b.wait(None));
            let before = received;
            let taken = b.poll(no_reply) as u64;
            while let Some((_, token, _)) = b.recv() {
                give.send(token).unwrap();
                received += 1;
            }
            rejected += taken - (received - before);
        }
    });
    let caller = std::thread::spawn(move || {
        let (mut sent, mut ended) = (0, 0);
        while ended < CALLS {
            while sent < CALLS && a.call(1, sent, sent).is_ok() {
                sent += 1;
            }
            assert!(a.wait(None));
            a.poll(|_, reply| {
                assert_eq!(reply, Err(CallFailure::Dropped));
                ended += 1;
            });
        }
    });
    let (threads, start) = ([dropper, answerer, caller], Instant::now());
    while !threads.iter().all(|thread| thread.is_finished()) {
        assert!(start.elapsed() < PATIENCE, "a node was not woken");
        std::thread::sleep(Duration::from_millis(1));
    }
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn token_outlives_its_node_and_its_network() {
    let (mut a, mut b) = pair(Config::default());
    a.call(1, 1, 1).unwrap();
    b.poll(no_reply);
    let (_, token, _) = b.recv().unwrap();
    drop(b);
    drop(a);
    drop(token);
}

#[test]
fn replies_in_any_order_at_full_depth_bring_every_token_back_once() {
    let seed = 0xf1c5_0001;
    let mut random = fastrand::Rng::with_seed(seed);
    // The smallest lane for that depth, so that M2 is exercised at its limit.
    let (mut a, mut b) = pair(Config {
        capacity: 64,
        in_flight: 31,
    });
    const CALLS: u64 = 300_000;
    let mut returned = vec![0u8; CALLS as usize];
    let mut sent = 0;
    let mut received = 0;
    let mut held = vec![];
    let mut empty = 0;
    while received < CALLS {
        while sent < CALLS && a.call(1, sent, sent).is_ok() {
            sent += 1;
        }
        b.poll(no_reply);
        held.extend(std::iter::from_fn(|| b.recv()));
        for _ in 0..random.usize(..=held.len()) {
            let (_, token, payload) = held.swap_remove(random.usize(..held.len()));
            b.reply(token, !payload).unwrap();
        }
        let taken = a.poll(|user, reply| {
            assert_eq!(reply, Ok(!user), "seed {seed:#x}");
            returned[user as usize] += 1;
            received += 1;
        });
        empty = if taken == 0 { empty + 1 } else { 0 };
        assert!(empty < 1000, "seed {seed:#x}: stuck at {received}");
    }
    assert!(returned.iter().all(|&n| n == 1));
}

#[test]
fn calls_to_a_dropped_node_end_once_after_what_it_answered() {
    let (mut a, mut b) = pair(Config::default());
    for n in 0..10 {
        a.call(1, n, n).unwrap();
    }
    b.poll(no_reply);
    for _ in 0..3 {
        let (_, token, payload) = b.recv().unwrap();
        b.reply(token, payload).unwrap();
    }
    drop(b);
    let mut ended = vec![];
    for _ in 0..1000 {
        a.poll(|user, reply| ended.push((user, reply)));
    }
    let answered = (0..3).map(|n| (n, Ok(n)));
    let failed = (3..10).map(|n| (n, Err(CallFailure::Closed(SessionEnd::PeerGone))));
    assert_eq!(ended, answered.chain(failed).collect::<Vec<_>>());
    assert_eq!(a.in_flight(), 0);
    assert!(matches!(
        a.call(1, 7, 8),
        Err(CallError::Closed {
            request: 7,
            user_data: 8,
            reason: SessionEnd::PeerGone
        })
    ));
}

#[test]
fn nodes_that_remain_go_on_when_one_is_dropped() {
    let mut nodes = network::<u64, u64>(3, Config::default()).unwrap();
    let mut c = nodes.pop().unwrap();
    let b = nodes.pop().unwrap();
    let mut a = nodes.pop().unwrap();
    a.call(1, 1, 1).unwrap();
    c.call(1, 2, 2).unwrap();
    drop(b);
    a.call(2, 3, 3).unwrap();
    c.poll(no_reply);
    let (from, token, payload) = c.recv().unwrap();
    assert_eq!((from, payload), (0, 3));
    c.reply(token, 4).unwrap();
    let mut ended = [vec![], vec![]];
    for _ in 0..1000 {
        a.poll(|user, reply| ended[0].push((user, reply)));
        c.poll(|user, reply| ended[1].push((user, reply)));
    }
    let gone = Err(CallFailure::Closed(SessionEnd::PeerGone));
    assert_eq!(ended, [vec![(3, Ok(4)), (1, gone)], vec![(2, gone)]]);
    a.call(2, 5, 5).unwrap();
}

#[test]
fn answer_to_a_dropped_node_is_no_error() {
    let (mut a, mut b) = pair(Config::default());
    a.call(1, 1, 1).unwrap();
    b.poll(no_reply);
    let (_, token, _) = b.recv().unwrap();
    drop(a);
    b.reply(token, 2).unwrap();
}

#[test]
fn busy_nodes_are_served_in_turn() {
    let mut nodes = network::<u64, u64>(17, Config::default()).unwrap();
    let mut server = nodes.remove(0);
    for node in &mut nodes {
        for n in 0..200 {
            node.call(0, n, n).unwrap();
        }
    }
    for _ in 0..20 {
        server.poll(no_reply);
    }
    let mut served = [0; 17];
    while let Some((from, ..)) = server.recv() {
        served[from] += 1;
    }
    assert!(served[1..].iter().all(|&n| n == 160), "{served:?}");
}

#[test]
fn all_to_all_between_threads_loses_and_repeats_nothing() {
    const NODES: usize = 5;
    const CALLS: u64 = 500_000;
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for mut node in network::<u64, (usize, u64)>(
            NODES,
            Config {
                capacity: 256,
                in_flight: 64,
            },
        )
        .unwrap()
        {
            let finished = &finished;
            scope.spawn(move || {
                let me = node.index();
                let mut random = fastrand::Rng::with_seed(me as u64);
                let mut returned = vec![vec![0u8; CALLS as usize]; NODES];
                let mut sent = [0; NODES];
                let mut received = 0;
                let mut held = vec![];
                let mut progress = Instant::now();
                while finished.load(Ordering::Acquire) < NODES {
                    for to in (0..NODES).filter(|&to| to != me) {
                        while sent[to] < CALLS
                            && node
                                .call(to, (me as u64) << 32 | sent[to], (to, sent[to]))
                                .is_ok()
                        {
                            sent[to] += 1;
                        }
                    }
                    let before = received;
                    let taken = node.poll(|(to, n), reply| {
                        assert_eq!(reply, Ok(((me as u64) << 32 | n) + to as u64));
                        returned[to][n as usize] += 1;
                        received += 1;
                    });
                    held.extend(std::iter::from_fn(|| node.recv()));
                    // Random calls are answered, in random order; the other calls stay unanswered
                    // for now.
                    for _ in 0..random.usize(..=held.len()) {
                        let (from, token, payload) = held.swap_remove(random.usize(..held.len()));
                        assert_eq!(payload >> 32, from as u64);
                        node.reply(token, payload + me as u64).unwrap();
                    }
                    if before < received {
                        progress = Instant::now();
                        if received == CALLS * (NODES as u64 - 1) {
                            finished.fetch_add(1, Ordering::Release);
                        }
                    }
                    if taken == 0 {
                        std::thread::yield_now();
                    }
                    assert!(progress.elapsed() < PATIENCE, "stuck");
                }
                for (to, returned) in returned.iter().enumerate() {
                    assert!(
                        returned.iter().all(|&n| n == u8::from(to != me)),
                        "a call of node {me} to {to} is lost or repeated"
                    );
                }
            });
        }
    });
    println!(
        "{} calls answered in any order, 0 lost, 0 repeated",
        CALLS * (NODES * (NODES - 1)) as u64
    );
}

#[test]
fn wait_ends_with_something_to_poll_for_or_with_its_time() {
    let (mut a, mut b) = pair(Config::default());
    for timeout in [Duration::ZERO, Duration::from_millis(3)] {
        assert!(!a.wait(Some(timeout)) && !b.wait(Some(timeout)));
    }
    for n in 0..100 {
        a.call(1, n, n).unwrap();
        assert!(!a.wait(Some(Duration::ZERO)), "a call is no reply");
        assert!(b.wait(None) && b.wait(None), "a wait takes nothing");
        b.poll(no_reply);
        assert!(b.wait(None), "polled is not received");
        let (_, token, _) = b.recv().unwrap();
        assert!(
            !b.wait(Some(Duration::ZERO)),
            "received is nothing to poll for"
        );
        b.reply(token, n).unwrap();
        assert!(a.wait(None));
        assert_eq!(
            a.poll(|user, reply| assert_eq!((user, reply), (n, Ok(n)))),
            1
        );
    }
}

/// Here no node polls without a wake-up, so a lost wake-up is a hang, which the main thread
/// detects.
#[test]
fn sleepers_are_woken_by_every_call_and_every_reply() {
    const NODES: usize = 3;
    const CALLS: u64 = 3000;
    let threads: Vec<_> = network::<u64, u64>(
        NODES,
        Config {
            capacity: 16,
            in_flight: 4,
        },
    )
    .unwrap()
    .into_iter()
    .map(|mut node| {
        std::thread::spawn(move || {
            let next = (node.index() + 1) % NODES;
            let mut sent = 0;
            let mut received = 0;
            let mut served = 0;
            while received < CALLS || served < CALLS {
                while sent < CALLS && node.call(next, sent, sent).is_ok() {
                    sent += 1;
                }
                assert!(node.wait(None));
                node.poll(|user, reply| {
                    assert_eq!(reply, Ok(user + 1));
                    received += 1;
                });
                while let Some((_, token, payload)) = node.recv() {
                    node.reply(token, payload + 1).unwrap();
                    served += 1;
                }
            }
        })
    })
    .collect();
    let start = Instant::now();
    while !threads.iter().all(|thread| thread.is_finished()) {
        assert!(start.elapsed() < PATIENCE, "a node was not woken");
        std::thread::sleep(Duration::from_millis(1));
    }
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn sleeper_learns_of_the_end_of_a_node_it_called_and_of_no_other() {
    let mut nodes = network::<u64, u64>(3, Config::default()).unwrap();
    let c = nodes.pop().unwrap();
    let b = nodes.pop().unwrap();
    let mut a = nodes.pop().unwrap();
    a.call(1, 1, 1).unwrap();
    drop(c);
    assert!(!a.wait(Some(Duration::from_millis(1))));
    let sleeper = std::thread::spawn(move || {
        assert!(a.wait(None));
        let mut ended = vec![];
        let taken = a.poll(|user, reply| ended.push((user, reply)));
        (taken, ended, a.wait(Some(Duration::ZERO)))
    });
    // Most likely the sleeper is asleep after this time.
    std::thread::sleep(Duration::from_millis(20));
    drop(b);
    let start = Instant::now();
    while !sleeper.is_finished() {
        assert!(start.elapsed() < PATIENCE, "not woken");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(
        sleeper.join().unwrap(),
        (
            1,
            vec![(1, Err(CallFailure::Closed(SessionEnd::PeerGone)))],
            false
        )
    );
}

/// A sleeping node hardly runs: spinning or yielding would not switch to another thread by itself.
#[test]
fn idle_sleeper_hardly_runs() {
    let (mut a, mut b) = pair(Config::default());
    a.call(1, 1, 1).unwrap();
    b.poll(no_reply);
    let _unanswered = b.recv().unwrap();
    let before = voluntary_switches();
    assert!(!b.wait(Some(Duration::from_millis(300))));
    let switches = voluntary_switches() - before;
    assert!((1..=20).contains(&switches), "{switches} context switches");
}

fn voluntary_switches() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one `rusage` into the buffer, and zeroed bytes are one too.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    usage.ru_nvcsw
}

#[test]
fn calls_without_a_reply_end_in_time_and_late_replies_reach_no_call() {
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    for round in 0..50 {
        let start = Instant::now();
        a.call_within(1, 1, round, Duration::from_millis(2))
            .unwrap();
        a.call_within(1, 2, 100, PATIENCE * 60).unwrap();
        a.call(1, 3, 200).unwrap();
        let mut ended = vec![];
        while ended.is_empty() {
            // A cancellation sends nothing to the other node, whether that node has taken the call
            // or not.
            if round % 2 == 0 {
                b.poll(no_reply);
            }
            assert!(
                a.wait(Some(PATIENCE)),
                "a deadline is something to poll for"
            );
            a.poll(|user, reply| ended.push((user, reply)));
        }
        assert!(start.elapsed() >= Duration::from_millis(2));
        assert_eq!(
            (ended, a.in_flight()),
            (vec![(round, Err(CallFailure::TimedOut))], 2)
        );
        b.poll(no_reply);
        while let Some((_, token, payload)) = b.recv() {
            b.reply(token, payload * 10).unwrap();
        }
        let mut ended = vec![];
        a.poll(|user, reply| ended.push((user, reply)));
        assert_eq!(ended, [(100, Ok(20)), (200, Ok(30))]);
    }
}

#[test]
fn cancelled_calls_keep_their_places_until_they_are_answered_and_a_dropped_node_ends_the_others() {
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    for _ in 0..20 {
        let calls: Vec<_> = (0..4).map(|n| a.call(1, n, n).unwrap()).collect();
        assert_eq!(
            (a.cancel(calls[1]), a.cancel(calls[1]), a.cancel(calls[2])),
            (Some(1), None, Some(2))
        );
        assert!(matches!(
            a.call(1, 9, 9),
            Err(CallError::Full { depth: 4, .. })
        ));
        b.poll(no_reply);
        // Of two calls whose callers do not wait, one is answered and the other is rejected.
        let tokens: Vec<_> = std::iter::from_fn(|| b.recv()).collect();
        for (_, token, payload) in tokens {
            if payload == 2 {
                drop(token)
            } else {
                b.reply(token, payload).unwrap()
            }
        }
        b.poll(no_reply);
        let mut ended = vec![];
        a.poll(|user, reply| ended.push((user, reply)));
        assert_eq!((ended, a.in_flight()), (vec![(0, Ok(0)), (3, Ok(3))], 0));
    }
    let cancelled = a.call(1, 1, 1).unwrap();
    a.call(1, 2, 2).unwrap();
    assert_eq!(a.cancel(cancelled), Some(1));
    drop(b);
    let mut ended = vec![];
    while ended.is_empty() {
        a.poll(|user, reply| ended.push((user, reply)));
    }
    assert_eq!(ended, [(2, Err(CallFailure::Closed(SessionEnd::PeerGone)))]);
    assert_eq!(a.in_flight(), 0);
}

#[test]
fn step_answers_the_calls_that_wait_and_those_it_takes_and_brings_replies() {
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    // More than one lap of both lanes, and calls both ways.
    for round in 0..20 {
        a.call(1, 1, round).unwrap();
        assert_eq!(b.poll(no_reply), 1);
        let held = (round % 2 == 0).then(|| b.recv().unwrap().1);
        a.call(1, 2, round).unwrap();
        b.call(0, 3, 100).unwrap();
        let mut asked = vec![];
        let mut serve = |from, payload: &u64| {
            asked.push((from, *payload));
            10 * payload
        };
        assert_eq!(b.step(no_reply, &mut serve), 1);
        let mut replies = vec![];
        assert_eq!(
            a.step(
                |user, reply| replies.push((user, reply.unwrap())),
                &mut serve
            ),
            2 + usize::from(held.is_none())
        );
        assert_eq!(
            b.step(
                |user, reply| assert_eq!((user, reply), (100, Ok(30))),
                &mut serve
            ),
            1
        );
        drop(held);
        b.poll(no_reply);
        a.poll(|user, reply| assert_eq!((user, reply), (round, Err(CallFailure::Dropped))));
        let (expected_asked, expected) = if round % 2 == 0 {
            (vec![(0, 2), (1, 3)], vec![20])
        } else {
            (vec![(0, 1), (0, 2), (1, 3)], vec![10, 20])
        };
        assert_eq!(
            (asked, replies),
            (
                expected_asked,
                expected.into_iter().map(|reply| (round, reply)).collect()
            )
        );
        assert_eq!((a.in_flight(), b.in_flight()), (0, 0));
    }
}

#[test]
fn a_handler_that_panics_rejects_its_call_and_the_others_are_answered_once() {
    let (mut a, mut b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    for waits in [false, true] {
        for payload in 0..4 {
            a.call(1, payload, payload).unwrap();
        }
        if waits {
            assert_eq!(b.poll(no_reply), 4);
        }
        let step = |b: &mut Node<u64, u64>| {
            b.step(no_reply, |_, payload| {
                if *payload == 1 {
                    panic!("a handler's own fault")
                } else {
                    10 * payload
                }
            });
        };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step(&mut b)));
        assert!(caught.is_err());
        step(&mut b);
        let mut ended = vec![];
        a.poll(|user, reply| ended.push((user, reply)));
        ended.sort_unstable_by_key(|(user, _)| *user);
        assert_eq!(
            ended,
            [
                (0, Ok(0)),
                (1, Err(CallFailure::Dropped)),
                (2, Ok(20)),
                (3, Ok(30))
            ],
            "{waits}"
        );
        assert_eq!((a.in_flight(), b.in_flight()), (0, 0));
    }
}

/// Each poll ends one call, by a callback that panics.
#[test]
fn a_callback_that_panics_takes_the_end_of_no_other_call_with_it() {
    const MOST_POLLS: usize = 1_000;
    let end_all = |node: &mut Node<u64, u64>, end: CallFailure| {
        let mut ended = vec![];
        for _ in 0..MOST_POLLS {
            let poll = || {
                node.poll(|user, outcome| {
                    ended.push((user, outcome));
                    panic!("a callback's own fault");
                })
            };
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll));
        }
        assert_eq!(ended, [0, 1, 2, 3].map(|user| (user, Err(end))));
        assert_eq!(node.in_flight(), 0);
    };
    let mut nodes: Vec<Node<u64, u64>> = network(
        3,
        Config {
            capacity: 16,
            in_flight: 4,
        },
    )
    .unwrap();
    for user in 0..4 {
        nodes[0]
            .call_within(1 + user as usize / 2, 7, user, Duration::ZERO)
            .unwrap();
    }
    end_all(&mut nodes[0], CallFailure::TimedOut);
    let (mut a, b) = pair(Config {
        capacity: 16,
        in_flight: 4,
    });
    for user in 0..4 {
        a.call(1, 7, user).unwrap();
    }
    drop(b);
    end_all(&mut a, CallFailure::Closed(SessionEnd::PeerGone));
}
