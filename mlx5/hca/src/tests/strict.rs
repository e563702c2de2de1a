//! Strict mode, by mutation: a correct driver causes no report, and each mistake is reported with
//! queue, place, bytes and rule. No mistake hangs the device, and no random bytes crash it.

use mlx5_wire::Syndrome;

use super::hand::*;
use crate::{Access, Hca, Queue, Region, Rule, Violation};

/// Returns operation `number`, of one to five WQEBBs, and whether it completes a receive. The kinds
/// of operations follow one another in turn.
fn operation(hand: &Hand, number: usize, signaled: bool) -> (Vec<u8>, bool) {
    let bytes: Vec<u8> = (0..220).map(|i| (i + number) as u8).collect();
    match number % 10 {
        0 => (
            hand.wqe(
                WRITE,
                signaled,
                &[hand.raddr(0), Hand::inline(&bytes[..28])],
            ),
            false,
        ),
        1 => (
            hand.wqe(
                WRITE_IMM,
                signaled,
                &[hand.raddr(64), Hand::inline(&bytes[..200])],
            ),
            true,
        ),
        2 => (hand.wqe(SEND, signaled, &[hand.pointer(0, 200)]), true),
        3 => (
            hand.wqe(SEND_IMM, signaled, &[Hand::inline(&bytes[..44])]),
            true,
        ),
        4 => (
            hand.wqe(READ, signaled, &[hand.raddr(0), hand.pointer(512, 300)]),
            false,
        ),
        5 => (
            hand.wqe(
                COMPARE_SWAP,
                signaled,
                &[hand.raddr(1024), Hand::atomic(1, 0), hand.pointer(1032, 8)],
            ),
            false,
        ),
        6 => (
            hand.wqe(
                FETCH_ADD,
                signaled,
                &[hand.raddr(1024), Hand::atomic(1, 0), hand.pointer(1040, 8)],
            ),
            false,
        ),
        7 => (hand.wqe(WRITE_IMM, signaled, &[hand.raddr(0)]), true),
        8 => (
            hand.wqe(
                WRITE,
                signaled,
                &[hand.raddr(0), Hand::inline(&bytes), hand.pointer(0, 50)],
            ),
            false,
        ),
        _ => (hand.wqe(0, signaled, &[]), false),
    }
}

/// Runs `operations`, some in batches, some alone, every third one with a completion.
fn run(hand: &mut Hand, operations: usize) {
    let (mut number, mut arriving) = (0, 0);
    while number < operations {
        hand.post_receives();
        for _ in 0..1 + number % 3 {
            let (wqe, takes_receive) = operation(hand, number, number % 3 == 0);
            if hand.room() < 5 || (takes_receive && arriving == RQ - 1) {
                break;
            }
            hand.push(&wqe);
            arriving += u16::from(takes_receive);
            number += 1;
        }
        if hand.rung != hand.producer {
            hand.ring();
        }
        arriving -= hand.reap().1 as u16;
    }
    hand.reap();
}

#[test]
fn a_correct_driver_breaks_no_rule_over_many_wraps_of_every_queue() {
    for is_list in [true, false] {
        let mut hand = Hand::new(true, is_list, false);
        // More than 2^16 WQEBBs, so the 16-bit indices wrap as well.
        run(&mut hand, 40_000);
        assert!(
            hand.producer.wrapping_sub(hand.done) <= 15
                && hand.send_cq.consumed > 3 * CQ
                && hand.recv_cq.consumed > 3 * CQ
        );
        assert_eq!(hand.violations(), []);
        hand.hca.destroy_qp(hand.qpn);
        assert_eq!(hand.violations(), []);
    }
}

#[test]
fn a_correct_driver_of_datagrams_breaks_no_rule() {
    let mut hand = Hand::new(true, false, true);
    for number in 0..1000 {
        hand.post_receives();
        let wqe = hand.wqe(
            SEND_IMM,
            true,
            &[hand.datagram(7), Hand::inline(&[number as u8; 100])],
        );
        hand.post(&wqe);
        assert_eq!(hand.reap(), (1, 1));
    }
    assert_eq!(hand.violations(), []);
}

