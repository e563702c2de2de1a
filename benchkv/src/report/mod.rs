//! `benchkv report`: the results of one or many jobs side by side, as text and as a chart.
//!
//! - `compare`: the differences between the results.
//! - `drawing`: the charts.

use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use benchkv_harness::Failure;
use benchkv_harness::report::{Table, bytes, nanos, percent, plural, rate, to_stdout};

use crate::cli::ReportArgs;
use crate::result::{JobResult, RunSpread};
use compare::{Comparison, Group};

mod compare;
mod drawing;

/// Threshold of a warning: the standard deviation of the runs of one result, as a share of their
/// mean.
const WIDE_SPREAD: f64 = 0.2;
/// Threshold of a warning: the number of cores that other programs use.
const OTHERS: f64 = 0.1;
/// Threshold of a warning: the deviation from Little's law.
const LAW_LIMIT: f64 = 0.05;

/// Reads the results, prints them side by side, and writes the chart. With `--check` only reads
/// them.
///
/// # Errors
/// The first file that is not a result of this version, with `--check` the first result of an
/// interrupted job, or the system's reason why the report or the chart cannot be written.
pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let read = || args.files.iter().map(|file| JobResult::read(file));
    if args.check {
        for (path, result) in args.files.iter().zip(read()) {
            if result?.interrupted {
                let path = path.display();
                let why = format!("{path} is of a job that was interrupted; repeat it");
                return Err(why.into());
            }
        }
        return Ok(());
    }
    for chart in &args.output {
        if args.files.iter().any(|file| is_same_file(file, chart)) {
            let path = chart.display();
            let why = format!("--output: {path} is one of the results; name another file");
            return Err(why.into());
        }
        benchkv_harness::file::check(chart).map_err(|why| format!("--output: {why}"))?;
    }
    let results = read().collect::<Result<Vec<_>, _>>()?;
    let comparison = Comparison::of(&results, None);
    let names = args.files.iter().map(|file| file.display().to_string());
    let names: Vec<String> = names.collect();
    to_stdout(text(&names, &results, &comparison).as_bytes())
        .map_err(|why| format!("the report cannot be written to standard output: {why}"))?;
    let chart = drawing::chart(&results, args.chart);
    for file in &args.output {
        let bytes = match file.extension() {
            Some(extension) if extension == "csv" => drawing::points(&chart)?,
            _ => chart.svg()?.into_bytes(),
        };
        benchkv_harness::file::write(file, &bytes).map_err(|why| format!("--output: {why}"))?;
    }
    Ok(())
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

/// Returns the report about `results`, which were read from the files `names`.
fn text(names: &[String], results: &[JobResult], comparison: &Comparison) -> String {
    let mut text = format!("{}\n", plural(results.len(), "result"));
    for warning in warnings(names, results) {
        let _ = writeln!(text, "{warning}");
    }
    let _ = writeln!(text);
    for (name, value) in conditions(comparison, results) {
        let _ = writeln!(text, "{name}: {value}");
    }
    let _ = write!(text, "\n{}", table(names, results, comparison));
    if comparison.groups.len() > 1 {
        let _ = write!(text, "\n{}", differences(results, comparison));
    }
    text
}

/// A function that returns whether a warning concerns a result.
type Is = fn(&JobResult) -> bool;

