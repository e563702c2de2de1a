//! The caller: keeps every active endpoint at its depth. Each slot of the depth calls again as soon
//! as its reply is there, from inside the callback, so that all calls a poll gives rise to leave
//! with that poll.

use bench::load::Failure;
use bench::pattern::{self, Tag};
use bench::program::Fault;
use copyrpc::{Context, Endpoint, Outcome};
use harness::clock::Clock;
use harness::hist::LatencyHistogram;

use crate::cli::Mode;
use crate::options::{Job, Length};

/// Number of polls between two readings of the clock.
const BLOCK_POLLS: u32 = 64;

/// The measurements of one run.
pub(crate) struct Window {
    pub(crate) calls: u64,
    pub(crate) elapsed_ns: u64,
}

/// A place for one call; it calls again and again.
#[derive(Clone, Copy)]
struct Slot {
    tag: Tag,
    /// Time of the first try of the call; only in latency mode.
    sent_ns: u64,
}

/// The load of all endpoints.
pub(crate) struct Load<'a> {
    job: &'a Job,
    clock: Clock,
    endpoints: &'a [Endpoint<u32>],
    /// The calls of endpoint 0 first.
    slots: Vec<Slot>,
    /// The number of the next call, by endpoint.
    next: Vec<u64>,
    /// Slots whose call was refused for the moment, and slots that are being tried again.
    refused: Vec<u32>,
    retried: Vec<u32>,
    request: Vec<u8>,
    reply: Vec<u8>,
    /// Calls that may still be made in this phase.
    left: u64,
    outstanding: usize,
    ended: u64,
    /// Round-trip times in ns; in rate mode, ps per call of each block of polls.
    latencies: LatencyHistogram,
    /// Whether round trips are timed now.
    is_recording: bool,
    bad_replies: u64,
    failure: Option<Failure>,
}

impl<'a> Load<'a> {
    pub(crate) fn new(job: &'a Job, clock: Clock, endpoints: &'a [Endpoint<u32>]) -> Self {
        let slots = job.endpoints * job.depth;
        Self {
            job,
            clock,
            endpoints,
            slots: vec![
                Slot {
                    tag: Tag::new(0, 0),
                    sent_ns: 0
                };
                slots
            ],
            next: vec![0; job.endpoints],
            refused: Vec::with_capacity(slots),
            retried: Vec::with_capacity(slots),
            request: vec![0; job.payload_bytes],
            reply: vec![0; job.reply_bytes],
            left: 0,
            outstanding: 0,
            ended: 0,
            latencies: LatencyHistogram::new(),
            is_recording: false,
            bad_replies: 0,
            failure: None,
        }
    }

    /// Number of replies with wrong payloads.
    pub(crate) const fn bad_replies(&self) -> u64 {
        self.bad_replies
    }

    /// Returns the times measured since the last call of this function.
    pub(crate) fn take_latencies(&mut self) -> LatencyHistogram {
        std::mem::take(&mut self.latencies)
    }

    /// Keeps the load up for `length`, then lets all calls end. The window does not include that.
    pub(crate) fn run(
        &mut self,
        context: &Context<u32>,
        length: Length,
        record: bool,
    ) -> Result<Window, Failure> {
        let (calls, limit_ns) = match length {
            Length::Calls(calls) => (calls, u64::MAX),
            Length::Seconds(seconds) => (u64::MAX, (seconds * 1e9) as u64),
        };
        (self.left, self.ended, self.is_recording) =
            (calls, 0, record && self.job.mode == Mode::Latency);
        let start_ns = self.clock.now_ns();
        for slot in 0..self.slots.len() as u32 {
            self.issue(slot);
        }
        let (mut block_start_ns, mut block_start) = (start_ns, 0);
        let window = loop {
            for _ in 0..BLOCK_POLLS {
                self.step(context)?;
                if self.ended == calls {
                    break;
                }
            }
            let now_ns = self.clock.now_ns();
            if record && self.job.mode == Mode::Rate && self.ended > block_start {
                self.latencies
                    .record((now_ns - block_start_ns) * 1000 / (self.ended - block_start));
                (block_start_ns, block_start) = (now_ns, self.ended);
            }
            let elapsed_ns = now_ns - start_ns;
            if self.ended == calls || elapsed_ns >= limit_ns {
                break Window {
                    calls: self.ended,
                    elapsed_ns,
                };
            }
        };
        (self.left, self.is_recording) = (0, false);
        self.refused.clear();
        while self.outstanding > 0 {
            self.step(context)?;
        }
        Ok(window)
    }

    fn step(&mut self, context: &Context<u32>) -> Result<(), Failure> {
        if !self.refused.is_empty() {
            std::mem::swap(&mut self.refused, &mut self.retried);
            while let Some(slot) = self.retried.pop() {
                self.call(slot);
            }
        }
        let taken = context.poll(|slot, outcome| self.end(slot, outcome))?;
        if taken == 0 {
            self.job.wait.idle(context)?;
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// The call of `slot` ended.
    fn end(&mut self, slot: u32, outcome: Outcome<'_>) {
        self.outstanding -= 1;
        let Some(&Slot { tag, sent_ns }) = self.slots.get(slot as usize) else {
            return;
        };
        match outcome {
            Ok(bytes) if self.job.verify => {
                let tag = tag.within(self.job.payload_bytes);
                let is_right = pattern::copied(bytes, &mut self.reply)
                    .is_some_and(|bytes| pattern::is_reply(bytes, tag));
                self.bad_replies += u64::from(!is_right);
            }
            Ok(bytes) => pattern::touch(bytes),
            Err(failure) => self.failure = Some(format!("a call failed: {failure}").into()),
        }
        self.ended += 1;
        if self.is_recording {
            self.latencies
                .record(self.clock.now_ns().saturating_sub(sent_ns));
        }
        self.issue(slot);
    }

    /// Lets `slot` call, and its time run.
    fn issue(&mut self, slot: u32) {
        if self.is_recording {
            let now_ns = self.clock.now_ns();
            if let Some(slot) = self.slots.get_mut(slot as usize) {
                slot.sent_ns = now_ns;
            }
        }
        self.call(slot);
    }

    /// Calls, unless the phase has had its calls.
    fn call(&mut self, slot: u32) {
        if self.left == 0 {
            return;
        }
        let endpoint = slot as usize / self.job.depth;
        let (Some(to), Some(number)) = (self.endpoints.get(endpoint), self.next.get_mut(endpoint))
        else {
            return;
        };
        let tag = Tag::new(endpoint, *number);
        if self.job.verify {
            pattern::fill_request(&mut self.request, tag);
            Fault::CorruptRequest.inject(self.job.fault, *number, &mut self.request);
        }
        match to.call(&self.request, slot, self.job.reply_bytes) {
            Ok(_) => {
                *number += 1;
                self.left -= 1;
                self.outstanding += 1;
                if let Some(slot) = self.slots.get_mut(slot as usize) {
                    slot.tag = tag;
                }
            }
            Err(error) if error.is_retryable() => self.refused.push(slot),
            Err(error) => self.failure = Some(format!("a call was refused: {error}").into()),
        }
    }
}
