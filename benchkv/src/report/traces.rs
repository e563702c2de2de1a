//! Time series of daemons, as `--trace` writes them. Each is reduced to as many bins as a chart can
//! show.

use super::page::Cell;
use crate::trace::TraceFile;
use engine::trace::{Sample, Series};
use harness::Failure;
use harness::chart::axis::Axis;
use harness::chart::{self, Lines, Point};
use harness::report::nanos;

/// Number of bins of a series.
const BINS: usize = 240;
/// Length of the head of a series, which has a sample of every round, in ns; and the number of
/// charts of it, out of [`COURSES`].
const HEAD_NS: u64 = 1_000_000;
const HEAD_COURSES: usize = 3;
/// Maximum number of daemons in one chart.
const TOGETHER: usize = 7;

/// The series of one daemon, in bins of equal length. A bin without a sample is left out.
#[derive(Debug)]
pub(super) struct Trace {
    name: String,
    bins: Vec<Bin>,
    /// The bins of its first millisecond with work, in which every round was sampled.
    head: Vec<Bin>,
    begin: Begin,
    /// Beginnings and ends of measured runs, in nanoseconds.
    runs: Vec<(f64, f64)>,
    /// The series of its endpoints.
    pub(super) endpoints: Vec<Trace>,
}

/// The beginning of a series, and its steady state: numbers of requests outstanding to other ranks
/// with their times, from the beginning of the warm-up on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Begin {
    /// The first requests.
    burst: Option<(u64, u64)>,
    /// The maximum before the number fell for the first time.
    saturated: Option<(u64, u64)>,
    /// The maximum of the whole series.
    peak: Option<(u64, u64)>,
    /// In measured runs: the 5th and the 95th percentile of the samples.
    steady: Option<(u64, u64)>,
    /// Completions per round, in measured runs.
    batch: f64,
}

impl Begin {
    fn of(samples: &[Sample]) -> Self {
        let at = |sample: &Sample| (sample.time_ns, sample.outstanding);
        let start = samples
            .iter()
            .position(|sample| sample.outstanding > 0)
            .unwrap_or(samples.len());
        let working = samples.get(start..).unwrap_or_default();
        let rising = working
            .windows(2)
            .position(|pair| matches!(pair, [a, b] if b.outstanding < a.outstanding));
        let peak = working
            .iter()
            .max_by_key(|sample| (sample.outstanding, std::cmp::Reverse(sample.time_ns)));
        let measured: Vec<&Sample> = samples
            .iter()
            .filter(|sample| sample.run.is_some())
            .collect();
        let mut steady: Vec<u64> = measured.iter().map(|sample| sample.outstanding).collect();
        steady.sort_unstable();
        let quantile = |twentieths: usize| {
            steady
                .get(steady.len().saturating_sub(1) * twentieths / 20)
                .copied()
        };
        let grown = |counter: fn(&Sample) -> u64| {
            measured
                .first()
                .zip(measured.last())
                .map_or(0, |(first, last)| {
                    counter(last).saturating_sub(counter(first))
                })
        };
        Self {
            burst: working.first().map(at),
            saturated: rising.and_then(|last| working.get(last)).map(at),
            peak: peak.map(at),
            steady: quantile(1).zip(quantile(19)),
            batch: grown(|sample| sample.cqes) as f64 / grown(|sample| sample.loops).max(1) as f64,
        }
    }
}

/// Returns a table of the beginning of each series, and its steady state.
pub(super) fn begins(traces: &[Trace]) -> (Vec<Cell>, Vec<Vec<Cell>>) {
    let names = [
        "first burst",
        "at",
        "saturated",
        "at",
        "peak",
        "at",
        "steady, 5 % to 95 %",
        "completions a round",
    ];
    let header = [Cell::Text("daemon".to_owned())]
        .into_iter()
        .chain(names.map(|name| Cell::Figure(name.to_owned())))
        .collect();
    let row = |Trace { name, begin, .. }: &Trace| {
        let point = |point: Option<(u64, u64)>| match point {
            Some((time_ns, outstanding)) => [outstanding.to_string(), nanos(time_ns as f64)],
            None => ["-".to_owned(), "-".to_owned()],
        };
        let steady = begin
            .steady
            .map_or_else(|| "-".to_owned(), |(low, high)| format!("{low} to {high}"));
        let figures = [
            point(begin.burst),
            point(begin.saturated),
            point(begin.peak),
            [steady, format!("{:.3}", begin.batch)],
        ]
        .concat();
        [Cell::Text(name.clone())]
            .into_iter()
            .chain(figures.into_iter().map(Cell::Figure))
            .collect()
    };
    (header, traces.iter().map(row).collect())
}

