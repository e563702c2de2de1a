//! SEND, atomics and both kinds of receive queue, on the software HCA; WRITE and READ are in
//! `rc.rs`.

use std::sync::mpsc;
use std::time::Duration;

use crate::end::*;
use crate::time::Net;
use mlx5::wire::NO_QPN;
use mlx5::*;

fn data(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn arrival(user: u64, imm: Option<u32>, byte_count: usize) -> Received {
    let opcode = if imm.is_some() {
        CqeOpcode::ResponderSendImm
    } else {
        CqeOpcode::ResponderSend
    };
    Ok(Arrival {
        user,
        opcode,
        imm: imm.unwrap_or(0),
        byte_count: byte_count as u32,
        is_solicited: false,
    })
}

#[test]
fn sends_of_every_payload_kind_are_scattered_over_the_buffers_of_the_next_receive() {
    for size in [SHARED, OWN] {
        let net = Net::new();
        let (mut a, mut b) = pair(&net, size);
        if size.owns_receives {
            assert_eq!(b.qp.free_receives(), 64);
        }
        let data = data(3000);
        a.mr.write(0, &data).unwrap();
        // Buffers of odd sizes, apart from one another and not in the order of their addresses.
        let buffers = |b: &End, i: usize| {
            let at = INTO + i * 8192;
            [
                b.mr.sge(at + 5000, 7).unwrap(),
                b.mr.sge(at, 100).unwrap(),
                b.mr.sge(at + 200, 3000).unwrap(),
            ]
        };
        for i in 0..7 {
            let buffers = buffers(&b, i);
            b.receive(&buffers, 10 + i as u64);
        }
        a.post(
            &Send {
                payload: Inline(&data[..220]),
            },
            0,
        );
        a.post(
            &SendImm {
                imm: 0xdead_beef,
                payload: a.mr.sge(0, 3000).unwrap(),
            },
            1,
        );
        a.post(
            &Send {
                payload: (Inline(&data[..204]), a.mr.sge(204, 1796).unwrap()),
            },
            2,
        );
        a.post(
            &SendImm {
                imm: 1,
                payload: Inline(&data[..7]),
            },
            3,
        );
        a.post(&Send { payload: () }, 4);
        a.post(
            &SendImm {
                imm: 2,
                payload: (),
            },
            5,
        );
        a.post(
            &Send {
                payload: a.mr.sge(3, 0).unwrap(),
            },
            6,
        );
        let sizes = [220, 3000, 2000, 7, 0, 0, 0];
        let imms = [None, Some(0xdead_beef), None, Some(1), None, Some(2), None];
        let want: Vec<_> = (0..7)
            .map(|i| arrival(10 + i as u64, imms[i], sizes[i]))
            .collect();
        assert_eq!(net.collect(7, || b.received()), want);
        assert_eq!(
            net.collect(7, || a.sent()),
            (0..7).map(|u| (u, Ok(0))).collect::<Vec<_>>()
        );
        for (i, &size) in sizes.iter().enumerate() {
            let all: Vec<u8> = buffers(&b, i)
                .iter()
                .flat_map(|s| b.bytes((s.addr - b.mr.addr()) as usize, s.len as usize))
                .collect();
            assert_eq!(all[..size], data[..size], "message {i}");
            assert!(
                all[size..].iter().all(|&byte| byte == 0),
                "nothing behind message {i}"
            );
        }
    }
}

#[test]
fn distinct_buffers_of_a_shared_queue_are_filled_in_post_order_whatever_the_order_of_their_return()
{
    let net = Net::new();
    let (mut a, mut b) = pair(
        &net,
        Size {
            receives: 7,
            ..SHARED
        },
    );
    // A second connection: it shares the receive queue, and its receives complete in another CQ.
    let mut second_cq = b.device.create_cq(16).unwrap();
    let config = QpConfig {
        max_inline_data: 220,
        ..QpConfig::default()
    };
    let mut from =
        a.pd.create_qp(&a.send_cq, &a.recv_cq, a.srq.as_ref().unwrap(), &config)
            .unwrap();
    let mut to =
        b.pd.create_qp(&b.send_cq, &second_cq, b.srq.as_ref().unwrap(), &config)
            .unwrap();
    from.connect(&to.address(), &ConnectOptions::default())
        .unwrap();
    to.connect(&from.address(), &ConnectOptions::default())
        .unwrap();
    let mut message = 0u32;
    for round in 0..40u32 {
        for i in 0..7 {
            let buffer = b.mr.sge(INTO + i * 64, 64).unwrap();
            b.receive(&[buffer], i as u64);
        }
        assert_eq!(
            b.srq.as_mut().unwrap().post(&[], 0),
            Err(PostReceiveError::QueueFull { depth: 7 })
        );
        for i in 0..7 {
            // One at a time, because messages of two connections have no order.
            let qp = if i % 2 == 0 { &mut a.qp } else { &mut from };
            qp.post(
                &SendImm {
                    imm: message,
                    payload: Inline(&message.to_ne_bytes()),
                },
                Signal::Always,
                0,
            )
            .unwrap();
            qp.ring();
            net.settle(|| {
                a.send_cq.poll(1, |cqe| {
                    assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some())
                }) == 1
            });
            message += 1;
        }
        // Returned in another order each time, so that the list soon has no order.
        let mut left = [4, 3];
        for i in 0..7 {
            let wanted = (round >> i & 1) as usize;
            let which = if left[wanted] > 0 { wanted } else { 1 - wanted };
            left[which] -= 1;
            let (cq, srq) = (
                if which == 0 {
                    &mut b.recv_cq
                } else {
                    &mut second_cq
                },
                b.srq.as_mut().unwrap(),
            );
            let mut arrived = None;
            net.settle(|| {
                cq.poll(1, |cqe| {
                    arrived = Some((cqe.imm(), srq.complete_receive(&cqe).unwrap()))
                });
                arrived.is_some()
            });
            let (imm, user) = arrived.unwrap();
            assert_eq!(
                imm,
                message - 7 + user as u32,
                "the message went to the receive posted for it"
            );
            assert_eq!(b.bytes(INTO + user as usize * 64, 4), imm.to_ne_bytes());
        }
    }
}

