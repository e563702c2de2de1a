//! `mlx5_hca` under a driver of another crate, whose queues are in its own memory and whose
//! doorbells are not announced.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod driver;
mod late;
mod random_operations;
mod terms;

use std::sync::atomic::Ordering;

use driver::{ALL, Done, End, GID, INFINIBAND, IPV4, World};
use mlx5_hca::wire::*;
use mlx5_hca::{Port, PortAddress};

const PAYLOAD: [u8; 32] = *b"what another driver's queue says";

fn sent(wqe: u16) -> Done {
    Done::Sent { wqe, bytes: 0 }
}

fn refused(wqe: u16, syndrome: Syndrome) -> Done {
    Done::Failed {
        opcode: CqeOpcode::RequesterError,
        wqe,
        syndrome,
    }
}

/// A world, and two connected ends in it.
fn pair() -> (World, [End; 2]) {
    let world = World::default();
    let ends = End::pair(&world, false, ALL);
    (world, ends)
}

/// Makes two ends that send and receive datagrams with the Q_Key 5.
fn datagrams(world: &World) -> [End; 2] {
    let ends = [(); 2].map(|()| End::new(world, Service::Datagram, false, ALL));
    ends.iter().for_each(|end| end.activate_datagrams(5));
    ends
}

/// Returns the segments with the destination of a datagram with the Q_Key 5.
fn datagram(vector: AddressVector, qpn: u32) -> [[u8; SEGMENT]; 3] {
    let bytes = DatagramSegment {
        vector,
        qpn,
        qkey: 5,
    }
    .emit();
    std::array::from_fn(|i| bytes[i * SEGMENT..].first_chunk().copied().unwrap())
}

/// Returns the segments of a fetch-and-add of 1 to the word at offset 8 of `b`.
fn add_one(a: &End, b: &End) -> [[u8; SEGMENT]; 3] {
    [
        b.remote(8),
        AtomicSegment {
            swap_add: 1,
            compare: 0,
        }
        .emit(),
        a.sge(0, 8),
    ]
}

fn received(opcode: CqeOpcode, wqe: u16, imm: u32) -> Done {
    Done::Received {
        opcode,
        wqe,
        bytes: 32,
        imm,
        source: 0,
        grh: false,
    }
}

#[test]
fn a_send_lands_in_the_receive_of_the_other_drivers_ring() {
    let (_, [mut a, mut b]) = pair();
    a.data.put(64, PAYLOAD);
    b.receive_at(&[4096, 4096 + 64], 32);
    b.hca.poll();
    let first = a.post(Opcode::Send, 0, &[a.sge(64, 32)]);
    let second = a.post(Opcode::SendImm, 7, &[a.sge(64, 16), a.sge(80, 16)]);
    a.hca.poll();
    assert_eq!(a.poll(), [], "the record says nothing yet");
    a.ring();
    let (done, arrived) = a.exchange(&mut b);
    assert_eq!(done, [sent(first), sent(second)]);
    assert_eq!(
        arrived,
        [
            received(CqeOpcode::ResponderSend, 0, 0),
            received(CqeOpcode::ResponderSendImm, 1, 7)
        ]
    );
    assert_eq!(
        (b.data.get(4096), b.data.get(4096 + 64)),
        (PAYLOAD, PAYLOAD)
    );
}

/// Checks the condition of `uct_ud_mlx5_iface_poll_rx` in UCX.
#[test]
fn a_rings_completions_count_receives_past_the_end_of_the_ring() {
    for service in [Service::Connected, Service::Datagram] {
        let world = World::default();
        let [mut a, mut b] = [(); 2].map(|()| End::new(&world, service, false, ALL));
        for (end, to) in [(&a, b.qpn), (&b, a.qpn)] {
            if service == Service::Connected {
                end.connect(to)
            } else {
                end.activate_datagrams(5)
            }
        }
        let header = if service == Service::Datagram {
            datagram(AddressVector::local(1, 0), b.qpn).to_vec()
        } else {
            vec![]
        };
        // One more receive is flushed.
        for count in 0..40 {
            b.write_receive(count % 16, 0, b.sge(4096, 128));
            b.ring_receives(1);
            b.hca.poll();
            if count < 39 {
                a.post_now(Opcode::Send, 0, &[&header[..], &[a.sge(0, 32)]].concat());
            } else {
                b.hca.fail_qp(b.qpn);
            }
            let (_, arrived) = a.exchange(&mut b);
            let wqe = arrived.iter().map(|done| match *done {
                Done::Received { wqe, .. } | Done::Failed { wqe, .. } | Done::Sent { wqe, .. } => {
                    wqe
                }
            });
            assert_eq!(wqe.collect::<Vec<_>>(), [count], "{service:?}");
        }
    }
}