/// Returns warnings about figures that may be less reliable than they seem.
fn warnings(names: &[String], results: &[JobResult]) -> Vec<String> {
    let concerned = |what: &str, is: Is| {
        let results_by_name = names.iter().zip(results);
        let found = results_by_name.filter(|(_, result)| is(result));
        let found: Vec<&str> = found.map(|(name, _)| name.as_str()).collect();
        let which = match found.as_slice() {
            [] => return None,
            all if all.len() == results.len() => "all results".to_owned(),
            some => some.join(", "),
        };
        Some(format!("{what}: {which}."))
    };
    let checks: [(&str, Is); 13] = [
        (
            "Operations were lost or not issued, or values were wrong",
            |result| !result.is_sound(),
        ),
        (
            "Nothing was measured: no operation ended in a run",
            |result| result.measured_ops() == 0,
        ),
        (
            "Operations were under way when the drain was cut",
            |result| result.fate.unfinished > 0,
        ),
        (
            "The job was interrupted: there are fewer runs, or a shorter one",
            |result| result.interrupted,
        ),
        (
            "The rate that was asked for was not kept: the latencies are of a queue that grew, or that was there when a run began",
            |result| result.open_loop.as_ref().is_some_and(|open| !open.kept_up),
        ),
        (
            "Over-subscribed: more polling threads than cores, so that latencies and rates contain the scheduler's",
            |result| result.is_oversubscribed(),
        ),
        (
            "Other programs used more than a tenth of a core meanwhile",
            |result| result.other_cores.is_some_and(|cores| cores > OTHERS),
        ),
        ("Debug build, whose figures mean nothing", |result| {
            result.environment.build_profile != "release"
        }),
        (
            "Software device: the protocol is the real one, the NIC and the network are not",
            |result| result.device == "soft" && result.simulation.is_none(),
        ),
        (
            "Virtual time: the protocol is the real one, and CPUs, NICs and the network are models",
            |result| result.simulation.is_some(),
        ),
        (
            "A sweep: its runs have different loads, so that means over runs, and their spread, describe none of them",
            |result| result.sweep().is_some(),
        ),
        (
            "Runs are far apart (standard deviation above 20 %)",
            |result| {
                result.sweep().is_none()
                    && result.over_runs.total_rps.std_dev.is_some_and(|deviation| {
                        deviation > WIDE_SPREAD * result.measured.total_rps
                    })
            },
        ),
        (
            "Little's law does not hold within 5 %: outstanding operations, throughput and latency do not fit together",
            |result| result.littles_law.deviation > LAW_LIMIT,
        ),
    ];
    let checks = checks.into_iter();
    checks
        .filter_map(|(what, is)| concerned(what, is))
        .collect()
}

/// Returns the number of polling threads on rank 0's host and the number of cores that they could
/// use, in words; `-` in virtual time.
fn threads_on_cores(result: &JobResult) -> String {
    if result.simulation.is_some() {
        return "-".to_owned();
    }
    let placement = &result.placement;
    format!("{} on {}", placement.threads, placement.usable_cores.len())
}

type Property = fn(&JobResult) -> String;

fn conditions(comparison: &Comparison, results: &[JobResult]) -> Vec<(String, String)> {
    let mut conditions = Vec::new();
    if let Some(first) = results.first() {
        let same = |of: fn(&JobResult) -> String| {
            let value = of(first);
            if results.iter().all(|result| of(result) == value) {
                value
            } else {
                "differs".to_owned()
            }
        };
        let others: [(&str, Property); 4] = [
            ("threads on cores", threads_on_cores),
            ("kernel", |result| result.environment.kernel.clone()),
            ("measured", |result| {
                let options = &result.options;
                let (duration_s, warmup_s) = (options.duration, options.warmup);
                let runs = plural(options.runs, "run");
                format!("{runs} of {duration_s} s after {warmup_s} s")
            }),
            ("benchkv", |result| result.benchkv_version.clone()),
        ];
        conditions.extend(others.map(|(name, of)| (name.to_owned(), same(of))));
    }
    // A setting without a value gets no line.
    let telling = comparison
        .common
        .iter()
        .filter(|(_, value)| value != "none");
    telling.cloned().chain(conditions).collect()
}

