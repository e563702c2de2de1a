//! `--report-interval`: a line for each interval of a running job.
//!
//! Clients keep their counts in memory of their own. At the end of an interval the main thread of rank 0 asks for them: it changes a word
//! that each client looks at once a step, and a client that finds it changed copies its counts into a place of its own. The loops
//! that are measured write nothing between two intervals, and nothing at all without the option.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use engine::client::Tally;
use engine::phase::Phase;
use harness::report::{nanos, rate};
use shm::memfd::{Memfd, MemfdAttachError, MemfdCreateError, MemfdId};

use crate::progress::name_of;

/// Maximum number of clients of a rank.
pub const MAX_CLIENTS: usize = 256;
/// The answer of a client that has ended: its counts do not change any more.
const LAST: u32 = u32::MAX;

/// The question, and the answers of the clients of a rank, in memory that client processes map too. It starts as zero bytes.
#[derive(Debug)]
pub struct Tallies(Memfd);

#[repr(C)]
struct Words {
    /// Number of the last question, from 1.
    asked: AtomicU32,
    places: [Place; MAX_CLIENTS],
}

/// A client's place, in a cache line of its own, which only the client writes.
#[derive(Debug)]
#[repr(C, align(64))]
struct Place {
    /// Number of the question that the counts answer.
    answered: AtomicU32,
    ended: AtomicU64,
    outstanding_ns: AtomicU64,
}

const BYTES: usize = 20_480;
const _: () = assert!(size_of::<Words>() <= BYTES && align_of::<Words>() <= 4096);

impl Tallies {
    /// Creates the memory.
    ///
    /// # Errors
    /// The system's reason why there is no such memory.
    pub fn create() -> Result<Self, MemfdCreateError> {
        Memfd::create("benchkv-tallies", BYTES).map(Self)
    }

    /// Attaches to the memory of another process.
    ///
    /// # Errors
    /// The system's reason why it cannot be mapped.
    pub fn attach(id: &MemfdId) -> Result<Self, MemfdAttachError> {
        // Memory of another size is refused.
        Memfd::attach(&MemfdId { bytes: BYTES as u64, ..*id }, true).map(Self)
    }

    /// Returns the id by which other processes attach.
    #[must_use]
    pub fn id(&self) -> MemfdId {
        self.0.id()
    }

    fn words(&self) -> &Words {
        // SAFETY: the mapping is page-aligned, has BYTES (a peer's of another size is refused) and lives as long as `self`; a
        // `Words` is atomics only, valid for any bytes.
        unsafe { self.0.base().cast().as_ref() }
    }

    /// Returns the desk of client `number`, or `None` if there is no such place.
    #[must_use]
    pub fn desk(&self, number: usize) -> Option<Desk<'_>> {
        let Words { asked, places } = self.words();
        Some(Desk { asked, place: places.get(number)?, answered: 0 })
    }

    /// Asks the clients for their counts.
    fn ask(&self) {
        // Only the main thread writes it. A job of 32 hours, with 10 questions a second, ends long before the numbers do.
        self.words().asked.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the first `clients` have answered the last question.
    fn have_answered(&self, clients: usize) -> bool {
        let asked = self.words().asked.load(Ordering::Relaxed);
        // Acquire: pairs with the release in `Desk::tell`, so that the counts are at least as new.
        let answered = |place: &Place| place.answered.load(Ordering::Acquire);
        self.words().places.iter().take(clients).map(answered).all(|answered| answered == asked || answered == LAST)
    }

    /// Returns the sum of the last answers of the first `clients`.
    fn sum(&self, clients: usize) -> Tally {
        self.words().places.iter().take(clients).fold(Tally::default(), |sum, place| Tally {
            ended: sum.ended.wrapping_add(place.ended.load(Ordering::Relaxed)),
            outstanding_ns: sum.outstanding_ns.wrapping_add(place.outstanding_ns.load(Ordering::Relaxed)),
        })
    }
}

/// A client's side of the questions.
#[derive(Debug)]
pub struct Desk<'a> {
    asked: &'a AtomicU32,
    place: &'a Place,
    answered: u32,
}

