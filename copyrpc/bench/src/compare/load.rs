//! The load, for every transport: each client keeps a fixed number of calls unanswered, and every
//! reply is checked. One thread runs all clients.

use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::hist::LatencyHistogram;
use benchkv_harness::load::{BLOCK_CALLS, BLOCK_TRIPS};
use benchkv_harness::pattern::{self, Tag};
use copyrpc_shm::wait::{WaitStrategy, Waiter};

use super::calls::{Book, Calls, Content, Shared};
use super::case::{Case, Fault, Length, Settings};
use super::contestant::{Client, Counters};

/// Number of rounds without a reply between two calls of `check`: `IDLE_ROUNDS` while rounds poll,
/// `SLEEPING_ROUNDS` while they sleep.
const IDLE_ROUNDS: u32 = 4096;
const SLEEPING_ROUNDS: u32 = 16;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) clock: Clock,
    pub(crate) wait: WaitStrategy,
    pub(crate) warmup: Duration,
    pub(crate) length: Length,
    pub(crate) is_timed: bool,
    /// Maximum time without a reply while calls are unanswered; longer silence is a failure.
    pub(crate) silence: Duration,
}

#[derive(Debug, Clone)]
pub(crate) struct Measured {
    /// Number of calls of all clients that ended in the measured window, and the window's length.
    pub(crate) calls: u64,
    pub(crate) elapsed_ns: u64,
    /// Median, over blocks of calls, of the time per call; with one call at a time this is the
    /// round trip. A short time without a core does not change the median.
    pub(crate) ns_per_call_of_blocks: f64,
    /// Round-trip times of the timed calls in ns, from before a call to its end.
    pub(crate) round_trips: LatencyHistogram,
    /// Number of calls of the slowest client, divided by the number of calls of the fastest client.
    pub(crate) slowest_vs_fastest: f64,
    /// Number of all calls that were made, warm-up included; each has ended.
    pub(crate) calls_made: u64,
    pub(crate) bad_replies: u64,
    /// Number of calls that the server did not execute, and that were made again.
    pub(crate) refused: u64,
    pub(crate) counters: Counters,
}

impl Measured {
    pub(crate) fn calls_per_s(&self) -> f64 {
        self.calls as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    pub(crate) fn ns_per_call(&self) -> f64 {
        self.elapsed_ns as f64 / self.calls.max(1) as f64
    }
}

/// Requests and replies whose bytes follow from the tag of their call ([`pattern`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patterns(pub(crate) Settings);

impl Content for Patterns {
    #[inline]
    fn request(&mut self, _: u32, tag: Tag, request: &mut [u8]) {
        if self.0.verify {
            pattern::fill_request(request, tag);
            Fault::CorruptRequest.inject(self.0.fault, tag.number(), request);
        }
    }

    #[inline]
    fn reply(&mut self, _: u32, tag: Tag, reply: &[u8]) -> Option<u64> {
        let settings = &self.0;
        let is_right = || {
            reply.len() == settings.reply_bytes()
                && pattern::is_reply(reply, tag.within(settings.payload_bytes))
        };
        (!settings.verify || is_right()).then_some(1)
    }
}

#[derive(Debug)]
pub(crate) struct Caller<C, W> {
    pub(crate) client: C,
    pub(crate) book: Book<W>,
}

impl<C: Client, W: Content> Caller<C, W> {
    /// Makes the caller of client `number`. Each of the client's `endpoints` endpoints keeps
    /// `depth` calls unanswered.
    pub(crate) fn new(
        client: C,
        content: W,
        number: usize,
        endpoints: usize,
        depth: usize,
    ) -> Self {
        let book = Book::new(content, number, endpoints, depth);
        Self { client, book }
    }

    /// Makes a call from every free slot.
    #[inline]
    pub(crate) fn call(&mut self, shared: &mut Shared) -> Result<(), Failure> {
        let Self { client, book } = self;
        let mut calls = Calls { book, shared };
        while calls.again(|slot, request| client.issue(slot, request))? {}
        Ok(())
    }

    #[inline]
    pub(crate) fn take(&mut self, shared: &mut Shared) -> Result<(), Failure> {
        let Self { client, book } = self;
        client.poll(&mut Calls { book, shared })
    }
}

type Watch<'a> = dyn FnMut() -> Result<(), Failure> + 'a;

pub(crate) struct Load<'a, C> {
    callers: Vec<Caller<C, Patterns>>,
    shared: Shared,
    /// Number of calls of a block, whose time is recorded.
    block: u64,
    pace: &'a Pace,
    waiter: Waiter,
    idle_rounds: u32,
    /// Time of the first `check` since the last reply, in ns.
    silent_since_ns: Option<u64>,
}

