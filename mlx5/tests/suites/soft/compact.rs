//! Savings on receive completions by the software HCA: compressed sessions, and data in the CQE.

use mlx5::*;

use crate::time::{Mode, Net};

const DEPTH: usize = 31;

struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<()>,
    srq: Srq,
    mr: Mr,
}

fn end(net: &Net, recv_cq: CqConfig, config: &QpConfig) -> End {
    let device = net.device();
    let pd = device.alloc_pd().unwrap();
    let (send_cq, mut recv_cq) = (
        device.create_cq(256).unwrap(),
        device.create_mono_cq(recv_cq).unwrap(),
    );
    let srq = pd.create_srq(DEPTH as u32, 1).unwrap();
    let qp = pd.create_qp(&send_cq, &recv_cq, &srq, config).unwrap();
    recv_cq.register(qp.qpn(), ());
    let mr = pd
        .alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    End {
        qp,
        send_cq,
        recv_cq,
        srq,
        mr,
    }
}

fn pair(net: &Net, recv_cq: CqConfig, config: &QpConfig) -> (End, End) {
    let (mut a, mut b) = (end(net, recv_cq, config), end(net, recv_cq, config));
    a.qp.connect(&b.qp.address(), &ConnectOptions::default())
        .unwrap();
    b.qp.connect(&a.qp.address(), &ConnectOptions::default())
        .unwrap();
    (a, b)
}

impl End {
    fn fill(&mut self) {
        for i in 0..self.srq.free() {
            self.srq
                .post(&[self.mr.sge(64 * (i % 64), 64).unwrap()], i as u64)
                .unwrap();
        }
        self.srq.ring();
    }

    fn reap(&mut self) {
        let qp = &mut self.qp;
        self.send_cq.poll(256, |cqe| {
            cqe.result().unwrap();
            qp.complete(&cqe);
        });
    }
}

/// Sends messages in bursts; all messages of a burst except one have the same immediate. Returns
/// immediates and lengths of the messages sent, and of the messages received.
fn stream(compression: bool) -> [Vec<(u32, u32)>; 2] {
    let net = Net::new();
    let config = QpConfig {
        max_send_wr: 256,
        ..QpConfig::default()
    };
    let (mut a, mut b) = pair(
        &net,
        CqConfig {
            compression,
            ..CqConfig::from(64)
        },
        &config,
    );
    let (mut sent, mut received) = (vec![], vec![]);
    for round in 0..200u32 {
        b.fill();
        // From runs of one to runs that fill the queue, so that sessions cross every ring's end.
        let burst = 1 + round % DEPTH as u32;
        for i in 0..burst {
            let (imm, len) = (round / 3 + u32::from(i == burst / 2), (i * 7) % 29);
            let op = WriteImm {
                addr: b.mr.addr(),
                rkey: b.mr.rkey(),
                imm,
                payload: Inline(&[5; 28][..len as usize]),
            };
            a.qp.post(&op, Signal::Reclaim, 0).unwrap();
            sent.push((imm, len));
        }
        a.qp.ring();
        net.settle(|| {
            let (srq, received) = (&mut b.srq, &mut received);
            let mut take = |queue: Option<&()>, cqe: Cqe<'_>| {
                assert!(queue.is_some() && cqe.result().is_ok());
                assert!(
                    srq.complete_receive(&cqe).is_some(),
                    "a receive completes once"
                );
                received.push((cqe.imm(), cqe.byte_count()));
            };
            // At once or in two halves; whole sessions, or sessions in parts, by both kinds of
            // poll.
            let max = if round % 2 == 0 {
                64
            } else {
                1 + round as usize % 7
            };
            match round % 3 {
                0 => b.recv_cq.poll(max, &mut take),
                1 => b
                    .recv_cq
                    .progress()
                    .map_or(0, |found| found.take(max, &mut take)),
                _ => {
                    assert_eq!(
                        b.recv_cq
                            .progress()
                            .map_or(0, |found| found.take(0, &mut take)),
                        0
                    );
                    b.recv_cq
                        .progress()
                        .map_or(0, |found| found.take(1, &mut take))
                        + b.recv_cq.poll(max, take)
                }
            };
            received.len() == sent.len()
        });
        a.reap();
    }
    [sent, received]
}

#[test]
fn messages_in_compressed_sessions_are_what_was_sent_in_order() {
    let [sent, received] = stream(true);
    assert_eq!(sent, received);
    let [sent, received] = stream(false);
    assert_eq!(sent, received);
}

