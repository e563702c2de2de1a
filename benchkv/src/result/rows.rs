//! The result as a flat table: a row for the job, one for each run, one for each rank. The options
//! are repeated on each row, so that a row needs no other row and tables of several jobs can be
//! concatenated.
//!
//! A column is a member of the document, or of the part of the document that is the subject of the
//! row.

use std::borrow::Cow;

use benchkv_harness::Failure;
use engine::backend::counter_names;
use engine::client::Counts;
use serde_json::Value;

use super::JobResult;

/// A cell of a row: the name of its column, with the unit, which is the same in all rows; and the
/// value. `None` as the value means that the row has no value in this column: it is not zero.
type Cell = (Cow<'static, str>, Option<String>);

/// Columns that have the same value in each row, as pointers into the document.
const OF_JOB: [(&str, &str); 31] = [
    ("clock", "/clock/source"),
    ("backend", "/backend"),
    ("carrier", "/carrier"),
    ("device", "/device"),
    ("ranks", "/ranks"),
    ("server_threads", "/server_threads"),
    ("client_threads", "/client_threads"),
    ("queue_depth", "/queue_depth"),
    ("seed", "/seed"),
    ("duration_s", "/options/duration_s"),
    ("warmup_s", "/options/warmup_s"),
    ("key_range", "/options/key_range"),
    ("value_size", "/options/value_size"),
    ("empty", "/options/empty"),
    ("read_ratio", "/options/read_ratio"),
    ("remote_ratio", "/options/remote_ratio"),
    ("ring_bytes", "/sizes/ring_bytes"),
    ("verify", "/options/verify"),
    ("wait", "/options/wait"),
    ("options_json", "/options"),
    ("threads", "/placement/threads"),
    ("cpu_model", "/environment/cpu_model"),
    ("kernel", "/environment/kernel"),
    ("git_commit", "/environment/git_commit"),
    ("build_profile", "/environment/build_profile"),
    ("unix_s", "/environment/unix_s"),
    ("interrupted", "/interrupted"),
    ("label", "/options/label"),
    ("ops", "/options/ops"),
    ("rate_rps", "/options/rate"),
    ("arrivals", "/options/arrivals"),
];

/// Columns from the part of the document that is the subject of the row. A part may lack some of
/// them: for example, a run has the counter of errors, and not the other counters of the whole job,
/// which include the drain.
const OF_PART: [(&str, &str); 37] = [
    ("window_s", "/duration_s"),
    ("offered_rps", "/open_loop/offered_rps"),
    ("due_backlog", "/open_loop/backlog"),
    ("kept_up", "/open_loop/kept_up"),
    ("issue_delay_ns", "/open_loop/issue_delay_ns"),
    ("total_rps", "/total_rps"),
    ("local_rps", "/local_rps"),
    ("remote_rps", "/remote_rps"),
    ("local_ops", "/local_ops"),
    ("remote_ops", "/remote_ops"),
    ("not_found_ops", "/not_found_ops"),
    ("loops_per_s", "/activity/loops_per_s"),
    ("empty_loops_ratio", "/activity/empty_loops"),
    ("messages_per_loop", "/activity/messages_per_loop"),
    ("cqes_per_loop", "/activity/cqes_per_loop"),
    ("loops_of_0_cqes_ratio", "/activity/loops_by_cqes/0"),
    ("loops_of_1_cqe_ratio", "/activity/loops_by_cqes/1"),
    ("loops_of_2_to_10_cqes_ratio", "/activity/loops_by_cqes/2"),
    ("loops_of_11_to_100_cqes_ratio", "/activity/loops_by_cqes/3"),
    ("loops_of_more_cqes_ratio", "/activity/loops_by_cqes/4"),
    ("loop_ns", "/activity/loop_ns"),
    ("rtt_ns", "/activity/rtt_ns"),
    ("rho_ratio", "/activity/rho"),
    ("message_ns", "/activity/message_ns"),
    ("outstanding_mean", "/activity/outstanding_mean"),
    ("messages_per_write", "/activity/messages_per_write"),
    ("outstanding_peak", "/activity/outstanding_peak/outstanding"),
    ("backlog_peak", "/activity/backlog_peak"),
    ("verify_failures", "/verify_failures"),
    ("pattern_hash", "/pattern_hash"),
    ("peak_rss_bytes", "/peak_rss_bytes"),
    ("total_rps_std_dev", "/over_runs/total_rps/std_dev"),
    ("total_rps_min", "/over_runs/total_rps/min"),
    ("total_rps_max", "/over_runs/total_rps/max"),
    ("cpu_ns_per_op", "/cpu_ns_per_op"),
    ("other_cores", "/other_cores"),
    ("littles_law_deviation_ratio", "/littles_law/deviation"),
];

/// Prefixes of columns of latencies, and the members of the document that contain these latencies.
const LATENCIES: [(&str, &str); 5] = [
    ("latency", "latency_ns"),
    ("local", "local_latency_ns"),
    ("get", "get_latency_ns"),
    ("put", "put_latency_ns"),
    ("remote", "remote_latency_ns"),
];

/// Counters of NICs that are columns, the sums over all NICs of the job.
const OF_NICS: [&str; 3] = [
    "rnr_nak_retry_err",
    "out_of_buffer",
    "local_ack_timeout_err",
];

/// Returns a member of the document as the text of a cell. Numbers read back unchanged.
fn text(member: Option<&Value>) -> Option<String> {
    match member? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        Value::Number(number) if number.is_f64() => number.as_f64().map(|value| value.to_string()),
        other => Some(other.to_string()),
    }
}

