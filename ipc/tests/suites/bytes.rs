//! Messages of bytes: lengths, bounds, and peers that lie about them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use copyrpc_shm::region::{self, OpenError, Region};
use copyrpc_testing::helpers::Scratch;
use ipc::bytes::{Client, INLINE_MAX, MESSAGE_MAX, MessageBytes, Server, ServerOptions};
use ipc::{CallError, CallFailure, OptionError, ReplyError, SessionEnd, SetupError, Token};

const KIND: u64 = u64::from_be_bytes(*b"ipcBYTE\x02");

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn most(request: usize, response: usize) -> MessageBytes {
    MessageBytes { request, response }
}

fn pair(scratch: &Scratch, depth: usize, most: MessageBytes) -> (Server, Client<u64>) {
    let server = Server::with_options(
        "s",
        &ServerOptions {
            dir: Some(scratch.dir()),
            max_clients: 2,
            depth,
            message_bytes: most,
            type_tag: 1,
            ..ServerOptions::default()
        },
    )
    .unwrap();
    (server, Client::connect_in(&scratch.dir(), "s", 1).unwrap())
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed) as u8).collect()
}

fn received(server: &mut Server) -> Vec<(Token, Vec<u8>)> {
    std::iter::from_fn(|| {
        server
            .recv()
            .map(|(token, request)| (token, request.to_vec()))
    })
    .collect()
}

#[test]
fn messages_of_every_length_up_to_the_bound_arrive_as_they_were_sent() {
    let scratch = Scratch::new("bytes-lengths");
    for bound in [0, 1, INLINE_MAX, INLINE_MAX + 1, 64, 65, 5000, MESSAGE_MAX] {
        let (mut server, mut client) = pair(&scratch, 2, most(bound, bound));
        assert_eq!(
            (server.message_bytes(), client.message_bytes()),
            (most(bound, bound), most(bound, bound))
        );
        let near = [
            0,
            1,
            INLINE_MAX - 1,
            INLINE_MAX,
            INLINE_MAX + 1,
            63,
            64,
            65,
            4096,
            bound.saturating_sub(1),
            bound,
        ];
        for len in near.into_iter().filter(|&len| len <= bound) {
            // Two calls, so that both requests and both answers exist at the same time, in
            // different areas.
            client.call(&pattern(len, 1), 1).unwrap();
            client.call(&pattern(len, 2), 2).unwrap();
            server.poll();
            let requests = received(&mut server);
            for ((token, request), seed) in requests.into_iter().zip([1, 2]).rev() {
                assert!(request == pattern(len, seed), "bound {bound}, length {len}");
                server
                    .reply(token, &pattern(bound - len, seed + 2))
                    .unwrap();
            }
            let mut replies = vec![];
            assert_eq!(
                client.poll(|user, reply| replies.push((user, reply.unwrap().to_vec()))),
                Ok(2)
            );
            assert!(
                replies == [2, 1].map(|user| (user, pattern(bound - len, user as usize + 2))),
                "bound {bound}, length {len}"
            );
        }
    }
}

