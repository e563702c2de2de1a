//! The load that all are put under, ours and rivals alike: a caller that keeps some calls unanswered, and an answerer that answers what
//! there is. One loop of each for everything that is measured.

use std::error::Error;
use std::time::Duration;

use harness::clock::Clock;
use harness::hist::LatencyHistogram;

/// What goes to and fro: 32 bytes, as in the bare cache line.
pub(crate) type Payload = [u64; 4];
/// Whatever went wrong; the run is over.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// First word of a request that ends the answerer's loop.
const STOP: u64 = u64::MAX;
/// Calls at depth 1 between two readings of the clock.
const BLOCK_TRIPS: u64 = 64;
/// The same at any other depth, at least: so many that the blocks' median counts calls, not polls.
const BLOCK_CALLS: u64 = 1024;

/// The side that calls.
pub(crate) trait Caller {
    /// Calls, with `slot` to come back with the reply; false if there is no room for now.
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure>;
    /// Takes the replies that have arrived, and says how many.
    fn poll(&mut self, f: impl FnMut(u32, Payload)) -> Result<usize, Failure>;
}

/// The side that answers.
pub(crate) trait Answerer {
    /// Answers what has arrived, and says how many.
    fn step(&mut self, f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure>;
}

/// What a side does that finds nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Looks again.
    Busy,
    /// Gives its core away first.
    Yield,
}

impl Wait {
    #[inline(always)]
    fn idle(self) {
        if self == Self::Yield {
            std::thread::yield_now();
        }
    }
}

/// What one measurement found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Calls per second.
    pub(crate) rate: f64,
    /// Median of the blocks' nanoseconds per call.
    pub(crate) block_ns: f64,
}

fn answer_to(request: &Payload) -> Payload {
    request.map(|word| !word)
}

/// Answers until `callers` have told the end.
pub(crate) fn serve(answerer: &mut impl Answerer, callers: usize, wait: Wait) -> Result<(), Failure> {
    let mut stopped = 0;
    while stopped < callers {
        let answered = answerer.step(|request| {
            stopped += usize::from(request[0] == STOP);
            answer_to(request)
        })?;
        if answered == 0 {
            wait.idle();
        }
    }
    Ok(())
}

/// A caller under load.
pub(crate) struct Load<'a, C> {
    caller: &'a mut C,
    clock: Clock,
    wait: Wait,
    /// Slots whose call has ended, to call again.
    ended: Vec<u32>,
}

impl<'a, C: Caller> Load<'a, C> {
    pub(crate) fn new(caller: &'a mut C, clock: Clock, wait: Wait) -> Self {
        Self { caller, clock, wait, ended: Vec::with_capacity(1024) }
    }

    fn call_when_there_is_room(&mut self, slot: u32, request: Payload) -> Result<(), Failure> {
        while !self.caller.call(slot, request)? {
            self.wait.idle();
        }
        Ok(())
    }

    /// Calls `count` times with payloads that all differ, and checks each reply: the right one, of a call that was unanswered.
    pub(crate) fn check(&mut self, depth: u32, count: u64) -> Result<(), Failure> {
        let mut unanswered: Vec<Option<Payload>> = vec![None; depth as usize];
        let (mut sent, mut answered, mut wrong) = (0u64, 0, 0);
        while answered < count {
            for (slot, unanswered) in unanswered.iter_mut().enumerate() {
                let request = [sent, sent.rotate_left(17), sent.wrapping_mul(0x9e37_79b9_7f4a_7c15), !sent];
                if unanswered.is_none() && sent < count && self.caller.call(slot as u32, request)? {
                    *unanswered = Some(request);
                    sent += 1;
                }
            }
            let taken = self.caller.poll(|slot, reply| {
                let request = unanswered.get_mut(slot as usize).and_then(Option::take);
                wrong += u64::from(request.map(|request| answer_to(&request)) != Some(reply));
                answered += 1;
            })?;
            if taken == 0 {
                self.wait.idle();
            }
        }
        if wrong == 0 { Ok(()) } else { Err(format!("{wrong} of {count} replies were not the right ones").into()) }
    }

