//! Every cached result that a plain WRITE uses changes between two WRITEs, one result at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use mlx5_wire::Syndrome;

use super::hand::{
    Hand, READ, REGION, RQ, SQ, WRITE, WRITE_IMM, counter, opcode, pointer, raddr, syndrome,
};
use crate::queues::qp::Transport;
use crate::random::Random;
use crate::requester::plain;
use crate::shared::layout::{Pop, Taking, qp_index};
use crate::shared::mr_cache::Lookups;
use crate::{Access, ConnectOptions, LocalFabric, Region};

const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
const KINDS: [u8; 2] = [WRITE, WRITE_IMM];
/// Longer than the device waits for a peer that does not answer, or has died.
const LONG_NS: u64 = 10_000_000_000;

/// Two devices with one queue pair each, connected to each other.
fn pair(is_list: bool) -> [Hand; 2] {
    let fabric = LocalFabric::new();
    let ends = [(); 2].map(|()| Hand::alone(&fabric, false, is_list, false));
    ends[0].connect(&ends[1]);
    ends[1].connect(&ends[0]);
    ends
}

fn region(hand: &Hand, bytes: usize, access: Access) -> Region {
    hand.hca
        .alloc_registered(hand.pd, bytes, access, false)
        .unwrap()
}

fn bytes(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    assert!(offset + len <= region.len);
    // SAFETY: inside a region that is registered; nothing writes it meanwhile.
    (offset..offset + len)
        .map(|at| unsafe { region.addr.add(at).read_volatile() })
        .collect()
}

fn fill(region: &Region, byte: u8) {
    // SAFETY: all of a region that is registered.
    unsafe { region.addr.write_bytes(byte, region.len) };
}

/// Rings for the pushed WQEs as far as they are plain. Returns whether all of them were.
fn ring_plainly(hand: &mut Hand) -> bool {
    hand.write_record(hand.producer);
    hand.rung = hand.producer;
    hand.hca.executing(|| {
        plain::rung(
            &hand.hca,
            &mut hand.hca.state.borrow_mut(),
            qp_index(hand.qpn),
        )
        .is_ok()
    })
}

/// Pushes a WQE, and rings. Returns whether it was executed as a plain one.
fn is_plain(hand: &mut Hand, kind: u8, segments: &[Vec<u8>]) -> bool {
    let wqe = hand.wqe(kind, true, segments);
    hand.push(&wqe);
    ring_plainly(hand)
}

/// Executes the WQE that the fast path left. Returns the syndrome of its CQE if it failed.
fn error(hand: &mut Hand) -> Option<u8> {
    hand.notify();
    for _ in 0..3 {
        hand.pass_ns(LONG_NS);
        hand.hca.empty_poll();
    }
    hand.send_cq
        .poll()
        .iter()
        .find(|cqe| opcode(cqe) == 13)
        .map(|cqe| syndrome(cqe).0)
}

/// Asserts that WQEs of each kind after a plain WRITE are refused with `expected`, after `change`:
/// from a buffer, and with inline data.
fn assert_refused(
    expected: Syndrome,
    from_buffer: &[bool],
    change: impl Fn(&Hand, &Hand, &Region, &Region),
) {
    for (kind, &is_from_buffer) in KINDS
        .into_iter()
        .flat_map(|kind| from_buffer.iter().map(move |is| (kind, is)))
    {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let (source, target) = (region(&a, 4096, Access::empty()), region(&b, 4096, ALL));
        fill(&source, 1);
        let segments = |byte: u8| {
            let data = if is_from_buffer {
                pointer(&source, 64, 48)
            } else {
                Hand::inline(&[byte; 28])
            };
            [raddr(&target, 128), data]
        };
        assert!(is_plain(&mut a, kind, &segments(1)));
        let before = bytes(&target, 0, 4096);
        assert_eq!(before[128..156], [1; 28]);
        assert_eq!(a.reap(), (1, 0));
        change(&a, &b, &source, &target);
        assert!(
            !is_plain(&mut a, kind, &segments(2)),
            "{kind} {is_from_buffer}"
        );
        assert_eq!(
            error(&mut a),
            Some(expected as u8),
            "{kind} {is_from_buffer}"
        );
        // SAFETY: the arena of `b` is mapped as long as `b` is there; a region that is gone may be
        // zeroed.
        let after: Vec<u8> = (0..4096)
            .map(|at| unsafe { target.addr.add(at).read_volatile() })
            .collect();
        assert!(after == before || after == [0; 4096]);
        b.hca.empty_poll();
        assert_eq!(
            b.recv_cq.poll().len(),
            usize::from(kind == WRITE_IMM),
            "of the first one only"
        );
    }
}

