//! Properties of ipc: parameters, the mask, the server's rounds, and broken clients.

use std::time::{Duration, Instant};

use copyrpc_shm::region::{OpenError, Region};
use copyrpc_shm::sync::{AtomicU32, Ordering};
use copyrpc_testing::helpers::{PATIENCE, Scratch};
use ipc::{CallFailure, Client, OptionError, ReplyError, Server, SessionEnd, SetupError};

type S = Server<u64, u64>;
type C = Client<u64, u64, u64>;

fn pair(scratch: &Scratch, clients: usize, depth: usize) -> (S, C) {
    let server = S::bind_in(&scratch.dir(), "s", clients, depth, 1).unwrap();
    let client = C::connect_in(&scratch.dir(), "s", 1).unwrap();
    (server, client)
}

fn connect(scratch: &Scratch) -> C {
    C::connect_in(&scratch.dir(), "s", 1).unwrap()
}

#[test]
fn bad_parameters_and_mismatches_are_named() {
    let scratch = Scratch::new("ipc-bad");
    let dir = scratch.dir();
    assert!(matches!(
        S::bind_in(&dir, "s", 0, 8, 1),
        Err(SetupError::Option(OptionError {
            option: "max_clients",
            value: 0,
            ..
        }))
    ));
    assert!(matches!(
        S::bind_in(&dir, "s", 1, 7, 1),
        Err(SetupError::Option(OptionError {
            option: "depth",
            value: 7,
            ..
        }))
    ));
    assert!(matches!(
        C::connect_in(&dir, "s", 1),
        Err(SetupError::Region(OpenError::NotFound { .. }))
    ));
    let _server = S::bind_in(&dir, "s", 1, 8, 1).unwrap();
    assert!(matches!(
        S::bind_in(&dir, "s", 1, 8, 1),
        Err(SetupError::Create(
            copyrpc_shm::region::CreateError::Exists { .. }
        ))
    ));
    assert!(matches!(
        C::connect_in(&dir, "s", 2),
        Err(SetupError::Types { .. })
    ));
    assert!(matches!(
        Client::<u64, u32, ()>::connect_in(&dir, "s", 1),
        Err(SetupError::Types { .. })
    ));
    let _other = Region::create(&dir, "other", 9, 4096, |_| {}).unwrap();
    assert!(matches!(
        C::connect_in(&dir, "other", 1),
        Err(SetupError::Region(OpenError::Kind { .. }))
    ));
    let _client = connect(&scratch);
    assert!(matches!(
        C::connect_in(&dir, "s", 1),
        Err(SetupError::Full { max_clients: 1 })
    ));
}

