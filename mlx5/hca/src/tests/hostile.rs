//! Corrupts the words that peers of a device can write, and the words that its owner writes for
//! requesters, under a driver of another crate. No thread panics or hangs, and memory outside
//! registered regions is unchanged.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use mlx5_wire::*;

use super::driver::{ALL, BYTES, ENTRIES, End, World};
use crate::random::Random;
use crate::shared::layout::{ATOMIC, Message, Taking, qp_index};
use crate::shared::memory::ready_words;
use crate::{Address, FabricSpec, Hca, LocalFabric, Service, SoftOptions};

/// Length in bytes of the two unregistered parts of memory, before and after the registered part.
const OUTSIDE: usize = 4096;

fn nonsense(random: &mut Random) -> u64 {
    match random.below(5) {
        0 => u64::MAX,
        1 => random.below(1 << 20),
        2 => random.next_u64(),
        3 => random.below(4) << 16,
        _ => 1 << random.below(64),
    }
}

/// Corrupts the words that any process of the user can write: the lane's slots in any order, or a
/// message that the owner will take next; the request of an atomic; the words of receives and of
/// readiness.
fn corrupt_lanes(end: &End, random: &mut Random) {
    let hca = &end.hca;
    let index = qp_index(end.qpn);
    let (lanes, lane) = (hca.memory.lanes(), hca.memory.lane(index));
    match random.below(8) {
        0 => lanes.pops[random.below(3) as usize]
            .word
            .store(nonsense(random), Ordering::Relaxed),
        1 => lane.intent.store(nonsense(random), Ordering::Relaxed),
        2 => lanes.ready[0].store(nonsense(random), Ordering::Relaxed),
        3 => lanes.datagram_ready[random.below(4) as usize]
            .store(nonsense(random), Ordering::Relaxed),
        _ => {
            let edges = [
                0,
                7,
                OUTSIDE,
                OUTSIDE + 8,
                BYTES - OUTSIDE - 8,
                BYTES - OUTSIDE - 4,
                BYTES - OUTSIDE,
                BYTES - 8,
            ];
            let edge = end.addr(edges[random.below(edges.len() as u64) as usize]);
            let addr = if random.below(4) == 0 {
                nonsense(random)
            } else {
                edge
            };
            let key = if random.below(4) == 0 {
                nonsense(random)
            } else {
                u64::from(end.key) | random.below(2) << 32
            };
            lane.atomic.addr.store(addr, Ordering::Relaxed);
            lane.atomic.kind_key.store(key, Ordering::Relaxed);
            lane.atomic
                .compare
                .store(nonsense(random), Ordering::Relaxed);
            lane.atomic.swap.store(nonsense(random), Ordering::Relaxed);
            let op_own = if random.below(2) == 0 {
                ATOMIC
            } else {
                random.next_u64() & [0xff, u64::MAX][random.below(2) as usize]
            };
            publish(
                hca,
                index,
                Message {
                    payload: nonsense(random),
                    byte_count: nonsense(random) as u32,
                    imm: nonsense(random) as u32,
                    taking: Taking::new(
                        random.below(40) as u32,
                        if random.below(4) == 0 {
                            nonsense(random)
                        } else {
                            random.below(16)
                        } as u16,
                    ),
                    op_own,
                },
            );
        }
    }
}

/// Writes a message to the slot that the owner of the lane reads next, whatever the state of the
/// queue pair.
fn publish(hca: &Hca, index: usize, message: Message) {
    let state = hca.state.borrow();
    let Some(qp) = &state.queues.qps[index] else {
        return;
    };
    let (position, place) = (qp.lane.position(), qp.lane_place);
    let slots = hca.memory.lane_slots(place);
    drop(state);
    // SAFETY: the lane's slots; its other producer is this thread too, and not in the middle of
    // anything.
    let mut tx = unsafe { copyrpc_shm::lane::LaneTx::new(slots, place.slots.into(), position) };
    tx.publish(message);
    ready_words(&hca.memory).notify(index);
}

