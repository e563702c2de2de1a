//! The launcher and its exchange with real processes, through the `launch-probe` binary.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failing test panics; clippy's exemption covers #[test] functions only"
)]

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of a probe; a longer one is killed and the test fails.
const WATCHDOG: Duration = Duration::from_secs(30);

fn start(ranks: usize, deed: &str, doer: usize) -> Child {
    probe(ranks, deed, doer).spawn().unwrap()
}

fn probe(ranks: usize, deed: &str, doer: usize) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch-probe"));
    command.args([ranks.to_string().as_str(), deed, doer.to_string().as_str()]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // The shell that runs the tests may have these signals ignored, as for nohup and background
    // jobs of a script.
    dispose(
        &mut command,
        [libc::SIGINT, libc::SIGTERM, libc::SIGHUP],
        libc::SIG_DFL,
    );
    command
}

/// Starts the program with this disposition of `signals`.
fn dispose<const N: usize>(
    command: &mut Command,
    signals: [libc::c_int; N],
    disposition: libc::sighandler_t,
) {
    // SAFETY: signal is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            for signal in signals {
                libc::signal(signal, disposition);
            }
            Ok(())
        });
    }
}

/// Waits for the end. Reads the pipes afterwards, because the probe's output is far below a pipe's
/// capacity.
fn finish(mut launcher: Child) -> Output {
    let start = Instant::now();
    while launcher.try_wait().unwrap().is_none() {
        if start.elapsed() > WATCHDOG {
            launcher.kill().unwrap();
            let output = launcher.wait_with_output().unwrap();
            panic!("the launcher did not end: {output:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    launcher.wait_with_output().unwrap()
}

fn run(ranks: usize, deed: &str, doer: usize) -> Output {
    finish(start(ranks, deed, doer))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads the next line of rank 0 on standard output.
fn line(launcher: &mut Child) -> String {
    let out = launcher.stdout.as_mut().unwrap();
    let mut line = Vec::new();
    let mut byte = [0];
    while out.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    text(&line)
}

/// Reads the process ids of all ranks from rank 0's first line on standard output.
fn pids(launcher: &mut Child) -> Vec<libc::pid_t> {
    line(launcher)
        .split_once("sees ")
        .unwrap()
        .1
        .split(' ')
        .map(|pid| pid.parse().unwrap())
        .collect()
}

fn send_signal(pid: libc::pid_t, signal: libc::c_int) {
    // SAFETY: kill takes two integers; `pid` is a process this test started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn is_gone(pid: libc::pid_t) -> bool {
    // A zombie still has its directory; its command line is empty.
    std::fs::read(format!("/proc/{pid}/cmdline")).map_or(true, |line| line.is_empty())
}

fn assert_gone(pids: &[libc::pid_t]) {
    let start = Instant::now();
    while !pids.iter().all(|pid| is_gone(*pid)) {
        assert!(start.elapsed() < WATCHDOG, "left behind: {pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn all_ranks_see_all_parts_and_only_rank_0_has_stdout() {
    for ranks in [1, 2, 5] {
        let output = run(ranks, "nothing", 0);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{err}");
        assert_eq!(out.lines().count(), 1, "{out}");
        assert_eq!(err.lines().count(), ranks - 1, "{err}");
        let seen = |line: &str| line.split_once("sees ").unwrap().1.to_owned();
        let first = seen(out.lines().next().unwrap());
        assert_eq!(first.split(' ').count(), ranks);
        assert!(err.lines().all(|line| seen(line) == first), "{out}{err}");
    }
}

#[test]
fn parts_far_above_the_socket_buffer_arrive_intact() {
    let output = run(4, "large", 0);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("rank 0 large parts intact: true"));
    assert_eq!(
        text(&output.stderr)
            .matches("large parts intact: true")
            .count(),
        3
    );
    assert!(
        text(&output.stdout).contains("rank 0 gathered: true"),
        "bytes of any length"
    );
    assert_eq!(text(&output.stderr).matches("gathered: true").count(), 3);
}

#[test]
fn a_rank_that_dies_at_start_is_named_with_its_status() {
    let output = run(3, "die-at-start", 1);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(
        err.contains("launcher: rank 1 exited with status 3"),
        "{err}"
    );
    assert_eq!(
        err.matches("launch-probe: rank 1 exited with status 3")
            .count(),
        2,
        "both others are told: {err}"
    );
}

#[test]
fn a_rank_that_leaves_while_others_wait_is_named() {
    let output = run(3, "leave-early", 2);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("launcher: rank 2 ended before the others"),
        "{err}"
    );
}

#[test]
fn a_rank_that_gives_up_does_not_wait_on() {
    let err = text(&run(2, "give-up", 1).stderr);
    assert!(err.contains("launch-probe: this rank gave up"), "{err}");
    assert!(
        err.contains("launcher: rank 1 exited with status 1"),
        "{err}"
    );
}

#[test]
fn a_killed_rank_wakes_the_sleeping_others() {
    let mut launcher = start(3, "wait", 0);
    let ranks = pids(&mut launcher);
    send_signal(ranks[1], libc::SIGKILL);
    let output = finish(launcher);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("launcher: rank 1 was killed by signal 9 (SIGKILL)"),
        "{err}"
    );
    assert_eq!(
        err.matches("launch-probe: rank 1 was killed by signal 9 (SIGKILL)")
            .count(),
        2,
        "{err}"
    );
    assert_gone(&ranks);
}

#[test]
fn a_rank_that_is_stuck_after_a_failure_is_killed() {
    let mut launcher = start(2, "ignore", 0);
    let ranks = pids(&mut launcher);
    send_signal(ranks[0], libc::SIGKILL);
    let output = finish(launcher);
    assert!(
        text(&output.stderr).contains("launcher: rank 0 was killed"),
        "{output:?}"
    );
    assert_gone(&ranks);
}

#[test]
fn a_stopped_rank_is_named_by_the_exchange_and_removed() {
    let mut launcher = start(3, "pause", 0);
    let ranks = pids(&mut launcher);
    send_signal(ranks[2], libc::SIGSTOP);
    let output = finish(launcher);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert_eq!(
        err.matches("launch-probe: rank 2 did not answer within 2s")
            .count(),
        2,
        "{err}"
    );
    assert!(
        err.contains("launcher: rank 2 did not answer within 2s"),
        "{err}"
    );
    assert_gone(&ranks);
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    let mut launcher = start(2, "ignore", 0);
    let ranks = pids(&mut launcher);
    // The rank is not in an exchange any more, where the closed socket would end it.
    assert_eq!(line(&mut launcher), "rank 0 ignores everything");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_gone(&ranks);
}

#[test]
fn an_interrupt_ends_the_ranks_in_order() {
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let mut launcher = start(2, "wait", 0);
        let ranks = pids(&mut launcher);
        send_signal(launcher.id() as libc::pid_t, signal);
        let output = finish(launcher);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{err}");
        assert_eq!(err.matches("launch-probe: interrupted").count(), 2, "{err}");
        assert_gone(&ranks);
    }
}

/// A terminal, a service manager and `timeout` signal the whole group.
#[test]
fn a_signal_to_all_processes_reaches_ranks_through_the_launcher_only() {
    for (signal, code) in [
        (libc::SIGINT, 130),
        (libc::SIGTERM, 143),
        (libc::SIGHUP, 129),
    ] {
        let mut launcher = start(2, "wait", 0);
        let ranks = pids(&mut launcher);
        ranks.iter().for_each(|pid| send_signal(*pid, signal));
        send_signal(launcher.id() as libc::pid_t, signal);
        let output = finish(launcher);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(
            text(&output.stderr)
                .matches("launch-probe: interrupted")
                .count(),
            2
        );
    }
}

/// A rank is stopped while the signals are sent, so the job cannot end between two signals.
#[test]
fn signals_in_quick_succession_are_one_request() {
    for _ in 0..20 {
        let mut launcher = start(2, "wind-down", 0);
        let ranks = pids(&mut launcher);
        send_signal(ranks[1], libc::SIGSTOP);
        let begin = Instant::now();
        for _ in 0..5 {
            send_signal(launcher.id() as libc::pid_t, libc::SIGTERM);
            std::thread::sleep(Duration::from_millis(2));
        }
        let were_quick = begin.elapsed() < Duration::from_millis(250);
        send_signal(ranks[1], libc::SIGCONT);
        let output = finish(launcher);
        if were_quick {
            assert_eq!(output.status.code(), Some(143), "{output:?}");
            assert!(
                text(&output.stdout).contains("rank 0 interrupted: [[1], [1]]"),
                "{output:?}"
            );
            return;
        }
    }
    panic!("no five signals within 250 ms");
}

/// The process starts with SIGHUP ignored, as if nohup had started it.
#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let mut command = probe(2, "pause", 0);
    dispose(&mut command, [libc::SIGHUP], libc::SIG_IGN);
    let mut launcher = command.spawn().unwrap();
    pids(&mut launcher);
    send_signal(launcher.id() as libc::pid_t, libc::SIGHUP);
    let output = finish(launcher);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// The launcher sees the end of the rank that noticed a death before the end of the dead rank.
#[test]
fn the_cause_is_named_whichever_end_is_seen_first() {
    for (deed, how, code) in [
        ("precede-killed", "was killed by signal 6 (SIGABRT)", 1),
        ("precede-failed", "exited with status 7", 7),
    ] {
        let output = run(3, deed, 1);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{err}");
        assert!(err.contains(&format!("launcher: rank 1 {how}")), "{err}");
    }
}

#[test]
fn a_rank_that_does_not_end_when_all_others_follow_it_is_named() {
    let err = text(&run(3, "precede-stuck", 1).stderr);
    assert!(
        err.contains("launcher: rank 1 did not answer within 500ms: stopped, or stuck"),
        "{err}"
    );
}

#[test]
fn ranks_that_catch_interrupts_meet_once_more_unless_one_dies() {
    for dies in [false, true] {
        let mut launcher = start(2, "wind-down", 0);
        let ranks = pids(&mut launcher);
        if dies {
            send_signal(ranks[1], libc::SIGSTOP);
        }
        send_signal(launcher.id() as libc::pid_t, libc::SIGINT);
        let output = finish(launcher);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(130), "{err}");
        assert_eq!(
            out.contains("rank 0 interrupted: [[1], [1]]"),
            !dies,
            "{out}{err}"
        );
        assert_gone(&ranks);
    }
}

#[test]
fn a_later_interrupt_kills() {
    let mut launcher = start(2, "defy", 0);
    let ranks = pids(&mut launcher);
    assert_eq!(line(&mut launcher), "rank 0 ignores everything");
    // The ranks' grace period is longer than the watchdog. Later signals do not prevent the
    // launcher from reporting the reason.
    let start = Instant::now();
    while launcher.try_wait().unwrap().is_none() {
        send_signal(launcher.id() as libc::pid_t, libc::SIGINT);
        assert!(start.elapsed() < WATCHDOG, "the launcher did not end");
        std::thread::sleep(Duration::from_micros(100));
    }
    let output = finish(launcher);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(
        text(&output.stderr).contains("launcher: interrupted by signal 2 (SIGINT)"),
        "{output:?}"
    );
    assert_gone(&ranks);
}

#[test]
fn a_job_over_its_time_limit_is_ended_and_says_who_ran() {
    let output = run(2, "overrun", 0);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("did not end within 500ms; rank 0, 1 had not finished"),
        "{err}"
    );
}

