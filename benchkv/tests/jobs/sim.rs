//! Jobs in virtual time.

use serde_json::Value;

use crate::job::{Scratch, benchkv};

/// Runs a simulated job. Returns its exit status, its document and its standard error.
fn sim(args: &[&str]) -> (Option<i32>, Option<Value>, String) {
    let output = benchkv(&["sim", "--json", "-"])
        .args(args)
        .output()
        .unwrap();
    (
        output.status.code(),
        serde_json::from_slice(&output.stdout).ok(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn document(args: &[&str]) -> Value {
    let (status, document, said) = sim(args);
    assert_eq!(status, Some(0), "{said}");
    let mut document = document.unwrap();
    document.as_object_mut().unwrap().remove("environment");
    document
}

#[test]
fn the_same_options_give_the_same_document_and_another_seed_another_run() {
    for backend in ["delegation", "meta", "rc-send"] {
        let args = [
            "-n",
            "4",
            "-d",
            "2",
            "--client-threads",
            "6",
            "--server-threads",
            "2",
            "--strict",
            "--backend",
            backend,
            "-t",
            "300us",
        ];
        let first = document(&args);
        assert_eq!(document(&args), first, "{backend}");
        let of = |document: &Value, name: &str| document["simulation"][name].as_u64().unwrap();
        assert!(first["completed"].as_u64().unwrap() > 1000, "{first}");
        assert_eq!(
            (first["lost"].as_u64(), first["verify_failures"].as_u64()),
            (Some(0), Some(0))
        );
        let other = document(&[&args[..], &["--seed", "2"]].concat());
        assert_ne!(
            of(&first, "trace_hash"),
            of(&other, "trace_hash"),
            "{backend}"
        );
    }
}

#[test]
fn models_are_options_and_are_recorded() {
    let fast = document(&["-n", "2", "-t", "200us"]);
    let slow = document(&[
        "-n",
        "2",
        "-t",
        "200us",
        "--cpu",
        "message=5000",
        "--nic",
        "link=20000,receive=500",
    ]);
    assert!(slow["total_rps"].as_f64() < fast["total_rps"].as_f64().map(|rps| rps / 2.0));
    let record = &slow["simulation"];
    assert_eq!(
        (
            record["cpu"]["message"].as_u64(),
            record["nic"]["link"].as_u64()
        ),
        (Some(5000), Some(20_000))
    );
    assert_eq!(slow["clock"]["source"], "virtual");
}

/// Virtual ranks are one process, whose memory is reported apart.
#[test]
fn simulated_ranks_have_no_memory_of_their_own() {
    let files = Scratch::on_disk();
    let (json, csv) = (files.path().join("a.json"), files.path().join("a.csv"));
    let mut command = benchkv(&["sim", "-n", "2", "-t", "100us"]);
    let output = command
        .arg("--json")
        .arg(&json)
        .arg("--output")
        .arg(&csv)
        .output()
        .unwrap();
    let (table, said) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(output.status.success() && taken(&said) > 0.0, "{said}");
    let ranks = || {
        table
            .lines()
            .skip_while(|line| !line.starts_with("rank"))
            .take(3)
    };
    assert!(
        ranks().next().unwrap().ends_with("empty loops")
            && ranks().all(|line| !line.contains(" B")),
        "{table}"
    );
    let document: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for rank in document["per_rank"].as_array().unwrap() {
        assert!(
            rank.get("peak_rss_bytes").is_none() && rank.get("issued").is_some(),
            "{rank}"
        );
    }
    let mut rows = csv::Reader::from_path(csv).unwrap();
    let column = rows
        .headers()
        .unwrap()
        .iter()
        .position(|name| name == "peak_rss_bytes")
        .unwrap();
    assert!(rows.records().all(|row| row.unwrap()[column].is_empty()));
}

#[test]
fn what_has_no_meaning_in_virtual_time_or_no_room_is_refused_by_name() {
    for (args, says) in [
        (
            &["--pin", "none"][..],
            "--pin: it has no meaning in virtual time; leave it out",
        ),
        (&["--shm-dir", "/dev/shm"], "--shm-dir: it has no meaning"),
        (
            &["--backend", "ucx-am"],
            "[possible values: meta, delegation, sharded, direct, rc-send, copyrpc-direct]",
        ),
        (
            &["--backend", "meta", "--carrier", "ucx-am"],
            "[possible values: copyrpc, rc-send]",
        ),
        (
            &["--duration", "2m"],
            "use a time from 0.000001 to 60 seconds",
        ),
        (
            &["--cpu", "messages=1"],
            "messages is unknown; known are round, poll, message,",
        ),
        (&["--nic", "link"], "link: use KEY=NUMBER"),
        (
            &[
                "-n",
                "256",
                "--client-threads",
                "46",
                "--backend",
                "direct",
                "--memory-limit",
                "16G",
            ],
            "the job needs about",
        ),
    ] {
        let (status, _, said) = sim(args);
        assert!(
            status == Some(2) && said.contains(says),
            "{args:?}: {status:?} {said}"
        );
    }
}

/// Returns the maximum bytes of memory that a simulation reports.
fn taken(said: &str) -> f64 {
    let (number, unit) = said
        .split(" of memory at most")
        .next()
        .and_then(|text| text.rsplit("; ").next()?.split_once(' '))
        .unwrap();
    let unit = ["KiB", "MiB", "GiB"]
        .iter()
        .position(|known| *known == unit)
        .unwrap();
    number.parse::<f64>().unwrap() * f64::from(1 << (10 * (unit + 1)))
}

/// A job has to be refused before it exhausts the memory, and not while enough memory is left.
#[test]
fn a_job_takes_no_more_memory_than_is_reckoned_before() {
    for args in [
        "-n 8 --client-threads 46",
        "-n 16 --client-threads 46 --no-verify",
        "-n 32 --client-threads 46 --no-verify",
        "-n 16 --client-threads 46 --server-threads 2 --backend sharded --batch-window completion:1 --no-verify",
        "-n 16 --client-threads 46 --server-threads 2 --backend meta --no-verify",
        "-n 4 --client-threads 46 --backend direct --no-verify",
        "-n 8 --client-threads 46 -d 32 --backend rc-send --no-verify",
        "-n 8 --client-threads 8 -d 32 --value-size 4096 --runs 2 --key-range 100 --ring-size 65536",
    ] {
        let args: Vec<_> = args
            .split(' ')
            .chain(["-t", "40us", "--warmup", "20us"])
            .collect();
        let (status, document, said) = sim(&args);
        let (reckoned, taken) = (
            document.unwrap()["memory"]["total_bytes"].as_f64().unwrap(),
            taken(&said),
        );
        assert!(
            status == Some(0) && taken < reckoned && taken > reckoned / 8.0,
            "{args:?}: {taken} bytes taken, {reckoned} reckoned: {said}"
        );
    }
}

/// Returns what `benchkv report` prints about simulated jobs, one job for each line of options,
/// which are added to the common options.
fn report_of(jobs: &[&str]) -> String {
    let dir = Scratch::on_disk();
    let files: Vec<_> = (0..jobs.len())
        .map(|number| dir.path().join(format!("{number}.json")))
        .collect();
    for (words, file) in jobs.iter().zip(&files) {
        let (status, document, said) =
            sim(
                &["-n 2 -d 2 --client-threads 4 -t 60us --warmup 20us", words]
                    .join(" ")
                    .split_whitespace()
                    .collect::<Vec<_>>(),
            );
        assert_eq!(status, Some(0), "{said}");
        std::fs::write(file, document.unwrap().to_string()).unwrap();
    }
    let report = benchkv(&["report"]).args(&files).output().unwrap();
    assert!(report.status.success(), "{report:?}");
    String::from_utf8(report.stdout).unwrap()
}

#[test]
fn results_of_different_models_or_courses_are_no_repeats_of_each_other() {
    for (jobs, told) in [
        (["--nic queue=526", "--nic queue=0"], "nic queue"),
        (["--cpu message=45", "--cpu message=70"], "cpu message"),
        (["--runs 2", "--sweep depth=1,2"], "sweep depth=1,2"),
    ] {
        let report = report_of(&jobs);
        assert!(
            !report.contains("repeat 1 of") && report.contains(told),
            "{jobs:?}: {told} is missing, or a repeat is not"
        );
    }
    let same = report_of(&["--nic queue=526"; 2]);
    assert!(
        same.contains("repeat 2 of 2")
            && same.contains("nic queue")
            && same.contains("Virtual time: the protocol is the real one")
    );
    assert!(
        !same.contains("Over-subscribed") && !same.contains("Software device"),
        "its threads have no cores, and its NIC is a model"
    );
}

/// A mean over different loads has no meaning, so none is printed.
#[test]
fn a_sweep_is_printed_by_load() {
    let output = benchkv(&["sim", "-d", "8", "-t", "100us", "--sweep", "depth=1,8"])
        .output()
        .unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    let row = |load: &str| {
        table
            .lines()
            .find(|line| line.starts_with(load))
            .map(str::to_owned)
    };
    assert!(
        row("depth 1 ").is_some()
            && row("depth 8 ").is_some()
            && row("depth 1 ") != row("depth 8 "),
        "{table}"
    );
    assert!(!table.contains("standard deviation"), "{table}");
    assert!(report_of(&["--sweep depth=1,2"]).contains("A sweep: its runs have different loads"));
}

#[test]
fn a_row_tells_a_simulation_and_its_models() {
    let files = Scratch::on_disk();
    let csv = files.path().join("a.csv");
    let mut command = benchkv(&[
        "sim",
        "-n",
        "2",
        "-t",
        "100us",
        "--nic",
        "queue=526",
        "--output",
    ]);
    assert!(command.arg(&csv).output().unwrap().status.success());
    let mut rows = csv::Reader::from_path(csv).unwrap();
    let names = rows.headers().unwrap().clone();
    for row in rows.records().map(Result::unwrap) {
        let cell = |name: &str| &row[names.iter().position(|column| column == name).unwrap()];
        let models: Value = serde_json::from_str(cell("simulation_json")).unwrap();
        assert_eq!(
            (cell("clock"), &models["nic"]["queue"], &models["course"]),
            ("virtual", &526.into(), &Value::Array(Vec::new()))
        );
    }
}