const FIGURES: [(&str, Property); 17] = [
    ("offered", |result| {
        let open = result.open_loop.as_ref();
        open.map_or_else(|| "-".to_owned(), |open| rate(open.offered_rps))
    }),
    ("total", |result| rate(result.measured.total_rps)),
    ("std dev", |result| {
        let deviation = result.over_runs.total_rps.std_dev;
        deviation.map_or_else(
            || "-".to_owned(),
            |deviation| percent(deviation / result.measured.total_rps),
        )
    }),
    ("slowest run", |result| rate(result.over_runs.total_rps.min)),
    ("fastest run", |result| rate(result.over_runs.total_rps.max)),
    ("remote", |result| rate(result.measured.remote_rps)),
    ("of values", |result| {
        format!("{}/s", bytes(drawing::bytes_per_s(result) as u64))
    }),
    ("p50", |result| nanos(result.measured.latency_ns.p50 as f64)),
    ("p90", |result| nanos(result.measured.latency_ns.p90 as f64)),
    ("p99", |result| nanos(result.measured.latency_ns.p99 as f64)),
    ("p99.9", |result| {
        nanos(result.measured.latency_ns.p999 as f64)
    }),
    ("p99.99", |result| {
        nanos(result.measured.latency_ns.p9999 as f64)
    }),
    ("core time", |result| {
        result.cpu_ns_per_op.map_or_else(|| "-".to_owned(), nanos)
    }),
    ("a WRITE", |result| {
        format!("{:.1}", result.measured.activity.messages_per_write)
    }),
    ("a round", |result| {
        format!("{:.2}", result.measured.activity.cqes_per_loop)
    }),
    ("lost", |result| result.fate.lost.to_string()),
    ("not found", |result| result.fate.not_found.to_string()),
];

fn table(names: &[String], results: &[JobResult], comparison: &Comparison) -> Table {
    let header = FIGURES.map(|(name, _)| name);
    let mut table = Table::new(["settings"].into_iter().chain(header).chain(["file"]));
    for Group { members, label, .. } in &comparison.groups {
        for (number, member) in (1..).zip(members) {
            let (Some(result), Some(name)) = (results.get(*member), names.get(*member)) else {
                continue;
            };
            let label = match members.len() {
                1 => label.clone(),
                count => format!("{label}, repeat {number} of {count}"),
            };
            let figures = FIGURES.map(|(_, of)| of(result));
            table.row([label].into_iter().chain(figures).chain([name.clone()]));
        }
    }
    table
}

/// Returns a row for each group: its mean throughput with the confidence interval of repeats, and
/// the difference from the first group at the same place of the axis.
fn differences(results: &[JobResult], comparison: &Comparison) -> Table {
    let mut table = Table::new([
        "settings",
        "throughput",
        "95 % interval",
        "difference",
        "from",
    ]);
    let rates = |group: &Group| -> Vec<f64> {
        let members = group.members.iter().filter_map(|at| results.get(*at));
        members.map(|member| member.measured.total_rps).collect()
    };
    let mean = |group: &Group| rates(group).iter().sum::<f64>() / group.members.len() as f64;
    for group in &comparison.groups {
        let of = mean(group);
        let half = confidence(&rates(group));
        let interval = half.map(|half| format!("\u{b1} {}", percent(half / of)));
        let groups = comparison.groups.iter();
        let mut at_place = groups.filter(|one| one.place == group.place);
        let first = at_place.next().filter(|first| first.series != group.series);
        let apart = first.map(|first| format!("{:+.1} %", 100.0 * (of / mean(first) - 1.0)));
        let cells = [
            Some(rate(of)),
            interval,
            apart,
            first.map(|first| first.series.clone()),
        ];
        let cells = cells.map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
        table.row([group.label.clone()].into_iter().chain(cells));
    }
    table
}

/// Returns half the width of the 95 % confidence interval of the mean, by Student's t, for
/// independent values; `None` for fewer than two values.
fn confidence(values: &[f64]) -> Option<f64> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_student() {
        assert_eq!([confidence(&[]), confidence(&[7.0])], [None, None]);
        // The three values have a standard deviation of 1.
        assert!(
            confidence(&[9.0, 10.0, 11.0])
                .is_some_and(|half| (half - 4.303 / 3f64.sqrt()).abs() < 1e-9)
        );
        assert_eq!(confidence(&[5.0; 40]), Some(0.0));
    }
}
