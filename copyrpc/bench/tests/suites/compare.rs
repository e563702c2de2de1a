//! `scalerpc_bench compare`: the contestants, and the behaviour after errors.

use std::fs;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{self, SCALERPC_BENCH, Scratch, stderr};

const CONTESTANTS: [&str; 5] = ["scalerpc", "scalerpc-off", "copyrpc", "rc-send", "ud-send"];
/// Maximum time to wait for a state of a job.
const WATCHDOG: Duration = Duration::from_secs(60);
/// Clock ticks that the clients use before they count as under load: several times the ticks of
/// their set-up.
const TICKS_OF_LOAD: u64 = 20;

fn run(args: &str) -> Output {
    support::run(SCALERPC_BENCH, &format!("{args} --wait yield"))
}

fn result(args: &str) -> Value {
    support::result(SCALERPC_BENCH, &format!("{args} --wait yield"))
}

#[track_caller]
fn assert_sound(result: &Value, load: &str) {
    for contestant in CONTESTANTS {
        let figures = &result["figures"][load][contestant];
        assert!(
            figures["calls"].as_u64() > Some(0),
            "{load}, {contestant}: {figures}"
        );
        for defect in ["not_executed_once", "bad_payloads"] {
            assert_eq!(figures[defect], 0, "{load}, {contestant}: {figures}");
        }
        for figure in ["calls_per_s", "ns_per_call_of_blocks", "slowest_vs_fastest"] {
            assert!(
                figures[figure]["min"].as_f64() > Some(0.0),
                "{load}, {contestant}: {figures}"
            );
        }
    }
}

/// `compare` is the default command.
#[test]
fn each_contestant_executes_every_call_once_and_is_put_beside_scalerpc() {
    let result =
        result("--rounds 2 --duration 0.02 --clients 2,6 --group 2 --depth 3 --payload 100");
    assert_eq!(
        (&result["schema"], &result["schema_version"]),
        (&"copyrpc_bench".into(), &3.into())
    );
    for load in ["round_trip", "rate_2x3", "rate_6x3"] {
        assert_sound(&result, load);
        let ratios = result["ratios"][load].as_object().unwrap();
        assert!(
            ratios
                .values()
                .all(|ratio| ratio["median"].as_f64() > Some(0.0)),
            "{ratios:?}"
        );
        assert_eq!(
            ratios.keys().map(String::as_str).collect::<Vec<_>>(),
            ["copyrpc", "rc-send", "scalerpc-off", "ud-send"]
        );
    }
    let count = |load: &str, counter: &str| {
        let runs = result["figures"][load]["scalerpc"]["runs"]
            .as_array()
            .unwrap();
        let of_run = |run: &Value| run["server"][counter].as_u64().unwrap();
        runs.iter().map(of_run).sum::<u64>()
    };
    // A single group has one slice in each round of the job; with several groups, slices follow
    // each other.
    assert_eq!(
        (count("rate_2x3", "groups"), count("rate_2x3", "slices")),
        (2, 2),
        "{result}"
    );
    assert!(
        count("rate_6x3", "groups") >= 4 && count("rate_6x3", "slices") > 4,
        "{result}"
    );
    // For a further client ScaleRPC registers an endpoint entry; copyrpc two rings; rc-send and
    // ud-send a message for each slot and direction.
    let further = |contestant: &str| {
        result["server_registered_bytes_per_further_client"][contestant].as_f64()
    };
    assert_eq!(
        (further("scalerpc"), further("copyrpc")),
        (Some(64.0), Some(131_072.0))
    );
    assert_eq!(
        (further("rc-send"), further("ud-send")),
        (Some(3.0 * 2.0 * 128.0), Some(3.0 * (128.0 + 192.0)))
    );
    for contestant in CONTESTANTS {
        let figures = &result["figures"]["rate_6x3"][contestant];
        assert!(
            figures["server_bytes"].as_u64() > figures["server_registered_bytes"].as_u64(),
            "queues and bookkeeping take memory beside what is registered: {figures}"
        );
    }
    assert!(
        result["environment"]["kernel"]
            .as_str()
            .unwrap()
            .starts_with("Linux")
    );
}

/// The lengths are the minimum, the maximum, and lengths around the limit up to which a payload is
/// in the WQE.
#[test]
fn payloads_of_every_kind_of_length_are_right() {
    for bytes in [8, 56, 57, 333, 4056] {
        let result = result(&format!(
            "compare --rounds 1 --duration 0.01 --clients 3 --depth 32 --payload {bytes}"
        ));
        assert_sound(&result, "rate_3x32");
    }
}

/// Runs on a device of libibverbs: a NIC, or the software HCA under the real libraries.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn each_contestant_is_sound_on_hardware() {
    let device = std::env::var("SCALERPC_TEST_DEVICE").unwrap_or_else(|_| "mlx5_0".to_owned());
    let result = result(&format!(
        "--device {device} --rounds 1 --duration 0.01 --clients 2,5 --group 2 --payload 100"
    ));
    for load in ["round_trip", "rate_2x8", "rate_5x8"] {
        assert_sound(&result, load);
    }
    assert!(
        result["device"].as_str().unwrap().starts_with(&device),
        "{result}"
    );
}

