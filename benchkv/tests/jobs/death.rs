//! Ranks and launchers that are killed, at the start and in mid-run: the other ranks end by
//! themselves with an error that names the dead rank. The directory is clean after the job; if the
//! launcher was killed, after the next job. No test asserts a duration; tests with a limit print
//! it.

use std::time::{Duration, Instant};

use benchkv::result::JobResult;

use crate::job::{
    BACKENDS, Job, Process, Scratch, TICKS_OF_LOAD, TICKS_OF_RUN, TWO_BACKENDS, benchkv, run, turn,
};

/// Starts a job that would run for a minute.
pub(crate) fn start(dir: &Scratch, args: &[&str], ranks: usize) -> Job {
    let ranks = ranks.to_string();
    let all = [
        "--ranks",
        &ranks,
        "--duration",
        "60",
        "--runs",
        "1",
        "--warmup",
        "0",
        "--json",
        "-",
    ];
    Job::start(benchkv(&all).args(args).arg("--shm-dir").arg(dir.path()))
}

/// Starts a long job. Returns the job and its ranks once all ranks are under load.
fn start_and_load(dir: &Scratch, backend: &str, ranks: usize) -> (Job, Vec<Process>) {
    start_and_load_with(dir, &["--backend", backend], ranks)
}

/// Like [`start_and_load`], with these arguments.
pub(crate) fn start_and_load_with(
    dir: &Scratch,
    args: &[&str],
    ranks: usize,
) -> (Job, Vec<Process>) {
    let job = start(dir, args, ranks);
    let processes: Vec<Process> = (0..ranks).map(|rank| job.rank(rank)).collect();
    for process in &processes {
        for thread in ["client-0", "daemon-0"] {
            job.until_used(*process, thread, TICKS_OF_LOAD);
        }
    }
    (job, processes)
}

/// Asserts that the next job removes all files of earlier jobs.
#[track_caller]
fn assert_next_job_cleans(dir: &Scratch, backend: &str) {
    let next = run(dir, &["--backend", backend]);
    assert!(next.status.success(), "{}", next.stderr);
    dir.assert_empty();
}

#[track_caller]
fn assert_all_end(job: &Job, processes: &[Process]) {
    for process in processes {
        job.until("every rank has ended", || process.has_ended().then_some(()));
    }
}

/// Kills rank `dead` of two. The launcher is stopped, so the survivor detects the death only
/// through its connections.
#[track_caller]
pub(crate) fn assert_survivor_notices(job: Job, ranks: &[Process], dead: usize) {
    let survivor = 1 - dead;
    job.launcher().signal(libc::SIGSTOP);
    job.until("the launcher is stopped", || {
        job.launcher().is_stopped().then_some(())
    });
    ranks[dead].signal(libc::SIGKILL);
    let killed = Instant::now();
    assert_all_end(&job, &ranks[survivor..=survivor]);
    eprintln!(
        "rank {survivor} ended {:?} after rank {dead} was killed",
        killed.elapsed()
    );
    let said = format!("benchkv: rank {survivor}: rank {dead} is lost: ");
    assert!(
        job.stderr().contains(&said),
        "{said:?} is missing: {}",
        job.stderr()
    );
    assert!(
        job.launcher().is_stopped(),
        "the launcher had no part in it"
    );

    job.launcher().signal(libc::SIGCONT);
    job.end().assert_failed(
        1,
        &[&format!(
            "benchkv: rank {dead} was killed by signal 9 (SIGKILL)"
        )],
    );
}

#[test]
fn a_rank_notices_by_itself_that_the_other_was_killed() {
    for (number, backend) in BACKENDS.into_iter().enumerate() {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_and_load(&dir, backend, 2);
        assert_survivor_notices(job, &ranks, number % 2);
        dir.assert_empty();
    }
}

#[test]
fn of_three_ranks_both_survivors_name_the_killed_one() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_and_load(&dir, backend, 3);
        ranks[1].signal(libc::SIGKILL);
        let ended = job.end();
        ended.assert_failed(
            1,
            &[
                "benchkv: rank 0: rank 1 ",
                "benchkv: rank 2: rank 1 ",
                "benchkv: rank 1 was killed by signal 9 (SIGKILL)",
            ],
        );
        assert!(ranks.iter().all(|rank| rank.has_ended()));
        dir.assert_empty();
    }
}

