//! What a person reads and what a program reads.

use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;

use benchkv::result::JobResult;
use serde_json::Value;

use crate::job::{Job, SHORT, Scratch, TWO_BACKENDS, benchkv, run, turn};

/// The cells that show, for a row of the ranks' table: three rates of two words, then counts.
fn cells(stdout: &str, rank: &str) -> Vec<String> {
    let row = stdout.lines().find(|line| line.split_whitespace().next() == Some(rank));
    row.unwrap_or_else(|| panic!("no row for {rank}: {stdout}")).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn the_table_goes_to_standard_output_and_the_plan_to_standard_error() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let ended = run(&dir, &["--backend", backend]);
        assert!(ended.status.success(), "{}", ended.stderr);
        let out = &ended.stdout;
        for rank in ["0", "1", "all"] {
            let cells = cells(out, rank);
            for rate in [1, 3, 5] {
                assert!(cells[rate].parse::<f64>().unwrap() > 0.0 && cells[rate + 1].ends_with("/s"), "local, remote, total: {cells:?}");
            }
            assert!(cells[7].parse::<u64>().unwrap() > 0, "issued: {cells:?}");
            assert_eq!(cells[8..11], ["0", "0", "0"], "errors, lost, verify failures: {cells:?}");
        }
        for part in ["rank ", "round trip", "p50", "p99", "p99.9", "max", "remote  ", "soft device", "Unix-socket echo", "Little's law"] {
            assert!(out.contains(part), "{part:?} is missing: {out}");
        }
        for part in [backend, "2 ranks x (1 daemon + 1 client)", "seed 1", "usable cores", "wait "] {
            assert!(ended.stderr.contains(part), "{part:?} is missing: {}", ended.stderr);
        }
        assert!(!ended.stderr.contains("benchkv:"), "a success has no complaint: {}", ended.stderr);
        assert!(
            !ended.stderr.contains("run 1 of 1") && !ended.stderr.contains(['\r', '\u{1b}']),
            "no progress in a file: {}",
            ended.stderr
        );
    }
}

/// Every key that a program may rely on, by the issue that asked for the document.
#[track_caller]
fn assert_complete(result: &Value) {
    let text = ["backend", "device"];
    let numbers = ["schema_version", "ranks", "server_threads", "client_threads", "queue_depth", "total_rps", "local_ops", "remote_ops"];
    let counts = ["issued", "completed", "errors", "lost", "verify_failures"];
    let latencies = ["mean", "p50", "p99", "p999", "max"];
    assert!(text.iter().all(|key| result[key].is_string()), "{result}");
    for key in numbers.iter().chain(&counts) {
        assert!(result[key].is_number(), "{key}: {result}");
    }
    let latency = latencies.map(|key| result["latency_ns"][key].as_f64().unwrap_or_else(|| panic!("{key}: {result}")));
    assert!(latency[1] > 0.0 && latency[1..].is_sorted(), "percentiles rise: {latency:?}");
    assert_eq!(result["runs"].as_array().map(Vec::len), Some(1), "{result}");
    assert_eq!(result["per_rank"].as_array().map(Vec::len), Some(2), "{result}");
    let ended = ["completed", "errors", "lost"].map(|key| result[key].as_u64().unwrap());
    assert_eq!(result["issued"].as_u64().unwrap(), ended.iter().sum::<u64>(), "{result}");
}

#[test]
fn json_to_standard_output_is_exactly_one_document() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let ended = run(&dir, &["--backend", backend, "--ranks", "2", "--verify", "--json", "-"]);
        let result = ended.result();
        assert_complete(&result);
        assert_eq!((&result["backend"], &result["device"]), (&Value::from(backend), &Value::from("soft")));
        assert!(ended.stderr.contains("round trip"), "the table makes room: {}", ended.stderr);
        let typed: JobResult = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(serde_json::to_value(&typed).unwrap(), result, "what is written reads back as the same");
    }
}

