//! Every completion status, made on the software HCA and decoded to its typed error with the
//! vendor's detail: at the requester and, if it has a completion too, at the responder.

use crate::end::*;
use crate::time::Net;
use mlx5::*;

/// Returns the first error of the sender, after which all posted operations are flushed.
fn fails(net: &Net, a: &mut End, post: impl FnOnce(&mut End)) -> CompletionError {
    post(a);
    let sent = loop {
        let sent = a.sent();
        if !sent.is_empty() {
            break sent;
        }
        net.pass_ns(1_000_000);
        net.progress();
    };
    let error = sent[0].1.unwrap_err();
    assert_eq!(a.qp.state(), QpState::Error);
    let refused = a.qp.post(&Send { payload: () }, Signal::Always, 0);
    assert_eq!(refused, Err(PostError::WrongState(QpState::Error)));
    error
}

const NO_KEY: &str = "no such key, or its region was deregistered";
const BOUNDS: &str = "not inside the memory region";
const ACCESS: &str = "the memory region does not allow this access";
const DOMAIN: &str = "the memory region is of another protection domain";

/// Returns wrong keys of `end`'s device for 8 bytes that need `access`: address, key, and the
/// expected detail; and the regions of some of them.
fn wrong(end: &End, access: Access) -> (Vec<(u64, u32, &'static str)>, [Mr; 2]) {
    let without = end
        .pd
        .alloc(64, Access::LOCAL_WRITE.difference(access))
        .unwrap();
    let other = end.device.alloc_pd().unwrap().alloc(64, ANY).unwrap();
    let gone = end.pd.alloc(64, ANY).unwrap();
    let (gone_at, gone_key) = (gone.addr(), gone.lkey());
    gone.deregister().unwrap();
    let addr = end.mr.addr();
    let key = end.mr.lkey();
    let size = BYTES as u64;
    let mut wrong = vec![
        (addr, key ^ 1, NO_KEY),
        (addr, 0, NO_KEY),
        (gone_at, gone_key, NO_KEY),
        (addr + size - 4, key, BOUNDS),
        (addr - 8, key, BOUNDS),
        (u64::MAX - 7, key, BOUNDS),
        (other.addr(), other.lkey(), DOMAIN),
    ];
    if !access.is_empty() {
        wrong.push((without.addr(), without.lkey(), ACCESS));
    }
    (wrong, [without, other])
}

#[test]
fn local_protection_of_what_is_sent_and_of_what_a_result_goes_into() {
    let count = wrong(&pair(&Net::new(), SHARED).0, Access::LOCAL_WRITE)
        .0
        .len();
    for i in 0..count {
        for kind in 0..4 {
            let net = Net::new();
            let (mut a, mut b) = pair(&net, SHARED);
            b.receives(1, 64);
            let access = if kind < 2 {
                Access::empty()
            } else {
                Access::LOCAL_WRITE
            };
            let (wrong, _regions) = wrong(&a, access);
            let Some(&(addr, lkey, text)) = wrong.get(i) else {
                continue;
            };
            let sge = Sge { addr, len: 8, lkey };
            let (to, rkey) = (b.mr.addr(), b.mr.rkey());
            let error = fails(&net, &mut a, |a| match kind {
                0 => a.post(&Send { payload: sge }, 0),
                1 => a.post(
                    &Write {
                        addr: to,
                        rkey,
                        payload: (Inline(b"some"), sge),
                    },
                    0,
                ),
                2 => a.post(
                    &Read {
                        addr: to,
                        rkey,
                        into: sge,
                    },
                    0,
                ),
                _ => a.post(
                    &FetchAdd {
                        addr: to,
                        rkey,
                        add: 1,
                        into: sge,
                    },
                    0,
                ),
            });
            assert_eq!(
                (error.syndrome, error.vendor_text()),
                (Syndrome::LocalProtection, crate::time::detail(text)),
                "{i}, {kind}"
            );
            assert!(
                b.received().is_empty() && b.word(0) == 0,
                "nothing was done at the peer"
            );
        }
    }
}

#[test]
fn remote_access_of_every_verb_that_names_the_peers_memory() {
    type Post = fn(&mut End, u64, u32);
    let verbs: [(Access, Post); 5] = [
        (Access::REMOTE_WRITE, |a, addr, rkey| {
            a.post(
                &Write {
                    addr,
                    rkey,
                    payload: Inline(&[1; 8]),
                },
                0,
            )
        }),
        (Access::REMOTE_WRITE, |a, addr, rkey| {
            a.post(
                &WriteImm {
                    addr,
                    rkey,
                    imm: 1,
                    payload: Inline(&[1; 8]),
                },
                0,
            )
        }),
        (Access::REMOTE_READ, |a, addr, rkey| {
            a.post(
                &Read {
                    addr,
                    rkey,
                    into: a.mr.sge(0, 8).unwrap(),
                },
                0,
            )
        }),
        (Access::REMOTE_ATOMIC, |a, addr, rkey| {
            a.post(
                &FetchAdd {
                    addr,
                    rkey,
                    add: 1,
                    into: a.mr.sge(0, 8).unwrap(),
                },
                0,
            )
        }),
        (Access::REMOTE_ATOMIC, |a, addr, rkey| {
            a.post(
                &CompareSwap {
                    addr,
                    rkey,
                    compare: 0,
                    swap: 1,
                    into: a.mr.sge(0, 8).unwrap(),
                },
                0,
            );
        }),
    ];
    for (access, post) in verbs {
        let count = wrong(&pair(&Net::new(), SHARED).0, access).0.len();
        for i in 0..count {
            let net = Net::new();
            let (mut a, mut b) = pair(&net, SHARED);
            b.receives(1, 64);
            let (wrong, _regions) = wrong(&b, access);
            let (addr, rkey, text) = wrong[i];
            let addr = if access == Access::REMOTE_ATOMIC {
                (addr + 7) & !7
            } else {
                addr
            };
            let error = fails(&net, &mut a, |a| post(a, addr, rkey));
            assert_eq!(
                (error.syndrome, error.vendor_text()),
                (Syndrome::RemoteAccess, crate::time::remote_detail(text)),
                "{access:?} {i}"
            );
            assert_eq!(
                error.to_string().contains(text),
                error.vendor_text().is_some()
            );
            assert_eq!(b.received(), [], "no receive is taken");
            assert_eq!(b.bytes(BYTES - 8, 8), [0; 8]);
        }
    }
}

#[test]
fn a_send_longer_than_the_receive_is_an_invalid_request_here_and_a_local_length_error_there() {
    let text = "the buffers of the receive end before the message";
    let (here, there) = (crate::time::remote_detail(text), crate::time::detail(text));
    for size in [SHARED, OWN] {
        for room in [0, 9] {
            let net = Net::new();
            let (mut a, mut b) = pair(&net, size);
            b.receives(3, room);
            let error = fails(&net, &mut a, |a| {
                a.post(
                    &Send {
                        payload: Inline(&[7; 10]),
                    },
                    0,
                )
            });
            assert_eq!(
                (error.syndrome, error.vendor_text()),
                (Syndrome::RemoteInvalidRequest, here)
            );
            assert_eq!(
                b.bytes(INTO + room as usize, 10),
                [0; 10],
                "nothing behind the buffer"
            );
            let received = net.collect(if size.owns_receives { 3 } else { 1 }, || b.received());
            let (user, error) = received[0].unwrap_err();
            assert_eq!(
                (user, error.syndrome, error.vendor_text()),
                (0, Syndrome::LocalLength, there)
            );
            if size.owns_receives {
                assert_eq!(b.qp.state(), QpState::Error);
                let flushed: Vec<_> = received[1..]
                    .iter()
                    .map(|r| r.unwrap_err())
                    .map(|(user, e)| (user, e.syndrome))
                    .collect();
                assert_eq!(
                    flushed,
                    [1, 2].map(|user| (user, Syndrome::WorkRequestFlushed))
                );
            } else {
                net.quiet();
                assert_eq!(b.received(), [], "the receives of a shared queue stay");
            }
        }
    }
}

#[test]
fn a_receive_that_cannot_be_filled_is_a_remote_operation_error_here_and_a_local_protection_error_there()
 {
    for i in 0..8 {
        let net = Net::new();
        let (mut a, mut b) = pair(&net, OWN);
        let (wrong, _regions) = wrong(&b, Access::LOCAL_WRITE);
        let (addr, lkey, text) = wrong[i];
        // For the text `ACCESS` the receive gets a region without any access: not even its own
        // device may write it.
        let readable = b.pd.alloc(64, Access::empty()).unwrap();
        let (addr, lkey) = if text == ACCESS {
            (readable.addr(), readable.lkey())
        } else {
            (addr, lkey)
        };
        b.receive(&[Sge { addr, len: 8, lkey }], 5);
        let error = fails(&net, &mut a, |a| {
            a.post(
                &SendImm {
                    imm: 1,
                    payload: Inline(&[7; 8]),
                },
                0,
            )
        });
        assert_eq!(
            (error.syndrome, error.vendor_text()),
            (Syndrome::RemoteOperation, crate::time::remote_detail(text))
        );
        let (user, error) = net.collect(1, || b.received())[0].unwrap_err();
        assert_eq!(
            (user, error.syndrome, error.vendor_text()),
            (5, Syndrome::LocalProtection, crate::time::detail(text))
        );
    }
}

#[test]
fn what_is_behind_a_failure_is_flushed_in_order_and_so_are_own_receives() {
    let net = Net::new();
    let (mut a, mut b) = (End::new(net.device(), OWN), End::new(net.device(), SHARED));
    connect(&mut a, &mut b, &ConnectOptions::default());
    a.receives(4, 8);
    let bad = Write {
        addr: 0,
        rkey: 0,
        payload: Inline(&[1]),
    };
    a.qp.post(&bad, Signal::Reclaim, 0).unwrap();
    for user in 1..10 {
        a.qp.post(
            &Send {
                payload: Inline(&[1; 100]),
            },
            Signal::Reclaim,
            user,
        )
        .unwrap();
    }
    a.qp.ring();
    let sent = net.collect(10, || a.sent());
    assert_eq!(sent[0].1.unwrap_err().syndrome, Syndrome::RemoteAccess);
    for (i, (user, result)) in sent.iter().enumerate().skip(1) {
        let error = result.unwrap_err();
        assert_eq!(
            (*user, error.syndrome, error.vendor_text()),
            (i as u64, Syndrome::WorkRequestFlushed, None)
        );
    }
    let flushed: Vec<_> = net
        .collect(4, || a.received())
        .iter()
        .map(|r| r.unwrap_err())
        .map(|(user, e)| (user, e.syndrome))
        .collect();
    assert_eq!(
        flushed,
        [0, 1, 2, 3].map(|user| (user, Syndrome::WorkRequestFlushed))
    );
    // Receives posted to a failed queue pair are flushed as well.
    a.receives(2, 8);
    assert_eq!(net.collect(2, || a.received()).len(), 2);
}

#[test]
fn a_send_that_waits_is_flushed_at_once_when_its_queue_pair_fails_for_another_reason() {
    for size in [SHARED, OWN] {
        let net = Net::new();
        let (mut a, mut b) = (End::new(net.device(), size), End::new(net.device(), size));
        // The retry is due in 13 days.
        connect(
            &mut a,
            &mut b,
            &ConnectOptions {
                rnr_timer_ns: 1 << 50,
                ..ConnectOptions::default()
            },
        );
        a.receives(1, 8);
        a.post(
            &SendImm {
                imm: 1,
                payload: Inline(b"nobody receives it"),
            },
            7,
        );
        net.quiet();
        b.post(
            &Send {
                payload: Inline(&[1; 16]),
            },
            0,
        );
        assert_eq!(
            net.collect(1, || a.received())[0].unwrap_err().1.syndrome,
            Syndrome::LocalLength
        );
        let sent = net.collect(1, || a.sent());
        assert_eq!(
            sent.iter()
                .map(|(user, r)| (*user, r.unwrap_err().syndrome))
                .collect::<Vec<_>>(),
            [(7, Syndrome::WorkRequestFlushed)]
        );
    }
}

#[test]
fn own_receives_complete_in_order_also_when_the_queue_pair_fails_before_it_has_looked() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, OWN);
    b.receives(8, 8);
    for imm in 0..3 {
        a.post(
            &SendImm {
                imm,
                payload: Inline(&[1]),
            },
            0,
        );
    }
    // The messages are in the lane, and their target has not polled.
    net.collect(3, || a.sent());
    b.qp.fail();
    let got: Vec<_> = net
        .collect(8, || b.received())
        .iter()
        .map(|r| r.map(|a| (a.user, a.imm)).map_err(|(u, e)| (u, e.syndrome)))
        .collect();
    let want: Vec<_> = (0..3)
        .map(|i| Ok((i, i as u32)))
        .chain((3..8).map(|user| Err((user, Syndrome::WorkRequestFlushed))))
        .collect();
    assert_eq!(got, want);
}

