//! Properties of delegationrpc: parameters, tokens, the shared ring, and broken clients.
#![cfg(not(loom))]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

use copyrpc_shm::region::{OpenError, Region};
use copyrpc_testing::executor::Begun;
use copyrpc_testing::helpers::{PATIENCE, Scratch, wait_for};
use delegationrpc::ipc::{OptionError, ReplyError};
use delegationrpc::{
    AsyncClient, CallError, CallFailure, Client, Server, SessionEnd, SetupError, ring_depth_for,
};

type S = Server<u64, u64>;
type C = Client<u64, u64, u64>;

const KIND: u64 = u64::from_be_bytes(*b"DLGRPC\x02\x00");

fn connect(scratch: &Scratch) -> C {
    C::connect_in(&scratch.dir(), "s", 1).unwrap()
}

fn no_reply(_: u64, reply: Result<u64, CallFailure>) {
    panic!("unexpected {reply:?}");
}

#[test]
fn bad_parameters_and_mismatches_are_named() {
    let scratch = Scratch::new("dlg-bad");
    let dir = scratch.dir();
    let create = |clients, ring, depth| S::bind_with(&dir, "s", ring, clients, depth, 1).map(drop);
    assert!(matches!(
        create(0, 8, 8),
        Err(SetupError::Option(OptionError {
            option: "max_clients",
            value: 0,
            ..
        }))
    ));
    assert!(matches!(
        create(1, 7, 8),
        Err(SetupError::Option(OptionError {
            option: "words",
            value: 7,
            ..
        }))
    ));
    assert!(matches!(
        create(1, 8, 0),
        Err(SetupError::Option(OptionError {
            option: "depth",
            value: 0,
            ..
        }))
    ));
    assert!(matches!(
        C::connect_in(&dir, "s", 1),
        Err(SetupError::Region(OpenError::NotFound { .. }))
    ));
    let _server = S::bind_with(&dir, "s", 8, 1, 8, 1).unwrap();
    assert!(matches!(
        create(1, 8, 8),
        Err(SetupError::Create(
            copyrpc_shm::region::CreateError::Exists { .. }
        ))
    ));
    assert!(matches!(
        C::connect_in(&dir, "s", 2),
        Err(SetupError::Types { .. })
    ));
    assert!(matches!(
        Client::<u32, u64, ()>::connect_in(&dir, "s", 1),
        Err(SetupError::Types { .. })
    ));
}

#[test]
fn damaged_header_is_refused() {
    let scratch = Scratch::new("dlg-damaged");
    let _server = S::bind_with(&scratch.dir(), "s", 8, 4, 8, 1).unwrap();
    let region = Region::open(&scratch.dir(), "s", KIND, 256).unwrap();
    let attempt = |offset: usize, value: u32| {
        let word = region.view().at::<u32>(offset).unwrap();
        // SAFETY: in bounds; no other client connects meanwhile.
        let before = unsafe { word.as_ptr().read_volatile() };
        // SAFETY: as above.
        unsafe { word.as_ptr().write_volatile(value) };
        let error = C::connect_in(&scratch.dir(), "s", 1).map(drop).unwrap_err();
        // SAFETY: as above.
        unsafe { word.as_ptr().write_volatile(before) };
        error
    };
    assert!(matches!(attempt(0, 0), SetupError::Version { .. }));
    assert!(matches!(
        attempt(8, 9),
        SetupError::Version { version: 9, .. }
    ));
    assert!(matches!(
        attempt(12, 0),
        SetupError::Damaged(OptionError {
            option: "max_clients",
            value: 0,
            ..
        })
    ));
    assert!(matches!(
        attempt(16, 6),
        SetupError::Damaged(OptionError {
            option: "words",
            value: 6,
            ..
        })
    ));
    assert!(matches!(
        attempt(20, u32::MAX),
        SetupError::Damaged(OptionError {
            option: "depth",
            ..
        })
    ));
    assert!(matches!(attempt(20, 1024), SetupError::Truncated { .. }));
    connect(&scratch);
}

