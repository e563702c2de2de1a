//! The charts of a page, made of the results of each group.

use harness::chart::axis::Axis;
use harness::chart::{Bar, Bars, Lines, Point, Series};
use harness::hist::LatencyHistogram;
use harness::report::rate;

use super::compare::{Comparison, Group};
use super::page::Cell;
use crate::result::{Histograms, JobResult, Measured, RunSpread};

/// Points of a latency curve for each decade of its x axis.
const POINTS_PER_DECADE: u32 = 12;
/// Maximum number of bars in one chart.
const MOST_BARS: usize = 16;

/// A group with the measurements of its results.
#[derive(Debug)]
pub(super) struct Measurements<'a> {
    group: &'a Group,
    /// Operations per second of each result.
    rates: Vec<f64>,
    /// The measured runs of all results, and their lengths, in seconds.
    runs: Vec<&'a Measured>,
    lengths_s: Vec<f64>,
    histograms: Histograms,
}

impl<'a> Measurements<'a> {
    /// Returns the measurements of each group, in their order.
    pub(super) fn of(comparison: &'a Comparison, results: &'a [JobResult]) -> Vec<Self> {
        let of_group = |group: &'a Group| {
            let members = || {
                group
                    .members
                    .iter()
                    .filter_map(|member| results.get(*member))
            };
            let merged = |of: Of| {
                let mut all = LatencyHistogram::new();
                for member in members() {
                    // A file may hold a histogram of a larger range, which is then left out of the
                    // curve.
                    let _ = all.merge(of(&member.measured.histograms_ns));
                }
                all
            };
            Self {
                group,
                rates: members().map(|member| member.measured.total_rps).collect(),
                runs: members()
                    .flat_map(|member| &member.runs)
                    .map(|run| &run.measured)
                    .collect(),
                lengths_s: members()
                    .flat_map(|member| &member.runs)
                    .map(|run| run.duration_s)
                    .collect(),
                histograms: Histograms {
                    local: merged(|all| &all.local),
                    remote: merged(|all| &all.remote),
                    get: merged(|all| &all.get),
                    put: merged(|all| &all.put),
                },
            }
        };
        comparison.groups.iter().map(of_group).collect()
    }

    /// Returns the round trips of all operations.
    fn all(&self) -> LatencyHistogram {
        let mut all = self.histograms.local.clone();
        let _ = all.merge(&self.histograms.remote);
        all
    }

    /// Returns a percentile of all round trips together, and the minimum and maximum of the runs.
    fn percentile(&self, x: f64, quantile: f64, of_run: fn(&Measured) -> f64) -> Point {
        Point {
            y: self.all().value_at(quantile) as f64,
            ..self.point(x, of_run)
        }
    }

    /// Returns the mean over time.
    fn mean(&self, figure: impl Fn(&Measured) -> f64) -> f64 {
        mean_over_time(
            self.runs
                .iter()
                .map(|run| figure(run))
                .zip(self.lengths_s.iter().copied()),
        )
    }

    /// Returns the mean over runs, and their minimum and maximum.
    fn point(&self, x: f64, figure: impl Fn(&Measured) -> f64) -> Point {
        let values = || self.runs.iter().map(|run| figure(run));
        let (low, high) = (
            values().fold(f64::INFINITY, f64::min),
            values().fold(0.0, f64::max),
        );
        Point {
            spread: (self.runs.len() > 1).then_some((low, high)),
            ..Point::new(x, self.mean(&figure))
        }
    }
}

/// Returns the mean of values, each with its length in time.
fn mean_over_time(values: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (sum, time) = values.fold((0.0, 0.0), |(sum, time), (value, length)| {
        (sum + value * length, time + length)
    });
    sum / f64::max(time, f64::MIN_POSITIVE)
}