#[test]
fn shared_receives_are_taken_in_the_order_of_their_links() {
    let world = World::default();
    let [mut a, mut b] = End::pair(&world, true, ALL);
    a.data.put(0, PAYLOAD);
    // The list starts at WQE 0.
    let order = [0, 9, 4, 15, 2, 7];
    for pair in order.windows(2) {
        b.write_receive(
            pair[0],
            pair[1],
            b.sge(4096 + usize::from(pair[0]) * 32, 32),
        );
    }
    b.ring_receives(2);
    b.hca.poll();
    b.ring_receives(3);
    b.hca.poll();
    for &wqe in &order[..5] {
        a.post_now(Opcode::Send, 0, &[a.sge(0, 32)]);
        let (done, arrived) = a.exchange(&mut b);
        assert_eq!(
            (done.len(), arrived),
            (1, vec![received(CqeOpcode::ResponderSend, wqe, 0)])
        );
        assert_eq!(b.data.get(4096 + usize::from(wqe) * 32), PAYLOAD);
    }
}

#[test]
fn one_sided_operations_need_nothing_of_the_target() {
    let (_, [mut a, b]) = pair();
    a.data.put(0, PAYLOAD);
    a.post(Opcode::RdmaWrite, 0, &[b.remote(512), a.sge(0, 32)]);
    let read = a.post_now(Opcode::RdmaRead, 0, &[b.remote(512), a.sge(1024, 32)]);
    a.hca.poll();
    assert_eq!(
        a.poll(),
        [
            sent(0),
            Done::Sent {
                wqe: read,
                bytes: 32
            }
        ]
    );
    assert_eq!((b.data.get(512), a.data.get(1024)), (PAYLOAD, PAYLOAD));
}

#[test]
fn an_atomic_waits_for_the_owner_of_the_memory_and_for_nothing_else() {
    let (world, [mut a, mut b]) = pair();
    b.data.put(8, 40u64.to_ne_bytes());
    let operands = |swap_add, compare| AtomicSegment { swap_add, compare }.emit();
    a.post(
        Opcode::AtomicFetchAdd,
        0,
        &[b.remote(8), operands(2, 0), a.sge(0, 8)],
    );
    a.post(
        Opcode::AtomicCompareSwap,
        0,
        &[b.remote(8), operands(99, 42), a.sge(8, 8)],
    );
    a.post(
        Opcode::AtomicCompareSwap,
        0,
        &[b.remote(8), operands(7, 42), a.sge(16, 8)],
    );
    a.post_now(Opcode::RdmaRead, 0, &[b.remote(8), a.sge(24, 8)]);
    for _ in 0..100 {
        world.pass_a_second();
        a.hca.poll();
    }
    assert_eq!(
        (a.poll(), b.data.get(8)),
        (vec![], 40u64.to_ne_bytes()),
        "the owner has not looked, and lives"
    );
    let (done, _) = a.exchange(&mut b);
    assert_eq!(done, [0, 1, 2, 3].map(|wqe| Done::Sent { wqe, bytes: 8 }));
    let words: [u64; 4] = std::array::from_fn(|i| u64::from_ne_bytes(a.data.get(8 * i)));
    assert_eq!(words, [40, 42, 99, 99]);
}

#[test]
fn an_atomics_result_is_scattered_over_its_buffers() {
    let (_, [mut a, mut b]) = pair();
    let old = *b"old word";
    b.data.put(8, old);
    let operands = AtomicSegment {
        swap_add: 0,
        compare: 0,
    }
    .emit();
    a.post_now(
        Opcode::AtomicFetchAdd,
        0,
        &[b.remote(8), operands, a.sge(0, 3), a.sge(100, 5)],
    );
    assert_eq!(a.exchange(&mut b).0, [Done::Sent { wqe: 0, bytes: 8 }]);
    assert_eq!((a.data.get(0), a.data.get(100)), (*b"old\0", *b" word\0"));
}

#[test]
fn an_atomic_that_is_not_allowed_fails_at_both_ends() {
    let world = World::default();
    let [mut a, mut b] = End::pair(&world, false, ALL.difference(Access::REMOTE_ATOMIC));
    a.post_now(Opcode::AtomicFetchAdd, 0, &add_one(&a, &b));
    let (done, _) = a.exchange(&mut b);
    assert_eq!(done, [refused(0, Syndrome::RemoteAccess)]);
    assert!(a.hca.has_failed(a.qpn) && b.hca.has_failed(b.qpn));
}

