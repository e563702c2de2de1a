//! Records the samples of one daemon into memory that is allocated at the start. A round has work
//! if it moves a message.

use copyrpc_shm::wait::WaitStrategy;
use serde::{Deserialize, Serialize};

use super::{Sample, Series};
use crate::counters::Round;
use crate::phase::Phase;

/// Maximum number of samples kept of a daemon.
const CAPACITY: usize = 1 << 15;
/// Length of the head of a series, in ns. The head begins with a daemon's first round with work,
/// and has a sample of each round with work. `HEAD_SAMPLES` is the maximum number of these samples,
/// which are never dropped.
const HEAD_NS: u64 = 1_000_000;
const HEAD_SAMPLES: usize = CAPACITY / 4;
/// Minimum time between two samples of a daemon that has nothing to do, in ns.
const IDLE_INTERVAL_NS: u64 = 1_000_000;
/// Rounds without work between two readings of the clock, for a daemon that does not sleep in
/// between.
const IDLE_ROUNDS_PER_LOOK: u32 = 64;

/// A series while it is recorded. In its head, each round with work is sampled. If the memory for
/// later samples is full, every second one of these samples is dropped, and the interval between
/// further samples is doubled. So a series covers the whole job, as densely as the memory permits.
#[derive(Debug)]
pub struct Recorder {
    interval: u64,
    idle_interval_ns: u64,
    idle_rounds_per_look: u32,
    capacity: usize,
    /// Number of samples of the head, which are never dropped. `head_capacity` is the maximum of
    /// this number, and is equal to it once the head is over.
    head: usize,
    head_capacity: usize,
    /// Time of the first round with work, in ns.
    worked_ns: Option<u64>,
    /// Time at which the warm-up began, in ns; `None` before.
    started_ns: Option<u64>,
    run: Option<u16>,
    /// Counters since the warm-up began.
    sum: Sample,
    /// Rounds with work since the last sample.
    busy: u64,
    /// Rounds without work since the last reading of the clock.
    idle: u32,
    series: Series,
    thinned: u64,
}

/// Numbers of samples of a recorded series.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceReport {
    /// Number of samples in the series.
    pub samples: u64,
    /// Number of samples that were taken and dropped again to make room.
    pub thinned: u64,
    /// Number of rounds with work between two samples, at the end of the job.
    pub interval: u64,
}

impl Recorder {
    /// Makes a recorder with a sample every `interval` rounds with work, for a daemon that waits by
    /// the strategy `wait` and has endpoints to the ranks `endpoints`.
    pub fn new(interval: u64, wait: WaitStrategy, endpoints: Vec<usize>) -> Self {
        let sleeps = wait == WaitStrategy::Event;
        Self {
            idle_rounds_per_look: if sleeps { 1 } else { IDLE_ROUNDS_PER_LOOK },
            head_capacity: HEAD_SAMPLES,
            ..Self::with_capacity(interval, CAPACITY, endpoints)
        }
    }

    fn with_capacity(interval: u64, capacity: usize, endpoints: Vec<usize>) -> Self {
        let by_endpoint = Vec::with_capacity(capacity * endpoints.len());
        Self {
            interval,
            idle_interval_ns: IDLE_INTERVAL_NS,
            idle_rounds_per_look: IDLE_ROUNDS_PER_LOOK,
            capacity,
            head: 0,
            head_capacity: 0,
            worked_ns: None,
            started_ns: None,
            run: None,
            sum: Sample::default(),
            busy: 0,
            idle: 0,
            series: Series {
                samples: Vec::with_capacity(capacity),
                endpoints,
                by_endpoint,
            },
            thinned: 0,
        }
    }

    /// Notes a round. `gauges` returns the daemon's sample, in which time, run and the counters of
    /// rounds are not set and all other counters have their current totals. It also appends the
    /// number of unanswered requests of each endpoint.
    pub fn note(
        &mut self,
        phase: Phase,
        round: Round,
        now_ns: impl FnOnce() -> u64,
        gauges: impl FnOnce(&mut Vec<u32>) -> Sample,
    ) {
        if self.started_ns.is_none() && phase == Phase::Ready {
            return;
        }
        self.run = match phase {
            Phase::Window(run) => Some(run),
            _ => None,
        };
        self.sum.loops += 1;
        self.sum.cqes += round.cqes as u64;
        self.sum.moved += round.moved as u64;
        if round.moved > 0 {
            self.busy += 1;
        } else {
            self.idle += 1;
        }
        let is_first = self.head < self.head_capacity && round.moved > 0;
        if is_first
            || self.series.samples.is_empty()
            || self.busy >= self.interval
            || self.idle >= self.idle_rounds_per_look
        {
            self.look(now_ns(), is_first, gauges);
        }
    }

