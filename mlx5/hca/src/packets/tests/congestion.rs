//! Many connections through one narrow link: P9.

use mlx5_wire::ConnectOptions;

use super::super::Wire;
use super::super::congestion::{Congestion, Part};
use super::super::connection::Connection;
use super::super::udp::Receiver;
use super::link::{Link, Load, flood};
use super::*;
use crate::PacketAddress;

fn load(reads: bool) -> Load {
    (if reads { Load::read } else { Load::write })(16 << 10, 16)
}

/// 100 Mbit/s, a queue of 100 packets, and 0.1 ms each way.
#[test]
fn p9_senders_share_a_narrow_link_and_keep_it_busy() {
    for seed in seeds().take(3) {
        for (senders, reads) in [1, 4, 16].into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let link = Link::new(100, 100_000, 100);
            let outcome = flood(&vec![1; senders], link, load(reads), 4_000_000_000, seed);
            assert!(
                outcome.goodput >= 0.8 && outcome.fairness >= 0.9 && outcome.packets <= 1.3,
                "{senders} senders, reads: {reads}: {outcome:?}"
            );
        }
    }
}

/// The connections of two devices share a window: 16 of them are no more to a narrow link than one.
#[test]
fn p9_connections_between_two_devices_have_the_share_of_one() {
    for seed in seeds().take(3) {
        for reads in [false, true] {
            let run = |senders: &[usize]| {
                let link = Link::new(100, 100_000, 100);
                let outcome = flood(senders, link, load(reads), 4_000_000_000, seed);
                println!("{senders:?}, reads: {reads}: {outcome:.3?}");
                outcome
            };
            let (one, many) = (run(&[1]), run(&[16]));
            assert!(
                many.goodput >= 0.95 * one.goodput && many.packets <= 1.03,
                "{one:?} {many:?}"
            );
            let outcome = run(&[16, 1, 4, 1]);
            assert!(
                outcome.goodput >= 0.8 && outcome.fairness >= 0.9 && outcome.packets <= 1.3,
                "{outcome:?}"
            );
        }
    }
}

/// Connections of another kind, to another device or with another traffic class have their own
/// windows, also if they come first. The port from which packets leave makes no difference.
#[test]
fn p9_a_connection_shares_the_window_of_the_first_one_of_its_kind_to_the_device() {
    let connection = |(device, class, mtu, is_unreliable), source| {
        let ip = IpAddr::from([192, 0, 2, device]);
        let socket = SocketAddr::new(ip, 4791);
        let remote = PacketAddress {
            ip,
            port: Some(4791),
            psn: 0,
            mtu,
            traffic_class: class,
        };
        let to = Receiver {
            socket,
            class,
            source,
        };
        let options = ConnectOptions::default();
        Connection::new((7, to, 0), remote, Psn::new(0), &options, is_unreliable)
    };
    let kind = (1, 0, 1024, false);
    let kinds = [
        (1, 0, 1024, true),
        (1, 0, 512, false),
        (1, 96, 1024, false),
        (2, 0, 1024, false),
        kind,
        kind,
        kind,
    ];
    let mut wire = Wire::default();
    for (index, (kind, source)) in kinds.into_iter().zip(0..).enumerate() {
        wire.insert(index, connection(kind, source));
    }
    let windows = |wire: &Wire| {
        let connections = wire.connections.iter().flatten();
        connections
            .map(|connection| connection.requester.window())
            .collect::<Vec<_>>()
    };
    let before = windows(&wire);
    let sender = &mut wire.connections[5].as_mut().unwrap().requester;
    let len = 1 << 20;
    sender.post(
        Request::Send {
            len,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    for _ in 0..24 {
        sender.next_packet(0).unwrap();
    }
    for (index, (before, after)) in before.into_iter().zip(windows(&wire)).enumerate() {
        let shares = kinds[index] == kind && index != 5;
        assert_eq!(after < before, shares, "{index}: {before}, {after}");
    }
}

/// Where the network marks packets, the queue is short, nothing is lost, and the link is busy.
#[test]
fn p9_marks_keep_the_queue_short_and_the_link_busy() {
    for (senders, reads) in [1, 4, 16].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let [plain, marked] = [u64::MAX, 20].map(|mark| {
            let link = Link {
                mark,
                ..Link::new(100, 100_000, 100)
            };
            flood(&vec![1; senders], link, load(reads), 4_000_000_000, 1)
        });
        println!("{senders} senders, reads: {reads}: {plain:.3?}, with marks {marked:.3?}");
        assert!(
            marked.queue < 0.75 * plain.queue && marked.goodput >= 0.9 && marked.fairness >= 0.9,
            "{senders} senders, reads: {reads}: {plain:?}, with marks {marked:?}"
        );
    }
}

/// A path of 50 ms each way, whose round trip the requester does not know at first.
#[test]
fn p9_a_long_path_causes_no_repeats_once_it_is_known() {
    for reads in [false, true] {
        let link = Link::new(1000, 50_000_000, 1000);
        let outcome = flood(&[1, 1], link, load(reads), 20_000_000_000, 1);
        assert!(outcome.packets <= 1.05, "reads: {reads}: {outcome:?}");
    }
}

/// Losses that are no congestion.
#[test]
fn p9_a_window_grows_again_after_losses() {
    for (reads, senders) in [
        (false, [1; 4]),
        (true, [1; 4]),
        (false, [9; 4]),
        (true, [9; 4]),
    ] {
        let link = Link {
            loss_permille: 10,
            ..Link::new(100, 100_000, 100)
        };
        let outcome = flood(&senders, link, load(reads), 4_000_000_000, 1);
        assert!(
            outcome.goodput >= 0.8 && outcome.packets <= 1.3,
            "{senders:?}, reads: {reads}: {outcome:?}"
        );
    }
}

/// A connection leaves the window that it does not use to the others, and has an equal share when
/// it needs one. A connection that ends gives its share back.
#[test]
fn p9_connections_between_two_devices_share_a_window() {
    let first = Psn::new(0xff_fff0);
    let after = |packets| (first, first.after(packets), packets);
    let mut one = Part::new(Congestion::new(32, 32, 32), first);
    one.count(after(32));
    let mut two = Part::new(Congestion::new(32, 32, 32), first);
    two.join(&one);
    assert_eq!((one.size(), two.size()), (32, 16));
    two.count(after(2));
    assert_eq!((one.size(), two.size()), (30, 16));
    two.count(after(16));
    assert_eq!((one.size(), two.size()), (16, 16));
    one.count((first.after(16), first.after(32), 16));
    one.leave();
    assert_eq!((one.size(), two.size()), (16, 32));
    drop(two);
    assert_eq!(one.size(), 32);
}

/// A peer that was only slow acknowledges packets that were not sent again.
#[test]
fn p9_a_needless_repeat_costs_no_window_and_a_loss_after_it_does() {
    let first = Psn::new(0xff_fff0);
    let sent = first.after(32);
    for is_lost in [false, true] {
        let mut window = Part::new(Congestion::new(64, 64, 64), first);
        window.count((first, sent, 32));
        window.shared().on_full();
        window.on_repeat(false);
        window.on_repeat(false);
        assert_eq!(window.size(), 1);
        if is_lost {
            window.on_repeat(true);
        }
        window.on_needless_repeat(31);
        window.on_progress((sent, sent, 0), 32, Some(1), 1);
        assert_eq!(window.size(), if is_lost { 18 } else { 64 });
    }
}