/// Returns the rows of a job. All rows have the same columns, and each counter is a column.
fn rows(job: &JobResult) -> Result<Vec<Vec<Cell>>, serde_json::Error> {
    let document = serde_json::to_value(job)?;
    let parts = |name: &str| document[name].as_array().into_iter().flatten().enumerate();
    let runs = parts("runs").map(|(number, part)| ("run", Some(number), part));
    let ranks = parts("per_rank").map(|(number, part)| ("rank", Some(number), part));
    let all = [("job", None, &document)]
        .into_iter()
        .chain(runs)
        .chain(ranks);
    Ok(all
        .map(|(scope, number, part)| row(job, &document, scope, number, part))
        .collect())
}

/// Returns the row of a part of the document: the part with this number in this `scope`.
fn row(
    job: &JobResult,
    document: &Value,
    scope: &'static str,
    number: Option<usize>,
    part: &Value,
) -> Vec<Cell> {
    let mut cells: Vec<Cell> = vec![("scope".into(), Some(scope.to_owned()))];
    let numbered = |kind| {
        number
            .filter(|_| scope == kind)
            .map(|number| number.to_string())
    };
    cells.extend(["run", "rank"].map(|kind| (kind.into(), numbered(kind))));
    let of_job =
        |(column, pointer): (&'static str, _)| (column.into(), text(document.pointer(pointer)));
    cells.extend(OF_JOB.map(of_job));
    // The models of a simulation; a measured job has none.
    let models = job.simulation.as_ref().map(|record| {
        serde_json::json!({ "cpu": record.cpu, "nic": record.nic, "course": record.course })
            .to_string()
    });
    cells.push(("simulation_json".into(), models));
    let in_words = [
        (
            "distribution",
            job.options.workload.distribution.to_string(),
        ),
        ("policies", job.options.policies.to_string()),
        ("hosts", job.launcher.hosts.join(" ")),
        ("usable_cores", job.placement.usable_cores.len().to_string()),
    ];
    cells.extend(in_words.map(|(column, value)| (column.into(), Some(value))));
    let of_part =
        |(column, pointer): (&'static str, _)| (column.into(), text(part.pointer(pointer)));
    cells.extend(OF_PART.map(of_part));
    for (prefix, member) in LATENCIES {
        let summary = Some(&part[member]).filter(|summary| summary["count"] != 0);
        for figure in ["mean", "min", "p50", "p90", "p99", "p999", "p9999", "max"] {
            let ns = text(summary.and_then(|summary| summary.get(figure)));
            cells.push((format!("{prefix}_{figure}_ns").into(), ns));
        }
    }
    for counter in counter_names().filter(|name| *name != "messages") {
        let rate = format!("{counter}_per_s");
        let value = text(part["activity"].get(&rate));
        cells.push((rate.into(), value));
    }
    for (counter, _) in Counts::LIST {
        cells.push(((*counter).into(), text(part.get(counter))));
    }
    for counter in OF_NICS {
        let ports = job
            .hardware_counters
            .iter()
            .flatten()
            .filter(|_| scope == "job");
        let sum = ports
            .filter_map(|port| port.counted(counter))
            .reduce(|sum, more| sum + more);
        cells.push((counter.into(), sum.map(|sum| sum.to_string())));
    }
    cells
}

/// Encodes the table as CSV by RFC 4180, with a header. A cell without a value is empty. Numbers
/// read back unchanged.
///
/// # Errors
/// The table cannot be encoded.
pub fn csv(result: &JobResult) -> Result<Vec<u8>, Failure> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let rows = rows(result)?;
    writer.write_record(
        rows.first()
            .into_iter()
            .flatten()
            .map(|(column, _)| column.as_bytes()),
    )?;
    for row in rows {
        writer.write_record(row.into_iter().map(|(_, value)| value.unwrap_or_default()))?;
    }
    Ok(writer.into_inner()?)
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
            .unwrap()
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
