//! `scalerpc_bench scale` on a small scale: its results, their reproducibility, and refused
//! options.

use std::fs;
use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::SCALERPC_BENCH;

/// Time limit of a run.
const WATCHDOG: Duration = Duration::from_secs(120);

/// A cache of 12 contexts, and groups of 4. The NIC uses 6 to 8 clients at a time. The server is
/// busy with 4 clients.
const SMALL: &str = "--clients 4,8,24 --cache 12 --group-size 4 --slice-us 200 --depth 2 --server-ns 500 --miss-ns 4000 --window-us 4000";

struct Ended {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: String,
}

fn run(args: &str) -> Ended {
    let mut command = Command::new(SCALERPC_BENCH);
    let mut child = command
        .arg("scale")
        .args(args.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let err = thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > WATCHDOG {
            child.kill().unwrap();
            panic!("still running after {WATCHDOG:?}: {args}");
        }
        thread::sleep(Duration::from_millis(5));
    };
    Ended {
        status,
        stdout: out.join().unwrap(),
        stderr: err.join().unwrap(),
    }
}

/// Returns the standard output of a run that succeeds.
fn document(args: &str) -> Vec<u8> {
    let ended = run(&format!("{args} --json -"));
    assert!(ended.status.success(), "{}", ended.stderr);
    ended.stdout
}

fn value(args: &str) -> Value {
    serde_json::from_slice(&document(args)).unwrap()
}

#[test]
fn grouping_off_falls_past_the_cache_and_grouping_on_does_not() {
    let document = value(SMALL);
    assert_eq!(
        (
            document["schema"].as_str(),
            document["schema_version"].as_u64()
        ),
        (Some("scalerpc-scale"), Some(4))
    );
    let (drop, worst) = (
        document["grouping_off_drop"].as_f64().unwrap(),
        document["grouping_on_worst"].as_f64().unwrap(),
    );
    assert!(
        (0.4..1.0).contains(&drop) && (0.9..=1.0).contains(&worst),
        "{document:#}"
    );
    let curve = document["curve"].as_array().unwrap();
    assert_eq!(
        curve
            .iter()
            .map(|pair| pair["clients"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [4, 8, 24]
    );
    let misses = |way: &str| curve[2][way]["send_miss_share"].as_f64().unwrap();
    assert!(misses("off") > 0.2 && misses("on") < 0.05, "{document:#}");
    assert!(
        curve[2]["on"]["slices"].as_u64().unwrap() > 10 && curve[2]["off"]["slices"] == 0,
        "{document:#}"
    );
    assert!(
        curve[2]["on"]["fewest_of_a_client"].as_u64().unwrap() > 0,
        "nobody starves: {document:#}"
    );
}

/// Fetching the contexts of its clients takes the server's NIC nearly half of a slice.
#[test]
fn slices_become_longer_where_more_gets_done_and_no_longer_than_a_rotation_may_be() {
    let on = |args: &str| {
        let document = value(&format!("{SMALL} --miss-ns 20000 --window-us 20000 {args}"));
        let on = &document["curve"][2]["on"];
        (
            on["slice_ns"].as_u64().unwrap(),
            on["responses_per_s"].as_f64().unwrap(),
        )
    };
    let (fixed_ns, fixed) = on("--max-rotation-us 0");
    let (longer_ns, longer) = on("--max-rotation-us 2500");
    let (longest_ns, longest) = on("--max-rotation-us 20000");
    assert_eq!((fixed_ns, longer_ns), (200_000, 400_000), "six groups");
    assert!(
        longest_ns > longer_ns && longer > 1.1 * fixed && longest > 1.03 * longer,
        "{fixed} {longer} {longest_ns} {longest}"
    );
}

/// Any drop in throughput is due to misses of the cache: without misses, or if misses cost nothing,
/// the throughput does not drop.
#[test]
fn a_cache_that_holds_every_context_costs_nothing_whatever_the_number_of_clients() {
    let document = value(&format!("{SMALL} --cache 64"));
    assert!(
        document["grouping_off_drop"].as_f64().unwrap() < 0.02,
        "{document:#}"
    );
    let document = value(&format!("{SMALL} --miss-ns 0"));
    assert!(
        document["grouping_off_drop"].as_f64().unwrap() < 0.02,
        "{document:#}"
    );
}

#[test]
fn equal_options_give_equal_bytes_and_another_seed_gives_others() {
    let first = document(SMALL);
    assert!(first == document(SMALL));
    assert!(first != document(&format!("{SMALL} --seed 2")));
}

#[test]
fn the_plot_is_a_file_of_its_own_and_the_tables_are_for_people() {
    let path = std::env::temp_dir().join(format!("scalerpc-scale-{}.svg", std::process::id()));
    let ended = run(&format!("{SMALL} --svg {}", path.display()));
    assert!(ended.status.success(), "{}", ended.stderr);
    let svg = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    for part in [
        "<svg ",
        "clients",
        "responses per second",
        "grouping on: groups of 4",
        "grouping off",
        "12 contexts",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    let tables = String::from_utf8(ended.stdout).unwrap();
    for part in [
        "Modelled",
        "grouping off drops by",
        "grouping on keeps",
        "12 contexts, 4000 ns",
    ] {
        assert!(tables.contains(part), "{part}: {tables}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_range() {
    let cases = [
        ("--clients 0", "1..=4096"),
        ("--clients 5000", "1..=4096"),
        ("--clients 10,10", "a rising list"),
        ("--clients 20,10", "a rising list"),
        ("--depth 65", "1..=64"),
        ("--request-bytes 7", "8..=65496"),
        ("--response-bytes 70000", "8..=65496"),
        ("--group-size 51", "1..=50"),
        ("--slice-us 0", "1..=1000000"),
        ("--max-rotation-us 1000001", "0..=1000000"),
        ("--cache 0", "1..=65536"),
        ("--miss-ns 1000001", "0..=1000000"),
        ("--server-ns 0", "1..=1000000"),
        ("--window-us 99", "100..=10000000"),
        ("--svg /nonexistent/plot.svg", "/nonexistent"),
        ("--json /nonexistent/result.json", "/nonexistent"),
    ];
    for (args, expected) in cases {
        let ended = run(args);
        assert!(
            !ended.status.success() && ended.stderr.contains(expected),
            "{args}: {}",
            ended.stderr
        );
        assert!(ended.stdout.is_empty(), "{args}");
    }
}

/// Operations on files, and transactions, which are checked as they run: past the cache grouping
/// doubles the rate of both.
#[test]
fn files_and_accounts_are_kept_and_grouping_helps_them_past_the_cache() {
    for workload in ["metadata", "smallbank"] {
        let gain = |args: &str| {
            let shape = "--clients 24 --group-size 4 --slice-us 200 --depth 2 --server-ns 500 --miss-ns 4000 --window-us 2000 --max-rotation-us 2500";
            let document = value(&format!("{shape} --workload {workload} {args}"));
            let last = document["curve"]
                .as_array()
                .unwrap()
                .last()
                .unwrap()
                .clone();
            last["on"]["responses_per_s"].as_f64().unwrap()
                / last["off"]["responses_per_s"].as_f64().unwrap()
        };
        let (missing, cached) = (gain("--cache 12"), gain("--cache 64"));
        assert!(
            missing > 1.9 && cached < 1.0,
            "{workload}: {missing} and {cached}"
        );
    }
}
