//! Policies at work, on a device with delays: no operation is lost, and the statistics and the
//! series of the daemons show the effects of a policy.

use std::path::Path;

use benchkv::trace::{file_of, write};
use engine::trace::{Sample, Series};
use serde_json::Value;

use crate::job::{Job, SHORT, Scratch, benchkv, turn};
use crate::measurement::{count, daemons, list, measure, number};
use crate::series_file;

/// Runs a job with the policies `args`. Returns its result, and the series of its daemons.
fn traced(args: &[&str]) -> (Value, Vec<Vec<Sample>>) {
    let files = Scratch::on_disk();
    let dir = files.path().join("series");
    let options = [
        "--device",
        "soft:rtt_us=6",
        "--remote-ratio",
        "1",
        "--trace-interval",
        "2",
        "--trace",
        dir.to_str().unwrap(),
    ];
    let result = measure(&[args, &options].concat());
    assert_eq!(result["options"]["device"], "soft:rtt_us=6");
    let series = series_file::files_in(&dir);
    let written: Vec<(usize, usize)> = series.iter().map(|(daemon, _)| *daemon).collect();
    let per_rank = count(&result, "server_threads") as usize;
    let expected: Vec<(usize, usize)> = (0..count(&result, "ranks") as usize)
        .flat_map(|rank| (0..per_rank).map(move |daemon| (rank, daemon)))
        .collect();
    assert_eq!(written, expected);
    let series: Vec<Series> = series
        .iter()
        .map(|(_, file)| series_file::read(file).unwrap())
        .collect();
    for (series, daemon) in series.iter().zip(daemons(&result)) {
        assert_series(&series.samples, daemon);
        let is_whole = |(at, values): (&Sample, &[u32])| {
            at.outstanding == values.iter().map(|value| u64::from(*value)).sum::<u64>()
        };
        assert!(
            series.endpoints.len() < count(&result, "ranks") as usize
                && series.rows().all(is_whole),
            "{:?}",
            series.endpoints
        );
    }
    (
        result,
        series.into_iter().map(|series| series.samples).collect(),
    )
}

/// Asserts that time and counters grow, that some samples are in the window, and that the last
/// counts agree with the result's.
fn assert_series(samples: &[Sample], daemon: &Value) {
    assert_eq!(samples.len() as u64, count(&daemon["trace"], "samples"));
    let grows = |field: fn(&Sample) -> u64| {
        samples
            .windows(2)
            .all(|pair| field(&pair[0]) <= field(&pair[1]))
    };
    assert!(
        grows(|at| at.time_ns)
            && grows(|at| at.loops)
            && grows(|at| at.cqes)
            && grows(|at| at.writes)
            && grows(|at| at.moved)
    );
    assert!(
        samples.iter().any(|at| at.run == Some(0)) && samples.iter().any(|at| at.run.is_none()),
        "{daemon}"
    );
    let last = samples.last().unwrap();
    assert!(
        last.loops <= count(daemon, "loops")
            && last.writes <= count(&daemon["transport"], "writes"),
        "{last:?}: {daemon}"
    );
}

/// Returns the sum of a statistic of the policies over all daemons.
fn policy(result: &Value, field: &str) -> u64 {
    daemons(result)
        .map(|daemon| count(&daemon["policy"], field))
        .sum()
}

fn any(series: &[Vec<Sample>], is_so: impl Fn(&Sample) -> bool) -> bool {
    series.iter().flatten().any(is_so)
}

#[test]
fn held_answers_all_arrive() {
    // One operation at a time of one client: batches never fill, and each answer is held for its
    // time.
    let (result, series) = traced(&[
        "--hold",
        "100us",
        "--queue-depth",
        "1",
        "--flush-every",
        "3",
    ]);
    for field in ["held", "late_releases", "delayed_flushes"] {
        assert!(policy(&result, field) > 0, "{field}: {result}");
    }
    assert!(
        series.iter().flatten().all(|at| at.hold_ns == 100_000) && any(&series, |at| at.held > 0),
        "{result}"
    );
    assert!(
        number(&result["remote_latency_ns"], "p50") >= 100_000.0,
        "that is what it costs: {result}"
    );

    let (result, series) = traced(&["--hold", "adaptive", "--ranks", "3", "--poll-budget", "16"]);
    for field in ["held", "full_releases", "extra_polls"] {
        assert!(policy(&result, field) > 0, "{field}: {result}");
    }
    assert!(
        any(&series, |at| (500..10_000).contains(&at.hold_ns)),
        "{result}"
    );
}