#[test]
fn a_region_that_is_gone_is_written_to_and_read_from_no_more() {
    assert_refused(Syndrome::RemoteAccess, &[true, false], |_, b, _, target| {
        assert!(b.hca.try_deregister(target.key))
    });
    assert_refused(Syndrome::LocalProtection, &[true], |a, _, source, _| {
        assert!(a.hca.try_deregister(source.key))
    });
}

#[test]
fn a_region_whose_rights_or_domain_changed_in_place_is_looked_at_anew() {
    assert_refused(Syndrome::RemoteAccess, &[true, false], |_, b, _, target| {
        assert!(
            b.hca
                .try_reregister(target.key, b.pd, Access::LOCAL_WRITE | Access::REMOTE_READ)
                .unwrap()
        );
    });
    assert_refused(Syndrome::RemoteAccess, &[true, false], |_, b, _, target| {
        assert!(
            b.hca
                .try_reregister(target.key, b.hca.alloc_pd(), ALL)
                .unwrap()
        );
    });
    assert_refused(Syndrome::LocalProtection, &[true], |a, _, source, _| {
        assert!(
            a.hca
                .try_reregister(source.key, a.hca.alloc_pd(), Access::empty())
                .unwrap()
        );
    });
}

#[test]
fn a_queue_pair_that_takes_its_rights_back_or_fails_or_connects_elsewhere_is_written_to_no_more() {
    assert_refused(
        Syndrome::RemoteInvalidRequest,
        &[true, false],
        |_, b, _, _| b.hca.allow(b.qpn, Access::REMOTE_READ),
    );
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |_, b, _, _| b.hca.fail_qp(b.qpn),
    );
    // The queue pair has the same number, but a different generation.
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |a, b, _, _| {
            assert!(b.hca.reset_qp(b.qpn));
            b.connect(a);
        },
    );
    // The queue pair has the same number and generation, but is connected to itself now.
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |_, b, _, _| b.connect(b),
    );
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |_, b, _, _| b.hca.destroy_qp(b.qpn),
    );
}

/// Destroys the queue pair of `hand`, and makes and destroys others until one has its number.
/// Returns the number of queue pairs made.
fn until_its_number_returns(hand: &Hand) -> u32 {
    let mut qpn = hand.qpn;
    (1..)
        .find(|_| {
            hand.hca.destroy_qp(qpn);
            qpn = hand.another();
            qpn == hand.qpn
        })
        .unwrap()
}

#[test]
fn a_queue_pair_that_got_the_number_of_one_that_is_gone_is_not_written_to() {
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |_, b, _, _| {
            assert_eq!(
                until_its_number_returns(b),
                1022,
                "all numbers of the place come in turn"
            );
            b.connect(b);
        },
    );
    // A requester whose connection leads to the destroyed queue pair is refused too.
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |a, b, _, _| {
            until_its_number_returns(b);
            b.connect(a);
        },
    );
}

#[test]
fn a_number_and_a_key_that_are_gone_name_nothing_of_the_next_ones_in_their_places() {
    let [mut a, mut b] = pair(true);
    let (old_qpn, old) = (b.qpn, region(&b, 4096, ALL));
    for end in [&mut a, &mut b] {
        end.hca.destroy_qp(end.qpn);
        end.qpn = end.another();
    }
    a.connect(&b);
    b.connect(&a);
    b.hca.state.borrow_mut().mrs.reuse_delay = 0;
    assert!(b.hca.try_deregister(old.key));
    let target = region(&b, 4096, ALL);
    assert_eq!(
        (qp_index(old_qpn), old.key >> 8),
        (qp_index(b.qpn), target.key >> 8),
        "the same places"
    );
    b.hca.destroy_qp(old_qpn);
    assert!(b.hca.try_deregister(old.key), "it is gone");
    let options = ConnectOptions::default();
    assert!(
        b.hca
            .connect(old_qpn, &b.hca.address(b.qpn), &options, ALL)
            .is_err()
    );
    b.post_receives();
    assert!(is_plain(
        &mut a,
        WRITE_IMM,
        &[raddr(&target, 0), Hand::inline(b"ping")]
    ));
    assert_eq!(
        (a.reap().0, b.reap().1, bytes(&target, 0, 4)),
        (1, 1, b"ping".to_vec())
    );
}