/// The values of a time bin.
#[derive(Debug, Clone, Copy)]
struct Bin {
    /// End of the bin.
    time_ns: f64,
    /// Last sample of the bin, which has the counters.
    last: Sample,
    /// The sample before the bin's first; for the first bin, its own first sample.
    before: Sample,
    /// Means over the samples of the bin.
    outstanding: f64,
    backlog: f64,
    held: f64,
    hold_ns: f64,
}

impl Bin {
    /// Returns the increase of a counter per second.
    fn per_s(&self, counter: fn(&Sample) -> u64) -> Option<f64> {
        let elapsed_ns = self.last.time_ns.saturating_sub(self.before.time_ns);
        (elapsed_ns > 0).then(|| self.grown(counter) * 1e9 / elapsed_ns as f64)
    }

    /// Returns the growth of one counter for each of another, if that grew.
    fn ratio(&self, counter: fn(&Sample) -> u64, of: fn(&Sample) -> u64) -> Option<f64> {
        let of = self.grown(of);
        (of > 0.0).then(|| self.grown(counter) / of)
    }

    fn grown(&self, counter: fn(&Sample) -> u64) -> f64 {
        counter(&self.last).saturating_sub(counter(&self.before)) as f64
    }
}

impl Trace {
    /// Reads a file.
    pub(super) fn read(file: &TraceFile) -> Result<Self, Failure> {
        let (name, series) = (
            format!("rank {}, daemon {}", file.rank, file.daemon),
            file.read()?,
        );
        Ok(Self {
            endpoints: Self::by_endpoint(&name, &series),
            ..Self::new(name, &series.samples)
        })
    }

    /// Returns the series of each endpoint, which has times, work and requests outstanding.
    fn by_endpoint(daemon: &str, series: &Series) -> Vec<Self> {
        let of = |(at, rank): (usize, &usize)| {
            let outstanding = |values: &[u32]| values.get(at).copied().unwrap_or_default().into();
            let sample = |(all, values): (&Sample, &[u32])| {
                let Sample {
                    time_ns,
                    run,
                    moved,
                    ..
                } = *all;
                Sample {
                    time_ns,
                    run,
                    moved,
                    outstanding: outstanding(values),
                    ..Sample::default()
                }
            };
            Self::new(
                format!("{daemon}, to rank {rank}"),
                &series.rows().map(sample).collect::<Vec<_>>(),
            )
        };
        series.endpoints.iter().enumerate().map(of).collect()
    }

    fn new(name: String, samples: &[Sample]) -> Self {
        let windows = samples
            .chunk_by(|a, b| a.run == b.run)
            .filter(|window| window.first().is_some_and(|sample| sample.run.is_some()));
        let ends = |window: &[Sample]| {
            Some((
                window.first()?.time_ns as f64,
                window.last()?.time_ns as f64,
            ))
        };
        let worked = samples
            .iter()
            .position(|sample| sample.moved > 0)
            .unwrap_or(samples.len());
        let first_ns = samples.get(worked).map_or(0, |sample| sample.time_ns);
        let is_first = |sample: &&Sample| sample.time_ns.saturating_sub(first_ns) <= HEAD_NS;
        let head: Vec<Sample> = samples
            .get(worked..)
            .unwrap_or_default()
            .iter()
            .take_while(is_first)
            .copied()
            .collect();
        let relative = |sample: &Sample| Sample {
            time_ns: sample.time_ns.saturating_sub(first_ns),
            ..*sample
        };
        let head = bins(&head.iter().map(relative).collect::<Vec<_>>());
        Self {
            name,
            bins: bins(samples),
            head,
            begin: Begin::of(samples),
            runs: windows.filter_map(ends).collect(),
            endpoints: Vec::new(),
        }
    }
}