/// Corrupts the words that the owner writes for its senders.
fn corrupt_acks(end: &End, random: &mut Random) {
    let memory = &end.hca.memory;
    let entry = memory.qp(qp_index(end.qpn));
    let word = nonsense(random);
    match random.below(12) {
        0 => entry.acks.consumed.store(word, Ordering::Relaxed),
        1 => entry.acks.answered.store(word, Ordering::Relaxed),
        2 => entry.acks.answered.store(
            entry
                .acks
                .answered
                .load(Ordering::Relaxed)
                .wrapping_sub(256),
            Ordering::Relaxed,
        ),
        3 => entry.acks.old.store(word, Ordering::Relaxed),
        4 => entry.identity.store(word, Ordering::Relaxed),
        5 => entry.peer.store(word, Ordering::Relaxed),
        6 => entry.peer_epoch.store(word, Ordering::Relaxed),
        7 => entry.armed.store(word as u32, Ordering::Relaxed),
        8 => memory.control().rqs[random.below(2) as usize]
            .record
            .store(word as u32, Ordering::Relaxed),
        9 => memory.control().rqs[random.below(2) as usize]
            .returned
            .store(word as u32, Ordering::Relaxed),
        10 => memory.control().queues[random.below(ENTRIES as u64 * 8) as usize]
            .store(word, Ordering::Relaxed),
        _ => memory
            .mr(end.key)
            .access
            .store(word as u32, Ordering::Relaxed),
    }
}

/// Corrupts the queues of `end` as a broken driver might: records that jump, links to any place.
fn corrupt_queues(end: &mut End, random: &mut Random) {
    match random.below(8) {
        0 => end.set_record(nonsense(random) as u16),
        1 => end.ring_receives(nonsense(random) as u16),
        2 => (0..ENTRIES as u16)
            .for_each(|i| end.write_receive(i, nonsense(random) as u16, end.sge(OUTSIDE, 64))),
        3 => end.rq.put(
            random.below(u64::from(ENTRIES) * 8) as usize * 8,
            nonsense(random).to_ne_bytes(),
        ),
        4 => end.sq.put(
            random.below(u64::from(ENTRIES) * 8) as usize * 8,
            nonsense(random).to_ne_bytes(),
        ),
        _ => {}
    }
}

fn post(from: &mut End, to: &End, service: Service, random: &mut Random) {
    let local = from.sge(OUTSIDE + 64 * random.below(8) as usize, 32);
    if service == Service::Datagram {
        let vector = AddressVector::local(1, 0);
        let vector = if random.below(2) == 0 {
            vector
        } else {
            vector.with_grh(0, 1, 2, 3, super::driver::GID)
        };
        let datagram = DatagramSegment {
            vector,
            qpn: to.qpn,
            qkey: 5,
        }
        .emit();
        let part = |i: usize| datagram[i * SEGMENT..].first_chunk().copied().unwrap();
        _ = from.post(Opcode::Send, 0, &[part(0), part(1), part(2), local]);
        return;
    }
    let (remote, word) = (to.remote(OUTSIDE + 512), to.remote(OUTSIDE + 8));
    let operands = AtomicSegment {
        swap_add: 1,
        compare: 0,
    }
    .emit();
    let into = from.sge(OUTSIDE + 1024, 8);
    _ = match random.below(5) {
        0 => from.post(Opcode::RdmaWrite, 0, &[remote, local]),
        1 => from.post(Opcode::RdmaWriteImm, 1, &[remote, local]),
        2 => from.post(Opcode::Send, 0, &[local]),
        3 => from.post(Opcode::RdmaRead, 0, &[remote, local]),
        _ => from.post(Opcode::AtomicFetchAdd, 0, &[word, operands, into]),
    };
}

/// Makes a sender write random bytes into the lane of its datagrams.
fn corrupt_datagrams(from: &End, to: &End, random: &mut Random) {
    use crate::shared::layout::DatagramHeader;
    let header = DatagramHeader {
        qpn: if random.below(4) == 0 {
            nonsense(random) as u32
        } else {
            to.qpn
        },
        qkey: 5,
        source_qpn: nonsense(random) as u32,
        byte_count: [0, 1, 4096, 4097, u32::MAX, u32::MAX - 39, 64][random.below(7) as usize],
        imm: 0,
        opcode: [
            CqeOpcode::ResponderSend as u32,
            CqeOpcode::ResponderSendImm as u32,
            ATOMIC as u32,
            0xff,
        ][random.below(4) as usize],
        flags: random.next_u64() as u32,
    };
    let device = &from.hca;
    if let Some(out) = device.state.borrow_mut().links.outgoing.first_mut() {
        let lane = device.memory.datagram_lane(0);
        match random.below(8) {
            0 => lane.consumed.store(nonsense(random), Ordering::Relaxed),
            _ if out.next_payload(lane).is_some() => out.tx.publish(header),
            _ => {}
        }
    }
    let lids = &to.hca.memory.lanes().datagram_ready;
    lids[0].fetch_or(1 << from.hca.lid() | random.below(16), Ordering::Relaxed);
}