macro_rules! mistakes {
    ($($mistake:ident)+) => {
        /// A mistake in one WQE or doorbell.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Mistake { $($mistake),+ }
        const MISTAKES: &[Mistake] = &[$(Mistake::$mistake),+];
    };
}
mistakes! {
    RecordNotWritten RecordLate RecordFarAhead RegisterMissing RegisterEmpty RegisterBytes RegisterOfOtherQueue RegisterHalf
    RegisterNotLast Overwrites NoCompletionBit NeverWritten StaleIndex OtherQueue NoLength TooLong HeaderMissing
    LongAtomicResult UnknownOpcode ReservedBits Modifier ZeroLengthSge InlineTooLong
}

/// The expected report of a mistake: the rule, the index, the bytes found.
type Expected = (Rule, u16, Vec<u8>);

/// A WRITE of 28 inline bytes, one WQEBB.
fn write(hand: &Hand) -> Vec<u8> {
    hand.wqe(WRITE, true, &[hand.raddr(0), Hand::inline(&[9; 28])])
}

/// Posts a WQE after `spoil` changed it, with a doorbell that repeats it.
fn post_spoilt(hand: &mut Hand, rule: Rule, spoil: impl FnOnce(&mut Vec<u8>)) -> Expected {
    let mut wqe = write(hand);
    spoil(&mut wqe);
    let at = hand.producer;
    hand.post(&wqe);
    (rule, at, wqe)
}

/// Makes the mistake. Returns the expected report.
fn make(hand: &mut Hand, mistake: Mistake) -> Expected {
    let at = hand.producer;
    let wqe = write(hand);
    let qpn = hand.qpn;
    match mistake {
        Mistake::RecordNotWritten | Mistake::RecordLate => {
            hand.push(&wqe);
            hand.write_register(&wqe);
            hand.notify();
            if mistake == Mistake::RecordLate {
                hand.write_record(hand.producer);
            }
            (Rule::RecordBehindRegister, at, wqe)
        }
        Mistake::RecordFarAhead => {
            hand.push(&wqe);
            hand.write_record(at + 3 * SQ);
            hand.write_register(&wqe);
            hand.notify();
            (Rule::RecordBeyondRoom, at + 3 * SQ, wqe)
        }
        Mistake::RegisterMissing => {
            hand.push(&wqe);
            hand.write_record(hand.producer);
            (Rule::RegisterNotWritten, at, wqe)
        }
        Mistake::RegisterEmpty => {
            hand.push(&wqe);
            hand.write_record(hand.producer);
            hand.notify();
            // An inspected register is filled with bytes that read as this index.
            (Rule::RegisterNotWritten, 0xdbdb, vec![0xdb; 16])
        }
        Mistake::RegisterBytes => {
            hand.push(&wqe);
            hand.write_record(hand.producer);
            let mut other = hand.register_bytes();
            other[40] ^= 1;
            hand.write_register(&other);
            hand.notify();
            (Rule::RegisterBytes, at, other)
        }
        Mistake::RegisterOfOtherQueue => {
            hand.push(&wqe);
            hand.write_record(hand.producer);
            let mut other = hand.register_bytes();
            other[6] ^= 1;
            hand.write_register(&other);
            hand.notify();
            (Rule::RegisterQueue, at, other)
        }
        Mistake::RegisterHalf => {
            hand.half ^= 256;
            hand.post(&wqe);
            (Rule::RegisterHalf, at, wqe)
        }
        Mistake::RegisterNotLast => {
            hand.push(&wqe);
            hand.push(&write(hand));
            hand.write_record(hand.producer);
            hand.write_register(&wqe);
            hand.notify();
            (Rule::RegisterNotLast, at, wqe)
        }
        Mistake::Overwrites => {
            // No receive is posted, so the first of these WRITEs waits, and the others wait after
            // it.
            for _ in 0..SQ {
                let wqe = hand.wqe(WRITE_IMM, true, &[hand.raddr(0)]);
                hand.push(&wqe);
            }
            hand.ring();
            let wqe = hand.wqe(WRITE_IMM, true, &[hand.raddr(0)]);
            hand.post(&wqe);
            (Rule::RecordBeyondRoom, hand.producer, wqe)
        }
        Mistake::NoCompletionBit => {
            let mut first = vec![];
            for _ in hand.producer.wrapping_sub(hand.done)..SQ {
                first = hand.wqe(WRITE, false, &[hand.raddr(0)]);
                hand.post(&first);
            }
            (Rule::NoCompletion, hand.producer, first)
        }
        Mistake::NeverWritten => {
            hand.push(&wqe);
            hand.producer += 1;
            let stale = hand.sq_bytes(at + 1, 16);
            hand.write_record(hand.producer);
            hand.write_register(&wqe);
            hand.notify();
            (Rule::WqeIndex, at + 1, stale)
        }
        Mistake::StaleIndex => {
            // The index of the last lap.
            post_spoilt(hand, Rule::WqeIndex, |wqe| {
                wqe[1..3].copy_from_slice(&at.wrapping_sub(SQ).to_be_bytes())
            })
        }
        Mistake::OtherQueue => post_spoilt(hand, Rule::WqeQueue, |wqe| {
            wqe[4..7].copy_from_slice(&(qpn + 1).to_be_bytes()[1..])
        }),
        Mistake::NoLength => post_spoilt(hand, Rule::WqeLength, |wqe| wqe[7] = 0),
        Mistake::TooLong => post_spoilt(hand, Rule::WqeLength, |wqe| wqe[7] = 5),
        Mistake::HeaderMissing => post_spoilt(hand, Rule::WqeLength, |wqe| wqe[7] = 1),
        Mistake::LongAtomicResult => {
            let results = [
                hand.raddr(1024),
                Hand::atomic(1, 0),
                hand.pointer(0, 8),
                hand.pointer(8, 8),
            ];
            let wqe = hand.wqe(FETCH_ADD, true, &results);
            hand.post(&wqe);
            (Rule::WqeLength, at, wqe)
        }
        Mistake::UnknownOpcode => post_spoilt(hand, Rule::WqeOpcode, |wqe| wqe[3] = 0x7e),
        Mistake::ReservedBits => post_spoilt(hand, Rule::WqeReserved, |wqe| wqe[9] = 1),
        Mistake::Modifier => post_spoilt(hand, Rule::WqeReserved, |wqe| wqe[0] = 1),
        Mistake::ZeroLengthSge => {
            let wqe = hand.wqe(WRITE, true, &[hand.raddr(0), hand.pointer(0, 0)]);
            hand.post(&wqe);
            (Rule::ZeroLength, at, wqe)
        }
        Mistake::InlineTooLong => post_spoilt(hand, Rule::InlineLength, |wqe| wqe[35] = 60),
    }
}

