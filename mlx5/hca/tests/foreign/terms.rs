//! Connections whose ends have different terms, and the events at the responder of a refusal.

use mlx5_hca::wire::*;
use mlx5_hca::{Difference, GidKind, Term, Terms};

use super::driver::{ALL, Done, End, World};
use super::{datagram, refused, sent};

const SAME: Terms = Terms {
    format: GidKind::RoceV2,
    mtu: 1024,
    sq_psn: 100,
    rq_psn: 100,
    max_rd_atomic: 16,
    max_dest_rd_atomic: 16,
};

/// Two connected ends, the second with other terms.
fn pair(service: Service, other: Terms) -> (World, [End; 2]) {
    let world = World::default();
    let ends = [(); 2].map(|()| End::new(&world, service, false, ALL));
    for (end, to, terms) in [
        (&ends[0], ends[1].qpn, SAME),
        (&ends[1], ends[0].qpn, other),
    ] {
        end.hca.set_terms(end.qpn, terms);
        end.connect(to);
        end.hca.set_terms(end.qpn, terms);
    }
    (world, ends)
}

/// Posts an operation of `len` bytes.
fn post(a: &mut End, b: &End, opcode: Opcode, len: u32) -> u16 {
    let (to, from) = (b.remote(0), a.sge(0, len));
    if opcode == Opcode::Send {
        a.post(opcode, 0, &[from])
    } else {
        a.post(opcode, 0, &[to, from])
    }
}

fn statuses(done: &[Done]) -> Vec<Option<Syndrome>> {
    let status = |done: &Done| match done {
        Done::Failed { syndrome, .. } => Some(*syndrome),
        _ => None,
    };
    done.iter().map(status).collect()
}

#[test]
fn a_message_longer_than_one_of_two_path_mtus_is_refused_and_a_short_one_is_not() {
    for mtu in [256, 4096] {
        for (opcode, syndrome) in [
            (Opcode::Send, Syndrome::RemoteInvalidRequest),
            (Opcode::RdmaWrite, Syndrome::RemoteInvalidRequest),
            (Opcode::RdmaRead, Syndrome::LocalLength),
        ] {
            let (_, [mut a, mut b]) = pair(Service::Connected, Terms { mtu, ..SAME });
            b.receive_at(&[0, 4096], 4096);
            b.hca.poll();
            let short = mtu.min(1024).into();
            post(&mut a, &b, opcode, short);
            post(&mut a, &b, opcode, short + 1);
            a.ring();
            let (done, _) = a.exchange(&mut b);
            assert_eq!(statuses(&done), [None, Some(syndrome)], "{opcode:?} {mtu}");
            let difference = a.hca.take_difference().unwrap();
            assert_eq!(
                difference,
                Difference {
                    from: a.qpn,
                    to: b.qpn,
                    term: Term::Mtu,
                    sent: 1024,
                    expected: mtu.into()
                }
            );
            let text = difference.to_string();
            assert!(
                text.contains("1024") && text.contains(&mtu.to_string()),
                "{text}"
            );
            assert_eq!(a.hca.take_difference(), None, "once");
        }
    }
}

#[test]
fn who_sends_other_psns_or_another_format_gets_no_answer() {
    let psn = Terms {
        rq_psn: 200,
        ..SAME
    };
    let format = Terms {
        format: GidKind::RoceV1,
        ..SAME
    };
    for (other, term) in [(psn, Term::Psn), (format, Term::Format)] {
        let (world, [mut a, mut b]) = pair(Service::Connected, other);
        let wqe = post(&mut a, &b, Opcode::RdmaWrite, 8);
        a.ring();
        assert_eq!(a.exchange(&mut b).0, [], "it is tried again");
        world.pass_a_second();
        let (done, _) = a.exchange(&mut b);
        assert_eq!(done, [refused(wqe, Syndrome::TransportRetryExceeded)]);
        assert_eq!(a.hca.take_difference().map(|it| it.term), Some(term));
        assert!(!b.hca.has_failed(b.qpn) && b.hca.take_async_event().is_none());
    }
}

