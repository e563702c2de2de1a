//! The load, for every transport: each client keeps its calls unanswered, and every reply is
//! checked. One thread runs all clients.

use std::time::Duration;

use bench::load::{BLOCK_CALLS, BLOCK_TRIPS, Failure, Measure};
use bench::pattern::{self, Tag};
use bench::program::Fault;
use copyrpc_shm::wait::{WaitStrategy, Waiter};
use harness::clock::Clock;
use serde::{Deserialize, Serialize};

use super::contestant::{Case, Client};

/// Number of rounds without a reply between two checks for other events.
const IDLE_ROUNDS: u32 = 4096;

/// The result of one measurement.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Rate of all clients together.
    pub(crate) calls_per_s: f64,
    /// Median over blocks of calls; with one call at a time a round trip. A moment without a core
    /// does not change it.
    pub(crate) ns_per_call_of_blocks: f64,
    /// Minimum over maximum of the calls of a client.
    pub(crate) slowest_vs_fastest: f64,
    /// Number of all calls that were made; each has ended.
    pub(crate) calls: u64,
    pub(crate) bad_replies: u64,
    /// Number of calls that the server did not execute, and that were made again.
    pub(crate) refused: u64,
}

/// The waiting strategy of a measurement, and its length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) clock: Clock,
    pub(crate) wait: WaitStrategy,
    pub(crate) duration: Duration,
    /// Maximum time without a reply while calls are unanswered; longer silence is a failure.
    pub(crate) silence: Duration,
}

/// One client and its calls.
struct Caller<'a, C> {
    client: &'a mut C,
    number: usize,
    /// The unanswered calls, by slot.
    tags: Vec<Option<Tag>>,
    /// Slots with no unanswered call.
    free: Vec<u32>,
    /// Number of the next call.
    next: u64,
    ended: u64,
    bad_replies: u64,
    refused: u64,
}

impl<'a, C: Client> Caller<'a, C> {
    fn new(number: usize, client: &'a mut C, depth: usize) -> Self {
        let (tags, free) = (vec![None; depth], (0..depth as u32).rev().collect());
        Self {
            client,
            number,
            tags,
            free,
            next: 0,
            ended: 0,
            bad_replies: 0,
            refused: 0,
        }
    }

    /// Calls from every free slot, unless no more calls are wanted, and takes the calls that have
    /// ended. Returns their number.
    #[inline]
    fn turn(
        &mut self,
        fault: Option<Fault>,
        request: &mut [u8],
        is_over: bool,
    ) -> Result<u64, Failure> {
        while let Some(&slot) = self.free.last().filter(|_| !is_over) {
            let tag = Tag::new(self.number, self.next);
            pattern::fill_request(request, tag);
            Fault::CorruptRequest.inject(fault, self.next, request);
            if !self.client.issue(slot, request)? {
                break;
            }
            self.free.pop();
            self.next += 1;
            if let Some(place) = self.tags.get_mut(slot as usize) {
                *place = Some(tag);
            }
        }
        let Self {
            client,
            tags,
            free,
            bad_replies,
            refused,
            ..
        } = self;
        let mut ended = 0;
        client.poll(|slot, reply| {
            let Some(tag) = tags.get_mut(slot as usize).and_then(Option::take) else {
                *bad_replies += 1;
                return;
            };
            free.push(slot);
            match reply {
                Some(reply) => {
                    *bad_replies +=
                        u64::from(reply.len() != request.len() || !pattern::is_reply(reply, tag));
                    ended += 1;
                }
                None => *refused += 1,
            }
        })?;
        self.ended += ended;
        Ok(ended)
    }

    fn unanswered(&self) -> usize {
        self.tags.len() - self.free.len()
    }
}

/// The load of all clients of a measurement.
struct Load<'a, C> {
    callers: Vec<Caller<'a, C>>,
    fault: Option<Fault>,
    request: Vec<u8>,
    pace: &'a Pace,
    waiter: Waiter,
    idle_rounds: u32,
    /// Time of the first round without a reply since the last reply, in ns.
    silent_since_ns: Option<u64>,
    /// Called when no reply arrives. Fails, with the reason, if the job has ended.
    watch: &'a mut dyn FnMut() -> Result<(), Failure>,
}