    #[cold]
    fn look(
        &mut self,
        now_ns: u64,
        mut is_first: bool,
        gauges: impl FnOnce(&mut Vec<u32>) -> Sample,
    ) {
        self.idle = 0;
        let time_ns = now_ns.saturating_sub(*self.started_ns.get_or_insert(now_ns));
        if is_first && now_ns.saturating_sub(*self.worked_ns.get_or_insert(now_ns)) > HEAD_NS {
            (self.head_capacity, is_first) = (self.head, false);
        }
        let last = self.series.samples.last();
        let is_quiet =
            last.is_some_and(|last| time_ns.saturating_sub(last.time_ns) < self.idle_interval_ns);
        if !is_first && self.busy < self.interval && is_quiet {
            return;
        }
        self.busy = 0;
        if self.series.samples.len() == self.capacity {
            self.thin();
        }
        let gauges = gauges(&mut self.series.by_endpoint);
        self.series.samples.push(Sample {
            time_ns,
            run: self.run,
            loops: self.sum.loops,
            cqes: self.sum.cqes,
            moved: self.sum.moved,
            ..gauges
        });
        if is_first {
            self.head = self.series.samples.len();
        }
    }

    fn thin(&mut self) {
        let Series {
            samples,
            endpoints,
            by_endpoint,
        } = &mut self.series;
        let (before, head) = (samples.len(), self.head);
        let is_kept = |sample: usize| sample < head || (sample - head) % 2 == 0;
        let (mut number, mut value) = (0.., 0..);
        samples.retain(|_| number.next().is_some_and(is_kept));
        let is_kept_value = |value: usize| is_kept(value / endpoints.len());
        by_endpoint.retain(|_| value.next().is_some_and(is_kept_value));
        self.thinned += (before - samples.len()) as u64;
        self.interval *= 2;
        self.idle_interval_ns *= 2;
    }

    /// Returns the series.
    pub fn series(&self) -> &Series {
        &self.series
    }

