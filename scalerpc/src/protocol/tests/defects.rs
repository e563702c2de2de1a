//! A test for each mistake that earlier designs made, and for each way in which a peer can
//! misbehave.

use super::world::{Counters, World, next_of, responses_addr, small};
use crate::protocol::memory::Memory;
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, Trailer, valid};
use crate::protocol::{
    CallFailure, ClientOp, ClientRegions, CloseReason, Grouping, ServerConfig, ServerOp, State,
};

/// Makes a world whose client 0 is in PROCESS, with nothing outstanding.
pub(super) fn active_world(config: &ServerConfig, clients: usize) -> World {
    let mut world = World::new(config, clients);
    world.call(0).unwrap();
    assert!(world.run(20) < 20);
    assert!(matches!(
        world.sides[0].client.state(),
        State::Process { .. }
    ));
    world
}

/// Takes the next operation of a client that writes into the pool. Returns its offset, and the
/// bytes.
fn take_write(world: &mut World) -> (usize, Vec<u8>) {
    let Some(ClientOp::WriteRequest {
        addr, from, len, ..
    }) = next_of(&mut world.sides[0].to_server)
    else {
        panic!("no WRITE")
    };
    let mut bytes = vec![0; len as usize];
    world.sides[0]
        .client
        .memory()
        .requests
        .read(from, &mut bytes);
    ((addr & 0xffff_ffff) as usize, bytes)
}

fn accepted(world: &World) -> u64 {
    world.server.stats().accepted
}

/// An earlier design polled the magic at the start of a message, which arrives before the rest. In
/// this test the request arrives byte by byte, and so does its trailer, because a packet may end
/// inside the trailer.
#[test]
fn a_torn_message_is_not_taken_whatever_part_of_it_is_there() {
    let mut world = active_world(&small(), 1);
    world.call(0).unwrap();
    let (at, bytes) = take_write(&mut world);
    let before = accepted(&world);
    for (nth, byte) in bytes.iter().enumerate() {
        assert_eq!(accepted(&world), before, "{nth} of {} bytes", bytes.len());
        world.server.memory().pools.write(at + nth, &[*byte]);
        world.poll_server();
    }
    assert_eq!(
        (accepted(&world), world.server.stats().garbage),
        (before + 1, 0)
    );
}

/// A slot that is cleared after the reply might already hold the client's next request.
#[test]
fn the_slot_is_cleared_before_the_reply_so_the_next_request_is_not() {
    let mut world = active_world(&small(), 1);
    for _ in 0..5 {
        world.call(0).unwrap();
        world.deliver_to_server(0);
        world.poll_server();
        let zone = world.server.zone_of(world.sides[0].id).unwrap();
        let layout = *world.server.layout();
        assert_eq!(
            world
                .server
                .memory()
                .pools
                .load(layout.pool_slot(zone, 0) + layout.trailer_at()),
            0,
            "before the reply"
        );
        assert!(world.take() && world.reply());
        while world.deliver_to_client(0) {}
        world.poll_client(0);
    }
    assert_eq!(world.sides[0].ended, [1; 6]);
}

/// The response to a call that ran out of time arrives later, and its slot holds no other call
/// until then.
#[test]
fn the_slot_of_a_call_that_timed_out_is_not_used_before_its_response_came() {
    let mut world = active_world(&small(), 1);
    world.sides[0].client.set_timeout_ns(1_000);
    world.call(0).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    assert!(world.take());
    world.now_ns += 1_000;
    let (now_ns, side) = (world.now_ns, &mut world.sides[0]);
    side.client.poll(now_ns, &mut side.to_server);
    assert_eq!(
        world.take_completion(0).unwrap().outcome,
        Err(CallFailure::TimedOut)
    );
    assert_eq!(
        world.call(0),
        None,
        "the server can still write into the only slot"
    );
    assert!(world.reply() && world.deliver_to_client(0));
    world.poll_client(0);
    assert_eq!(
        world.take_completion(0),
        None,
        "the late response ends no call"
    );
    world.call(0).unwrap();
    assert!(world.run(20) < 20);
    assert_eq!(
        (&world.sides[0].executed[..], &world.sides[0].ended[..]),
        (&[1, 1, 1][..], &[1, 0, 1][..])
    );
}

