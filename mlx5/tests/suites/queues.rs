//! Send queues and completion queues over many laps. The test plays the device of a null device; a
//! model gives the expected results.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use mlx5::wire::{
    CtrlWords, DataWords, ErrorCqe, MiniCqe, Opcode, RaddrSegment, RequesterCqe, ResponderCqe,
};
use mlx5::*;

use crate::null::Plays;
use crate::random::Random;

const SEEDS: [u64; 4] = [1, 77, 0xfeed, 1 << 50];

fn open() -> (Device, NullDevice) {
    copyrpc_testing::limits::watchdog(Duration::from_secs(300));
    let device = Device::open(DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    (device, null)
}

/// A completion that its reader expects.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Completion {
    opcode: CqeOpcode,
    qpn: u32,
    wqe_counter: u16,
    byte_count: u32,
    imm: u32,
    solicited: bool,
    data: Option<Vec<u8>>,
}

impl Completion {
    fn read(cqe: &Cqe<'_>) -> Self {
        let opcode = cqe.opcode().unwrap();
        assert_eq!(cqe.result().is_err(), opcode == CqeOpcode::RequesterError);
        Self {
            opcode,
            qpn: cqe.qpn(),
            wqe_counter: cqe.wqe_counter(),
            byte_count: cqe.byte_count(),
            imm: cqe.imm(),
            solicited: cqe.is_solicited(),
            data: cqe.inline_data().map(<[u8]>::to_vec),
        }
    }
}

/// The device's end of a completion queue, and the completions that its reader has not seen yet.
struct Writer {
    null: NullDevice,
    cqn: u32,
    config: CqConfig,
    entries: u32,
    random: Random,
    due: VecDeque<Completion>,
}

const QPNS: [u32; 3] = [0x4000, 0x12_3456, 0xff_fffe];

impl Writer {
    fn free(&self) -> u32 {
        self.entries - self.due.len() as u32
    }

    /// Writes a receive, or a send if there is no immediate.
    fn bytes(&mut self, receive: bool, byte_count: u32) -> (Completion, [u8; 64]) {
        let qpn = QPNS[self.random.below(3) as usize];
        let wqe_counter = self.random.below(1 << 16) as u16;
        let solicited = receive && self.random.one_in(4);
        if receive {
            let imm = self.random.below(u32::MAX);
            let other = ResponderCqe {
                source_qpn: 0xff_ffff,
                slid: !0,
                grh: true,
                sl: 0xf,
                ..ResponderCqe::default()
            };
            let mut bytes = ResponderCqe {
                qpn,
                srqn: 5,
                imm,
                byte_count,
                wqe_counter,
                ..other
            }
            .emit();
            bytes[63] |= u8::from(solicited) << 1;
            (
                Completion {
                    opcode: CqeOpcode::ResponderSendImm,
                    qpn,
                    wqe_counter,
                    byte_count,
                    imm,
                    solicited,
                    data: None,
                },
                bytes,
            )
        } else {
            let bytes = RequesterCqe {
                wqe_opcode: 0x10,
                qpn,
                wqe_counter,
                byte_count,
                user_index: 0,
            }
            .emit();
            (
                Completion {
                    opcode: CqeOpcode::Requester,
                    qpn,
                    wqe_counter,
                    byte_count,
                    imm: 0,
                    solicited,
                    data: None,
                },
                bytes,
            )
        }
    }

    fn plain(&mut self) {
        let byte_count = self.random.below(1 << 20);
        let receive = self.random.one_in(2);
        let (completion, bytes) = self.bytes(receive, byte_count);
        assert!(self.null.write_cqe(self.cqn, &bytes, completion.opcode));
        self.due.push_back(completion);
    }

    fn error(&mut self) {
        let wqe_counter = self.random.below(1 << 16) as u16;
        let cqe = ErrorCqe {
            raw_syndrome: 0x13,
            vendor_syndrome: 3,
            wqe_opcode: 8,
            qpn: QPNS[0],
            wqe_counter,
            user_index: 0,
        };
        assert!(
            self.null
                .write_cqe(self.cqn, &cqe.emit(), CqeOpcode::RequesterError)
        );
        let (opcode, qpn) = (CqeOpcode::RequesterError, QPNS[0]);
        self.due.push_back(Completion {
            opcode,
            qpn,
            wqe_counter,
            byte_count: 0,
            imm: 0,
            solicited: false,
            data: None,
        });
    }