#[test]
fn registered_memory_that_its_program_has_unmapped_is_an_error_by_packets() {
    use Syndrome::{LocalProtection, RemoteAccess, RemoteOperation};
    let world = World::by_packets();
    for (opcode, is_own, status) in [
        (Opcode::Send, true, LocalProtection),
        (Opcode::Send, false, RemoteOperation),
        (Opcode::RdmaWrite, true, LocalProtection),
        (Opcode::RdmaWrite, false, RemoteAccess),
        (Opcode::RdmaRead, true, LocalProtection),
        (Opcode::RdmaRead, false, RemoteAccess),
        (Opcode::AtomicFetchAdd, true, LocalProtection),
        (Opcode::AtomicFetchAdd, false, RemoteAccess),
    ] {
        let [mut a, mut b] = End::pair(&world, false, ALL);
        b.receive_at(&[64], 32);
        let segments = match opcode {
            Opcode::Send => vec![a.sge(0, 8)],
            Opcode::AtomicFetchAdd => add_one(&a, &b).to_vec(),
            _ => vec![b.remote(0), a.sge(0, 8)],
        };
        if is_own { &a } else { &b }.data.forbid();
        a.post_now(opcode, 0, &segments);
        let mut done = vec![];
        for _ in 0..1_000 {
            done.extend(a.exchange(&mut b).0);
            world.now_ns.fetch_add(1_000, Ordering::Relaxed);
        }
        assert_eq!(done, [refused(0, status)], "{opcode:?}, own: {is_own}");
    }
}

/// The vendor syndrome distinguishes a peer to which the kernel sends no packets from a peer that
/// does not answer.
#[test]
fn packets_that_the_kernel_refuses_are_the_reason_of_the_failure() {
    let world = World::by_packets();
    let [mut a, mut b] = [(); 2].map(|()| End::new(&world, Service::Connected, false, ALL));
    // No packet goes there from an address of the loopback interface.
    a.connect_by_packets(&b, "192.0.2.1".parse().unwrap());
    a.post_now(Opcode::Send, 0, &[a.sge(0, 8)]);
    let mut done = vec![];
    for _ in 0..10_000 {
        done.extend(a.exchange(&mut b).0);
        world.now_ns.fetch_add(1_000_000, Ordering::Relaxed);
    }
    assert_eq!(done, [refused(0, Syndrome::TransportRetryExceeded)]);
    // No route.
    assert_eq!(a.vendor_syndrome(0), 0x26);
}

/// An operation of each kind that needs a right from the peer's queue pair, and the right. The
/// operation of no bytes touches no memory.
fn one_sided(a: &End, b: &End) -> [(Access, Opcode, Vec<[u8; SEGMENT]>); 5] {
    let operands = AtomicSegment {
        swap_add: 1,
        compare: 0,
    }
    .emit();
    [
        (
            Access::REMOTE_WRITE,
            Opcode::RdmaWrite,
            vec![b.remote(0), a.sge(0, 8)],
        ),
        (
            Access::REMOTE_WRITE,
            Opcode::RdmaWriteImm,
            vec![b.remote(0)],
        ),
        (
            Access::REMOTE_READ,
            Opcode::RdmaRead,
            vec![b.remote(0), a.sge(0, 8)],
        ),
        (
            Access::REMOTE_ATOMIC,
            Opcode::AtomicFetchAdd,
            vec![b.remote(8), operands, a.sge(0, 8)],
        ),
        (
            Access::REMOTE_ATOMIC,
            Opcode::AtomicCompareSwap,
            vec![b.remote(8), operands, a.sge(0, 8)],
        ),
    ]
}

