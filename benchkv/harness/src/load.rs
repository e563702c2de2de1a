//! The load of calls over any transport: a caller that keeps a number of calls unanswered, and an
//! answerer that answers all requests. All measurements of `scripts/peers shm` and the benches of
//! crates use the same loop of the caller and the same loop of the answerer, so that they compare
//! only the transports. `copyrpc_bench` and benchkv have loops of their own, between processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use thiserror::Error;

use crate::Failure;
use crate::affinity::{pin_current_thread, usable_cores};
use crate::clock::Clock;
use crate::hist::LatencyHistogram;

/// The payload of requests and replies: 32 bytes.
pub type Payload = [u64; 4];

/// First word of a request that ends the answerer's loop.
const STOP: u64 = u64::MAX;
/// Number of calls at depth 1 between two readings of the clock.
pub const BLOCK_TRIPS: u64 = 64;
/// Minimum number of calls of a block at any other depth: so many that the number of replies of a
/// single poll hardly changes the time of a block.
pub const BLOCK_CALLS: u64 = 1024;

/// The side that calls.
pub trait Caller {
    /// Makes a call; the reply returns `slot`. Returns `false` if there is no room now.
    ///
    /// # Errors
    /// The transport's error.
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure>;
    /// Takes the replies that have arrived. Returns their number.
    ///
    /// # Errors
    /// The transport's error.
    fn poll(&mut self, f: impl FnMut(u32, Payload)) -> Result<usize, Failure>;
}

/// The side that answers.
pub trait Answerer {
    /// Answers requests that have arrived, all or only the next one. Returns the number of answers.
    ///
    /// # Errors
    /// The transport's error.
    fn step(&mut self, f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure>;
}

/// The thread at the other end has failed. That thread reports the reason itself.
#[derive(Debug, Error)]
#[error("the other end has failed")]
struct OtherEndFailed;

/// The waiting strategy of a side that finds nothing to do.
#[derive(Debug, Clone, Copy)]
pub struct Wait<'a> {
    gives_way: bool,
    /// Set when the other end has failed.
    failed: Option<&'a AtomicBool>,
}

impl Wait<'_> {
    /// A side that polls again at once.
    pub const BUSY: Self = Self {
        gives_way: false,
        failed: None,
    };
    /// A side that yields its core before it polls again.
    pub const YIELD: Self = Self {
        gives_way: true,
        failed: None,
    };

    #[inline(always)]
    fn idle(self) -> Result<(), Failure> {
        if self.gives_way {
            std::thread::yield_now();
        }
        match self.failed {
            Some(failed) if failed.load(Ordering::Relaxed) => Err(OtherEndFailed.into()),
            _ => Ok(()),
        }
    }
}

/// The result of one measurement.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Calls per second.
    pub rate: f64,
    /// Median over blocks of the nanoseconds per call. A block has at least 64 calls (depth 1) or
    /// 1,024 calls. A moment without a core does not change the median.
    pub block_ns: f64,
}

fn answer_to(request: &Payload) -> Payload {
    request.map(|word| !word)
}

/// Answers until `callers` callers have sent the [end](Load::stop).
///
/// # Errors
/// The error of the answerer.
pub fn serve(answerer: &mut impl Answerer, callers: usize, wait: Wait<'_>) -> Result<(), Failure> {
    let mut stopped = 0;
    while stopped < callers {
        let answered = answerer.step(|request| {
            stopped += usize::from(request[0] == STOP);
            answer_to(request)
        })?;
        if answered == 0 {
            wait.idle()?;
        }
    }
    Ok(())
}

/// A caller under load.
#[derive(Debug)]
pub struct Load<'a, C> {
    caller: &'a mut C,
    clock: Clock,
    wait: Wait<'a>,
    ended: Vec<u32>,
}