#[test]
fn an_error_of_another_queue_pairs_receive_changes_nothing() {
    let net = Net::new();
    let (_a, mut b) = pair(&net, OWN);
    let mut other = End::new(b.device.clone(), OWN);
    other
        .qp
        .connect(&other.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.receives(1, 8);
    b.qp.fail();
    let mut seen = 0;
    net.settle(|| {
        b.recv_cq.poll(9, |cqe| {
            assert_eq!(
                (cqe.opcode(), other.qp.complete_receive(&cqe)),
                (Some(CqeOpcode::ResponderError), None)
            );
            assert_eq!(b.qp.complete_receive(&cqe), Some(0));
            seen += 1;
        });
        seen == 1
    });
    assert_eq!(
        (other.qp.state(), b.qp.state()),
        (QpState::ReadyToSend, QpState::Error)
    );
}

/// The action on the second end once the first is connected to it. A returned end stays alive.
type How = fn(&Net, &mut End, End) -> Option<End>;

#[test]
fn a_peer_that_is_not_connected_or_closed_or_failed_ends_in_transport_retry_exceeded() {
    let error = |how: How| {
        let net = Net::new();
        let (mut a, b) = (
            End::new(net.device(), SHARED),
            End::new(net.device(), SHARED),
        );
        // 4.096 us x 2^4 x 2
        let options = ConnectOptions {
            timeout: 4,
            retry_count: 1,
            ..ConnectOptions::default()
        };
        a.qp.connect(&b.qp.address(), &options).unwrap();
        let _kept = how(&net, &mut a, b);
        let op = Write {
            addr: 0,
            rkey: 0,
            payload: (),
        };
        fails(&net, &mut a, |a| a.post(&op, 0)).syndrome
    };
    let ends: [How; 4] = [
        |_, _, b| Some(b),
        |_, a, mut b| {
            b.qp.connect(&a.qp.address(), &ConnectOptions::default())
                .unwrap();
            b.qp.fail();
            Some(b)
        },
        |_, a, mut b| {
            b.qp.connect(&a.qp.address(), &ConnectOptions::default())
                .unwrap();
            let End {
                send_cq,
                recv_cq,
                srq,
                mr,
                pd,
                device,
                ..
            } = b;
            drop((send_cq, recv_cq, srq, mr, pd, device));
            None
        },
        |net, a, mut b| {
            b.qp.connect(&a.qp.address(), &ConnectOptions::default())
                .unwrap();
            net.forget(&b.device);
            None
        },
    ];
    for how in ends {
        assert_eq!(error(how), Syndrome::TransportRetryExceeded);
    }
}

#[test]
fn rnr_retries_end_as_configured_with_their_own_status() {
    for (rnr_retry, ends) in [(0, true), (1, true), (6, true), (7, false)] {
        let net = Net::new();
        let (mut a, mut b) = (
            End::new(net.device(), SHARED),
            End::new(net.device(), SHARED),
        );
        connect(
            &mut a,
            &mut b,
            &ConnectOptions {
                rnr_retry,
                rnr_timer_ns: 1000,
                ..ConnectOptions::default()
            },
        );
        let write = WriteImm {
            addr: 0,
            rkey: 0,
            imm: 1,
            payload: (),
        };
        if ends {
            let error = fails(&net, &mut a, |a| a.post(&write, 0));
            assert_eq!(
                (error.syndrome, error.raw),
                (Syndrome::RnrRetryExceeded, 0x16)
            );
        } else {
            a.post(&write, 0);
            for _ in 0..100 {
                net.pass_ns(1000);
                net.progress();
                assert_eq!(a.sent(), []);
            }
        }
    }
}

#[test]
fn every_status_can_be_asked_for_and_is_told_apart() {
    let all = [
        (Syndrome::LocalLength, 0x01),
        (Syndrome::LocalQpOperation, 0x02),
        (Syndrome::LocalProtection, 0x04),
        (Syndrome::WorkRequestFlushed, 0x05),
        (Syndrome::MemoryWindowBind, 0x06),
        (Syndrome::BadResponse, 0x10),
        (Syndrome::LocalAccess, 0x11),
        (Syndrome::RemoteInvalidRequest, 0x12),
        (Syndrome::RemoteAccess, 0x13),
        (Syndrome::RemoteOperation, 0x14),
        (Syndrome::TransportRetryExceeded, 0x15),
        (Syndrome::RnrRetryExceeded, 0x16),
        (Syndrome::RemoteAborted, 0x22),
    ];
    let mut texts = std::collections::HashSet::new();
    for (syndrome, raw) in all {
        let net = Net::new();
        let options = SoftOptions {
            faults: Faults {
                fail: Some((1, syndrome)),
                ..Faults::default()
            },
            ..net.options()
        };
        let (mut a, mut b) = (
            End::new(net.open(&options), SHARED),
            End::new(net.device(), SHARED),
        );
        connect(&mut a, &mut b, &ConnectOptions::default());
        let write = Write {
            addr: 0,
            rkey: 0,
            payload: (),
        };
        a.post(&write, 0);
        assert_eq!(net.collect(1, || a.sent()), [(0, Ok(0))]);
        let error = fails(&net, &mut a, |a| a.post(&write, 1));
        assert_eq!(
            (error.syndrome, error.raw, error.vendor_text()),
            (syndrome, raw, Some("a fault that was asked for"))
        );
        assert!(texts.insert(error.to_string()), "{error}");
    }
    let unknown = CompletionError {
        syndrome: Syndrome::from_wire(0x77),
        raw: 0x77,
        vendor: 0xf9,
        kind: DeviceKind::Soft,
    };
    assert_eq!(
        (unknown.syndrome, unknown.vendor_text()),
        (Syndrome::Unknown, None)
    );
    let of_a_nic = CompletionError {
        vendor: 1,
        kind: DeviceKind::Hardware,
        ..unknown
    };
    let ours = CompletionError {
        kind: DeviceKind::Soft,
        ..of_a_nic
    };
    assert_eq!(
        (of_a_nic.vendor_text(), ours.vendor_text().is_some()),
        (None, true),
        "a NIC's details are its own"
    );
    assert_eq!(
        unknown.to_string(),
        "unknown completion syndrome (syndrome 0x77, vendor 0xf9)"
    );
}

#[test]
fn a_completion_queue_that_overruns_is_dead_and_ends_its_queue_pairs() {
    for of_receives in [false, true] {
        let net = Net::new();
        let mut options = net.options();
        // Strict mode reports the overrun, which is intended here.
        options.strict = false;
        let small = Size { cqes: 4, ..SHARED };
        let (mut a, mut b) = (
            End::new(net.open(&options), if of_receives { SHARED } else { small }),
            End::new(net.open(&options), small),
        );
        connect(
            &mut a,
            &mut b,
            &ConnectOptions {
                timeout: 4,
                retry_count: 1,
                ..ConnectOptions::default()
            },
        );
        b.receives(6, 8);
        for user in 0..6 {
            a.qp.post(
                &Send { payload: () },
                if of_receives {
                    Signal::Reclaim
                } else {
                    Signal::Always
                },
                user,
            )
            .unwrap();
        }
        a.qp.ring();
        net.quiet();
        if of_receives {
            b.device.progress();
            net.quiet();
            assert_eq!(b.received().len(), 4);
            net.quiet();
            assert_eq!(b.received(), [], "nothing is written there any more");
            // The queue pair of the peer does not answer any more either.
            let error = fails(&net, &mut a, |a| a.post(&Send { payload: () }, 9));
            assert_eq!(error.syndrome, Syndrome::TransportRetryExceeded);
        } else {
            assert_eq!(a.sent().len(), 4);
            a.qp.post(&Send { payload: () }, Signal::Always, 9).unwrap();
            a.qp.ring();
            net.quiet();
            assert_eq!(a.sent(), [], "nothing is written there any more");
        }
    }
}
