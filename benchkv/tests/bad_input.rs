//! What cannot be run is refused before a process is started: a message that says what is wrong and what is legal, and exit status 2.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failing test panics; clippy's exemption covers #[test] functions only"
)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::{Scratch, benchkv, finish, text};

/// Runs and expects a refusal that contains every one of `parts`, and nothing on standard output.
fn refused(args: &[&str], parts: &[&str]) {
    let output = finish(benchkv(args).spawn().unwrap());
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
    assert!(parts.iter().all(|part| err.contains(part)), "{args:?}: {parts:?} missing in: {err}");
    assert!(!err.contains("panicked") && output.stdout.is_empty(), "{args:?}: {err}");
}

#[test]
fn illegal_options_are_refused_with_the_legal_ones() {
    refused(&["--backend", "tcp"], &["tcp", "meta", "delegation"]);
    refused(&["--device", "mlx5_9"], &["mlx5_9", "auto", "soft"]);
    for flag in ["--ranks", "--server-threads", "--client-threads", "--queue-depth", "--runs", "--key-range"] {
        refused(&[flag, "0"], &[flag, "legal is 1 to"]);
    }
    refused(&["--ring-size", "1024"], &["too small", "power of two from 4096"]);
    refused(&["--ring-size", "5000"], &["not a power of two", "power of two from 4096"]);
    refused(&["--read-ratio", "1.01"], &["--read-ratio 1.01", "legal is 0 to 1"]);
    refused(&["--read-ratio=-1"], &["legal is 0 to 1"]);
    refused(&["--remote-ratio", "0.5", "--ranks", "1"], &["--remote-ratio", "no other"]);
    refused(&["--distribution", "zipfian:99"], &["at most 10"]);
    refused(&["--pin", "60000"], &["core 60000", "usable are"]);
}

#[test]
fn a_result_that_could_not_be_written_is_refused_before_the_run() {
    refused(&["--json", "/nonexistent/result.json"], &["--json", "/nonexistent/result.json", "No such file"]);
}

#[test]
fn an_unusable_shared_memory_directory_is_refused_with_the_cause() {
    refused(&["--shm-dir", "/nonexistent"], &["--shm-dir", "/nonexistent"]);
    let scratch = Scratch::new("shm");
    let file = scratch.path().join("file");
    fs::write(&file, b"").unwrap();
    refused(&["--shm-dir", file.to_str().unwrap()], &["--shm-dir", file.to_str().unwrap()]);
    let open = scratch.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    refused(&["--shm-dir", open.to_str().unwrap()], &["--shm-dir", open.to_str().unwrap()]);
}

#[test]
fn a_job_under_mpirun_without_mpi_is_refused() {
    let output = finish(benchkv(&[]).env("OMPI_COMM_WORLD_SIZE", "4").spawn().unwrap());
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("mpirun announces 4 processes, but this build has no MPI") && err.contains("--ranks 4"), "{err}");
}