/// The late response has arrived. If that freed the slot, the slot would be freed once more when
/// the end of the call is taken, under the next call.
#[test]
fn the_slot_of_a_call_that_timed_out_is_not_used_before_its_end_was_taken() {
    let mut world = active_world(&small(), 1);
    world.sides[0].client.set_timeout_ns(1_000);
    world.call(0).unwrap();
    world.deliver_to_server(0);
    world.now_ns += 1_000;
    world.look(0);
    world.poll_server();
    assert!(world.take() && world.reply() && world.deliver_to_client(0));
    world.look(0);
    assert_eq!(
        world.call(0),
        None,
        "the end of the first call was not taken"
    );
    assert_eq!(
        world.take_completion(0).unwrap().outcome,
        Err(CallFailure::TimedOut)
    );
    world.call(0).unwrap();
    assert!(world.run(20) < 20);
    assert_eq!(world.sides[0].ended, [1, 0, 1]);
}

/// The server takes only the number that was not offered: a gap makes every later request in that
/// slot garbage.
#[test]
fn a_call_that_was_never_offered_times_out_and_gives_its_slot_and_its_number_back() {
    let mut world = World::new(&small(), 1);
    for _ in 0..3 {
        world.call(0).unwrap();
        world.time_out(0);
        assert_eq!(world.sides[0].to_server.len(), 0, "nothing is announced");
    }
    world.call(0).unwrap();
    assert!(world.run(20) < 20);
    assert_eq!(
        (&world.sides[0].ended[..], world.server.stats().garbage),
        (&[0, 0, 0, 1][..], 0)
    );
}

/// An early header had 16 bits for the length.
#[test]
fn payloads_of_64_kib_and_more_keep_their_length_and_larger_than_a_slot_are_refused() {
    let config = ServerConfig {
        slot_bytes: 65_536,
        max_clients: 1,
        response_buffers: 2,
        group_size: 1,
        ..small()
    };
    let mut world = active_world(&config, 1);
    let max = world.server.layout().max_payload();
    assert_eq!(max, 65_496);
    let side = &mut world.sides[0];
    let refused = side
        .client
        .call(7, &vec![1; max + 1], 0, &mut side.to_server);
    assert_eq!(refused, Err(CallFailure::TooLarge { len: max + 1, max }));
    assert!(!refused.unwrap_err().is_retryable());
    let payload: Vec<u8> = (0..max).map(|i| i as u8).collect();
    side.client
        .call(7, &payload, 0, &mut side.to_server)
        .unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    let (mut ops, mut into) = (Vec::new(), vec![0; max]);
    let request = world.server.take(&mut into).unwrap();
    assert_eq!((request.len as usize, into == payload), (max, true));
    assert!(world.server.reply(&request, Ok(&into), 0, &mut ops));
    let side = &mut world.sides[0];
    side.to_client.extend(ops.drain(..));
    world.deliver_to_client(0);
    let side = &mut world.sides[0];
    side.client.poll(0, &mut side.to_server);
    let mut back = vec![0; max];
    assert_eq!(
        side.client.poll_completion(&mut back).unwrap().outcome,
        Ok(max)
    );
    assert_eq!(back, payload);
}

/// Pitfall: with a single group a context switch stops every client for nothing.
#[test]
fn a_single_group_is_served_for_ever_in_one_slice() {
    let config = ServerConfig {
        depth: 2,
        ..small()
    };
    let mut world = World::new(&config, 3);
    for _ in 0..20 {
        world.call_all();
        world.now_ns += 5_000;
        assert!(world.run(20) < 20);
    }
    assert_eq!(
        (
            world.server.scheduler().epoch(),
            world.server.stats().slices
        ),
        (1, 1)
    );
    assert_eq!(
        world.server.stats().reads,
        3,
        "one warm-up each; then requests are written"
    );
}

