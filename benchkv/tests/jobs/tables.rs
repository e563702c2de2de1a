//! The flat form of a result: the same numbers as in the document.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::job::{Scratch, run, turn};

/// A table by rows: the texts of the cells by column.
type Table = Vec<BTreeMap<String, String>>;

fn read_csv(path: &Path) -> Table {
    csv::Reader::from_path(path)
        .unwrap()
        .deserialize()
        .map(Result::unwrap)
        .collect()
}

/// Returns whether a cell has the value of the document: its number or its text. The cell of null
/// is empty.
fn is(cell: &str, value: &Value) -> bool {
    match value {
        Value::Null => cell.is_empty(),
        Value::String(text) => cell == text,
        // Numbers are compared by value, since a number is the same with and without a point.
        _ => value
            .as_f64()
            .is_some_and(|number| cell.parse() == Ok(number)),
    }
}

/// Returns each row, with its member of the document.
fn beside<'a>(
    table: &'a Table,
    document: &'a Value,
) -> Vec<(&'a BTreeMap<String, String>, &'a Value)> {
    let (runs, ranks) = (
        document["runs"].as_array().unwrap(),
        document["per_rank"].as_array().unwrap(),
    );
    let members: Vec<_> = [document].into_iter().chain(runs).chain(ranks).collect();
    assert_eq!(table.len(), members.len());
    let scopes = ["job"]
        .into_iter()
        .chain(runs.iter().map(|_| "run"))
        .chain(ranks.iter().map(|_| "rank"));
    assert!(
        table.iter().map(|row| &row["scope"]).eq(scopes),
        "{table:?}"
    );
    table.iter().zip(members).collect()
}

#[track_caller]
fn assert_same_numbers(table: &Table, document: &Value) {
    for (row, member) in beside(table, document) {
        for name in [
            "total_rps",
            "local_rps",
            "remote_rps",
            "local_ops",
            "remote_ops",
        ] {
            assert!(is(&row[name], &member[name]), "{name}: {row:?}");
        }
        for name in [
            "loops_per_s",
            "messages_per_write",
            "writes_per_s",
            "backlog_peak",
        ] {
            assert!(is(&row[name], &member["activity"][name]), "{name}: {row:?}");
        }
        for (columns, summary) in [
            ("latency", "latency_ns"),
            ("local", "local_latency_ns"),
            ("remote", "remote_latency_ns"),
        ] {
            for figure in ["mean", "min", "p50", "p90", "p99", "p999", "p9999", "max"] {
                assert!(
                    is(
                        &row[&format!("{columns}_{figure}_ns")],
                        &member[summary][figure]
                    ),
                    "{summary} {figure}: {row:?}"
                );
            }
        }
        for name in [
            "issued",
            "completed",
            "lost",
            "pattern_hash",
            "peak_rss_bytes",
        ] {
            assert!(
                is(&row[name], &member[name]),
                "{name}: absent where the document has none: {row:?}"
            );
        }
        for name in ["backend", "device", "ranks", "queue_depth", "seed"] {
            assert!(
                is(&row[name], &document[name]),
                "{name}: repeated on each row: {row:?}"
            );
        }
        assert_eq!(
            serde_json::from_str::<Value>(&row["options_json"]).unwrap(),
            document["options"]
        );
    }
}

#[test]
fn the_same_seed_issues_the_same_operations_and_the_table_says_the_same_as_the_document() {
    let _turn = turn();
    let dir = Scratch::in_memory();
    let files = Scratch::on_disk();
    let table = |name: &str| files.path().join(name);
    let with = |seed: &str, file: &str| {
        std::fs::write(table(file), "an older and longer table\n".repeat(10_000)).unwrap();
        run(
            &dir,
            &[
                "--seed",
                seed,
                "--runs",
                "2",
                "--json",
                "-",
                "--output",
                table(file).to_str().unwrap(),
            ],
        )
        .result()
    };
    let first = with("7", "first.csv");
    let rows = read_csv(&table("first.csv"));
    assert_same_numbers(&rows, &first);
    let second = with("7", "second.csv");
    let hashes = |result: &Value| {
        result["per_rank"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["pattern_hash"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(hashes(&first), hashes(&second));
    let other = with("8", "other.csv");
    assert!(
        hashes(&first)
            .iter()
            .zip(hashes(&other))
            .all(|(first, other)| *first != other),
        "{other}"
    );
    assert_eq!(
        files.names().len(),
        3,
        "nothing else is left: {:?}",
        files.names()
    );
}

#[test]
fn a_table_that_cannot_be_written_is_refused_before_the_run() {
    let dir = Scratch::in_memory();
    run(&dir, &["--output", "/nonexistent/x.csv"]).assert_failed(
        2,
        &[
            "--output",
            "/nonexistent/x.csv",
            "a directory you may write to",
        ],
    );
    run(&dir, &["--output", "x.json"]).assert_failed(2, &["--output", "x.json", "end in .csv"]);
}