    fn scattered(&mut self) {
        let room = if self.config.cqe_bytes == 128 { 64 } else { 32 };
        let data: Vec<u8> = (0..self.random.below(room + 1))
            .map(|_| self.random.below(256) as u8)
            .collect();
        let (mut completion, bytes) = self.bytes(true, data.len() as u32);
        assert!(
            self.null
                .write_scattered(self.cqn, &bytes, completion.opcode, &data)
        );
        completion.data = Some(data);
        self.due.push_back(completion);
    }

    fn session(&mut self, count: u32) {
        let receive = self.random.one_in(2);
        let (first, title) = self.bytes(receive, 0);
        let mut minis = vec![];
        for i in 0..count {
            let mut completion = Completion {
                byte_count: self.random.below(u32::MAX),
                ..first.clone()
            };
            if receive {
                completion.wqe_counter = first.wqe_counter.wrapping_add(i as u16);
                // These bytes in the mini CQE of a receive have no meaning.
                minis.push(MiniCqe {
                    word: self.random.below(u32::MAX),
                    byte_count: completion.byte_count,
                });
            } else {
                completion.wqe_counter = self.random.below(1 << 16) as u16;
                minis.push(MiniCqe::requester(
                    completion.wqe_counter,
                    0x08,
                    completion.byte_count,
                ));
            }
            self.due.push_back(completion);
        }
        assert!(
            self.null
                .write_compressed(self.cqn, &title, first.opcode, &minis)
        );
    }

    /// Writes a completion or session for which there is room.
    fn step(&mut self) {
        match self.random.below(6) {
            0 => self.error(),
            1 => self.scattered(),
            2 | 3 if self.config.compression => {
                let count = 1 + self.random.below(self.free().min(40));
                self.session(count);
            }
            _ => self.plain(),
        }
    }
}

fn configs() -> impl Iterator<Item = CqConfig> {
    [1, 2, 8, 16, 64].into_iter().flat_map(|entries| {
        [64, 128].into_iter().flat_map(move |cqe_bytes| {
            [false, true].map(|compression| CqConfig {
                cqe_bytes,
                compression,
                ..CqConfig::from(entries)
            })
        })
    })
}

#[test]
fn every_completion_comes_once_in_order_and_nothing_else_over_many_laps() {
    let device = open().0;
    for config in configs() {
        for seed in SEEDS {
            let mut cq = device.create_mono_cq::<u32>(config).unwrap();
            for qpn in QPNS {
                cq.register(qpn, qpn);
            }
            let (cqn, entries) = (cq.cqn(), cq.entries());
            let mut writer = Writer {
                null: device.null().unwrap(),
                cqn,
                config,
                entries,
                random: Random::new(seed),
                due: VecDeque::new(),
            };
            // A lap of plain CQEs ends at any place, so that the laps of the other forms begin
            // there.
            for _ in 0..writer.random.below(2 * entries) {
                writer.plain();
                assert_eq!(
                    cq.poll(2, |_, cqe| assert_eq!(
                        Some(Completion::read(&cqe)),
                        writer.due.pop_front()
                    )),
                    1
                );
            }
            let (mut seen, target) = (0, 40 * entries as usize + 400);
            while seen < target {
                while writer.free() > 0 && !writer.random.one_in(4) {
                    writer.step();
                }
                let max = 1 + writer.random.below(2 * entries) as usize;
                let want = max.min(writer.due.len());
                let n = cq.poll(max, |queue, cqe| {
                    assert_eq!(queue, Some(&cqe.qpn()));
                    assert_eq!(
                        Some(Completion::read(&cqe)),
                        writer.due.pop_front(),
                        "{config:?}, seed {seed}, completion {seen}"
                    );
                });
                assert_eq!(n, want, "{config:?}, seed {seed}");
                seen += n;
            }
            // Full to the last entry, so the next CQE overruns the queue.
            while writer.free() > 0 {
                writer.plain();
            }
            let (completion, bytes) = writer.bytes(true, 0);
            assert!(
                !writer.null.write_cqe(cqn, &bytes, completion.opcode),
                "an entry beyond the last"
            );
            assert_eq!(
                cq.poll(usize::MAX, |_, cqe| assert_eq!(
                    Some(Completion::read(&cqe)),
                    writer.due.pop_front()
                )),
                entries as usize
            );
            assert!(
                !writer.null.write_cqe(cqn, &bytes, completion.opcode),
                "an overrun queue gets nothing any more"
            );
        }
    }
}