#[test]
fn completions_of_a_destroyed_queue_pair_complete_nothing_of_the_next_with_its_number_and_their_receives_come_back()
 {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, SHARED);
    b.receives(1, 64);
    a.post(
        &SendImm {
            imm: 7,
            payload: Inline(b"old"),
        },
        5,
    );
    // A relayed device takes completions only where it is called.
    net.settle(|| {
        _ = (a.device.progress(), b.device.progress());
        a.send_cq.has_completion() && b.recv_cq.has_completion()
    });
    let End {
        qp: old,
        mut send_cq,
        recv_cq,
        srq,
        mr,
        pd,
        device: _device,
    } = a;
    let End {
        qp: old_to,
        send_cq: to_send_cq,
        recv_cq: mut to_recv_cq,
        srq: to_srq,
        pd: to_pd,
        mr: to_mr,
        device: _to_device,
    } = b;
    let (srq, mut to_srq) = (srq.unwrap(), to_srq.unwrap());
    let numbers = [old.qpn(), old_to.qpn()];
    drop((old, old_to));
    // The software HCA reuses a number after 1,022 queue pairs, and under libmlx5 for the next
    // queue pair. A NIC may reuse it much later.
    let next = |make: &dyn Fn() -> RcQp, number| {
        (0..1_100)
            .map(|_| make())
            .find(|qp| qp.qpn() == number)
            .unwrap_or_else(make)
    };
    let config = QpConfig {
        max_inline_data: 220,
        ..QpConfig::default()
    };
    let mut qp = next(
        &|| pd.create_qp(&send_cq, &recv_cq, &srq, &config).unwrap(),
        numbers[0],
    );
    let mut to = next(
        &|| {
            to_pd
                .create_qp(&to_send_cq, &to_recv_cq, &to_srq, &config)
                .unwrap()
        },
        numbers[1],
    );
    qp.connect(&to.address(), &ConnectOptions::default())
        .unwrap();
    to.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    // This WQE has the counter that the old completion contains.
    let write = Write {
        addr: to_mr.addr(),
        rkey: to_mr.rkey(),
        payload: Inline(b"new"),
    };
    qp.post(&write, Signal::Always, 9).unwrap();
    assert_eq!(
        send_cq.poll(8, |cqe| assert_eq!(
            (cqe.qpn(), cqe.wqe_counter(), qp.complete(&cqe)),
            (NO_QPN, 0, None)
        )),
        1
    );
    let free = to_srq.free();
    let mut arrived = vec![];
    to_recv_cq.poll(8, |cqe| {
        arrived.push((
            cqe.qpn(),
            cqe.imm(),
            to.complete_receive(&cqe),
            to_srq.complete_receive(&cqe),
        ))
    });
    assert_eq!(
        (arrived, to_srq.free()),
        (vec![(NO_QPN, 7, None, Some(0))], free + 1)
    );
    qp.ring();
    net.settle(|| {
        send_cq.poll(8, |cqe| {
            assert_eq!((cqe.result(), qp.complete(&cqe)), (Ok(()), Some(9)))
        }) == 1
    });
    let mut bytes = [0; 3];
    to_mr.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"new");
    drop(mr);
}