#[test]
fn a_queue_pair_with_all_numbers_of_one_whose_device_is_gone_is_not_let_into_its_connection() {
    let fabric = LocalFabric::new();
    let [a, mut b] = [(); 2].map(|()| Hand::alone(&fabric, false, true, false));
    a.connect(&b);
    b.connect(&a);
    b.post_receives();
    let target = region(&b, 4096, ALL);
    let numbers = |hand: &Hand| {
        (
            hand.hca.lid(),
            hand.qpn,
            hand.hca
                .memory
                .qp(qp_index(hand.qpn))
                .generation
                .load(Ordering::Relaxed),
        )
    };
    let (old, place) = (numbers(&a), a.hca.state.borrow().qp_places[0]);
    drop(a);
    let mut c = Hand::alone(&fabric, false, true, false);
    c.hca.destroy_qp(c.qpn);
    c.hca.state.borrow_mut().qp_places[0] = place;
    c.qpn = c.another();
    assert_eq!(numbers(&c), old);
    c.connect(&b);
    assert!(!is_plain(
        &mut c,
        WRITE_IMM,
        &[raddr(&target, 0), Hand::inline(b"ping")]
    ));
    assert_eq!(error(&mut c), Some(Syndrome::TransportRetryExceeded as u8));
    assert_eq!((b.reap().1, bytes(&target, 0, 4)), (0, vec![0; 4]));
}

#[test]
fn the_identities_of_a_place_are_new_also_when_their_count_begins_again() {
    let [_, mut b] = pair(true);
    let identity = |b: &Hand| {
        b.hca
            .memory
            .qp(qp_index(b.qpn))
            .identity
            .load(Ordering::Relaxed)
    };
    b.hca.destroy_qp(b.qpn);
    let before_the_end = u32::MAX - 4;
    b.hca.state.borrow_mut().qp_places[0].version = before_the_end;
    let mut versions = vec![];
    for round in 0..4 {
        b.qpn = b.another();
        for _ in 0..3 {
            versions.push((identity(&b) >> 32) as u32);
            b.connect(&b);
        }
        if round == 2 {
            assert!(b.hca.reset_qp(b.qpn));
        }
        versions.push((identity(&b) >> 32) as u32);
        let target = region(&b, 4096, ALL);
        if round != 2 {
            // A new queue pair begins with its first WQEBB.
            (b.producer, b.rung) = (0, 0);
            assert!(
                is_plain(&mut b, WRITE, &[raddr(&target, 0), Hand::inline(b"ping")]),
                "it is connected"
            );
        }
        b.hca.destroy_qp(b.qpn);
        b.write_record(0);
    }
    assert!(versions.contains(&0));
    assert!(
        versions
            .windows(2)
            .all(|two| [1, 2].contains(&two[1].wrapping_sub(two[0]))),
        "{versions:?}"
    );
}

#[test]
fn a_queue_pair_that_is_gone_before_the_first_write_is_not_written_to() {
    for kind in KINDS {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let target = region(&b, 4096, ALL);
        let taken = || {
            b.hca
                .memory
                .rq(b.rqn)
                .unwrap()
                .1
                .word
                .load(Ordering::Relaxed)
        };
        let before = taken();
        b.hca.destroy_qp(b.qpn);
        assert!(!is_plain(
            &mut a,
            kind,
            &[raddr(&target, 0), Hand::inline(b"gone")]
        ));
        assert_eq!(error(&mut a), Some(Syndrome::TransportRetryExceeded as u8));
        assert_eq!(
            (bytes(&target, 0, 4), taken()),
            (vec![0; 4], before),
            "neither its memory nor its receives are used"
        );
    }
}

#[test]
fn a_queue_pair_whose_port_is_down_sends_nothing() {
    assert_refused(
        Syndrome::TransportRetryExceeded,
        &[true, false],
        |a, _, _, _| a.hca.set_port_up(false),
    );
}