#[test]
fn a_rank_that_sends_garbage_is_named_and_ended() {
    let output = run(2, "babble", 1);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("launcher: rank 1 broke the exchange protocol: it sent a malformed message of 2779096485 bytes"), "{err}");
}

#[test]
fn an_illegal_number_of_ranks_is_refused() {
    for ranks in [0, 257] {
        let err = text(&run(ranks, "nothing", 0).stderr);
        assert!(err.contains("legal are 1 to 256"), "{err}");
    }
}

#[test]
fn the_baselines_measure_round_trips() {
    for baseline in ["echo", "cache-line"] {
        let output = run(1, baseline, 0);
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let figure: f64 = out
            .lines()
            .find_map(|line| line.strip_prefix(baseline))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(figure > 0.0);
    }
}

#[test]
fn an_echo_whose_process_is_stopped_again_and_again_goes_on() {
    let mut launcher = start(1, "echo", 0);
    let child = |parent: i32| -> Option<i32> {
        let children =
            std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    };
    let begin = Instant::now();
    while launcher.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < WATCHDOG);
        let Some(rank) = child(launcher.id() as i32) else {
            continue;
        };
        // The stop finds the threads of the rank in reads of messages that have not arrived.
        for signal in [libc::SIGSTOP, libc::SIGCONT] {
            // SAFETY: no memory is involved. A number is free only when its parent has waited for
            // the process.
            unsafe { libc::kill(rank, signal) };
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("echo "), "{output:?}");
}

#[test]
fn a_role_without_its_socket_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_launch-probe"))
        .env("BENCH_HARNESS_ROLE", r#"{"rank":0,"size":2}"#)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("unset it to start a job"), "{err}");
}