#[test]
fn a_completion_of_a_send_is_no_completion_of_a_receive() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, SHARED);
    a.receives(2, 0);
    b.receives(2, 0);
    a.post(
        &SendImm {
            imm: 7,
            payload: (),
        },
        5,
    );
    let (srq, free) = (a.srq.as_mut().unwrap(), 61);
    net.settle(|| {
        a.send_cq.poll(1, |cqe| {
            assert_eq!(
                (srq.complete_receive(&cqe), a.qp.complete_receive(&cqe)),
                (None, None)
            )
        }) == 1
    });
    assert_eq!(srq.free(), free, "what is posted stays posted");
    net.settle(|| !b.received().is_empty());
}

#[test]
fn far_more_messages_than_receives_arrive_once_each_and_in_order() {
    for size in [
        Size {
            receives: 5,
            ..SHARED
        },
        Size { receives: 5, ..OWN },
    ] {
        let net = Net::new();
        let (mut a, mut b) = pair(&net, size);
        let (mut posted, mut arrived) = (0u32, 0u32);
        // Across the wrap of the 16-bit counters of the receive queue.
        let total = 70_000;
        net.settle(|| {
            while posted < total {
                let bytes = posted.to_ne_bytes();
                let op = SendImm {
                    imm: posted,
                    payload: Inline(&bytes),
                };
                match a.qp.post(&op, Signal::Reclaim, 0) {
                    Ok(()) => posted += 1,
                    Err(PostError::QueueFull { .. }) => break,
                    Err(e) => panic!("{e}"),
                }
            }
            a.qp.ring();
            while match &b.srq {
                Some(srq) => srq.free() > 0,
                None => b.qp.free_receives() > 0,
            } {
                b.receives(1, 4);
            }
            for arrival in b.received() {
                assert_eq!(arrival.unwrap().imm, arrived);
                arrived += 1;
            }
            assert!(a.sent().iter().all(|(_, result)| result.is_ok()));
            // For the timer of a sender that found no receive.
            if arrived < total && crate::time::mode() != crate::time::Mode::Delay {
                net.pass_ns(10_000);
            }
            arrived == total
        });
    }
}

