//! The charts of a report.

use benchkv_harness::Failure;
use benchkv_harness::chart::{Axis, Chart, Series};
use benchkv_harness::hist::LatencySummary;
use benchkv_harness::report::{nanos, rate};

use super::compare::{COMMIT, Comparison, Group, VALUE_SIZE, commits};
use crate::cli::ChartKind;
use crate::result::{JobResult, Measured};

/// A percentile of round trips.
type Percentile = fn(&LatencySummary) -> u64;

/// Number of characters of a commit's name at an axis.
const COMMIT_CHARS: usize = 8;

/// The percentiles of a chart of one series, with their names.
const PERCENTILES: [(&str, Percentile); 5] = [
    ("p50", |of| of.p50),
    ("p90", |of| of.p90),
    ("p99", |of| of.p99),
    ("p99.9", |of| of.p999),
    ("p99.99", |of| of.p9999),
];

/// Returns the number of bytes of values that the operations of a job move in a second.
pub(super) fn bytes_per_s(result: &JobResult) -> f64 {
    result.measured.total_rps * result.options.workload.value_bytes as f64
}

/// Returns the chart, with a point for each result; by rate, with a point for each load of a sweep.
/// With several series, each has a line; if the chart is of latencies, the line is the 99th
/// percentile. With one series, each percentile has a line.
pub(super) fn chart(results: &[JobResult], kind: ChartKind) -> Chart {
    let comparison = Comparison::of(results, along(kind));
    let commits = commits(results);
    let is_open = results.iter().all(|result| result.open_loop.is_some());
    let offered = |of: &JobResult| Some(of.open_loop.filter(|_| is_open)?.offered_rps);
    let point = |result: &JobResult, percentile: Percentile| -> (f64, f64) {
        let measured = &result.measured;
        let latency_ns = percentile(&measured.latency_ns) as f64;
        let value_bytes = result.options.workload.value_bytes as f64;
        match kind {
            ChartKind::LatencyByRate => (offered(result).unwrap_or(measured.total_rps), latency_ns),
            ChartKind::LatencyBySize => (value_bytes, latency_ns),
            ChartKind::BandwidthBySize => (value_bytes, bytes_per_s(result)),
            ChartKind::RateByCommit => {
                let commit = &result.environment.git_commit;
                let earlier = commits.iter().take_while(|other| *other != commit);
                (1.0 + earlier.count() as f64, measured.total_rps)
            }
        }
    };
    let points_of = |group: &Group, percentile: Percentile| -> Vec<(f64, f64)> {
        let of_load = |of: &Measured| (of.total_rps, percentile(&of.latency_ns) as f64);
        let points = |member: &JobResult| match member.sweep() {
            Some(_) if kind == ChartKind::LatencyByRate => {
                let runs = member.runs.iter();
                runs.map(|run| of_load(&run.measured)).collect()
            }
            _ => vec![point(member, percentile)],
        };
        let members = group.members.iter().filter_map(|at| results.get(*at));
        members.flat_map(points).collect()
    };
    let series = |name: &str, groups: &[Group], percentile: Percentile| Series {
        name: name.to_owned(),
        points: groups
            .iter()
            .flat_map(|group| points_of(group, percentile))
            .collect(),
    };
    let all: Vec<&[Group]> = comparison
        .groups
        .chunk_by(|a, b| a.series == b.series)
        .collect();
    let is_of_latency = matches!(kind, ChartKind::LatencyByRate | ChartKind::LatencyBySize);
    let (what, series): (_, Vec<Series>) = match all.as_slice() {
        [groups] if is_of_latency => {
            let lines = PERCENTILES.map(|(name, of)| series(name, groups, of));
            ("Percentiles", lines.into())
        }
        _ => {
            let line =
                |groups: &&[Group]| Some(series(&groups.first()?.series, groups, |of| of.p99));
            ("99th percentile", all.iter().filter_map(line).collect())
        }
    };
    let name = |commit: &String| commit.chars().take(COMMIT_CHARS).collect();
    let (x, by) = match kind {
        ChartKind::LatencyByRate if is_open => ("offered operations per second", "offered rate"),
        ChartKind::LatencyByRate => ("operations per second", "throughput of all ranks"),
        ChartKind::LatencyBySize | ChartKind::BandwidthBySize => {
            ("bytes of a value", "size of a value")
        }
        ChartKind::RateByCommit => ("commit, in the order of first measurements", "commit"),
    };
    let what = match kind {
        ChartKind::LatencyByRate | ChartKind::LatencyBySize => format!("{what} of round trips"),
        ChartKind::BandwidthBySize => "Bandwidth of values".to_owned(),
        ChartKind::RateByCommit => "Throughput of all ranks".to_owned(),
    };
    let (y, y_label): (_, fn(f64) -> String) = match kind {
        ChartKind::LatencyByRate | ChartKind::LatencyBySize => ("round trip", nanos),
        ChartKind::BandwidthBySize => ("bytes of values per second", |bytes_per_s| {
            format!("{} MB/s", bytes_per_s / 1e6)
        }),
        ChartKind::RateByCommit => ("operations per second", rate),
    };
    Chart {
        title: format!("{what}, by {by}"),
        x: Axis {
            title: x.to_owned(),
            label: match kind {
                ChartKind::LatencyByRate => rate,
                _ => |value| format!("{value:.0}"),
            },
            names: match kind {
                ChartKind::RateByCommit => commits.iter().map(name).collect(),
                _ => Vec::new(),
            },
            is_log: along(kind) == Some(VALUE_SIZE),
        },
        y: Axis {
            title: y.to_owned(),
            label: y_label,
            names: Vec::new(),
            is_log: kind != ChartKind::RateByCommit,
        },
        series,
    }
}

/// Returns the setting at the bottom of a chart; `None` if a measured figure is there.
const fn along(kind: ChartKind) -> Option<&'static str> {
    match kind {
        ChartKind::LatencyByRate => None,
        ChartKind::LatencyBySize | ChartKind::BandwidthBySize => Some(VALUE_SIZE),
        ChartKind::RateByCommit => Some(COMMIT),
    }
}

/// Returns the points of a chart as CSV: the line, and the values, or names, of both axes. Round
/// trips are in ns.
pub(super) fn points(chart: &Chart) -> Result<Vec<u8>, Failure> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let y = chart.y.title.replace("round trip", "round trip in ns");
    writer.write_record(["line", &chart.x.title, &y])?;
    for series in &chart.series {
        for (x, y) in &series.points {
            let number = x.to_string();
            let x = chart.x.name(*x).unwrap_or(&number);
            writer.write_record([&series.name, x, &y.to_string()])?;
        }
    }
    Ok(writer.into_inner()?)
}
