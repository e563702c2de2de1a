//! The costs of the NIC model, each checked by exact virtual times.

use mlx5::*;

use crate::simulation::simulated::*;

#[test]
fn a_write_costs_its_wqe_its_bytes_and_the_way_and_is_acknowledged_after_the_way_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    let write = |n: u32| Write {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        payload: a.mr.sge(0, n).unwrap(),
    };
    a.qp.post(&write(1000), Signal::Always, 1).unwrap();
    a.qp.post(&write(3000), Signal::Always, 2).unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    // 1 ns per byte. The second message leaves after the first.
    let first = WAY + 1000 + NIC.link_ns;
    assert_eq!(sent, [(1, first), (2, first + NIC.send_ns + 3000)]);
}

#[test]
fn a_read_and_an_atomic_take_their_bytes_on_the_way_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    a.qp.post(
        &Read {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            into: a.mr.sge(0, 5000).unwrap(),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    assert_eq!(sent, [(1, WAY + NIC.send_ns + 5000 + NIC.link_ns)]);
    let into = a.mr.sge(0, 8).unwrap();
    a.qp.post(
        &FetchAdd {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            add: 1,
            into,
        },
        Signal::Always,
        2,
    )
    .unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    assert_eq!(sent, [(2, WAY + NIC.send_ns + 8 + NIC.link_ns)]);
}

#[test]
fn the_result_of_a_read_is_of_the_time_of_its_effect_and_not_there_before_the_response() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, b, start_ns) = warm_pair(&mut simulation);
    let byte = |mr: &Mr| {
        let mut byte = [0];
        mr.read(0, &mut byte).unwrap();
        byte[0]
    };
    b.mr.write(0, &[1]).unwrap();
    // Not signaled: the completion of the atomic after it is enough.
    a.qp.post(
        &Read {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            into: a.mr.sge(0, 1).unwrap(),
        },
        Signal::Reclaim,
        1,
    )
    .unwrap();
    let into = a.mr.sge(8, 8).unwrap();
    a.qp.post(
        &FetchAdd {
            addr: b.mr.addr() + 8,
            rkey: b.mr.rkey(),
            add: 5,
            into,
        },
        Signal::Always,
        2,
    )
    .unwrap();
    a.qp.ring();
    simulation.run(start_ns + WAY - 1);
    b.mr.write(0, &[2]).unwrap();
    simulation.run(start_ns + WAY);
    b.mr.write(0, &[3]).unwrap();
    let response_ns = start_ns + WAY + NIC.send_ns + 1 + NIC.link_ns;
    simulation.run(response_ns - 1);
    assert_ne!(byte(&a.mr), 2, "the response is on its way");
    simulation.run(response_ns);
    assert_eq!(byte(&a.mr), 2, "as it was when the request was there");
    assert_eq!(a.sent(), []);
    simulation.run(u64::MAX);
    assert_eq!(a.sent(), [(Some(2), Ok(()))]);
    let mut word = [0xff; 8];
    a.mr.read(8, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 0);
}

#[test]
fn a_fenced_write_leaves_when_the_read_before_it_is_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    b.mr.write(0, b"brought by the read").unwrap();
    let sge = a.mr.sge(0, 19).unwrap();
    a.qp.post(
        &Read {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            into: sge,
        },
        Signal::Reclaim,
        1,
    )
    .unwrap();
    a.qp.post(
        &Write {
            addr: b.mr.addr() + 100,
            rkey: b.mr.rkey(),
            payload: sge,
        },
        Signal::Always.fence(),
        2,
    )
    .unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    let read = WAY + NIC.send_ns + 19 + NIC.link_ns;
    assert_eq!(sent, [(2, read + WAY + 19 + NIC.link_ns)]);
    let mut bytes = [0; 19];
    b.mr.read(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"brought by the read");
    assert_eq!(
        a.device.soft().unwrap().take_violations(),
        [],
        "what the READ brought is no change"
    );
}