#[test]
fn a_send_without_a_receive_is_retried_and_then_fails_as_configured() {
    for rnr_retry in [0, 3] {
        let net = Net::new();
        let (mut a, mut b) = (End::new(net.device(), SHARED), End::new(net.device(), OWN));
        connect(
            &mut a,
            &mut b,
            &ConnectOptions {
                rnr_retry,
                rnr_timer_ns: 200_000,
                ..ConnectOptions::default()
            },
        );
        a.post(
            &Send {
                payload: Inline(b"nowhere"),
            },
            1,
        );
        a.post(&Send { payload: () }, 2);
        let mut retries = 0;
        let sent = loop {
            net.quiet();
            let sent = a.sent();
            if !sent.is_empty() {
                break sent;
            }
            retries += 1;
            net.pass_ns(200_000);
        };
        assert_eq!(sent[0].1.unwrap_err().syndrome, Syndrome::RnrRetryExceeded);
        if crate::time::mode() == crate::time::Mode::Immediate {
            assert_eq!(retries, rnr_retry);
        }
        let flushed = net.collect(1, || sent.iter().skip(1).copied().chain(a.sent()).collect());
        assert_eq!(
            (flushed[0].0, flushed[0].1.unwrap_err().syndrome),
            (2, Syndrome::WorkRequestFlushed)
        );
        assert_eq!(a.qp.state(), QpState::Error);
        assert_eq!(b.received(), []);
    }
}

#[test]
fn a_send_with_endless_retries_waits_for_the_receive() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, OWN);
    a.post(
        &Send {
            payload: Inline(b"later"),
        },
        1,
    );
    for _ in 0..50 {
        net.pass_ns(10_000);
        net.progress();
        assert_eq!(a.sent(), []);
    }
    b.receives(1, 16);
    net.pass_ns(10_000);
    assert_eq!(net.collect(1, || b.received()), [arrival(0, None, 5)]);
    assert_eq!(net.collect(1, || a.sent()), [(1, Ok(0))]);
    assert_eq!(b.bytes(INTO, 5), b"later");
}

#[test]
fn a_solicited_message_says_so_to_its_receiver() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, SHARED);
    b.receives(4, 8);
    let write = WriteImm {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        imm: 1,
        payload: (),
    };
    a.qp.post(&Send { payload: () }, Signal::Always.solicited(), 0)
        .unwrap();
    a.qp.post(&Send { payload: () }, Signal::Always, 1).unwrap();
    a.qp.post(&write, Signal::Reclaim.solicited(), 2).unwrap();
    a.qp.post(
        &SendImm {
            imm: 3,
            payload: (),
        },
        Flags {
            signal: Signal::Always,
            fence: true,
            solicited: true,
        },
        3,
    )
    .unwrap();
    a.qp.ring();
    let solicited: Vec<_> = net
        .collect(4, || b.received())
        .iter()
        .map(|r| r.unwrap().is_solicited)
        .collect();
    assert_eq!(solicited, [true, false, true, true]);
}

#[test]
fn a_fenced_send_sends_what_the_read_before_it_brought() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, SHARED);
    b.receives(1, 8);
    b.mr.write(0, b"of the b").unwrap();
    let read = Read {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        into: a.mr.sge(0, 8).unwrap(),
    };
    a.qp.post(&read, Signal::Reclaim, 0).unwrap();
    a.qp.post(
        &Send {
            payload: a.mr.sge(0, 8).unwrap(),
        },
        Signal::Always.fence(),
        1,
    )
    .unwrap();
    a.qp.ring();
    assert_eq!(net.collect(1, || a.sent()), [(1, Ok(0))]);
    assert_eq!(b.bytes(INTO, 8), b"of the b");
}