impl<'a, C: Caller> Load<'a, C> {
    /// Makes a caller that has no call unanswered.
    pub fn new(caller: &'a mut C, clock: Clock, wait: Wait<'a>) -> Self {
        Self {
            caller,
            clock,
            wait,
            ended: Vec::with_capacity(1024),
        }
    }

    #[inline(always)]
    fn call_when_there_is_room(&mut self, slot: u32, request: Payload) -> Result<(), Failure> {
        while !self.caller.call(slot, request)? {
            self.wait.idle()?;
        }
        Ok(())
    }

    /// Makes `count` calls with payloads that all differ. Checks that each reply is right, and
    /// belongs to an unanswered call.
    ///
    /// # Errors
    /// The caller's error, or the number of wrong replies.
    pub fn check(&mut self, depth: u32, count: u64) -> Result<(), Failure> {
        let mut unanswered: Vec<Option<Payload>> = vec![None; depth as usize];
        let (mut sent, mut answered, mut wrong) = (0u64, 0, 0);
        while answered < count {
            for (slot, unanswered) in unanswered.iter_mut().enumerate() {
                let mixed = sent.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let request = [sent, sent.rotate_left(17), mixed, !sent];
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
                self.wait.idle()?;
            }
        }
        if wrong == 0 {
            Ok(())
        } else {
            Err(format!("{wrong} of {count} replies were not the right ones").into())
        }
    }

    /// Keeps `depth` calls unanswered for `duration` after a warm-up of a quarter of it. No call is
    /// unanswered at the end.
    ///
    /// # Errors
    /// The error of the caller.
    pub fn run(&mut self, depth: u32, duration: Duration) -> Result<Rate, Failure> {
        let block = if depth == 1 { BLOCK_TRIPS } else { BLOCK_CALLS };
        let mut sent = 0;
        self.begin(depth, u64::MAX, &mut sent)?;
        let mut window = Measure::new(self.clock, duration);
        loop {
            let before = sent;
            while sent - before < block {
                self.turn(u64::MAX, &mut sent)?;
            }
            if window.is_over(sent - before) {
                break;
            }
        }
        self.finish(depth.into(), 0, &mut sent)?;
        Ok(window.result())
    }

    /// Returns the time of `calls` calls, `depth` at a time, from the first call to the last reply.
    ///
    /// # Errors
    /// The error of the caller.
    pub fn time(&mut self, depth: u32, calls: u64) -> Result<Duration, Failure> {
        let start_ns = self.clock.now_ns();
        let mut sent = 0;
        self.begin(depth, calls, &mut sent)?;
        self.finish(calls, calls, &mut sent)?;
        Ok(Duration::from_nanos(self.clock.now_ns() - start_ns))
    }

    /// Makes the first call of each of `depth` slots, but at most `limit` calls. `sent` counts the
    /// calls.
    fn begin(&mut self, depth: u32, limit: u64, sent: &mut u64) -> Result<(), Failure> {
        for slot in 0..depth {
            if *sent == limit {
                break;
            }
            self.call_when_there_is_room(slot, [*sent; 4])?;
            *sent += 1;
        }
        Ok(())
    }

    /// Makes further calls until `limit` calls are `sent`, and takes replies until no call is
    /// unanswered. At the beginning there are `unanswered` calls.
    fn finish(&mut self, mut unanswered: u64, limit: u64, sent: &mut u64) -> Result<(), Failure> {
        while unanswered > 0 {
            let left = unanswered.checked_sub(self.turn(limit, sent)?);
            unanswered = left.ok_or("more replies than calls")?;
        }
        Ok(())
    }

    /// Takes the replies that have arrived, and makes the next call of each of their slots until
    /// `limit` calls are `sent`. Returns the number of replies.
    #[inline(always)]
    fn turn(&mut self, limit: u64, sent: &mut u64) -> Result<u64, Failure> {
        let Self { caller, ended, .. } = self;
        ended.clear();
        let taken = caller.poll(|slot, reply| {
            std::hint::black_box(reply[3]);
            ended.push(slot);
        })?;
        if taken == 0 {
            self.wait.idle()?;
        }
        while *sent < limit {
            let Some(slot) = self.ended.pop() else { break };
            self.call_when_there_is_room(slot, [*sent; 4])?;
            *sent += 1;
        }
        Ok(taken as u64)
    }