#[test]
fn damaged_header_is_refused() {
    let scratch = Scratch::new("ipc-damaged");
    let (_server, _client) = pair(&scratch, 4, 8);
    let region = Region::open(
        &scratch.dir(),
        "s",
        u64::from_be_bytes(*b"ipcLANE\x02"),
        128,
    )
    .unwrap();
    let word = region.view().at::<u32>(20).unwrap();
    for (depth, truncated) in [(7, false), (1 << 15, true)] {
        // SAFETY: in bounds; no client connects meanwhile.
        unsafe { word.as_ptr().write_volatile(depth) };
        match C::connect_in(&scratch.dir(), "s", 1) {
            Err(SetupError::Damaged(OptionError {
                option: "depth",
                value: 7,
                ..
            })) if !truncated => {}
            Err(SetupError::Truncated { .. }) if truncated => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn skipped_client_waits_and_the_others_do_not() {
    let scratch = Scratch::new("ipc-skip");
    let (mut server, mut a) = pair(&scratch, 70, 4);
    let mut others: Vec<C> = (1..70).map(|_| connect(&scratch)).collect();
    let b = &mut others[64];
    a.call(1, 1).unwrap();
    b.call(2, 2).unwrap();
    let mut serve = |mask: [u64; 2], expected: u64| {
        assert_eq!(server.poll_with_skip(&mask), 1);
        let (token, request) = server.recv().unwrap();
        assert_eq!(request, expected);
        server.reply(token, 0).unwrap();
        // Skipping for long must not make the server forget the client, as it does with an idle one
        // after two milliseconds.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            assert_eq!(server.poll_with_skip(&mask), 0);
        }
    };
    // First without client 0, then without client 65, then with all clients.
    serve([1, 0], 2);
    assert_eq!(b.poll(|_, _| {}), Ok(1));
    b.call(3, 3).unwrap();
    serve([0, 1 << 1], 1);
    serve([0, 0], 3);
}

#[test]
fn busy_clients_are_served_in_turn_and_idle_ones_stay_connected() {
    let scratch = Scratch::new("ipc-fair");
    let (mut server, first) = pair(&scratch, 300, 64);
    let mut clients: Vec<C> = std::iter::once(first)
        .chain((1..300).map(|_| connect(&scratch)))
        .collect();
    for client in clients.iter_mut().take(16) {
        for n in 0..64 {
            client.call(n, n).unwrap();
        }
    }
    server.poll();
    server.poll();
    let mut served = [0; 300];
    while let Some((token, _)) = server.recv() {
        served[token.client()] += 1;
        // The request stays unanswered, and is not rejected.
        std::mem::forget(token);
    }
    assert!(served[..16].iter().all(|&n| n == 16), "{:?}", &served[..16]);
    clients[299].call(5, 5).unwrap();
    let seen = (0..100).any(|_| {
        server.poll();
        std::iter::from_fn(|| server.recv()).any(|(token, _)| token.client() == 299)
    });
    assert!(seen);
}

#[test]
fn client_that_breaks_the_protocol_loses_its_own_entry_only() {
    let scratch = Scratch::new("ipc-garbage");
    let (mut server, mut good) = pair(&scratch, 2, 4);
    let mut bad = connect(&scratch);
    let region = Region::open(
        &scratch.dir(),
        "s",
        u64::from_be_bytes(*b"ipcLANE\x02"),
        128,
    )
    .unwrap();
    // The request lane of client 1, four slots of one line each, after client 0's.
    let lane = 192 + 3 * 64 + 4 * 64;
    for n in 0..20u64 {
        // A message in each slot in turn, with tags of no call, although the earlier messages are
        // not answered.
        let slot = lane + 64 * (n as usize % 4);
        let words = region.view().array_at::<u64>(slot, 3).unwrap().as_ptr();
        // SAFETY: in bounds, and only this thread is running.
        unsafe {
            words.add(1).write_volatile(u64::MAX - n);
            words.write_volatile(n + 1);
        }
        if n == 0 {
            bad.call(0, 0).unwrap();
            // SAFETY: as above; the call wrote the first slot, which is garbled again.
            unsafe { words.add(1).write_volatile(u64::MAX) };
        }
        good.call(n, n).unwrap();
        server.poll();
        let requests: Vec<_> = std::iter::from_fn(|| server.recv()).collect();
        // The bad client's requests are kept, so that it exceeds its depth.
        let (mine, theirs): (Vec<_>, Vec<_>) = requests
            .into_iter()
            .partition(|(token, _)| token.client() == good.id());
        std::mem::forget(theirs);
        mine.into_iter()
            .for_each(|(token, _)| server.reply(token, 1).unwrap());
        assert_eq!(
            good.poll(|user, reply| assert_eq!((user, reply), (n, Ok(1)))),
            Ok(1)
        );
    }
    let mut failed = vec![];
    assert_eq!(
        bad.poll(|user, reply| failed.push((user, reply))),
        Err(SessionEnd::Evicted)
    );
    assert_eq!(failed, [(0, Err(CallFailure::Closed(SessionEnd::Evicted)))]);
}

#[test]
fn garbage_everywhere_neither_panics_nor_hangs() {
    let seed = 0x1bc_0002;
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..200 {
        let scratch = Scratch::new("ipc-noise");
        let (mut server, mut client) = pair(&scratch, 3, 4);
        let region = Region::open(
            &scratch.dir(),
            "s",
            u64::from_be_bytes(*b"ipcLANE\x02"),
            128,
        )
        .unwrap();
        let words = region.view().len() / 8;
        for _ in 0..50 {
            for _ in 0..random.usize(..20) {
                let word = region
                    .view()
                    .at::<u64>(8 * random.usize(16..words))
                    .unwrap();
                let noise = if random.bool() {
                    random.u64(..)
                } else {
                    random.u64(..6)
                };
                // SAFETY: in bounds, and only this thread is running.
                unsafe { word.as_ptr().write_volatile(noise) };
            }
            let _ = client.call(1, 1);
            server.poll();
            while let Some((token, _)) = server.recv() {
                let _ = server.reply(token, 2);
            }
            let _ = client.poll(|_, _| {});
        }
    }
}

#[test]
fn a_request_that_its_client_takes_back_costs_that_client_its_session_and_nobody_a_request() {
    let scratch = Scratch::new("ipc-back");
    let (mut server, mut bad) = pair(&scratch, 2, 4);
    let mut good = connect(&scratch);
    bad.call(1, 1).unwrap();
    good.call(2, 2).unwrap();
    assert_eq!(server.poll(), 2);
    let region = Region::open(
        &scratch.dir(),
        "s",
        u64::from_be_bytes(*b"ipcLANE\x02"),
        128,
    )
    .unwrap();
    // The sequence word of the first slot, after three lines of entries.
    let sequence = region.view().at::<u64>(192 + 3 * 64).unwrap();
    // SAFETY: in bounds, and only this thread is running.
    unsafe { sequence.as_ptr().write_volatile(0) };
    let received: Vec<_> = std::iter::from_fn(|| server.recv()).collect();
    assert_eq!(
        received
            .iter()
            .map(|(_, request)| *request)
            .collect::<Vec<_>>(),
        [2]
    );
    received
        .into_iter()
        .for_each(|(token, _)| server.reply(token, 20).unwrap());
    assert_eq!(
        good.poll(|user, reply| assert_eq!((user, reply), (2, Ok(20)))),
        Ok(1)
    );
    assert_eq!(bad.poll(|_, _| ()), Err(SessionEnd::Evicted));
}

#[test]
fn tokens_outlive_the_server_which_has_ended_their_calls() {
    let scratch = Scratch::new("ipc-outlive");
    let (mut server, mut client) = pair(&scratch, 1, 4);
    for n in 0..4 {
        client.call(n, n).unwrap();
    }
    server.poll();
    let mut tokens: Vec<_> = std::iter::from_fn(|| server.recv())
        .map(|(token, _)| token)
        .collect();
    server.reply(tokens.remove(0), 5).unwrap();
    drop(server);
    // One token is dropped before its call has ended for the client, one after that, and one is
    // used at the next server.
    let [late, foreign] = [tokens.remove(0), tokens.remove(0)];
    drop(tokens);
    let mut ended = vec![];
    assert_eq!(client.poll(|user, reply| ended.push((user, reply))), Ok(1));
    assert_eq!(
        client.poll(|user, reply| ended.push((user, reply))),
        Err(SessionEnd::PeerGone)
    );
    let gone = Err(CallFailure::Closed(SessionEnd::PeerGone));
    assert_eq!(ended, [(0, Ok(5)), (1, gone), (2, gone), (3, gone)]);
    drop(late);
    let (mut next, mut other) = pair(&scratch, 1, 4);
    other.call(7, 7).unwrap();
    assert_eq!(
        next.reply(foreign, 9),
        Err(ReplyError::ForeignToken { client: 0 })
    );
    next.poll();
    assert_eq!(other.poll(|user, reply| panic!("{user} {reply:?}")), Ok(0));
}

#[test]
fn a_held_request_of_a_call_is_the_only_one() {
    let scratch = Scratch::new("ipc-twice");
    let (mut server, mut bad) = pair(&scratch, 1, 4);
    bad.call(1, 1).unwrap();
    server.poll();
    let held = server.recv().unwrap();
    bad.call(2, 2).unwrap();
    let region = Region::open(
        &scratch.dir(),
        "s",
        u64::from_be_bytes(*b"ipcLANE\x02"),
        128,
    )
    .unwrap();
    // The tags of the first two slots. The second call gets the tag of the first call.
    let [first, second] = [0, 64].map(|slot| {
        region
            .view()
            .at::<u64>(192 + 2 * 64 + slot + 8)
            .unwrap()
            .as_ptr()
    });
    // SAFETY: in bounds, and only this thread is running.
    unsafe { second.write_volatile(first.read_volatile()) };
    assert_eq!(
        server.step(|_| panic!("it is answered by the holder of its token")),
        0
    );
    assert_eq!(bad.poll(|_, _| ()), Err(SessionEnd::Evicted));
    drop(held);
}

#[test]
fn a_server_may_be_moved_and_its_tokens_answered_there() {
    let scratch = Scratch::new("ipc-moved");
    let (mut server, mut client) = pair(&scratch, 1, 4);
    client.call(1, 1).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    let server = std::thread::spawn(move || {
        server.reply(token, 10).unwrap();
        server
    });
    let _server = server.join().unwrap();
    assert_eq!(
        client.poll(|user, reply| assert_eq!((user, reply), (1, Ok(10)))),
        Ok(1)
    );
}

#[test]
fn stopping_a_server_and_dropping_a_token_wake_it() {
    let scratch = Scratch::new("ipc-woken");
    let (mut server, mut client) = pair(&scratch, 1, 4);
    client.call(1, 1).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    let region = Region::open(
        &scratch.dir(),
        "s",
        u64::from_be_bytes(*b"ipcLANE\x02"),
        128,
    )
    .unwrap();
    // The server's futex: the number of its wake-ups, and whether it sleeps.
    // SAFETY: in bounds, and all access to these words is atomic.
    let [wakes, sleeping] =
        [200, 204].map(|word| unsafe { region.view().at::<AtomicU32>(word).unwrap().as_ref() });
    sleeping.store(1, Ordering::Relaxed);
    let before = wakes.load(Ordering::Relaxed);
    drop(token);
    assert_eq!(wakes.load(Ordering::Relaxed), before.wrapping_add(1));
    server.poll();
    let stop = server.stop_handle();
    stop.stop();
    assert!(wakes.load(Ordering::Relaxed) != before.wrapping_add(1) && server.wait(None));
    drop(server);
    // There is no thread to wake.
    stop.stop();
}

#[test]
fn a_handler_that_panics_rejects_its_request_and_the_others_are_answered_once() {
    let scratch = Scratch::new("ipc-panic");
    let (mut server, mut client) = pair(&scratch, 1, 8);
    let step = |server: &mut S| {
        server.step(|request| {
            if *request == 1 {
                panic!("a handler's own fault")
            } else {
                10 * request
            }
        })
    };
    for is_found_before in [false, true] {
        for request in 0..4 {
            client.call(request, request).unwrap();
        }
        assert_eq!(if is_found_before { server.poll() } else { 4 }, 4);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step(&mut server)));
        assert!(caught.is_err());
        assert_eq!(step(&mut server), 2);
        // Requests received by tokens follow those that the steps have answered.
        client.call(7, 7).unwrap();
        assert_eq!(server.poll(), 1);
        let (token, request) = server.recv().unwrap();
        server.reply(token, 10 * request).unwrap();
        let mut ended = vec![];
        client
            .poll(|user, outcome| ended.push((user, outcome)))
            .unwrap();
        ended.sort_unstable_by_key(|(user, _)| *user);
        assert_eq!(
            ended,
            [
                (0, Ok(0)),
                (1, Err(CallFailure::Dropped)),
                (2, Ok(20)),
                (3, Ok(30)),
                (7, Ok(70))
            ]
        );
    }
}

