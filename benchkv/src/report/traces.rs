//! Time series of daemons, as `--trace` wrote them: each put into as many bins as a chart can show.

use crate::trace::{TraceError, TraceFile};
use engine::trace::Sample;
use harness::chart::axis::Axis;
use harness::chart::{Lines, Point, Series};

/// Bins of a series.
const BINS: usize = 240;
/// Daemons in one chart.
const TOGETHER: usize = 7;

/// The series of one daemon, in bins of equal length. A bin without a sample is left out.
#[derive(Debug)]
pub(super) struct Trace {
    name: String,
    bins: Vec<Bin>,
    /// From and to when runs were measured, in nanoseconds.
    runs: Vec<(f64, f64)>,
}

/// What is known of a time.
#[derive(Debug, Clone, Copy)]
struct Bin {
    /// Its end.
    time_ns: f64,
    /// Its last sample, which has the counters.
    last: Sample,
    /// The one before the first of its samples; of the first bin, that first sample.
    before: Sample,
    /// Means over its samples.
    outstanding: f64,
    backlog: f64,
    held: f64,
    hold_ns: f64,
    poll_budget: f64,
    rtt_ns: f64,
}

impl Bin {
    /// How far a counter went on per second.
    fn per_s(&self, counter: fn(&Sample) -> u64) -> Option<f64> {
        let elapsed_ns = self.last.time_ns.saturating_sub(self.before.time_ns);
        (elapsed_ns > 0).then(|| self.grown(counter) * 1e9 / elapsed_ns as f64)
    }

    fn grown(&self, counter: fn(&Sample) -> u64) -> f64 {
        counter(&self.last).saturating_sub(counter(&self.before)) as f64
    }
}

impl Trace {
    /// Reads a file.
    pub(super) fn read(file: &TraceFile) -> Result<Self, TraceError> {
        Ok(Self::new(format!("rank {}, daemon {}", file.rank, file.daemon), &file.read()?))
    }

    fn new(name: String, samples: &[Sample]) -> Self {
        let end_ns = samples.iter().map(|sample| sample.time_ns).max().unwrap_or(0).saturating_add(1);
        let bin_of = |sample: &Sample| (u128::from(sample.time_ns) * BINS as u128 / u128::from(end_ns)) as usize;
        let mut before = samples.first().copied().unwrap_or_default();
        let mut bins = Vec::new();
        for alike in samples.chunk_by(|a, b| bin_of(a) == bin_of(b)) {
            let Some(last) = alike.last().copied() else { continue };
            let mean = |gauge: fn(&Sample) -> u64| alike.iter().map(|sample| gauge(sample) as f64).sum::<f64>() / alike.len() as f64;
            bins.push(Bin {
                time_ns: (bin_of(&last) + 1) as f64 * end_ns as f64 / BINS as f64,
                last,
                before,
                outstanding: mean(|sample| sample.outstanding),
                backlog: mean(|sample| sample.backlog),
                held: mean(|sample| sample.held),
                hold_ns: mean(|sample| sample.hold_ns),
                poll_budget: mean(|sample| sample.poll_budget),
                rtt_ns: mean(|sample| sample.rtt_ns),
            });
            before = last;
        }
        let windows = samples.chunk_by(|a, b| a.run == b.run).filter(|window| window.first().is_some_and(|sample| sample.run.is_some()));
        let ends = |window: &[Sample]| Some((window.first()?.time_ns as f64, window.last()?.time_ns as f64));
        Self { name, bins, runs: windows.filter_map(ends).collect() }
    }
}

/// A chart over time: its title, what is drawn where it is known, and the axis of it.
struct Course {
    title: &'static str,
    value: fn(&Bin) -> Option<f64>,
    axis: fn(Vec<f64>) -> Axis,
}