#[test]
fn a_queue_pair_lets_its_peer_do_what_its_rights_say_whatever_regions_allow() {
    let world = World::default();
    for case in 0..5 {
        let [mut a, mut b] = [(); 2].map(|()| End::new(&world, Service::Connected, false, ALL));
        let (needed, opcode, segments) = one_sided(&a, &b)[case].clone();
        a.data.put(0, [1u8; 8]);
        b.receive_at(&[64], 32);
        a.connect(b.qpn);
        b.connect_with(a.qpn, needed);
        b.hca.poll();
        a.post_now(opcode, 0, &segments);
        assert!(
            matches!(a.exchange(&mut b).0[..], [Done::Sent { wqe: 0, .. }]),
            "{opcode:?} with {needed:?} alone"
        );

        let [mut a, mut b] = [a, b].map(|mut end| {
            end.reset();
            end
        });
        a.connect(b.qpn);
        b.connect_with(a.qpn, ALL.difference(needed));
        b.data.put(0, [7u8; 16]);
        b.receive_at(&[64], 32);
        b.hca.poll();
        a.post_now(opcode, 0, &segments);
        let (done, arrived) = a.exchange(&mut b);
        let refused = refused(0, Syndrome::RemoteInvalidRequest);
        let flushed = Done::Failed {
            opcode: CqeOpcode::ResponderError,
            wqe: 0,
            syndrome: Syndrome::WorkRequestFlushed,
        };
        assert_eq!(
            (&done[..], &arrived[..]),
            (&[refused][..], &[flushed][..]),
            "{opcode:?} without {needed:?}"
        );
        assert_eq!(
            (b.data.get(0), a.data.get(0)),
            ([7u8; 16], a.data.get::<8>(0)),
            "{opcode:?}"
        );
        assert!(a.hca.has_failed(a.qpn) && b.hca.has_failed(b.qpn));
    }
}

#[test]
fn rights_change_while_a_queue_pair_is_connected_and_its_owner_looks_at_them_too() {
    let (world, [mut a, mut b]) = pair();
    let add = |a: &mut End, b: &End| a.post_now(Opcode::AtomicFetchAdd, 0, &add_one(a, b));
    b.hca.allow(b.qpn, Access::REMOTE_ATOMIC);
    add(&mut a, &b);
    assert_eq!(a.exchange(&mut b).0, [Done::Sent { wqe: 0, bytes: 8 }]);
    // The atomic is requested while it is allowed. The owner refuses it, because it is not allowed
    // any more.
    add(&mut a, &b);
    a.hca.poll();
    b.hca.allow(b.qpn, Access::REMOTE_READ);
    let (done, _) = a.exchange(&mut b);
    assert_eq!(done, [refused(1, Syndrome::RemoteInvalidRequest)]);
    assert_eq!(b.data.get(8), 1u64.to_ne_bytes());
    b.hca.fail_qp(b.qpn);
    b.hca.allow(b.qpn, ALL);
    a.reset();
    a.connect(b.qpn);
    add(&mut a, &b);
    a.hca.poll();
    world.pass_a_second();
    let (done, _) = a.exchange(&mut b);
    assert_eq!(
        done,
        [refused(0, Syndrome::TransportRetryExceeded)],
        "a right does not make it receive"
    );
}

#[test]
fn a_region_whose_access_changes_is_the_same_region_with_other_rights() {
    let world = World::default();
    let [mut a, mut b] = End::pair(&world, false, Access::LOCAL_WRITE);
    for (wqe, access) in [(0, ALL), (1, Access::LOCAL_WRITE | Access::REMOTE_READ)] {
        assert!(b.hca.try_reregister(b.key, b.pd(), access).unwrap());
        a.post_now(Opcode::RdmaWrite, 0, &[b.remote(0), a.sge(0, 8)]);
        let (done, _) = a.exchange(&mut b);
        let refused = refused(wqe, Syndrome::RemoteAccess);
        assert_eq!(
            done,
            [if access.contains(Access::REMOTE_WRITE) {
                sent(wqe)
            } else {
                refused
            }]
        );
    }
    assert!(
        b.hca
            .try_reregister(b.key, b.pd(), Access::REMOTE_WRITE)
            .is_err()
    );
}

#[test]
fn a_datagram_goes_where_its_queue_pair_number_says_and_brings_its_route_header() {
    let world = World::default();
    let [mut a, mut b] = datagrams(&world);
    b.receive_at(&[4096, 4096 + 128], 72);
    b.hca.poll();
    a.data.put(0, PAYLOAD);
    let plain = AddressVector::local(1, 0);
    // The datagram of the other port is lost.
    for vector in [
        plain,
        AddressVector::local(777, 0),
        plain.with_grh(0, 0x12345, 9, 0x5c, GID),
    ] {
        let [first, second, third] = datagram(vector, b.qpn);
        a.post(Opcode::Send, 0, &[first, second, third, a.sge(0, 32)]);
    }
    a.ring();
    let (done, arrived) = a.exchange(&mut b);
    assert_eq!(done, [sent(0), sent(2), sent(4)]);
    let arrival = |wqe, grh| Done::Received {
        opcode: CqeOpcode::ResponderSend,
        wqe,
        bytes: 72,
        imm: 0,
        source: a.qpn,
        grh,
    };
    assert_eq!(arrived, [arrival(0, false), arrival(1, true)]);
    assert_eq!(
        (b.data.get(4096 + 40), b.data.get(4096 + 128 + 40)),
        (PAYLOAD, PAYLOAD)
    );
    let grh: [u8; 40] = b.data.get(4096 + 128);
    assert_eq!(grh[..8], [0x65, 0xc1, 0x23, 0x45, 0, 24 + 32, 0x1b, 9]);
    assert_eq!((&grh[8..24], &grh[24..]), (&GID[..], &GID[..]));
}