/// Found by a random world: a group was split, the clients that left it kept the zones of its
/// slice, and none of them waited.
#[test]
fn a_client_for_which_its_group_has_no_zone_is_served_in_the_next_slice() {
    let mut world = World::new(
        &ServerConfig {
            max_clients: 6,
            group_size: 2,
            spare_zones: 0,
            ..small()
        },
        3,
    );
    world.call_all();
    assert!(world.run(20) < 20);
    assert_eq!(
        (world.server.stats().slices, world.server.free_zones()),
        (1, 3),
        "each has a zone, and one pool has no other"
    );
    for _ in 0..2 {
        world.waited.push(0);
        world.join();
    }
    let groups = world.server.groups();
    assert!(
        groups
            .clients(world.server.scheduler().current())
            .contains(&world.sides[4].id),
        "{groups:?}"
    );
    assert!(
        groups.count() == 2
            && !groups
                .clients(world.server.scheduler().current())
                .contains(&world.sides[2].id),
        "{groups:?}"
    );
    for _ in 0..10 {
        let _made = world.call(4);
        world.now_ns += 5_000;
        assert!(world.run(20) < 20, "{:?}", world.server.scheduler());
    }
    assert_eq!(world.server.stats().slices, 2, "one switch is enough");
    world.server.check_consistency();
}

/// With grouping off, clients are one group, even if they are more than a group may have and the
/// cache rule permits.
#[test]
fn with_grouping_off_every_client_keeps_its_zone() {
    let config = ServerConfig {
        max_clients: 60,
        depth: 2,
        response_buffers: 16,
        grouping: Grouping::Off,
        ..small()
    };
    let mut world = World::new(&config, 60);
    for _ in 0..20 {
        world.call_all();
        world.now_ns += 5_000;
        assert!(world.run(50) < 50);
        assert!(
            world
                .sides
                .iter()
                .all(|side| matches!(side.client.state(), State::Process { epoch: 1, .. }))
        );
    }
    assert_eq!(
        (world.server.groups().count(), world.server.stats().slices),
        (1, 1)
    );
    assert_eq!(
        world.server.stats().reads,
        60,
        "one warm-up each; then requests are written"
    );
}

/// Pitfall: the READs of a whole group in one burst, after which the responses of the group that is
/// served have to wait.
#[test]
fn the_next_group_is_warmed_one_client_a_poll_and_the_current_one_at_once() {
    let mut world = World::new(
        &ServerConfig {
            max_clients: 6,
            group_size: 3,
            ..small()
        },
        6,
    );
    world.call_all();
    for nth in 0..6 {
        world.poll_client(nth);
        assert!(world.deliver_to_server(nth), "an announcement");
    }
    let mut reads = Vec::new();
    for _ in 0..5 {
        world.poll_server();
        reads.push(world.server.stats().reads);
    }
    assert_eq!(
        (
            world.server.scheduler().epoch(),
            world.server.groups().count()
        ),
        (1, 2)
    );
    assert_eq!(
        reads,
        [3, 4, 5, 6, 6],
        "the next group is chosen in the poll after the switch"
    );
}

/// Pitfall: after a swap, a response names the pool from before.
#[test]
fn each_activation_names_a_zone_of_the_pool_of_its_slice() {
    let mut world = World::of_two_groups(&small(), Counters::default());
    let mut pools = Vec::new();
    for round in 0..200 {
        world.call_all();
        world.run(1);
        for side in &world.sides {
            if let State::Process { epoch, zone } = side.client.state() {
                assert_eq!(u64::from(zone.pool), epoch % 2, "round {round}");
                pools.push(zone.pool);
            }
        }
    }
    assert!(
        pools.contains(&0) && pools.contains(&1) && world.server.stats().slices > 5,
        "{:?}",
        world.server.stats()
    );
}