#[test]
fn rights_that_come_back_are_used_again() {
    let [mut a, b] = pair(true);
    let target = region(&b, 4096, ALL);
    let write = |a: &mut Hand| is_plain(a, WRITE, &[raddr(&target, 0), Hand::inline(b"ping")]);
    assert!(write(&mut a));
    b.hca.allow(b.qpn, Access::REMOTE_WRITE);
    assert!(write(&mut a));
    b.hca.allow(b.qpn, Access::empty());
    b.hca.allow(b.qpn, Access::REMOTE);
    assert!(write(&mut a));
    assert_eq!(a.reap(), (3, 0));
}

#[test]
fn a_device_that_is_gone_is_written_to_no_more() {
    for kind in KINDS {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let target = region(&b, 4096, ALL);
        assert!(is_plain(
            &mut a,
            kind,
            &[raddr(&target, 0), Hand::inline(b"here")]
        ));
        assert_eq!(a.reap(), (1, 0));
        drop(b);
        assert!(!is_plain(
            &mut a,
            kind,
            &[raddr(&target, 0), Hand::inline(b"gone")]
        ));
        assert_eq!(error(&mut a), Some(Syndrome::TransportRetryExceeded as u8));
    }
}

/// Deregisters `old`, and registers regions of `bytes` in its place until one has its key.
fn with_the_key_of(hand: &Hand, old: &Region, bytes: usize, access: Access) -> Region {
    hand.hca.state.borrow_mut().mrs.reuse_delay = 0;
    assert!(hand.hca.try_deregister(old.key));
    loop {
        let new = region(hand, bytes, access);
        if new.key == old.key {
            return new;
        }
        assert_eq!(new.key >> 8, old.key >> 8, "the same entry");
        assert!(hand.hca.try_deregister(new.key));
    }
}

#[test]
fn a_key_that_names_another_region_by_now_is_that_one_s() {
    for (kind, is_old_tried) in KINDS
        .into_iter()
        .flat_map(|kind| [(kind, false), (kind, true)])
    {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let regions = [(&a, Access::empty()), (&b, ALL)].map(|(end, access)| {
            let old = region(end, 4096, access);
            // Behind the old region, so that a longer one does not fit its place.
            region(end, 4096, access);
            old
        });
        let [source, target] = &regions;
        fill(source, 1);
        assert!(is_plain(
            &mut a,
            kind,
            &[raddr(target, 0), pointer(source, 0, 64)]
        ));
        assert_eq!(bytes(target, 0, 64), [1; 64]);
        let from = with_the_key_of(&a, source, 8192, Access::empty());
        let to = with_the_key_of(&b, target, 8192, ALL);
        assert!(from.addr != source.addr && to.addr != target.addr);
        fill(&from, 2);
        if is_old_tried {
            // The place of the old region is empty.
            assert!(!is_plain(
                &mut a,
                kind,
                &[raddr(target, 0), pointer(&from, 0, 64)]
            ));
            assert_eq!(error(&mut a), Some(Syndrome::RemoteAccess as u8));
            continue;
        }
        assert!(is_plain(
            &mut a,
            kind,
            &[raddr(&to, 8128), pointer(&from, 8128, 64)]
        ));
        assert_eq!(
            (bytes(&to, 8064, 64), bytes(&to, 8128, 64)),
            (vec![0; 64], vec![2; 64])
        );
        assert_eq!(a.reap(), (2, 0));
        assert!(!is_plain(
            &mut a,
            kind,
            &[raddr(&to, 0), pointer(source, 0, 64)]
        ));
        assert_eq!(error(&mut a), Some(Syndrome::LocalProtection as u8));
    }
}

