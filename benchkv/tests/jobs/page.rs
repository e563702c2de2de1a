//! The page of `benchkv report`, as a browser shows it.

use std::fs;
use std::path::Path;
use std::process::Command;

use benchkv::result::JobResult;
use serde_json::Value;

use crate::job::{Job, Scratch, benchkv, run, turn};

/// Text that would break a page if it were inserted without escapes.
const EVIL: &str = "<script>throw 'evil'</script>\"'&";

/// Writes the result of a short job with these flags to `count` files, each changed by `change`.
fn write_results(
    dir: &Path,
    flags: &[&str],
    count: usize,
    change: impl Fn(usize, &mut JobResult),
) -> Vec<String> {
    let (_turn, shm) = (turn(), Scratch::in_memory());
    let result: JobResult = serde_json::from_value(
        run(
            &shm,
            &[&["--runs", "3", "--duration", "0.1", "--json", "-"], flags].concat(),
        )
        .result(),
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

/// Makes the page about these results, with these flags.
fn report(files: &[String], flags: &[&str], page: &Path) -> String {
    let ended = Job::start(
        benchkv(&["report", "--output"])
            .arg(page)
            .args(files)
            .args(flags),
    )
    .end();
    assert!(ended.status.success(), "{}", ended.stderr);
    fs::read_to_string(page).unwrap()
}

/// Examines a page at both widths, and replaces its content by the findings as JSON.
const INSPECTOR: &str = include_str!("inspector.js");

/// Returns the findings of a browser in `page`, a list for each width. Scripts are allowed for the
/// inspector, which is put around the page.
fn inspect(dir: &Path, page: &str) -> Value {
    let allowed = page.replace(
        "default-src 'none';",
        "default-src 'none'; script-src 'unsafe-inline';",
    );
    assert_ne!(allowed, page, "a page allows nothing by itself");
    let escaped = allowed.replace('&', "&amp;").replace('"', "&quot;");
    let frame = |width: u32| {
        format!(
            "<iframe width=\"{width}\" height=\"800\" style=\"border:0\" srcdoc=\"{escaped}\"></iframe>"
        )
    };
    let around = dir.join("around.html");
    let html = format!(
        "<!DOCTYPE html><meta charset=\"utf-8\">{}{}<script>{INSPECTOR}</script>",
        frame(1280),
        frame(390)
    );
    fs::write(&around, html).unwrap();
    let mut chromium = Command::new("chromium");
    chromium.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--timeout=20000",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]);
    chromium
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", around.display()));
    let ended = Job::start(&mut chromium).end();
    let found = ended
        .stdout
        .split_once("<pre>")
        .and_then(|(_, rest)| rest.split_once("</pre>"));
    let (json, _) = found.unwrap_or_else(|| {
        panic!(
            "the inspector has not ended: {}\n{}",
            ended.stdout, ended.stderr
        )
    });
    serde_json::from_str(
        &json
            .replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&amp;", "&"),
    )
    .unwrap()
}

/// Asserts the properties of every page at every width.
#[track_caller]
fn assert_well_drawn(found: &Value) -> &Vec<Value> {
    assert_eq!(
        found["errors"],
        Value::from(Vec::<Value>::new()),
        "errors of scripts: {found}"
    );
    let views = found["views"].as_array().unwrap();
    assert_eq!(
        views
            .iter()
            .map(|view| view["width"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [1280, 390]
    );
    for view in views {
        assert_eq!(
            view["complaints"],
            Value::from(Vec::<Value>::new()),
            "at {}",
            view["width"]
        );
        assert!(view["charts"].as_array().unwrap().len() >= 3, "{view}");
    }
    views
}

#[test]
#[ignore = "needs chromium"]
fn a_sweep_is_drawn_with_axes_legends_and_colours_that_can_be_told_apart() {
    let dir = Scratch::on_disk();
    let backends = ["meta", "delegation", "sharded", "direct"];
    let files = write_results(dir.path(), &[], 24, |number, result| {
        result.backend = clap::ValueEnum::from_str(backends[number % 4], false).unwrap();
        result.ranks = 2 << (number / 4 % 3);
        result.per_rank = result
            .per_rank
            .iter()
            .cycle()
            .take(result.ranks)
            .cloned()
            .collect();
        result.queue_depth = if number < 12 { 1 } else { 32 };
        result.options.carried_by = EVIL.to_owned();
        for rps in result
            .runs
            .iter_mut()
            .map(|run| &mut run.measured.total_rps)
        {
            *rps *= (number + 1) as f64;
        }
    });
    let page = report(&files, &[], &dir.path().join("page.html"));
    let found = inspect(dir.path(), &page);
    for view in assert_well_drawn(&found) {
        for chart in view["charts"].as_array().unwrap().iter().filter(|chart| {
            chart["title"]
                .as_str()
                .unwrap()
                .starts_with("Throughput, all")
        }) {
            assert_eq!(
                (&chart["series"], &chart["legend"]),
                (&4.into(), &4.into()),
                "eight series are two charts: {chart}"
            );
        }
        assert!(
            view["text"].as_str().unwrap().contains(EVIL),
            "names are shown as they are"
        );
    }
}

#[test]
#[ignore = "needs chromium"]
fn one_result_and_results_that_differ_in_no_number_are_drawn() {
    let dir = Scratch::on_disk();
    let trace = dir.path().join("trace");
    let flags = ["--trace", trace.to_str().unwrap()];
    let files = write_results(dir.path(), &flags, 3, |number, result| {
        result.backend =
            clap::ValueEnum::from_str(["meta", "delegation", "direct"][number], false).unwrap();
        result.options.carried_by = "a very long list of cores ".repeat(number + 1);
    });
    let page = dir.path().join("page.html");
    let counted = |files: &[String], flags: &[&str]| {
        let found = inspect(dir.path(), &report(files, flags, &page));
        assert_well_drawn(&found)[0]["charts"]
            .as_array()
            .unwrap()
            .len()
    };
    let one = counted(&files[..1], &[]);
    let traced = counted(&files[..1], &flags);
    let three = counted(&files, &[]);
    assert!(
        traced >= one + 4 && three > one,
        "charts: {one} of a result, {traced} with its trace, {three} of three results"
    );
}

#[test]
fn a_page_never_takes_the_place_of_what_it_is_made_of() {
    let dir = Scratch::on_disk();
    let trace = dir.path().join("trace");
    let flags = ["--trace", trace.to_str().unwrap()];
    let files = write_results(dir.path(), &flags, 1, |_, _| ());
    let result = Path::new(&files[0]);
    let series = trace.join("rank-0-daemon-0.csv");
    let link = dir.path().join("link.json");
    fs::hard_link(result, &link).unwrap();
    let before = [result, &series].map(|path| fs::read(path).unwrap());
    for output in [result, &link, &series] {
        let ended = Job::start(
            benchkv(&["report", &files[0], "--output"])
                .arg(output)
                .args(flags),
        )
        .end();
        ended.assert_failed(
            2,
            &[
                "--output: ",
                output.to_str().unwrap(),
                "is read for the page",
            ],
        );
    }
    assert_eq!(
        [result, &series].map(|path| fs::read(path).unwrap()),
        before
    );
    let ended =
        Job::start(benchkv(&["report", &files[0], "-o", "-"]).current_dir(dir.path())).end();
    assert!(
        ended.status.success() && ended.stdout.starts_with("<!DOCTYPE html>"),
        "{}",
        ended.stderr
    );
    assert!(!dir.path().join("-").exists() && ended.stdout.contains("not found"));
}

#[test]
fn what_is_no_result_is_refused_and_no_page_is_written() {
    let dir = Scratch::on_disk();
    let (file, page) = (dir.path().join("x.json"), dir.path().join("page.html"));
    fs::write(
        &file,
        "{\"schema\": \"benchkv-result\", \"schema_version\": 99}",
    )
    .unwrap();
    let with =
        |output: &Path| Job::start(benchkv(&["report"]).arg(&file).arg("-o").arg(output)).end();
    with(&page).assert_failed(2, &["x.json", "schema version 99", "reads version"]);
    with(Path::new("/nonexistent/page.html"))
        .assert_failed(2, &["--output", "/nonexistent/page.html"]);
    assert_eq!(dir.names(), ["x.json"]);
}