/// Pitfall: the switch overtakes, or is overtaken by, the response that would carry it.
#[test]
fn a_context_switch_that_races_a_response_loses_neither() {
    let mut world = World::of_two_groups(&small(), Counters::default());
    // Client 0 is in PROCESS; client 2, of the other group, waits.
    world.call(0).unwrap();
    world.run(10);
    world.call(2).unwrap();
    world.poll_client(2);
    world.deliver_to_server(2);
    world.call(0).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    assert!(world.take(), "a worker has the request of client 0");
    while world.deliver_to_client(2) {}
    // The slice ends, and the tenth of a slice in which the response could have carried the event.
    // The client, which has not answered, is asked whether it rests.
    for _ in 0..3 {
        world.now_ns += 1_000;
        world.poll_server();
    }
    let mut behind = world.sides[0].to_client.iter().rev();
    assert!(
        matches!(behind.next(), Some(ServerOp::ReadRestWord { .. })),
        "{:?}",
        world.sides[0].to_client
    );
    assert!(
        matches!(behind.next(), Some(ServerOp::WriteEvent { .. })),
        "{:?}",
        world.sides[0].to_client
    );
    world.reply();
    // Only the event arrives: the client releases, and offers its request again.
    world.deliver_to_client(0);
    world.poll_client(0);
    assert_eq!(world.sides[0].client.state(), State::Warmup);
    world.deliver_to_client(0);
    assert!(world.run(100) < 100);
    assert_eq!(
        (&world.sides[0].executed[..], &world.sides[0].ended[..]),
        (&[1, 1][..], &[1, 1][..])
    );
    assert_eq!(world.server.stats().garbage, 0);
}

/// A READ completes when its slice is over: the request is served, and its client is informed of
/// the end of the slice, not of its begin.
#[test]
fn a_late_warm_up_is_served_and_its_slice_ended_at_once() {
    let mut world = World::of_two_groups(&small(), Counters::default());
    world.call(0).unwrap();
    world.poll_client(0);
    world.deliver_to_server(0);
    world.poll_server();
    world.poll_server();
    assert!(matches!(
        world.sides[0].to_client.front(),
        Some(ServerOp::Read { .. })
    ));
    // The other group's turn begins and ends.
    world.call(2).unwrap();
    world.poll_client(2);
    world.deliver_to_server(2);
    world.now_ns += 2_000;
    world.poll_server();
    assert_eq!((world.server.scheduler().epoch(), accepted(&world)), (2, 0));
    world.deliver_to_client(0);
    assert_eq!(accepted(&world), 1);
    assert!(world.take() && world.reply() && world.deliver_to_client(0));
    world.poll_client(0);
    assert_eq!(
        (world.sides[0].client.state(), &world.sides[0].ended[..]),
        (State::Idle, &[1][..])
    );
    assert!(
        matches!(
            world.sides[0].to_server.first(),
            Some(ClientOp::WriteEntry { len: 16, .. })
        ),
        "it releases"
    );
    assert_eq!(world.sides[0].client.stats().activations, 0);
}

/// The only group is never switched (S16), so a request that is not written at the activation would
/// never be sent.
#[test]
fn a_call_that_was_made_in_warm_up_leaves_with_the_activation() {
    let mut world = World::new(
        &ServerConfig {
            depth: 2,
            ..small()
        },
        1,
    );
    world.call(0).unwrap();
    world.poll_client(0);
    world.call(0).unwrap();
    assert!(world.run(20) < 20);
    assert_eq!(
        (
            world.server.stats().reads,
            world.sides[0].client.stats().direct
        ),
        (1, 1)
    );
}

/// A client whose requests all were accepted in an earlier slice gets no response that could carry
/// the activation.
#[test]
fn a_client_without_a_response_under_way_is_activated_by_a_bare_event() {
    let mut world = World::of_two_groups(&small(), Counters::default());
    world.call(0).unwrap();
    world.poll_client(0);
    world.deliver_to_server(0);
    world.poll_server();
    world.poll_server();
    world.deliver_to_client(0);
    assert!(world.take(), "a worker has the request, and keeps it");
    let mut activations = 0;
    for _ in 0..60 {
        world.now_ns += 500;
        world.call(2);
        for nth in [0, 2] {
            while world.deliver_to_client(nth) {}
            world.poll_client(nth);
            while world.deliver_to_server(nth) {}
        }
        world.poll_server();
        activations = world.sides[0].client.stats().activations;
    }
    assert!(
        activations > 1 && world.server.stats().duplicates > 0,
        "{:?}",
        world.server.stats()
    );
    assert!(world.reply() && world.run(100) < 100);
    assert_eq!(
        (world.sides[0].executed[0], world.sides[0].ended[0]),
        (1, 1)
    );
}