#[test]
fn a_server_that_goes_with_the_panic_of_its_handler_ends_that_call_as_dropped_and_later_ones_as_stopped()
 {
    let scratch = Scratch::new("ipc-unwound");
    for is_found_before in [false, true] {
        let (mut server, mut client) = pair(&scratch, 1, 8);
        for request in 0..4 {
            client.call(request, request).unwrap();
        }
        assert_eq!(if is_found_before { server.poll() } else { 4 }, 4);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            server.step(|request| {
                if *request == 1 {
                    panic!("a handler's own fault")
                } else {
                    10 * request
                }
            });
        }));
        assert!(unwound.is_err());
        let mut ended = vec![];
        while ended.len() < 4 {
            // The session is over once all calls have ended.
            let _ = client.poll(|user, outcome| ended.push((user, outcome)));
        }
        ended.sort_unstable_by_key(|(user, _)| *user);
        let stopped = Err(CallFailure::NotSent);
        assert_eq!(
            ended,
            [
                (0, Ok(0)),
                (1, Err(CallFailure::Dropped)),
                (2, stopped),
                (3, stopped)
            ],
            "{is_found_before}"
        );
    }
}

/// The directory is removed as by `rm -rf /dev/shm/copyrpc-*`.
#[test]
fn a_directory_that_is_removed_under_a_pair_disturbs_it_not_and_a_new_client_is_told_what_is_missing()
 {
    let scratch = Scratch::new("ipc-removed");
    let (dir, (mut server, mut client)) = (scratch.dir(), pair(&scratch, 2, 8));
    std::fs::remove_dir_all(scratch.path()).unwrap();
    for request in 0..20 {
        client.call(request, request).unwrap();
        assert_eq!(server.step(|request| request + 1), 1);
        assert_eq!(
            client.poll(|user, reply| assert_eq!(reply, Ok(user + 1))),
            Ok(1)
        );
    }
    let path = scratch.path().join("s").display().to_string();
    let missing = C::connect_in(&dir, "s", 1).unwrap_err();
    assert!(
        missing.may_pass() && missing.to_string().contains(&path),
        "{missing}"
    );
    assert!(
        missing.to_string().ends_with(", with the same directory?"),
        "{missing}"
    );
    let user = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap());
    assert!(
        missing.to_string().contains(&format!(
            "does not exist: is its owner running, as user {user}"
        )),
        "{missing}"
    );
    let refused = S::bind_in(&dir, "s", 2, 8, 1).unwrap_err();
    assert!(refused.to_string().contains(&path), "{refused}");
    drop(server);
    assert!(matches!(
        client.call(1, 1),
        Err(ipc::CallError::Closed {
            reason: SessionEnd::PeerGone,
            ..
        })
    ));
}