#[test]
fn a_session_needs_room_for_all_its_entries_to_the_last() {
    let (device, null) = open();
    let config = CqConfig {
        compression: true,
        ..CqConfig::from(16)
    };
    let minis = [MiniCqe {
        word: 0,
        byte_count: 7,
    }; 12];
    let title = ResponderCqe::default().emit();
    for (used, fits) in [(4, true), (5, false)] {
        let mut cq = device.create_cq(config).unwrap();
        for _ in 0..used {
            assert!(null.write_cqe(cq.cqn(), &title, CqeOpcode::ResponderSend));
        }
        assert_eq!(
            null.write_compressed(cq.cqn(), &title, CqeOpcode::ResponderSend, &minis),
            fits
        );
        assert_eq!(cq.poll(99, |_| {}), if fits { 16 } else { used });
    }
    // A session that is half read has returned half its entries, and no others.
    let mut cq = device.create_cq(config).unwrap();
    assert!(null.write_compressed(cq.cqn(), &title, CqeOpcode::ResponderSend, &minis));
    assert_eq!(cq.poll(5, |_| {}), 5);
    for _ in 0..9 {
        assert!(null.write_cqe(cq.cqn(), &title, CqeOpcode::ResponderSend));
    }
    assert!(!null.write_cqe(cq.cqn(), &title, CqeOpcode::ResponderSend));
    let mut bytes = vec![];
    assert_eq!(cq.poll(99, |cqe| bytes.push(cqe.byte_count())), 16);
    assert_eq!(bytes, [[7; 7].as_slice(), [0; 9].as_slice()].concat());
}

#[test]
fn a_callback_that_panics_gets_no_completion_twice() {
    let (device, null) = open();
    let mut cq = device
        .create_mono_cq::<()>(CqConfig {
            compression: true,
            ..CqConfig::from(32)
        })
        .unwrap();
    let receive = |wqe_counter| {
        ResponderCqe {
            wqe_counter,
            ..Default::default()
        }
        .emit()
    };
    for lap in 0..3u16 {
        for i in 0..4 {
            assert!(null.write_cqe(cq.cqn(), &receive(i), CqeOpcode::ResponderSend));
        }
        assert!(null.write_compressed(
            cq.cqn(),
            &receive(4),
            CqeOpcode::ResponderSend,
            &[MiniCqe {
                word: 0,
                byte_count: 0
            }; 20]
        ));
        let mut seen = vec![];
        while seen.len() < 24 {
            let end = [3, 4, 9, 13, 23, 24]
                .into_iter()
                .find(|&end| end > seen.len())
                .unwrap();
            let polled = catch_unwind(AssertUnwindSafe(|| {
                cq.poll(99, |_, cqe| {
                    seen.push(cqe.wqe_counter());
                    assert!(seen.len() < end, "on purpose");
                });
            }));
            assert!(polled.is_err() && seen.len() == end);
        }
        assert_eq!(seen, (0..24).collect::<Vec<_>>(), "lap {lap}");
        assert_eq!(cq.poll(99, |_, _| {}), 0);
    }
}

#[test]
fn a_number_no_one_registered_is_none_in_a_session_too() {
    let (device, null) = open();
    let mut cq = device
        .create_mono_cq(CqConfig {
            compression: true,
            ..CqConfig::from(32)
        })
        .unwrap();
    cq.register(9, "nine");
    let of = |qpn| {
        ResponderCqe {
            qpn,
            ..Default::default()
        }
        .emit()
    };
    let minis = [MiniCqe {
        word: 0,
        byte_count: 0,
    }; 3];
    for qpn in [9, 10, 9] {
        assert!(null.write_compressed(cq.cqn(), &of(qpn), CqeOpcode::ResponderSend, &minis));
        assert!(null.write_cqe(cq.cqn(), &of(qpn ^ 3), CqeOpcode::ResponderSend));
    }
    let mut queues = vec![];
    cq.poll(99, |queue, _| queues.push(queue.copied()));
    let nine = Some("nine");
    assert_eq!(
        queues,
        [
            nine, nine, nine, None, None, None, None, nine, nine, nine, nine, None
        ]
    );
    assert_eq!(cq.unregister(9), nine);
    assert!(null.write_cqe(cq.cqn(), &of(9), CqeOpcode::ResponderSend));
    assert_eq!(cq.poll(99, |queue, _| assert_eq!(queue, None)), 1);
}

