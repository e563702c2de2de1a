//! Datagrams from one device to more devices than it has lanes for.

use mlx5_wire::CqeOpcode;

use super::hand::{Hand, SEND};
use crate::LocalFabric;
use crate::shared::datagrams::ready_lids;
use crate::shared::layout::{DatagramHeader, MAX_DATAGRAM_LANES};

const QKEY: u32 = 7;

fn ends(fabric: &LocalFabric, count: usize) -> Vec<Hand> {
    let end = |_| {
        let mut end = Hand::alone(fabric, false, false, true);
        end.hca.activate_datagrams(end.qpn, QKEY);
        end.post_receives();
        end
    };
    (0..count).map(end).collect()
}

fn send(from: &mut Hand, to: &Hand) {
    let wqe = from.wqe(SEND, true, &[to.datagram(QKEY)]);
    from.post(&wqe);
    assert_eq!(from.reap().0, 1, "complete, whatever becomes of it");
}

#[test]
fn more_devices_than_there_are_lanes_are_reached_one_after_the_other() {
    let fabric = LocalFabric::new();
    let mut from = ends(&fabric, 1).remove(0);
    let mut to = ends(&fabric, 3 * MAX_DATAGRAM_LANES);
    for round in 0..3 {
        for (nth, end) in to.iter_mut().enumerate() {
            for _ in 0..=round {
                send(&mut from, end);
            }
            assert_eq!(end.reap().1, 1 + round, "device {nth}");
            end.post_receives();
        }
    }
}

#[test]
fn a_lane_is_not_used_again_before_its_datagrams_are_taken() {
    let fabric = LocalFabric::new();
    let mut from = ends(&fabric, 1).remove(0);
    let mut to = ends(&fabric, MAX_DATAGRAM_LANES + 1);
    for end in &to {
        send(&mut from, end);
    }
    let arrived: Vec<usize> = to.iter_mut().map(|end| end.reap().1).collect();
    assert_eq!(
        arrived,
        [vec![1; MAX_DATAGRAM_LANES], vec![0]].concat(),
        "there was no lane for the last"
    );
    send(&mut from, &to[MAX_DATAGRAM_LANES]);
    assert_eq!(to[MAX_DATAGRAM_LANES].reap().1, 1);
    // The first device has lost its lane, which was unused for the longest time; the others have
    // theirs.
    let lane = |end: &Hand| {
        from.hca
            .state
            .borrow()
            .links
            .outgoing
            .iter()
            .position(|out| out.peer.lid == end.hca.lid())
    };
    assert_eq!(
        (lane(&to[MAX_DATAGRAM_LANES]), lane(&to[0]), lane(&to[1])),
        (Some(0), None, Some(1))
    );
}

#[test]
fn a_device_takes_nothing_from_a_lane_that_is_another_ones_by_now() {
    let fabric = LocalFabric::new();
    let mut from = ends(&fabric, 1).remove(0);
    let mut to = ends(&fabric, MAX_DATAGRAM_LANES + 1);
    for returns in [false, true] {
        let (first, others) = to.split_first_mut().unwrap();
        send(&mut from, first);
        assert_eq!(first.reap().1, 1);
        for end in &*others {
            send(&mut from, end);
        }
        if returns {
            // The lane of the first device is a new one now.
            assert_eq!(others[0].reap().1, 1);
            others[0].post_receives();
            send(&mut from, first);
        }
        // Sets the bit late, as a slow sender would.
        ready_lids(&first.hca.memory).notify(usize::from(from.hca.lid()));
        assert_eq!(first.reap().1, usize::from(returns));
        for (nth, end) in others.iter_mut().enumerate() {
            assert_eq!(
                end.reap().1,
                usize::from(!returns || nth > 0),
                "device {nth}"
            );
        }
        to.iter_mut().for_each(Hand::post_receives);
    }
}

/// A program sends its last datagrams and ends before the receiver's device polls.
#[test]
fn datagrams_arrive_after_the_end_of_their_device() {
    let mut ends = ends(&LocalFabric::new(), 2);
    let (mut to, mut from) = (ends.remove(0), ends.remove(0));
    // The receiver maps the device of the sender.
    send(&mut to, &from);
    for _ in 0..3 {
        send(&mut from, &to);
    }
    drop(from);
    assert_eq!(to.reap().1, 3);
    assert_eq!(to.reap().1, 0, "each once");
}

#[test]
fn a_sender_that_writes_what_is_no_datagram_disturbs_nobody() {
    let mut ends = ends(&LocalFabric::new(), 2);
    let (mut to, mut from) = (ends.remove(0), ends.remove(0));
    send(&mut from, &to);
    for opcode in [
        CqeOpcode::ResponderError as u32,
        CqeOpcode::ResponderWriteImm as u32,
        0,
        0xff,
    ] {
        let header = DatagramHeader {
            qpn: to.qpn,
            qkey: QKEY,
            source_qpn: 1,
            byte_count: 0,
            imm: u32::MAX,
            opcode,
            flags: 0,
        };
        from.hca.state.borrow_mut().links.outgoing[0]
            .tx
            .publish(header);
    }
    send(&mut from, &to);
    assert_eq!(to.reap().1, 2);
}