    /// Returns the numbers of samples of the series.
    pub fn report(&self) -> TraceReport {
        TraceReport {
            samples: self.series.samples.len() as u64,
            thinned: self.thinned,
            interval: self.interval,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Round = Round {
        moved: 3,
        cqes: 1,
        outstanding: 0,
        is_part: false,
    };
    const IDLE: Round = Round {
        moved: 0,
        cqes: 0,
        outstanding: 0,
        is_part: false,
    };

    fn times(recorder: &Recorder) -> Vec<u64> {
        recorder
            .series()
            .samples
            .iter()
            .map(|sample| sample.time_ns)
            .collect()
    }

    #[test]
    fn a_sample_is_taken_every_so_many_rounds_that_did_something() {
        let mut recorder = Recorder {
            head_capacity: 0,
            ..Recorder::new(3, WaitStrategy::Busy, Vec::new())
        };
        recorder.note(
            Phase::Ready,
            BUSY,
            || unreachable!("nothing is recorded before the warm-up"),
            |_| Sample::default(),
        );
        for now_ns in 100..110 {
            let phase = if now_ns < 104 {
                Phase::WarmUp
            } else {
                Phase::Window(2)
            };
            recorder.note(
                phase,
                BUSY,
                || now_ns,
                |_| Sample {
                    writes: now_ns,
                    held: 7,
                    ..Sample::default()
                },
            );
        }
        assert_eq!(
            times(&recorder),
            [0, 3, 6, 9],
            "the first round, then each third"
        );
        let [first, .., last] = recorder.series().samples.as_slice() else {
            panic!("some")
        };
        assert_eq!((first.run, last.run), (None, Some(2)));
        assert_eq!(
            (last.loops, last.moved, last.cqes, last.writes, last.held),
            (10, 30, 10, 109, 7)
        );
    }

    #[test]
    fn an_idle_daemon_is_sampled_by_time() {
        let mut recorder = Recorder::new(1000, WaitStrategy::Yield, Vec::new());
        let mut looks = 0;
        for round in 0..640_u64 {
            let now_ns = || {
                looks += 1;
                round * 10_000
            };
            recorder.note(Phase::WarmUp, IDLE, now_ns, |_| Sample::default());
        }
        assert_eq!(looks, 10, "the clock is not read in every round");
        let spaced = times(&recorder)
            .windows(2)
            .all(|pair| pair[1] - pair[0] >= IDLE_INTERVAL_NS);
        assert!(
            spaced && recorder.series().samples.len() == 5,
            "{:?}",
            times(&recorder)
        );
    }

    #[test]
    fn a_daemon_that_sleeps_is_sampled_when_it_wakes() {
        let mut recorder = Recorder::new(1000, WaitStrategy::Event, Vec::new());
        (0..5).for_each(|round| {
            recorder.note(
                Phase::WarmUp,
                IDLE,
                || round * 100_000_000,
                |_| Sample::default(),
            )
        });
        assert_eq!(
            times(&recorder),
            [0, 100_000_000, 200_000_000, 300_000_000, 400_000_000]
        );
    }

    #[test]
    fn a_series_that_would_not_fit_is_thinned_over_all_of_its_length() {
        let mut recorder = Recorder::with_capacity(1, 8, vec![3, 5]);
        let memory = |recorder: &Recorder| {
            (
                recorder.series.samples.as_ptr(),
                recorder.series.by_endpoint.as_ptr(),
            )
        };
        let before = memory(&recorder);
        for now_ns in 0..100 {
            let gauges = |values: &mut Vec<u32>| {
                values.extend([now_ns as u32, 7]);
                Sample::default()
            };
            recorder.note(Phase::WarmUp, BUSY, || now_ns, gauges);
        }
        assert_eq!(times(&recorder), [0, 16, 32, 48, 64, 80, 96]);
        assert_eq!(
            recorder.report(),
            TraceReport {
                samples: 7,
                thinned: 16,
                interval: 16
            }
        );
        assert!(
            recorder
                .series()
                .rows()
                .all(|(sample, values)| *values == [sample.time_ns as u32, 7]),
            "{:?}",
            recorder.series()
        );
        assert_eq!(memory(&recorder), before, "nothing was allocated");
    }

    /// A burst at the beginning is over before the interval has passed once.
    #[test]
    fn the_first_millisecond_of_work_has_every_round_and_is_never_thinned() {
        let mut recorder = Recorder {
            head_capacity: 1000,
            ..Recorder::with_capacity(64, 512, Vec::new())
        };
        let memory = recorder.series.samples.as_ptr();
        recorder.note(Phase::WarmUp, IDLE, || 0, |_| Sample::default());
        // From 5 ms on there is a round every 10 us.
        for round in 0..100_000 {
            recorder.note(
                Phase::WarmUp,
                BUSY,
                || 5_000_000 + round * 10_000,
                |_| Sample::default(),
            );
        }
        let expected: Vec<u64> = [0]
            .into_iter()
            .chain((0..=100).map(|round| 5_000_000 + round * 10_000))
            .collect();
        assert_eq!(times(&recorder)[..102], expected);
        assert!(
            times(&recorder)[102] > 6_000_000
                && recorder.report().thinned > 0
                && recorder.report().interval > 64
        );
        assert_eq!(
            recorder.series.samples.as_ptr(),
            memory,
            "nothing was allocated"
        );
        let mut short = Recorder {
            head_capacity: 10,
            ..Recorder::with_capacity(64, 512, Vec::new())
        };
        (0..1000)
            .for_each(|now_ns| short.note(Phase::WarmUp, BUSY, || now_ns, |_| Sample::default()));
        assert_eq!(
            (short.head, times(&short)[..10].to_vec()),
            (10, (0..10).collect()),
            "no more than there is room for"
        );
    }

    #[test]
    fn time_that_stands_still_or_goes_back_is_no_harm() {
        let mut recorder = Recorder::new(1, WaitStrategy::Busy, Vec::new());
        for now_ns in [50, 50, 20, 60] {
            recorder.note(Phase::WarmUp, BUSY, || now_ns, |_| Sample::default());
        }
        assert_eq!(times(&recorder), [0, 0, 0, 10]);
    }
}
