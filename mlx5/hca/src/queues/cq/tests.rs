//! Events of completion queues, against a model.

use super::*;
use crate::random::Random;

const ENTRIES: u32 = 8;
const ARMED: CqArm = CqArm {
    sequence: 0,
    solicited_only: false,
    consumed: 0,
};

/// A queue with its memory, and a model: by counter, whether each CQE is solicited.
struct Model {
    cq: SoftCq,
    record: Box<[AtomicU32; 2]>,
    _buffer: Box<[[u64; 8]]>,
    written: Vec<bool>,
    first: u32,
    consumed: usize,
    announced: usize,
}

impl Model {
    /// Makes the state in which `first` CQEs were written and consumed.
    fn new(first: u32) -> Self {
        let mut buffer = vec![[u64::MAX; 8]; ENTRIES as usize].into_boxed_slice();
        let record = Box::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let memory = CqMemory {
            buffer: NonNull::from(&mut buffer[..]).cast(),
            entries: ENTRIES,
            cqe_bytes: CQE_BYTES as u32,
            compression: false,
            record: NonNull::from(&*record).cast(),
        };
        // SAFETY: the memory lives as long as the queue.
        let mut cq = unsafe { SoftCq::new(&memory) };
        cq.start_at(first);
        let mut model = Self {
            cq,
            record,
            _buffer: buffer,
            written: vec![],
            first,
            consumed: 0,
            announced: 0,
        };
        model.consume(0);
        model
    }

    fn write(&mut self, solicited: bool) {
        let mut cqe = [0; CQE_BYTES];
        cqe[OP_OWN_OFFSET] =
            op_own_with(CqeOpcode::ResponderSend, CqeFormat::Plain, solicited, false);
        self.cq.write(cqe, CqeOpcode::ResponderSend).unwrap();
        self.written.push(solicited);
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
        let consumed = self.first.wrapping_add(self.consumed as u32);
        self.record[0].store((consumed & 0xff_ffff).to_be(), Ordering::Relaxed);
    }

    fn arm(&self, solicited_only: bool) {
        let consumed = self.first.wrapping_add(self.consumed as u32);
        self.record[CQ_DBREC_ARM].store(
            CqArm {
                solicited_only,
                consumed,
                ..ARMED
            }
            .record(),
            Ordering::Relaxed,
        );
    }

    /// Returns the CQE that an event is due for: the first that was neither consumed nor had an
    /// event.
    fn due(&self, solicited_only: bool) -> Option<usize> {
        (self.consumed.max(self.announced)..self.written.len())
            .find(|&at| !solicited_only || self.written[at])
    }
}

/// The events are the same as the events of a NIC that checks at the same times as the model, even
/// where a counter wraps.
#[test]
fn each_event_is_for_the_first_completion_that_was_armed_for_and_had_none() {
    for first in [0, (1 << 23) - 20, (1 << 24) - 20, u32::MAX - 20] {
        for seed in 0..50 {
            let (mut model, random) = (Model::new(first), &mut Random::new(seed));
            let (mut events, mut behind) = (0, 0);
            for step in 0..200 {
                let unconsumed = model.written.len() - model.consumed;
                match random.below(3) {
                    0 if unconsumed < ENTRIES as usize => model.write(random.below(3) == 0),
                    1 => model.consume(random.below(unconsumed as u64 + 1) as usize),
                    _ => {
                        let solicited_only = random.below(2) == 0;
                        model.arm(solicited_only);
                        let due = model.due(solicited_only);
                        assert_eq!(
                            model.cq.announce(),
                            due.is_some(),
                            "{first:#x}, seed {seed}, step {step}"
                        );
                        model.announced = due.map_or(model.announced, |at| at + 1);
                        events += u32::from(due.is_some());
                        behind += u32::from(due.is_some_and(|at| at + 1 < model.written.len()));
                        assert!(!model.cq.announce() || due.is_none(), "one event per arm");
                    }
                }
            }
            assert!(
                events > 0 && behind > 0,
                "seed {seed}: {events} events, {behind} of them for others than the newest"
            );
        }
    }
}

#[test]
fn an_event_comes_for_a_completion_that_was_written_since_the_queue_was_armed_however_many_followed()
 {
    let mut model = Model::new(u32::MAX - 50);
    model.arm(false);
    for _ in 0..1000 {
        model.write(false);
        model.consume(1);
    }
    assert!(model.cq.take_event() && !model.cq.take_event());
}

#[test]
fn a_solicited_completion_is_remembered_over_no_turn_of_the_counter() {
    let mut model = Model::new(0);
    model.write(true);
    model.arm(true);
    assert!(model.cq.announce());
    model.consume(1);
    // Only the first CQE of each lap is written.
    let lap = 1 << 20;
    (model.cq.mask, model.first) = (lap - 1, 0);
    for counter in (0..=u32::MAX / lap + 1)
        .map(|n| n.wrapping_mul(lap))
        .skip(1)
    {
        (model.cq.limit, model.cq.room, model.first) = (counter, 0, counter);
        model.consumed = 0;
        model.consume(0);
        // This CQE is in the first entry, which is inside the buffer.
        model.write(false);
        for is_new_only in [true, false] {
            model.arm(true);
            let has_event = if is_new_only {
                model.cq.announce()
            } else {
                model.cq.take_event()
            };
            assert!(!has_event, "after {counter}");
        }
    }
    model.arm(false);
    assert!(model.cq.announce());
}