/// Kills a rank between its first instruction and the run, through baseline and set-up.
#[test]
fn a_rank_that_dies_at_the_start_ends_the_job() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let moments = [0, 3, 10, 30, 100, 300, 600, 700].map(Duration::from_millis);
    for (number, moment) in moments.into_iter().enumerate() {
        let (backend, dead) = (BACKENDS[number % BACKENDS.len()], number / 4);
        let job = start(&dir, &["--backend", backend], 2);
        let rank = job.rank(dead);
        std::thread::sleep(moment);
        rank.signal(libc::SIGKILL);
        let ended = job.end();
        ended.assert_failed(
            1,
            &[&format!(
                "benchkv: rank {dead} was killed by signal 9 (SIGKILL)"
            )],
        );
        // The survivor names the dead rank: as lost, or as a rank to which it cannot connect.
        let (survivor, dead) = (
            format!("benchkv: rank {}: ", 1 - dead),
            format!("rank {dead}"),
        );
        let mut told = ended
            .stderr
            .lines()
            .filter_map(|line| line.strip_prefix(&*survivor));
        assert!(told.any(|cause| cause.contains(&dead)), "{}", ended.stderr);
    }
    dir.assert_empty();
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_and_load(&dir, backend, 2);
        job.launcher().signal(libc::SIGKILL);
        assert_all_end(&job, &ranks);
        assert_eq!(job.end().status.code(), None);
        assert_next_job_cleans(&dir, backend);
    }
}

/// A single rank opens no device, so only a launcher cleans up.
#[test]
fn what_a_killed_rank_left_is_removed_by_its_launcher() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let (job, ranks) = start_and_load(&dir, "delegation", 1);
    ranks[0].signal(libc::SIGKILL);
    job.end()
        .assert_failed(1, &["benchkv: rank 0 was killed by signal 9 (SIGKILL)"]);
    dir.assert_empty();
}

/// The launcher is stopped before it can see the end of its rank. If it were killed first, the rank
/// might have time to clean up.
#[test]
fn what_a_killed_job_left_is_removed_by_the_next_launcher() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let (job, ranks) = start_and_load(&dir, "delegation", 1);
    job.launcher().signal(libc::SIGSTOP);
    job.until("the launcher is stopped", || {
        job.launcher().is_stopped().then_some(())
    });
    ranks[0].signal(libc::SIGKILL);
    assert_all_end(&job, &ranks);
    job.launcher().signal(libc::SIGKILL);
    assert_eq!(job.end().status.code(), None);
    let left = dir.names().len();
    assert!(left > 0, "there is something to clean");
    let next = run(&dir, &["--ranks", "1"]);
    assert!(
        next.status.success()
            && next
                .stderr
                .contains(&format!("removed {left} shared-memory regions")),
        "{}",
        next.stderr
    );
    dir.assert_empty();
}