/// A pseudo-terminal: what it shows, and where a process writes to it.
fn terminal() -> (File, File) {
    let (mut screen, mut end) = (0, 0);
    let none = std::ptr::null_mut();
    // SAFETY: both descriptors are written to live variables; name, attributes and size are left to the system.
    let status = unsafe { libc::openpty(&raw mut screen, &raw mut end, none, none.cast(), none.cast()) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call succeeded, so both are open descriptors that nobody else owns.
    unsafe { (File::from_raw_fd(screen), File::from_raw_fd(end)) }
}

#[test]
fn progress_is_shown_on_a_terminal_and_gone_before_the_table() {
    let (_turn, dir, (mut screen, end)) = (turn(), Scratch::in_memory(), terminal());
    let reader = std::thread::spawn(move || {
        let (mut shown, mut some) = (Vec::new(), [0; 1024]);
        // An error is the end: all processes have closed it.
        while let Ok(count @ 1..) = screen.read(&mut some) {
            shown.extend_from_slice(&some[..count]);
        }
        String::from_utf8_lossy(&shown).into_owned()
    });
    let mut command = benchkv(&["--json", "-"]);
    let job = Job::start_on(end, command.args(SHORT).arg("--shm-dir").arg(dir.path()));
    drop(command);
    let ended = job.end();
    let shown = reader.join().unwrap();
    assert_complete(&ended.result());
    let at = |part: &str| shown.rfind(part).unwrap_or_else(|| panic!("{part:?} is missing: {shown}"));
    assert!(at("warming up") < at("run 1 of 1") && at("run 1 of 1") < at("round trip"), "{shown}");
    assert!(at(" left") < at("round trip"), "{shown}");
    let table = shown.lines().find(|line| line.contains("benchkv delegation:")).unwrap();
    // The line is erased, and the table begins where it began.
    assert!(table.rsplit('\u{1b}').next().unwrap().trim_start_matches("[2K").starts_with("benchkv delegation:"), "{table:?}");
}

#[test]
fn json_to_a_file_replaces_it_and_leaves_the_table_where_it_was() {
    let (_turn, dir, files) = (turn(), Scratch::in_memory(), Scratch::on_disk());
    let file = files.path().join("result.json");
    std::fs::write(&file, "an older and longer result ".repeat(10_000)).unwrap();
    let ended = run(&dir, &["--json", file.to_str().unwrap()]);
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(ended.stdout.contains("round trip") && !ended.stdout.contains("schema_version"), "{}", ended.stdout);
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_complete(&result);
    assert_eq!(cells(&ended.stdout, "all")[7], result["issued"].to_string(), "table and document are of the same job");
    assert_eq!(files.names(), ["result.json"]);
}

/// Nothing that is missing is a failure, on a machine without anything as on any other.
#[test]
fn the_doctor_says_what_is_missing_and_succeeds() {
    let doctor = |args: &[&str]| Job::start(benchkv(&["doctor"]).args(args).env("PATH", "/nonexistent")).end();
    let text = doctor(&["--shm-dir", "/nonexistent"]);
    assert!(text.status.success() && text.stderr.is_empty(), "{}: {}", text.status, text.stderr);
    let json = doctor(&["--json", "-"]);
    let checks = json.result()["checks"].as_array().unwrap().clone();
    assert!(json.stderr.contains("-> "), "the text makes room: {}", json.stderr);
    let status = |name: &str| checks.iter().find(|check| check["name"] == name).map(|check| check["status"].clone());
    assert_eq!((status("mpirun"), status("shared memory")), (Some("missing".into()), Some("ok".into())), "{checks:?}");
    let says = |name: &str, status: &str| {
        let mut lines = text.stdout.lines().skip_while(|line| !line.contains(&format!(" {name}  ")));
        let (line, advice) = (lines.next().unwrap(), lines.next().unwrap());
        assert!(line.starts_with(status) && advice.trim_start().starts_with("-> "), "{line}: {advice}");
    };
    says("mpirun", "missing");
    says("shared memory", "missing");
    for check in checks {
        assert!(text.stdout.contains(check["name"].as_str().unwrap()), "{check}");
        assert_eq!(check["advice"].is_null(), check["status"] == "ok", "{check}");
    }
}

#[test]
fn the_doctor_takes_no_options_of_a_job() {
    let ended = Job::start(&mut benchkv(&["--ranks", "2", "doctor"])).end();
    ended.assert_failed(2, &["doctor"]);
}