    /// Ends the answerer's loop. No call may be unanswered.
    ///
    /// # Errors
    /// The error of the caller.
    pub fn stop(&mut self) -> Result<(), Failure> {
        self.call_when_there_is_room(0, [STOP; 4])?;
        while self.caller.poll(|_, _| {})? == 0 {
            self.wait.idle()?;
        }
        Ok(())
    }
}

/// Returns two cores of this process, if it has them.
///
/// # Errors
/// See [`usable_cores`].
pub fn two_cores() -> Result<Option<(usize, usize)>, Failure> {
    Ok(usable_cores()?.first_chunk().map(|&[a, b]| (a, b)))
}

/// The drop of an alarm that is not disarmed reports to the other end that this end has failed.
struct Alarm<'a>(&'a AtomicBool);

impl Alarm<'_> {
    fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs the load `with` on a caller in this thread and an answerer in another thread. Each end is
/// made by its thread, the answerer first. Each thread gets one of `cores`; with `None` the threads
/// are not pinned, and yield their core while they wait.
///
/// # Errors
/// The error of the end that failed. If one end fails, the other end does not wait for it.
pub fn between_threads<A: Answerer, C: Caller, R>(
    cores: Option<(usize, usize)>,
    clock: Clock,
    answerer: impl FnOnce() -> Result<A, Failure> + Send,
    caller: impl FnOnce() -> Result<C, Failure>,
    with: impl FnOnce(&mut Load<'_, C>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let failed = AtomicBool::new(false);
    let wait = Wait {
        gives_way: cores.is_none(),
        failed: Some(&failed),
    };
    let (made, is_made) = mpsc::channel();
    let answer = || {
        let alarm = Alarm(&failed);
        cores.map_or(Ok(()), |(_, core)| pin_current_thread(core))?;
        let mut answerer = answerer()?;
        made.send(())?;
        serve(&mut answerer, 1, wait)?;
        alarm.disarm();
        Ok::<(), Failure>(())
    };
    let call = || {
        let alarm = Alarm(&failed);
        cores.map_or(Ok(()), |(core, _)| pin_current_thread(core))?;
        // The receive fails only if the answerer failed, and the answerer reports the reason.
        is_made.recv().map_err(|_| OtherEndFailed)?;
        let mut caller = caller()?;
        let mut load = Load::new(&mut caller, clock, wait);
        let result = with(&mut load)?;
        load.stop()?;
        alarm.disarm();
        Ok::<R, Failure>(result)
    };
    std::thread::scope(|scope| {
        let answering = scope.spawn(answer);
        let result = call();
        let answered = answering
            .join()
            .unwrap_or_else(|_| Err("the answerer panicked".into()));
        match answered {
            // If the answerer failed only because the caller failed, the caller's error is
            // returned.
            Err(error) if result.is_ok() || !error.is::<OtherEndFailed>() => Err(error),
            _ => result,
        }
    })
}

/// The clock of a measurement. Blocks in the first fifth of its time, the warm-up, do not count.
#[derive(Debug)]
pub struct Measure {
    clock: Clock,
    start_ns: u64,
    end_ns: u64,
    /// Time at which the current block began. The first block that counts begins at `began_ns`.
    block_ns: u64,
    began_ns: Option<u64>,
    calls: u64,
    /// Picoseconds per call of each block.
    blocks: LatencyHistogram,
}

impl Measure {
    /// Starts the clock, for `duration` after a warm-up of a quarter of it.
    pub fn new(clock: Clock, duration: Duration) -> Self {
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

    /// Counts a block of `calls` that ends now. Returns whether the time is over.
    pub fn is_over(&mut self, calls: u64) -> bool {
        let (now_ns, block_ns) = (self.clock.now_ns(), self.block_ns);
        self.block_ns = now_ns;
        if block_ns >= self.start_ns {
            self.began_ns.get_or_insert(block_ns);
            self.calls += calls;
            self.blocks
                .record((now_ns - block_ns) * 1000 / calls.max(1));
        }
        now_ns >= self.end_ns && self.calls > 0
    }

    /// Returns the result of all blocks that count.
    pub fn result(&self) -> Rate {
        let elapsed_ns = self.block_ns - self.began_ns.unwrap_or(self.block_ns);
        Rate {
            rate: self.calls as f64 * 1e9 / elapsed_ns.max(1) as f64,
            block_ns: self.blocks.summary().p50 as f64 / 1000.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Message = (u32, Payload);

    struct ChannelCaller(mpsc::Sender<Message>, mpsc::Receiver<Message>);
    struct ChannelAnswerer {
        ends: (mpsc::Receiver<Message>, mpsc::Sender<Message>),
        fails_at: Option<u64>,
        wrong: bool,
    }

    impl Caller for ChannelCaller {
        fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
            // A failed send counts as lack of room. The caller's loop detects a dead answerer.
            Ok(self.0.send((slot, request)).is_ok())
        }

        fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
            Ok(self
                .1
                .try_iter()
                .map(|(slot, reply)| f(slot, reply))
                .count())
        }
    }

    impl Answerer for ChannelAnswerer {
        fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
            let Ok((slot, request)) = self.ends.0.try_recv() else {
                return Ok(0);
            };
            if self.fails_at.is_some_and(|at| request[0] == at) {
                return Err("broken answerer".into());
            }
            let reply = if self.wrong { request } else { f(&request) };
            self.ends.1.send((slot, reply))?;
            Ok(1)
        }
    }

    /// Runs the load in a thread of its own, so that a load that never ends fails the test.
    fn run<R: Send + 'static>(
        fails_at: Option<u64>,
        wrong: bool,
        with: impl FnOnce(&mut Load<'_, ChannelCaller>) -> Result<R, Failure> + Send + 'static,
    ) -> Result<R, Failure> {
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let ((to, requests), (replies, from)) = (mpsc::channel(), mpsc::channel());
            let answerer = || {
                Ok(ChannelAnswerer {
                    ends: (requests, replies),
                    fails_at,
                    wrong,
                })
            };
            done.send(between_threads(
                None,
                Clock::detect(),
                answerer,
                || Ok(ChannelCaller(to, from)),
                with,
            ))
        });
        is_done
            .recv_timeout(Duration::from_secs(60))
            .expect("the load has ended")
    }

    #[test]
    fn calls_are_all_made_and_nothing_is_left() {
        let calls = run(None, false, |load| {
            for depth in [1, 7, 64] {
                load.check(depth, 1000)?;
                for calls in [0, 1, 6, 500] {
                    load.time(depth, calls)?;
                }
                let window = load.run(depth, Duration::from_millis(1))?;
                assert!(window.rate > 0.0 && window.block_ns > 0.0);
                assert_eq!(load.caller.1.try_recv(), Err(mpsc::TryRecvError::Empty));
            }
            Ok(1)
        });
        assert_eq!(calls.unwrap(), 1);
    }

    #[test]
    fn wrong_replies_are_counted() {
        let failure = run(None, true, |load| load.check(4, 100)).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "100 of 100 replies were not the right ones"
        );
    }

    #[test]
    fn failed_end_is_named_and_not_waited_for() {
        let failure = run(Some(50), false, |load| load.check(4, 100)).unwrap_err();
        assert_eq!(failure.to_string(), "broken answerer");
        let failure = run(None, false, |_| Err::<(), _>("broken caller".into())).unwrap_err();
        assert_eq!(failure.to_string(), "broken caller");
    }
}
