//! Receive queues and shared receive queues over the wrap of their 16-bit counters. The test plays
//! the device over the queue's memory; a model gives the expected completions.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::VecDeque;

use super::random::Random;
use crate::config::RqSize;
use crate::pd::PdObject;
use crate::queues::rq::ReceiveQueue;
use crate::tests::null;
use crate::tests::null_device::Plays;
use crate::wire::{DataSegment, DataWords, ErrorCqe, NextSegment, SEGMENT, queue_record_index};
use crate::*;
use mlx5_hca::RqMemory;

const SEEDS: [u64; 3] = [5, 0xabcdef, 1 << 40];

/// The device's view of a queue: the WQEs and the record.
struct Ring {
    buffer: NonNull<u8>,
    stride: usize,
    record: NonNull<AtomicU32>,
}

impl Ring {
    /// Allocates memory for a queue, filled with 0xa5. Leaks it.
    fn leak(wqe_cnt: u16, stride: usize) -> Self {
        let memory = vec![[0xa5u8; SEGMENT]; usize::from(wqe_cnt) * stride / SEGMENT].leak();
        Self {
            buffer: NonNull::from(memory).cast(),
            stride,
            record: NonNull::from(Box::leak(Box::new(AtomicU32::new(0)))),
        }
    }

    fn memory(&self, wqe_cnt: u16) -> RqMemory {
        RqMemory {
            buffer: self.buffer,
            wqe_cnt: wqe_cnt.into(),
            stride: self.stride as u32,
            record: self.record,
        }
    }

    fn posted(&self) -> u16 {
        // SAFETY: the record is alive: leaked, or its device is.
        queue_record_index(unsafe { self.record.as_ref() }.load(Ordering::Acquire))
    }

    fn segment(&self, wqe: u16, place: usize) -> [u8; SEGMENT] {
        // SAFETY: as above, and inside the queue.
        unsafe {
            self.buffer
                .add(usize::from(wqe) * self.stride + place * SEGMENT)
                .cast()
                .read()
        }
    }

    /// Returns the buffers of a WQE from segment `first` on, up to the terminator or the end of the
    /// stride. None of them may be empty.
    fn buffers(&self, wqe: u16, first: usize) -> Vec<Sge> {
        let segments = (first..self.stride / SEGMENT).map(|place| self.segment(wqe, place));
        let buffers: Vec<_> = segments
            .take_while(|s| *s != DataSegment::TERMINATOR.emit())
            .map(|s| DataWords::parse(&s))
            .collect();
        assert!(
            buffers.iter().all(|s| s.byte_count() != 0),
            "to the device that is 2^31 bytes"
        );
        buffers
            .iter()
            .map(|s| Sge {
                addr: s.addr(),
                len: s.byte_count(),
                lkey: s.lkey(),
            })
            .collect()
    }
}

/// Makes 0 to `max` buffers, some of them empty, that no other receive has.
fn buffers(random: &mut Random, max: usize, number: u64) -> Vec<Sge> {
    let n = random.below(max as u32 + 1);
    (0..n)
        .map(|i| Sge {
            addr: number << 8 | u64::from(i),
            len: random.below(3) * 0x1234,
            lkey: number as u32 | 1 << 31,
        })
        .collect()
}

/// Returns the expected buffers.
fn not_empty(buffers: &[Sge]) -> Vec<Sge> {
    buffers.iter().copied().filter(|sge| sge.len != 0).collect()
}

