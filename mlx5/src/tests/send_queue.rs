//! The send queue against a list of the posted operations: wraps of the ring and of the 16-bit
//! index, NOPs at the end, reclaiming, refusals.

use std::collections::VecDeque;

use super::null_device::Plays;
use super::random::Random;
use crate::*;

const DEPTH: u16 = 32;

fn queue_pair() -> (NullDevice, RcQp) {
    queue_pair_of(DEPTH)
}

fn queue_pair_of(depth: u16) -> (NullDevice, RcQp) {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(8).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let config = QpConfig {
        max_send_wr: depth.into(),
        max_inline_data: 220,
        ..QpConfig::default()
    };
    let mut qp = pd.create_qp(&cq, &cq, &srq, &config).unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    (device.null().unwrap(), qp)
}

/// An operation whose WQE takes `blocks` WQEBBs, 1..=5.
fn write(blocks: u16) -> Write<(Inline<'static>, Sge)> {
    let inline = Inline(&[7; 220][..(28 + 64 * (usize::from(blocks) - 1)).min(220)]);
    Write {
        addr: 0x1000,
        rkey: 5,
        payload: (
            inline,
            Sge {
                addr: 0x2000,
                len: u32::from(blocks == 5),
                lkey: 6,
            },
        ),
    }
}

/// A posted WQE in the model.
struct Expected {
    first: u16,
    end: u16,
    user: u64,
    signaled: bool,
}

fn is_signaled(device: &NullDevice, qp: &RcQp, counter: u16) -> bool {
    device.send_queue(qp.qpn(), counter).unwrap().1[11] & 8 != 0
}

#[test]
fn every_operation_comes_back_once_and_in_order_over_many_laps_of_ring_and_index() {
    for seed in 0..8 {
        // Odd seeds test the smallest queue.
        let depth = if seed % 2 == 0 { DEPTH } else { 16 };
        let (device, mut qp) = queue_pair_of(depth);
        let mut random = Random::new(seed);
        let mut posted: VecDeque<Expected> = VecDeque::new();
        let mut producer = 0u16;
        let mut consumer = 0u16;
        let mut user = 0u64;
        let mut wqebbs = 0u32;
        // Twice the range of the 16-bit index, and thousands of times the ring's depth.
        while wqebbs < 2 << 16 {
            let blocks = 1 + random.below(5) as u16;
            let to_end = depth - producer % depth;
            let padding = if blocks > to_end { to_end } else { 0 };
            let free = depth - producer.wrapping_sub(consumer);
            let signal = if random.one_in(16) {
                Signal::Always
            } else {
                Signal::Reclaim
            };
            match qp.post(&write(blocks), signal, user) {
                Ok(()) => {
                    assert!(blocks + padding <= free, "posted without room");
                    let first = producer.wrapping_add(padding);
                    let end = first.wrapping_add(blocks);
                    let signaled = is_signaled(&device, &qp, first);
                    assert!(signaled || signal == Signal::Reclaim);
                    posted.push_back(Expected {
                        first,
                        end,
                        user,
                        signaled,
                    });
                    wqebbs += u32::from(blocks + padding);
                    producer = end;
                    user += 1;
                }
                Err(PostError::QueueFull {
                    needed,
                    free: told,
                    capacity,
                }) => {
                    assert_eq!(
                        (needed, told, capacity),
                        ((blocks + padding).into(), free.into(), depth.into())
                    );
                    assert!(blocks + padding > free, "refused with room");
                    // Only signaled WQEs complete, and the queue never fills without a signaled
                    // WQE.
                    let last = posted.iter().rposition(|p| p.signaled).unwrap();
                    let pick = random.below(last as u32 + 1) as usize;
                    let signaled =
                        posted.iter().skip(pick).position(|p| p.signaled).unwrap() + pick;
                    let done: Vec<_> = posted.drain(..=signaled).collect();
                    let Expected { first, end, .. } = done[signaled];
                    if random.one_in(2) {
                        let mut users = vec![];
                        assert_eq!(
                            qp.sq.complete_each(first, |user| users.push(user)),
                            done.len()
                        );
                        assert_eq!(users, done.iter().map(|d| d.user).collect::<Vec<_>>());
                    } else {
                        assert_eq!(qp.sq.complete(first), Some(done[signaled].user));
                    }
                    assert_eq!(qp.sq.complete(first), None, "completed twice");
                    consumer = end;
                }
                Err(other) => panic!("{other}"),
            }
            if random.one_in(3) {
                qp.ring();
                assert_eq!(
                    device.send_queue(qp.qpn(), 0).unwrap().0,
                    producer,
                    "the record"
                );
            }
        }
    }
}