/// Pitfall: the bytes of an earlier use of a slot are taken for a request. A zone is cleared when
/// it is given out, and its messages are numbered.
#[test]
fn what_is_left_in_a_zone_is_not_taken_for_a_request_of_its_next_client() {
    let mut world = World::new(
        &ServerConfig {
            group_size: 1,
            ..small()
        },
        3,
    );
    let layout = *world.server.layout();
    world.call(0).unwrap();
    world.run(10);
    let zone = world.server.zone_of(world.sides[0].id).unwrap();
    let id = world.sides[0].id;
    // Client 0 writes, and disconnects before the server polls. The next client gets the zone.
    world.call(0).unwrap();
    world.deliver_to_server(0);
    world.sides[0].is_alive = false;
    world.leave(0);
    assert_eq!(world.server.zone_of(id), None);
    assert_ne!(
        world
            .server
            .memory()
            .pools
            .load(layout.pool_slot(zone, 0) + layout.trailer_at()),
        0,
        "the message is there"
    );
    for nth in [1, 2] {
        world.call(nth).unwrap();
        assert!(world.run(100) < 100);
    }
    assert_eq!(
        (world.server.stats().accepted, world.server.stats().garbage),
        (3, 0)
    );
}

/// A single key covers the pool, so a client with a wrong address can write anywhere in it.
#[test]
fn a_request_in_the_slot_of_another_client_is_not_served_as_that_clients() {
    let mut world = active_world(&small(), 2);
    world.call(1).unwrap();
    assert!(world.run(20) < 20);
    let layout = *world.server.layout();
    let mine = world.server.zone_of(world.sides[0].id).unwrap();
    let theirs = world.server.zone_of(world.sides[1].id).unwrap();
    world.call(0).unwrap();
    let (at, bytes) = take_write(&mut world);
    // Sequence number and slot are right for the victim, too.
    world.server.memory().pools.write(
        at - layout.pool_slot(mine, 0) + layout.pool_slot(theirs, 0),
        &bytes,
    );
    world.poll_server();
    assert_eq!((world.server.stats().garbage, world.take()), (1, false));
    // The message was removed, so it does not block the victim.
    world.call(1).unwrap();
    world.deliver_to_server(1);
    world.poll_server();
    assert!(world.take());
}

#[test]
fn every_field_of_a_request_is_checked() {
    let good = RequestHeader {
        rpc_type: 7,
        req_id: ReqId {
            slot: 0,
            sequence: 2,
        }
        .to_wire(),
        client_slot_addr: responses_addr(0),
        client_slot_rkey: 200,
        payload_len: 0,
    };
    let good_trailer = Trailer {
        len: HEADER_BYTES as u32,
        valid: valid(2),
    };
    let bad = [
        (
            RequestHeader {
                req_id: ReqId {
                    slot: 1,
                    sequence: 2,
                }
                .to_wire(),
                ..good
            },
            good_trailer,
        ),
        (
            RequestHeader {
                req_id: ReqId {
                    slot: 0,
                    sequence: 3,
                }
                .to_wire(),
                ..good
            },
            good_trailer,
        ),
        (
            RequestHeader {
                client_slot_addr: responses_addr(1),
                ..good
            },
            good_trailer,
        ),
        (
            RequestHeader {
                client_slot_rkey: 201,
                ..good
            },
            good_trailer,
        ),
        (
            RequestHeader {
                payload_len: 1,
                ..good
            },
            good_trailer,
        ),
        (
            good,
            Trailer {
                len: 31,
                ..good_trailer
            },
        ),
        (
            good,
            Trailer {
                len: u32::MAX,
                ..good_trailer
            },
        ),
        (
            good,
            Trailer {
                valid: valid(3),
                ..good_trailer
            },
        ),
        (
            good,
            Trailer {
                valid: valid(0),
                ..good_trailer
            },
        ),
    ];
    let mut world = active_world(&small(), 1);
    let layout = *world.server.layout();
    let start = layout.pool_slot(world.server.zone_of(world.sides[0].id).unwrap(), 0);
    let put = |world: &World, header: RequestHeader, trailer: Trailer| {
        let pools = &world.server.memory().pools;
        pools.write(start + layout.trailer_at() - HEADER_BYTES, &header.encode());
        pools.store(start + layout.trailer_at(), trailer.to_word());
    };
    for (nth, (header, trailer)) in bad.into_iter().enumerate() {
        put(&world, header, trailer);
        world.poll_server();
        assert_eq!(
            (world.server.stats().garbage, accepted(&world)),
            (nth as u64 + 1, 1),
            "case {nth}"
        );
    }
    put(&world, good, good_trailer);
    world.poll_server();
    assert_eq!(accepted(&world), 2);
}