fn run(seed: u64, service: Service, is_shared: bool, is_connected: bool) {
    let random = &mut Random::new(seed);
    let world = World::default();
    let [mut a, mut b] =
        [(); 2].map(|()| End::new_inside(&world, service, is_shared, ALL, OUTSIDE));
    let is_datagram = service == Service::Datagram;
    for (end, peer) in [(&a, b.qpn), (&b, a.qpn)]
        .into_iter()
        .filter(|_| is_connected)
    {
        if is_datagram {
            end.activate_datagrams(5)
        } else {
            end.connect(peer)
        }
    }
    for step in 0..300 {
        for _ in 0..random.below(3) {
            post(&mut a, &b, service, random);
        }
        a.ring();
        if step > 10 {
            match random.below(6) {
                0 => corrupt_lanes(&b, random),
                1 => corrupt_acks(&b, random),
                2 => corrupt_queues(&mut b, random),
                3 => corrupt_queues(&mut a, random),
                4 if is_datagram => corrupt_datagrams(&a, &b, random),
                _ => {}
            }
        } else if step == 0 {
            (0..ENTRIES as u16).for_each(|i| b.write_receive(i, i + 1, b.sge(OUTSIDE + 2048, 104)));
            b.ring_receives(ENTRIES as u16 - 1);
        }
        if random.below(64) == 0 {
            b.hca.fail_qp(b.qpn);
        }
        if random.below(64) == 0 && b.hca.reset_qp(b.qpn) {
            b.hca.initialize(b.qpn);
            if is_datagram {
                b.activate_datagrams(5)
            } else {
                b.connect(a.qpn)
            }
        }
        world
            .now_ns
            .fetch_add(random.below(1 << 24), Ordering::Relaxed);
        for _ in 0..1 + random.below(3) {
            a.hca.poll();
            b.hca.poll();
        }
        a.try_poll();
        b.try_poll();
    }
    // Dead peers are searched for once in 1,024 polls.
    drop(a);
    (0..1100).for_each(|_| _ = b.hca.poll());
    for outside in [0, BYTES - OUTSIDE] {
        assert!(
            (0..OUTSIDE).all(|i| b.data.get(outside + i) == [0]),
            "seed {seed}: memory that is not registered changed"
        );
    }
}

#[test]
fn nonsense_from_a_peer_of_an_hca_below_another_driver_is_contained() {
    for seed in 0..60 {
        for is_shared in [false, true] {
            run(seed, Service::Connected, is_shared, true);
            run(seed, Service::Connected, is_shared, false);
            run(seed, Service::Datagram, is_shared, true);
        }
    }
}