#[test]
fn token_is_good_at_the_server_that_received_the_request_only() {
    let (scratch, other) = (Scratch::new("dlg-token"), Scratch::new("dlg-token-other"));
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 1, 1, 1).unwrap();
    let mut other = S::bind_with(&other.dir(), "s", 8, 1, 1, 1).unwrap();
    let mut client = connect(&scratch);
    client.call(1, 1).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    assert_eq!(
        other.reply(token, 10),
        Err(ReplyError::ForeignToken { client: 0 })
    );
    assert_eq!(client.poll(no_reply), Ok(0));
    server.poll();
    assert_eq!(
        client.poll(|user, reply| assert_eq!((user, reply), (1, Err(CallFailure::Dropped)))),
        Ok(1)
    );
    client.call(2, 2).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    server.reply(token, 20).unwrap();
    server.poll();
    assert_eq!(
        client.poll(|user, reply| assert_eq!((user, reply), (2, Ok(20)))),
        Ok(1)
    );
    assert_eq!(
        client.poll(no_reply),
        Ok(0),
        "an answered call was rejected besides"
    );
}

#[test]
fn token_dropped_by_another_thread_is_found_by_a_server_that_sleeps() {
    let scratch = Scratch::new("dlg-drop");
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 1, 1, 1).unwrap();
    let mut client = connect(&scratch);
    for round in 0..5 {
        client.call(round, round).unwrap();
        server.poll();
        let (token, _) = server.recv().unwrap();
        let dropper = std::thread::spawn(move || drop(token));
        // If the token was dropped before the sleep, the wait has rejected the request, and found
        // nothing else.
        let mut ended = vec![];
        wait_for("a dropped token ends no call", || {
            server.wait(Some(PATIENCE / 100));
            client
                .poll(|user, reply| ended.push((user, reply)))
                .unwrap()
                > 0
        });
        dropper.join().unwrap();
        assert_eq!(ended, [(round, Err(CallFailure::Dropped))]);
        assert_eq!(client.poll(no_reply), Ok(0));
        assert!(
            !server.wait(Some(std::time::Duration::from_millis(1))),
            "it is rejected once"
        );
    }
}

#[test]
fn token_of_a_client_that_left_takes_nothing_from_the_next_and_may_outlive_the_server() {
    let scratch = Scratch::new("dlg-late");
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 1, 2, 1).unwrap();
    let receive = |server: &mut S, client: &mut C, request| {
        client.call(request, request).unwrap();
        server.poll();
        server
            .recv()
            .expect("a request that may be made was refused")
            .0
    };
    let mut first = connect(&scratch);
    let (late, later) = (
        receive(&mut server, &mut first, 1),
        receive(&mut server, &mut first, 2),
    );
    drop(first);
    server.poll();
    let mut next = connect(&scratch);
    let tokens = [
        receive(&mut server, &mut next, 3),
        receive(&mut server, &mut next, 4),
    ];
    drop(late);
    server.poll();
    assert!(matches!(
        server.reply(later, 9),
        Err(ReplyError::ClientGone { client: 0 })
    ));
    assert_eq!(next.poll(no_reply), Ok(0));
    for (token, answer) in tokens.into_iter().zip([30, 40]) {
        server.reply(token, answer).unwrap();
    }
    let mut answers = vec![];
    assert_eq!(next.poll(|_, reply| answers.push(reply)), Ok(2));
    assert_eq!(answers, [Ok(30), Ok(40)]);
    let last = receive(&mut server, &mut next, 5);
    drop(server);
    drop(last);
    assert_eq!(
        next.poll(|_, reply| assert_eq!(reply, Err(CallFailure::Closed(SessionEnd::PeerGone)))),
        Err(SessionEnd::PeerGone)
    );
}