#[test]
fn a_register_that_holds_a_batch_breaks_no_rule_unless_it_differs_from_the_queue() {
    for (spoilt, rule) in [
        (None, None),
        (Some(64 + 40), Some(Rule::RegisterBytes)),
        (Some(40), Some(Rule::RegisterBytes)),
    ] {
        let mut hand = Hand::new(true, true, false);
        for _ in 0..3 {
            let wqe = write(&hand);
            hand.push(&wqe);
        }
        hand.write_record(hand.producer);
        let mut register = hand.sq_bytes(0, 3 * 64);
        if let Some(at) = spoilt {
            register[at] ^= 1;
        }
        hand.write_register(&register);
        hand.rung = hand.producer;
        hand.notify();
        assert_eq!(
            hand.violations().first().map(|violation| violation.rule),
            rule,
            "{spoilt:?}"
        );
    }
}

#[test]
fn a_register_whose_wqe_has_no_length_is_not_what_the_queue_holds() {
    let mut hand = Hand::new(true, true, false);
    let wqe = write(&hand);
    hand.push(&wqe);
    hand.write_record(hand.producer);
    let mut register = hand.register_bytes();
    register[7] = 0;
    hand.write_register(&register);
    hand.notify();
    assert_eq!(hand.violations()[0].rule, Rule::RegisterBytes);
}

/// The contents of an error completion.
#[derive(Debug, PartialEq)]
struct Error {
    syndrome: Syndrome,
    vendor: u8,
}

/// Returns the error completions of the send queue within a bounded number of polls.
fn errors(hand: &mut Hand) -> Vec<Error> {
    let mut got = vec![];
    for _ in 0..200 {
        hand.hca.empty_poll();
        hand.pass_ns(10_000_000);
        for cqe in hand.send_cq.poll().iter().filter(|cqe| opcode(cqe) == 13) {
            let (raw, vendor) = syndrome(cqe);
            got.push(Error {
                syndrome: Syndrome::from_wire(raw),
                vendor,
            });
        }
    }
    got
}

