//! `benchkv report`: results side by side, and the chart.

use std::fs;
use std::path::Path;

use benchkv::result::{JobResult, OpenLoop};

use crate::job::{Job, Scratch, benchkv, run, turn};

/// Text that would break a chart if it were inserted without escapes.
const EVIL: &str = "<script>throw 'evil'</script>\"'&";

/// Writes the result of a short job to `count` files, each changed by `change`.
fn write_results(dir: &Path, count: usize, change: impl Fn(usize, &mut JobResult)) -> Vec<String> {
    let (_turn, shm) = (turn(), Scratch::in_memory());
    let result: JobResult = serde_json::from_value(
        run(&shm, &["--runs", "3", "--duration", "0.1", "--json", "-"]).result(),
    )
    .unwrap();
    let write = |number| {
        let mut changed = result.clone();
        change(number, &mut changed);
        let path = dir.join(format!("{number}.json"));
        fs::write(&path, serde_json::to_string(&changed).unwrap()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    (0..count).map(write).collect()
}

#[test]
fn a_sweep_is_compared_at_each_place_and_drawn_with_a_line_for_each_variant() {
    let dir = Scratch::on_disk();
    let backends = ["meta", "delegation", "sharded", "direct"];
    let files = write_results(dir.path(), 13, |number, result| {
        result.backend = clap::ValueEnum::from_str(backends[number % 4], false).unwrap();
        result.queue_depth = [1, 8, 64][number / 4 % 3];
        result.options.carried_by = EVIL.to_owned();
        result.measured.total_rps = (number + 1) as f64 * 1e6;
    });
    let svg = dir.path().join("chart.svg");
    let ended = Job::start(benchkv(&["report", "-o"]).arg(&svg).args(&files)).end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let text = &ended.stdout;
    assert!(
        text.starts_with("13 results\n") && text.contains(EVIL),
        "{text}"
    );
    let row = |begin: &str| {
        let line = text.lines().rev().find(|line| line.starts_with(begin));
        let line = line.unwrap_or_else(|| panic!("{begin}: {text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        row("delegation, depth 8"),
        "delegation, depth 8 6.00 M/s - - -"
    );
    assert_eq!(
        row("direct, depth 8"),
        "direct, depth 8 8.00 M/s - +33.3 % delegation"
    );
    // The two repeats have rates of 1 and 13 million operations per second.
    assert_eq!(
        row("meta, depth 1 "),
        "meta, depth 1 7.00 M/s \u{b1} 1089.1 % +250.0 % delegation"
    );
    assert!(text.contains("meta, depth 1, repeat 2 of 2"), "{text}");
    let chart = fs::read_to_string(svg).unwrap();
    assert_eq!(
        chart.matches("stroke-width=\"2\" points=").count(),
        8,
        "lines and samples: {chart}"
    );
    assert!(
        backends.iter().all(|backend| chart.contains(backend)) && !chart.contains("<script"),
        "{chart}"
    );
}

/// The results of an open loop are drawn against the offered rate, which differs from the reached
/// rate.
#[test]
fn a_series_of_rates_has_a_line_for_each_percentile_and_commits_are_in_order_of_time() {
    let dir = Scratch::on_disk();
    let files = write_results(dir.path(), 6, |number, result| {
        let rate = [1e5, 2e5, 3e5][number % 3];
        result.options.pace.rate = Some(rate);
        result.open_loop = Some(OpenLoop {
            offered_rps: rate,
            reached_rps: 5e4,
            due: 1,
            backlog: 0,
            kept_up: true,
            issue_delay_ns: 0.0,
        });
        let slowest_ns = (number as u64 + 1) * 10_000_000_000;
        result.measured.latency_ns.p9999 = slowest_ns;
        result.measured.latency_ns.max = slowest_ns;
        // The commit with the later name was measured first.
        result.environment.git_commit = ["b", "a"][number / 3].repeat(40);
        result.environment.unix_s = 1_000 + number as u64;
        result.other_cores = [None, Some(0.7)][number / 3];
    });
    let (svg, csv) = (dir.path().join("chart.svg"), dir.path().join("chart.csv"));
    let report = |files: &[String]| {
        let mut command = benchkv(&["report", "-o"]);
        let ended = Job::start(command.arg(&svg).arg("-o").arg(&csv).args(files)).end();
        assert!(ended.status.success(), "{}", ended.stderr);
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        (ended.stdout, read(&svg), read(&csv))
    };
    let (text, chart, points) = report(&files[..3]);
    assert!(!text.contains("Other programs used"), "{text}");
    assert_eq!(
        chart.matches("stroke-width=\"2\" points=").count(),
        10,
        "lines and samples: {chart}"
    );
    assert!(chart.contains("p99.99") && chart.contains("by offered rate"));
    let points: Vec<&str> = points.lines().collect();
    assert_eq!(points.len(), 1 + 5 * 3);
    assert_eq!(
        points[0],
        "line,offered operations per second,round trip in ns"
    );
    assert_eq!(
        points[13..],
        [
            "p99.99,100000,10000000000",
            "p99.99,200000,20000000000",
            "p99.99,300000,30000000000"
        ]
    );
    let (text, _, points) = report(&files);
    assert!(
        text.contains("core meanwhile: ") && !text.contains("core meanwhile: all"),
        "{text}"
    );
    let (earlier, later) = (points.find("bbbbbbbbbbbb"), points.find("aaaaaaaaaaaa"));
    assert!(earlier.is_some() && earlier < later, "{points}");
}

#[test]
fn a_chart_is_along_the_size_of_a_value_or_along_commits() {
    let dir = Scratch::on_disk();
    let files = write_results(dir.path(), 4, |number, result| {
        result.options.workload.value_bytes = [8, 1024][number % 2];
        result.measured.total_rps = (number + 1) as f64 * 1e6;
        // The commit with the later name was measured first.
        result.environment.git_commit = ["b", "a"][number / 2].repeat(40);
        result.environment.unix_s = 1_000 + number as u64;
    });
    let csv = dir.path().join("chart.csv");
    let points = |chart: &str, files: &[String]| {
        let mut command = benchkv(&["report", "--chart", chart, "-o"]);
        let ended = Job::start(command.arg(&csv).args(files)).end();
        assert!(ended.status.success(), "{}", ended.stderr);
        let text = fs::read_to_string(&csv).unwrap();
        let rows = text.lines().map(str::to_owned);
        rows.collect::<Vec<String>>()
    };
    let bandwidth = points("bandwidth-by-size", &files[..2]);
    assert_eq!(
        bandwidth[0],
        "line,bytes of a value,bytes of values per second"
    );
    assert!(bandwidth[1].ends_with(",8,8000000"), "{bandwidth:?}");
    assert!(bandwidth[2].ends_with(",1024,2048000000"), "{bandwidth:?}");
    // Five percentiles of two sizes.
    assert_eq!(points("latency-by-size", &files[..2]).len(), 1 + 5 * 2);
    assert_eq!(
        points("rate-by-commit", &files)[1..],
        [
            "value size 8,bbbbbbbb,1000000",
            "value size 8,aaaaaaaa,3000000",
            "value size 1024,bbbbbbbb,2000000",
            "value size 1024,aaaaaaaa,4000000"
        ]
    );
}

#[test]
fn a_chart_never_takes_the_place_of_a_result() {
    let dir = Scratch::on_disk();
    let files = write_results(dir.path(), 1, |_, _| ());
    let result = Path::new(&files[0]);
    let link = dir.path().join("link.svg");
    fs::hard_link(result, &link).unwrap();
    let before = fs::read(result).unwrap();
    Job::start(benchkv(&["report", &files[0], "--output"]).arg(&link))
        .end()
        .assert_failed(2, &["--output: ", "link.svg", "is one of the results"]);
    Job::start(benchkv(&["report", &files[0], "--output"]).arg(result))
        .end()
        .assert_failed(2, &["end in .svg"]);
    assert_eq!(fs::read(result).unwrap(), before);
    let ended = Job::start(benchkv(&["report", &files[0]]).current_dir(dir.path())).end();
    assert!(
        ended.status.success() && ended.stdout.contains("not found"),
        "{}",
        ended.stderr
    );
}

#[test]
fn what_is_no_result_is_refused_and_no_chart_is_written() {
    let dir = Scratch::on_disk();
    let (file, chart) = (dir.path().join("x.json"), dir.path().join("chart.svg"));
    fs::write(
        &file,
        "{\"schema\": \"benchkv-result\", \"schema_version\": 99}",
    )
    .unwrap();
    let with =
        |output: &Path| Job::start(benchkv(&["report"]).arg(&file).arg("-o").arg(output)).end();
    with(&chart).assert_failed(2, &["x.json", "schema version 99", "reads version"]);
    with(Path::new("/nonexistent/chart.svg"))
        .assert_failed(2, &["--output", "/nonexistent/chart.svg"]);
    assert_eq!(dir.names(), ["x.json"]);
}
