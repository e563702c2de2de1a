//! Jobs that `mpirun` starts.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "tests; helpers are not covered by clippy's allow-*"
)]

use std::process::{Command, Output};

use serde_json::Value;

/// Runs `ranks` processes. They end by themselves when one does not answer, and mpirun ends what
/// takes too long.
fn mpirun(ranks: &str, args: &str) -> Output {
    Command::new("mpirun")
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--timeout",
            "120",
            "-n",
            ranks,
            env!("CARGO_BIN_EXE_copyrpc_bench"),
        ])
        .args(args.split_whitespace())
        .args(["--device", "soft", "--warmup", "0.01"])
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn two_ranks_are_the_two_processes_of_a_job() {
    // The records of 1,025 endpoints do not fit what MPI sends at once.
    for args in [
        "--calls 2000 --runs 2",
        "--mode latency --calls 2000 --runs 2 --depth 8 --connected 1024",
    ] {
        let output = mpirun("2", &format!("{args} --json -"));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(result["runs"].as_array().unwrap().len(), 2);
        for run in result["runs"].as_array().unwrap() {
            assert_eq!(
                (&run["caller"]["calls"], &run["answerer"]["replies"]),
                (&2000.into(), &2000.into()),
                "{run}"
            );
        }
        assert_eq!(
            (
                result["devices"].as_array().unwrap().len(),
                &result["bad_payloads"]
            ),
            (2, &0.into())
        );
    }
}

#[test]
fn a_rank_that_fails_ends_the_other() {
    let output = mpirun("2", "--calls 2000 --runs 1 --shm-dir /nowhere");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("opening the device"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn wrong_payloads_and_options_have_their_status() {
    for (args, status) in [
        ("--calls 100 --runs 1 --fault corrupt-request", 3),
        ("--depth 257", 2),
    ] {
        let output = mpirun("2", args);
        assert_eq!(
            output.status.code(),
            Some(status),
            "{args}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn another_number_of_ranks_is_refused() {
    let output = mpirun("3", "");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("MPI has 3 ranks"),
        "{}",
        text(&output.stderr)
    );
}
