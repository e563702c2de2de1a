//! The execution of messages: P1 and P4 to P7.

use super::*;

#[test]
fn p1_every_message_is_executed_once_and_in_order_however_bad_the_network_is() {
    let mut total = 0;
    for seed in seeds() {
        let mut rng = Random::new(!seed);
        let mut rate = |most: u64| rng.below(most + 1) as u16;
        let badness = Badness {
            lost: rate(100),
            doubled: rate(100),
            damaged: rate(50),
            late: rate(300),
            delay_ms: [0, 0, 1, 50][rng.below(4) as usize],
            queue: [0, 4 + rng.below(60)][rng.below(2) as usize],
        };
        // Endless retries: with these losses any number may be needed.
        let mut world = World::new(seed, badness, u8::MAX);
        for _ in 0..20 + seed % 20 {
            world.post();
            if seed % 3 == 0 {
                world.step();
            }
        }
        world.run();
        world.assert_done();
        total += world.requests;
    }
    assert!(total > 10_000, "{total}");
}

/// A message whose bytes cannot be read, or whose result cannot be placed, fails itself, and the
/// messages before it are complete.
#[test]
fn p1_a_message_that_this_end_cannot_execute_fails_itself() {
    for (seed, is_read) in (1..50).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut world = World::new(
            seed,
            Badness {
                lost: 100,
                ..Badness::default()
            },
            u8::MAX,
        );
        world.memory.receives = 100;
        (0..10).for_each(|_| world.post());
        world.posted.push(Posted::refused(vec![1]));
        if is_read {
            world.requester.post(
                Request::Read(Reth {
                    addr: BASE,
                    rkey: RKEY,
                    len: 1,
                }),
                true,
            );
            world.unplaceable = Some(10);
        } else {
            world.requester.post(
                Request::Send {
                    len: 1,
                    imm: None,
                    is_solicited: false,
                },
                true,
            );
            world.requester.refuse(10, Status::LocalProtection);
        }
        while world.requester.failure().is_none() {
            assert!(world.step());
        }
        let expected = Failure {
            message: 10,
            status: Status::LocalProtection,
        };
        assert_eq!(
            (world.requester.failure(), world.requester.completed()),
            (Some(expected), 10)
        );
        assert!(
            world.memory.received == world.oracle.received
                && world.memory.bytes == world.oracle.bytes,
            "{seed}"
        );
    }
}

#[test]
fn p5_a_duplicate_atomic_is_answered_from_the_newest_with_its_number() {
    let mut world = World::new(1, Badness::default(), 7);
    let first = world.responder.expected();
    let ask = |world: &mut World| {
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::FetchAdd,
        };
        let atomic = AtomicEth {
            addr: BASE,
            rkey: RKEY,
            operands: AtomicSegment {
                swap_add: 1,
                compare: 0,
            },
        };
        world.responder.on_request(
            &Headers {
                atomic,
                ..Headers::new(opcode, 7, first)
            },
            &[],
            &mut world.memory,
            0,
        );
        world.responder.next_reply(0).unwrap().headers.original
    };
    let before = ask(&mut world);
    assert_eq!(ask(&mut world), before);
    // All numbers were used, and fewer than sixteen atomics came.
    world.responder.set_expected(first);
    assert_eq!(
        [ask(&mut world), ask(&mut world)],
        [before.wrapping_add(1); 2]
    );
}

/// A forged packet far ahead of the others costs that packet's place, and not half of all.
#[test]
fn p7_one_packet_far_ahead_makes_no_others_late() {
    for ahead in [1, 100, 1 << 11, 1 << 22, (1 << 23) - 1, 1 << 23] {
        let mut world = World::new(1, Badness::default(), 7).unreliable();
        world.memory.receives = 5000;
        let first = world.responder.expected();
        let send = |world: &mut World, opcode, psn: Psn| {
            let opcode = PacketOpcode {
                transport: Transport::Uc,
                opcode,
            };
            world
                .responder
                .on_unreliable(&Headers::new(opcode, 7, psn), &[], &mut world.memory);
        };
        send(&mut world, Opcode::SendOnly, first);
        send(&mut world, Opcode::SendMiddle, first.after(ahead));
        assert_eq!(world.memory.received.len(), 1);
        send(&mut world, Opcode::SendOnly, first.after(ahead));
        (1..=2000).for_each(|nth| send(&mut world, Opcode::SendOnly, first.after(nth)));
        assert!(
            world.memory.received.len() > 2000 - 1024,
            "{ahead}: {}",
            world.memory.received.len()
        );
        // A packet that comes again and late is executed once.
        let received = world.memory.received.len();
        (1900..=2000).for_each(|nth| send(&mut world, Opcode::SendOnly, first.after(nth)));
        assert_eq!(world.memory.received.len(), received);
    }
}