impl<'a, C: Client> Load<'a, C> {
    pub(crate) fn new(clients: Vec<C>, case: &Case, pace: &'a Pace) -> Self {
        let caller = |(number, client)| {
            let content = Patterns(case.settings);
            Caller::new(client, content, number, case.endpoints, case.depth)
        };
        let is_round_trip = case.clients * case.endpoints * case.depth == 1;
        let block = if is_round_trip {
            BLOCK_TRIPS
        } else {
            BLOCK_CALLS
        };
        Self {
            callers: clients.into_iter().enumerate().map(caller).collect(),
            shared: Shared::new(pace.clock, case.settings.payload_bytes),
            block,
            pace,
            waiter: pace.wait.waiter(),
            idle_rounds: 0,
            silent_since_ns: None,
        }
    }

    /// Keeps every client at its depth for a warm-up and then for the measured time; after each,
    /// all calls end. When no reply arrives, calls `watch`, which returns an error with the reason
    /// if the job has ended.
    pub(crate) fn run(&mut self, watch: &mut Watch<'_>) -> Result<Measured, Failure> {
        let warmup = Length::Seconds(self.pace.warmup.as_secs_f64());
        self.phase(warmup, false, watch)?;
        let (calls, elapsed_ns, blocks) =
            self.phase(self.pace.length, self.pace.is_timed, watch)?;
        let books = || self.callers.iter().map(|caller| &caller.book);
        let sum = |count: fn(&Book<Patterns>) -> u64| books().map(count).sum();
        let ended = || books().map(|book| book.ended);
        let mut counters = Counters::new();
        let clients = self.callers.iter().map(|caller| &caller.client);
        for (name, count) in clients.flat_map(Client::counters) {
            *counters.entry(name).or_default() += count;
        }
        let (least, most) = (ended().min().unwrap_or(0), ended().max().unwrap_or(0));
        Ok(Measured {
            calls,
            elapsed_ns,
            ns_per_call_of_blocks: blocks.summary().p50 as f64 / 1e3,
            round_trips: std::mem::take(&mut self.shared.round_trips),
            slowest_vs_fastest: least as f64 / most.max(1) as f64,
            calls_made: sum(|book| book.ended),
            bad_replies: sum(|book| book.bad_replies),
            refused: sum(|book| book.refused),
            counters,
        })
    }

    /// Keeps the load up for `length`, then lets all calls end. Returns the number of calls that
    /// ended in the window, the window's length in ns, and the picoseconds per call of each block.
    fn phase(
        &mut self,
        length: Length,
        is_timed: bool,
        watch: &mut Watch<'_>,
    ) -> Result<(u64, u64, LatencyHistogram), Failure> {
        let (calls, limit_ns) = match length {
            Length::Calls(calls) => (calls, u64::MAX),
            Length::Seconds(seconds) => (u64::MAX, (seconds * 1e9) as u64),
        };
        let (clock, mut blocks) = (self.pace.clock, LatencyHistogram::new());
        let start_ns = clock.now_ns();
        (self.shared.left, self.shared.ended) = (calls, 0);
        self.shared.is_timed = is_timed;
        for caller in &mut self.callers {
            caller.book.start(start_ns);
        }
        let (mut block_ns, mut counted) = (start_ns, 0);
        while counted < calls && block_ns - start_ns < limit_ns {
            let block = (counted + self.block).min(calls);
            while self.shared.ended < block {
                self.round(watch)?;
            }
            let now_ns = clock.now_ns();
            blocks.record((now_ns - block_ns) * 1000 / (self.shared.ended - counted));
            (block_ns, counted) = (now_ns, self.shared.ended);
        }
        (self.shared.left, self.shared.is_timed) = (0, false);
        while self.unanswered() > 0 {
            self.round(watch)?;
        }
        Ok((counted, block_ns - start_ns, blocks))
    }

    /// Lets each client make calls and take replies once. Waits if no reply arrived.
    #[inline]
    fn round(&mut self, watch: &mut Watch<'_>) -> Result<(), Failure> {
        let before = self.shared.ended;
        for caller in &mut self.callers {
            caller.call(&mut self.shared)?;
            caller.take(&mut self.shared)?;
        }
        if self.shared.ended > before {
            self.waiter.busy();
            (self.idle_rounds, self.silent_since_ns) = (0, None);
            return Ok(());
        }
        let Self {
            waiter, callers, ..
        } = self;
        let mut slept = None;
        waiter.idle(|| slept = callers.first().map(|caller| caller.client.sleep()));
        let rounds = if slept.is_some() {
            SLEEPING_ROUNDS
        } else {
            IDLE_ROUNDS
        };
        slept.unwrap_or(Ok(()))?;
        self.idle_rounds += 1;
        if self.idle_rounds % rounds == 0 {
            self.check(watch)?;
        }
        Ok(())
    }