/// Forbidden atomics, in every state of a queue pair: memory outside the regions registered for
/// atomics is unchanged, and the requester gets the reason.
#[test]
fn an_atomic_is_executed_only_where_its_key_allows() {
    let world = World::default();
    let end = End::new_inside(&world, Service::Connected, true, ALL, OUTSIDE);
    // A queue pair grants no access before it is connected.
    let to = Address::of_number(end.qpn);
    end.hca
        .connect(end.qpn, &to, &ConnectOptions::default(), ALL)
        .unwrap();
    let (hca, index) = (&end.hca, qp_index(end.qpn));
    let ask = |addr: u64, kind_key: u64, number: u32| {
        let request = &hca.memory.lane(index).atomic;
        request.addr.store(addr, Ordering::Relaxed);
        request.kind_key.store(kind_key, Ordering::Relaxed);
        request.swap.store(1, Ordering::Relaxed);
        publish(
            hca,
            index,
            Message {
                op_own: ATOMIC,
                imm: number,
                ..Message::default()
            },
        );
        end.hca.poll();
        crate::shared::layout::Acks::unpack(
            hca.memory.qp(index).acks.answered.load(Ordering::Acquire),
        )
    };
    let (add, key) = (1 << 32, u64::from(end.key));
    assert_eq!(ask(end.addr(OUTSIDE), add | key, 1), (1, 0));
    assert_eq!(end.data.get(OUTSIDE), 1u64.to_ne_bytes());
    for (number, addr) in (2..).zip([
        end.addr(OUTSIDE) - 8,
        end.addr(BYTES - OUTSIDE - 7),
        end.addr(BYTES - OUTSIDE),
        0,
        u64::MAX - 7,
    ]) {
        let (told, fault) = ask(addr, add | key, number);
        assert_eq!((told, fault != 0), (number, true), "{addr:#x}");
    }
    assert_ne!(ask(end.addr(OUTSIDE) + 4, add | key, 9).1, 0, "not aligned");
    assert_ne!(
        ask(end.addr(OUTSIDE), add | key ^ 1, 10).1,
        0,
        "no such key"
    );
    assert_ne!(ask(end.addr(OUTSIDE), add, 11).1, 0, "no key");
    assert_eq!(end.data.get(OUTSIDE), 1u64.to_ne_bytes());
}

/// An invalid word of an owner ends the atomic, so the owner is not asked again without end.
#[test]
fn an_owner_that_tells_nonsense_of_an_atomic_ends_it() {
    for fault in [6, 8, 0xff] {
        let world = World::default();
        let [mut a, b] = End::pair(&world, false, ALL);
        a.post(
            Opcode::AtomicFetchAdd,
            0,
            &[
                b.remote(8),
                AtomicSegment {
                    swap_add: 1,
                    compare: 0,
                }
                .emit(),
                a.sge(0, 8),
            ],
        );
        a.ring();
        a.hca.poll();
        let acks = &b.hca.memory.qp(qp_index(b.qpn)).acks;
        acks.answered.store(
            crate::shared::layout::Acks::pack(1, fault),
            Ordering::Release,
        );
        a.hca.poll();
        let (opcode, syndrome) = (CqeOpcode::RequesterError, Syndrome::RemoteAccess);
        assert_eq!(
            a.poll(),
            [super::driver::Done::Failed {
                opcode,
                wqe: 0,
                syndrome
            }],
            "{fault}"
        );
    }
}

/// The driver posts a receive between the device's check of its queues and the arrival that needs a
/// receive. No hardware misses that receive.
#[test]
fn a_datagram_finds_a_receive_that_was_posted_since_the_last_look() {
    for is_shared in [false, true] {
        let world = World::default();
        let [mut a, mut b] =
            [(); 2].map(|()| End::new_inside(&world, Service::Datagram, is_shared, ALL, OUTSIDE));
        for end in [&a, &b] {
            end.activate_datagrams(5);
            end.hca.poll();
        }
        b.write_receive(0, 1, b.sge(OUTSIDE + 2048, 104));
        b.ring_receives(1);
        post(&mut a, &b, Service::Datagram, &mut Random::new(1));
        a.ring();
        a.hca.poll();
        b.hca.empty_poll();
        let arrived = b.poll();
        assert!(
            matches!(
                arrived[..],
                [super::driver::Done::Received {
                    wqe: 0,
                    bytes: 72,
                    ..
                }]
            ),
            "{arrived:?}"
        );
    }
}

/// A peer that deregisters memory waits for an even word.
#[test]
fn a_panic_that_is_caught_leaves_the_device_marked_as_idle() {
    let options = SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        arena_bytes: 4096,
        ..SoftOptions::default()
    };
    let hca = Hca::open(&options).unwrap();
    let word = || {
        hca.memory
            .control()
            .header
            .executing
            .load(Ordering::Relaxed)
    };
    for round in 1..=3 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            hca.executing(|| panic!("odd while it executes: {}", word()))
        }));
        let text = outcome.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(
            (text.as_str(), word()),
            (
                format!("odd while it executes: {}", 2 * round - 1).as_str(),
                2 * round
            )
        );
    }
}