#[test]
fn every_mistake_is_named_with_its_queue_place_and_bytes_and_none_hangs() {
    for &mistake in MISTAKES {
        for warm_up in [0, 1, 100] {
            let mut hand = Hand::new(true, true, false);
            run(&mut hand, warm_up);
            while hand.producer != hand.done {
                // NOPs run until all earlier WQEs are complete. So no other WQE completes during
                // the mistake, and the next index is known to be free.
                let nop = hand.wqe(0, true, &[]);
                hand.post(&nop);
                hand.reap();
            }
            if mistake == Mistake::RegisterHalf && warm_up == 0 {
                // The first doorbell may use either half.
                continue;
            }
            if mistake == Mistake::Overwrites {
                for _ in hand.received..hand.posted_receives {
                    let wqe = hand.wqe(WRITE_IMM, true, &[hand.raddr(0)]);
                    hand.post(&wqe);
                    hand.reap();
                }
            }
            let (rule, index, bytes) = make(&mut hand, mistake);
            let mut found = hand.violations();
            if matches!(mistake, Mistake::RecordFarAhead | Mistake::Overwrites) {
                // All WQEs that the record claims are flushed, which are more than the queue holds.
                assert_eq!(found.pop().unwrap().rule, Rule::CompletionOverrun);
            }
            let [violation] = found[..] else {
                panic!("{mistake:?} after {warm_up}: {found:?}")
            };
            assert_eq!(
                (violation.rule, violation.queue),
                (rule, Queue::Send(hand.qpn)),
                "{mistake:?} after {warm_up}"
            );
            assert_eq!(
                (violation.index, &violation.bytes[..]),
                (u32::from(index), &bytes[..16]),
                "{mistake:?} after {warm_up}"
            );
            let text = violation.to_string();
            assert!(
                text.contains(&format!(
                    "send queue of QPN {:#x}, index {index}: {}",
                    hand.qpn,
                    rule.text()
                )),
                "{text}"
            );
            let errors = errors(&mut hand);
            match mistake {
                // The doorbell was not rung, so no WQE could fail.
                Mistake::RecordNotWritten => assert_eq!(errors, []),
                // The doorbell record was written only after the queue pair had failed, so the WQE
                // is flushed.
                Mistake::RecordLate => assert_eq!(errors[0].syndrome, Syndrome::WorkRequestFlushed),
                // All WQEs have been executed already.
                Mistake::NoCompletionBit => {}
                _ => {
                    assert_eq!(
                        (errors[0].syndrome, crate::vendor_text(errors[0].vendor)),
                        (Syndrome::LocalQpOperation, Some(rule.text())),
                        "{mistake:?}"
                    );
                    assert!(
                        errors[1..]
                            .iter()
                            .all(|e| e.syndrome == Syndrome::WorkRequestFlushed)
                    );
                }
            }
            assert_eq!(hand.violations(), [], "{mistake:?}: named once");
        }
    }
}

#[test]
fn a_doorbell_that_is_missing_at_the_end_is_found_when_the_queue_pair_goes() {
    let mut hand = Hand::new(true, true, false);
    run(&mut hand, 20);
    let (at, wqe) = (hand.producer, write(&hand));
    hand.push(&wqe);
    hand.write_record(hand.producer);
    hand.hca.destroy_qp(hand.qpn);
    let violation = only(&hand.violations());
    assert_eq!(
        (violation.rule, violation.index),
        (Rule::RegisterNotWritten, at.into())
    );
    assert_eq!(violation.bytes[..], wqe[..16]);
}

/// Returns the only violation.
fn only(found: &[Violation]) -> Violation {
    let [violation] = found else {
        panic!("{found:?}")
    };
    *violation
}

/// Returns the only violation, which names the receive queue.
fn of_receives(hand: &Hand) -> (Rule, u32, Vec<u8>) {
    let violation = only(&hand.violations());
    assert_eq!(violation.queue, Queue::Receive(hand.rqn));
    (violation.rule, violation.index, violation.bytes.to_vec())
}

#[test]
fn a_zero_link_is_found_at_whichever_receive_it_is() {
    for broken in 0..RQ - 1 {
        let mut hand = Hand::new(true, true, false);
        hand.link(broken, 0);
        hand.post_receives();
        hand.hca.empty_poll();
        // The link 0 of the first receive leads to this receive itself. The link 0 of any other
        // receive leads to the first, which is posted.
        assert_eq!(
            of_receives(&hand),
            (Rule::ReceiveLink, broken.into(), hand_bytes(&hand, broken))
        );
        assert_eq!(hand.violations(), []);
    }
    // One at a time, so that no other posted receive exists that it could lead to.
    let mut hand = Hand::new(true, true, false);
    hand.link(0, 0);
    let segments = [hand.pointer(4096, 128), hand.pointer(4224, 128)];
    hand.write_receive(0, &segments);
    hand.write_receive_record(1);
    assert_eq!(of_receives(&hand).0, Rule::ReceiveLink);
}

