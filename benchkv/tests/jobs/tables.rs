//! The flat form of a result: the same numbers as in the document.

use std::collections::BTreeMap;
use std::path::Path;

use benchkv::result::{self, Cell, JobResult};
use serde_json::Value;

use crate::job::{Scratch, run, turn};

/// A table by rows: each cell a number or a text, or nothing.
type Table = Vec<BTreeMap<String, Value>>;

fn read_csv(path: &Path, document: &Value) -> Table {
    let mut reader = csv::Reader::from_path(path).unwrap();
    let names = reader.headers().unwrap().clone();
    let columns = result::rows(&serde_json::from_value::<JobResult>(document.clone()).unwrap()).remove(0);
    assert_eq!(names.iter().collect::<Vec<_>>(), columns.iter().map(|cell| &*cell.column).collect::<Vec<_>>());
    let typed = |(cell, text): (&Cell, &str)| {
        let value = match cell.value {
            _ if text.is_empty() => Value::Null,
            result::Value::Text(_) => text.into(),
            result::Value::Count(_) => text.parse::<u64>().unwrap().into(),
            result::Value::Number(_) => text.parse::<f64>().unwrap().into(),
        };
        (cell.column.clone().into_owned(), value)
    };
    reader.records().map(|row| columns.iter().zip(&row.unwrap()).map(typed).collect()).collect()
}

/// Returns each row, beside the member of the document it is about.
fn beside<'a>(table: &'a Table, document: &'a Value) -> Vec<(&'a BTreeMap<String, Value>, &'a Value)> {
    let (runs, ranks) = (document["runs"].as_array().unwrap(), document["per_rank"].as_array().unwrap());
    let members: Vec<_> = [document].into_iter().chain(runs).chain(ranks).collect();
    assert_eq!(table.len(), members.len());
    let scopes = ["job"].into_iter().chain(runs.iter().map(|_| "run")).chain(ranks.iter().map(|_| "rank"));
    assert!(table.iter().map(|row| &row["scope"]).eq(scopes), "{table:?}");
    table.iter().zip(members).collect()
}

#[track_caller]
fn assert_same_numbers(table: &Table, document: &Value) {
    for (row, member) in beside(table, document) {
        for name in ["total_rps", "local_rps", "remote_rps", "local_ops", "remote_ops"] {
            assert_eq!(row[name], member[name], "{name}: {row:?}");
        }
        for name in ["loops_per_s", "messages_per_write", "writes_per_s", "backlog_peak"] {
            assert_eq!(row[name], member["activity"][name], "{name}: {row:?}");
        }
        for (columns, summary) in [("latency", "latency_ns"), ("local", "local_latency_ns"), ("remote", "remote_latency_ns")] {
            for figure in ["mean", "min", "p50", "p99", "p999", "max"] {
                let cell = row[&format!("{columns}_{figure}_ns")].as_f64();
                assert_eq!(cell, member[summary][figure].as_f64(), "{summary} {figure}: {row:?}");
            }
        }
        for name in ["issued", "completed", "lost", "pattern_hash", "peak_rss_bytes"] {
            assert_eq!(row[name], member[name], "{name}: absent where the document has none: {row:?}");
        }
        for name in ["backend", "device", "ranks", "queue_depth", "seed"] {
            assert_eq!(row[name], document[name], "{name}: repeated on each row: {row:?}");
        }
        assert_eq!(serde_json::from_str::<Value>(row["options_json"].as_str().unwrap()).unwrap(), document["options"]);
    }
}

#[test]
fn the_same_seed_issues_the_same_operations_and_the_table_says_the_same_as_the_document() {
    let (_turn, dir, files) = (turn(), Scratch::in_memory(), Scratch::on_disk());
    let table = |name: &str| files.path().join(name);
    let with = |seed: &str, file: &str| {
        std::fs::write(table(file), "an older and longer table\n".repeat(10_000)).unwrap();
        run(&dir, &["--seed", seed, "--runs", "2", "--json", "-", "--output", table(file).to_str().unwrap()]).result()
    };
    let first = with("7", "first.csv");
    let rows = read_csv(&table("first.csv"), &first);
    assert_same_numbers(&rows, &first);
    let second = with("7", "second.csv");
    let hashes =
        |result: &Value| result["per_rank"].as_array().unwrap().iter().map(|rank| rank["pattern_hash"].clone()).collect::<Vec<_>>();
    assert_eq!(hashes(&first), hashes(&second));
    let other = with("8", "other.csv");
    assert!(hashes(&first).iter().zip(hashes(&other)).all(|(first, other)| *first != other), "{other}");
    assert_eq!(files.names().len(), 3, "nothing else is left: {:?}", files.names());
}

#[test]
fn a_table_that_cannot_be_written_is_refused_before_the_run() {
    let dir = Scratch::in_memory();
    run(&dir, &["--output", "/nonexistent/x.csv"]).assert_failed(2, &["--output", "/nonexistent/x.csv", "a directory you may write to"]);
    run(&dir, &["--output", "x.json"]).assert_failed(2, &["--output", "x.json", "end in .csv"]);
}