#[test]
fn receives_of_a_queue_pair_are_taken_and_come_back_in_order_over_the_counter_wrap() {
    for (seed, (wqe_cnt, max_sge)) in SEEDS.into_iter().zip([(1, 1), (16, 4), (128, 2)]) {
        let ring = Ring::leak(wqe_cnt, max_sge * SEGMENT);
        let mut rq = ReceiveQueue::new(&ring.memory(wqe_cnt), ring.stride / 16);
        assert_eq!(
            (rq.depth(), rq.free()),
            (usize::from(wqe_cnt), usize::from(wqe_cnt))
        );
        let mut random = Random::new(seed);
        // The receives that the device has not yet taken, with their buffers, and the receives that
        // the device has taken and not yet completed.
        let (mut posted, mut taken) = (VecDeque::new(), VecDeque::new());
        let mut number = 0u64;
        let mut device_counter = 0u16;
        let mut completed = 0u32;
        while completed < (1 << 16) + 4 * u32::from(wqe_cnt) {
            for _ in 0..random.below(2 * u32::from(wqe_cnt) + 1) {
                let wanted = buffers(&mut random, max_sge, number);
                let is_full = posted.len() + taken.len() == usize::from(wqe_cnt);
                assert_eq!(rq.free(), usize::from(wqe_cnt) - posted.len() - taken.len());
                let result = rq.post(&wanted, number);
                if is_full {
                    assert_eq!(
                        result,
                        Err(PostReceiveError::QueueFull {
                            depth: usize::from(wqe_cnt)
                        })
                    );
                    break;
                }
                result.unwrap();
                posted.push_back((number, wanted));
                number += 1;
            }
            assert_eq!(ring.posted(), device_counter, "told before `ring`");
            rq.ring();
            while ring.posted() != device_counter {
                let (number, wanted) = posted.pop_front().unwrap();
                assert_eq!(
                    ring.buffers(device_counter % wqe_cnt, 0),
                    not_empty(&wanted),
                    "seed {seed}"
                );
                taken.push_back((device_counter, number));
                device_counter = device_counter.wrapping_add(1);
            }
            assert!(posted.is_empty());
            for _ in 0..random.below(taken.len() as u32 + 1) {
                let (counter, number) = taken.pop_front().unwrap();
                // Devices give the counter or the index, and neither with an error. The counter of
                // the next receive differs from the counter of the oldest, unless the queue has
                // only one place.
                if wqe_cnt > 1 {
                    assert_eq!(rq.complete(Some(counter.wrapping_add(1))), None);
                }
                let named =
                    [Some(counter), Some(counter % wqe_cnt), None][random.below(3) as usize];
                assert_eq!(rq.complete(named), Some(number), "seed {seed}");
                completed += 1;
                if taken.is_empty() {
                    assert_eq!(rq.complete(named), None, "nothing is posted");
                }
            }
        }
    }
}

#[test]
fn receives_of_an_srq_come_back_once_in_any_order_over_the_counter_wrap() {
    for (seed, (depth, max_sge)) in SEEDS.into_iter().zip([(1, 0), (15, 3), (100, 1)]) {
        let (_null, control) = null();
        let parts = control
            .queues()
            .create_srq(1, RqSize { depth, max_sge })
            .unwrap();
        let (srqn, memory) = parts;
        let RqMemory {
            buffer,
            stride,
            record,
            ..
        } = memory;
        let ring = Ring {
            buffer,
            stride: stride as usize,
            record,
        };
        let mut srq = Srq::new(srqn, &memory, max_sge, &PdObject::new(&control).unwrap());
        let real_depth = srq.depth();
        assert!(real_depth >= depth as usize && srq.free() == real_depth);
        let mut random = Random::new(seed);
        let (mut posted, mut taken) = (VecDeque::new(), vec![]);
        let mut number = 0u64;
        let mut popped = 0u16;
        let mut next = 0u16;
        let mut completed = 0u32;
        // In some rounds, all posts are fills with one value.
        let mut one_value = None;
        while completed < (1 << 16) + 4 * depth {
            if random.one_in(16) {
                one_value = random.one_in(2).then_some(number);
                number += 1;
            }
            for _ in 0..if one_value.is_some() {
                0
            } else {
                random.below(2 * depth + 2)
            } {
                let wanted = buffers(&mut random, max_sge, number);
                let is_full = posted.len() + taken.len() == real_depth;
                assert_eq!(srq.free(), real_depth - posted.len() - taken.len());
                let result = srq.post(&wanted, number);
                if is_full {
                    assert_eq!(
                        result,
                        Err(PostReceiveError::QueueFull { depth: real_depth })
                    );
                    break;
                }
                result.unwrap();
                posted.push_back((number, wanted));
                number += 1;
            }
            if random.one_in(4) {
                let (added, value) = (srq.free(), one_value.unwrap_or(number));
                srq.fill(value);
                posted.extend(std::iter::repeat_n((value, vec![]), added));
                number += 1;
                assert_eq!((posted.len() + taken.len(), srq.free()), (real_depth, 0));
            }
            assert_eq!(ring.posted(), popped, "told before `ring`");
            srq.ring();
            while ring.posted() != popped {
                let (number, wanted) = posted.pop_front().unwrap();
                assert_eq!(
                    ring.buffers(next, 1),
                    not_empty(&wanted),
                    "seed {seed}: not in posting order"
                );
                taken.push((next, number));
                next = NextSegment::parse(&ring.segment(next, 0)).next_wqe_index;
                popped = popped.wrapping_add(1);
            }
            assert!(posted.is_empty());
            let all = taken.len() as u32;
            for _ in 0..if random.one_in(2) {
                all
            } else {
                random.below(all + 1)
            } {
                let (index, number) = taken.swap_remove(random.below(taken.len() as u32) as usize);
                assert_eq!(srq.complete(index), Some(number), "seed {seed}");
                assert_eq!(srq.complete(index), None, "twice");
                completed += 1;
            }
            assert_eq!(
                srq.complete(memory.wqe_cnt as u16),
                None,
                "an index beyond the queue"
            );
        }
    }
}