#[test]
fn so_many_regions_are_looked_up_in_a_row_and_the_rest_is_left_to_the_other_path() {
    // Each WRITE needs a different source and a different target than the WRITE before it. So 64
    // WRITEs need 128 look-ups, of which 127 in a row are made. One WRITE with 2 look-ups and 63
    // WRITEs whose first source is known need 127. The doorbell of each does not matter.
    assert_eq!(Lookups::MAX, 2 * u32::from(SQ));
    for (is_first_known, count) in [(true, SQ - 1), (false, SQ)] {
        let [mut a, b] = pair(true);
        let [from, to] = [(&a, Access::empty()), (&b, ALL)]
            .map(|(end, access)| [(); 2].map(|()| region(end, 4096, access)));
        for (byte, source) in from.iter().enumerate() {
            fill(source, byte as u8 + 1);
        }
        if is_first_known {
            assert!(is_plain(
                &mut a,
                WRITE,
                &[raddr(&to[1], 0), pointer(&from[0], 0, 4)]
            ));
            assert_eq!(a.reap(), (1, 0));
        }
        let first = a.producer;
        for nth in 0..count {
            let (side, at) = (usize::from(nth % 2), usize::from(nth) * 4);
            let wqe = a.wqe(
                WRITE,
                nth == count - 1,
                &[raddr(&to[side], at), pointer(&from[side], at, 4)],
            );
            a.push(&wqe);
        }
        assert_eq!(a.producer.wrapping_sub(first), count);
        let is_written = |nth: u16| {
            let side = usize::from(nth % 2);
            bytes(&to[side], usize::from(nth) * 4, 4) == [side as u8 + 1; 4]
        };
        assert_eq!(ring_plainly(&mut a), is_first_known);
        assert!((0..count - 1).all(is_written));
        assert_eq!(is_written(count - 1), is_first_known);
        a.notify();
        assert_eq!(a.reap(), (1, 0));
        assert!((0..count).all(is_written));
    }
}

#[test]
fn every_length_is_kept_inside_the_region_by_its_first_and_by_each_later_write() {
    for (at, len, fits) in [
        (0, 4096, true),
        (4095, 1, true),
        (1, 4096, false),
        (4096, 1, false),
        (4000, 97, false),
        (usize::MAX, 64, false),
    ] {
        for is_first in [true, false] {
            let [mut a, b] = pair(true);
            let (source, target) = (region(&a, 8192, Access::empty()), region(&b, 4096, ALL));
            assert!(
                is_first || is_plain(&mut a, WRITE, &[raddr(&target, 0), pointer(&source, 0, 64)])
            );
            let mut far = raddr(&target, 0);
            far[..8].copy_from_slice(
                &(target.addr.as_ptr() as u64)
                    .wrapping_add(at as u64)
                    .to_be_bytes(),
            );
            assert_eq!(
                is_plain(&mut a, WRITE, &[far, pointer(&source, 0, len)]),
                fits,
                "{at} {len}"
            );
            let expected = (!fits).then_some(Syndrome::RemoteAccess as u8);
            assert_eq!(error(&mut a), expected);
        }
    }
}

/// Makes another queue pair pop a receive of the queue of `hand`, whose message is never sent.
fn taken_by_another(hand: &Hand) -> Option<Taking> {
    let state = hand.hca.state.borrow();
    state.queues.qps[qp_index(hand.qpn)]
        .as_ref()
        .unwrap()
        .receives
        .pop(&AtomicU64::new(0))
}

#[test]
fn receives_that_others_took_are_not_taken_again_and_the_ones_posted_since_are() {
    for is_list in [true, false] {
        let [mut a, mut b] = pair(is_list);
        let target = region(&b, 4096, ALL);
        let random = &mut Random::new(7);
        let mut posted = 0_u16;
        let mut taken = 0_u16;
        let mut arrived = 0;
        // Past the wrap of the record and of the low half of the pop word.
        for round in 0..200_000_u32 {
            match random.below(4) {
                // The owner posts the taken receives again, in the same order.
                0 => {
                    let most = RQ - u16::from(is_list) - posted.wrapping_sub(taken);
                    posted = posted.wrapping_add(random.below(u64::from(most) + 1) as u16);
                    b.write_receive_record(posted);
                }
                1 => {
                    let index = taken_by_another(&b).map(Taking::index);
                    assert_eq!(
                        index,
                        (posted != taken).then_some(taken % RQ),
                        "round {round}"
                    );
                    taken = taken.wrapping_add(u16::from(index.is_some()));
                }
                _ if posted == taken => {
                    let wqe = a.wqe(
                        WRITE_IMM,
                        true,
                        &[raddr(&target, 0), Hand::inline(&(!round).to_ne_bytes())],
                    );
                    a.push(&wqe);
                    assert!(!ring_plainly(&mut a), "round {round}");
                    assert_ne!(
                        bytes(&target, 0, 4),
                        (!round).to_ne_bytes(),
                        "no receive, no payload"
                    );
                    // The driver takes the WQE back, so that no later doorbell announces it.
                    a.producer = a.last;
                    a.write_record(a.producer);
                }
                _ => {
                    let bytes_of = (!round).to_ne_bytes();
                    assert!(
                        is_plain(
                            &mut a,
                            WRITE_IMM,
                            &[raddr(&target, 0), Hand::inline(&bytes_of)]
                        ),
                        "round {round}"
                    );
                    assert_eq!(bytes(&target, 0, 4), bytes_of);
                    assert_eq!(a.reap(), (1, 0));
                    b.hca.empty_poll();
                    let cqes = b.recv_cq.poll();
                    assert_eq!(cqes.len(), 1, "round {round}");
                    assert_eq!(
                        counter(&cqes[0]),
                        if is_list { taken % RQ } else { taken },
                        "round {round}"
                    );
                    taken = taken.wrapping_add(1);
                    arrived += 1;
                }
            }
        }
        assert!(
            arrived > 0x1_0000 / 4 && u32::from(taken) < arrived,
            "{arrived} {taken}"
        );
    }
}