#[test]
fn message_above_the_bound_is_refused_and_nothing_is_lost() {
    let scratch = Scratch::new("bytes-large");
    for (request_max, response_max) in [(3, 100), (100, 3)] {
        let (mut server, mut client) = pair(&scratch, 1, most(request_max, response_max));
        match client.call(&vec![0; request_max + 1], 7) {
            Err(CallError::TooLarge {
                user_data: 7,
                bytes,
                max,
                ..
            }) => assert_eq!((bytes, max), (request_max + 1, request_max)),
            other => panic!("{other:?}"),
        }
        client.call(&vec![1; request_max], 8).unwrap();
        assert!(matches!(
            client.call(&[], 9),
            Err(CallError::Full {
                user_data: 9,
                depth: 1,
                ..
            })
        ));
        server.poll();
        let (token, request) = server.recv().unwrap();
        assert_eq!(request, vec![1; request_max]);
        let token = match server.reply(token, &vec![0; response_max + 1]) {
            Err(ReplyError::TooLarge { token, bytes, max })
                if (bytes, max) == (response_max + 1, response_max) =>
            {
                token
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(client.poll(|_, _| {}), Ok(0));
        server.reply(token, &vec![2; response_max]).unwrap();
        assert_eq!(
            client
                .poll(|user, reply| assert_eq!((user, reply), (8, Ok(&vec![2; response_max][..])))),
            Ok(1)
        );
    }
}

#[test]
fn bounds_and_mismatches_are_named() {
    let scratch = Scratch::new("bytes-bad");
    let dir = scratch.dir();
    let create = |most| {
        Server::with_options(
            "s",
            &ServerOptions {
                dir: Some(dir.clone()),
                max_clients: 2,
                depth: 8,
                message_bytes: most,
                type_tag: 1,
                ..ServerOptions::default()
            },
        )
    };
    for most in [most(MESSAGE_MAX + 1, 0), most(0, MESSAGE_MAX + 1)] {
        let refused = create(most).map(drop);
        assert!(
            matches!(refused, Err(SetupError::Option(OptionError { option: "message_bytes", value: n, .. })) if n == MESSAGE_MAX as u64 + 1)
        );
    }
    // 256 TiB.
    let huge = Server::with_options(
        "s",
        &ServerOptions {
            dir: Some(dir.clone()),
            max_clients: 4096,
            depth: 1 << 15,
            message_bytes: most(MESSAGE_MAX, MESSAGE_MAX),
            type_tag: 1,
            ..ServerOptions::default()
        },
    )
    .map(drop);
    let is_no_space = |error: &SetupError| {
        matches!(
            error,
            SetupError::Create(
                region::CreateError::NoSpace { .. } | region::CreateError::FileLimit { .. }
            )
        )
    };
    assert!(huge.as_ref().is_err_and(is_no_space), "{huge:?}");
    assert!(scratch.names().is_empty());
    let server = create(most(0, INLINE_MAX)).unwrap();
    let small = server.region_bytes();
    drop(server);
    let server = create(most(1000, INLINE_MAX + 1)).unwrap();
    assert_eq!(server.region_bytes(), small + 2 * 8 * (1024 + 64));
    assert!(matches!(
        Client::<()>::connect_in(&dir, "s", 2),
        Err(SetupError::Types { .. })
    ));
    assert!(matches!(
        ipc::Client::<u64, u64, ()>::connect_in(&dir, "s", 1),
        Err(SetupError::Region(OpenError::Kind { .. }))
    ));
    let _typed = ipc::Server::<u64, u64>::bind_in(&dir, "typed", 1, 1, 1).unwrap();
    assert!(matches!(
        Client::<()>::connect_in(&dir, "typed", 1),
        Err(SetupError::Region(OpenError::Kind { .. }))
    ));
    // A header with lengths that no server can have, or that its region has no room for.
    let region = Region::open(&dir, "s", KIND, 128).unwrap();
    let length = region.view().at::<u32>(24).unwrap();
    for (bytes, is_damaged) in [
        (MESSAGE_MAX as u32 + 1, true),
        (u32::MAX, true),
        (2000, false),
    ] {
        // SAFETY: in bounds; no client connects meanwhile.
        unsafe { length.as_ptr().write_volatile(bytes) };
        match Client::<()>::connect_in(&dir, "s", 1) {
            Err(SetupError::Damaged(OptionError {
                option: "message_bytes",
                value: n,
                ..
            })) if is_damaged => {
                assert_eq!(n, u64::from(bytes))
            }
            Err(SetupError::Truncated { .. }) if !is_damaged => {}
            other => panic!("{bytes}: {other:?}"),
        }
    }
}

#[test]
fn client_that_lies_about_length_or_slot_loses_its_own_entry_only() {
    let scratch = Scratch::new("bytes-lies");
    // Offsets in slot 0 of client 1's request lane: 8 is the tag, 16 the length of the message.
    let lane = 192 + 3 * 64 + 4 * 64;
    for (offset, lie) in [(16, 101), (16, u32::MAX), (8, 4), (8, 0xff_ffff)] {
        let (mut server, mut good) = pair(&scratch, 4, most(100, 100));
        let mut bad = Client::<u64>::connect_in(&scratch.dir(), "s", 1).unwrap();
        bad.call(&[0; 90], 1).unwrap();
        let region = Region::open(&scratch.dir(), "s", KIND, 128).unwrap();
        // SAFETY: in bounds, and only this thread is running.
        unsafe {
            region
                .view()
                .at::<u32>(lane + offset)
                .unwrap()
                .as_ptr()
                .write_volatile(lie)
        };
        good.call(&[5; 90], 2).unwrap();
        server.poll();
        let requests = received(&mut server);
        assert_eq!(
            requests
                .iter()
                .map(|(token, _)| token.client())
                .collect::<Vec<_>>(),
            [good.id()],
            "{offset} {lie:#x}"
        );
        requests
            .into_iter()
            .for_each(|(token, _)| server.reply(token, &[6; 90]).unwrap());
        assert_eq!(
            good.poll(|user, reply| assert_eq!((user, reply), (2, Ok(&[6; 90][..])))),
            Ok(1)
        );
        let mut failed = vec![];
        assert_eq!(
            bad.poll(|user, reply| failed.push((user, reply.map(<[u8]>::len)))),
            Err(SessionEnd::Evicted)
        );
        assert_eq!(failed, [(1, Err(CallFailure::Closed(SessionEnd::Evicted)))]);
    }
}

#[test]
fn garbled_answer_ends_its_call() {
    let scratch = Scratch::new("bytes-garbled");
    let (mut server, mut client) = pair(&scratch, 4, most(100, 100));
    client.call(&[], 1).unwrap();
    server.poll();
    let (token, _) = server.recv().unwrap();
    server.reply(token, &[1; 90]).unwrap();
    let region = Region::open(&scratch.dir(), "s", KIND, 128).unwrap();
    // The response lanes are after the request lanes of two clients.
    let response_lane = 192 + 3 * 64 + 2 * 4 * 64;
    // SAFETY: in bounds, and only this thread is running.
    unsafe {
        region
            .view()
            .at::<u32>(response_lane + 16)
            .unwrap()
            .as_ptr()
            .write_volatile(101)
    };
    assert_eq!(
        client.poll(|user, reply| assert_eq!(
            (user, reply),
            (1, Err(CallFailure::ReplyTooLong { len: None }))
        )),
        Ok(1)
    );
}

#[test]
fn calls_allocate_nothing_once_as_many_were_held_before() {
    let scratch = Scratch::new("bytes-alloc");
    let (mut server, mut client) = pair(&scratch, 4, most(2000, 2000));
    let mut held = Vec::with_capacity(4);
    let mut serve = |rounds: usize| {
        let before = ALLOCATIONS.get();
        for round in 0..rounds {
            let message = &[round as u8; 2000][..round * 97 % 2001];
            for user in 0..4 {
                client.call(message, user).unwrap();
            }
            server.poll();
            while let Some((token, request)) = server.recv() {
                assert_eq!(request, message);
                held.push(token);
            }
            assert_eq!(held.len(), 4);
            held.drain(..)
                .for_each(|token| server.reply(token, message).unwrap());
            assert_eq!(client.poll(|_, reply| assert!(reply == Ok(message))), Ok(4));
        }
        ALLOCATIONS.get() - before
    };
    serve(3);
    assert_eq!(serve(1000), 0);
}

#[test]
fn a_server_that_goes_with_the_panic_of_its_handler_ends_that_call_as_dropped() {
    let scratch = Scratch::new("bytes-unwound");
    let (mut server, mut client) = pair(&scratch, 2, most(64, 64));
    client.call(b"one", 1).unwrap();
    client.call(b"two", 2).unwrap();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        server.step(|_| -> Vec<u8> { panic!("a handler's own fault") });
    }));
    assert!(unwound.is_err());
    let mut ended = vec![];
    while ended.len() < 2 {
        // The session is over once all calls have ended.
        let _ = client.poll(|user, outcome| ended.push((user, outcome.map(<[u8]>::to_vec))));
    }
    ended.sort_unstable_by_key(|(user, _)| *user);
    assert_eq!(
        ended,
        [
            (1, Err(CallFailure::Dropped)),
            (2, Err(CallFailure::NotSent))
        ]
    );
}