/// Checks that both kinds of receive queue accept and refuse the same receives, with the same
/// errors.
fn check_limits(
    max: usize,
    ring: &Ring,
    first: usize,
    post: &mut dyn FnMut(&[Sge]) -> Result<(), PostReceiveError>,
) {
    let sge = |len| Sge {
        addr: 0x0102_0304_0506_0708,
        len,
        lkey: 0x1112_1314,
    };
    let many = vec![sge(1); max + 1];
    assert_eq!(
        post(&many),
        Err(PostReceiveError::TooManySges {
            count: max + 1,
            max
        })
    );
    let longest = MAX_MESSAGE_BYTES as u32;
    assert_eq!(
        post(&[sge(longest), sge(1)]),
        Err(PostReceiveError::TooLong {
            bytes: MAX_MESSAGE_BYTES + 1
        })
    );
    assert_eq!(
        post(&[sge(u32::MAX), sge(u32::MAX)]),
        Err(PostReceiveError::TooLong {
            bytes: 2 * u64::from(u32::MAX)
        })
    );
    // The queue is unused, and these three go to its first three places.
    post(&[sge(0), sge(longest - 1), sge(0), sge(1)]).unwrap();
    post(&[]).unwrap();
    post(&many[..max]).unwrap();
    let data = |len: u8| {
        [
            0x40 - len,
            0,
            0,
            0,
            0x11,
            0x12,
            0x13,
            0x14,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
        ]
    };
    let terminator = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut long = data(1);
    long[1..4].fill(0xff);
    let mut one = data(0);
    (one[0], one[3]) = (0, 1);
    assert_eq!(
        [0, 1, 2].map(|place| ring.segment(0, first + place)),
        [long, one, terminator]
    );
    assert_eq!(ring.segment(1, first), terminator);
    assert!((0..max).all(|place| ring.segment(2, first + place) == one));
}

#[test]
fn receives_have_golden_bytes_without_empty_buffers_and_limits() {
    let ring = Ring::leak(4, 4 * SEGMENT);
    let mut rq = ReceiveQueue::new(&ring.memory(4), ring.stride / 16);
    check_limits(4, &ring, 0, &mut |buffers| rq.post(buffers, 0));
    // A queue pair's receive with all its buffers has no terminator, and the bytes after the first
    // terminator are unchanged.
    assert_eq!([ring.segment(0, 3), ring.segment(1, 1)], [[0xa5; 16]; 2]);

    let (_null, control) = null();
    let parts = control
        .queues()
        .create_srq(
            1,
            RqSize {
                depth: 3,
                max_sge: 5,
            },
        )
        .unwrap();
    let (srqn, memory) = parts;
    let ring = Ring {
        buffer: memory.buffer,
        stride: memory.stride as usize,
        record: memory.record,
    };
    let mut srq = Srq::new(srqn, &memory, 5, &PdObject::new(&control).unwrap());
    check_limits(5, &ring, 1, &mut |buffers| srq.post(buffers, 0));
    let links: Vec<_> = (0..4)
        .map(|wqe| NextSegment::parse(&ring.segment(wqe, 0)).next_wqe_index)
        .collect();
    assert_eq!(links, [1, 2, 3, 0]);
}

#[test]
fn flushed_receives_of_a_queue_pair_come_back_in_order_whatever_counter_their_cqes_have() {
    let device = Device::open("null").unwrap();
    let (null, pd) = (device.null().unwrap(), device.alloc_pd().unwrap());
    let mut cq = device.create_cq(16).unwrap();
    let mut qp = pd
        .create_qp(
            &cq,
            &cq,
            ReceiveSource::Own {
                depth: 4,
                max_sge: 0,
            },
            &QpConfig::default(),
        )
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    (0..4).for_each(|user| qp.post_receive(&[], user).unwrap());
    for wqe_counter in [0xffff, 2, 2, 0] {
        let raw_syndrome = Syndrome::WorkRequestFlushed as u8;
        let cqe = ErrorCqe {
            raw_syndrome,
            vendor_syndrome: 0,
            wqe_opcode: 0,
            qpn: qp.qpn(),
            wqe_counter,
            user_index: 0,
        };
        assert!(null.write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::ResponderError));
    }
    let mut users = vec![];
    cq.poll(9, |cqe| users.extend(qp.complete_receive(&cqe)));
    assert_eq!(
        (users, qp.state(), qp.free_receives()),
        (vec![0, 1, 2, 3], QpState::Error, 4)
    );
}