#[test]
fn a_taker_that_came_too_late_has_no_intent_that_a_repair_would_wait_for() {
    let [mut a, mut b] = pair(true);
    b.post_receives();
    let target = region(&b, 4096, ALL);
    let intent = || {
        b.hca
            .memory
            .lane(qp_index(b.qpn))
            .intent
            .load(Ordering::Relaxed)
    };
    let receives = b.hca.state.borrow().rqs[b.rqn as usize]
        .as_ref()
        .unwrap()
        .receives;
    {
        let state = &mut *a.hca.state.borrow_mut();
        let qp = state.queues.qps[qp_index(a.qpn)].as_mut().unwrap();
        let Transport::Connected(remote) = &mut qp.transport else {
            panic!("connected")
        };
        let taken = remote.take_receive().unwrap();
        assert_eq!(
            intent(),
            taken.0 + Pop::ONE,
            "it took one, and has not told of it"
        );
        let is_late = receives
            .exchange(taken.0, || &b.hca.memory.lane(qp_index(b.qpn)).intent)
            .is_none();
        assert!(is_late && intent() != 0, "another took it before");
    }
    // The next attempt finds no receive, and ends like the attempt of a waiting queue pair.
    while taken_by_another(&b).is_some() {}
    assert!(!is_plain(
        &mut a,
        WRITE_IMM,
        &[raddr(&target, 0), Hand::inline(b"ping")]
    ));
    assert_eq!(intent(), 0);
}

#[test]
fn a_receive_that_was_given_back_is_taken_by_the_next() {
    let [mut a, mut b] = pair(true);
    b.post_receives();
    let target = region(&b, 4096, ALL);
    let write = |a: &mut Hand| is_plain(a, WRITE_IMM, &[raddr(&target, 0), Hand::inline(b"ping")]);
    for _ in 0..3 {
        assert!(write(&mut a));
    }
    // Another queue pair popped a receive and never used it, while this queue pair knows of the
    // other receives.
    let lost = taken_by_another(&b).unwrap();
    {
        let state = b.hca.state.borrow();
        let rq = state.rqs[b.rqn as usize].as_ref().unwrap();
        assert!(rq.taken.account(lost));
        rq.receives.give_back(lost.index(), &rq.taken);
    }
    while write(&mut a) {}
    b.hca.empty_poll();
    let mut indices: Vec<u16> = b.recv_cq.poll().iter().map(counter).collect();
    assert_eq!(indices[3], lost.index());
    indices.sort_unstable();
    assert_eq!(
        indices,
        (0..RQ - 1).collect::<Vec<_>>(),
        "each of them once"
    );
}