#[test]
fn a_queue_pair_is_reached_at_the_port_of_its_device_only() {
    let gids = INFINIBAND.network[0].gids;
    let network = Vec::leak(vec![
        PortAddress { lid: 1, gids },
        PortAddress { lid: 2, gids },
    ]);
    let (world, ports) = (
        World::default(),
        [0, 1].map(|index| Port { network, index }),
    );
    let [mut a, mut b] = ports.map(|port| End::new(&world.at(port), Service::Datagram, false, ALL));
    for (end, index) in [(&a, 0), (&b, 1)] {
        assert!(ports[0].has(index, end.qpn) && !ports[0].has(1 - index, end.qpn));
    }
    [&a, &b].iter().for_each(|end| end.activate_datagrams(5));
    b.receive_at(&[4096, 4096 + 128], 72);
    b.hca.poll();
    a.data.put(0, PAYLOAD);
    for lid in [1, 2, 3] {
        let [first, second, third] = datagram(AddressVector::local(lid, 0), b.qpn);
        a.post(Opcode::Send, 0, &[first, second, third, a.sge(0, 32)]);
    }
    a.ring();
    let (_, arrived) = a.exchange(&mut b);
    assert_eq!(arrived.len(), 1, "{arrived:?}");
}

#[test]
fn on_roce_a_datagram_goes_out_from_a_gid_to_one_of_its_kind_and_brings_that_kinds_header() {
    let world = World::roce();
    let [mut a, mut b] = datagrams(&world);
    b.receive_at(&[4096, 4096 + 128, 4096 + 256], 72);
    b.hca.poll();
    a.data.put(0, PAYLOAD);
    let to = |source, gid| AddressVector::local(0, 0).with_grh(source, 0, 64, 0x5c, gid);
    // Of the five, no port is at the other's address, and no GID is at index 4.
    for vector in [
        to(0, GID),
        to(3, [7; 16]),
        to(1, IPV4),
        to(4, GID),
        to(3, IPV4),
    ] {
        let [first, second, third] = datagram(vector, b.qpn);
        a.post_now(Opcode::Send, 0, &[first, second, third, a.sge(0, 32)]);
        a.hca.poll();
    }
    let (_, arrived) = a.exchange(&mut b);
    let arrival = |wqe| Done::Received {
        opcode: CqeOpcode::ResponderSend,
        wqe,
        bytes: 72,
        imm: 0,
        source: a.qpn,
        grh: true,
    };
    assert_eq!(arrived, [0, 1, 2].map(arrival));
    let headers: [[u8; 40]; 3] = [0, 1, 2].map(|i| b.data.get(4096 + i * 128));
    assert_eq!(
        (&headers[0][8..24], &headers[0][24..]),
        (&GID[..], &GID[..])
    );
    // Between a link-local GID and a GID of IPv4 there is no IPv4 header.
    assert_eq!(
        (&headers[1][8..24], &headers[1][24..]),
        (&GID[..], &IPV4[..])
    );
    // Version and words, class, length (20 + 8 + 12 + 8 + 32 + 4), identification, flags, time to
    // live, UDP.
    let ipv4 = &headers[2][20..];
    assert_eq!(ipv4[..10], [0x45, 0x5c, 0, 84, 0, 0, 0x40, 0, 64, 17]);
    assert_eq!(ipv4[12..], [127, 0, 0, 1, 127, 0, 0, 1]);
    // RFC 1071: with its checksum, the sum of a header is all ones.
    let sum: u32 = ipv4
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
}

#[test]
fn who_connects_to_nobody_is_told_when_the_retries_are_over() {
    let world = World::default();
    let mut a = End::new(&world, Service::Connected, false, ALL);
    a.connect(a.qpn ^ 1);
    a.post_now(Opcode::RdmaWrite, 0, &[a.remote(0), a.sge(0, 8)]);
    a.hca.poll();
    assert_eq!(a.poll(), []);
    world.pass_a_second();
    a.hca.poll();
    assert_eq!(a.poll(), [refused(0, Syndrome::TransportRetryExceeded)]);
}

