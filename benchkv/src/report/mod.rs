//! `benchkv report`: one page from the results of one or many jobs. It needs no network, no script
//! and no other file.
//!
//! - `compare`: the differences between the results.
//! - `figures`: the charts; [`harness::chart`]: how they are drawn.
//! - `traces`: the charts over time.
//! - `page`: the HTML around them.

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use harness::Failure;
use harness::report::{nanos, plural, rate, to_stdout};

use crate::cli::JobArgs;
use crate::cli::ReportArgs;
use crate::result::JobResult;
use crate::trace::TraceFile;
use compare::Comparison;
use figures::Measurements;
use page::{Cell, Page};
use traces::Trace;

mod compare;
mod figures;
mod page;
mod traces;

/// Maximum spread of the runs of one result without a warning, as a share of their mean (standard
/// deviation).
const WIDE_SPREAD: f64 = 0.2;
/// Maximum deviation of Little's law without a warning.
const LAW_LIMIT: f64 = 0.05;

/// Names the option that a failure concerns.
fn of_output(why: impl Display) -> Failure {
    format!("--output: {why}").into()
}

/// Likewise.
fn of_trace(why: impl Display) -> Failure {
    format!("--trace: {why}").into()
}

/// Checks whether the page may be written to `page`.
fn check_page(args: &ReportArgs, page: &Path) -> Result<(), Failure> {
    let is_page = |file: &PathBuf| is_same_file(file, page);
    let series = args
        .trace
        .as_deref()
        .map_or(Ok(Vec::new()), TraceFile::all_in)
        .map_err(of_trace)?;
    if args.files.iter().any(is_page) || series.iter().any(|series| is_page(&series.path)) {
        return Err(format!(
            "--output: {} is read for the page; name another file",
            page.display()
        )
        .into());
    }
    harness::file::check(page).map_err(of_output)
}

/// Returns whether both names lead to the same existing file.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

/// Reads the results and writes the page. With `--check` only reads.
///
/// # Errors
/// The first file that is not a result of this version, or the system's reason why the page cannot
/// be written.
pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let read = || {
        args.files
            .iter()
            .map(|file| JobResult::read(file))
            .collect::<Result<Vec<_>, _>>()
    };
    if args.check {
        let cut = args
            .files
            .iter()
            .zip(read()?)
            .find(|(_, result)| result.interrupted);
        return cut.map_or(Ok(()), |(path, _)| {
            Err(format!(
                "{} is of a job that was interrupted; repeat it",
                path.display()
            )
            .into())
        });
    }
    args.page().map_or(Ok(()), |page| check_page(args, page))?;
    let results = read()?;
    let traces = args
        .trace
        .as_deref()
        .map(read_traces)
        .transpose()?
        .unwrap_or_default();
    let names: Vec<String> = args
        .files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let content = page(&names, &results, &traces);
    match args.page() {
        Some(file) => harness::file::write(file, content.as_bytes()).map_err(of_output),
        None => to_stdout(content.as_bytes())
            .map_err(|why| format!("the page cannot be written to standard output: {why}").into()),
    }
}

fn read_traces(dir: &Path) -> Result<Vec<Trace>, Failure> {
    let files = TraceFile::all_in(dir).map_err(of_trace)?;
    if files.is_empty() {
        let there = "has no rank-R-daemon-D.csv; name a directory that `benchkv --trace DIR` wrote";
        return Err(of_trace(format!("{} {there}", dir.display())));
    }
    files
        .iter()
        .map(Trace::read)
        .collect::<Result<_, _>>()
        .map_err(of_trace)
}