#[test]
fn more_reads_than_the_responder_keeps_are_refused_unless_a_fence_separates_them() {
    let few = Terms {
        max_dest_rd_atomic: 2,
        ..SAME
    };
    let (_, [mut a, mut b]) = pair(Service::Connected, few);
    for _ in 0..2 {
        // The second list begins when the first is answered.
        post(&mut a, &b, Opcode::RdmaRead, 8);
        post(&mut a, &b, Opcode::RdmaWrite, 8);
        post(&mut a, &b, Opcode::RdmaRead, 8);
        a.ring();
        assert_eq!(statuses(&a.exchange(&mut b).0), [None; 3]);
    }
    for _ in 0..3 {
        post(&mut a, &b, Opcode::RdmaRead, 8);
    }
    a.ring();
    let (done, _) = a.exchange(&mut b);
    assert_eq!(
        statuses(&done),
        [None, None, Some(Syndrome::RemoteInvalidRequest)]
    );
    let Difference {
        term,
        sent,
        expected,
        ..
    } = a.hca.take_difference().unwrap();
    assert_eq!((term, sent, expected), (Term::Reads, 16, 2));
}

#[test]
fn an_unreliable_connection_loses_what_does_not_fit_and_goes_on() {
    let (_, [mut a, mut b]) = pair(Service::Unreliable, Terms { mtu: 256, ..SAME });
    b.receive_at(&[0, 4096], 4096);
    b.hca.poll();
    let long = post(&mut a, &b, Opcode::Send, 512);
    let short = post(&mut a, &b, Opcode::Send, 256);
    a.ring();
    let (done, arrived) = a.exchange(&mut b);
    assert_eq!((done, arrived.len()), (vec![sent(long), sent(short)], 1));
}

#[test]
fn ends_with_the_same_terms_or_with_none_do_not_differ() {
    for terms in [true, false] {
        let (_, [mut a, mut b]) = pair(Service::Connected, SAME);
        if !terms {
            b.reset();
            b.connect(a.qpn);
        }
        let wqe = post(&mut a, &b, Opcode::RdmaWrite, 8192);
        a.ring();
        assert_eq!(a.exchange(&mut b).0, [sent(wqe)]);
        assert_eq!(a.hca.take_difference(), None);
    }
}

#[test]
fn a_datagram_with_another_key_is_dropped_and_the_receiver_says_both() {
    let world = World::default();
    let [mut a, mut b] = [(); 2].map(|()| End::new(&world, Service::Datagram, false, ALL));
    a.activate_datagrams(5);
    b.activate_datagrams(6);
    b.receive_at(&[0], 128);
    b.hca.poll();
    let header = datagram(AddressVector::local(1, 0), b.qpn).to_vec();
    a.post_now(Opcode::Send, 0, &[&header[..], &[a.sge(0, 8)]].concat());
    let (done, arrived) = a.exchange(&mut b);
    assert_eq!((done.len(), arrived), (1, vec![]));
    let it = b.hca.take_difference().unwrap();
    assert_eq!((it.from, it.to, it.term), (a.qpn, b.qpn, Term::Qkey));
    assert_eq!((it.sent, it.expected), (5, 6));
}

#[test]
fn the_responder_fails_with_what_it_has_refused_and_says_what_that_was() {
    let wrong_key = |b: &End| {
        RaddrSegment {
            addr: b.addr(0),
            rkey: b.key ^ 0x5500,
        }
        .emit()
    };
    for is_access in [true, false] {
        let world = World::default();
        let [mut a, mut b] = End::pair(&world, false, ALL);
        let other = Access::REMOTE_READ;
        b.hca.allow(b.qpn, if is_access { ALL } else { other });
        b.receive_at(&[0], 128);
        b.hca.poll();
        let to = if is_access {
            wrong_key(&b)
        } else {
            b.remote(0)
        };
        let wqe = a.post_now(Opcode::RdmaWrite, 0, &[to, a.sge(0, 8)]);
        let (done, arrived) = a.exchange(&mut b);
        let (qpn, flushed) = (b.qpn, Some(Syndrome::WorkRequestFlushed));
        let (syndrome, event) = if is_access {
            (Syndrome::RemoteAccess, AsyncEvent::QpAccessError { qpn })
        } else {
            (
                Syndrome::RemoteInvalidRequest,
                AsyncEvent::QpRequestError { qpn },
            )
        };
        assert_eq!(done, [refused(wqe, syndrome)]);
        assert_eq!(statuses(&arrived), [flushed]);
        assert_eq!(b.hca.take_async_event(), Some(event));
        assert_eq!(b.hca.take_async_event(), None, "once");
        assert!(b.hca.has_failed(qpn));
    }
}