    /// Calls `watch`. Fails if there was no reply for longer than the pace allows.
    #[cold]
    fn check(&mut self, watch: &mut Watch<'_>) -> Result<(), Failure> {
        watch()?;
        let now_ns = self.pace.clock.now_ns();
        let since_ns = *self.silent_since_ns.get_or_insert(now_ns);
        let silence = Duration::from_nanos(now_ns.saturating_sub(since_ns));
        if silence < self.pace.silence {
            return Ok(());
        }
        let calls = self.unanswered();
        Err(format!(
            "no reply for {silence:?} with {calls} calls unanswered: lost, or the server is stopped"
        )
        .into())
    }

    fn unanswered(&self) -> usize {
        let books = self.callers.iter().map(|caller| &caller.book);
        books.map(Book::unanswered).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use mlx5::Device;

    use super::super::case::Kind;
    use super::super::case::tests::case;
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

        fn poll<W: Content>(&mut self, calls: &mut Calls<'_, W>) -> Result<(), Failure> {
            self.replies
                .drain(..)
                .for_each(|(slot, reply)| calls.ended(slot, reply.as_deref()));
            Ok(())
        }
    }

    fn run_with(
        tenth: Tenth,
        length: Length,
        watch: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Measured, Failure> {
        let case = case(Kind::RcSend, 3, "--payload 40");
        let time = Duration::from_millis(5);
        let pace = Pace {
            clock: Clock::monotonic(),
            wait: WaitStrategy::Busy,
            warmup: Duration::ZERO,
            length,
            is_timed: true,
            silence: time,
        };
        let clients = [(); 2].map(|()| Fake {
            tenth,
            calls: 0,
            replies: VecDeque::new(),
        });
        Load::new(clients.into(), &case, &pace).run(watch)
    }

    const TIME: Length = Length::Seconds(0.005);

    #[test]
    fn every_call_is_made_and_ends_and_is_checked() {
        for (tenth, is_bad) in [
            (Tenth::Answered, false),
            (Tenth::Spoilt, true),
            (Tenth::Short, true),
            (Tenth::Doubled, true),
            (Tenth::OfAnother, true),
        ] {
            let measured = run_with(tenth, TIME, &mut || Ok(())).unwrap();
            assert!(measured.calls >= BLOCK_CALLS && measured.calls_per_s() > 0.0);
            assert!(
                (0.9..=1.0).contains(&measured.slowest_vs_fastest),
                "{measured:?}"
            );
            // If calls are bad, every tenth call of each client is bad, beginning with the client's
            // first.
            let made = measured.calls_made;
            let tenths = made.div_ceil(10)..=made / 10 + 2;
            assert_eq!((measured.bad_replies > 0, measured.refused), (is_bad, 0));
            assert!(
                !is_bad || tenths.contains(&measured.bad_replies),
                "{measured:?}"
            );
        }
    }

    #[test]
    fn a_number_of_calls_is_made_and_timed_exactly() {
        for calls in [1, 7, 5000] {
            let measured = run_with(Tenth::Answered, Length::Calls(calls), &mut || Ok(())).unwrap();
            let timed = measured.round_trips.count();
            assert_eq!(
                (measured.calls, measured.calls_made, timed),
                (calls, calls, calls)
            );
        }
    }

    #[test]
    fn a_call_that_was_not_executed_is_made_again() {
        let measured = run_with(Tenth::Refused, TIME, &mut || Ok(())).unwrap();
        assert_eq!(measured.bad_replies, 0);
        assert!(measured.refused >= measured.calls_made / 10, "{measured:?}");
        // Refused calls are not counted.
        let measured = run_with(Tenth::Refused, Length::Calls(100), &mut || Ok(())).unwrap();
        assert_eq!(measured.calls_made, 100);
        assert!(measured.refused > 0);
    }

    #[test]
    fn calls_without_a_reply_end_the_measurement() {
        let failure = run_with(Tenth::Lost, TIME, &mut || Ok(()))
            .unwrap_err()
            .to_string();
        assert!(failure.contains("with 6 calls unanswered"), "{failure}");
    }

    #[test]
    fn a_job_that_is_over_ends_the_measurement() {
        let failure =
            run_with(Tenth::Lost, TIME, &mut || Err("rank 1 has died".into())).unwrap_err();
        assert_eq!(failure.to_string(), "rank 1 has died");
    }
}