/// Sorts samples into bins of equal length.
fn bins(samples: &[Sample]) -> Vec<Bin> {
    let end_ns = samples
        .iter()
        .map(|sample| sample.time_ns)
        .max()
        .unwrap_or(0)
        .saturating_add(1);
    let bin_of =
        |sample: &Sample| (u128::from(sample.time_ns) * BINS as u128 / u128::from(end_ns)) as usize;
    let mut before = samples.first().copied().unwrap_or_default();
    let mut bins = Vec::new();
    for alike in samples.chunk_by(|a, b| bin_of(a) == bin_of(b)) {
        let Some(last) = alike.last().copied() else {
            continue;
        };
        let mean = |gauge: fn(&Sample) -> u64| {
            alike.iter().map(|sample| gauge(sample) as f64).sum::<f64>() / alike.len() as f64
        };
        bins.push(Bin {
            time_ns: (bin_of(&last) + 1) as f64 * end_ns as f64 / BINS as f64,
            last,
            before,
            outstanding: mean(|sample| sample.outstanding),
            backlog: mean(|sample| sample.backlog),
            held: mean(|sample| sample.held),
            hold_ns: mean(|sample| sample.hold_ns),
        });
        before = last;
    }
    bins
}

/// The quantity of an axis, with its unit.
#[derive(Debug, Clone, Copy)]
enum Quantity {
    Plain(&'static str),
    Rate(&'static str),
    Time(&'static str),
}

impl Quantity {
    fn axis(self, values: impl Iterator<Item = f64>) -> Axis {
        match self {
            Self::Plain(what) => Axis::plain(what, values),
            Self::Rate(unit) => Axis::rates("rate", unit, values),
            Self::Time(what) => Axis::times_from_zero(what, values),
        }
    }
}

/// A chart over time: its title, the quantity of its axis, and the drawn value where it is known.
type Course = (&'static str, Quantity, fn(&Bin) -> Option<f64>);

const COURSES: [Course; 8] = [
    (
        "Requests outstanding to other ranks",
        Quantity::Plain("outstanding (requests)"),
        |bin| Some(bin.outstanding),
    ),
    (
        "Messages in a WRITE",
        Quantity::Plain("batch (messages per WRITE)"),
        |bin| bin.ratio(|one| one.messages, |one| one.writes),
    ),
    (
        "Completions in a round",
        Quantity::Plain("batch (completions per round)"),
        |bin| bin.ratio(|one| one.cqes, |one| one.loops),
    ),
    ("WRITEs to other ranks", Quantity::Rate("WRITEs/s"), |bin| {
        bin.per_s(|sample| sample.writes)
    }),
    ("Rounds of a daemon", Quantity::Rate("rounds/s"), |bin| {
        bin.per_s(|sample| sample.loops)
    }),
    ("Hold of answers", Quantity::Time("hold"), |bin| {
        Some(bin.hold_ns)
    }),
    ("Answers held", Quantity::Plain("held (answers)"), |bin| {
        Some(bin.held)
    }),
    ("Backlog", Quantity::Plain("waiting (requests)"), |bin| {
        Some(bin.backlog)
    }),
];

/// Returns a chart for each quantity that is not always zero, for each few daemons: of the whole
/// job, or of the first millisecond with work.
pub(super) fn figures(traces: &[Trace], of_head: bool) -> Vec<String> {
    let (note, since) = if of_head {
        (
            format!("Means of {BINS} bins."),
            "since the first round with work",
        )
    } else {
        (
            format!("Means of {BINS} bins. Shaded: measured runs."),
            "since the warm-up began",
        )
    };
    let chart = |&(title, quantity, value): &Course, traces: &[Trace]| {
        let series: Vec<chart::Series> = traces
            .iter()
            .map(|trace| over_time(trace, of_head, value))
            .collect();
        let values: Vec<f64> = series
            .iter()
            .flat_map(|series| &series.points)
            .map(|point| point.y)
            .collect();
        let times: Vec<f64> = series
            .iter()
            .flat_map(|series| &series.points)
            .map(|point| point.x)
            .collect();
        values.iter().any(|value| *value > 0.0).then(|| {
            Lines {
                title: title.to_owned(),
                note: note.clone(),
                x: Axis::elapsed(since, times.into_iter()),
                y: quantity.axis(values.into_iter()),
                bands: traces
                    .first()
                    .filter(|_| !of_head)
                    .map(|trace| trace.runs.clone())
                    .unwrap_or_default(),
                series,
            }
            .figure()
        })
    };
    let courses = if of_head {
        COURSES.get(..HEAD_COURSES).unwrap_or_default()
    } else {
        &COURSES
    };
    traces
        .chunks(TOGETHER)
        .flat_map(|traces| courses.iter().filter_map(|course| chart(course, traces)))
        .collect()
}

fn over_time(trace: &Trace, of_head: bool, value: fn(&Bin) -> Option<f64>) -> chart::Series {
    let bins = if of_head { &trace.head } else { &trace.bins };
    chart::Series {
        name: trace.name.clone(),
        points: bins
            .iter()
            .filter_map(|bin| Some(Point::new(bin.time_ns, value(bin)?)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_means_of_what_stood_and_differences_of_what_grew() {
        let sample = |time_ns, run, writes, outstanding| {
            let messages = 3 * writes;
            let loops = 4 * writes;
            let cqes = 2 * writes;
            Sample {
                time_ns,
                run,
                writes,
                messages,
                loops,
                cqes,
                outstanding,
                ..Sample::default()
            }
        };
        let samples = [
            sample(100, None, 10, 4),
            sample(1_000, Some(0), 30, 6),
            sample(1_001, Some(0), 40, 10),
            sample(119_000, Some(0), 100, 2),
            sample(239_999, None, 101, 0),
        ];
        let trace = Trace::new("rank 0, daemon 0".to_owned(), &samples);
        let points = |value| {
            over_time(&trace, false, value)
                .points
                .iter()
                .map(|point| (point.x, point.y))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            points(|bin| Some(bin.outstanding)),
            [(1e3, 4.0), (2e3, 8.0), (120e3, 2.0), (240e3, 0.0)]
        );
        let of = |course: usize| {
            points(COURSES[course].2)
                .into_iter()
                .map(|(_, y)| y)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of(1),
            [3.0; 3],
            "messages per WRITE, which the first sample cannot say"
        );
        assert_eq!(of(2), [0.5; 3], "completions per round");
        assert!(
            (of(3)[0] - 30e9 / 901.0).abs() < 1.0,
            "WRITEs per second: {:?}",
            of(3)
        );
        assert_eq!(trace.runs, [(1e3, 119e3)]);
        assert_eq!(
            figures(&[trace], false).len(),
            5,
            "what is zero all the time is not drawn"
        );
    }

    #[test]
    fn the_begin_is_found_up_to_its_first_fall_and_the_rest_by_its_runs() {
        let sample = |(time_ns, run, outstanding): (u64, Option<u16>, u64)| Sample {
            time_ns,
            run,
            outstanding,
            moved: u64::from(outstanding > 0),
            loops: time_ns,
            cqes: 3 * time_ns,
            ..Sample::default()
        };
        let head = [
            (0, None, 0),
            (10, None, 544),
            (12, None, 600),
            (13, None, 640),
            (14, None, 630),
            (20, None, 1000),
        ];
        let steady = (0..21).map(|at| (5_000_000 + at, Some(0), 100 + at));
        let samples: Vec<Sample> = head.into_iter().chain(steady).map(sample).collect();
        let trace = Trace::new(String::new(), &samples);
        let begin = Begin {
            burst: Some((10, 544)),
            saturated: Some((13, 640)),
            peak: Some((20, 1000)),
            steady: Some((101, 119)),
            batch: 3.0,
        };
        assert_eq!(trace.begin, begin);
        assert_eq!(
            trace
                .head
                .iter()
                .map(|bin| bin.last.outstanding)
                .collect::<Vec<_>>(),
            [544, 600, 640, 630, 1000]
        );
        assert_eq!(Begin::of(&[]), Begin::default());
        let (header, rows) = begins(&[trace]);
        assert_eq!((header.len(), rows[0].len()), (9, 9));
    }

    #[test]
    fn nonsense_is_drawn_as_nonsense() {
        let sample = |time_ns, loops| Sample {
            time_ns,
            loops,
            hold_ns: u64::MAX,
            ..Sample::default()
        };
        for samples in [
            vec![],
            vec![sample(u64::MAX, 5)],
            vec![sample(9, 7), sample(3, 2), sample(u64::MAX, 0)],
        ] {
            let trace = [Trace::new(String::new(), &samples)];
            for figure in [figures(&trace, false), figures(&trace, true)].concat() {
                assert!(
                    !figure.contains("NaN") && !figure.contains("inf"),
                    "{figure}"
                );
            }
        }
    }
}
