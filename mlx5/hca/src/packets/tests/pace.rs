//! The times at which packets are sent, sent again and acknowledged: P3, P8.

use mlx5_wire::roce::Syndrome;

use super::*;

/// A peer that was slow, so that nothing was repeated before the time-out, and is fast again.
#[test]
fn p3_repeats_come_back_when_the_peer_is_fast_again() {
    let mut world = World::new(3, Badness::default(), 7);
    let first = world.responder.expected();
    let acknowledge = |world: &mut World, nth: u32, after_ns: u64| {
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        assert!(world.requester.next_packet(world.now_ns).is_some());
        world.now_ns += after_ns;
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::Acknowledge,
        };
        let ack = Headers {
            aeth: Aeth::ack(0),
            ..Headers::new(opcode, 9, first.after(nth))
        };
        world.requester.on_response(&ack, &[], world.now_ns);
        assert_eq!(world.requester.completed(), u64::from(nth) + 1);
    };
    acknowledge(&mut world, 0, 30_000_000);
    (1..100).for_each(|nth| acknowledge(&mut world, nth, 5_000));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    assert!(world.requester.next_packet(world.now_ns).is_some());
    assert_eq!(world.requester.due_ns(), Some(world.now_ns + 2_000_000));
}

/// Messages of one packet whose completion is not awaited share an ACK, which is sent after a
/// quarter of a window, or after a time since the last message.
#[test]
fn p8_messages_without_a_completion_share_an_ack() {
    // The seed of a peer that is a software HCA, with a long time-out.
    let mut world = World::new(6, Badness::default(), 0);
    let quarter = (128 << 10) / world.requester.mtu() / 4;
    let quarter = quarter.min(16);
    world.memory.receives = 1000;
    let messages = u64::from(20 * quarter);
    for nth in 0..messages {
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            false,
        );
        // Each as if it answered a message of the peer.
        while world.requests <= nth || world.memory.received.len() as u64 <= nth {
            world.step();
        }
    }
    world.run();
    assert_eq!(
        (world.requester.failure(), world.requests),
        (None, messages)
    );
    let acks = world.sent - world.requests;
    assert!((20..=21).contains(&acks), "{acks}");
    // An answer that the program waits for comes at once.
    world.posted.push(Posted::refused(vec![1]));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    let begin_ns = world.now_ns;
    world.run();
    assert!(world.now_ns - begin_ns < 20_000);
}

/// A good network: no packet is sent twice, whatever the order of messages.
#[test]
fn p3_nothing_is_sent_again_without_need() {
    for seed in 0..50 {
        let mut world = World::new(seed, Badness::default(), 0);
        world.memory.receives = 1000;
        let mut packets_of_all = 0;
        for _ in 0..40 {
            world.post();
        }
        let mtu = world.requester.mtu();
        for request in world.requester.requests() {
            packets_of_all += match request {
                Request::Send { len, .. } => u64::from(packets(*len, mtu)),
                Request::Write { to, .. } => u64::from(packets(to.len, mtu)),
                // A READ is requested in parts of a software HCA.
                Request::Read(from) if seed % 2 == 0 => {
                    u64::from(packets(from.len, mtu).div_ceil(16))
                }
                _ => 1,
            };
        }
        world.run();
        world.assert_done();
        assert_eq!(world.requests, packets_of_all);
    }
}

#[test]
fn p3_a_peer_that_does_not_answer_fails_the_oldest_message_after_its_retries() {
    // Within the first long time-out, it is asked again after 2, 6, 14 and 30 ms.
    for (seed, timeout_ns, requests) in [(1, TIMEOUT_NS, 4), (3, LONG_TIMEOUT_NS, 8)] {
        let mut world = World::new(
            seed,
            Badness {
                lost: 1000,
                ..Badness::default()
            },
            3,
        );
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        world.run();
        let expected = Failure {
            message: 0,
            status: Status::TransportRetryExceeded,
        };
        assert_eq!(
            (world.requester.failure(), world.now_ns, world.requests),
            (Some(expected), 4 * timeout_ns, requests)
        );
        assert_eq!(
            world
                .requester
                .next_packet(world.now_ns)
                .map(|packet| packet.message),
            None
        );
    }
}

/// Reports that packets cannot arrive end a connection with the third repeat in a row, and not
/// before, however many there are. An answer shows that they are wrong.
#[test]
fn p3_a_peer_that_is_reported_as_unreachable_is_given_up_with_the_third_repeat() {
    for answered in 0..=3 {
        let mut world = World::new(3, Badness::default(), 7);
        let psn = world.responder.expected();
        let send = Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        };
        (0..2).for_each(|_| world.requester.post(send, true));
        let mut repeats = 0;
        while world.requester.failure().is_none() {
            while world.requester.next_packet(world.now_ns).is_some() {}
            (0..9).for_each(|_| world.requester.on_unreachable());
            if repeats == answered && answered > 0 {
                let opcode = PacketOpcode {
                    transport: Transport::Rc,
                    opcode: Opcode::Acknowledge,
                };
                let ack = Headers {
                    aeth: Aeth::ack(0),
                    ..Headers::new(opcode, 9, psn)
                };
                world.requester.on_response(&ack, &[], world.now_ns);
                while world.requester.next_packet(world.now_ns).is_some() {}
                (0..9).for_each(|_| world.requester.on_unreachable());
            }
            world.now_ns = world.requester.due_ns().unwrap();
            world.requester.on_time(world.now_ns);
            repeats += 1;
        }
        let failed = world.requester.failure().unwrap().message;
        let expected = match answered {
            0 | 3 => (3, 0),
            _ => (answered + 3, 1),
        };
        assert_eq!((repeats, failed), expected);
    }
}

