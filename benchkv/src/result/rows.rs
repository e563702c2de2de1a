//! The result as a flat table: a row for the job, one for each run, one for each rank. The options are repeated on each row, so that a
//! row stands alone and tables of several jobs can be concatenated.

use std::borrow::Cow;

use engine::activity::FIGURES;
use engine::backend::counter_names;
use engine::client::Counts;

use super::{JobResult, Measured, OpenLoop, RankResult, RunResult};

/// A cell of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Name of the column, with the unit: the same in all rows.
    pub column: Cow<'static, str>,
    /// The value.
    pub value: Value,
}

/// A value of the column's type. A row may have none, which is not zero.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A word or a text.
    Text(Option<String>),
    /// A whole number.
    Count(Option<u64>),
    /// Any other number.
    Number(Option<f64>),
}

/// Returns the rows of a job: the job, its runs, its ranks. All have the same columns; each counter is one.
#[must_use]
pub fn rows(job: &JobResult) -> Vec<Vec<Cell>> {
    let of = |scope, measured| Row { job, scope, measured, whole: None, run: None, rank: None, cells: Vec::new() };
    let whole = Row { whole: Some(job), ..of("job", &job.measured) };
    let runs = (0..).zip(&job.runs).map(|(number, run)| Row { run: Some((number, run)), ..of("run", &run.measured) });
    let ranks = job.per_rank.iter().map(|rank| Row { rank: Some(rank), ..of("rank", &rank.measured) });
    [whole].into_iter().chain(runs).chain(ranks).map(Row::cells).collect()
}

/// A row in the making: its subject, in the job it belongs to.
struct Row<'a> {
    job: &'a JobResult,
    scope: &'static str,
    measured: &'a Measured,
    /// The subject is one of these.
    whole: Option<&'a JobResult>,
    run: Option<(u64, &'a RunResult)>,
    rank: Option<&'a RankResult>,
    cells: Vec<Cell>,
}