/// Any bytes in memory that clients write: no panic, no read outside of the memory, no execution.
#[test]
fn random_bytes_in_pools_and_entries_are_counted_and_do_no_harm() {
    let mut garbage = 0;
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut world = active_world(
            &ServerConfig {
                depth: 2,
                ..small()
            },
            2,
        );
        for _ in 0..200 {
            let memory = if rng.bool() {
                &world.server.memory().pools
            } else {
                &world.server.memory().entries
            };
            let word = if rng.bool() {
                rng.u64(..)
            } else {
                u64::from(rng.u32(..3)) << 32 | 1 << 63 | rng.u64(..200)
            };
            memory.store(rng.usize(..memory.len() / 8) * 8, word);
            world.now_ns += 100;
            world.poll_server();
            // Operations that garbage caused would go to the client's memory, and fail there.
            world
                .sides
                .iter_mut()
                .for_each(|side| side.to_client.clear());
        }
        garbage += world.server.stats().garbage;
        assert!(!world.take(), "seed {seed}");
    }
    assert!(garbage > 100, "{garbage}");
}

/// Any bytes in a client's memory: the client ends its connection at most.
#[test]
fn random_bytes_in_a_clients_memory_end_its_connection_at_most() {
    let mut closed = 0;
    for seed in 0..200 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut world = active_world(&small(), 1);
        world.call(0).unwrap();
        let side = &mut world.sides[0];
        for _ in 0..50 {
            let memory = &side.client.memory().responses;
            let word = if rng.bool() {
                rng.u64(..)
            } else {
                1 << 63 | u64::from(rng.u32(..4)) << 32 | 32
            };
            memory.store(rng.usize(..memory.len() / 8) * 8, word);
            side.client.poll(0, &mut side.to_server);
        }
        if let State::Closed(reason) = side.client.state() {
            closed += 1;
            assert!(matches!(reason, CloseReason::Protocol(_)));
            let completion = side.client.poll_completion(&mut []).unwrap();
            assert_eq!(completion.outcome, Err(CallFailure::Closed(reason)));
            assert_eq!(
                side.client.call(7, &[], 0, &mut side.to_server),
                Err(CallFailure::NotSent)
            );
        }
    }
    assert!(closed > 150, "{closed}");
}

/// A client stops while it has a zone. That zone is not given to another client, but a spare one
/// is. In the end the client is evicted.
#[test]
fn the_zone_of_a_stopped_client_is_not_reused_before_its_eviction() {
    let config = ServerConfig {
        group_size: 1,
        spare_zones: 1,
        drain_ns: 20_000,
        ..small()
    };
    let mut world = World::new(&config, 3);
    world.call(0).unwrap();
    world.run(10);
    let zone = world.server.zone_of(world.sides[0].id).unwrap();
    // The client no longer polls, but its process lives.
    let mut rounds = 0;
    while world.server.stats().evictions == 0 {
        rounds += 1;
        assert!(rounds < 200, "{:?}", world.server);
        for nth in [1, 2] {
            world.call(nth);
            world.poll_client(nth);
            while world.deliver_to_server(nth) {}
            assert_ne!(
                world.server.zone_of(world.sides[nth].id),
                Some(zone),
                "round {rounds}"
            );
        }
        world.now_ns += 400;
        world.poll_server();
        while world.take() && world.reply() {}
        for nth in [1, 2] {
            while world.deliver_to_client(nth) {}
        }
    }
    assert!(world.sides[1].ended.len() > 3 && world.sides[2].ended.len() > 3);
    assert_eq!(world.server.quarantined(), 1);
    assert!(matches!(
        world.sides[0].to_client.back(),
        Some(ServerOp::Evict { .. })
    ));
    while world.deliver_to_client(0) {}
    assert_eq!(
        (
            world.server.quarantined(),
            world.server.zone_of(world.sides[0].id)
        ),
        (0, None)
    );
}