/// A peer without a receive refused the oldest packet and what follows it, also what it had held.
#[test]
fn p4_a_needless_repeat_before_a_refusal_does_not_end_the_repeats() {
    let mut world = World::new(6, Badness::default(), 7);
    let first = world.responder.expected();
    let send = Request::Send {
        len: 1,
        imm: None,
        is_solicited: false,
    };
    (0..3).for_each(|_| world.requester.post(send, true));
    let requester = &mut world.requester;
    while requester.next_packet(0).is_some() {}
    let now_ns = requester.due_ns().unwrap();
    requester.on_time(now_ns);
    assert!(requester.next_packet(now_ns).is_some());
    let mut answer = |psn: Psn, syndrome, report: &[u8]| {
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::Acknowledge,
        };
        let aeth = Aeth { syndrome, msn: 0 };
        let headers = Headers {
            aeth,
            ..Headers::new(opcode, 9, psn)
        };
        requester.on_response(&headers, report, now_ns);
    };
    answer(first, Syndrome::RnrNak { timer: RNR_TIMER }, &[]);
    // The second packet, of the first attempt, had been held before.
    answer(first.after(u32::MAX), Aeth::ack(0).syndrome, &[0b10]);
    let now_ns = requester.due_ns().expect("the pause ends");
    requester.on_time(now_ns);
    let again = requester
        .next_packet(now_ns)
        .map(|packet| packet.headers.bth.psn);
    assert_eq!(again, Some(first));
}

/// A lost packet that nothing follows costs some ms, however long the time-out is.
#[test]
fn p3_a_lost_packet_is_sent_again_long_before_a_long_timeout() {
    let mut world = World::new(3, Badness::default(), 0);
    for nth in 0..100 {
        world.memory.receives = 1;
        world.badness.lost = 1000;
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        let begin_ns = world.now_ns;
        world.step();
        world.badness.lost = 0;
        world.run();
        assert!(
            world.requester.failure().is_none() && world.now_ns - begin_ns < 2_100_000,
            "{nth}"
        );
        // An answer to a packet that was not repeated ends the longer wait after a repeat.
        world.posted.push(Posted::refused(vec![1]));
        world.memory.receives = 1;
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        world.run();
    }
}

/// If a peer answers after a constant time that exceeds the time of the first retransmission,
/// messages are sent again a few times in all, and not each of them.
#[test]
fn p3_the_time_of_a_slow_peer_is_learned() {
    for answer_ns in [2_100_000, 5_000_000, 10_000_000, 300_000_000] {
        let mut world = World::new(3, Badness::default(), 7);
        let first = world.responder.expected();
        world.requester = Requester::new(
            Options {
                timeout_ns: 4_000_000_000,
                ..world.requester.options()
            },
            first,
        );
        for nth in 0..30 {
            world.requester.post(
                Request::Send {
                    len: 1,
                    imm: None,
                    is_solicited: false,
                },
                true,
            );
            let (mut sent, end_ns) = (0, world.now_ns + answer_ns);
            loop {
                sent += std::iter::from_fn(|| world.requester.next_packet(world.now_ns)).count();
                let Some(due_ns) = world.requester.due_ns().filter(|due_ns| *due_ns < end_ns)
                else {
                    break;
                };
                world.now_ns = due_ns;
                world.requester.on_time(due_ns);
            }
            assert!(
                sent == 1 || nth < 10,
                "{answer_ns}: {sent} times, message {nth}"
            );
            world.now_ns = end_ns;
            let opcode = PacketOpcode {
                transport: Transport::Rc,
                opcode: Opcode::Acknowledge,
            };
            let ack = Headers {
                aeth: Aeth::ack(0),
                ..Headers::new(opcode, 9, first.after(nth))
            };
            world.requester.on_response(&ack, &[], end_ns);
        }
    }
}

/// A READ of many packets is asked for by the window, so that no more responses are under way.
#[test]
fn p3_no_more_read_responses_are_asked_for_than_a_window_has() {
    for lost in [0, 20] {
        let mut world = World::new(
            6,
            Badness {
                lost,
                ..Badness::default()
            },
            u8::MAX,
        );
        let len = MEMORY as u32;
        world.requester = Requester::new(
            Options {
                mtu: 64,
                ..world.requester.options()
            },
            world.responder.expected(),
        );
        world.responder = Responder::new(9, 64, RNR_TIMER, world.responder.expected(), true);
        let expected = world.oracle.bytes.clone();
        world.posted.push(Posted {
            got: vec![0; expected.len()],
            ..Posted::refused(Vec::new())
        });
        world.requester.post(
            Request::Read(Reth {
                addr: BASE,
                rkey: RKEY,
                len,
            }),
            true,
        );
        let (mut most, mut window) = (0, 0);
        while world.requester.completed() == 0 {
            window = window.max(world.requester.window());
            assert!(world.step() && world.requester.failure().is_none());
            most = most.max(
                world
                    .network
                    .iter()
                    .filter(|Reverse(flying)| !flying.to_responder)
                    .count(),
            );
        }
        assert!(
            world.posted[0].got == expected && most <= window as usize,
            "{most}"
        );
    }
}