#[test]
fn a_fence_holds_also_when_jitter_or_a_retry_delays_the_read() {
    for seed in 0..20 {
        let mut simulation = Simulation::new(NicParameters {
            jitter_ns: 20_000_000,
            context_miss_ns: 0,
            seed,
            ..NIC
        });
        let (mut a, mut b) = pair(
            &mut simulation,
            &ConnectOptions {
                rnr_timer_ns: 100_000_000,
                ..ConnectOptions::default()
            },
        );
        for has_retry in [false, true] {
            b.receives(u64::from(!has_retry));
            b.mr.write(0, if has_retry { b"later" } else { b"first" })
                .unwrap();
            let sge = a.mr.sge(0, 5).unwrap();
            a.qp.post(&imm(&b, 0), Signal::Reclaim, 0).unwrap();
            a.qp.post(
                &Read {
                    addr: b.mr.addr(),
                    rkey: b.mr.rkey(),
                    into: sge,
                },
                Signal::Always,
                1,
            )
            .unwrap();
            a.qp.post(
                &Write {
                    addr: b.mr.addr() + 100,
                    rkey: b.mr.rkey(),
                    payload: sge,
                },
                Signal::Always.fence(),
                2,
            )
            .unwrap();
            a.qp.ring();
            if has_retry {
                // The WRITE with immediate delays later operations until it finds a receive, and
                // then all are due.
                simulation.run(simulation.now_ns() + 90_000_000);
                b.receives(1);
            }
            let (_, sent) = times(&mut simulation, &mut a, &mut b);
            assert_eq!(sent.iter().map(|s| s.0).collect::<Vec<_>>(), [1, 2]);
            assert!(
                has_retry || sent[1].1 - sent[0].1 >= WAY + 5 + NIC.link_ns,
                "{sent:?}"
            );
            let mut bytes = [0; 5];
            b.mr.read(100, &mut bytes).unwrap();
            assert_eq!(&bytes, if has_retry { b"later" } else { b"first" });
        }
    }
}

#[test]
fn the_completion_of_a_write_waits_for_the_response_of_the_read_before_it() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    a.qp.post(
        &Read {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            into: a.mr.sge(0, 5000).unwrap(),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: (),
        },
        Signal::Always,
        2,
    )
    .unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    let response_ns = WAY + NIC.send_ns + 5000 + NIC.link_ns;
    assert_eq!(sent, [(1, response_ns), (2, response_ns)]);
}

/// Makes two connections of `a` with `b`, whose receives come from one shared queue and complete in
/// one queue for each.
struct Dealer {
    connections: [(RcQp, RcQp, Cq); 2],
    send_cq: Cq,
    op: WriteImm<()>,
}

impl Dealer {
    fn new(a: &End, b: &End, srq: &Srq) -> Self {
        let send_cq = a.device.create_cq(16).unwrap();
        let config = QpConfig {
            max_send_wr: 64,
            max_inline_data: 0,
            ..QpConfig::default()
        };
        let connections = [(); 2].map(|()| {
            let recv_cq = b.device.create_cq(256).unwrap();
            let mut from =
                a.pd.create_qp(&send_cq, &a.recv_cq, &a.srq, &config)
                    .unwrap();
            let mut to = b.pd.create_qp(&b.send_cq, &recv_cq, srq, &config).unwrap();
            connect(&mut from, &mut to, &ConnectOptions::default());
            (from, to, recv_cq)
        });
        Self {
            connections,
            send_cq,
            op: imm(b, 0),
        }
    }

    /// Sends `n` messages one after the other, each through connection `which`. Completes the
    /// messages of the first connection before the messages of the second, so the receives are
    /// returned in this order.
    fn deal(
        &mut self,
        simulation: &mut Simulation<'_>,
        srq: &mut Srq,
        n: usize,
        which: impl Fn(usize) -> usize,
    ) {
        for i in 0..n {
            let (qp, ..) = &mut self.connections[which(i)];
            qp.post(&self.op, Signal::Always, 0).unwrap();
            qp.ring();
            simulation.run(u64::MAX);
            assert_eq!(
                self.send_cq
                    .poll(2, |cqe| assert!(qp.complete(&cqe).is_some())),
                1
            );
        }
        let mut taken = 0;
        for (_, _, recv_cq) in &mut self.connections {
            taken += recv_cq.poll(n, |cqe| assert!(srq.complete_receive(&cqe).is_some()));
        }
        assert_eq!(taken, n);
    }
}