/// The ways to end a job, and the exit status: by Ctrl-C, by `timeout` or systemd, by a terminal
/// that closes, and by a signal to benchkv alone.
const INTERRUPTS: [(libc::c_int, Whom, i32); 4] = [
    (libc::SIGINT, Whom::All, 130),
    (libc::SIGTERM, Whom::All, 143),
    (libc::SIGHUP, Whom::All, 129),
    (libc::SIGTERM, Whom::Launcher, 143),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whom {
    Launcher,
    /// The launcher first, and then the launcher again with all other processes, as `timeout` does.
    All,
}

fn interrupt(job: &Job, signal: libc::c_int, whom: Whom) {
    job.launcher().signal(signal);
    if whom == Whom::All {
        job.group().signal(signal);
    }
}

#[test]
fn an_interrupted_job_tells_what_it_has_measured_and_leaves_nothing() {
    for ((signal, whom, code), backend) in
        INTERRUPTS.into_iter().zip(TWO_BACKENDS.into_iter().cycle())
    {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_and_load(&dir, backend, 2);
        ranks
            .iter()
            .for_each(|rank| job.until_used(*rank, "client-0", TICKS_OF_RUN));
        interrupt(&job, signal, whom);
        let ended = job.end();
        ended.assert_failed(
            code,
            &[
                "1 of 1 run, interrupted",
                &format!("benchkv: interrupted by signal {signal} (SIG"),
            ],
        );
        assert!(ranks.iter().all(|rank| rank.has_ended()));
        let result: JobResult = serde_json::from_str(&ended.stdout).unwrap();
        assert!(
            result.interrupted && result.is_sound() && result.fate.issued == result.fate.completed,
            "{}",
            ended.stdout
        );
        let [run] = &result.runs[..] else {
            panic!("one run: {}", ended.stdout)
        };
        assert!(
            run.duration_s < 60.0 && run.measured.local_ops > 0 && run.measured.remote_ops > 0,
            "{}",
            ended.stdout
        );
        dir.assert_empty();
    }
}

/// The moments are in the windows, in the barriers between windows, in the drain and after the
/// drain.
#[test]
fn an_interrupt_at_any_moment_of_the_run_ends_a_job_in_order() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    for (moment, (signal, whom, code)) in [0, 40, 80, 120, 160, 240]
        .map(Duration::from_millis)
        .into_iter()
        .zip(INTERRUPTS.into_iter().cycle())
    {
        let args = [
            "--duration",
            "0.02",
            "--runs",
            "5",
            "--warmup",
            "0.02",
            "--json",
            "-",
            "--shm-dir",
        ];
        let job = Job::start(benchkv(&args).arg(dir.path()));
        let rank = job.rank(0);
        job.until("the client has started", || rank.thread_ticks("client-0"));
        std::thread::sleep(moment);
        if !job.launcher().has_ended() {
            interrupt(&job, signal, whom);
        }
        let ended = job.end();
        assert!(
            [Some(0), Some(code)].contains(&ended.status.code()),
            "{}: {}",
            ended.status,
            ended.stderr
        );
        if !ended.stdout.is_empty() {
            let result: JobResult = serde_json::from_str(&ended.stdout).unwrap();
            assert!(
                result.is_sound() && (1..=5).contains(&result.runs.len()),
                "{}",
                ended.stdout
            );
            assert!(
                result.interrupted || result.runs.len() == 5,
                "{}",
                ended.stdout
            );
        }
        dir.assert_empty();
    }
}

#[test]
fn in_the_warm_up_an_interrupt_leaves_no_result() {
    for (signal, whom, code) in INTERRUPTS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let job =
            Job::start(benchkv(&["--warmup", "60", "--json", "-", "--shm-dir"]).arg(dir.path()));
        let rank = job.rank(0);
        job.until_used(rank, "client-0", TICKS_OF_RUN);
        interrupt(&job, signal, whom);
        let ended = job.end();
        ended.assert_failed(
            code,
            &["benchkv: interrupted before anything was measured: there is no result"],
        );
        assert_eq!(ended.stdout, "");
        dir.assert_empty();
    }
}

#[test]
fn an_interrupt_before_the_run_ends_a_job_and_leaves_nothing() {
    for (moment, (signal, whom, code)) in [0, 50, 400]
        .into_iter()
        .flat_map(|ms| INTERRUPTS.map(|how| (Duration::from_millis(ms), how)))
    {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let job = start(&dir, &["--backend", "delegation"], 2);
        let ranks = [job.rank(0), job.rank(1)];
        std::thread::sleep(moment);
        interrupt(&job, signal, whom);
        job.end()
            .assert_failed(code, &[&format!("benchkv: interrupted by signal {signal}")]);
        assert!(ranks.iter().all(|rank| rank.has_ended()));
        dir.assert_empty();
    }
}

/// A rank that is stopped cannot end by itself, and the other rank waits for it.
#[test]
fn a_later_interrupt_kills_what_the_first_did_not_end() {
    for (backend, (signal, whom, code)) in TWO_BACKENDS.into_iter().zip(INTERRUPTS) {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let (job, ranks) = start_and_load(&dir, backend, 2);
        ranks[1].signal(libc::SIGSTOP);
        job.until("a rank is stopped", || ranks[1].is_stopped().then_some(()));
        while !ranks.iter().all(|rank| rank.has_ended()) {
            interrupt(&job, signal, whom);
            std::thread::sleep(Duration::from_millis(200));
        }
        job.end()
            .assert_failed(code, &[&format!("benchkv: interrupted by signal {signal}")]);
        assert!(ranks.iter().all(|rank| rank.has_ended()));
        dir.assert_empty();
    }
}
