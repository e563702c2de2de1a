//! Receive WQEs, the links of a shared receive queue, and the doorbell records of receives.

use std::collections::VecDeque;

use mlx5::wire::*;
use mlx5::*;

use super::differences::Differences;
use super::libmlx5::{QpRequest, VerbsCq, VerbsDevice, VerbsQp, VerbsSrq};
use super::random::Random;
use super::{open, responder_cqe};
use crate::null::Plays;

/// Number of receives of each queue.
const DEPTH: u32 = 8;
/// Maximum number of buffers of a receive.
const SGES: u32 = 6;

/// The queue that receives are posted to.
enum Queue {
    Own(VerbsQp, RcQp),
    Shared(VerbsSrq, Srq),
}

/// A queue pair of each driver, and the queue of its receives.
struct Pair {
    queue: Queue,
    their_cq: VerbsCq,
    our_cq: Cq,
    null: NullDevice,
    /// Number and user index of libmlx5's queue pair.
    their_qpn: u32,
    user_index: u32,
    our_qpn: u32,
    /// The last posted receive of each WQE, and whether a buffer of length 0 was ever posted.
    wqes: Vec<(Vec<Sge>, bool)>,
    posted: u64,
}

impl Pair {
    fn new(device: &VerbsDevice, user_index: u32, sges: u32, is_shared: bool) -> Self {
        let their_cq = device.create_cq(16, 64, false, false);
        let ours = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
        let null = ours.null().unwrap();
        let pd = ours.alloc_pd().unwrap();
        let our_cq = ours.create_cq(16).unwrap();
        // One WQE of a list is its end.
        let depth = DEPTH - u32::from(is_shared);
        let their_srq = device.create_srq(depth, sges);
        let our_srq = pd.create_srq(depth, sges as usize).unwrap();
        let request = QpRequest {
            send_cq: their_cq.parts.cq,
            recv_cq: their_cq.parts.cq,
            srq: if is_shared {
                their_srq.parts.srq
            } else {
                std::ptr::null_mut()
            },
            is_datagram: 0,
            send_wr: 1,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: if is_shared { 0 } else { DEPTH },
            recv_sge: if is_shared { 0 } else { sges },
        };
        let their_qp = device.create_qp(&request);
        their_qp.to_init();
        let receives = if is_shared {
            (&our_srq).into()
        } else {
            ReceiveSource::Own {
                depth: DEPTH,
                max_sge: sges as usize,
            }
        };
        let mut our_qp = pd
            .create_qp(&our_cq, &our_cq, receives, &QpConfig::default())
            .unwrap();
        our_qp
            .connect(&our_qp.address(), &ConnectOptions::default())
            .unwrap();
        let (their_qpn, our_qpn) = (their_qp.parts.qpn, our_qp.qpn());
        let queue = if is_shared {
            assert_eq!(
                (their_srq.parts.head, their_srq.parts.tail),
                (0, DEPTH - 1),
                "libmlx5 gives as many"
            );
            // Dropping the queue pair would drop the receives with it.
            std::mem::forget(our_qp);
            Queue::Shared(their_srq, our_srq)
        } else {
            assert_eq!(their_qp.parts.rq_wqes, DEPTH);
            Queue::Own(their_qp, our_qp)
        };
        Self {
            queue,
            their_cq,
            our_cq,
            null,
            their_qpn,
            user_index,
            our_qpn,
            wqes: vec![(vec![], false); DEPTH as usize],
            posted: 0,
        }
    }

    /// Posts a receive, which uses WQE `index`.
    fn post(&mut self, index: u16, buffers: &[Sge]) {
        self.posted += 1;
        let (last, had_empty) = &mut self.wqes[usize::from(index)];
        *last = buffers.to_vec();
        *had_empty |= buffers.iter().any(|sge| sge.len == 0);
        match &mut self.queue {
            Queue::Own(theirs, ours) => {
                theirs.post_receive(self.posted, buffers);
                ours.post_receive(buffers, self.posted).unwrap();
                ours.ring_receives();
            }
            Queue::Shared(theirs, ours) => {
                theirs.post(self.posted, buffers);
                ours.post(buffers, self.posted).unwrap();
                ours.ring();
            }
        }
    }

    /// Completes the receive in WQE `index`. Both drivers must return the value of its post.
    fn complete(&mut self, index: u16) {
        let cqe = responder_cqe(self.their_qpn, self.user_index, index);
        let mut bytes = cqe.emit();
        bytes[OP_OWN_OFFSET] = op_own(CqeOpcode::ResponderWriteImm, self.their_cq.owner());
        self.their_cq.write(&[0; CQE_BYTES], &bytes);
        let wcs = self.their_cq.poll(2);
        assert_eq!(wcs.len(), 1);
        let cqe = responder_cqe(self.our_qpn, 0, index);
        assert!(
            self.null
                .write_cqe(self.our_cq.cqn(), &cqe.emit(), CqeOpcode::ResponderWriteImm)
        );
        let mut user = None;
        self.our_cq.poll(2, |cqe| {
            user = match &mut self.queue {
                Queue::Own(_, ours) => ours.complete_receive(&cqe),
                Queue::Shared(_, ours) => ours.complete_receive(&cqe),
            }
        });
        assert_eq!(user, Some(wcs[0].wr_id));
    }

