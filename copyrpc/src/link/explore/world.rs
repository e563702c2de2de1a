//! Two real links joined by one-sided memory, their possible next events, and their invariants.

use std::collections::VecDeque;
use std::ptr::NonNull;

use super::Coder;
use super::names::{Kind, Names};
use crate::error::CallError;
use crate::link::held::HeldRequest;
use crate::link::{CallKey, Emit, Event, Hold, Link, LinkConfig, Request, Window};
use crate::ring::{Payload, RingSize, RingView};
use crate::wire::{
    ALIGNMENT, FlowWords, PublishedRecord, decode_imm, encode_imm, padded, response_capacity,
};

pub(super) const EITHER: &[u8] = &[0, 1];
pub(super) const SMALL: &[u8] = &[0];
pub(super) const LARGE: &[u8] = &[1];

/// For each call of a side, in order, the kinds that the call may have.
pub(super) type Script = &'static [&'static [u8]];

#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) ring: RingSize,
    pub(super) kinds: [Kind; 2],
    /// Maximum number of outstanding calls of a side.
    pub(super) calls: [usize; 2],
    /// All calls that a side makes, if their number is limited. After them the side may try one
    /// more call, which may be refused; if it is accepted, the state is not explored.
    pub(super) scripts: Option<[Script; 2]>,
    pub(super) batches: [u32; 2],
    pub(super) credit: u64,
    /// Each poll takes all arrivals.
    pub(super) drains: bool,
    /// The fabric may execute a READ later than it is posted.
    pub(super) delays_reads: bool,
    pub(super) defers: bool,
    /// Replies may also have the minimum length.
    pub(super) short_replies: bool,
    /// Calls may end before their answers: by a deadline or a cancellation, which are equivalent
    /// for a link.
    pub(super) abandons: bool,
}

impl Setup {
    pub(super) fn is_symmetric(&self) -> bool {
        let alike = match self.scripts {
            Some([first, second]) => first == second,
            None => true,
        };
        alike && self.calls[0] == self.calls[1] && self.batches[0] == self.batches[1]
    }
}

/// A possible event of a side, or of the fabric for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Call {
        kind: u8,
    },
    /// The application answers the `nth` of the requests it holds.
    Reply {
        nth: usize,
        is_short: bool,
    },
    /// The `nth` of the calls that wait ends before its answer.
    Abandon {
        nth: usize,
    },
    /// The application or the driver flushes, READs and publishes; the send queue takes `room`
    /// WQEs.
    Serve {
        room: usize,
    },
    TakeBatch,
    /// The fabric reads the peer's record.
    ExecuteRead,
    /// The driver takes the completion of the READ.
    TakeRead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The action is impossible now; nothing changed.
    Disabled,
    Done,
    /// The action leads to a state outside of the explored states.
    Outside,
    Refused,
    /// The send queue had no room for all batches.
    Deferred,
}

/// The side whose turn it is. A turn is the actions of one side up to its next [`Action::Serve`].
/// The actions before the `Serve` have no effect on the other side, and the other side cannot make
/// them impossible, so all of them may be moved to just before the `Serve`. So only the order of
/// the turns is explored.
///
/// In a turn, a side takes batches before it calls or replies. The other order is not explored: a
/// call or reply before the batches has the same effect as after them, where there is at least as
/// much space and credit. (A call that is refused before them may be accepted after them.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nobody,
    /// This side has only taken batches and ended calls early.
    Takes(usize),
    Acts(usize),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Read {
    None,
    Posted,
    Executed(FlowWords),
}

pub(super) struct World {
    pub(super) setup: Setup,
    pub(super) links: [Link<u8>; 2],
    /// For each side, the spans of the batches in its receive ring that it has not polled.
    pub(super) arrived: [VecDeque<u64>; 2],
    pub(super) reads: [Read; 2],
    pub(super) turn: Turn,
    /// Number of calls each side made, if it is limited.
    pub(super) made: [u32; 2],
    pub(super) coder: Coder,
    pub(super) names: Names,
}

fn leak_ring(size: RingSize) -> RingView {
    let bytes = vec![0_u8; size.bytes() as usize].into_boxed_slice();
    let base = NonNull::from(Box::leak(bytes)).cast();
    // SAFETY: the memory is never freed, and no reference to it is kept.
    unsafe { RingView::new(base, size) }
}

impl World {
    pub(super) fn new(setup: Setup, starts: [u64; 2]) -> Self {
        let links = [0, 1].map(|side| {
            let config = LinkConfig {
                local_credit: setup.credit,
                peer_credit: setup.credit,
                local_batches: setup.batches[1 - side],
                peer_batches: setup.batches[side],
                send_start: starts[side],
                recv_start: starts[1 - side],
                keepalive_ns: u64::MAX,
                stall_ns: u64::MAX,
                idle_keepalive_ns: u64::MAX,
                idle_timeout_ns: u64::MAX,
                reads_whole_words: true,
                window: Window::Off,
            };
            Link::new(leak_ring(setup.ring), leak_ring(setup.ring), &config)
        });
        let (arrived, reads) = (Default::default(), [Read::None; 2]);
        Self {
            setup,
            links,
            arrived,
            reads,
            turn: Turn::Nobody,
            made: [0; 2],
            coder: Coder::default(),
            names: Names::new(setup.kinds),
        }
    }

