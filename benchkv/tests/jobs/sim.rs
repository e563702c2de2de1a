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

/// They are one process, whose memory is said apart.
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

/// A refusal has to come before the memory is exhausted, and not while there is plenty.
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