/// Returns the page about `results`, which were read from files of these names.
fn page(names: &[String], results: &[JobResult], traces: &[Trace]) -> String {
    let comparison = Comparison::of(results);
    let groups = Measurements::of(&comparison, results);
    let title = format!("benchkv: {}", plural(results.len(), "result"));
    let repeats = results.len() - comparison.groups.len();
    let about = match repeats {
        0 => "Rates are of all ranks together, latencies are round trips.".to_owned(),
        repeats => format!(
            "Rates are of all ranks together, latencies are round trips. {repeats} of the files repeat others and are drawn with them."
        ),
    };
    let mut page = Page::new(&title, &about);
    page.warnings(&warnings(names, results));
    page.heading("Conditions", "What all results have in common.");
    page.conditions(&conditions(&comparison, results));
    page.heading("Results", "Each file. The spread is the standard deviation over its runs, and the slowest and the fastest of them.");
    let (header, rows) = table(names, results, &comparison);
    page.table(&header, &rows);
    let latencies = figures::latencies(&groups);
    let runs = figures::runs(&groups);
    let activity = figures::activity(&groups);
    if comparison.groups.len() > 1 {
        page.heading("Comparison", "By what differs between the results.");
        for (title, header, rows) in figures::tables(&comparison, &groups) {
            let about = "In brackets: the difference from the first column. Behind \u{b1}: half the interval that has the mean with a certainty of \
                         95 %, over files that repeat each other.";
            page.subheading(&title, about);
            page.table(&header, &rows);
        }
        figures::comparison(&comparison, &groups)
            .iter()
            .for_each(|charts| page.charts(charts));
        page.heading("Latency", "Round trips by the share of operations that are faster: the further to the right, the rarer.");
        page.charts(&latencies);
        page.heading(
            "Runs",
            "Runs of one result are measured one after the other in the same processes.",
        );
        page.charts(&runs);
        page.heading(
            "Daemons",
            "A daemon polls in rounds; the more messages a round finds, the less each costs.",
        );
        page.charts(&activity);
    } else {
        page.heading("Measurements", "Round trips by the share of operations that are faster; runs, in their order; rounds of daemons.");
        page.charts(&[latencies, runs, activity].concat());
    }
    if !traces.is_empty() {
        page.heading("Daemons over time", "Of the job whose traces were given.");
        page.charts(&traces::figures(traces, false));
        let about = "Every round that did something, for a millisecond from the first on; and requests outstanding to other ranks: in the first \
                     burst, when they first became fewer, at their peak, and in measured runs.";
        page.heading("How daemons began", about);
        let (header, rows) = traces::begins(traces);
        page.table(&header, &rows);
        page.charts(&traces::figures(traces, true));
        if let Some(trace) = traces.iter().find(|trace| trace.endpoints.len() > 1) {
            page.subheading(
                "By endpoint",
                "Of the first daemon with several: whether their answers come together, or spread.",
            );
            page.charts(&traces::figures(&trace.endpoints, true));
        }
    }
    page.end(&title)
}

/// A function that returns whether a warning concerns a result.
type Is = fn(&JobResult) -> bool;

/// Returns warnings that figures may mean less than they seem to.
fn warnings(names: &[String], results: &[JobResult]) -> Vec<String> {
    let concerned = |what: &str, is: Is| {
        let found: Vec<&str> = names
            .iter()
            .zip(results)
            .filter(|(_, result)| is(result))
            .map(|(name, _)| name.as_str())
            .collect();
        let which = match found.as_slice() {
            [] => return None,
            all if all.len() == results.len() => "all results".to_owned(),
            some => some.join(", "),
        };
        Some(format!("{what}: {which}."))
    };
    let checks: [(&str, Is); 12] = [
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
    checks
        .into_iter()
        .filter_map(|(what, is)| concerned(what, is))
        .collect()
}

/// Returns the number of polling threads of rank 0's host, and of the cores they could use; nothing
/// of them in virtual time.
fn threads_on_cores(result: &JobResult) -> String {
    if result.simulation.is_some() {
        return "-".to_owned();
    }
    format!(
        "{} on {}",
        result.placement.threads,
        result.placement.usable_cores.len()
    )
}

/// Returns the completions that daemons found in a round, and the shares of rounds that found none,
/// one, up to ten, up to a hundred, more.
fn completions(result: &JobResult) -> String {
    let of = &result.measured.activity;
    let shares = of
        .loops_by_cqes
        .map(|share| format!("{:.0}", 100.0 * share));
    format!("{:.2} ({} %)", of.cqes_per_loop, shares.join("/"))
}

/// A property of a result, in words.
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
                let JobArgs {
                    runs,
                    duration: duration_s,
                    warmup: warmup_s,
                    ..
                } = &result.options;
                format!(
                    "{} of {duration_s} s after {warmup_s} s",
                    plural(*runs, "run")
                )
            }),
            ("benchkv", |result| result.benchkv_version.clone()),
        ];
        conditions.extend(others.map(|(name, of)| (name.to_owned(), same(of))));
    }
    // Options that are left to benchkv are not worth a line.
    let telling = comparison
        .common
        .iter()
        .filter(|(_, value)| value != "none");
    telling.cloned().chain(conditions).collect()
}

