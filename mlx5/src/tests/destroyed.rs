//! Completions of queue pairs that are destroyed before the completions are polled. A new queue
//! pair may have the same number by then.

use std::collections::VecDeque;

use super::null_device::Plays;
use super::random::Random;
use crate::wire::{MiniCqe, NO_QPN, RequesterCqe, ResponderCqe};
use crate::*;

const QPNS: [u32; 3] = [0x4000, 0x12_3456, 0xff_fffe];

/// QPN, WQE counter and byte count of a completion.
type Completion = (u32, u16, u32);

/// The device's end of a completion queue, and the completions that its reader has not seen yet.
struct Writer {
    null: NullDevice,
    cqn: u32,
    compression: bool,
    random: Random,
    due: VecDeque<Completion>,
}

impl Writer {
    /// Writes a completion of any queue pair, or a session, if there is room.
    fn step(&mut self, entries: u32) {
        let free = entries - self.due.len() as u32;
        let (qpn, counter) = (
            QPNS[self.random.below(3) as usize],
            self.random.below(1 << 16) as u16,
        );
        let count = if self.compression && self.random.one_in(2) {
            1 + self.random.below(20)
        } else {
            1
        };
        if count > free {
            return;
        }
        let byte_count = self.random.below(1 << 20);
        let is_send = self.random.one_in(2);
        let (opcode, cqe) = match is_send {
            true => (
                CqeOpcode::Requester,
                RequesterCqe {
                    wqe_opcode: 8,
                    qpn,
                    wqe_counter: counter,
                    byte_count,
                    user_index: 0,
                }
                .emit(),
            ),
            false => (
                CqeOpcode::ResponderSend,
                ResponderCqe {
                    qpn,
                    byte_count,
                    wqe_counter: counter,
                    ..Default::default()
                }
                .emit(),
            ),
        };
        let all = (0..count as u16).map(|i| (qpn, counter.wrapping_add(i), byte_count));
        if count == 1 {
            assert!(self.null.write_cqe(self.cqn, &cqe, opcode));
        } else {
            let mini = |(_, counter, byte_count)| match is_send {
                true => MiniCqe::requester(counter, 8, byte_count),
                false => MiniCqe {
                    word: 0,
                    byte_count,
                },
            };
            assert!(self.null.write_compressed(
                self.cqn,
                &cqe,
                opcode,
                &all.clone().map(mini).collect::<Vec<_>>()
            ));
        }
        self.due.extend(all);
    }

    /// Marks the completions of `qpn` that are in the queue when it is destroyed.
    fn destroyed(&mut self, qpn: u32) {
        self.due
            .iter_mut()
            .filter(|due| due.0 == qpn)
            .for_each(|due| due.0 = NO_QPN);
    }
}

#[test]
fn what_a_destroyed_queue_pair_leaves_is_nobodys_and_what_the_next_with_its_number_completes_is_its_own()
 {
    for (seed, start) in [
        0,
        100,
        u32::MAX - 100,
        (1 << 24) - 100,
        (1 << 23) - 100,
        1 << 22,
    ]
    .into_iter()
    .enumerate()
    {
        for (cqe_bytes, compression) in [(64, false), (64, true), (128, true)] {
            let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
            let mut cq = device
                .create_cq(CqConfig {
                    cqe_bytes,
                    compression,
                    ..CqConfig::from(32)
                })
                .unwrap();
            let null = device.null().unwrap();
            cq.start_at(start, &null);
            let random = Random::new(seed as u64);
            let due = VecDeque::new();
            let mut writer = Writer {
                null,
                cqn: cq.cqn(),
                compression,
                random,
                due,
            };
            let object = std::rc::Rc::clone(cq.object());
            for _ in 0..3_000 {
                (0..writer.random.below(4)).for_each(|_| writer.step(32));
                if writer.random.one_in(3) {
                    let qpn = QPNS[writer.random.below(3) as usize];
                    object.disown(qpn);
                    writer.destroyed(qpn);
                }
                let max = writer.random.below(9) as usize;
                let due = writer.due.len();
                let polled = cq.poll(max, |cqe| {
                    let expected = writer.due.pop_front().unwrap();
                    assert_eq!(
                        (cqe.qpn(), cqe.wqe_counter(), cqe.byte_count()),
                        expected,
                        "seed {seed}"
                    );
                    if writer.random.one_in(4) {
                        let qpn = QPNS[writer.random.below(3) as usize];
                        object.disown(qpn);
                        writer.destroyed(qpn);
                        assert_eq!(
                            (cqe.qpn(), cqe.wqe_counter(), cqe.byte_count()),
                            expected,
                            "the one at hand, seed {seed}"
                        );
                    }
                });
                assert_eq!(polled, max.min(due), "seed {seed}");
            }
        }
    }
}

/// Destroys a queue pair that has an unread completion in each direction. The completions are
/// polled while a new queue pair of the same number has a send and a receive outstanding.
#[test]
fn an_old_completion_completes_nothing_of_the_next_queue_pair_with_its_number() {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let (null, pd) = (device.null().unwrap(), device.alloc_pd().unwrap());
    let (mut send_cq, mut recv_cq) = (
        device.create_cq(8).unwrap(),
        device.create_mono_cq(8).unwrap(),
    );
    let own = ReceiveSource::Own {
        depth: 4,
        max_sge: 0,
    };
    let live = || {
        let mut qp = pd
            .create_qp(&send_cq, &recv_cq, own, &QpConfig::default())
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        qp.post_receive(&[], 7).unwrap();
        qp.post(
            &Write {
                addr: 0,
                rkey: 1,
                payload: (),
            },
            Signal::Always,
            7,
        )
        .unwrap();
        qp
    };
    let old = live();
    let qpn = old.qpn();
    let sent = RequesterCqe {
        wqe_opcode: 8,
        qpn,
        wqe_counter: 0,
        byte_count: 0,
        user_index: 0,
    };
    assert!(null.write_cqe(send_cq.cqn(), &sent.emit(), CqeOpcode::Requester));
    assert!(
        null.write_cqe(
            recv_cq.cqn(),
            &ResponderCqe {
                qpn,
                ..Default::default()
            }
            .emit(),
            CqeOpcode::ResponderSend
        )
    );
    drop(old);
    let mut qp = live();
    while qp.qpn() != qpn {
        drop(qp);
        qp = live();
    }
    recv_cq.register(qpn, ());
    assert_eq!(
        send_cq.poll(8, |cqe| assert_eq!(
            (cqe.qpn(), qp.complete(&cqe)),
            (NO_QPN, None)
        )),
        1
    );
    assert_eq!(
        recv_cq.poll(8, |queue, cqe| assert_eq!(
            (queue, qp.complete_receive(&cqe)),
            (None, None)
        )),
        1
    );
    assert!(null.write_cqe(send_cq.cqn(), &sent.emit(), CqeOpcode::Requester));
    assert_eq!(
        send_cq.poll(8, |cqe| assert_eq!(qp.complete(&cqe), Some(7))),
        1
    );
}