impl<C: Client> Load<'_, C> {
    /// Gives one turn to each client. Returns the number of calls that have ended.
    #[inline]
    fn round(&mut self, is_over: bool) -> Result<u64, Failure> {
        let Self {
            callers,
            fault,
            request,
            ..
        } = self;
        let mut ended = 0;
        for caller in callers {
            ended += caller.turn(*fault, request, is_over)?;
        }
        if ended > 0 {
            self.waiter.busy();
            (self.idle_rounds, self.silent_since_ns) = (0, None);
        } else {
            self.waiter.idle(|| ());
            self.idle_rounds += 1;
            if self.idle_rounds % IDLE_ROUNDS == 0 {
                self.check()?;
            }
        }
        Ok(ended)
    }

    /// Checks for other events: no reply has arrived for a while.
    #[cold]
    fn check(&mut self) -> Result<(), Failure> {
        (self.watch)()?;
        let now_ns = self.pace.clock.now_ns();
        let since_ns = *self.silent_since_ns.get_or_insert(now_ns);
        let silence = Duration::from_nanos(now_ns.saturating_sub(since_ns));
        if silence < self.pace.silence {
            return Ok(());
        }
        Err(format!(
            "no reply for {silence:?} with {} calls unanswered: lost, or the server is stopped",
            self.unanswered()
        )
        .into())
    }

    fn unanswered(&self) -> usize {
        self.callers.iter().map(Caller::unanswered).sum()
    }
}