/// Sends `data`. Returns the data in the CQE, and the content of the buffer afterwards.
fn scatter(cqe_bytes: u32, scatter_to_cqe: bool, data: &[u8]) -> (Option<Vec<u8>>, Vec<u8>) {
    let net = Net::new();
    let config = QpConfig {
        scatter_to_cqe,
        max_inline_data: 64,
        ..QpConfig::default()
    };
    let (mut a, mut b) = pair(
        &net,
        CqConfig {
            cqe_bytes,
            ..CqConfig::from(64)
        },
        &config,
    );
    b.fill();
    a.qp.post(
        &Send {
            payload: Inline(data),
        },
        Signal::Always,
        0,
    )
    .unwrap();
    a.qp.ring();
    let mut got = None;
    net.settle(|| {
        b.recv_cq.poll(1, |_, cqe| {
            assert_eq!(
                (cqe.opcode(), cqe.byte_count()),
                (Some(CqeOpcode::ResponderSend), data.len() as u32)
            );
            got = Some(cqe.inline_data().map(<[u8]>::to_vec));
        });
        got.is_some()
    });
    let mut buffer = vec![0; data.len()];
    b.mr.read(0, &mut buffer).unwrap();
    (got.unwrap(), buffer)
}

#[test]
fn short_data_comes_in_the_cqe_if_asked_for_and_not_in_the_buffer() {
    let data: Vec<u8> = (1..=64).collect();
    for (cqe_bytes, room) in [(64, 32), (128, 64)] {
        for len in [1, 31, 32, 33, 64] {
            let (inline, buffer) = scatter(cqe_bytes, true, &data[..len]);
            if len <= room {
                assert_eq!(
                    inline.as_deref(),
                    Some(&data[..len]),
                    "{len} B in a CQE of {cqe_bytes}"
                );
                assert_ne!(
                    buffer,
                    data[..len],
                    "who looks into the buffer is found out"
                );
            } else {
                assert_eq!((inline, &buffer[..]), (None, &data[..len]));
            }
            assert_eq!(
                scatter(cqe_bytes, false, &data[..len]),
                (None, data[..len].to_vec()),
                "off"
            );
        }
    }
}

/// Returns the trace hash of a receiver that took messages with these immediates.
fn traced(compression: bool, scatter_to_cqe: bool, imms: &[u32]) -> u64 {
    let net = Net::in_mode(Mode::Immediate);
    let cq = CqConfig {
        compression,
        ..CqConfig::from(64)
    };
    let sender = end(&net, cq, &QpConfig::default());
    let device = net.open(&SoftOptions {
        trace: true,
        ..net.options()
    });
    let pd = device.alloc_pd().unwrap();
    let (send_cq, mut recv_cq) = (device.create_cq(64).unwrap(), device.create_cq(cq).unwrap());
    let own = ReceiveSource::Own {
        depth: 8,
        max_sge: 1,
    };
    let mut to = pd
        .create_qp(
            &send_cq,
            &recv_cq,
            own,
            &QpConfig {
                scatter_to_cqe,
                ..QpConfig::default()
            },
        )
        .unwrap();
    let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
    let mut from = sender.qp;
    from.connect(&to.address(), &ConnectOptions::default())
        .unwrap();
    to.connect(&from.address(), &ConnectOptions::default())
        .unwrap();
    for &imm in imms {
        to.post_receive(&[mr.sge(0, 8).unwrap()], 0).unwrap();
        to.ring_receives();
        from.post(
            &SendImm {
                imm,
                payload: Inline(&[1]),
            },
            Signal::Reclaim,
            0,
        )
        .unwrap();
    }
    from.ring();
    let mut arrived = 0;
    net.settle(|| {
        arrived += recv_cq.poll(8, |_| ());
        arrived == imms.len()
    });
    device.soft().unwrap().trace_hash().unwrap()
}

#[test]
fn arrivals_are_in_the_trace_also_where_they_are_compressed_or_scattered() {
    for (compression, scatter) in [(false, false), (true, false), (false, true)] {
        let hash = |imms: &[u32]| traced(compression, scatter, imms);
        assert_ne!(hash(&[1, 1]), hash(&[1, 2]), "{compression} {scatter}");
        assert_eq!(hash(&[1, 1]), hash(&[1, 1]), "{compression} {scatter}");
    }
}