#[test]
fn a_datagram_names_its_sender_and_says_whether_it_has_a_grh() {
    let (device, null) = open();
    let mut cq = device.create_cq(4).unwrap();
    for (source_qpn, grh) in [(0xff_fffe, false), (1, true)] {
        let bytes = ResponderCqe {
            source_qpn,
            grh,
            ..Default::default()
        }
        .emit();
        assert!(null.write_cqe(cq.cqn(), &bytes, CqeOpcode::ResponderSend));
        assert_eq!(
            cq.poll(1, |cqe| assert_eq!(
                (cqe.source_qpn(), cqe.has_grh(), cqe.inline_data()),
                (source_qpn, grh, None)
            )),
            1
        );
    }
}

#[test]
fn a_device_refuses_what_an_entry_cannot_carry() {
    let (device, null) = open();
    let of = |byte_count| {
        ResponderCqe {
            byte_count,
            ..Default::default()
        }
        .emit()
    };
    for (cqe_bytes, room) in [(64, 32u32), (128, 64)] {
        let mut cq = device
            .create_cq(CqConfig {
                cqe_bytes,
                ..CqConfig::from(4)
            })
            .unwrap();
        let data = [1; 65];
        for bytes in [room + 1, 65] {
            assert!(!null.write_scattered(
                cq.cqn(),
                &of(bytes),
                CqeOpcode::ResponderSend,
                &data[..bytes as usize]
            ));
        }
        assert!(!null.write_scattered(cq.cqn(), &of(1), CqeOpcode::ResponderSend, &data[..2]));
        assert!(!null.write_compressed(
            cq.cqn(),
            &of(1),
            CqeOpcode::ResponderSend,
            &[MiniCqe {
                word: 0,
                byte_count: 0
            }; 2]
        ));
        assert!(!null.write_cqe(cq.cqn() + 1, &of(1), CqeOpcode::ResponderSend));
        assert_eq!(cq.poll(9, |_| {}), 0);
        assert!(null.write_scattered(
            cq.cqn(),
            &of(room),
            CqeOpcode::ResponderSend,
            &data[..room as usize]
        ));
        assert_eq!(
            cq.poll(9, |cqe| assert_eq!(
                cqe.inline_data(),
                Some(&data[..room as usize])
            )),
            1
        );
    }
    for cqe_bytes in [0, 32, 96, 256] {
        let error = device
            .create_cq(CqConfig {
                cqe_bytes,
                ..CqConfig::from(4)
            })
            .map(drop)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            format!("the size of a CQE is {cqe_bytes}; legal is 64 or 128")
        );
    }
}

/// The device's view of a send queue: the operations' numbers, which are their remote addresses,
/// and the device's position.
struct Executor {
    qpn: u32,
    capacity: u16,
    consumer: u16,
    blocks: u64,
}

impl Executor {
    /// Takes the next WQE that the record covers. Returns its first WQEBB, whether it wants a CQE,
    /// and its number (`None` for a NOP).
    fn next(&mut self, null: &NullDevice) -> Option<(u16, bool, Option<u64>)> {
        let (producer, first) = null.send_queue(self.qpn, self.consumer).unwrap();
        if producer == self.consumer {
            return None;
        }
        let ctrl = CtrlWords::parse(first.first_chunk().unwrap());
        let (index, blocks) = (self.consumer, u16::from(ctrl.ds()).div_ceil(4));
        assert_eq!(
            (ctrl.wqe_index(), ctrl.qpn()),
            (index, self.qpn),
            "the WQE of another place or queue"
        );
        assert!(
            index % self.capacity + blocks <= self.capacity,
            "a WQE wraps"
        );
        assert!(
            producer.wrapping_sub(index) >= blocks,
            "a WQE beyond the record"
        );
        self.consumer = index.wrapping_add(blocks);
        self.blocks += u64::from(blocks);
        if ctrl.opcode() == Opcode::Nop as u8 {
            return Some((index, ctrl.signaled(), None));
        }
        let number = RaddrSegment::parse(first[16..].first_chunk().unwrap()).addr;
        // The bytes of an inline payload repeat the number. They may be in any WQEBB of the WQE.
        let whole: Vec<u8> = (0..blocks)
            .flat_map(|i| null.send_queue(self.qpn, index.wrapping_add(i)).unwrap().1)
            .collect();
        let data = DataWords::parse(whole[32..].first_chunk().unwrap());
        if ctrl.ds() > 2 && data.is_inline() {
            assert!(
                whole[36..][..data.byte_count() as usize]
                    .iter()
                    .all(|&b| b == number as u8),
                "operation {number}"
            );
        }
        Some((index, ctrl.signaled(), Some(number)))
    }
}

