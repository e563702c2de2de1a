//! `--wait event`: threads that sleep lose no operation, do nothing while there is nothing to do,
//! and are woken by the end of a job. A thread with a lost wake-up would find its work after a
//! slice of sleep, so the tests count the polls that found nothing.

use benchkv::result::JobResult;
use serde_json::Value;

use crate::death::{assert_survivor_notices, start, start_and_load_with};
use crate::job::{BACKENDS, Job, Process, Scratch, turn};
use crate::measurement::{count, list, measure};

/// Backends with further arguments that change the events a thread sleeps on.
const VARIED: [&[&str]; 3] = [
    &["--ranks", "1"],
    &[
        "--device",
        "soft:rtt_us=6,jitter_us=20",
        "--hold",
        "adaptive",
    ],
    &["--ring-size", "4096", "--queue-depth", "256"],
];

fn sleeping(args: &[&str]) -> Value {
    let all = [
        &[
            "--wait",
            "event",
            "--server-threads",
            "2",
            "--client-threads",
            "2",
        ],
        args,
    ]
    .concat();
    let result = measure(&all);
    assert_eq!(result["options"]["wait"], "event");
    result
}

#[test]
fn every_backend_is_sound_when_its_threads_sleep() {
    for backend in BACKENDS {
        sleeping(&["--backend", backend]);
    }
    for args in VARIED {
        sleeping(args);
    }
}

#[test]
#[ignore = "needs libucx0"]
fn ucx_is_sound_when_its_threads_sleep() {
    sleeping(&["--backend", "ucx-am"]);
}

/// Threads have nothing to do most of the time. They make some rounds for each operation, and ten a
/// second besides. Threads that poll make thousands of rounds for each operation.
#[test]
fn threads_without_work_do_nothing() {
    let slow = ["--rate", "200", "--duration", "0.5"];
    let varied = [&["--backend", "delegation", "--ranks", "1"][..]];
    let each = BACKENDS.map(|backend| vec!["--backend", backend]);
    for args in each.iter().map(Vec::as_slice).chain(varied) {
        let result = sleeping(&[args, &slow].concat());
        let most = 10 * count(&result, "issued");
        for rank in list(&result, "per_rank") {
            for worker in list(rank, "daemons").iter().chain(list(rank, "clients")) {
                let loops = count(worker, "loops");
                assert!(
                    loops < most,
                    "{args:?}: {loops} rounds of one thread, {most} are more than it needs: {worker}"
                );
            }
        }
    }
}

/// Starts a long job that has little to do. Returns the job and its ranks once the load has begun.
fn start_idle(dir: &Scratch, args: &[&str]) -> (Job, Vec<Process>) {
    let job = start(
        dir,
        &[&["--wait", "event", "--rate", "1000"], args].concat(),
        2,
    );
    let ranks = vec![job.rank(0), job.rank(1)];
    for rank in &ranks {
        // Before the run the client sleeps ten times a second.
        job.until("the clients of every rank sleep between operations", || {
            rank.thread_sleeps("client-0")
                .filter(|sleeps| *sleeps > 300)
        });
    }
    (job, ranks)
}

#[test]
fn a_rank_that_sleeps_notices_by_itself_that_the_other_was_killed() {
    for (number, backend) in BACKENDS.into_iter().enumerate() {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_idle(&dir, &["--backend", backend]);
        assert_survivor_notices(job, &ranks, number % 2);
        let (job, ranks) = start_and_load_with(&dir, &["--backend", backend, "--wait", "event"], 2);
        assert_survivor_notices(job, &ranks, 1 - number % 2);
    }
}

#[test]
fn ctrl_c_wakes_who_sleeps() {
    for args in [
        &["--backend", "delegation"][..],
        &["--backend", "direct"],
        &["--backend", "meta", "--server-threads", "2"],
    ] {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_idle(&dir, args);
        job.group().signal(libc::SIGINT);
        let ended = job.end();
        ended.assert_failed(130, &["1 of 1 run, interrupted"]);
        assert!(ranks.iter().all(|rank| rank.has_ended()));
        let result: JobResult = serde_json::from_str(&ended.stdout).unwrap();
        assert!(
            result.interrupted && result.is_sound() && result.fate.issued == result.fate.completed,
            "{}",
            ended.stdout
        );
        dir.assert_empty();
    }
}
