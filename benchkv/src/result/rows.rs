//! The result as a flat table: a row for the job, one for each run, one for each rank. The options
//! are repeated on each row, so that a row stands alone and tables of several jobs can be
//! concatenated.

use std::borrow::Cow;

use engine::activity::FIGURES;
use engine::backend::counter_names;
use engine::client::Counts;

use super::{JobResult, Measured, OpenLoop, RankResult, RunResult};

/// A cell of a row: the name of its column, with the unit, which is the same in all rows; and the
/// value. A row may have none, which is not zero.
type Cell = (Cow<'static, str>, Option<String>);

/// Returns the rows of a job: the job, its runs, its ranks. All have the same columns; each counter
/// is one.
fn rows(job: &JobResult) -> Vec<Vec<Cell>> {
    let of = |scope, measured| Row {
        job,
        scope,
        measured,
        whole: None,
        run: None,
        rank: None,
        cells: Vec::new(),
    };
    let whole = Row {
        whole: Some(job),
        ..of("job", &job.measured)
    };
    let runs = (0..).zip(&job.runs).map(|(number, run)| Row {
        run: Some((number, run)),
        ..of("run", &run.measured)
    });
    let ranks = job.per_rank.iter().map(|rank| Row {
        rank: Some(rank),
        ..of("rank", &rank.measured)
    });
    [whole]
        .into_iter()
        .chain(runs)
        .chain(ranks)
        .map(Row::cells)
        .collect()
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

/// Puts fields of a value, which every row has, into columns of their names.
macro_rules! put {
    ($row:ident, $of:expr; $($field:ident),+) => {
        $($row.put(stringify!($field), &$of.$field);)+
    };
}

impl Row<'_> {
    fn cells(mut self) -> Vec<Cell> {
        self.put("scope", self.scope);
        self.put_any("run", self.run.map(|(number, _)| number));
        self.put_any("rank", self.rank.map(|rank| rank.rank));
        self.options();
        self.course();
        self.measurements();
        self.fates();
        self.rest();
        self.cells
    }

    fn put(&mut self, column: impl Into<Cow<'static, str>>, value: impl ToString) {
        self.put_any(column, Some(value));
    }

    /// Puts a value that this row may not have.
    fn put_any(&mut self, column: impl Into<Cow<'static, str>>, value: Option<impl ToString>) {
        self.cells
            .push((column.into(), value.map(|value| value.to_string())));
    }

    fn options(&mut self) {
        let job = self.job;
        let options = &self.job.options;
        let workload = &self.job.options.workload;
        // Of a simulation the models: what a measured row does not have.
        let simulation = job.simulation.as_ref();
        let models = simulation.map(|record| serde_json::json!({ "cpu": record.cpu, "nic": record.nic, "course": record.course }));
        self.put_any(
            "clock",
            serde_json::to_value(job.clock).unwrap_or_default()["source"].as_str(),
        );
        self.put_any("simulation_json", models);
        put!(self, job; backend, carrier, device, ranks, server_threads, client_threads, queue_depth, seed);
        self.put("duration_s", options.duration);
        self.put("warmup_s", options.warmup);
        self.put("key_range", workload.key_range);
        self.put("value_size", workload.value_bytes);
        put!(self, workload; empty, read_ratio, remote_ratio, distribution);
        self.put("ring_bytes", job.sizes.ring_bytes);
        self.put("verify", workload.verify);
        put!(self, options; wait, policies);
        self.put(
            "options_json",
            serde_json::to_string(options).unwrap_or_default(),
        );
        self.put("hosts", job.launcher.hosts.join(" "));
        self.put("threads", job.placement.threads);
        self.put("usable_cores", job.placement.usable_cores.len());
        put!(self, job.environment; cpu_model, kernel, git_commit, build_profile);
    }

    fn course(&mut self) {
        let (job, options) = (self.job, &self.job.options);
        let open_loop: Option<OpenLoop> = self
            .whole
            .map(|job| job.open_loop)
            .or(self.run.map(|(_, run)| run.open_loop))
            .flatten();
        self.put("interrupted", job.interrupted);
        self.put_any("window_s", self.run.map(|(_, run)| run.duration_s));
        self.put_any("label", options.label.as_ref());
        self.put_any("ops", options.ops);
        self.put_any("rate_rps", options.pace.rate);
        self.put_any("arrivals", options.pace.arrivals);
        self.put_any("offered_rps", open_loop.map(|open| open.offered_rps));
        self.put_any("due_backlog", open_loop.map(|open| open.backlog));
        self.put_any("kept_up", open_loop.map(|open| open.kept_up));
        self.put_any("issue_delay_ns", open_loop.map(|open| open.issue_delay_ns));
    }

    fn measurements(&mut self) {
        let of = self.measured;
        put!(self, of; total_rps, local_rps, remote_rps, local_ops, remote_ops, not_found_ops);
        for (kind, summary) in [
            ("latency", of.latency_ns),
            ("local", of.local_latency_ns),
            ("get", of.get_latency_ns),
            ("put", of.put_latency_ns),
            ("remote", of.remote_latency_ns),
        ] {
            let figures = [
                ("min", summary.min),
                ("p50", summary.p50),
                ("p99", summary.p99),
                ("p999", summary.p999),
                ("max", summary.max),
            ];
            for (figure, ns) in [("mean", summary.mean)]
                .into_iter()
                .chain(figures.map(|(figure, ns)| (figure, ns as f64)))
            {
                self.put_any(
                    format!("{kind}_{figure}_ns"),
                    (summary.count > 0).then_some(ns),
                );
            }
        }
        for (figure, get) in FIGURES {
            self.put(*figure, get(&of.activity));
        }
        for counter in counter_names().filter(|name| *name != "messages") {
            let rate = format!("{counter}_per_s");
            self.put_any(rate.clone(), of.activity.per_s.get(&rate));
        }
        self.put("outstanding_peak", of.activity.outstanding_peak.outstanding);
        self.put("backlog_peak", of.activity.backlog_peak);
    }

    /// Counters of the whole job, drain included. They have no value in a run, except for errors.
    fn fates(&mut self) {
        let fate = self
            .whole
            .map(|job| job.fate)
            .or(self.rank.map(|rank| rank.fate));
        for (counter, get) in Counts::LIST {
            let of_run = self
                .run
                .filter(|_| *counter == "errors")
                .map(|(_, run)| run.errors);
            self.put_any(*counter, fate.as_ref().map(get).or(of_run));
        }
    }

    fn rest(&mut self) {
        let (whole, rank) = (self.whole, self.rank);
        self.put_any(
            "verify_failures",
            whole
                .map(|job| job.verify_failures)
                .or(rank.map(|rank| rank.verify_failures))
                .flatten(),
        );
        self.put_any("pattern_hash", rank.map(|rank| &rank.pattern_hash));
        self.put_any("peak_rss_bytes", rank.and_then(|rank| rank.peak_rss_bytes));
        self.put_any(
            "total_rps_std_dev",
            whole.and_then(|job| job.over_runs.total_rps.std_dev),
        );
        self.put_any(
            "total_rps_min",
            whole.map(|job| job.over_runs.total_rps.min),
        );
        self.put_any(
            "total_rps_max",
            whole.map(|job| job.over_runs.total_rps.max),
        );
        self.put_any("cpu_ns_per_op", whole.and_then(|job| job.cpu_ns_per_op));
        self.put_any(
            "littles_law_deviation_ratio",
            whole.map(|job| job.littles_law.deviation),
        );
        for counter in [
            "rnr_nak_retry_err",
            "out_of_buffer",
            "local_ack_timeout_err",
        ] {
            // Of all NICs together.
            let ports = whole
                .and_then(|job| job.hardware_counters.as_ref())
                .into_iter()
                .flatten();
            self.put_any(
                counter,
                ports
                    .filter_map(|port| port.counted(counter))
                    .reduce(|sum, more| sum + more),
            );
        }
    }
}

/// Encodes the table as CSV by RFC 4180, with a header. A cell without a value is empty. Numbers
/// read back unchanged.
///
/// # Errors
/// The table cannot be encoded.
pub fn csv(result: &JobResult) -> Result<Vec<u8>, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let rows = rows(result);
    writer.write_record(
        rows.first()
            .into_iter()
            .flatten()
            .map(|(column, _)| column.as_bytes()),
    )?;
    for row in rows {
        writer.write_record(row.into_iter().map(|(_, value)| value.unwrap_or_default()))?;
    }
    writer
        .into_inner()
        .map_err(|error| error.into_error().into())
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
        let names: Vec<String> = rows(&result)
            .remove(0)
            .into_iter()
            .map(|(column, _)| column.into_owned())
            .collect();
        assert_eq!(
            names.iter().collect::<HashSet<_>>().len(),
            names.len(),
            "{names:?}"
        );
        for name in names {
            assert!(
                guide.contains(&format!("`{name}`")),
                "docs/benchmarking/reference.md does not explain the column {name}"
            );
        }
    }

    #[test]
    fn a_figure_without_a_value_is_an_empty_cell_and_zero_is_not() {
        let table = csv(&reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])])).unwrap();
        let mut reader = csv::Reader::from_reader(&*table);
        let names = reader.headers().unwrap().clone();
        let job = reader.records().next().unwrap().unwrap();
        let cell = |name: &str| {
            job.get(names.iter().position(|column| column == name).unwrap())
                .unwrap()
        };
        assert_eq!(
            [
                cell("window_stalls_per_s"),
                cell("rank"),
                cell("ops"),
                cell("unfinished")
            ],
            ["", "", "", "0"]
        );
    }
}