/// A poll checks only some of the entries, so the server's clock may be past a client's eviction
/// before it finds the client's release.
#[test]
fn a_server_that_was_away_for_long_evicts_no_client_that_has_released() {
    let config = ServerConfig {
        max_clients: 200,
        drain_ns: 10_000,
        ..small()
    };
    let mut world = World::new(&config, 200);
    for rounds in (1..20).cycle().take(200) {
        world.call_all();
        world.run(rounds);
        // The clients poll meanwhile, and release, before the server does anything.
        world.now_ns += config.drain_ns;
    }
    assert_eq!(world.server.stats().evictions, 0);
    assert!(
        world.server.stats().slices > 50,
        "{:?}",
        world.server.stats()
    );
}

#[test]
fn more_clients_than_entries_are_refused_until_one_leaves() {
    let mut world = World::new(&small(), 4);
    let regions = ClientRegions {
        requests_addr: 1,
        requests_rkey: 2,
        responses_addr: 3,
        responses_rkey: 4,
    };
    assert_eq!(world.server.join(regions), None);
    world.sides[2].is_alive = false;
    world.leave(2);
    assert_eq!(world.server.join(regions), Some(world.sides[2].id));
}

/// A request of a client that has disconnected returns its resources, even if another client has
/// the number of the disconnected client.
#[test]
fn a_client_that_leaves_while_its_request_is_worked_on_costs_nothing() {
    let mut world = World::new(
        &ServerConfig {
            max_clients: 1,
            response_buffers: 2,
            ..small()
        },
        1,
    );
    for _ in 0..10 {
        let nth = world.sides.len() - 1;
        let made = world.call(nth);
        assert!(made.is_some());
        world.poll_client(nth);
        world.deliver_to_server(nth);
        for _ in 0..3 {
            world.poll_server();
            while world.deliver_to_client(nth) {}
        }
        assert!(world.take());
        world.sides[nth].is_alive = false;
        world.leave(nth);
        world.waited.push(0);
        world.join();
        world.reply();
        let now = world.sides.len() - 1;
        assert_eq!(
            world.sides[now].to_client.len(),
            0,
            "the successor gets no response"
        );
    }
}

/// Clients of the next group are warmed one at a time; the second client disconnects while it
/// waits.
#[test]
fn a_client_that_leaves_while_it_waits_is_not_looked_for_any_more() {
    let mut world = active_world(&small(), 4);
    for nth in 2..4 {
        world.call(nth).unwrap();
        world.poll_client(nth);
        assert!(world.deliver_to_server(nth));
    }
    world.poll_server();
    let waiting: Vec<usize> = (2..4)
        .filter(|nth| world.server.waits(world.sides[*nth].id))
        .collect();
    assert_eq!(waiting.len(), 1);
    world.server.check_consistency();
    world.sides[waiting[0]].is_alive = false;
    world.leave(waiting[0]);
    world.server.check_consistency();
}

/// Makes a world of clients of two slots, each a group of its own. Client 0 has one call, which a
/// worker keeps, and is in WARMUP again.
fn kept_and_warmed_again() -> World {
    let config = ServerConfig {
        depth: 2,
        group_size: 1,
        spare_zones: 2,
        drain_ns: 1 << 20,
        ..small()
    };
    let mut world = active_world(&config, 2);
    world.call(0).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    assert!(world.take());
    world.hold();
    // The other client gets a slice, and then client 0 is warmed.
    world.call(1).unwrap();
    while world.sides[0].client.state() != State::Warmup {
        exchange(&mut world);
    }
    world
}

/// Lets time pass, and everything that was sent arrive. A client that rests is not polled.
fn exchange(world: &mut World) {
    world.now_ns += 100;
    for nth in 0..world.sides.len() {
        if !world.is_resting(nth) {
            world.poll_client(nth);
        }
        while world.deliver_to_server(nth) {}
    }
    world.poll_server();
    for nth in 0..world.sides.len() {
        while world.deliver_to_client(nth) {}
    }
}