#[test]
fn a_wrong_bit_in_a_request_or_a_reply_is_noticed() {
    for contestant in CONTESTANTS {
        for fault in ["corrupt-request", "corrupt-reply"] {
            let output = run(&format!(
                "compare --contestants {contestant} --rounds 1 --duration 0.01 --clients 2 --fault {fault}"
            ));
            assert_eq!(
                output.status.code(),
                Some(3),
                "{contestant}, {fault}: {}",
                stderr(&output)
            );
            assert!(
                stderr(&output).contains("payloads were not the right ones"),
                "{contestant}, {fault}: {}",
                stderr(&output)
            );
        }
    }
}

#[test]
fn options_that_cannot_be_honoured_are_refused_before_anything_starts() {
    for (args, legal) in [
        ("--depth 33", "1 to 32"),
        ("--clients 8,200", "1 to 112 with ud-send"),
        ("compare --group 51", "1..=50"),
        ("--json /nowhere/x", "--json"),
        ("--contestants erpc", "ud-send"),
        ("--wait event", "yield"),
    ] {
        let output = support::run(SCALERPC_BENCH, args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        let said = stderr(&output);
        assert!(
            said.contains(legal) && !said.contains("in turn"),
            "{args}: {said}"
        );
    }
}

#[test]
fn auto_takes_the_device_that_the_environment_names_and_says_so() {
    let short = "--contestants scalerpc --rounds 1 --duration 0.01 --clients 1";
    support::assert_auto_takes_the_named_device(SCALERPC_BENCH, short);
}

#[test]
fn a_server_that_cannot_be_made_says_why() {
    for contestant in CONTESTANTS {
        let output = run(&format!("--device mlx5_none --contestants {contestant}"));
        assert_eq!(
            output.status.code(),
            Some(1),
            "{contestant}: {}",
            stderr(&output)
        );
        let said = stderr(&output);
        let of_server = said.lines().find(|line| {
            line.starts_with(&format!(
                "scalerpc_bench: rank 1: {contestant}, round_trip: "
            ))
        });
        // The error names the missing device or library, not the end of a thread.
        assert!(
            of_server.is_some_and(|line| line.contains("mlx5_none") || line.contains("libibverbs")),
            "{contestant}: {said}"
        );
    }
}

#[test]
fn one_of_several_processes_does_not_start_a_job_of_its_own() {
    support::assert_alone(SCALERPC_BENCH);
}

/// A job that is killed with the end of the test, in every case.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(start.elapsed() < WATCHDOG, "it never came to this: {what}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Job {
    /// Returns the process id of a rank of the job.
    fn rank(&self, rank: usize) -> u32 {
        let is_rank = |pid: &u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let role = format!("BENCH_HARNESS_ROLE={{\"rank\":{rank},");
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            status.contains(&format!("\nPPid:\t{}\n", self.0.id()))
                && environment
                    .split(|byte| *byte == 0)
                    .any(|variable| variable.starts_with(role.as_bytes()))
        };
        let pids = || {
            fs::read_dir("/proc")
                .unwrap()
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        };
        until("the rank has a process", || pids().find(is_rank))
    }
}

/// Returns the clock ticks that a process has used; see proc_pid_stat(5).
fn ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain parentheses.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(number(11)? + number(12)?)
}

#[test]
fn a_killed_server_ends_the_clients_which_say_so_and_nothing_stays() {
    for contestant in CONTESTANTS {
        let scratch = Scratch::new();
        let args = format!(
            "compare --contestants {contestant} --rounds 1 --duration 60 --clients 2 --wait yield"
        );
        let mut job = Job(scratch
            .command(SCALERPC_BENCH, &args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap());
        let (clients, server) = (job.rank(0), job.rank(1));
        until("the clients are under load", || {
            ticks(clients).filter(|used| *used >= TICKS_OF_LOAD)
        });
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::kill(server as i32, libc::SIGKILL) }, 0);
        let status = until("the job has ended", || job.0.try_wait().unwrap());
        let mut said = String::new();
        std::io::Read::read_to_string(job.0.stderr.as_mut().unwrap(), &mut said).unwrap();
        assert_eq!(status.code(), Some(1), "{contestant}: {said}");
        assert!(
            said.contains("scalerpc_bench: rank 1 was killed by signal 9 (SIGKILL)"),
            "{contestant}: {said}"
        );
        // The clients were not killed with the server.
        assert!(
            said.contains(&format!(
                "scalerpc_bench: rank 0: {contestant}, round_trip: "
            )),
            "{contestant}: {said}"
        );

        // The next job removes the files of the dead process.
        let next = scratch
            .command(
                SCALERPC_BENCH,
                "--contestants scalerpc --rounds 1 --duration 0.01 --clients 1",
            )
            .output()
            .unwrap();
        assert!(next.status.success(), "{contestant}: {}", stderr(&next));
        assert_eq!(scratch.files(), 0, "{contestant}");
    }
}