/// Each poll ends one call, by a callback that panics.
#[test]
fn a_callback_that_panics_takes_the_end_of_no_other_call_with_it() {
    let scratch = Scratch::new("ipc-callback");
    let (server, mut client) = pair(&scratch, 2, 4);
    let end_all = |client: &mut C, end: CallFailure| {
        let (start, mut ended) = (Instant::now(), vec![]);
        while ended.len() < 4 {
            assert!(start.elapsed() < PATIENCE, "{ended:?}");
            let poll = || {
                client.poll(|user, outcome| {
                    ended.push((user, outcome));
                    panic!("a callback's own fault");
                })
            };
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll));
        }
        assert_eq!(ended, [0, 1, 2, 3].map(|user| (user, Err(end))));
        assert_eq!(client.in_flight(), 0);
    };
    for user in 0..4 {
        client.call_within(7, user, Duration::ZERO).unwrap();
    }
    end_all(&mut client, CallFailure::TimedOut);
    let mut client = connect(&scratch);
    for user in 0..4 {
        client.call(7, user).unwrap();
    }
    drop(server);
    end_all(&mut client, CallFailure::NotSent);
}

#[test]
fn refused_dropped_and_too_long_are_three_ends() {
    let scratch = Scratch::new("three-ends");
    let max = ipc::bytes::MessageBytes {
        request: 100,
        response: 100,
    };
    let mut server = ipc::bytes::Server::with_options(
        "s",
        &ipc::bytes::ServerOptions {
            dir: Some(scratch.dir()),
            max_clients: 1,
            depth: 4,
            message_bytes: max,
            type_tag: 0,
            ..ipc::bytes::ServerOptions::default()
        },
    )
    .unwrap();
    let mut client = ipc::bytes::Client::connect_in(&scratch.dir(), "s", 0).unwrap();
    for call in 0..2 {
        client.call(&[7], call).unwrap();
    }
    assert_eq!(server.poll(), 2);
    let (token, _) = server.recv().unwrap();
    server.refuse(token).unwrap();
    drop(server.recv().unwrap().0);
    server.poll();
    client.call(&[7], 2).unwrap();
    assert_eq!(server.step(|_| [0; 101]), 1);
    let mut ended = vec![];
    client
        .poll(|user, outcome| ended.push((user, outcome.map(<[u8]>::len))))
        .unwrap();
    assert_eq!(
        ended,
        [
            (0, Err(CallFailure::Refused)),
            (1, Err(CallFailure::Dropped)),
            (2, Err(CallFailure::ReplyTooLong { len: None }))
        ]
    );
}