#[test]
fn a_queue_pair_of_a_virtual_function_that_was_given_up_does_not_answer() {
    let (world, [mut a, b]) = pair();
    let to = b.remote(0);
    drop(b);
    a.post_now(Opcode::RdmaWrite, 0, &[to, a.sge(0, 8)]);
    a.hca.poll();
    world.pass_a_second();
    a.hca.poll();
    assert_eq!(a.poll(), [refused(0, Syndrome::TransportRetryExceeded)]);
}

#[test]
fn after_reset_both_queues_start_again_and_an_old_connection_is_none() {
    let (world, [mut a, mut b]) = pair();
    a.data.put(0, PAYLOAD);
    for round in 0..3 {
        b.receive_at(&[4096, 8192], 32);
        b.hca.poll();
        a.post_now(Opcode::Send, 0, &[a.sge(0, 32)]);
        let (done, arrived) = a.exchange(&mut b);
        assert_eq!(
            (done, arrived),
            (
                vec![sent(0)],
                vec![received(CqeOpcode::ResponderSend, 0, 0)]
            ),
            "round {round}"
        );
        b.reset();
        // Only one end is new, so the other's connection leads to no queue pair now.
        b.connect(a.qpn);
        b.receive_at(&[4096], 32);
        let late = a.post_now(Opcode::Send, 0, &[a.sge(0, 32)]);
        let (done, arrived) = a.exchange(&mut b);
        assert_eq!((done, arrived), (vec![], vec![]));
        world.pass_a_second();
        let (done, arrived) = a.exchange(&mut b);
        assert_eq!(done, [refused(late, Syndrome::TransportRetryExceeded)]);
        assert_eq!(arrived, []);
        for end in [&mut a, &mut b] {
            end.reset();
        }
        a.connect(b.qpn);
        b.connect(a.qpn);
    }
}

#[test]
fn an_error_flushes_what_was_posted_on_both_sides() {
    let (_, [mut a, mut b]) = pair();
    b.receive_at(&[0], 32);
    let posted = b.post(Opcode::RdmaWrite, 0, &[a.remote(0), b.sge(0, 32)]);
    // Not rung when the state changes, and not polled.
    b.ring();
    b.hca.fail_qp(b.qpn);
    let (_, mut flushed) = a.exchange(&mut b);
    flushed.sort_by_key(|done| {
        matches!(
            done,
            Done::Failed {
                opcode: CqeOpcode::ResponderError,
                ..
            }
        )
    });
    let failed = |opcode, wqe| Done::Failed {
        opcode,
        wqe,
        syndrome: Syndrome::WorkRequestFlushed,
    };
    assert_eq!(
        flushed,
        [
            failed(CqeOpcode::RequesterError, posted),
            failed(CqeOpcode::ResponderError, 0)
        ]
    );
    assert!(b.hca.has_failed(b.qpn));
}

#[test]
fn a_record_beyond_the_queue_ends_the_queue_pair_and_nothing_is_read() {
    let (_, [mut a, mut b]) = pair();
    a.set_record(driver::ENTRIES as u16 + 1);
    let (done, _) = a.exchange(&mut b);
    assert_eq!(done, []);
    assert!(a.hca.has_failed(a.qpn));
}

#[test]
fn an_armed_queue_gives_one_event() {
    let (_, [mut a, b]) = pair();
    assert!(
        !a.hca.take_event(a.cqn()),
        "the record starts as zeros, which is also the first arm command"
    );
    a.arm();
    a.hca.poll();
    assert!(!a.hca.take_event(a.cqn()));
    a.post_now(Opcode::RdmaWrite, 0, &[b.remote(0), a.sge(0, 8)]);
    a.hca.poll();
    let events = [(); 2].map(|()| a.hca.take_event(a.cqn()));
    assert_eq!(events, [true, false]);
    // As in perftest: armed again before the queue is polled. The completion has had its event.
    a.arm();
    assert!(!a.hca.take_event(a.cqn()));
    assert_eq!(a.poll(), [sent(0)]);
    // The next completion has its own event, even if it comes before the queue is armed.
    let write = |a: &mut End| {
        a.post_now(Opcode::RdmaWrite, 0, &[b.remote(0), a.sge(0, 8)]);
        a.hca.poll();
    };
    write(&mut a);
    assert!(a.hca.take_event(a.cqn()));
    write(&mut a);
    a.arm();
    assert!(a.hca.take_event(a.cqn()));
    assert!(!a.hca.take_event(a.cqn()));
}