#[test]
fn a_pop_word_that_a_peer_spoiled_stops_the_queue_pair_and_nothing_else() {
    for garbage in [
        u64::MAX << 16,
        u64::MAX,
        1 << 63,
        u64::from(RQ) << 16,
        (Pop::ONE << 40) | 0xffff,
    ] {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let target = region(&b, 4096, ALL);
        let segments = [raddr(&target, 0), Hand::inline(b"ping")];
        assert!(is_plain(&mut a, WRITE_IMM, &segments));
        b.hca
            .memory
            .rq(b.rqn)
            .unwrap()
            .1
            .word
            .store(garbage, Ordering::Relaxed);
        // Whether it finds a receive or none, all indices are valid in the queue.
        if !is_plain(&mut a, WRITE_IMM, &segments) {
            assert_eq!(
                error(&mut a),
                Some(Syndrome::RnrRetryExceeded as u8),
                "{garbage:x}"
            );
        }
        b.hca.empty_poll();
        assert!(b.recv_cq.poll().iter().all(|cqe| counter(cqe) < RQ));
    }
}

#[test]
fn what_is_not_plain_ends_a_run_and_is_executed_in_order() {
    for is_announced_at_once in [true, false] {
        let [mut a, mut b] = pair(true);
        b.post_receives();
        let target = region(&b, REGION, ALL);
        let two = vec![raddr(&target, 64), a.pointer(64, 4), a.pointer(68, 4)];
        let segments: [(u8, Vec<Vec<u8>>); 7] = [
            (WRITE, vec![raddr(&target, 0), Hand::inline(b"one!")]),
            (READ, vec![raddr(&target, 0), a.pointer(64, 4)]),
            (WRITE, vec![raddr(&target, 0), Hand::inline(b"two!")]),
            (READ, vec![raddr(&target, 0), a.pointer(68, 4)]),
            // The results of the READs, of two parts, of one, and of none.
            (WRITE, two),
            (WRITE_IMM, vec![raddr(&target, 128), a.pointer(64, 8)]),
            (WRITE_IMM, vec![raddr(&target, 0)]),
        ];
        for (kind, segments) in &segments {
            let wqe = a.wqe(*kind, true, segments);
            a.push(&wqe);
            if !is_announced_at_once {
                a.ring();
            }
        }
        if is_announced_at_once {
            let done = ring_plainly(&mut a);
            assert!(!done);
            assert_eq!(a.send_cq.poll().len(), 1, "the first, up to the READ");
            a.done = a.done.wrapping_add(1);
            a.notify();
        }
        assert_eq!(a.reap(), (7 - usize::from(is_announced_at_once), 0));
        assert_eq!(
            (bytes(&target, 64, 8), bytes(&target, 128, 8)),
            (b"one!two!".to_vec(), b"one!two!".to_vec())
        );
        b.hca.empty_poll();
        assert_eq!(b.recv_cq.poll().len(), 2);
    }
}

#[test]
fn a_queue_that_waits_for_a_receive_goes_on_when_its_timer_ends_and_in_order() {
    let [mut a, mut b] = pair(true);
    let target = region(&b, 4096, ALL);
    let segments = |byte: u8| [raddr(&target, 0), Hand::inline(&[byte; 4])];
    assert!(is_plain(&mut a, WRITE, &segments(1)));
    assert!(!is_plain(&mut a, WRITE_IMM, &segments(2)));
    a.notify();
    b.post_receives();
    assert!(
        !is_plain(&mut a, WRITE, &segments(3)),
        "the one before it waits"
    );
    a.notify();
    assert_eq!((a.reap().0, bytes(&target, 0, 4)), (1, vec![1; 4]));
    a.pass_ns(1000);
    assert_eq!((a.reap().0, b.reap().1), (2, 1));
    assert_eq!(bytes(&target, 0, 4), [3; 4]);
    assert!(is_plain(&mut a, WRITE_IMM, &segments(4)));
}

#[test]
fn a_lane_that_is_armed_and_one_that_is_polled_both_show_what_is_written_plainly() {
    let [mut a, mut b] = pair(true);
    let target = region(&b, 4096, ALL);
    for round in 0..5_000_u32 {
        b.post_receives();
        assert!(is_plain(
            &mut a,
            WRITE_IMM,
            &[raddr(&target, 0), Hand::inline(&round.to_ne_bytes())]
        ));
        assert_eq!((a.reap().0, b.reap().1), (1, 1), "round {round}");
        // Sometimes the pause is so long that the lane is no longer polled.
        if round % 100 == 0 {
            for _ in 0..64 {
                b.pass_ns(LONG_NS);
                b.hca.empty_poll();
            }
        }
    }
}