impl Row<'_> {
    fn cells(mut self) -> Vec<Cell> {
        self.text("scope", self.scope.to_owned());
        self.count("run", self.run.map(|(number, _)| number));
        self.count("rank", self.rank.map(|rank| rank.rank as u64));
        self.options();
        self.course();
        self.measurements();
        self.fates();
        self.rest();
        self.cells
    }

    fn text(&mut self, column: impl Into<Cow<'static, str>>, text: impl Into<Option<String>>) {
        self.cells.push(Cell { column: column.into(), value: Value::Text(text.into()) });
    }

    fn count(&mut self, column: impl Into<Cow<'static, str>>, count: impl Into<Option<u64>>) {
        self.cells.push(Cell { column: column.into(), value: Value::Count(count.into()) });
    }

    fn number(&mut self, column: impl Into<Cow<'static, str>>, number: impl Into<Option<f64>>) {
        self.cells.push(Cell { column: column.into(), value: Value::Number(number.into()) });
    }

    fn options(&mut self) {
        let (job, options, workload) = (self.job, &self.job.options, &self.job.options.workload);
        self.text("backend", job.backend.to_string());
        self.text("carrier", job.carrier.to_string());
        self.text("device", job.device.clone());
        self.count("ranks", job.ranks as u64);
        self.count("server_threads", job.server_threads as u64);
        self.count("client_threads", job.client_threads as u64);
        self.count("queue_depth", job.queue_depth as u64);
        self.count("seed", job.seed);
        self.number("duration_s", options.duration);
        self.number("warmup_s", options.warmup);
        self.count("key_range", workload.key_range);
        self.count("value_size", workload.value_bytes as u64);
        self.text("empty", workload.empty.to_string());
        self.number("read_ratio", workload.read_ratio);
        self.number("remote_ratio", workload.remote_ratio);
        self.text("distribution", workload.distribution.to_string());
        self.count("ring_bytes", job.sizes.ring_bytes);
        self.text("verify", workload.verify.to_string());
        self.text("wait", options.wait.to_string());
        self.text("policies", options.policies.to_string());
        self.text("options_json", serde_json::to_string(options).unwrap_or_default());
        self.text("hosts", job.launcher.hosts.join(" "));
        self.count("threads", job.placement.threads as u64);
        self.count("usable_cores", job.placement.usable_cores.len() as u64);
        self.text("cpu_model", job.environment.cpu_model.clone());
        self.text("kernel", job.environment.kernel.clone());
        self.text("git_commit", job.environment.git_commit.clone());
        self.text("build_profile", job.environment.build_profile.clone());
    }

    fn course(&mut self) {
        let (job, options) = (self.job, &self.job.options);
        let open_loop: Option<OpenLoop> = self.whole.map(|job| job.open_loop).or(self.run.map(|(_, run)| run.open_loop)).flatten();
        self.text("interrupted", job.interrupted.to_string());
        self.number("window_s", self.run.map(|(_, run)| run.duration_s));
        self.text("label", options.label.clone());
        self.count("ops", options.ops);
        self.number("rate_rps", options.pace.rate);
        self.text("arrivals", options.pace.arrivals.map(|arrivals| arrivals.to_string()));
        self.number("offered_rps", open_loop.map(|open| open.offered_rps));
        self.count("due_backlog", open_loop.map(|open| open.backlog));
        self.text("kept_up", open_loop.map(|open| open.kept_up.to_string()));
        self.number("issue_delay_ns", open_loop.map(|open| open.issue_delay_ns));
    }

    fn measurements(&mut self) {
        let of = self.measured;
        self.number("total_rps", of.total_rps);
        self.number("local_rps", of.local_rps);
        self.number("remote_rps", of.remote_rps);
        self.count("local_ops", of.local_ops);
        self.count("remote_ops", of.remote_ops);
        self.count("not_found_ops", of.not_found_ops);
        for (kind, summary) in [
            ("latency", of.latency_ns),
            ("local", of.local_latency_ns),
            ("get", of.get_latency_ns),
            ("put", of.put_latency_ns),
            ("remote", of.remote_latency_ns),
        ] {
            let figures = [("min", summary.min), ("p50", summary.p50), ("p99", summary.p99), ("p999", summary.p999), ("max", summary.max)];
            for (figure, ns) in [("mean", summary.mean)].into_iter().chain(figures.map(|(figure, ns)| (figure, ns as f64))) {
                self.number(format!("{kind}_{figure}_ns"), (summary.count > 0).then_some(ns));
            }
        }
        for (figure, get) in FIGURES {
            self.number(*figure, get(&of.activity));
        }
        for counter in counter_names().filter(|name| *name != "messages") {
            let rate = format!("{counter}_per_s");
            self.number(rate.clone(), of.activity.per_s.get(&rate));
        }
        self.count("outstanding_peak", of.activity.outstanding_peak.outstanding);
        self.count("backlog_peak", of.activity.backlog_peak);
    }

    /// Counters of the whole job, drain included. They have no value in a run, except for errors.
    fn fates(&mut self) {
        let fate = self.whole.map(|job| job.fate).or(self.rank.map(|rank| rank.fate));
        for (counter, get) in Counts::LIST {
            let of_run = self.run.filter(|_| *counter == "errors").map(|(_, run)| run.errors);
            self.count(*counter, fate.as_ref().map(get).or(of_run));
        }
    }

    fn rest(&mut self) {
        let (whole, rank) = (self.whole, self.rank);
        self.count("verify_failures", whole.map(|job| job.verify_failures).or(rank.map(|rank| rank.verify_failures)).flatten());
        self.text("pattern_hash", rank.map(|rank| rank.pattern_hash.clone()));
        self.count("peak_rss_bytes", rank.and_then(|rank| rank.peak_rss_bytes));
        self.number("total_rps_std_dev", whole.and_then(|job| job.over_runs.total_rps.std_dev));
        self.number("total_rps_min", whole.map(|job| job.over_runs.total_rps.min));
        self.number("total_rps_max", whole.map(|job| job.over_runs.total_rps.max));
        self.number("cpu_ns_per_op", whole.and_then(|job| job.cpu_ns_per_op));
        self.number("littles_law_deviation_ratio", whole.map(|job| job.littles_law.deviation));
        for counter in ["rnr_nak_retry_err", "out_of_buffer", "local_ack_timeout_err"] {
            // Of all NICs together.
            let ports = whole.and_then(|job| job.hardware_counters.as_ref()).into_iter().flatten();
            self.count(counter, ports.filter_map(|port| port.counted(counter)).reduce(|sum, more| sum + more));
        }
    }
}

/// Encodes the table as CSV by RFC 4180, with a header. A cell without a value is empty. Numbers read back unchanged.
///
/// # Errors
/// The table cannot be encoded.
pub fn csv(result: &JobResult) -> Result<Vec<u8>, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let rows = rows(result);
    writer.write_record(rows.first().into_iter().flatten().map(|cell| cell.column.as_bytes()))?;
    for row in rows {
        let texts = row.into_iter().map(|cell| match cell.value {
            Value::Text(text) => text,
            Value::Count(count) => count.map(|count| count.to_string()),
            Value::Number(number) => number.map(|number| number.to_string()),
        });
        writer.write_record(texts.map(Option::unwrap_or_default))?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::result::tests::{reduced, verdict};

    #[test]
    fn every_column_has_a_name_of_its_own_and_is_documented() {
        let guide = include_str!("../../../docs/benchmarking/reference.md");
        let result = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]);
        let names: Vec<String> = rows(&result).remove(0).into_iter().map(|cell| cell.column.into_owned()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
        for name in names {
            assert!(guide.contains(&format!("`{name}`")), "docs/benchmarking/reference.md does not explain the column {name}");
        }
    }

    #[test]
    fn a_figure_without_a_value_is_an_empty_cell_and_zero_is_not() {
        let table = csv(&reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])])).unwrap();
        let mut reader = csv::Reader::from_reader(&*table);
        let names = reader.headers().unwrap().clone();
        let job = reader.records().next().unwrap().unwrap();
        let cell = |name: &str| job.get(names.iter().position(|column| column == name).unwrap()).unwrap();
        assert_eq!([cell("window_stalls_per_s"), cell("rank"), cell("ops"), cell("unfinished")], ["", "", "", "0"]);
    }
}