/// Takes each event for one completion, as ibverbs-tests and perftest do.
#[test]
fn a_completion_behind_the_one_that_gave_the_event_gives_its_own() {
    let (_, [mut a, b]) = pair();
    for round in 0..3 {
        a.arm();
        for _ in 0..3 {
            a.post(Opcode::RdmaWrite, 0, &[b.remote(0), a.sge(0, 8)]);
        }
        a.ring();
        a.hca.poll();
        // Armed after each event, without a poll.
        let events = [(); 4].map(|()| {
            let has_event = a.hca.take_event(a.cqn());
            a.arm();
            has_event
        });
        assert_eq!(events, [true, true, true, false], "round {round}");
        assert_eq!(a.poll().len(), 3);
    }
}

#[test]
fn datagrams_wait_for_a_receiver_that_is_slow_but_not_for_one_that_has_stopped() {
    let world = World::default();
    let [mut a, b] = datagrams(&world);
    let segments = datagram(AddressVector::local(1, 0), b.qpn);
    // Returns the number of datagrams that are sent before one waits.
    let fill = |a: &mut End| {
        let leaves = |a: &mut End| {
            a.post_now(Opcode::Send, 0, &segments);
            a.hca.poll();
            !a.poll().is_empty()
        };
        (0..1000).take_while(|_| leaves(a)).count()
    };
    assert_eq!(
        fill(&mut a),
        32,
        "as many as may be under way between two devices"
    );
    world.now_ns.fetch_add(50_000_000, Ordering::Relaxed);
    a.hca.poll();
    assert_eq!(a.poll(), []);
    b.hca.poll();
    a.hca.poll();
    assert_eq!(a.poll().len(), 1, "there is room again");
    assert_eq!(fill(&mut a), 31);
    world.pass_a_second();
    a.hca.poll();
    assert_eq!(a.poll().len(), 1, "it was lost");
    // Further datagrams that find no room are lost at once, and delay no datagram to a different
    // receiver.
    let c = End::new(&world, Service::Datagram, false, ALL);
    c.activate_datagrams(5);
    let other = datagram(AddressVector::local(1, 0), c.qpn);
    (0..3).for_each(|_| _ = a.post(Opcode::Send, 0, &segments));
    a.post_now(Opcode::Send, 0, &other);
    a.hca.poll();
    assert_eq!(a.poll().len(), 4);
    // The receiver continues: there is room again, and the sender again waits at a full lane.
    b.hca.poll();
    assert_eq!(fill(&mut a), 32);
}

/// Makes a connected pair that runs without RNR retries.
fn pair_without_retries(service: Service, is_shared: bool) -> (World, [End; 2]) {
    let world = World::without_rnr_retries();
    let ends = [(); 2].map(|()| End::new(&world, service, is_shared, ALL));
    ends[0].connect(ends[1].qpn);
    ends[1].connect(ends[0].qpn);
    (world, ends)
}

#[test]
fn a_receive_counts_from_its_doorbell_on_although_its_owner_has_not_polled_since() {
    for (service, is_shared, opcode) in [
        (Service::Connected, false, Opcode::Send),
        (Service::Connected, true, Opcode::Send),
        (Service::Connected, false, Opcode::RdmaWriteImm),
        (Service::Unreliable, false, Opcode::Send),
    ] {
        let (world, [mut a, mut b]) = pair_without_retries(service, is_shared);
        b.hca.poll();
        b.receive_at(&[4096; 2], 32);
        let segments = if opcode == Opcode::Send {
            vec![a.sge(0, 32)]
        } else {
            vec![b.remote(512), a.sge(0, 32)]
        };
        a.post_now(opcode, 0, &segments);
        (0..10).for_each(|_| _ = a.hca.poll());
        assert_eq!(
            a.poll(),
            [],
            "the owner may not know yet what it has posted"
        );
        let (done, arrived) = a.exchange(&mut b);
        assert_eq!((done, arrived.len()), (vec![sent(0)], 1));

        // A process that has stopped delays a message once: from then on its queue counts as empty.
        b.receive_at(&[4096; 4], 32);
        a.post_now(opcode, 0, &segments);
        a.post_now(opcode, 0, &segments);
        a.hca.poll();
        assert_eq!(a.poll(), [sent(1)], "the second receive was known");
        world.pass_a_second();
        a.hca.poll();
        let lost = if service == Service::Unreliable {
            sent(2)
        } else {
            refused(2, Syndrome::RnrRetryExceeded)
        };
        assert_eq!(a.poll(), [lost]);
    }
}