#[test]
fn ring_with_less_words_than_clients_loses_nobodys_call() {
    const CLIENTS: usize = 40;
    let scratch = Scratch::new("dlg-ring");
    let mut server = S::bind_with(&scratch.dir(), "s", 2, CLIENTS, 4, 1).unwrap();
    let mut all: Vec<C> = (0..CLIENTS).map(|_| connect(&scratch)).collect();
    for round in 0..3 {
        let mut served = [false; CLIENTS];
        for client in &mut all {
            client.call(round, round).unwrap();
        }
        wait_for("a call that found the ring full is not served", || {
            server.poll();
            while let Some((token, request)) = server.recv() {
                served[token.client()] = true;
                server.reply(token, request).unwrap();
            }
            served.iter().all(|&served| served)
        });
        for client in &mut all {
            assert_eq!(
                client.poll(|user, reply| assert_eq!((user, reply), (round, Ok(round)))),
                Ok(1)
            );
        }
        // A wait so long that the server stops polling the clients' lanes.
        assert!(!server.wait(Some(std::time::Duration::from_millis(5))));
    }
}

#[test]
fn clients_announce_themselves_once() {
    let scratch = Scratch::new("dlg-once");
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 2, 4, 1).unwrap();
    let (mut a, mut b) = (connect(&scratch), connect(&scratch));
    let region = Region::open(&scratch.dir(), "s", KIND, 256).unwrap();
    let words = region.view().array_at::<u64>(256, 8).unwrap().as_ptr();
    let full = || {
        (0..8)
            // SAFETY: in bounds, and only this thread is running.
            .filter(|&at| unsafe { words.add(at).read_volatile() } & 1 << 12 != 0)
            .count()
    };
    a.call(1, 1).unwrap();
    a.call(2, 2).unwrap();
    assert_eq!(full(), 1);
    b.call(3, 3).unwrap();
    assert_eq!(full(), 2);
    assert_eq!(server.poll(), 3);
    assert_eq!(full(), 0);
    // The server now polls the clients' lanes without an announcement.
    a.call(4, 4).unwrap();
    assert_eq!((full(), server.poll()), (0, 4));
    // When the server has slept, it no longer polls the lanes without an announcement.
    while let Some((token, _)) = server.recv() {
        server.reply(token, 0).unwrap();
    }
    assert!(!server.wait(Some(std::time::Duration::from_millis(1))));
    b.call(5, 5).unwrap();
    assert_eq!((full(), server.poll()), (1, 1));
}

#[test]
fn default_ring_is_never_full() {
    let scratch = Scratch::new("dlg-default");
    let (clients, depth) = (40, 32);
    let mut server = S::bind_with(
        &scratch.dir(),
        "s",
        ring_depth_for(clients),
        clients,
        depth,
        1,
    )
    .unwrap();
    let mut all: Vec<C> = (0..clients).map(|_| connect(&scratch)).collect();
    for client in &mut all {
        for n in 0..depth as u64 {
            client.call(n, n).unwrap();
        }
    }
    let region = Region::open(&scratch.dir(), "s", KIND, 256).unwrap();
    let words = region
        .view()
        .array_at::<u64>(256, ring_depth_for(clients))
        .unwrap()
        .as_ptr();
    // SAFETY: in bounds, and only this thread is running.
    let announced = (0..clients)
        .filter(|&at| unsafe { words.add(at).read_volatile() } & 1 << 12 != 0)
        .count();
    assert_eq!(announced, clients);
    let mut served = 0;
    while server.poll() > 0 {
        served += std::iter::from_fn(|| server.recv()).count();
    }
    assert_eq!(served, clients * depth);
}