#[test]
fn a_counter_that_is_no_outstanding_wqe_changes_nothing() {
    let (_device, mut qp) = queue_pair();
    for user in 0..4 {
        qp.post(&write(3), Signal::Reclaim, user).unwrap();
    }
    assert_eq!(qp.sq.complete(0), Some(0));
    for counter in [0, 1, 4, 5, 12, 3 + DEPTH, 0xffff] {
        assert_eq!(qp.sq.complete(counter), None, "{counter}");
        assert_eq!(
            qp.sq
                .complete_each(counter, |_| panic!("nothing is finished")),
            0,
            "{counter}"
        );
    }
    let mut users = vec![];
    assert_eq!(qp.sq.complete_each(9, |user| users.push(user)), 3);
    assert_eq!(users, [1, 2, 3]);
}

#[test]
fn a_queue_asks_for_a_completion_within_a_quarter_of_its_depth_or_8_wqebbs() {
    let (device, mut qp) = queue_pair();
    let signaled = |qp: &mut RcQp, n: u16| {
        let post = |i| qp.post(&write(1), Signal::Reclaim, i).unwrap();
        (0..u64::from(n)).for_each(post);
    };
    signaled(&mut qp, DEPTH);
    let which: Vec<u16> = (0..DEPTH)
        .filter(|&i| is_signaled(&device, &qp, i))
        .collect();
    assert_eq!(
        which,
        [7, 15, 23, 31],
        "an 8th of them at the 8th WQEBB each"
    );
    assert!(qp.post(&write(1), Signal::Reclaim, 0).is_err());
    assert!(qp.sq.complete(31).is_some());
    // A WQE that is signaled on request restarts the count.
    for i in 0..4 {
        qp.post(
            &write(1),
            if i == 3 {
                Signal::Always
            } else {
                Signal::Reclaim
            },
            0,
        )
        .unwrap();
    }
    signaled(&mut qp, 8);
    let which: Vec<u16> = (DEPTH..DEPTH + 12)
        .filter(|&i| is_signaled(&device, &qp, i))
        .collect();
    assert_eq!(which, [35, 43]);
    // The smallest queue has room for the longest WQE in addition to 8 WQEBBs.
    let (device, mut qp) = queue_pair_of(16);
    signaled(&mut qp, 16);
    let which: Vec<u16> = (0..16).filter(|&i| is_signaled(&device, &qp, i)).collect();
    assert_eq!(which, [7, 15]);
}

#[test]
fn nothing_is_posted_to_a_queue_pair_that_cannot_send() {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(8).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let mut qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap();
    let wrong = |state| Err(PostError::WrongState(state));
    assert_eq!(qp.post(&write(1), Signal::Always, 0), wrong(QpState::Reset));
    assert_eq!(
        qp.post(&write(5), Signal::Always, 0),
        wrong(QpState::Reset),
        "too long as well"
    );
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    qp.post(&write(1), Signal::Always, 0).unwrap();
    let null = device.null().unwrap();
    let error = wire::ErrorCqe {
        raw_syndrome: 5,
        vendor_syndrome: 0,
        wqe_opcode: 8,
        qpn: qp.qpn(),
        wqe_counter: 0,
        user_index: 0,
    };
    let mut cq = cq;
    assert!(null.write_cqe(cq.cqn(), &error.emit(), CqeOpcode::RequesterError));
    let mut users = vec![];
    cq.poll(1, |cqe| {
        assert_eq!(qp.complete_each(&cqe, |user| users.push(user)), 1)
    });
    assert_eq!(users, [0]);
    assert_eq!(qp.state(), QpState::Error);
    assert_eq!(qp.post(&write(1), Signal::Always, 0), wrong(QpState::Error));
}