    /// Calls again as soon as there is a reply, for `duration` after a warm-up of a quarter of it.
    pub(crate) fn run(&mut self, depth: u32, duration: Duration) -> Result<Window, Failure> {
        if depth == 1 { self.trips(duration) } else { self.stream(depth, duration) }
    }

    fn trips(&mut self, duration: Duration) -> Result<Window, Failure> {
        let mut window = Measure::new(self.clock, duration);
        let mut number = 0;
        loop {
            for _ in 0..BLOCK_TRIPS {
                number += 1;
                self.call_when_there_is_room(0, [number; 4])?;
                let mut reply = 0;
                while self.caller.poll(|_, payload| reply = payload[3])? == 0 {
                    self.wait.idle();
                }
                std::hint::black_box(reply);
            }
            if window.is_over(BLOCK_TRIPS) {
                return Ok(window.result());
            }
        }
    }

    fn stream(&mut self, depth: u32, duration: Duration) -> Result<Window, Failure> {
        let mut number = 0;
        for slot in 0..depth {
            self.call_when_there_is_room(slot, [number; 4])?;
        }
        let mut window = Measure::new(self.clock, duration);
        loop {
            let before = number;
            while number - before < BLOCK_CALLS {
                let Self { caller, ended, .. } = self;
                let taken = caller.poll(|slot, reply| {
                    std::hint::black_box(reply[3]);
                    ended.push(slot);
                })?;
                if taken == 0 {
                    self.wait.idle();
                }
                for _ in 0..taken {
                    let Some(slot) = self.ended.pop() else { break };
                    number += 1;
                    self.call_when_there_is_room(slot, [number; 4])?;
                }
            }
            if window.is_over(number - before) {
                break;
            }
        }
        let mut unanswered = depth as usize;
        while unanswered > 0 {
            let taken = self.caller.poll(|_, _| {})?;
            unanswered = unanswered.checked_sub(taken).ok_or("more replies than calls")?;
            if taken == 0 {
                self.wait.idle();
            }
        }
        Ok(window.result())
    }

    /// Ends the answerer's loop, when nothing is unanswered.
    pub(crate) fn stop(&mut self) -> Result<(), Failure> {
        self.call_when_there_is_room(0, [STOP; 4])?;
        while self.caller.poll(|_, _| {})? == 0 {
            self.wait.idle();
        }
        Ok(())
    }
}

/// The clock of a measurement.
struct Measure {
    clock: Clock,
    start_ns: u64,
    end_ns: u64,
    /// When the block began; the first counted one begins at `began_ns`.
    block_ns: u64,
    began_ns: Option<u64>,
    calls: u64,
    /// Picoseconds per call of each block.
    blocks: LatencyHistogram,
}

impl Measure {
    fn new(clock: Clock, duration: Duration) -> Self {
        let (now_ns, duration_ns) = (clock.now_ns(), duration.as_nanos() as u64);
        let start_ns = now_ns + duration_ns / 4;
        Self {
            clock,
            start_ns,
            end_ns: start_ns + duration_ns,
            block_ns: now_ns,
            began_ns: None,
            calls: 0,
            blocks: LatencyHistogram::new(),
        }
    }

    /// Counts a block of `calls` that ends now.
    fn is_over(&mut self, calls: u64) -> bool {
        let (now_ns, block_ns) = (self.clock.now_ns(), self.block_ns);
        self.block_ns = now_ns;
        if block_ns >= self.start_ns {
            self.began_ns.get_or_insert(block_ns);
            self.calls += calls;
            self.blocks.record((now_ns - block_ns) * 1000 / calls);
        }
        now_ns >= self.end_ns && self.calls > 0
    }

    fn result(&self) -> Window {
        let elapsed_ns = self.block_ns - self.began_ns.unwrap_or(self.block_ns);
        Window { rate: self.calls as f64 * 1e9 / elapsed_ns.max(1) as f64, block_ns: self.blocks.summary().p50 as f64 / 1000.0 }
    }
}