#[test]
fn a_message_without_a_receive_fails_once_the_owner_has_polled_twice() {
    let (_, [mut a, b]) = pair_without_retries(Service::Connected, false);
    b.hca.poll();
    a.post_now(Opcode::Send, 0, &[a.sge(0, 32)]);
    let polls = (1..10).find(|_| {
        a.hca.poll();
        b.hca.poll();
        !a.poll().is_empty()
    });
    assert_eq!(polls, Some(4));
}

#[test]
fn receives_are_flushed_behind_atomics_which_took_none() {
    let (_, [mut a, mut b]) = pair();
    b.receive_at(&[4096; 3], 32);
    for _ in 0..2 {
        a.post(Opcode::AtomicFetchAdd, 0, &add_one(&a, &b));
    }
    a.post_now(Opcode::Send, 0, &[a.sge(0, 32)]);
    let (done, arrived) = a.exchange(&mut b);
    assert_eq!(
        (done.len(), arrived),
        (3, vec![received(CqeOpcode::ResponderSend, 0, 0)])
    );
    b.hca.fail_qp(b.qpn);
    let (_, flushed) = a.exchange(&mut b);
    let failed = |wqe| Done::Failed {
        opcode: CqeOpcode::ResponderError,
        wqe,
        syndrome: Syndrome::WorkRequestFlushed,
    };
    assert_eq!(flushed, [1, 2].map(failed));
}

#[test]
fn two_ends_that_are_both_reset_may_connect_again_in_any_order() {
    for is_b_late in [false, true] {
        let (_, [mut a, mut b]) = pair();
        a.data.put(0, PAYLOAD);
        a.post_now(Opcode::RdmaWrite, 0, &[b.remote(512), a.sge(0, 32)]);
        assert_eq!(a.exchange(&mut b).0, [sent(0)]);
        a.reset();
        if is_b_late {
            // The end finds the other end unchanged.
            a.connect(b.qpn);
        }
        b.reset();
        b.connect(a.qpn);
        if !is_b_late {
            a.connect(b.qpn);
        }
        for end in [&mut a, &mut b] {
            end.receive_at(&[4096], 32);
            end.hca.poll();
        }
        b.data.put(0, PAYLOAD);
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = [&mut a, &mut b];
            let source = ends[from].sge(0, 32);
            ends[from].post_now(Opcode::Send, 0, &[source]);
            let [a, b] = ends;
            let (of_a, of_b) = a.exchange(b);
            let done = if from == 0 {
                [of_a, of_b]
            } else {
                [of_b, of_a]
            };
            assert_eq!(
                done,
                [
                    vec![sent(0)],
                    vec![received(CqeOpcode::ResponderSend, 0, 0)]
                ],
                "late: {is_b_late}, {from} to {to}"
            );
        }
    }
}

#[test]
fn an_atomic_is_not_asked_for_again_because_its_owner_was_reset() {
    let (world, [mut a, mut b]) = pair();
    a.post_now(Opcode::AtomicFetchAdd, 0, &add_one(&a, &b));
    a.hca.poll();
    // The owner takes the message, and its answer is dropped.
    b.reset();
    b.connect(a.qpn);
    let (done, _) = a.exchange(&mut b);
    assert_eq!((done, b.data.get(8)), (vec![], 1u64.to_ne_bytes()));
    world.pass_a_second();
    assert_eq!(
        a.exchange(&mut b).0,
        [refused(0, Syndrome::TransportRetryExceeded)]
    );
    assert_eq!(b.data.get(8), 1u64.to_ne_bytes());
}

#[test]
fn who_was_reset_alone_has_no_connection_and_is_not_answered_from_the_one_before() {
    let (world, [mut a, mut b]) = pair();
    let post = |a: &mut End, b: &End| a.post_now(Opcode::AtomicFetchAdd, 0, &add_one(a, b));
    post(&mut a, &b);
    assert_eq!(a.exchange(&mut b).0, [Done::Sent { wqe: 0, bytes: 8 }]);
    a.reset();
    a.connect(b.qpn);
    post(&mut a, &b);
    let (done, _) = a.exchange(&mut b);
    assert_eq!(
        (done, b.data.get(8)),
        (vec![], 1u64.to_ne_bytes()),
        "its peer does not know of the new connection"
    );
    world.pass_a_second();
    assert_eq!(
        a.exchange(&mut b).0,
        [refused(0, Syndrome::TransportRetryExceeded)]
    );
}
