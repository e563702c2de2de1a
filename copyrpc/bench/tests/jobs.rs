//! Whole jobs: both processes, their result, and failures.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests; helpers are not covered by clippy's allow-*"
)]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use harness::affinity::{pin_current_thread, usable_cores};
use launch::device::DEVICE_VARIABLE;
use serde_json::Value;

/// The processes of a job meet in a directory of their own.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("copyrpc-bench-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a job; the launcher's own time limit ends one that hangs.
fn run(args: &str) -> Output {
    // Whatever devices the machine has; a test that names one gets that.
    run_on("soft", args)
}

/// Runs a job whose environment names the device that `auto` takes.
fn run_on(device: &str, args: &str) -> Output {
    let scratch = Scratch::new();
    Command::new(env!("CARGO_BIN_EXE_copyrpc_bench"))
        .env(DEVICE_VARIABLE, device)
        .args(args.split_whitespace())
        .args(["--shm-dir", scratch.0.to_str().unwrap(), "--warmup", "0.01"])
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn result(args: &str) -> Value {
    let output = run(args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    // Nothing else is on standard output.
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_call_of_a_latency_job_is_timed_and_counted_on_both_sides() {
    let result =
        result("--mode latency --calls 500 --runs 3 --endpoints 2 --depth 4 --baseline --json -");
    assert_eq!(result["runs"].as_array().unwrap().len(), 3);
    for run in result["runs"].as_array().unwrap() {
        let counted = [
            &run["calls"],
            &run["round_trip_ns"]["count"],
            &run["caller"]["calls"],
            &run["answerer"]["replies"],
        ];
        assert!(
            counted.iter().all(|count| count.as_u64() == Some(500)),
            "{run}"
        );
        assert!(
            run["round_trip_ns"]["min"].as_u64() <= run["round_trip_ns"]["p50"].as_u64(),
            "{run}"
        );
    }
    assert_eq!(result["bad_payloads"], 0);
    assert!(
        result["raw_cacheline"]["latency_ns"]["count"].as_u64() > Some(0),
        "{result}"
    );
    assert!(
        result["environment"]["kernel"]
            .as_str()
            .unwrap()
            .starts_with("Linux")
    );
}

#[test]
fn calls_gather_in_writes_when_there_are_many() {
    let result = result("--depth 64 --duration 0.1 --runs 1 --json -");
    assert!(
        result["caller_messages_per_write"]["median"].as_f64() > Some(2.0),
        "{result}"
    );
    assert!(result["calls_per_s"]["median"].as_f64() > Some(0.0));
    assert!(result["round_trip_ns"].is_null());
}

#[test]
fn a_job_ends_with_either_window_and_counts_its_stalls() {
    for (kind, window) in [
        ("completion", "completion:1"),
        ("consumption", "consumption:1"),
    ] {
        let result = result(&format!(
            "--endpoints 2 --depth 32 --calls 5000 --runs 1 --window {window} --json -"
        ));
        assert_eq!(result["job"]["window"][kind], 1);
        for counts in [&result["runs"][0]["caller"], &result["runs"][0]["answerer"]] {
            // How often one stops is a matter of time; the software HCA ends a WRITE before its
            // flush is over.
            assert!(
                counts["window_stalls"]
                    .as_u64()
                    .is_some_and(|stalls| stalls == 0 || kind == "consumption"),
                "{window}: {counts}"
            );
            assert_eq!(counts["rnr_naks"], 0, "{window}: {counts}");
        }
    }
}

#[test]
fn payloads_of_every_kind_of_length_are_right() {
    for sizes in [
        "--payload 0 --reply 0",
        "--payload 5 --reply 100",
        "--payload 8180 --reply 12244 --ring-size 65536",
        "--payload 100000",
    ] {
        let result = result(&format!("{sizes} --depth 8 --calls 200 --runs 1 --json -"));
        assert_eq!(
            (&result["bad_payloads"], &result["runs"][0]["calls"]),
            (&0.into(), &200.into()),
            "{sizes}"
        );
    }
}

#[test]
fn a_job_ends_on_one_core_whatever_the_wait() {
    // A process may use the cores that the thread which starts it may.
    let on_one_core = || {
        pin_current_thread(usable_cores().unwrap()[0]).unwrap();
        for wait in ["auto", "event"] {
            let result = result(&format!(
                "--wait {wait} --endpoints 3 --connected 5 --depth 8 --duration 0.05 --runs 1 --json -"
            ));
            assert!(
                result["runs"][0]["calls"].as_u64() > Some(0),
                "{wait}: {result}"
            );
            assert_eq!(
                result["placement"]["usable_cores"]
                    .as_array()
                    .unwrap()
                    .len(),
                1
            );
        }
    };
    std::thread::spawn(on_one_core).join().unwrap();
}

#[test]
fn auto_takes_the_device_that_the_environment_names_and_says_so() {
    let short = "--calls 10 --runs 1 --json -";
    let output = run_on("soft:rtt_us=3", short);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["device_by_auto"], "COPYRPC_DEVICE names it");
    assert!(
        text(&output.stderr)
            .contains("\n--device auto is soft:rtt_us=3: COPYRPC_DEVICE names it\n"),
        "{}",
        text(&output.stderr)
    );
    let named: Value =
        serde_json::from_slice(&run_on("eth0", &format!("{short} --device soft")).stdout).unwrap();
    assert_eq!(named["device_by_auto"], Value::Null);
    let refused = run_on("eth0", "--calls 10");
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    assert!(
        text(&refused.stderr).contains("--device auto: COPYRPC_DEVICE is \"eth0\": use auto, soft"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn a_wrong_bit_in_a_request_or_a_reply_is_noticed() {
    for fault in ["corrupt-request", "corrupt-reply"] {
        let output = run(&format!("--calls 100 --runs 1 --fault {fault}"));
        assert_eq!(
            output.status.code(),
            Some(3),
            "{fault}: {}",
            text(&output.stderr)
        );
        assert!(text(&output.stderr).contains("payloads were not the right ones"));
    }
}

#[test]
fn options_that_cannot_be_honoured_are_refused_before_anything_starts() {
    for (args, legal) in [
        ("--depth 257", "1 to 256"),
        ("--ring-size 4096 --payload 501", "0 to 500"),
        ("--json /nowhere/x", "--json"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(
            text(&output.stderr).contains(legal),
            "{args}: {}",
            text(&output.stderr)
        );
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn one_of_several_processes_does_not_start_a_job_of_its_own() {
    let output = Command::new(env!("CARGO_BIN_EXE_copyrpc_bench"))
        .env("OMPI_COMM_WORLD_SIZE", "2")
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.is_empty()),
        (Some(2), true)
    );
    assert!(
        text(&output.stderr).contains("announces 2 processes"),
        "{}",
        text(&output.stderr)
    );
}