impl Desk<'_> {
    /// Answers a question, if there is one that it has not answered.
    #[inline]
    pub fn look(&mut self, tally: impl FnOnce() -> Tally) {
        let asked = self.asked.load(Ordering::Relaxed);
        if asked != self.answered {
            self.tell(tally(), asked);
        }
    }

    /// Answers every later question too: the client ends.
    pub fn leave(mut self, tally: Tally) {
        self.tell(tally, LAST);
    }

    #[cold]
    fn tell(&mut self, Tally { ended, outstanding_ns }: Tally, answered: u32) {
        self.place.ended.store(ended, Ordering::Relaxed);
        self.place.outstanding_ns.store(outstanding_ns, Ordering::Relaxed);
        // Release: a thread that sees the number sees these counts.
        self.place.answered.store(answered, Ordering::Release);
        self.answered = answered;
    }
}

/// Decides when to ask, and takes the answers.
#[derive(Debug)]
pub struct Reporter<'a> {
    tallies: &'a Tallies,
    clients: usize,
    interval_ns: u64,
    begin_ns: u64,
    /// End of the current interval.
    end_ns: u64,
    /// When the last question was asked, and in which phase, while it is not answered.
    question: Option<(u64, Phase)>,
    /// Time and counts of the last line.
    last: (u64, Tally),
}

/// The operations between two questions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Its end, since the beginning of load.
    pub since_start: Duration,
    /// Its length, in ns; never 0.
    pub length_ns: u64,
    /// The phase in which it ended.
    pub phase: Phase,
    /// The difference of the counts.
    pub done: Tally,
}

impl<'a> Reporter<'a> {
    /// Begins at `now_ns`, for the first `clients` of `tallies`. `interval` is not zero.
    #[must_use]
    pub fn new(tallies: &'a Tallies, clients: usize, interval: Duration, now_ns: u64) -> Self {
        let interval_ns = (interval.as_nanos() as u64).max(1);
        let (begin_ns, end_ns, last) = (now_ns, now_ns + interval_ns, (now_ns, Tally::default()));
        Self { tallies, clients, interval_ns, begin_ns, end_ns, question: None, last }
    }

    /// Asks at the end of an interval, and returns it once all clients have answered, or at the end of the next: the operations of clients
    /// that have not answered then count in a later one. A caller that comes late gets one interval for several.
    pub fn look(&mut self, now_ns: u64, phase: Phase) -> Option<Interval> {
        if let Some((at_ns, phase)) = self.question {
            if !self.tallies.have_answered(self.clients) && now_ns < self.end_ns {
                return None;
            }
            self.question = None;
            let (from_ns, from) = self.last;
            let sum = self.tallies.sum(self.clients);
            self.last = (at_ns, sum);
            return Some(Interval {
                since_start: Duration::from_nanos(at_ns - self.begin_ns),
                length_ns: at_ns - from_ns,
                phase,
                done: Tally {
                    ended: sum.ended.wrapping_sub(from.ended),
                    outstanding_ns: sum.outstanding_ns.wrapping_sub(from.outstanding_ns),
                },
            });
        }
        if now_ns >= self.end_ns {
            self.tallies.ask();
            self.question = Some((now_ns, phase));
            self.end_ns = now_ns + self.interval_ns - (now_ns - self.begin_ns) % self.interval_ns;
        }
        None
    }
}