/// The columns of the table of all results.
const FIGURES: [(&str, Property); 20] = [
    ("total", |result| rate(result.measured.total_rps)),
    ("\u{b1}", |result| {
        let share = |deviation: f64| {
            format!(
                "{:.1} %",
                100.0 * deviation / result.measured.total_rps.max(1e-9)
            )
        };
        result
            .over_runs
            .total_rps
            .std_dev
            .map_or_else(|| "-".to_owned(), share)
    }),
    ("slowest run", |result| rate(result.over_runs.total_rps.min)),
    ("fastest run", |result| rate(result.over_runs.total_rps.max)),
    ("remote", |result| rate(result.measured.remote_rps)),
    ("p50", |result| nanos(result.measured.latency_ns.p50 as f64)),
    ("p99", |result| nanos(result.measured.latency_ns.p99 as f64)),
    ("p99.9", |result| {
        nanos(result.measured.latency_ns.p999 as f64)
    }),
    ("gets p50", |result| {
        nanos(result.measured.get_latency_ns.p50 as f64)
    }),
    ("gets p99", |result| {
        nanos(result.measured.get_latency_ns.p99 as f64)
    }),
    ("puts p50", |result| {
        nanos(result.measured.put_latency_ns.p50 as f64)
    }),
    ("puts p99", |result| {
        nanos(result.measured.put_latency_ns.p99 as f64)
    }),
    ("core time an operation", |result| {
        result.cpu_ns_per_op.map_or_else(|| "-".to_owned(), nanos)
    }),
    ("messages per WRITE", |result| {
        format!("{:.1}", result.measured.activity.messages_per_write)
    }),
    ("empty rounds", |result| {
        format!("{:.0} %", 100.0 * result.measured.activity.empty_loops)
    }),
    ("completions a round", completions),
    ("rho", |result| {
        format!("{:.3}", result.measured.activity.rho)
    }),
    ("lost", |result| result.fate.lost.to_string()),
    ("not found", |result| result.fate.not_found.to_string()),
    ("threads on cores", threads_on_cores),
];

fn table(
    names: &[String],
    results: &[JobResult],
    comparison: &Comparison,
) -> (Vec<Cell>, Vec<Vec<Cell>>) {
    let text = |text: &str| [Cell::Text(text.to_owned())].into_iter();
    let row = |label: &str, figures: [String; FIGURES.len()], name: &str| {
        text(label)
            .chain(figures.map(Cell::Figure))
            .chain(text(name))
            .collect()
    };
    let header = row("settings", FIGURES.map(|(name, _)| name.to_owned()), "file");
    let of_member = |label: &str, member: usize| {
        let (result, name) = (results.get(member)?, names.get(member)?);
        Some(row(label, FIGURES.map(|(_, of)| of(result)), name))
    };
    let members = comparison.groups.iter().flat_map(|group| {
        let count = group.members.len();
        let label = move |number: usize| match count {
            1 => group.label.clone(),
            count => format!("{}, repeat {} of {count}", group.label, number + 1),
        };
        group
            .members
            .iter()
            .enumerate()
            .map(move |(number, member)| (label(number), *member))
    });
    (
        header,
        members
            .filter_map(|(label, member)| of_member(&label, member))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_traces_is_refused_with_what_to_do() {
        let dir = std::env::temp_dir().join(format!("benchkv-report-{}", std::process::id()));
        let refused = |dir: &Path| read_traces(dir).unwrap_err().to_string();
        assert!(refused(&dir).contains("No such file"));
        std::fs::create_dir(&dir).unwrap();
        let empty = refused(&dir);
        std::fs::write(dir.join("rank-0-daemon-0.csv"), "a,b\n").unwrap();
        let other = refused(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(
            empty.contains("rank-R-daemon-D.csv") && empty.contains("--trace DIR"),
            "{empty}"
        );
        assert!(other.contains("not a trace of this version"), "{other}");
    }
}