#[test]
fn p4_a_peer_without_receives_fails_it_after_the_rnr_retries() {
    // NAKs that come twice are one each.
    let mut world = World::new(
        1,
        Badness {
            doubled: 1000,
            ..Badness::default()
        },
        7,
    );
    world.requester.set_rnr_retry(3);
    world.posted.push(Posted::refused(vec![1]));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    world.rng = Random::new(0);
    while world.requester.failure().is_none() {
        world.memory.receives = 0;
        assert!(world.step());
        world.memory.receives = 0;
    }
    assert_eq!(
        world.requester.failure(),
        Some(Failure {
            message: 0,
            status: Status::RnrRetryExceeded
        })
    );
    assert_eq!(world.requests, 4);
}

#[test]
fn p6_a_refused_access_fails_both_ends_and_nothing_behind_it_is_executed() {
    for (request, status) in [
        (
            Request::Write {
                to: Reth {
                    addr: BASE,
                    rkey: 1,
                    len: 8,
                },
                imm: None,
                is_solicited: false,
            },
            Status::RemoteAccess,
        ),
        (
            Request::Read(Reth {
                addr: BASE + MEMORY as u64 - 8,
                rkey: RKEY,
                len: 16,
            }),
            Status::RemoteAccess,
        ),
        (
            Request::FetchAdd(AtomicEth {
                addr: BASE + 4,
                rkey: RKEY,
                operands: AtomicSegment {
                    swap_add: 1,
                    compare: 0,
                },
            }),
            Status::RemoteAccess,
        ),
        (
            Request::Send {
                len: 10_000,
                imm: None,
                is_solicited: false,
            },
            Status::RemoteInvalidRequest,
        ),
    ] {
        let mut world = World::new(
            3,
            Badness {
                late: 300,
                ..Badness::default()
            },
            7,
        );
        world.memory.receives = 100;
        for _ in 0..5 {
            world.post();
        }
        let (expected, oracle) = (world.posted.len() as u64, world.oracle.clone());
        world.posted.push(Posted::refused(vec![7; 10_000]));
        world.requester.post(request, true);
        for _ in 0..5 {
            world.post();
        }
        world.run();
        assert_eq!(
            world.requester.failure(),
            Some(Failure {
                message: expected,
                status
            })
        );
        assert!(world.responder.fatal().is_some());
        while world.step() {}
        assert_eq!(
            (world.memory.bytes, world.memory.received),
            (oracle.bytes, oracle.received),
            "{request:?}"
        );
    }
}

#[test]
fn p6_a_read_of_more_bytes_than_a_message_may_have_is_refused() {
    let mut world = World::new(1, Badness::default(), 7);
    world.memory.end = usize::MAX;
    let opcode = PacketOpcode {
        transport: Transport::Rc,
        opcode: Opcode::ReadRequest,
    };
    let reth = Reth {
        addr: BASE,
        rkey: RKEY,
        len: (1 << 30) + 1,
    };
    let headers = Headers {
        reth,
        ..Headers::new(opcode, 7, world.responder.expected())
    };
    world
        .responder
        .on_request(&headers, &[], &mut world.memory, 0);
    assert_eq!(world.responder.fatal(), Some(Nak::InvalidRequest));
}

#[test]
fn p7_unreliable_messages_are_executed_once_and_in_order_or_lost_without_a_word() {
    let mut lost = 0;
    for seed in seeds() {
        let badness = Badness {
            lost: 50 * u16::from(seed % 2 == 0),
            doubled: 50,
            damaged: 20,
            late: 100 * u16::from(seed % 4 == 0),
            ..Badness::default()
        };
        let badness = if seed % 5 == 0 {
            Badness::default()
        } else {
            badness
        };
        let mut world = World::new(seed, badness, 0).unreliable();
        world.memory.receives = if seed % 3 == 0 { 10 } else { 1000 };
        for _ in 0..40 {
            world.post();
        }
        while world.step() {}
        assert_eq!(
            (
                world.requester.completed(),
                world.requester.failure(),
                world.responder.kept()
            ),
            (40, None, 0)
        );
        let mut expected = world.oracle.received.iter();
        assert!(
            world
                .memory
                .received
                .iter()
                .all(|received| expected.any(|one| one == received)),
            "{seed}"
        );
        let missing = world.oracle.received.len() - world.memory.received.len();
        assert!(
            missing == 0 && world.memory.bytes == world.oracle.bytes
                || badness != Badness::default()
                || seed % 3 == 0,
            "{seed}"
        );
        lost += missing;
    }
    assert!(lost > 100, "{lost}");
}