/// Keeps every client at its depth for a warm-up and the measured time, then lets all calls end.
pub(crate) fn run<C: Client>(
    clients: &mut [C],
    case: &Case,
    pace: &Pace,
    watch: &mut dyn FnMut() -> Result<(), Failure>,
) -> Result<Measured, Failure> {
    let block = if case.clients * case.depth == 1 {
        BLOCK_TRIPS
    } else {
        BLOCK_CALLS
    };
    let callers = clients
        .iter_mut()
        .enumerate()
        .map(|(number, client)| Caller::new(number, client, case.depth))
        .collect();
    let request = vec![0; case.payload_bytes];
    let (fault, waiter) = (case.fault, pace.wait.waiter());
    let mut load = Load {
        callers,
        fault,
        request,
        pace,
        waiter,
        idle_rounds: 0,
        silent_since_ns: None,
        watch,
    };
    let mut measure = Measure::new(pace.clock, pace.duration);
    loop {
        let mut ended = 0;
        while ended < block {
            ended += load.round(false)?;
        }
        if measure.is_over(ended) {
            break;
        }
    }
    while load.unanswered() > 0 {
        load.round(true)?;
    }
    let window = measure.result();
    let sum = |count: fn(&Caller<'_, C>) -> u64| load.callers.iter().map(count).sum();
    let ended = || load.callers.iter().map(|caller| caller.ended);
    Ok(Measured {
        calls_per_s: window.rate,
        ns_per_call_of_blocks: window.block_ns,
        slowest_vs_fastest: ended().min().unwrap_or(0) as f64
            / ended().max().unwrap_or(0).max(1) as f64,
        calls: sum(|caller| caller.ended),
        bad_replies: sum(|caller| caller.bad_replies),
        refused: sum(|caller| caller.refused),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use mlx5::Device;

    use super::super::contestant::Kind;
    use super::*;

    /// The fate of the calls whose number is a multiple of ten; all others get their reply.
    #[derive(Clone, Copy, PartialEq)]
    enum Tenth {
        Answered,
        Spoilt,
        Short,
        Doubled,
        OfAnother,
        Refused,
        Lost,
    }

    struct Fake {
        tenth: Tenth,
        calls: u64,
        replies: VecDeque<(u32, Option<Vec<u8>>)>,
    }

    impl Client for Fake {
        type Pending = ();

        fn open(_: &Case, _: &Device, _: usize, _: &[u8]) -> Result<((), Vec<u8>), Failure> {
            Ok(((), Vec::new()))
        }

        fn admitted((): (), _: &[u8]) -> Result<Self, Failure> {
            Err("made by the test".into())
        }

        /// Makes a call. Every third time there is no room.
        fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure> {
            self.calls += 1;
            if self.calls % 3 == 0 {
                return Ok(false);
            }
            let (tag, mut reply) = (Tag::of_request(request), vec![0; request.len()]);
            assert!(pattern::is_request(request, tag));
            pattern::fill_reply(&mut reply, tag);
            let replies = &mut self.replies;
            match self.tenth {
                _ if tag.number() % 10 != 0 => {}
                Tenth::Answered => {}
                Tenth::Spoilt => reply[0] ^= 1,
                Tenth::Short => drop(reply.pop()),
                Tenth::Doubled => replies.push_back((slot, Some(reply.clone()))),
                Tenth::OfAnother => {
                    pattern::fill_reply(&mut reply, Tag::new(tag.endpoint() + 1, tag.number()))
                }
                Tenth::Refused => {
                    replies.push_back((slot, None));
                    return Ok(true);
                }
                Tenth::Lost => return Ok(true),
            }
            replies.push_back((slot, Some(reply)));
            Ok(true)
        }

        fn poll(&mut self, mut ended: impl FnMut(u32, Option<&[u8]>)) -> Result<(), Failure> {
            self.replies
                .drain(..)
                .for_each(|(slot, reply)| ended(slot, reply.as_deref()));
            Ok(())
        }
    }

    fn run_with(
        tenth: Tenth,
        watch: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Measured, Failure> {
        let case = Case {
            kind: Kind::RcSend,
            clients: 2,
            depth: 3,
            payload_bytes: 40,
            group_size: 1,
            fault: None,
        };
        let time = Duration::from_millis(5);
        let pace = Pace {
            clock: Clock::monotonic(),
            wait: WaitStrategy::Busy,
            duration: time,
            silence: time,
        };
        let mut clients = [(); 2].map(|()| Fake {
            tenth,
            calls: 0,
            replies: VecDeque::new(),
        });
        run(&mut clients, &case, &pace, watch)
    }

    #[test]
    fn every_call_is_made_and_ends_and_is_checked() {
        for (tenth, is_bad) in [
            (Tenth::Answered, false),
            (Tenth::Spoilt, true),
            (Tenth::Short, true),
            (Tenth::Doubled, true),
            (Tenth::OfAnother, true),
        ] {
            let measured = run_with(tenth, &mut || Ok(())).unwrap();
            assert!(measured.calls >= BLOCK_CALLS && measured.calls_per_s > 0.0);
            assert!(
                (0.9..=1.0).contains(&measured.slowest_vs_fastest),
                "{measured:?}"
            );
            // One in ten of each client's calls, from its first on.
            let tenths = measured.calls.div_ceil(10)..=measured.calls / 10 + 2;
            assert_eq!((measured.bad_replies > 0, measured.refused), (is_bad, 0));
            assert!(
                !is_bad || tenths.contains(&measured.bad_replies),
                "{measured:?}"
            );
        }
    }

    #[test]
    fn a_call_that_was_not_executed_is_made_again() {
        let measured = run_with(Tenth::Refused, &mut || Ok(())).unwrap();
        assert_eq!(measured.bad_replies, 0);
        assert!(measured.refused >= measured.calls / 10, "{measured:?}");
    }

    #[test]
    fn calls_without_a_reply_end_the_measurement() {
        let failure = run_with(Tenth::Lost, &mut || Ok(()))
            .unwrap_err()
            .to_string();
        assert!(failure.contains("with 6 calls unanswered"), "{failure}");
    }

    #[test]
    fn a_job_that_is_over_ends_the_measurement() {
        let failure = run_with(Tenth::Lost, &mut || Err("rank 1 has died".into())).unwrap_err();
        assert_eq!(failure.to_string(), "rank 1 has died");
    }
}