#[test]
fn windows_and_gathering_delay_but_do_not_lose() {
    // The time of 1 ms for answers alone is longer than a step takes on a loaded machine. Whether
    // the window is ever full depends on the scheduler.
    let args = [
        "--backend",
        "meta",
        "--coalesce-rtt-us",
        "1000",
        "--batch-window",
        "consumption:1",
        "--client-threads",
        "2",
    ];
    let (result, series) = traced(&args);
    assert!(policy(&result, "gathering_rounds") > 0, "{result}");
    assert!(
        result["options"]["batch_window"]["consumption"] == 1
            && any(&series, |at| at.outstanding > 0),
        "{result}"
    );
    let activity = &list(&result, "runs")[0]["activity"];
    assert!(
        number(activity, "outstanding_mean") > 0.0 && number(activity, "cqes_per_loop") > 0.0,
        "{activity}"
    );
    assert!(
        count(&activity["outstanding_peak"], "outstanding") > 1,
        "{activity}"
    );
    let shares: f64 = list(activity, "loops_by_cqes")
        .iter()
        .map(|share| share.as_f64().unwrap())
        .sum();
    assert!((shares - 1.0).abs() < 1e-6, "{activity}");
    for daemon in daemons(&result) {
        assert!(count(&daemon["first_burst"], "outstanding") > 0, "{daemon}");
    }
}

#[test]
fn faults_of_the_device_cost_time_and_nothing_else() {
    let result = measure(&[
        "--device",
        "soft:rtt_us=2,jitter_us=20,seed=7,fault=rnr:50,fault=reorder:100",
        "--remote-ratio",
        "1",
    ]);
    let connections = daemons(&result).map(|daemon| &daemon["transport"]);
    for transport in connections {
        assert!(
            transport["modes"]
                .as_str()
                .unwrap()
                .contains("delay 1000 ns"),
            "{transport}"
        );
        assert!(count(transport, "rnr_naks") > 0, "{transport}");
    }
    // From operation 20 on no peer answers: the job ends, and names the missing rank.
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let ended = Job::start(
        benchkv(&["--device", "soft:fault=drop:20"])
            .args(SHORT)
            .arg("--shm-dir")
            .arg(dir.path()),
    )
    .end();
    ended.assert_failed(1, &["is lost"]);
}

#[test]
fn a_directory_for_series_is_looked_at_before_the_run() {
    let files = Scratch::on_disk();
    let refused = |dir: &Path, part: &str| {
        let ended = Job::start(benchkv(&["--trace"]).arg(dir)).end();
        ended.assert_failed(2, &["--trace: ", dir.to_str().unwrap(), part]);
    };
    let file = files.path().join("file");
    std::fs::write(&file, "").unwrap();
    refused(&file, "Not a directory");
    write(&file_of(files.path(), 3, 1), &Series::default()).unwrap();
    refused(files.path(), "has the traces of another job");
    let ended = Job::start(&mut benchkv(&["--trace-interval", "5"])).end();
    ended.assert_failed(2, &["--trace <DIR>"]);
    let ended =
        Job::start(benchkv(&["--trace-interval", "0", "--trace"]).arg(files.path().join("new")))
            .end();
    ended.assert_failed(2, &["--trace-interval", "from 1 to 1000000000"]);
    assert!(!files.path().join("new").exists());
}

/// A job with impossible policies is refused before a process is started.
#[test]
fn policies_that_cannot_be_are_refused() {
    for (args, parts) in [
        (
            &["--poll-budget", "4097"][..],
            ["--poll-budget", "from 0 to 4096"],
        ),
        (
            &["--poll-budget", "16:0"],
            ["--poll-budget", "from 1 to 65536"],
        ),
        (
            &["--hold", "adaptive", "--backend", "direct"],
            ["--hold with --backend direct", "another --backend"],
        ),
        (&["--hold", "1ms"], ["--hold", "0.5us to 100us"]),
        (
            &["--device", "soft:rtt_us=x"],
            ["rtt_us=x", "0 to 100000 us"],
        ),
    ] {
        Job::start(&mut benchkv(args))
            .end()
            .assert_failed(2, &parts);
    }
}