#[test]
fn client_that_makes_a_call_twice_loses_its_own_entry_only() {
    let scratch = Scratch::new("dlg-twice");
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 2, 4, 1).unwrap();
    let (mut good, mut bad) = (connect(&scratch), connect(&scratch));
    bad.call(1, 1).unwrap();
    bad.call(9, 9).unwrap();
    let region = Region::open(&scratch.dir(), "s", KIND, 256).unwrap();
    // The slots are after the ring and three lines of entries. A slot is sequence, tag, payload.
    // The second call gets the tag of the first call.
    let slots = region
        .view()
        .array_at::<u64>(256 + 64 + 3 * 64 + 4 * 64, 16)
        .unwrap()
        .as_ptr();
    // SAFETY: in bounds, and only this thread is running.
    unsafe {
        slots
            .add(8 + 1)
            .write_volatile(slots.add(1).read_volatile())
    };
    good.call(2, 2).unwrap();
    server.poll();
    let mut entries: Vec<_> = std::iter::from_fn(|| server.recv()).collect();
    assert_eq!(
        entries
            .iter()
            .map(|(_, request)| *request)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    server.reply(entries.remove(1).0, 3).unwrap();
    assert_eq!(
        good.poll(|user, reply| assert_eq!((user, reply), (2, Ok(3)))),
        Ok(1)
    );
    let mut failed = vec![];
    assert_eq!(
        bad.poll(|user, reply| failed.push((user, reply))),
        Err(SessionEnd::Evicted)
    );
    let ended = Err(CallFailure::Closed(SessionEnd::Evicted));
    assert_eq!(failed, [(1, ended), (9, ended)]);
    assert!(matches!(
        bad.call(5, 6),
        Err(CallError::Closed {
            request: 5,
            user_data: 6,
            ..
        })
    ));
}

#[test]
fn garbage_everywhere_neither_panics_nor_hangs_and_a_new_call_gets_through() {
    let seed = 0xd1c_0001;
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..200 {
        let scratch = Scratch::new("dlg-noise");
        let mut server = S::bind_with(&scratch.dir(), "s", 8, 3, 4, 1).unwrap();
        let (mut client, witness) = (connect(&scratch), connect(&scratch));
        let region = Region::open(&scratch.dir(), "s", KIND, 256).unwrap();
        // Garbage is written to the control words, the ring and the slots, but not to the entries,
        // so that the clients stay connected.
        let (ring_end, slots) = (256 / 8 + 8, (256 + 64 + 4 * 64) / 8);
        let words = region.view().len() / 8;
        for _ in 0..50 {
            for _ in 0..random.usize(..20) {
                let at = if random.bool() {
                    random.usize(16..ring_end)
                } else {
                    random.usize(slots..words)
                };
                let word = region.view().at::<u64>(8 * at).unwrap();
                let noise = if random.bool() {
                    random.u64(..)
                } else {
                    random.u64(..6) << 13 | random.u64(..2) << 12 | random.u64(..9)
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
        // The noise may have cost these clients their entries, and their calls may be lost, but the
        // server must still serve clients that come later.
        drop((client, witness));
        let served = (0..10).any(|_| {
            server.poll();
            C::connect_in(&scratch.dir(), "s", 1).is_ok_and(|late| is_served(&mut server, late))
        });
        assert!(served, "seed {seed:#x} round {round}: {server:?}");
    }
}

fn is_served(server: &mut S, mut client: C) -> bool {
    let mut called = false;
    (0..1000).any(|_| {
        called = called || client.call(7, 7).is_ok();
        server.poll();
        while let Some((token, request)) = server.recv() {
            let _ = server.reply(token, request);
        }
        let mut answered = false;
        client.poll(|_, reply| answered = reply == Ok(7)).is_ok() && answered
    })
}

#[test]
fn calls_as_futures_get_their_own_replies_and_a_dropped_one_gives_its_slot_back() {
    let scratch = Scratch::new("dlg-futures");
    let mut server = S::bind_with(&scratch.dir(), "s", 8, 2, 4, 1).unwrap();
    let stop = server.stop_handle();
    std::thread::scope(|scope| {
        scope.spawn(move || server.serve(|number| 10 * number));
        let options = delegationrpc::ipc::ClientOptions {
            dir: Some(scratch.dir()),
            type_tag: 1,
            connect_timeout: PATIENCE,
            ..delegationrpc::ipc::ClientOptions::default()
        };
        let client = Begun::new(AsyncClient::<u64, u64>::with_options("s", &options))
            .end()
            .unwrap();
        for _ in 0..50 {
            let mut calls: Vec<_> = (0..8_u64)
                .map(|number| (number, Begun::new(client.call(number))))
                .collect();
            drop(calls.drain(2..6));
            calls
                .into_iter()
                .for_each(|(number, call)| assert_eq!(call.end(), Ok(10 * number)));
        }
        stop.stop();
    });
}