/// Returns the first 16 bytes of receive `index`.
fn hand_bytes(hand: &Hand, index: u16) -> Vec<u8> {
    // SAFETY: inside the ring.
    unsafe {
        hand.rq
            .buffer
            .add(usize::from(index) * hand.rq.stride as usize)
            .cast::<[u8; 16]>()
            .read()
    }
    .to_vec()
}

#[test]
fn a_receive_record_beyond_the_room_and_a_receive_of_length_zero_are_found() {
    for is_list in [true, false] {
        let mut hand = Hand::new(true, is_list, false);
        run(&mut hand, 30);
        hand.post_receives();
        assert_eq!(hand.violations(), []);
        hand.write_receive_record(hand.posted_receives.wrapping_add(1));
        assert_eq!(
            of_receives(&hand),
            (
                Rule::ReceiveBeyondRoom,
                (hand.posted_receives % RQ).into(),
                hand_bytes(&hand, hand.posted_receives % RQ)
            )
        );
        // An operation that finds more receives than the queue has is not ready, and its retries
        // end.
        let wqe = hand.wqe(WRITE_IMM, true, &[hand.raddr(0)]);
        hand.post(&wqe);
        let errors = errors(&mut hand);
        if !is_list {
            assert_eq!(errors[0].syndrome, Syndrome::RnrRetryExceeded);
        }

        let mut hand = Hand::new(true, is_list, false);
        let segments = [hand.pointer(4096, 128), hand.pointer(0, 0)];
        hand.write_receive(0, &segments);
        hand.write_receive_record(1);
        assert_eq!(
            of_receives(&hand),
            (Rule::ReceiveZeroLength, 0, hand_bytes(&hand, 0))
        );
    }
}

#[test]
fn a_consumer_record_that_is_ahead_and_a_queue_that_overruns_are_found() {
    let mut hand = Hand::new(true, true, false);
    run(&mut hand, 100);
    let ahead = hand.send_cq.consumed + 1;
    hand.send_cq.tell(ahead);
    let violation = only(&hand.violations());
    assert_eq!(
        (violation.rule, violation.queue, violation.index),
        (
            Rule::ConsumerAhead,
            Queue::Completion(hand.send_cq.cqn),
            ahead
        )
    );
    assert_eq!(violation.bytes[..4], ahead.to_be_bytes());
    // As on hardware, no more CQEs are written there.
    let wqe = write(&hand);
    hand.post(&wqe);
    hand.hca.empty_poll();
    assert_eq!((hand.send_cq.poll().len(), hand.violations()), (0, vec![]));

    let mut hand = Hand::new(true, true, false);
    hand.send_cq.tells = false;
    for number in 0..=CQ {
        let wqe = write(&hand);
        hand.post(&wqe);
        hand.hca.empty_poll();
        assert_eq!(hand.send_cq.poll().len(), usize::from(number < CQ));
    }
    let violation = only(&hand.violations());
    assert_eq!(
        (violation.rule, violation.queue, violation.index),
        (
            Rule::CompletionOverrun,
            Queue::Completion(hand.send_cq.cqn),
            CQ
        )
    );
}

#[test]
fn without_strict_mode_a_wrong_wqe_is_a_typed_error_with_its_detail() {
    let cases: [(Mistake, &str); 8] = [
        (
            Mistake::StaleIndex,
            "wrong index, queue pair number or length in the control segment",
        ),
        (
            Mistake::OtherQueue,
            "wrong index, queue pair number or length in the control segment",
        ),
        (
            Mistake::NoLength,
            "wrong index, queue pair number or length in the control segment",
        ),
        (
            Mistake::TooLong,
            "wrong index, queue pair number or length in the control segment",
        ),
        (Mistake::HeaderMissing, "a header segment is missing"),
        (
            Mistake::LongAtomicResult,
            "the result of an atomic is 8 bytes",
        ),
        (
            Mistake::UnknownOpcode,
            "an opcode that this kind of queue pair does not have",
        ),
        (Mistake::InlineTooLong, "inline data reaches beyond the WQE"),
    ];
    for (mistake, text) in cases {
        let mut hand = Hand::new(false, true, false);
        run(&mut hand, 7);
        make(&mut hand, mistake);
        let errors = errors(&mut hand);
        assert_eq!(
            (errors[0].syndrome, crate::vendor_text(errors[0].vendor)),
            (Syndrome::LocalQpOperation, Some(text)),
            "{mistake:?}"
        );
        assert_eq!(hand.violations(), []);
    }
    // A length of 0 is 2^31 bytes, which no region here has.
    let mut hand = Hand::new(false, true, false);
    make(&mut hand, Mistake::ZeroLengthSge);
    let errors = errors(&mut hand);
    assert_eq!(
        (errors[0].syndrome, crate::vendor_text(errors[0].vendor)),
        (
            Syndrome::LocalProtection,
            Some("not inside the memory region")
        )
    );
    // The result of a READ inside the WQE, and a queue pair that is not connected: only a driver by
    // hand can post those.
    let mut hand = Hand::new(false, true, false);
    let wqe = hand.wqe(READ, true, &[hand.raddr(0), Hand::inline(&[0; 8])]);
    hand.post(&wqe);
    let errors = self::errors(&mut hand);
    let text = "the result of a READ or an atomic cannot go into the WQE";
    assert_eq!(
        (errors[0].syndrome, crate::vendor_text(errors[0].vendor)),
        (Syndrome::LocalQpOperation, Some(text))
    );
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.below(256) as u8).collect()
    }
}