#[test]
fn every_user_value_of_a_send_queue_comes_back_once_in_order_over_the_index_wrap() {
    for (seed, depth) in SEEDS.into_iter().zip([16, 64, 64, 1024]) {
        let (device, null) = open();
        let mut random = Random::new(seed);
        let (mut cq, srq) = (
            device.create_cq(depth).unwrap(),
            device.alloc_pd().unwrap().create_srq(1, 0).unwrap(),
        );
        let pd = device.alloc_pd().unwrap();
        let mut qp = pd
            .create_qp(
                &cq,
                &cq,
                &srq,
                &QpConfig {
                    max_send_wr: depth,
                    max_inline_data: 220,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default())
            .unwrap();
        let (capacity, qpn) = (qp.send_capacity(), qp.qpn());
        let mut device_side = Executor {
            qpn,
            capacity: capacity as u16,
            consumer: 0,
            blocks: 0,
        };
        // The numbers of the posted operations that the device has not executed; and the operations
        // with a pending CQE, each with its WQE.
        let (mut posted, mut due) = (VecDeque::new(), VecDeque::new());
        let mut number = 0u64;
        let mut padding = 0;
        let mut refused = 0;
        // The start is any place, reached by one-block operations.
        let mut warm_up = random.below(2 * depth);
        while device_side.blocks < (1 << 16) + 4 * u64::from(depth) {
            for _ in 0..random.below(depth / 2) {
                let data = vec![
                    number as u8;
                    if warm_up > 0 {
                        1
                    } else {
                        random.below(221) as usize
                    }
                ];
                let signal = if random.one_in(5) {
                    Signal::Always
                } else {
                    Signal::Reclaim
                };
                let (addr, rkey) = (number, 1);
                let sge = Sge {
                    addr: 1,
                    len: 1 + random.below(9),
                    lkey: 1,
                };
                let result = match random.below(4) {
                    _ if warm_up > 0 => qp.post(
                        &Write {
                            addr,
                            rkey,
                            payload: Inline(&data[..1]),
                        },
                        signal,
                        number,
                    ),
                    0 => qp.post(
                        &Write {
                            addr,
                            rkey,
                            payload: Inline(&data),
                        },
                        signal,
                        number,
                    ),
                    1 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: 3,
                            payload: (Inline(&data), sge),
                        },
                        signal,
                        number,
                    ),
                    2 => qp.post(
                        &WriteImm {
                            addr,
                            rkey,
                            imm: 4,
                            payload: (),
                        },
                        signal,
                        number,
                    ),
                    _ => qp.post(
                        &Read {
                            addr,
                            rkey,
                            into: sge,
                        },
                        signal,
                        number,
                    ),
                };
                match result {
                    Ok(()) => posted.push_back((number, signal)),
                    Err(PostError::QueueFull {
                        needed,
                        free,
                        capacity: of,
                    }) => {
                        assert!(needed > free && of == capacity);
                        refused += 1;
                        break;
                    }
                    Err(other) => panic!("{other}"),
                }
                number += 1;
                warm_up = warm_up.saturating_sub(1);
            }
            qp.ring();
            // The device executes some or all of the posted operations.
            let mut steps = if random.one_in(3) {
                usize::MAX
            } else {
                random.below(depth) as usize
            };
            while steps > 0 && due.len() < depth as usize {
                let Some((index, signaled, found)) = device_side.next(&null) else {
                    break;
                };
                steps -= 1;
                let Some(found) = found else {
                    assert!(!signaled, "a NOP asks for a CQE");
                    padding += 1;
                    continue;
                };
                let (want, signal) = posted.pop_front().unwrap();
                assert_eq!(found, want, "seed {seed}: operations out of order");
                assert!(signaled || signal == Signal::Reclaim);
                if signaled {
                    let cqe = RequesterCqe {
                        wqe_opcode: 8,
                        qpn,
                        wqe_counter: index,
                        byte_count: 0,
                        user_index: 0,
                    };
                    assert!(null.write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::Requester));
                    due.push_back(found);
                }
            }
            // The driver takes some or all of the CQEs.
            let max = if random.one_in(2) {
                usize::MAX
            } else {
                random.below(depth) as usize
            };
            cq.poll(max, |cqe| {
                assert_eq!(qp.complete(&cqe), due.pop_front(), "seed {seed}")
            });
        }
        assert!(
            padding > 0 && refused > 0 && number > u64::from(3 * depth),
            "{padding} {refused} {number}"
        );
    }
}