#[test]
fn a_receiver_takes_receives_at_its_rate_and_slower_from_a_list_out_of_order() {
    let mut simulation = Simulation::new(NicParameters { send_ns: 0, ..NIC });
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    let way = NIC.doorbell_ns + NIC.link_ns;
    b.receives(255);
    let mut dealer = Dealer::new(&a, &b, &b.srq);
    let mut burst = |simulation: &mut Simulation<'_>, b: &mut End| {
        (0..8).for_each(|i| a.qp.post(&imm(b, i), Signal::Reclaim, 0).unwrap());
        a.qp.ring();
        let mut at = vec![];
        let start_ns = simulation.now_ns();
        while let Some(at_ns) = simulation.step() {
            let End { recv_cq, srq, .. } = b;
            recv_cq.poll(8, |cqe| {
                srq.complete_receive(&cqe).unwrap();
                at.push(at_ns - start_ns);
            });
        }
        a.sent();
        at
    };
    burst(&mut simulation, &mut b);
    let at = burst(&mut simulation, &mut b);
    assert_eq!(
        at,
        (1..=8)
            .map(|i| way + i * NIC.receive_ns)
            .collect::<Vec<_>>(),
        "a list in order"
    );
    // The rest of the list is returned in an order without neighbours.
    dealer.deal(&mut simulation, &mut b.srq, 239, |i| i % 2);
    b.receives(255);
    // The entry that was left, and the 16 of the bursts.
    (0..3).for_each(|_| drop(burst(&mut simulation, &mut b)));
    let at = burst(&mut simulation, &mut b);
    assert_eq!(
        at,
        (1..=8)
            .map(|i| way + i * NIC.unordered_receive_ns)
            .collect::<Vec<_>>(),
        "the same list out of order"
    );
}

#[test]
fn each_receive_of_a_burst_costs_what_its_own_neighbour_says_and_all_queue_pairs_share_the_receiver()
 {
    let mut simulation = Simulation::new(NicParameters {
        send_ns: 0,
        context_miss_ns: 0,
        ..NIC
    });
    let (server, client) = (
        End::new(&Device::simulated(&mut simulation).unwrap()),
        End::new(&Device::simulated(&mut simulation).unwrap()),
    );
    let mut srq = server.pd.create_srq(15, 0).unwrap();
    let mut recv_cq = server.device.create_cq(64).unwrap();
    let mut qps: Vec<_> = (0..2)
        .map(|_| {
            let config = QpConfig {
                max_send_wr: 64,
                max_inline_data: 0,
                ..QpConfig::default()
            };
            let mut qp = client
                .pd
                .create_qp(&client.send_cq, &client.recv_cq, &client.srq, &config)
                .unwrap();
            let mut peer = server
                .pd
                .create_qp(&server.send_cq, &recv_cq, &srq, &config)
                .unwrap();
            connect(&mut qp, &mut peer, &ConnectOptions::default());
            (qp, peer)
        })
        .collect();
    let op = imm(&server, 0);
    let mut dealer = Dealer::new(&client, &server, &srq);
    for round in 0..3 {
        (0..14).for_each(|i| srq.post(&[], i).unwrap());
        srq.ring();
        for (qp, _) in &mut qps {
            (0..7).for_each(|_| qp.post(&op, Signal::Reclaim, 0).unwrap());
            qp.ring();
        }
        let start_ns = simulation.now_ns();
        let mut seen = vec![];
        while let Some(at_ns) = simulation.step() {
            recv_cq.poll(64, |cqe| {
                srq.complete_receive(&cqe).unwrap();
                seen.push((cqe.wqe_counter(), at_ns - start_ns));
            });
        }
        assert_eq!(seen.len(), 14);
        let mut last_ns = NIC.doorbell_ns + NIC.link_ns;
        let mut kinds = [0; 2];
        for pair in seen.windows(2) {
            let is_neighbour = pair[1].0 == (pair[0].0 + 1) % 16;
            kinds[usize::from(is_neighbour)] += 1;
            last_ns += if is_neighbour {
                NIC.receive_ns
            } else {
                NIC.unordered_receive_ns
            };
            assert_eq!(pair[0].1, last_ns, "round {round}: {seen:?}");
        }
        assert!(
            round == 0 || kinds.iter().all(|&n| n > 3),
            "round {round} mixes them: {kinds:?}"
        );
        // Pairs of neighbours, after a first round in order.
        (0..14).for_each(|i| srq.post(&[], i).unwrap());
        srq.ring();
        dealer.deal(&mut simulation, &mut srq, 14, |i| i / 2 % 2);
    }
}