/// Makes one random step of a broken driver.
fn garbage(hand: &mut Hand, random: &mut Random) {
    let counter = |random: &mut Random, near: u16| match random.below(4) {
        0 => random.below(1 << 16) as u16,
        n => near.wrapping_add(n as u16),
    };
    match random.below(10) {
        0 => {
            let at = random.below(SQ.into()) as u16;
            let n = 1 + random.below(200) as usize;
            hand.write_sq(at, &random.bytes(n));
        }
        1..=5 => {
            let number = random.below(10) as usize;
            let (mut wqe, _) = operation(hand, number, random.below(2) == 0);
            for _ in 0..random.below(4) {
                let at = random.below(wqe.len() as u64) as usize;
                wqe[at] = random.below(256) as u8;
            }
            hand.push(&wqe);
        }
        6 => {
            let index = random.below(RQ.into()) as u16;
            let next = random.below(1 << 16) as u16;
            hand.link(index, next);
            let segment = if random.below(2) == 0 {
                random.bytes(16)
            } else {
                hand.pointer(random.below(9000) as usize, 64)
            };
            hand.write_receive(index, &[segment]);
        }
        7 => {
            let record = counter(random, hand.posted_receives);
            hand.receive_record().store(
                u32::from(record).to_be(),
                std::sync::atomic::Ordering::Release,
            );
        }
        8 => {
            let consumed = random.below(1 << 24) as u32;
            if random.below(8) == 0 {
                hand.send_cq.tell(consumed);
            }
        }
        _ => hand.post_receives(),
    }
    if random.below(3) == 0 {
        let record = counter(random, hand.producer.wrapping_sub(2));
        hand.write_record(record);
        if random.below(4) > 0 {
            let register = if random.below(2) == 0 {
                random.bytes(256)
            } else {
                hand.register_bytes()
            };
            hand.write_register(&register);
            hand.notify();
        }
    } else if random.below(3) == 0 {
        hand.ring();
    }
    hand.hca.empty_poll();
    hand.pass_ns(random.below(2_000_000));
    hand.send_cq.poll();
    hand.recv_cq.poll();
}

/// A region of another domain with known content, which must stay unchanged.
fn guard(hca: &Hca) -> Region {
    let access =
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let guard = hca
        .alloc_registered(hca.alloc_pd(), 4096, access, false)
        .unwrap();
    // SAFETY: inside the region.
    unsafe { guard.addr.write_bytes(0x77, 4096) };
    guard
}

#[test]
fn garbage_in_queues_records_and_registers_neither_crashes_nor_hangs_the_device() {
    for seed in 0..200 * u64::from(copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE")) {
        let mut random = Random(seed);
        let mut hand = Hand::new(seed % 2 == 0, seed % 3 != 0, seed % 5 == 4);
        let guard = guard(&hand.hca);
        for _ in 0..60 {
            garbage(&mut hand, &mut random);
        }
        hand.violations();
        hand.hca.destroy_qp(hand.qpn);
        hand.hca.destroy_srq(hand.rqn);
        // SAFETY: inside the region.
        let bytes = unsafe { guard.addr.cast::<[u8; 4096]>().read() };
        assert!(bytes.iter().all(|&b| b == 0x77), "seed {seed}");
    }
}