/// Returns the groups of each chart, with the addition to its title.
fn panels<'a, 'b>(
    groups: &'b [Measurements<'a>],
) -> impl Iterator<Item = (&'a str, &'b [Measurements<'a>])> {
    let chunks = groups.chunk_by(|a, b| a.group.panel == b.group.panel);
    chunks.map(|chunk| {
        (
            chunk.first().map_or("", |first| first.group.panel.as_str()),
            chunk,
        )
    })
}

fn titled(title: &str, panel: &str) -> String {
    if panel.is_empty() {
        title.to_owned()
    } else {
        format!("{title}, {panel}")
    }
}

fn tops(series: &[Series]) -> impl Iterator<Item = f64> {
    series
        .iter()
        .flat_map(|series| &series.points)
        .map(|point| point.spread.map_or(point.y, |(_, high)| high.max(point.y)))
}

/// Returns charts over the setting that differs, or bars if none is a number. The charts of a panel
/// are together.
pub(super) fn comparison(comparison: &Comparison, groups: &[Measurements<'_>]) -> Vec<Vec<String>> {
    let Some(axis) = &comparison.axis else {
        return groups
            .chunks(MOST_BARS)
            .map(|chunk| vec![throughput_bars(chunk), latency_bars(chunk)])
            .collect();
    };
    let charts = |(panel, groups): (&str, &[Measurements<'_>])| {
        let xs: Vec<f64> = groups.iter().filter_map(|group| group.group.x).collect();
        let lines = |title: &str,
                     note: &str,
                     point: &dyn Fn(&Measurements<'_>, f64) -> Point,
                     y: fn(&[Series]) -> Axis| {
            let points = |groups: &[Measurements<'_>]| {
                groups
                    .iter()
                    .filter_map(|group| Some(point(group, group.group.x?)))
                    .collect()
            };
            let series = by_series(groups).map(|(name, groups)| Series {
                name: name.to_owned(),
                points: points(groups),
            });
            let series: Vec<Series> = series.collect();
            chart(
                titled(title, panel),
                note,
                Axis::settings(axis.clone(), &xs),
                y(&series),
                series,
            )
        };
        let spread = "Mean over runs; whiskers: the slowest and the fastest run.";
        let merged =
            "Of the operations of all runs together; whiskers: the lowest and the highest run.";
        let rates = |series: &[Series]| Axis::rates("throughput", "operations/s", tops(series));
        let times =
            |series: &[Series]| Axis::log_times("round trip", tops(series).chain(ys(series)));
        let messages = |series: &[Series]| Axis::plain("batch (messages per WRITE)", tops(series));
        let rate = |group: &Measurements<'_>, x| group.point(x, |run| run.total_rps);
        let median =
            |group: &Measurements<'_>, x| group.percentile(x, 0.5, |run| run.latency_ns.p50 as f64);
        let percentile = |group: &Measurements<'_>, x| {
            group.percentile(x, 0.99, |run| run.latency_ns.p99 as f64)
        };
        let batch =
            |group: &Measurements<'_>, x| group.point(x, |run| run.activity.messages_per_write);
        vec![
            lines("Throughput, all ranks", spread, &rate, rates),
            lines("Median round trip", merged, &median, times),
            lines("99th percentile of round trips", merged, &percentile, times),
            lines("Messages in a WRITE", spread, &batch, messages),
        ]
    };
    panels(groups).map(charts).collect()
}

/// Returns runs of neighbours of one series.
fn by_series<'a, 'b>(
    groups: &'b [Measurements<'a>],
) -> impl Iterator<Item = (&'a str, &'b [Measurements<'a>])> {
    let chunks = groups.chunk_by(|a, b| a.group.series == b.group.series);
    chunks.map(|chunk| {
        (
            chunk
                .first()
                .map_or("", |first| first.group.series.as_str()),
            chunk,
        )
    })
}

/// Returns half the width of the interval in which the mean lies with a certainty of 95 %, by
/// Student's t, for independent values; `None` for fewer than two.
pub(super) fn confidence(values: &[f64]) -> Option<f64> {
    /// The 97.5th percentiles of Student's distribution, for 1 to 30 degrees of freedom
    /// (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
    const T: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042,
    ];
    let std_dev = RunSpread::of(values).std_dev?;
    Some(T.get(values.len() - 2).copied().unwrap_or(1.96) * std_dev / (values.len() as f64).sqrt())
}

/// Returns a table for each chart of the comparison: throughput by the axis and by the other
/// settings that differ. It has a row for each place on the axis and a column for each variant.
/// Each cell has the difference from the first in per cent, and the confidence interval over
/// repeats if there are any.
pub(super) fn tables(
    comparison: &Comparison,
    groups: &[Measurements<'_>],
) -> Vec<(String, Vec<Cell>, Vec<Vec<Cell>>)> {
    let Some(axis) = &comparison.axis else {
        return Vec::new();
    };
    let table = |(panel, groups): (&str, &[Measurements<'_>])| {
        let variants: Vec<(&str, &[Measurements<'_>])> = by_series(groups).collect();
        let mut xs: Vec<f64> = groups.iter().filter_map(|group| group.group.x).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let header = [Cell::Text(axis.clone())]
            .into_iter()
            .chain(
                variants
                    .iter()
                    .map(|(name, _)| Cell::Figure((*name).to_owned())),
            )
            .collect();
        let row = |x: &f64| {
            let at = |groups: &[Measurements<'_>]| {
                groups
                    .iter()
                    .find(|group| group.group.x == Some(*x))
                    .map(|group| group.rates.clone())
            };
            let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len().max(1) as f64;
            let base = variants
                .first()
                .and_then(|(_, groups)| at(groups))
                .map(|rates| mean(&rates))
                .filter(|base| *base > 0.0);
            let cell = |(number, (_, groups)): (usize, &(&str, &[Measurements<'_>]))| {
                let Some(rates) = at(groups) else {
                    return Cell::Figure("-".to_owned());
                };
                let of = mean(&rates);
                let apart = confidence(&rates).map_or_else(String::new, |half| {
                    format!(" \u{b1} {:.1} %", 100.0 * half / of.max(1e-9))
                });
                let difference = base
                    .filter(|_| number > 0)
                    .map_or_else(String::new, |base| {
                        format!(" ({:+.1} %)", 100.0 * (of / base - 1.0))
                    });
                Cell::Figure(format!("{}{apart}{difference}", rate(of)))
            };
            [Cell::Text(x.to_string())]
                .into_iter()
                .chain(variants.iter().enumerate().map(cell))
                .collect()
        };
        (
            titled("Throughput", panel),
            header,
            xs.iter().map(row).collect(),
        )
    };
    panels(groups).map(table).collect()
}

fn throughput_bars(groups: &[Measurements<'_>]) -> String {
    let parts = |group: &Measurements<'_>| {
        vec![
            group.mean(|run| run.local_rps),
            group.mean(|run| run.remote_rps),
        ]
    };
    let bars = bars(groups, parts, |run| run.total_rps);
    let x = Axis::rates("throughput", "operations/s", ends(&bars));
    bar_chart(
        "Throughput, all ranks",
        "Mean over runs; whiskers: the slowest and the fastest run.",
        x,
        &["local", "remote"],
        bars,
    )
}

fn latency_bars(groups: &[Measurements<'_>]) -> String {
    let parts = |group: &Measurements<'_>| {
        let (p50, p99) = (
            group.mean(|run| run.latency_ns.p50 as f64),
            group.mean(|run| run.latency_ns.p99 as f64),
        );
        vec![p50, (p99 - p50).max(0.0)]
    };
    let bars = bars(groups, parts, |run| run.latency_ns.p99 as f64);
    let x = Axis::times_from_zero("round trip", ends(&bars));
    let names = ["up to the median", "from there to the 99th percentile"];
    bar_chart(
        "Round trips",
        "Mean over runs; whiskers: the 99th percentile of the runs.",
        x,
        &names,
        bars,
    )
}

/// Returns a bar for each group, with the spread of a figure over its runs.
fn bars(
    groups: &[Measurements<'_>],
    parts: impl Fn(&Measurements<'_>) -> Vec<f64>,
    figure: fn(&Measured) -> f64,
) -> Vec<Bar> {
    let bar = |group: &Measurements<'_>| {
        let (label, spread) = (group.group.label.clone(), group.point(0.0, figure).spread);
        Bar {
            label,
            parts: parts(group),
            spread,
        }
    };
    groups.iter().map(bar).collect()
}

/// Returns the ends of bars and of their whiskers.
fn ends(bars: &[Bar]) -> impl Iterator<Item = f64> {
    bars.iter().map(|bar| {
        bar.spread
            .map_or(0.0, |(_, high)| high)
            .max(bar.parts.iter().sum())
    })
}

fn bar_chart(title: &str, note: &str, x: Axis, parts: &[&str], bars: Vec<Bar>) -> String {
    let parts = parts.iter().map(|part| (*part).to_owned()).collect();
    Bars {
        title: title.to_owned(),
        note: note.to_owned(),
        what: "results (settings)".to_owned(),
        x,
        parts,
        bars,
    }
    .figure()
}

fn chart(title: String, note: &str, x: Axis, y: Axis, series: Vec<Series>) -> String {
    Lines {
        title,
        note: note.to_owned(),
        x,
        y,
        bands: Vec::new(),
        series,
    }
    .figure()
}

/// Returns the y values of all points.
fn ys(series: &[Series]) -> impl Iterator<Item = f64> {
    series
        .iter()
        .flat_map(|series| &series.points)
        .map(|point| point.y)
}

/// A function that returns the round trips of a kind.
type Of = fn(&Histograms) -> &LatencyHistogram;

/// Returns charts of round trips against the share of operations that are faster.
pub(super) fn latencies(groups: &[Measurements<'_>]) -> Vec<String> {
    let kinds: [(&str, Of); 4] = [
        ("remote", |all| &all.remote),
        ("local", |all| &all.local),
        ("gets", |all| &all.get),
        ("puts", |all| &all.put),
    ];
    if let [only] = groups {
        let curves = kinds.map(|(name, of)| (name.to_owned(), of(&only.histograms)));
        return vec![curve_chart("Round trips".to_owned(), &curves)];
    }
    let mut figures = Vec::new();
    for (panel, groups) in
        panels(groups).flat_map(|(panel, groups)| groups.chunks(7).map(move |chunk| (panel, chunk)))
    {
        for (kind, of) in kinds {
            let curves: Vec<_> = groups
                .iter()
                .map(|group| (group.group.label.clone(), of(&group.histograms)))
                .collect();
            if curves.iter().any(|(_, histogram)| histogram.count() > 0) {
                figures.push(curve_chart(
                    titled(&format!("Round trips, {kind}"), panel),
                    &curves,
                ));
            }
        }
    }
    figures
}

fn curve_chart(title: String, curves: &[(String, &LatencyHistogram)]) -> String {
    let with_values = curves.iter().filter(|(_, histogram)| histogram.count() > 0);
    let series: Vec<Series> = with_values
        .map(|(name, histogram)| Series {
            name: name.clone(),
            points: curve(histogram),
        })
        .collect();
    let operations = curves
        .iter()
        .map(|(_, histogram)| histogram.count())
        .max()
        .unwrap_or(0);
    let y = Axis::log_times("round trip", ys(&series));
    chart(
        title,
        "Each curve ends at its slowest operation.",
        Axis::percentiles(operations as f64),
        y,
        series,
    )
}

/// Returns points from the fastest operation to the slowest, evenly by the logarithm of the number
/// that are slower.
fn curve(histogram: &LatencyHistogram) -> Vec<Point> {
    let operations = histogram.count().max(1) as f64;
    let steps = (operations.log10() * f64::from(POINTS_PER_DECADE)).floor() as u32;
    let xs = (0..=steps)
        .map(|step| 10f64.powf(f64::from(step) / f64::from(POINTS_PER_DECADE)))
        .chain([operations]);
    xs.map(|x| Point::new(x, histogram.value_at(1.0 - 1.0 / x) as f64))
        .collect()
}

/// Returns charts of the throughput of each run: the components of the spread.
pub(super) fn runs(groups: &[Measurements<'_>]) -> Vec<String> {
    let panels = panels(groups)
        .flat_map(|(panel, groups)| groups.chunks(7).map(move |chunk| (panel, chunk)));
    let of_panel = |(panel, groups): (&str, &[Measurements<'_>])| {
        let numbered = |runs: &[&Measured]| {
            (1u32..)
                .zip(runs)
                .map(|(number, run)| Point::new(f64::from(number), run.total_rps))
                .collect()
        };
        let series: Vec<Series> = groups
            .iter()
            .map(|group| Series {
                name: group.group.label.clone(),
                points: numbered(&group.runs),
            })
            .collect();
        let numbers: Vec<f64> = series
            .iter()
            .flat_map(|series| &series.points)
            .map(|point| point.x)
            .collect();
        let x = Axis::settings("run (number)".to_owned(), &numbers);
        let y = Axis::rates("throughput", "operations/s", tops(&series));
        chart(titled("Throughput of each run", panel), "", x, y, series)
    };
    panels.map(of_panel).collect()
}

/// Returns charts of the daemons' rounds by their number of messages.
pub(super) fn activity(groups: &[Measurements<'_>]) -> Vec<String> {
    let classes = ["no message", "1", "2 to 10", "11 to 100", "more than 100"];
    let chart = |groups: &[Measurements<'_>]| {
        let share = |group: &Measurements<'_>, class| {
            100.0 * group.mean(|run| run.activity.loops_by_messages[class])
        };
        let bar = |group: &Measurements<'_>| {
            let parts = (0..classes.len())
                .map(|class| share(group, class))
                .collect();
            Bar {
                label: group.group.label.clone(),
                parts,
                spread: None,
            }
        };
        let x = Axis::plain("share of rounds (%)", [100.0].into_iter());
        bar_chart(
            "Messages that a daemon's round moved",
            "Mean over daemons and runs.",
            x,
            &classes,
            groups.iter().map(bar).collect(),
        )
    };
    groups.chunks(MOST_BARS).map(chart).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_counts_by_its_length() {
        let mean = |values: &[(f64, f64)]| mean_over_time(values.iter().copied());
        assert!((mean(&[(10.0, 2.0), (40.0, 0.5)]) - 16.0).abs() < 1e-9);
        assert!(mean(&[]).abs() < 1e-9);
    }

    #[test]
    fn the_interval_is_that_of_student() {
        assert_eq!([confidence(&[]), confidence(&[7.0])], [None, None]);
        // Standard deviation 1, three values.
        assert!(
            confidence(&[9.0, 10.0, 11.0])
                .is_some_and(|half| (half - 4.303 / 3f64.sqrt()).abs() < 1e-9)
        );
        assert_eq!(confidence(&[5.0; 40]), Some(0.0));
    }
}