/// S26: *activate* and *switch* of a slice that a client slept through are found together. Another
/// client may have the zone now.
#[test]
fn a_client_that_rested_in_warmup_writes_nothing_into_the_zone_of_a_slice_that_it_slept_through() {
    let mut world = kept_and_warmed_again();
    // The worker's answer ends the call in WARMUP.
    world.reply();
    world.deliver_to_client(0);
    world.poll_client(0);
    assert!(world.sides[0].client.state() == State::Warmup && world.rest(0));
    for _ in 0..100 {
        while world.take() {
            world.reply();
        }
        world.call(1);
        exchange(&mut world);
    }
    assert_eq!(
        (
            world.server.stats().taken_back,
            world.server.zone_of(world.sides[0].id)
        ),
        (1, None)
    );
    world.call(0).unwrap();
    assert!(world.settle(100) < 100);
    assert_eq!(
        (&world.sides[0].ended[..], world.server.stats().garbage),
        (&[1, 1, 1][..], 0)
    );
}

/// A request that was written may still be on its way when its call has run out of time: the zone
/// is not given up before.
#[test]
fn a_client_with_a_call_that_ran_out_of_time_does_not_rest() {
    let mut world = active_world(&small(), 1);
    world.call(0).unwrap();
    world.time_out(0);
    assert!(world.sides[0].open.is_empty() && !world.rest(0));
    assert!(world.settle(20) < 20);
    assert!(world.rest(0));
}

/// S26: a client that was asked while it was awake, and rests before it has polled, is not asked
/// again.
#[test]
fn a_client_that_was_told_and_asked_while_it_was_awake_releases_its_zone_before_it_rests() {
    let mut world = active_world(
        &ServerConfig {
            group_size: 1,
            ..small()
        },
        2,
    );
    world.call(1).unwrap();
    world.poll_client(1);
    while world.deliver_to_server(1) {}
    // The client does not poll while the server writes its events to it.
    for _ in 0..50 {
        world.now_ns += 100;
        world.poll_server();
        while world.deliver_to_client(0) {}
        while world.deliver_to_client(1) {}
    }
    let zone = world.server.zone_of(world.sides[0].id);
    assert!(
        zone.is_some() && world.server.stats().taken_back == 0,
        "it is awake"
    );
    assert!(world.rest(0));
    assert_eq!(world.sides[0].client.stats().activations, 1);
    while world.deliver_to_server(0) {}
    world.poll_server();
    assert_eq!(
        world.server.zone_of(world.sides[0].id),
        None,
        "released, not taken back"
    );
}

/// S26: a server that was absent notifies, asks and evicts late. A client that sleeps still has the
/// time to be found asleep.
#[test]
fn a_client_that_rests_is_not_evicted_by_a_server_that_was_away_for_longer_than_the_drain() {
    const DRAIN_NS: u64 = 10_000;
    let mut world = active_world(
        &ServerConfig {
            group_size: 1,
            drain_ns: DRAIN_NS,
            ..small()
        },
        2,
    );
    assert!(world.rest(0));
    world.call(1).unwrap();
    while !matches!(
        world.sides[0].to_client.back(),
        Some(ServerOp::WriteEvent { .. })
    ) {
        world.now_ns += 100;
        world.poll_client(1);
        while world.deliver_to_server(1) {}
        world.poll_server();
        while world.deliver_to_client(1) {}
    }
    world.now_ns += 2 * DRAIN_NS;
    world.poll_server();
    // The client is asked only now, and its drain time is over already.
    assert!(matches!(
        world.sides[0].to_client.back(),
        Some(ServerOp::ReadRestWord { .. })
    ));
    world.poll_server();
    while world.deliver_to_client(0) {}
    world.poll_server();
    let stats = world.server.stats();
    assert_eq!(
        (
            stats.evictions,
            stats.taken_back,
            world.server.zone_of(world.sides[0].id)
        ),
        (0, 1, None)
    );
}