    /// Does an action, if it is possible, and checks the invariants after it.
    pub(super) fn apply(&mut self, side: usize, action: Action) -> Step {
        let may_act = match (self.turn, action) {
            (Turn::Nobody, _) => true,
            (_, Action::ExecuteRead) => false,
            (Turn::Takes(taker), _) => taker == side,
            (Turn::Acts(actor), _) => actor == side && action != Action::TakeBatch,
        };
        let must_poll = self.setup.drains
            && match action {
                Action::TakeBatch | Action::ExecuteRead => false,
                Action::TakeRead => !self.arrived[side].is_empty(),
                _ => {
                    !self.arrived[side].is_empty() || matches!(self.reads[side], Read::Executed(_))
                }
            };
        if !may_act || must_poll {
            return Step::Disabled;
        }
        let step = match action {
            Action::Call { kind } => self.call(side, kind),
            Action::Reply { nth, is_short } => self.reply(side, nth, is_short),
            Action::Abandon { nth } => self.abandon(side, nth),
            Action::Serve { room } => self.serve(side, room),
            Action::TakeBatch => self.take_batch(side),
            Action::ExecuteRead => self.execute_read(side),
            Action::TakeRead => self.take_read(side),
        };
        if step != Step::Disabled {
            self.turn = match action {
                Action::ExecuteRead | Action::Serve { .. } => Turn::Nobody,
                Action::TakeBatch => Turn::Takes(side),
                // Unlike calls and replies, the early end of a call may affect a batch that is
                // taken later.
                Action::Abandon { .. } if !matches!(self.turn, Turn::Acts(_)) => Turn::Takes(side),
                Action::Abandon { .. } => Turn::Acts(side),
                Action::Call { .. } | Action::Reply { .. } | Action::TakeRead => Turn::Acts(side),
            };
            self.check();
        }
        step
    }

    fn call(&mut self, side: usize, kind: u8) -> Step {
        let next = self.setup.scripts.map_or(EITHER, |scripts| {
            scripts[side]
                .get(self.made[side] as usize)
                .copied()
                .unwrap_or(LARGE)
        });
        let link = &mut self.links[side];
        if link.unanswered_requests() == self.setup.calls[side] || !next.contains(&kind) {
            return Step::Disabled;
        }
        match Self::try_call(link, self.setup.kinds[kind as usize], kind) {
            Ok(_)
                if self
                    .setup
                    .scripts
                    .is_some_and(|scripts| self.made[side] as usize == scripts[side].len()) =>
            {
                Step::Outside
            }
            Ok(_) => {
                self.made[side] += u32::from(self.setup.scripts.is_some());
                Step::Done
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                Step::Refused
            }
        }
    }

    fn try_call(link: &mut Link<u8>, kind: Kind, user_data: u8) -> Result<CallKey, CallError<u8>> {
        link.call(
            &[0; RingSize::CORE_MIN as usize][..kind.len as usize],
            user_data,
            kind.allowance,
        )
    }

    fn reply(&mut self, side: usize, nth: usize, is_short: bool) -> Step {
        let link = &mut self.links[side];
        let Some((number, held)) = link.rx.requests.unanswered().nth(nth) else {
            return Step::Disabled;
        };
        let max_reply = response_capacity(u64::from(held.internal_allowance)) as usize;
        if is_short && (!self.setup.short_replies || padded(max_reply as u64) == padded(0)) {
            return Step::Disabled;
        }
        let HeldRequest {
            position,
            len,
            internal_allowance,
            call_id,
        } = held;
        let request = Request {
            hold: Hold::Held(number as u32),
            payload: Payload::of_message(position, len),
            internal_allowance,
            call_id,
        };
        let payload = if is_short {
            &[][..]
        } else {
            &vec![0; max_reply]
        };
        assert!(
            link.reply(request, payload).is_ok(),
            "a reply never fails for lack of space"
        );
        Step::Done
    }

    fn abandon(&mut self, side: usize, nth: usize) -> Step {
        let link = &mut self.links[side];
        let Some(key) = link.calls.keys().nth(nth) else {
            return Step::Disabled;
        };
        assert!(link.cancel(key).is_some());
        Step::Done
    }