#[test]
fn more_queue_pairs_in_rotation_than_contexts_cost_a_miss_for_every_message() {
    let round = |qps: usize| {
        let mut simulation = Simulation::new(NicParameters {
            doorbell_ns: 0,
            send_ns: 100,
            link_ns: 0,
            context_miss_ns: 300,
            ..NIC
        });
        let (server, client) = (
            End::new(&Device::simulated(&mut simulation).unwrap()),
            End::new(&Device::simulated(&mut simulation).unwrap()),
        );
        let config = QpConfig {
            max_send_wr: 64,
            max_inline_data: 0,
            ..QpConfig::default()
        };
        let mut pairs: Vec<_> = (0..qps)
            .map(|_| {
                let mut qp = server
                    .pd
                    .create_qp(&server.send_cq, &server.recv_cq, &server.srq, &config)
                    .unwrap();
                let mut peer = client
                    .pd
                    .create_qp(&client.send_cq, &client.recv_cq, &client.srq, &config)
                    .unwrap();
                connect(&mut qp, &mut peer, &ConnectOptions::default());
                (qp, peer)
            })
            .collect();
        let (mut round_ns, mut misses) = (0, (0, 0));
        // The first round fetches every context.
        for _ in 0..2 {
            let start_ns = simulation.now_ns();
            let [sender, target] =
                [&server, &client].map(|end| simulation.context_uses(&end.device).unwrap());
            for (qp, _) in &mut pairs {
                qp.post(
                    &Write {
                        addr: client.mr.addr(),
                        rkey: client.mr.rkey(),
                        payload: (),
                    },
                    Signal::Reclaim,
                    0,
                )
                .unwrap();
                qp.ring();
            }
            simulation.run(u64::MAX);
            round_ns = simulation.now_ns() - start_ns;
            let [sends, arrivals] =
                [&server, &client].map(|end| simulation.context_uses(&end.device).unwrap());
            assert_eq!(
                (
                    sends.sends - sender.sends,
                    arrivals.arrivals - target.arrivals
                ),
                (qps as u64, qps as u64)
            );
            assert_eq!((sends.arrivals, arrivals.sends), (0, 0));
            misses = (
                sends.send_misses - sender.send_misses,
                arrivals.arrival_misses - target.arrival_misses,
            );
        }
        (round_ns, misses)
    };
    assert_eq!(round(8), (8 * 100, (0, 0)), "as many as there are contexts");
    // Least recently used, in rotation: the context that is needed next was just evicted. Both ends
    // miss. The peer's misses delay only the last message.
    assert_eq!(round(9), (9 * (100 + 300) + 300, (9, 9)));
    assert_eq!(round(64), (64 * (100 + 300) + 300, (64, 64)));
}

#[test]
fn messages_of_a_queue_pair_keep_their_order_under_jitter() {
    for seed in 0..20 {
        let mut simulation = Simulation::new(NicParameters {
            jitter_ns: 50_000_000,
            context_miss_ns: 0,
            seed,
            ..NIC
        });
        let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
        b.receives(100);
        for i in 0..100 {
            a.qp.post(&imm(&b, i), Signal::Always, i.into()).unwrap();
            a.qp.ring();
        }
        let (arrived, sent) = times(&mut simulation, &mut a, &mut b);
        assert_eq!(
            arrived.iter().map(|&(imm, _)| imm).collect::<Vec<_>>(),
            (0..100).collect::<Vec<_>>()
        );
        assert_eq!(
            sent.iter().map(|&(user, _)| user).collect::<Vec<_>>(),
            (0..100).collect::<Vec<_>>()
        );
        assert!(
            arrived
                .windows(2)
                .any(|w| w[1].1 - w[0].1 > 5 * NIC.send_ns),
            "there is jitter"
        );
    }
}