    /// Compares all WQEs and the records.
    fn compare(&self, differences: &mut Differences) {
        for (index, (buffers, had_empty)) in (0..).zip(&self.wqes) {
            let (our_record, ours) = self.null.receive_queue(self.our_qpn, index).unwrap();
            let (their_record, theirs, name) = match &self.queue {
                Queue::Own(qp, _) => (
                    qp.record()[QP_DBREC_RECEIVE],
                    qp.receive_wqe(index.into()),
                    "RQ",
                ),
                Queue::Shared(srq, _) => (srq.record(), srq.wqe(index.into()), "SRQ"),
            };
            assert_eq!(
                their_record,
                queue_record(our_record),
                "the doorbell record of the {name}"
            );
            assert_eq!(theirs.len(), ours.len(), "the stride of the {name}");
            if theirs == ours {
                continue;
            }
            // libmlx5 leaves out no empty buffer of a shared receive.
            let first = SEGMENT;
            let as_asked: Vec<u8> = buffers
                .iter()
                .flat_map(|sge| {
                    DataSegment {
                        byte_count: sge.len,
                        lkey: sge.lkey,
                        addr: sge.addr,
                    }
                    .emit()
                })
                .collect();
            let is_known = name == "SRQ"
                && *had_empty
                && theirs[..first] == ours[..first]
                && theirs[first..].starts_with(&as_asked);
            let key = if is_known {
                "an empty buffer in an SRQ".to_owned()
            } else {
                format!("{name} WQE {index}")
            };
            differences.add(&key, || {
                format!("{buffers:x?}\n  libmlx5 {theirs:02x?}\n  ours    {ours:02x?}")
            });
        }
    }
}

/// Makes up to `most` buffers, some of length 0 if `with_empty`.
fn buffers(random: &mut Random, most: u32, with_empty: bool) -> Vec<Sge> {
    let count = random.below(most + 1);
    let len = |random: &mut Random| {
        if with_empty && random.one_in(4) {
            0
        } else {
            1 + random.below(1 << 20)
        }
    };
    (0..count)
        .map(|_| Sge {
            addr: u64::from(random.below(1 << 30)) << 20,
            len: len(random),
            lkey: random.below(1 << 30),
        })
        .collect()
}

/// Posts and completes at random, on queues of `sges` buffers a receive. Returns the number of
/// compared WQEs.
fn exercise(
    pair: &mut Pair,
    random: &mut Random,
    sges: u32,
    with_empty: bool,
    differences: &mut Differences,
) -> usize {
    let is_shared = matches!(pair.queue, Queue::Shared(..));
    let room = DEPTH as usize - usize::from(is_shared);
    let mut posted: VecDeque<u16> = VecDeque::new();
    // The WQEs in the order of their next use. The WQE that was returned last is used last.
    let mut free: VecDeque<u16> = (0..DEPTH as u16).collect();
    let mut compared = 0;
    pair.compare(differences);
    while compared < 200 * DEPTH as usize {
        for _ in 0..random.below((room - posted.len()) as u32 + 1) {
            let index = free.pop_front().unwrap();
            pair.post(index, &buffers(random, sges, with_empty));
            posted.push_back(index);
            pair.compare(differences);
            compared += DEPTH as usize;
        }
        for _ in 0..random.below(posted.len() as u32 + 1) {
            // The receives of a queue pair's own queue complete in order.
            let which = if is_shared {
                random.below(posted.len() as u32) as usize
            } else {
                0
            };
            let index = posted.remove(which).unwrap();
            pair.complete(index);
            free.push_back(index);
            pair.compare(differences);
            compared += DEPTH as usize;
        }
    }
    assert!(pair.posted > 5 * u64::from(DEPTH));
    compared
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn receives_links_and_records_are_those_of_libmlx5_but_for_the_known_differences() {
    let device = open();
    let mut random = Random::new(5);
    let mut differences = Differences::default();
    let (mut user_index, mut compared) = (0, 0);
    for sges in 1..=SGES {
        for (is_shared, with_empty) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let mut pair = Pair::new(&device, user_index, sges, is_shared);
            compared += exercise(&mut pair, &mut random, sges, with_empty, &mut differences);
            user_index += 1;
        }
    }
    println!("{compared} receive WQEs compared with libmlx5's");
    differences.check("Receives");
}