const COURSES: [Course; 9] = [
    Course {
        title: "Requests outstanding to other ranks",
        value: |bin| Some(bin.outstanding),
        axis: |values| Axis::plain("outstanding (requests)", values.into_iter()),
    },
    Course {
        title: "Messages in a WRITE",
        value: |bin| Some(bin.grown(|sample| sample.messages) / Some(bin.grown(|sample| sample.writes)).filter(|writes| *writes > 0.0)?),
        axis: |values| Axis::plain("batch (messages per WRITE)", values.into_iter()),
    },
    Course {
        title: "WRITEs to other ranks",
        value: |bin| bin.per_s(|sample| sample.writes),
        axis: |values| Axis::rates("rate", "WRITEs/s", values.into_iter()),
    },
    Course {
        title: "Rounds of a daemon",
        value: |bin| bin.per_s(|sample| sample.loops),
        axis: |values| Axis::rates("rate", "rounds/s", values.into_iter()),
    },
    Course { title: "Hold of answers", value: |bin| Some(bin.hold_ns), axis: |values| Axis::times_from_zero("hold", values.into_iter()) },
    Course { title: "Answers held", value: |bin| Some(bin.held), axis: |values| Axis::plain("held (answers)", values.into_iter()) },
    Course {
        title: "Polls added to an empty round",
        value: |bin| Some(bin.poll_budget),
        axis: |values| Axis::plain("budget (polls)", values.into_iter()),
    },
    Course { title: "Backlog", value: |bin| Some(bin.backlog), axis: |values| Axis::plain("waiting (requests)", values.into_iter()) },
    Course {
        title: "From a flush to the next completion",
        value: |bin| Some(bin.rtt_ns),
        axis: |values| Axis::times_from_zero("smoothed time", values.into_iter()),
    },
];

/// A chart for each quantity that is not zero all the time, for each few daemons.
pub(super) fn figures(traces: &[Trace]) -> Vec<String> {
    let chart = |course: &Course, traces: &[Trace]| {
        let series: Vec<Series> = traces.iter().map(|trace| over_time(trace, course.value)).collect();
        let values: Vec<f64> = series.iter().flat_map(|series| &series.points).map(|point| point.y).collect();
        let times: Vec<f64> = series.iter().flat_map(|series| &series.points).map(|point| point.x).collect();
        values.iter().any(|value| *value > 0.0).then(|| {
            Lines {
                title: course.title.to_owned(),
                note: format!("Means of {BINS} bins. Shaded: measured runs."),
                x: Axis::elapsed("since the warm-up began", times.into_iter()),
                y: (course.axis)(values),
                bands: traces.first().map(|trace| trace.runs.clone()).unwrap_or_default(),
                series,
            }
            .figure()
        })
    };
    traces.chunks(TOGETHER).flat_map(|traces| COURSES.iter().filter_map(move |course| chart(course, traces))).collect()
}

fn over_time(trace: &Trace, value: fn(&Bin) -> Option<f64>) -> Series {
    Series { name: trace.name.clone(), points: trace.bins.iter().filter_map(|bin| Some(Point::new(bin.time_ns, value(bin)?))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_means_of_what_stood_and_differences_of_what_grew() {
        let sample =
            |time_ns, run, writes, outstanding| Sample { time_ns, run, writes, messages: 3 * writes, outstanding, ..Sample::default() };
        let samples = [
            sample(100, None, 10, 4),
            sample(1_000, Some(0), 30, 6),
            sample(1_001, Some(0), 40, 10),
            sample(119_000, Some(0), 100, 2),
            sample(239_999, None, 101, 0),
        ];
        let trace = Trace::new("rank 0, daemon 0".to_owned(), &samples);
        let points = |value| over_time(&trace, value).points.iter().map(|point| (point.x, point.y)).collect::<Vec<_>>();
        assert_eq!(points(|bin| Some(bin.outstanding)), [(1e3, 4.0), (2e3, 8.0), (120e3, 2.0), (240e3, 0.0)]);
        let of = |course: usize| points(COURSES[course].value).into_iter().map(|(_, y)| y).collect::<Vec<_>>();
        assert_eq!(of(1), [3.0; 3], "messages per WRITE, which the first sample cannot say");
        assert!((of(2)[0] - 30e9 / 901.0).abs() < 1.0, "WRITEs per second: {:?}", of(2));
        assert_eq!(trace.runs, [(1e3, 119e3)]);
        assert_eq!(figures(&[trace]).len(), 3, "what is zero all the time is not drawn");
    }

    #[test]
    fn nonsense_is_drawn_as_nonsense() {
        let sample = |time_ns, loops| Sample { time_ns, loops, hold_ns: u64::MAX, ..Sample::default() };
        for samples in [vec![], vec![sample(u64::MAX, 5)], vec![sample(9, 7), sample(3, 2), sample(u64::MAX, 0)]] {
            for figure in figures(&[Trace::new(String::new(), &samples)]) {
                assert!(!figure.contains("NaN") && !figure.contains("inf"), "{figure}");
            }
        }
    }
}