#[test]
fn receives_may_be_in_memory_of_another_allocator() {
    let net = Net::new();
    let (mut a, mut b) = pair(&net, OWN);
    let mut heap = vec![0u8; 4096].into_boxed_slice();
    let at = std::ptr::NonNull::new(heap.as_mut_ptr()).unwrap();
    // SAFETY: the box outlives the region, and no reference into it is held while the device may
    // write.
    let mr = unsafe {
        b.pd.register(at, 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
    }
    .unwrap();
    b.receive(&[mr.sge(5, 4).unwrap(), b.mr.sge(INTO, 100).unwrap()], 3);
    a.post(
        &Send {
            payload: Inline(b"over both"),
        },
        1,
    );
    assert_eq!(net.collect(1, || b.received()), [arrival(3, None, 9)]);
    assert_eq!(b.bytes(INTO, 5), b" both");
    mr.deregister().unwrap();
    assert_eq!(&heap[5..9], b"over");
}

#[test]
fn atomics_return_the_old_value_in_host_order_and_change_the_word() {
    let net = Net::new();
    let (mut a, b) = pair(&net, SHARED);
    let (addr, rkey) = (b.mr.addr() + 64, b.mr.rkey());
    let first = 0x0102_0304_0506_0708u64;
    b.mr.write(64, &first.to_ne_bytes()).unwrap();
    let into = |a: &End, i: usize| a.mr.sge(i * 8, 8).unwrap();
    let op = FetchAdd {
        addr,
        rkey,
        add: 5,
        into: into(&a, 0),
    };
    a.post(&op, 0);
    let op = CompareSwap {
        addr,
        rkey,
        compare: first,
        swap: 1,
        into: into(&a, 1),
    };
    a.post(&op, 1);
    let op = CompareSwap {
        addr,
        rkey,
        compare: first + 5,
        swap: u64::MAX,
        into: into(&a, 2),
    };
    a.post(&op, 2);
    let op = FetchAdd {
        addr,
        rkey,
        add: 3,
        into: into(&a, 3),
    };
    a.post(&op, 3);
    assert_eq!(
        net.collect(4, || a.sent()),
        [0, 1, 2, 3].map(|user| (user, Ok(8)))
    );
    // The second operation found a different value and changed nothing. The sum of the last one
    // wrapped around.
    assert_eq!(
        [0, 8, 16, 24].map(|at| a.word(at)),
        [first, first + 5, first + 5, u64::MAX]
    );
    assert_eq!(b.word(64), 2);
    assert_eq!((b.word(56), b.word(72)), (0, 0), "the neighbours");
}

#[test]
fn an_atomic_that_cannot_be_is_refused_where_that_is_known() {
    let net = Net::new();
    let (mut a, b) = pair(&net, SHARED);
    let into = a.mr.sge(0, 8).unwrap();
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    for off in 1..8 {
        let addr = addr + off;
        let misaligned = Err(PostError::AtomicMisaligned { addr });
        assert_eq!(
            a.qp.post(
                &FetchAdd {
                    addr,
                    rkey,
                    add: 1,
                    into
                },
                Signal::Always,
                0
            ),
            misaligned
        );
        assert_eq!(
            a.qp.post(
                &CompareSwap {
                    addr,
                    rkey,
                    compare: 0,
                    swap: 1,
                    into
                },
                Signal::Always,
                0
            ),
            misaligned
        );
    }
    for bytes in [0, 4, 7, 9, 16] {
        let into = a.mr.sge(0, bytes).unwrap();
        assert_eq!(
            a.qp.post(
                &FetchAdd {
                    addr,
                    rkey,
                    add: 1,
                    into
                },
                Signal::Always,
                0
            ),
            Err(PostError::AtomicResult { bytes })
        );
    }
    let mut heap = vec![0u64; 8].into_boxed_slice();
    let at = std::ptr::NonNull::new(heap.as_mut_ptr()).unwrap().cast();
    // A NIC does atomics in any memory.
    if crate::time::mode() != crate::time::Mode::Hardware {
        // SAFETY: refused, so nothing is registered.
        let refused = unsafe { b.pd.register(at, 64, ANY) }.map(drop);
        assert!(
            matches!(
                refused,
                Err(RegisterError::Refused(
                    hca::RegisterError::Unreachable { .. }
                ))
            ),
            "{refused:?}"
        );
    }
    // The result may go to any memory, because only its owner writes there. SAFETY: the box
    // outlives the region, and no reference into it is held while the device may write.
    let local = unsafe { a.pd.register(at, 64, Access::LOCAL_WRITE) }.unwrap();
    b.mr.write(0, &77u64.to_ne_bytes()).unwrap();
    a.post(
        &FetchAdd {
            addr,
            rkey,
            add: 1,
            into: local.sge(8, 8).unwrap(),
        },
        1,
    );
    assert_eq!(net.collect(1, || a.sent()), [(1, Ok(8))]);
    local.deregister().unwrap();
    assert_eq!(heap[1], 77);
}

/// The data that another thread needs to reach a region.
#[derive(Clone, Copy)]
struct Word {
    at: QpAddress,
    addr: u64,
    rkey: u32,
}

/// Opens a device in another thread, connects it to `word`, and does `operation` `times` times.
/// Returns the old values.
fn hammer(
    options: SoftOptions,
    word: &mpsc::Receiver<Word>,
    own: &mpsc::Sender<QpAddress>,
    times: u64,
    mut operation: impl FnMut(&mut End, &Word, u64) -> u64,
) -> Vec<u64> {
    let mut end = End::new(Device::open(Net::spec(&options)).unwrap(), SHARED);
    own.send(end.qp.address()).unwrap();
    let word = word.recv().unwrap();
    end.qp
        .connect(&word.at, &ConnectOptions::default())
        .unwrap();
    let old = (0..times).map(|i| operation(&mut end, &word, i)).collect();
    assert_eq!(
        end.device
            .soft()
            .map_or_else(Vec::new, |soft| soft.take_violations()),
        []
    );
    old
}

fn wait(end: &mut End) -> u64 {
    loop {
        if let [(_, result)] = end.sent()[..] {
            assert_eq!(result, Ok(8));
            return end.word(0);
        }
        pause();
    }
}

/// Two devices in two threads work on one word of a third device, whose thread does nothing
/// meanwhile. Returns all old values and the final value.
fn from_two_threads(
    times: u64,
    operation: impl FnMut(&mut End, &Word, u64) -> u64 + Clone + std::marker::Send,
) -> (Vec<u64>, u64) {
    copyrpc_testing::limits::watchdog(Duration::from_secs(120));
    let net = Net::new();
    let mut options = net.options();
    if crate::time::mode() == crate::time::Mode::Immediate {
        options.clock = Clock::System;
    }
    let device = net.open(&options);
    let mut targets = [End::new(device.clone(), SHARED), End::new(device, SHARED)];
    let (addr, rkey) = (targets[0].mr.addr(), targets[0].mr.rkey());
    let pd = targets[0].pd.clone();
    let mut all = vec![];
    std::thread::scope(|scope| {
        let threads: Vec<_> = targets
            .iter_mut()
            .map(|target| {
                // Both work under the domain of the region.
                target.qp = pd
                    .create_qp(
                        &target.send_cq,
                        &target.recv_cq,
                        target.srq.as_ref().unwrap(),
                        &QpConfig::default(),
                    )
                    .unwrap();
                let (word_tx, word_rx) = mpsc::channel();
                let (own_tx, own_rx) = mpsc::channel();
                let (options, operation) = (options.clone(), operation.clone());
                let thread =
                    scope.spawn(move || hammer(options, &word_rx, &own_tx, times, operation));
                target
                    .qp
                    .connect(&own_rx.recv().unwrap(), &ConnectOptions::default())
                    .unwrap();
                word_tx
                    .send(Word {
                        at: target.qp.address(),
                        addr,
                        rkey,
                    })
                    .unwrap();
                thread
            })
            .collect();
        for thread in threads {
            // A device answers packets only while it is polled.
            while !thread.is_finished() {
                net.progress();
            }
            all.extend(thread.join().unwrap());
        }
    });
    (all, targets[0].word(0))
}

#[test]
fn fetch_and_add_from_two_threads_loses_no_addition_and_gives_no_value_twice() {
    let times = if crate::time::mode() == crate::time::Mode::Packets {
        500
    } else {
        20_000
    };
    let (mut old, last) = from_two_threads(times, |end, word, i| {
        let op = FetchAdd {
            addr: word.addr,
            rkey: word.rkey,
            add: 1,
            into: end.mr.sge(0, 8).unwrap(),
        };
        end.post(&op, i);
        wait(end)
    });
    assert_eq!(last, 2 * times);
    old.sort_unstable();
    assert_eq!(old, (0..2 * times).collect::<Vec<_>>());
}

#[test]
fn compare_and_swap_from_two_threads_succeeds_for_one_of_them_at_a_time() {
    let times = if crate::time::mode() == crate::time::Mode::Packets {
        500
    } else {
        5_000
    };
    let (mut old, last) = from_two_threads(times, |end, word, i| {
        let mut seen = 0;
        loop {
            let op = CompareSwap {
                addr: word.addr,
                rkey: word.rkey,
                compare: seen,
                swap: seen + 1,
                into: end.mr.sge(0, 8).unwrap(),
            };
            end.post(&op, i);
            let found = wait(end);
            if found == seen {
                return found;
            }
            seen = found;
        }
    });
    assert_eq!(last, 2 * times);
    old.sort_unstable();
    assert_eq!(old, (0..2 * times).collect::<Vec<_>>());
}

#[test]
fn a_batch_through_blueflame_runs_in_order_and_breaks_no_rule() {
    let net = Net::new();
    let (mut a, b) = pair(&net, SHARED);
    let mut batch = a.qp.blueflame_batch();
    for i in 0..3u8 {
        let bytes = [i + 1; 2];
        let op = Write {
            addr: b.mr.addr() + u64::from(i),
            rkey: b.mr.rkey(),
            payload: Inline(&bytes),
        };
        batch.post(&op, Signal::Always, i.into()).unwrap();
    }
    batch.finish();
    assert_eq!(
        net.collect(3, || a.sent()),
        [(0, Ok(0)), (1, Ok(0)), (2, Ok(0))]
    );
    assert_eq!(b.bytes(0, 4), [1, 2, 3, 3]);
}

#[test]
fn the_halves_of_a_poll_give_the_device_its_time_and_hand_out_what_is_there() {
    let fabric = LocalFabric::new();
    let options = SoftOptions {
        fabric: FabricSpec::Local(fabric),
        ..SoftOptions::default()
    };
    let device = Device::open(DeviceSpec::Soft(options)).unwrap();
    let pd = device.alloc_pd().unwrap();
    let send_cq = device.create_cq(64).unwrap();
    let mut cqs = [(); 2].map(|()| device.create_mono_cq::<u32>(64).unwrap());
    let mut srq = pd.create_srq(8, 0).unwrap();
    (0..4).for_each(|i| srq.post(&[], i).unwrap());
    srq.ring();
    let mr = pd
        .alloc(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    let mut qps = [0, 1].map(|i| {
        let mut qp = pd
            .create_qp(&send_cq, &cqs[i], &srq, &QpConfig::default())
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        cqs[i].register(qp.qpn(), 7 + i as u32);
        qp
    });
    let mut send = |i: usize, imm| {
        let write = WriteImm {
            addr: mr.addr(),
            rkey: mr.rkey(),
            imm,
            payload: Inline(b"here"),
        };
        qps[i].post(&write, Signal::Reclaim, 0).unwrap();
        qps[i].ring();
    };
    let mut take = |cq: &mut MonoCq<u32>| {
        let mut taken = vec![];
        let found = cq.progress().unwrap();
        let n = found.take(8, |value, cqe| {
            srq.complete_receive(&cqe).unwrap();
            taken.push((value.copied(), cqe.imm()));
        });
        assert_eq!(n, taken.len());
        taken
    };
    send(0, 5);
    assert!(!cqs[0].has_completion(), "the device had no time");
    assert!(
        cqs[0].progress().is_some() && cqs[0].progress().is_some(),
        "it is there until it is taken"
    );
    assert_eq!(take(&mut cqs[0]), [(Some(7), 5)]);
    assert!(cqs[0].progress().is_none());
    // A queue that is never found empty does not keep the device from its work.
    send(0, 6);
    assert!(cqs[0].progress().is_some());
    send(1, 9);
    assert!(!cqs[1].has_completion());
    assert!((0..16).all(|_| cqs[0].progress().is_some()));
    assert_eq!(
        (take(&mut cqs[1]), take(&mut cqs[0])),
        (vec![(Some(8), 9)], vec![(Some(7), 6)])
    );
}
