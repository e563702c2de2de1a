//! `benchkv report`: results side by side, and the chart.

use std::fs;
use std::path::Path;

use benchkv::result::JobResult;

use crate::job::{Job, Scratch, benchkv, run, turn};

/// Text that would break a chart if it were inserted without escapes.
const EVIL: &str = "<script>throw 'evil'</script>\"'&";

/// Writes the result of a short job with these flags to `count` files, each changed by `change`.
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
    // 1 and 13 million.
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