impl Interval {
    /// Returns the line of the interval in a job of `runs`, on rank 0 of `ranks`.
    #[must_use]
    pub fn line(&self, runs: usize, ranks: usize) -> impl fmt::Display {
        let Self { since_start, length_ns, phase, done: Tally { ended, outstanding_ns } } = *self;
        let (seconds, per_s) = (since_start.as_secs_f64(), ended as f64 * 1e9 / length_ns as f64);
        // Little's law: operations outstanding on average, by the rate at which they end.
        let time = if ended == 0 { String::new() } else { format!(", mean time {}", nanos(outstanding_ns as f64 / ended as f64)) };
        let name = name_of(phase, runs).unwrap_or_else(|| "between runs".to_owned());
        let ranks = if ranks == 1 { String::new() } else { format!(" (rank 0 of {ranks})") };
        format!("{seconds:8.2} s  {name:<12}  {ended:>12} operations  {:>12}{time}{ranks}", rate(per_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn tally(ended: u64, outstanding_ns: u64) -> Tally {
        Tally { ended, outstanding_ns }
    }

    fn no_question() -> Tally {
        unreachable!("nothing was asked")
    }

    #[test]
    fn an_interval_is_the_difference_between_two_answers() {
        let tallies = Tallies::create().unwrap();
        // As a client process has it.
        let others = Tallies::attach(&tallies.id()).unwrap();
        let (mut one, mut other) = (tallies.desk(0).unwrap(), others.desk(1).unwrap());
        let mut reporter = Reporter::new(&tallies, 2, Duration::from_millis(500), 7);
        assert_eq!(reporter.look(6 + 500 * MS, Phase::WarmUp), None);
        one.look(no_question);
        other.look(no_question);
        assert_eq!(reporter.look(7 + 500 * MS, Phase::WarmUp), None, "it asks");
        one.look(|| tally(1_000, 32 * 500 * MS));
        one.look(no_question);
        assert_eq!(reporter.look(8 + 510 * MS, Phase::Window(0)), None, "the other has not answered");
        other.look(|| tally(3_000, 32 * 500 * MS));
        let first = reporter.look(8 + 520 * MS, Phase::Window(0)).unwrap();
        let expected = Interval {
            since_start: Duration::from_millis(500),
            length_ns: 500 * MS,
            phase: Phase::WarmUp,
            done: tally(4_000, 64 * 500 * MS),
        };
        assert_eq!(first, expected);
        assert_eq!(first.line(3, 1).to_string(), "    0.50 s  warming up            4000 operations       8.0 k/s, mean time 8.00 ms");
        assert_eq!(reporter.look(8 + 530 * MS, Phase::Window(0)), None, "it is told once");
        // The main thread comes late.
        assert_eq!(reporter.look(7 + 1_250 * MS, Phase::Window(1)), None);
        one.look(|| tally(1_075, 32 * 1_250 * MS));
        other.look(|| tally(3_000, 32 * 500 * MS));
        let second = reporter.look(7 + 1_260 * MS, Phase::Between).unwrap();
        assert_eq!((second.length_ns, second.phase, second.done), (750 * MS, Phase::Window(1), tally(75, 32 * 750 * MS)));
        assert_eq!(
            second.line(3, 4).to_string(),
            "    1.25 s  run 2 of 3              75 operations        100 /s, mean time 320.00 ms (rank 0 of 4)"
        );
        // The next interval ends at its own time, not one length after the late question.
        assert_eq!(reporter.look(6 + 1_500 * MS, Phase::Between), None);
        one.look(no_question);
        assert_eq!(reporter.look(7 + 1_500 * MS, Phase::Between), None);
        one.look(|| tally(1_075, 0));
    }

    #[test]
    fn a_client_that_does_not_answer_holds_up_no_line_and_its_operations_count_later() {
        let tallies = Tallies::create().unwrap();
        let (mut quick, mut stopped) = (tallies.desk(0).unwrap(), tallies.desk(1).unwrap());
        let mut reporter = Reporter::new(&tallies, 2, Duration::from_millis(100), 0);
        assert_eq!(reporter.look(100 * MS, Phase::Window(0)), None);
        quick.look(|| tally(10, 0));
        assert_eq!(reporter.look(199 * MS, Phase::Window(0)), None);
        assert_eq!(reporter.look(200 * MS, Phase::Window(0)).map(|interval| interval.done.ended), Some(10));
        assert_eq!(reporter.look(201 * MS, Phase::Window(0)), None, "it asks again");
        quick.look(|| tally(20, 0));
        stopped.look(|| tally(7, 0));
        assert_eq!(reporter.look(202 * MS, Phase::Window(0)).map(|interval| interval.done.ended), Some(17));
    }

    #[test]
    fn a_client_that_has_ended_has_answered_all_questions() {
        let tallies = Tallies::create().unwrap();
        let mut reporter = Reporter::new(&tallies, 1, Duration::from_millis(100), 0);
        tallies.desk(0).unwrap().leave(tally(5, 50));
        for (at_ms, ended) in [(100, 5), (200, 0)] {
            assert_eq!(reporter.look(at_ms * MS, Phase::Window(0)), None);
            let interval = reporter.look((at_ms + 1) * MS, Phase::Window(0)).unwrap();
            assert_eq!(interval.done.ended, ended);
            let line = interval.line(1, 1).to_string();
            assert_eq!(line.contains("mean time"), ended > 0, "without an operation there is no time: {line}");
        }
        assert!(tallies.desk(MAX_CLIENTS).is_none());
    }
}