    /// Does a driver's work for a connection: flush, READ if starved, publish.
    ///
    /// A WRITE is executed at once, which is the worst case: the later it is executed, the fewer
    /// blocks of its receive ring the receiver still needs, and the more receives are posted. The
    /// completion of the WRITE may be taken at any time.
    fn serve(&mut self, side: usize, room: usize) -> Step {
        let recv = *self.links[1 - side].rx.view();
        let (link, arrived) = (&mut self.links[side], &mut self.arrived[1 - side]);
        let send = *link.tx.view();
        let told = link.rx.told();
        let limit = self.setup.batches[side] as usize;
        let mut left = room;
        let flushed: Result<(), ()> = link.flush(|emit: Emit| {
            left = left.checked_sub(1).ok_or(())?;
            // The receive queue is the smallest that B1 of docs/copyrpc-protocol.md permits: one
            // receive for each granted batch, posted again when the batch's completion is taken.
            assert!(
                arrived.len() < limit,
                "RNR: a batch finds no posted receive"
            );
            for block in (emit.offset..emit.offset + emit.bytes).step_by(ALIGNMENT as usize) {
                recv.copy_in(block, &send.copy_out::<{ ALIGNMENT as usize }>(block));
            }
            arrived.push_back(decode_imm(emit.imm));
            Ok(())
        });
        let mut step = if flushed.is_ok() {
            Step::Done
        } else {
            Step::Deferred
        };
        // A READ that is delayed after READs without news is posted by a later poll (L5), so all
        // its effects are possible here, too.
        link.backoff.news();
        if flushed.is_ok() && link.poll_read(0) {
            if left == 0 {
                step = Step::Deferred;
            } else {
                link.read_posted();
                self.reads[side] = Read::Posted;
            }
        }
        link.publish();
        let words = link.rx.told();
        if !self.setup.delays_reads {
            self.execute_read(side);
        }
        assert!(
            words.consumer_pos >= told.consumer_pos && words.credit >= told.credit,
            "F1: {words:?} after {told:?}"
        );
        assert!(
            words.batches_received >= told.batches_received,
            "F1: {words:?} after {told:?}"
        );
        step
    }

    fn take_batch(&mut self, side: usize) -> Step {
        let Some(span) = self.arrived[side].pop_front() else {
            return Step::Disabled;
        };
        let link = &mut self.links[side];
        link.on_imm(encode_imm(span));
        while let Some(event) = link.next_event() {
            match event {
                Event::Requests(count) => {
                    assert!((0..count).all(|_| link.take_request().is_some()))
                }
                Event::Ended { outcome, .. } => assert!(outcome.is_ok(), "{outcome:?}"),
            }
        }
        Step::Done
    }

    fn execute_read(&mut self, side: usize) -> Step {
        if !matches!(self.reads[side], Read::Posted) {
            return Step::Disabled;
        }
        self.reads[side] = Read::Executed(self.links[1 - side].rx.told());
        Step::Done
    }

    fn take_read(&mut self, side: usize) -> Step {
        let Read::Executed(words) = self.reads[side] else {
            return Step::Disabled;
        };
        let record = PublishedRecord {
            words,
            heartbeat: 0,
            batches_taken: words.batches_received as u32,
        };
        self.links[side].on_read_done(&record.encode());
        self.reads[side] = Read::None;
        Step::Done
    }

    fn check(&self) {
        for side in [0, 1] {
            let (link, peer) = (&self.links[side], &self.links[1 - side]);
            let ring = self.setup.ring;
            assert_eq!(link.closed(), None, "side {side}");
            assert_eq!(link.stats().stale_responses, 0, "side {side}");
            assert!(
                link.in_flight() + 2 * link.reserved() <= ring.bytes(),
                "S1, side {side}"
            );
            assert!(link.reserved() <= ring.max_reservation(), "R1, side {side}");
            // F1: the words that a side knows of its peer are true.
            let [known, _, _] = link.tx.positions();
            assert!(known <= peer.rx.consumer_pos(), "side {side}");
            // Overrun: the bytes that a side writes must not reach the bytes that its peer still
            // needs, one lap before. The check is made when the bytes are written, so it covers the
            // send ring too, and a post at any later time.
            let needed = peer
                .rx
                .requests
                .unanswered()
                .map(|(_, held)| held.position)
                .min()
                .unwrap_or(peer.rx.parsed());
            let [_, _, written] = link.tx.positions();
            assert!(
                written <= needed + ring.bytes(),
                "overrun by side {side}: {written} written, {needed} needed"
            );
        }
    }

    /// Returns whether no turn is under way and all requests are answered.
    pub(super) fn may_be_done(&self) -> bool {
        let [first, second] = &self.links;
        self.turn == Turn::Nobody && first.unanswered_requests() + second.unanswered_requests() == 0
    }

    /// Returns whether each side that calls can make the largest call in `state`. Changes the
    /// world.
    pub(super) fn takes_the_largest(&mut self, state: &[u8]) -> bool {
        [0, 1].into_iter().all(|side| {
            self.restore(state);
            self.setup.calls[side] == 0
                || Self::try_call(&mut self.links[side], self.setup.kinds[1], 1).is_ok()
        })
    }
}
