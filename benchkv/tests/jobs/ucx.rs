//! Jobs over UCX: sound, with the transport in the result, and ended when a rank is killed. All are
//! ignored without UCX, except the test of its absence.

use std::fs;

use crate::death::{assert_survivor_notices, start_and_load_with};
use crate::job::{Job, SHORT, Scratch, benchkv, turn};
use crate::measurement::{assert_sound, count, list, transports};

/// Runs a short job with variables of UCX. Asserts that it is sound and leaves nothing behind.
/// Returns the paths between its ranks, each once.
fn measure(variables: &[(&str, &str)], args: &[&str]) -> Vec<String> {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let mut command = benchkv(&["--backend", "ucx-am", "--json", "-"]);
    command
        .args(SHORT)
        .args(args)
        .arg("--shm-dir")
        .arg(dir.path())
        .envs(variables.iter().copied());
    let result = Job::start(&mut command).end().result();
    assert_sound(&result);
    dir.assert_empty();
    assert_eq!(
        (
            &result["carrier"],
            &result["device"],
            &result["options"]["device"]
        ),
        (&"ucx-am".into(), &"ucx".into(), &"ucx".into())
    );
    for rank in list(&result, "per_rank") {
        assert!(count(rank, "remote_ops") > 0, "{rank}");
    }
    let mut ways: Vec<String> = transports(&result)
        .map(|of| of["reached_by"].as_str().unwrap().to_owned())
        .collect();
    ways.sort();
    ways.dedup();
    ways
}

#[test]
#[ignore = "needs libucx0"]
fn jobs_are_sound_and_say_by_which_transports() {
    let ways = measure(
        &[("UCX_TLS", "tcp")],
        &[
            "--ranks",
            "4",
            "--server-threads",
            "2",
            "--distribution",
            "zipfian",
        ],
    );
    assert!(
        ways.iter().all(|way| way.starts_with("UCX 1.")
            && way.contains(" by tcp/")
            && way.contains("; UCX_TLS=tcp, ")),
        "{ways:?}"
    );
    let ways = measure(
        &[("UCX_TLS", "sysv")],
        &["--remote-ratio", "1", "--client-threads", "2"],
    );
    assert!(
        ways.iter()
            .all(|way| way.contains(" by sysv/memory; UCX_TLS=sysv, ")),
        "{ways:?}"
    );
}

/// On one host UCX uses shared memory, but not if it has to detect dead peers. UCX's log does not
/// mix with the result.
#[test]
#[ignore = "needs libucx0"]
fn the_mode_of_errors_decides_over_shared_memory() {
    let shared = |ways: &[String]| ways.iter().any(|way| way.contains("/memory"));
    let ways = measure(&[("UCX_LOG_LEVEL", "info")], &["--queue-depth", "1"]);
    assert!(
        shared(&ways)
            && ways
                .iter()
                .all(|way| way.contains("; UCX_TLS unset, UCX_NET_DEVICES unset")),
        "{ways:?}"
    );
    let ways = measure(&[], &["--ucx-errors", "peer"]);
    assert!(!shared(&ways), "{ways:?}");
}

/// The ranks have far more operations outstanding than their windows hold, all to all.
#[test]
#[ignore = "needs libucx0"]
fn ranks_that_overrun_their_windows_do_not_wait_for_each_other() {
    measure(
        &[],
        &[
            "--ranks",
            "3",
            "--remote-ratio",
            "1",
            "--client-threads",
            "2",
            "--queue-depth",
            "2048",
        ],
    );
}

/// The `--backend` of the test overrides the `--backend` of [`measure`], which is earlier.
#[test]
#[ignore = "needs libucx0"]
fn it_carries_requests_on_every_way() {
    for backend in ["meta", "sharded", "direct"] {
        let args = [
            "--backend",
            backend,
            "--carrier",
            "ucx-am",
            "--server-threads",
            "2",
            "--remote-ratio",
            "1",
            "--client-threads",
            "2",
        ];
        measure(&[], &args);
    }
}

#[test]
#[ignore = "needs libucx0"]
fn a_corrupted_value_is_seen() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = [
        "--backend",
        "ucx-am",
        "--remote-ratio",
        "1",
        "--fault",
        "corrupt-value",
    ];
    let ended = Job::start(benchkv(&SHORT).args(args).arg("--shm-dir").arg(dir.path())).end();
    ended.assert_failed(
        3,
        &["the result is unsound: 0 operations lost, 1 verify failures"],
    );
}

/// A rank detects the death of its peer as with other backends, if UCX has to detect dead peers.
#[test]
#[ignore = "needs libucx0"]
fn a_rank_notices_by_itself_that_the_other_was_killed() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let (job, ranks) =
        start_and_load_with(&dir, &["--backend", "ucx-am", "--ucx-errors", "peer"], 2);
    assert_survivor_notices(job, &ranks, 0);
}

/// Over shared memory UCX detects nothing, and the launcher ends the job.
#[test]
#[ignore = "needs libucx0"]
fn a_killed_rank_ends_a_job_over_shared_memory() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let (job, ranks) = start_and_load_with(&dir, &["--backend", "ucx-am"], 2);
    ranks[1].signal(libc::SIGKILL);
    job.end().assert_failed(
        1,
        &[
            "benchkv: rank 0: rank 1 ",
            "benchkv: rank 1 was killed by signal 9 (SIGKILL)",
        ],
    );
    assert!(ranks.iter().all(|rank| rank.has_ended()));
}

/// The loader finds a file of this name that is not a library, with or without UCX.
#[test]
fn without_the_library_a_job_is_refused_before_a_process_is_started() {
    let dir = Scratch::on_disk();
    fs::write(dir.path().join("libucp.so.0"), "none").unwrap();
    let ended =
        Job::start(benchkv(&["--backend", "ucx-am"]).env("LD_LIBRARY_PATH", dir.path())).end();
    ended.assert_failed(
        2,
        &[
            "benchkv: ucx-am needs UCX (",
            "libucp.so.0",
            "apt-get install libucx0",
            "another --backend needs none",
        ],
    );
    assert!(
        !ended.stderr.contains("rank 0") && ended.stdout.is_empty(),
        "{}",
        ended.stderr
    );
}