#[test]
fn rnr_timers_and_transport_time_outs_are_exact_in_virtual_time() {
    let options = ConnectOptions {
        rnr_retry: 3,
        rnr_timer_ns: 7_000_000,
        ..ConnectOptions::default()
    };
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b) = pair(&mut simulation, &options);
    // Contexts, and one receive for each message, which costs the receiver the same if there is
    // none.
    let first_ns = WAY + NIC.receive_ns + 2 * NIC.context_miss_ns;
    a.qp.post(&imm(&b, 1), Signal::Always, 1).unwrap();
    a.qp.ring();
    assert!(simulation.run(first_ns + 7_000_000 + 1));
    b.receives(1);
    let at_ns = simulation.now_ns();
    let (arrived, sent) = times(&mut simulation, &mut a, &mut b);
    let arrival_ns = first_ns + 2 * 7_000_000 - at_ns;
    assert_eq!(
        (arrived, sent),
        (vec![(1, arrival_ns)], vec![(1, arrival_ns + NIC.link_ns)]),
        "at the second timer"
    );

    let start_ns = simulation.now_ns();
    a.qp.post(&imm(&b, 2), Signal::Always, 2).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(2), Err(Syndrome::RnrRetryExceeded))]);
    assert_eq!(
        simulation.now_ns() - start_ns,
        WAY + NIC.receive_ns + 3 * 7_000_000 + NIC.link_ns
    );

    // A peer that exists and is not connected has the whole time-out.
    let mut simulation = Simulation::new(NIC);
    let (mut a, b) = (
        End::new(&Device::simulated(&mut simulation).unwrap()),
        End::new(&Device::simulated(&mut simulation).unwrap()),
    );
    a.qp.connect(&b.qp.address(), &options).unwrap();
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: (),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(1), Err(Syndrome::TransportRetryExceeded))]);
    assert_eq!(
        simulation.now_ns(),
        WAY + 2 * NIC.context_miss_ns + options.transport_timeout_ns() + NIC.link_ns
    );
}

#[test]
fn costs_beyond_the_end_of_time_end_there() {
    const MOST: u64 = u64::MAX;
    let long = NicParameters {
        doorbell_ns: MOST,
        send_ns: MOST,
        byte_ps: MOST,
        link_ns: MOST,
        receive_ns: MOST,
        context_miss_ns: MOST,
        ..NIC
    };
    for parameters in [
        NicParameters {
            jitter_ns: MOST,
            ..NIC
        },
        long,
    ] {
        let mut simulation = Simulation::new(parameters);
        let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
        b.receives(2);
        for _ in 0..2 {
            a.qp.post(&imm(&b, 0), Signal::Always, 0).unwrap();
            a.qp.ring();
        }
        assert!(!simulation.run(MOST));
        assert_eq!(a.sent().len(), 2);
    }
}

/// Each queue has its own rate: messages at one queue wait for its receives, and not for the
/// receives of another queue.
#[test]
fn receive_queues_give_their_receives_each_at_its_own_rate() {
    const QUEUE_NS: u64 = 3_000_000;
    let mut simulation = Simulation::new(NicParameters {
        queue_receive_ns: QUEUE_NS,
        doorbell_ns: 0,
        send_ns: 1,
        ..NIC
    });
    let [from, to] = [(); 2].map(|()| Device::simulated(&mut simulation).unwrap());
    let mut pairs = [(); 2].map(|()| (End::new(&from), End::new(&to)));
    for (a, b) in &mut pairs {
        connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
        b.receives(8);
    }
    let mut burst = |count: u32| {
        for (a, b) in &mut pairs {
            (0..count).for_each(|i| a.qp.post(&imm(b, i), Signal::Reclaim, 0).unwrap());
            a.qp.ring();
        }
        let mut at = [vec![], vec![]];
        let start_ns = simulation.now_ns();
        while let Some(at_ns) = simulation.step() {
            for ((a, b), at) in pairs.iter_mut().zip(&mut at) {
                at.extend(b.arrived().into_iter().map(|_| at_ns - start_ns));
                a.sent();
            }
        }
        at
    };
    // The contexts are held, and the queues are free again.
    burst(1);
    let at = burst(4);
    for at in &at {
        assert!(
            at.windows(2).all(|pair| pair[1] - pair[0] == QUEUE_NS),
            "{at:?}"
        );
    }
    assert!(
        at[1][0] - at[0][0] < QUEUE_NS,
        "the second queue does not wait for the first: {at:?}"
    );
}
